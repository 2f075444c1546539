// Attention of few tokens over pages, by all blocks of `layers.cu`.

#pragma once

#include "layers.cuh"

constexpr int PAIRS = HALF / 32;

// A head of a token: lane l has numbers PAIRS · l and following, of both halves.
struct Head {
    float first[PAIRS], second[PAIRS];
};

__device__ void half_head(const Args& args, int token, int column, float (&out)[PAIRS]) {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        out[i] = __ldcg(args.projected + token * QKV + column + lane() * PAIRS + i);
        if (BIAS) out[i] += wide(args.biases[column + lane() * PAIRS + i]);
    }
}

__device__ Head head_of(const Args& args, int token, int number) {
    Head head;
    half_head(args, token, number * WIDTH, head.first);
    half_head(args, token, number * WIDTH + HALF, head.second);
    return head;
}

__device__ void store(const Head& head, bf16* to) {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        to[lane() * PAIRS + i] = narrow(head.first[i]);
        to[HALF + lane() * PAIRS + i] = narrow(head.second[i]);
    }
}

// The head normed with weights of its own, and rotated.
__device__ Head turned(const Shared& own, Head head, int token, const Head& norm) {
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        head.first[i] = rounded(head.first[i]), head.second[i] = rounded(head.second[i]);
        square += head.first[i] * head.first[i] + head.second[i] * head.second[i];
    }
    float scale = NORM ? rsqrtf(warp_sum(square) / WIDTH + EPS) : 1.f;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        int c = lane() * PAIRS + i;
        float first = head.first[i], second = head.second[i], cosine = own.cosine[token][c], sine = own.sine[token][c];
        if (NORM) {
            first = rounded(rounded(first * scale) * norm.first[i]);
            second = rounded(rounded(second * scale) * norm.second[i]);
        }
        head.first[i] = first * cosine - second * sine, head.second[i] = second * cosine + first * sine;
    }
    return head;
}

__device__ Head norm_of(const bf16* weights) {
    Head norm = {};
#pragma unroll
    for (int i = 0; i < PAIRS && NORM; i++)
        norm.first[i] = wide(weights[lane() * PAIRS + i]), norm.second[i] = wide(weights[HALF + lane() * PAIRS + i]);
    return norm;
}

// Sixteen keys and their values, as the tensor cores take them: see `attend_sixteen`.
struct Sixteen {
    uint4 keys[2][WIDTH / 32], values[4][WIDTH / 64];
    // `row(i)`: where key and value i lie, in numbers behind `key` and `value`; below 0: nowhere.
    template <class Row> __device__ void load_keys(const bf16* key, Row row) {
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            long long at = row(tile * 8 + (lane() >> 2));
#pragma unroll
            for (int j = 0; j < WIDTH / 32; j++)
                keys[tile][j] = at < 0 ? make_uint4(0, 0, 0, 0) : *(const uint4*)(key + at + j * 32 + (lane() & 3) * 8);
        }
    }
    template <class Row> __device__ void load_values(const bf16* value, Row row) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            long long at = row((lane() & 3) * 2 + (i & 1) + (i >> 1) * 8);
#pragma unroll
            for (int j = 0; j < WIDTH / 64; j++)
                values[i][j] = at < 0 ? make_uint4(0, 0, 0, 0) : *(const uint4*)(value + at + j * 64 + (lane() >> 2) * 8);
        }
    }
};

// What a warp has found for two of its 16 queries in each thread, lane / 4 and that + 8.
struct Found {
    float highest[2], total[2], mixed[WIDTH / 8][4];
};

__device__ u32 word(const uint4& four, int i) { return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w; }

// Sixteen more keys. `seen(row, key)` says which of them a query sees. Columns of a product over the width of a head are
// taken in an order in which a thread's are 8 neighbours, and so are those of the result.
template <class Seen>
__device__ void attend_sixteen(Found& found, const Sixteen& sixteen, const bf16* queries, Seen seen) {
    float scores[2][4] = {}, more[2][4] = {};
    int group = lane() >> 2, quad = lane() & 3;
#pragma unroll
    for (int j = 0; j < WIDTH / 32; j++) {
        uint4 top = *(const uint4*)(queries + group * Q_STEP + j * 32 + quad * 8);
        uint4 bottom = *(const uint4*)(queries + (group + 8) * Q_STEP + j * 32 + quad * 8);
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const uint4& k = sixteen.keys[tile][j];
            multiply(scores[tile], top.x, bottom.x, top.y, bottom.y, k.x, k.y);
            multiply(more[tile], top.z, bottom.z, top.w, bottom.w, k.z, k.w);
        }
    }
    const float factor = 1.4426950408889634f * rsqrtf(float(WIDTH));
    float shrink[2];
