// All layers of a decoding forward over few tokens, in one launch.
//
// One thread block runs on every multiprocessor and stays. Of each product it has some rows of the weight, the same ones
// in every layer. Two warps stream these rows, product after product, through a ring in shared memory. They wait for
// room in the ring and for nothing else: while the blocks exchange results between two products, the weights of the next
// one are already on their way. Eight warps compute; there are at most eight tokens.
//
// The computing warps divide a product by its columns and add up what they have in the end. Norms are folded into the
// products as in `skinny.py`.
//
// Attention has a crew of blocks for every head of keys. Warps take 16 keys at a time, the new tokens first; the crew then
// merges what its warps have found, each block for some of the queries.
//
// The host defines LAYERS, DIM, HEADS, KV, WIDTH, FFN, TOKENS, BLOCK, CAUSAL (a block to commit is), PAGE, EPS, NORM, BIAS,
// GRID (blocks) and MEMORY (bytes of shared memory of a block).

#include "attention.cuh"
#include "layers.cuh"

// -- products --------------------------------------------------------------------------------------------------------

// Sixteen bytes of a row in a piece, mixed so that the rows of a pair lie in different banks.
template <class P> __device__ int spot(int row, int chunk) {
    return row * P::COLS * 2 + ((chunk ^ ((row & 1) << 2)) << 4);
}

template <class P, bool PAIRED>
__device__ void load(Shared& own, u32& number, const bf16* weight, long long other, u64 policy) {
    constexpr int CHUNKS = P::COLS / 8, SIDE_BY_SIDE = CHUNKS < 32 ? 32 / CHUNKS : 1;  // of a row; rows of a warp
    constexpr int STEP = LOADING * SIDE_BY_SIDE;
    const int row = (warp() - COMPUTING) * SIDE_BY_SIDE + (CHUNKS < 32 ? lane() / CHUNKS : 0), count = P::count();
    const int chunk = CHUNKS < 32 ? lane() % CHUNKS : lane();
    const bool idle = CHUNKS < 32 && lane() >= SIDE_BY_SIDE * CHUNKS;
    const u32 full = shared_address(own.full), empty = shared_address(own.empty), ring = shared_address(own.weights);
    weight += (long long)(P::first() + row) * P::K + chunk * 8;
    for (u32 last = number + P::PIECES; number < last; number++, weight += P::COLS) {
        const u32 stage = number % STAGES;
        barrier_wait(empty + stage * 8, (number / STAGES & 1) ^ 1);
#pragma unroll
        for (int part = 0; part < (PAIRED ? 2 : 1); part++) {
            u32 to = ring + stage * STAGE + spot<P>(PAIRED ? 2 * row + part : row, chunk);
            const bf16* from = weight + part * other;
#pragma unroll
            for (int i = 0; i < P::MINE; i += STEP)
#pragma unroll
                for (int c = 0; c < CHUNKS; c += 32)
                    if (row + i < count && !idle && (CHUNKS < 32 || c + chunk < CHUNKS))
                        copy_weight(to + i * (PAIRED ? 2 : 1) * P::COLS * 2 + c * 16, from + i * P::K + c * 8, policy);
        }
        barrier_arrive_when_copied(full + stage * 8);
        copies_end();
        copies_wait<UNDER_WAY - 1>();                   // more than the memory needs makes everybody wait longer
        if (own.quiet) copies_wait<0>();
    }
}

// A product of this block's rows with the tokens (M, K): `finish(first, last)` finds the sums of these rows by `sum_of`. A
// warp has groups of 32 columns and all rows; a thread's columns are 8 neighbours, for two steps of the tensor cores.
template <class P, class Finish>
__device__ void multiply_all(Shared& own, u32& number, const bf16* tokens, const float* squares, Finish finish) {
    if (threadIdx.x == 0) own.quiet = 0;
    const int group = lane() >> 2, quad = lane() & 3;
    // What this thread needs of the tokens, and nobody else: groups of its warp, the first of them asked for now.
    const bf16* from = tokens + min(group, TOKENS - 1) * P::K + warp() * 32 + quad * 8;
    const u32 to = shared_address(&own.tokens[warp()][0][lane()]);
    int left = (P::PIECES - warp() / P::WARPS + P::EVERY - 1) / P::EVERY * P::TURNS;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        if (i < left) copy(to + i * 512, from + i * COMPUTING * 32);
        copies_end();
    }
    from += AHEAD * COMPUTING * 32;
    float shares[(GRID + 31) / 32];                     // of the squares of x, for the token that has this warp's number
