// Sizes, memory and small tools of `layers.cu`, which says what they are for.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

constexpr int COMPUTING = 8, LOADING = 2;               // warps
constexpr int UNDER_WAY = 3;                            // pieces of weights that are asked for at a time
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int STAGE = larger(20480, 2 * ((FFN + GRID - 1) / GRID) * 128);  // bytes of a piece, at most
constexpr int QKV = (HEADS + 2 * KV) * WIDTH, GROUP = HEADS / KV, HALF = WIDTH / 2;
constexpr int QUERIES = TOKENS * GROUP, STRIPS = (QUERIES + 15) / 16;      // of a head of keys; in tiles of 16
constexpr int CREW = GRID / KV;                         // blocks that share a head of keys
constexpr int SIDE = COMPUTING / STRIPS, SEATS = CREW * SIDE;              // warps of a strip, in a block and in all
constexpr int SHARES = 4, MERGED = (QUERIES + CREW - 1) / CREW;            // of a merge; queries that a block merges
constexpr int Q_STEP = WIDTH + 8;                       // numbers from query to query in shared memory
constexpr int AHEAD = 8;                                // groups of activations under way to a warp
constexpr int PASS = 10;                                // tiles of rows whose sums are added up at a time

// A product with a weight of N rows (pairs of rows: a gate's, and those of what it gates) and K columns.
template <int N, int K_, bool PAIRED> struct Product {
    static constexpr int K = K_, MINE = (N + GRID - 1) / GRID;             // rows or pairs of a block, at most
    static constexpr int ROWS = PAIRED ? 2 * MINE : MINE, TILES = (ROWS + 7) / 8;
    __host__ __device__ static constexpr int fitting() {
        for (int parts = 1;; parts++) {
            int cols = K / parts;
            bool shared = cols % 256 == 0 || cols == 128 || cols == 64;    // by 8, 4 or 2 warps
            if (K % (64 * parts) == 0 && shared && ROWS * cols * 2 <= STAGE) return cols;
        }
    }
    static constexpr int COLS = fitting(), PIECES = K / COLS;
    static constexpr int OF_PIECE = COLS / 32, GROUPS = K / 32;            // of 32 columns, dealt out to warps in turn
    static constexpr int WARPS = OF_PIECE < COMPUTING ? OF_PIECE : COMPUTING;  // that share a piece
    static constexpr int EVERY = COMPUTING / WARPS, TURNS = OF_PIECE / WARPS;  // a warp's pieces, and groups of one
    static_assert(K % 64 == 0, "columns");
    __device__ static int first() { return blockIdx.x * N / GRID; }
    __device__ static int count() { return (blockIdx.x + 1) * N / GRID - first(); }
};
using Project = Product<QKV, DIM, false>;
using Out = Product<DIM, HEADS * WIDTH, false>;
using Gate = Product<FFN, DIM, true>;
using Down = Product<DIM, FFN, false>;

enum Phase { PROJECTED, ATTENDED, ADDED, GATED, DONE, PHASES };

struct Args {
    const bf16 *qkv, *out, *gate_up, *down;             // (L, rows, columns)
    const bf16 *input_norms, *post_norms, *q_norms, *k_norms, *biases;
    bf16* pages;                                        // (L, 2, pages, KV, PAGE, WIDTH): of keys and of values
    const int *behind, *table, *stored, *pending;       // of the request's blocks, and of the request
    const float *cosine, *sine;                         // (M, WIDTH / 2)
    bf16 *x, *scaled;
    float* squares;                                     // (GRID, M)
    bf16 *attended, *inner;
    float *projected, *mixed, *lse;
    int* done;                                          // (L, PHASES + KV): who has finished; zero at the start
    long long table_pages, pages_step;                  // numbers from keys to values, and on to the next layer
};

struct Attention {
    alignas(16) bf16 queries[STRIPS * 16 * Q_STEP];
    alignas(16) bf16 fresh[2][16 * WIDTH];      // keys and values of new tokens
    alignas(16) float merge[MERGED * SHARES][WIDTH + 4];
};
struct Other {
    union {                                             // one after the other
        uint4 tokens[COMPUTING][AHEAD][32];
        Attention attention;
        float parts[COMPUTING][PASS * 8][8 + 1];
    };
    float cosine[TOKENS][HALF], sine[TOKENS][HALF], x[TOKENS][Out::ROWS], scale[8];
    volatile int quiet;                                 // the computing warps wait for other blocks
};

constexpr int STAGES = (MEMORY - int(sizeof(Other)) - 16) / (STAGE + 16);
static_assert(STAGES >= 4, "memory");

struct Ring {
    alignas(128) unsigned char weights[STAGES][STAGE];
};
struct Shared : Ring, Other {                           // behind the last rows of a piece lies more memory
    alignas(8) u64 full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) <= MEMORY, "memory");
static_assert(TOKENS <= 8 && SIDE >= 1 && CREW >= 1, "tokens and heads");

// -- small things ----------------------------------------------------------------------------------------------------

#define NOTHING __int_as_float(0xff800000)  // minus infinity

__device__ float wide(bf16 value) { return __uint_as_float(u32(value) << 16); }
__device__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ u32 pair(float first, float second) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}
__device__ bf16 narrow(float value) { return bf16(pair(value, 0.f)); }
__device__ float rounded(float value) { return low(pair(value, 0.f)); }
__device__ float exp2_(float value) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(value));
    return out;
}
// An address in shared memory, kept in a register instead of being found again at every use.
__device__ u32 shared_address(const void* at) {
    u32 address = u32(__cvta_generic_to_shared(at));
    asm volatile("" : "+r"(address));
    return address;
}
__device__ int lane() { return threadIdx.x & 31; }
__device__ int warp() { return threadIdx.x >> 5; }

__device__ float warp_sum(float value) {
    for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

__device__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(COMPUTING * 32) : "memory"); }  // the computing warps

__device__ __noinline__ void give_up_after(long long begun) {
    if (clock64() - begun > 4000000000ll) __trap();     // two seconds: something is wrong, and nobody should wait for it
}

// Wait until others have counted up to `many`; by one thread, for all that it meets afterwards.
__device__ void await(const int* count, int many) {
    int now;
    long long begun = clock64();
    while (true) {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(count) : "memory");
        if (now >= many) return;
        give_up_after(begun);
    }
}

// What the computing warps of this block have written is there for who receives the count.
__device__ void publish(int* count) {
    meet();
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
}
__device__ void receive(const int* count, int many) {
    if (threadIdx.x == 0) await(count, many);
    meet();
}

__device__ void barrier_init(u64* barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}
template <int COUNT> __device__ void barrier_arrive(u32 barrier) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0], %1; }" ::"r"(barrier), "n"(COUNT) : "memory");
}
__device__ void barrier_arrive_when_copied(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ bool barrier_passed(u32 barrier, u32 parity) {
    u32 passed;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(passed) : "r"(barrier), "r"(parity) : "memory");
    return passed;
}
__device__ __noinline__ void barrier_wait_long(u32 barrier, u32 parity) {
    for (long long begun = clock64(); !barrier_passed(barrier, parity);) give_up_after(begun);
}
__device__ void barrier_wait(u32 barrier, u32 parity) {
    if (!barrier_passed(barrier, parity)) barrier_wait_long(barrier, parity);
}

__device__ void copy(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }  // of a group of them
template <int LEFT> __device__ void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
__device__ void copy_weight(u32 to, const void* from, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
                 : "memory");
}

__device__ uint4 load_shared(u32 from) {
    uint4 out;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "r"(from));
    return out;
}
__device__ void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
        " {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