#pragma unroll
    for (int row = 0; row < 2; row++) {
        float highest = found.highest[row], total = 0.f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float& score = scores[i >> 1][row * 2 + (i & 1)];
            score += more[i >> 1][row * 2 + (i & 1)];
            score = seen(group + row * 8, (i >> 1) * 8 + quad * 2 + (i & 1)) ? score * factor : NOTHING;
            highest = fmaxf(highest, score);
        }
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
        float base = highest == NOTHING ? 0.f : highest;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float& score = scores[i >> 1][row * 2 + (i & 1)];
            score = exp2_(score - base);
            total += score;
        }
        shrink[row] = exp2_(found.highest[row] - base);
        found.total[row] = found.total[row] * shrink[row] + total;
        found.highest[row] = highest;
    }
    u32 a0 = pair(scores[0][0], scores[0][1]), a1 = pair(scores[0][2], scores[0][3]);
    u32 a2 = pair(scores[1][0], scores[1][1]), a3 = pair(scores[1][2], scores[1][3]);
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++) {
        int j = n / 8, i = n % 8;
        u32 take = i % 2 ? 0x7632 : 0x5410;
        u32 b0 = __byte_perm(word(sixteen.values[0][j], i / 2), word(sixteen.values[1][j], i / 2), take);
        u32 b1 = __byte_perm(word(sixteen.values[2][j], i / 2), word(sixteen.values[3][j], i / 2), take);
#pragma unroll
        for (int c = 0; c < 4; c++) found.mixed[n][c] *= shrink[c >> 1];
        multiply(found.mixed[n], a0, a1, a2, a3, b0, b1);
    }
}

// A warp's share, for the merge: the mean and the logarithm of the sum.
__device__ void leave(const Found& found, float* mixed, float* lse) {
    int group = lane() >> 2, quad = lane() & 3;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        float total = found.total[row];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        float one = total > 0.f ? 1.f / total : 0.f;
        float* to = mixed + (group + row * 8) * WIDTH + quad * 16;
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n += 4) {
            int c = n / 8 * 64 + n % 8;
#pragma unroll
            for (int side = 0; side < 2; side++) {
                float4 four = {found.mixed[n][row * 2 + side] * one, found.mixed[n + 1][row * 2 + side] * one,
                               found.mixed[n + 2][row * 2 + side] * one, found.mixed[n + 3][row * 2 + side] * one};
                __stcg((float4*)(to + c + side * 8), four);
            }
        }
        if (quad == 0) __stcg(lse + group + row * 8, found.highest[row] + log2f(total));
    }
}

__device__ float4 scaled_sum(float4 sum, float shrink, float4 more, float weight) {
    return {sum.x * shrink + more.x * weight, sum.y * shrink + more.y * weight, sum.z * shrink + more.z * weight,
            sum.w * shrink + more.w * weight};
}

// Merge what the warps of a team have left of this block's share of the queries, and write it out.
__device__ void merge(Shared& own, const Args& args, int kv, int member, int seats) {
    constexpr int LANES = WIDTH / 4;                    // that have columns
    const float *lse = args.lse + kv * SEATS * STRIPS * 16, *mixed = args.mixed + kv * SEATS * STRIPS * 16 * WIDTH;
    int c = lane() % LANES * 4;
    for (int task = warp(); task < MERGED * SHARES; task += COMPUTING) {
        int query = task / SHARES * CREW + member;
        if (query >= QUERIES) continue;
        float highest = NOTHING, total = 0.f;
        float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
        for (int seat = task % SHARES; seat < seats; seat += SHARES) {
            float one = __ldcg(lse + seat * STRIPS * 16 + query);
            float4 more = __ldcg((const float4*)(mixed + (seat * STRIPS * 16 + query) * WIDTH + c));
            float higher = fmaxf(highest, one), base = higher == NOTHING ? 0.f : higher;
            float weight = exp2_(one - base), shrink = exp2_(highest - base);
            total = total * shrink + weight;
            sum = scaled_sum(sum, shrink, more, weight);
            highest = higher;
        }
        if (lane() < LANES) *(float4*)(own.attention.merge[task] + c) = sum;
        if (lane() == 0) own.attention.merge[task][WIDTH] = highest, own.attention.merge[task][WIDTH + 1] = total;
    }
    meet();
    for (int number = warp(); number < MERGED; number += COMPUTING) {
        int query = number * CREW + member;
        if (query >= QUERIES || lane() >= LANES) continue;
        float highest = NOTHING, total = 0.f;
        float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int share = 0; share < SHARES; share++)
            highest = fmaxf(highest, own.attention.merge[number * SHARES + share][WIDTH]);
#pragma unroll
        for (int share = 0; share < SHARES; share++) {
            const float* from = own.attention.merge[number * SHARES + share];
            float weight = exp2_(from[WIDTH] - highest);
            total += from[WIDTH + 1] * weight;
            sum = scaled_sum(sum, 1.f, *(const float4*)(from + c), weight);
        }
        float one = 1.f / total;
        uint2 out = {pair(sum.x * one, sum.y * one), pair(sum.z * one, sum.w * one)};
        *(uint2*)(args.attended + (query / GROUP * HEADS + kv * GROUP + query % GROUP) * WIDTH + c) = out;
    }
}