#pragma unroll
    for (int i = 0; i < GRID && squares; i += 32) {
        bool there = warp() < TOKENS && i + lane() < GRID;
        shares[i / 32] = there ? __ldcg(squares + (i + lane()) * TOKENS + warp()) : 0.f;
    }
    const u32 full = shared_address(own.full), empty = shared_address(own.empty);
    const u32 ring = shared_address(own.weights) + spot<P>(group, warp() % P::WARPS * 4 + quad);
    u32 stage = (number + warp() / P::WARPS) % STAGES, round = (number + warp() / P::WARPS) / STAGES & 1, slot = to;
    float sum[P::TILES][4] = {};                        // of two rows for a token; the other two are of no token
#pragma unroll 1
    for (int piece = warp() / P::WARPS; piece < P::PIECES; piece += P::EVERY) {
        u32 weights = ring + stage * STAGE;
        barrier_wait(full + stage * 8, round);
#pragma unroll (P::TURNS % 2 ? 1 : 2)
        for (int turn = 0; turn < P::TURNS; turn++) {
            copies_wait<AHEAD - 1>();
            uint4 a = load_shared(slot);
            if (left > AHEAD) copy(slot, from);
            copies_end();
            from += COMPUTING * 32, slot = slot == to + (AHEAD - 1) * 512 ? to : slot + 512, left--;
#pragma unroll
            for (int m = 0; m < P::TILES; m++) {        // behind the last row lies something, which nobody looks at
                uint4 b = load_shared(weights + turn * COMPUTING * 64 + m * 8 * P::COLS * 2);
                multiply(sum[m], a.x, 0, a.y, 0, b.x, b.y);
                multiply(sum[m], a.z, 0, a.w, 0, b.z, b.w);
            }
        }
        __syncwarp();
        if (lane() == 0) barrier_arrive<P::EVERY>(empty + stage * 8);
        stage += P::EVERY;
        if (stage >= STAGES) stage -= STAGES, round ^= 1;
    }
    number += P::PIECES;
    copies_wait<0>();
    if (squares) {                                      // the factor of the norm before the product
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < GRID; i += 32) total += shares[i / 32];
        total = warp_sum(total);
        if (lane() == 0) own.scale[warp()] = rsqrtf(total / DIM + EPS);
    }
    if (threadIdx.x == 0) own.quiet = 1;
#pragma unroll
    for (int begin = 0; begin < P::TILES; begin += PASS) {
        meet();                                         // the activations of all warps, or the sums before, are done with
#pragma unroll
        for (int m = begin; m < begin + PASS && m < P::TILES; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) own.parts[warp()][(m - begin) * 8 + quad * 2 + i][group] = sum[m][i];
        meet();
        finish(begin * 8, (begin + PASS) * 8);
    }
}

// Of the sums that are there, a row's for a token.
__device__ float sum_of(const Shared& own, int row, int token) {
    float sum = 0.f;
#pragma unroll
    for (int part = 0; part < COMPUTING; part++) sum += own.parts[part][row][token];
    return sum;
}

// x += the product, scaled for a norm of weight `norm` to come.
template <class P>
__device__ void residual(Shared& own, const Args& args, u32& number, const bf16* tokens, const bf16* norm) {
    static_assert(P::TILES <= PASS && P::ROWS <= 32, "rows");
    const int first = P::first(), row = lane(), token = warp();
    const bool mine = row < P::count() && token < TOKENS;
    const float weight = mine ? wide(norm[first + row]) : 0.f;
    multiply_all<P>(own, number, tokens, nullptr, [&](int, int) {
        float x = 0.f;
        if (mine) {
            x = rounded(own.x[token][row] + rounded(sum_of(own, row, token)));
            own.x[token][row] = x;
            args.scaled[token * DIM + first + row] = narrow(x * weight);
        }
        float square = warp_sum(x * x);
        if (lane() == 0 && token < TOKENS) args.squares[blockIdx.x * TOKENS + token] = square;
    });
}