// The queries of a team and, where `fresh`, the keys and values of the new tokens, into shared memory.
__device__ void prepare(Shared& own, const Args& args, int kv, bool fresh, const Head& q_norm, const Head& k_norm) {
    constexpr int BATCH = STRIPS * 2 < 4 ? STRIPS * 2 : 4;
    const int t = warp();
    Head key, value;                                    // of the token that has this warp's number
    if (fresh && t < TOKENS) key = head_of(args, t, HEADS + kv), value = head_of(args, t, HEADS + KV + kv);
    for (int begin = warp(); begin < STRIPS * 16; begin += COMPUTING * BATCH) {
        Head heads[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {               // all are asked for before the first is waited for
            int query = begin + i * COMPUTING;
            heads[i] = query < QUERIES ? head_of(args, query / GROUP, kv * GROUP + query % GROUP) : Head{};
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            int query = begin + i * COMPUTING;
            if (query >= STRIPS * 16) break;
            Head head = turned(own, heads[i], min(query / GROUP, TOKENS - 1), q_norm);
            store(head, own.attention.queries + query * Q_STEP);
        }
    }
    if (!fresh) return;
    for (int i = TOKENS * WIDTH + threadIdx.x; i < 16 * WIDTH; i += COMPUTING * 32)
        own.attention.fresh[1][i] = 0;                  // values that nobody sees are still multiplied, with 0
    if (t >= TOKENS) return;
    store(turned(own, key, t, k_norm), own.attention.fresh[0] + t * WIDTH);
    store(value, own.attention.fresh[1] + t * WIDTH);
}

__device__ void attend(Shared& own, const Args& args, int layer, int* done) {
    const int kv = blockIdx.x / CREW, member = blockIdx.x % CREW;
    if (kv >= KV) return;
    const int stored = args.stored[0], pending = args.pending[0];
    const int sixteens = 1 + (stored + 15) / 16, strip = warp() % STRIPS, side = warp() / STRIPS;
    const int seat = side * CREW + member, seats = min(sixteens, SEATS);
    const bool working = side < SIDE && seat < sixteens;
    bf16 *keys = args.pages + layer * 2 * args.pages_step, *values = keys + args.pages_step;
    auto shelf = [&](int t) {                           // of a stored token, in numbers
        return ((long long)(args.table[t / PAGE] * KV + kv) * PAGE + t % PAGE) * WIDTH;
    };
    auto row = [&](int number) {                        // of each of sixteen tokens; the new ones come first
        return [=](int i) -> long long {
            int t = (number - 1) * 16 + i;
            return number == 0 ? i * WIDTH : t < stored ? shelf(t) : -1;
        };
    };
    Sixteen sixteen;
    auto take_keys = [&](int n) { sixteen.load_keys(n == 0 ? own.attention.fresh[0] : keys, row(n)); };
    auto take_values = [&](int n) { sixteen.load_values(n == 0 ? own.attention.fresh[1] : values, row(n)); };
    if (working && seat) take_keys(seat);               // the text is there before the queries are
    const Head q_norm = norm_of(args.q_norms + layer * WIDTH), k_norm = norm_of(args.k_norms + layer * WIDTH);
    Args of_layer = args;
    if (BIAS) of_layer.biases += layer * QKV;
    receive(done + PROJECTED, GRID);
    if (working && seat) take_values(seat);
    prepare(own, of_layer, kv, member == 0, q_norm, k_norm);
    meet();
    if (working) {
        Found found = {{NOTHING, NOTHING}, {0.f, 0.f}, {}};
        const bf16* queries = own.attention.queries + strip * 16 * Q_STEP;
#pragma unroll 1
        for (int number = seat; number < sixteens; number += SEATS) {
            if (number != seat || number == 0) take_keys(number), take_values(number);
            attend_sixteen(found, sixteen, queries, [&](int query, int key) {
                if (number) return (number - 1) * 16 + key < stored;
                int t = min((strip * 16 + query) / GROUP, TOKENS - 1);
                bool same = key / BLOCK == t / BLOCK && !(CAUSAL && t < BLOCK && key > t);
                return key < TOKENS && (same || key < args.behind[t / BLOCK]);
            });
        }
        int slot = (kv * SEATS + seat) * STRIPS + strip;
        leave(found, args.mixed + slot * 16 * WIDTH, args.lse + slot * 16);
    }
    publish(done + PHASES + kv);
    if (member == 0 && pending > 0) {                   // keep the block that is being committed
        for (int i = threadIdx.x; i < BLOCK * WIDTH / 8; i += COMPUTING * 32) {
            int t = stored + i / (WIDTH / 8), c = i % (WIDTH / 8) * 8, from = i / (WIDTH / 8) * WIDTH + c;
            if (t / PAGE >= args.table_pages) continue;
            *(uint4*)(keys + shelf(t) + c) = *(const uint4*)(own.attention.fresh[0] + from);
            *(uint4*)(values + shelf(t) + c) = *(const uint4*)(own.attention.fresh[1] + from);
        }
    }
    receive(done + PHASES + kv, CREW);
    merge(own, args, kv, member, seats);
    publish(done + ATTENDED);
}