__device__ void project(Shared& own, const Args& args, u32& number) {
    const int rows = Project::count(), token = warp();
    multiply_all<Project>(own, number, args.scaled, args.squares, [&](int first, int last) {
        for (int row = first + lane(); row < min(last, rows) && token < TOKENS; row += 32)
            args.projected[token * QKV + Project::first() + row] = sum_of(own, row - first, token) * own.scale[token];
    });
}

__device__ void gate(Shared& own, const Args& args, u32& number) {
    const int pairs = Gate::count(), token = warp();
    multiply_all<Gate>(own, number, args.scaled, args.squares, [&](int first, int last) {
        for (int pair = first / 2 + lane(); pair < min(last / 2, pairs) && token < TOKENS; pair += 32) {
            float gates = sum_of(own, pair * 2 - first, token) * own.scale[token];
            float ups = sum_of(own, pair * 2 + 1 - first, token) * own.scale[token];
            args.inner[token * FFN + Gate::first() + pair] = narrow(__fdividef(gates, 1.f + __expf(-gates)) * ups);
        }
    });
}

// -- the launch ------------------------------------------------------------------------------------------------------

constexpr int COUNTS = PHASES + KV;                     // of a layer

__device__ void loading(Shared& own, const Args& args) {
    u32 number = 0;                                     // of pieces so far
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    for (size_t layer = 0; layer < LAYERS; layer++) {
        load<Project, false>(own, number, args.qkv + layer * QKV * DIM, 0, policy);
        load<Out, false>(own, number, args.out + layer * DIM * HEADS * WIDTH, 0, policy);
        load<Gate, true>(own, number, args.gate_up + layer * 2 * FFN * DIM, (long long)FFN * DIM, policy);
        load<Down, false>(own, number, args.down + layer * DIM * FFN, 0, policy);
    }
}

__device__ void computing(Shared& own, const Args& args) {
    u32 number = 0;                                     // of pieces so far
    for (int layer = 0; layer < LAYERS; layer++) {
        int* done = args.done + layer * COUNTS;
        if (layer) receive(done - COUNTS + DONE, GRID);
        project(own, args, number);
        publish(done + PROJECTED);
        attend(own, args, layer, done);
        receive(done + ATTENDED, KV * CREW);
        residual<Out>(own, args, number, args.attended, args.post_norms + layer * DIM);
        publish(done + ADDED);
        receive(done + ADDED, GRID);
        gate(own, args, number);
        publish(done + GATED);
        receive(done + GATED, GRID);
        residual<Down>(own, args, number, args.inner, args.input_norms + (layer + 1) * DIM);
        publish(done + DONE);
    }
}

extern "C" __global__ void __launch_bounds__((COMPUTING + LOADING) * 32, 1) run(const __grid_constant__ Args args) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& own = *(Shared*)memory;
    if (threadIdx.x == 0) {
        own.quiet = 0;
        for (int i = 0; i < STAGES; i++) barrier_init(&own.full[i], LOADING * 32), barrier_init(&own.empty[i], COMPUTING);
    }
    for (int i = threadIdx.x; i < TOKENS * HALF; i += blockDim.x)
        own.cosine[0][i] = args.cosine[i], own.sine[0][i] = args.sine[i];
    for (int i = threadIdx.x; i < TOKENS * Out::ROWS; i += blockDim.x)
        if (i % Out::ROWS < Out::count())
            own.x[0][i] = wide(args.x[i / Out::ROWS * DIM + Out::first() + i % Out::ROWS]);
    __syncthreads();
    if (warp() < COMPUTING) computing(own, args);
    else loading(own, args);
}
