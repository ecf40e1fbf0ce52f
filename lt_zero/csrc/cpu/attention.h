// Block-sparse attention for one instruction set (Dao, FlashAttention-2, 2023, arXiv:2307.08691).
//
// A tile of rows (forward, dq) or columns (dk, dv) keeps its rows as lanes, while the blocks that its layout names pass
// by, CHUNK rows at a time. The backward pass computes the scores twice, by rows and by columns: two products more than
// needed, but every result has one writer, so that no atomics and no copies of dq are needed, and no result depends on
// the number of threads.
#pragma once

#include "cpu/attention_table.h"
#include "cpu/products.h"
#ifdef LT_TILES
#include "cpu/tiles.h"
#endif

namespace LT_NAMESPACE {

static inline Vec larger(Vec a, Vec b) { return a.x > b.x ? a.x : b.x; }  // b if a is NaN

// e^x for x <= 88, within 2.5e-7 of it: 0 below -87 (where masked), NaN for NaN.
static inline Vec exponential(Vec x) {
    const Vec log2e(1.44269504f), shift(12582912.0f);  // 1.5 * 2^23: the last bits of a sum with it are an integer
    const Vec bounded = x.x < -87.0f ? Vec(-87.0f).x : x.x;
    const Vec shifted = multiply_add(bounded, log2e, shift), r = multiply_add(bounded, log2e, shift - shifted);
    // 2^r, with the smallest largest relative error on [-1/2, 1/2]: 1.1e-7.
    Vec p(1.3264727e-3f);
    p = multiply_add(p, r, Vec(9.671513e-3f));
    p = multiply_add(p, r, Vec(5.5507336e-2f));
    p = multiply_add(p, r, Vec(0.24022242f));
    p = multiply_add(p, r, Vec(0.693147f));
    p = multiply_add(p, r, Vec(1.0f));
    const Vec power = (Lanes)((Ints)p.x + ((Ints)shifted.x << 23));  // of a NaN any number: its last bits are a shift
    return x.x >= -87.0f ? power.x : Vec(0.0f).x > x.x ? Vec(0.0f).x : x.x;
}

// ---- dropout -----------------------------------------------------------------------------------------------------

// A bijection of 32 bits in which every input bit flips every output bit with a probability near 1/2 (lowbias32 of
// C. Wellons, Hash Prospector, 2018).
template <class Word>
static inline Word mix(Word x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

// An element is dropped if mix(hash of its row ^ hash of its column) is below the threshold: the same by rows and by
// columns. Keys of the hashes come from the seed and the head by SplitMix64 (Steele, Lea and Flood, 2014).
struct Dropout {
    uint32_t threshold, row_key, column_key;
    float factor;  // of what is kept

    Dropout(const lt_attention &t, const Head &h) {
        uint64_t z = t.seed + 0x9e3779b97f4a7c15u * (uint64_t)(h.batch * t.heads + h.head + 1);
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        z ^= z >> 31;
        row_key = (uint32_t)z, column_key = (uint32_t)(z >> 32);
        threshold = (uint32_t)(t.dropout * 0x1p32);
        factor = (float)(1.0 / (1.0 - t.dropout));
    }

    bool active() const { return threshold != 0; }
    uint32_t row(int64_t i) const { return mix((uint32_t)i ^ row_key); }
    uint32_t column(int64_t j) const { return mix((uint32_t)j ^ column_key); }
    Vec only(Vec kept, Bits lane, uint32_t other) const {
        return (Lanes)((Ints)kept.x & (Ints)(mix(lane ^ other) >= threshold));
    }
};

// ---- what passes by ----------------------------------------------------------------------------------------------

// The rows of the stream within [lo, hi) that a list of blocks names, in chunks.
class Walk {
    const int32_t *block, *end;
    int64_t size, lo, hi, at = 0, stop = 0;  // [at, stop) is left of the last block
    int round;

   public:
    Walk(const lt_attention &t, const lt_lists &lists, int64_t head, int64_t number, int64_t lo, int64_t hi, int round)
        : size(t.block), lo(lo), hi(hi), round(round) {
        const int64_t blocks = (t.length + t.block - 1) / t.block;
        const int64_t *begin = lists.begin + (t.layouts > 1 ? head * blocks : 0) + number;
        block = lists.index + begin[0];
        end = lists.index + begin[1];
    }

    bool next(Runs &runs) {
        runs.count = runs.rows = 0;
        while (runs.rows < CHUNK) {
            if (at >= stop) {
                if (block == end) break;
                at = *block * size > lo ? *block * size : lo;
                stop = (*block + 1) * size < hi ? (*block + 1) * size : hi;
                block++;
                continue;
            }
            const int n = (int)(stop - at < CHUNK - runs.rows ? stop - at : CHUNK - runs.rows);
            Run *last = runs.run + runs.count - 1;
            if (runs.count > 0 && last->start + last->count == at) last->count += n;
            else runs.run[runs.count++] = {(int)at, n};
            runs.rows += (n + round - 1) / round * round;
            at += n;
        }
        runs.run[runs.count].start = (int)(at < stop ? at : block != end ? *block * size : 0);
        return runs.rows > 0;
    }
};

// Calls work(row of the stream, its scores) for each row of the chunk. Rows that only fill up a tile are zeros.
template <int TM, class Work>
static inline void for_each_row(const Runs &runs, int round, float *s, Work work) {
    for (const Run *run = runs.run; run < runs.run + runs.count; run++) {
        for (int i = 0; i < run->count; i++) work((int64_t)run->start + i, s + i * TM);
        s += (run->count + round - 1) / round * round * TM;
    }
}

static inline const char *head_of(const lt_rows &t, int dtype, int64_t batch, int64_t head) {
    return (const char *)t.data + (batch * t.batch + head * t.head) * width(dtype);
}

// Rows of a result out of y [depth][TM], each multiplied with its factor.
template <int TM>
static void finish_rows(const lt_attention &t, const lt_rows &to, int64_t batch, int64_t head, int64_t lo, int rows,
                        const float *y, const float *factor) {
    char *p = (char *)head_of(to, t.dtype, batch, head) + lo * to.row * width(t.dtype);
    float row[MOST];
    for (int i = 0; i < rows; i++, p += to.row * width(t.dtype)) {
        for (int d = 0; d < t.dim; d++) row[d] = y[d * TM + i];
        for_each_vector(0, t.dim, [&](auto at, int64_t d) {
            at.store(p, t.dtype, d, at.load(row, LT_FP32, d) * Vec(factor[i]));
        });
    }
}

// Numbers of a tile's lanes.
template <int TM>
struct Tile {
    static constexpr int NV = TM / W;
    int64_t lo;
    int rows;
    Ints place[NV];  // positions in the sequence
    Bits hash[NV];

    Tile(int64_t lo, int64_t end) : lo(lo), rows((int)(end - lo < TM ? end - lo : TM)) {
        for (int i = 0; i < TM; i++) place[i / W][i % W] = (int)lo + i;
    }

    void hash_with(uint32_t key) {
        for (int v = 0; v < NV; v++) hash[v] = mix((Bits)place[v] ^ key);
    }

    // Values of the lanes; `none` beyond the end.
    void load(const float *values, float none, Vec *to) const {
        for (int i = 0; i < TM; i++) to[i / W].x[i % W] = i < rows ? values[lo + i] : none;
    }
};

template <class E, int NP>
static void pack_tile(const lt_attention &t, const lt_rows &from, int64_t batch, int64_t head, int64_t lo, int rows,
                      int depth, typename E::Packed *lanes) {
    const char *base = head_of(from, t.dtype, batch, head);
    for (int p = 0; p < NP; p++) {
        const int left = rows - p * LANES;
        const int there = left < 0 ? 0 : left < LANES ? left : LANES;
        E::pack_lanes(from, base, t.dtype, lo + p * LANES, there, (int)t.dim, depth, lanes + p * LANES * depth);
    }
}

static inline int depth_of(const lt_attention &t, int round) { return ((int)t.dim + round - 1) / round * round; }

// ---- forward -----------------------------------------------------------------------------------------------------

template <class E, int NP>
static void forward_tile(const lt_attention &t, const Head &h, int64_t block, int64_t lo, int64_t end) {
    constexpr int TM = NP * LANES, NV = TM / W;
    const int depth = depth_of(t, E::DEPTH);
    alignas(64) typename E::Packed q[MOST * TM];
    alignas(64) float s[CHUNK * TM], y[MOST * TM];
    Tile<TM> tile(lo, end);
    pack_tile<E, NP>(t, t.q, h.batch, h.head, lo, tile.rows, depth, q);
    memset(y, 0, sizeof(float) * (size_t)(depth * TM));
    const Vec scale((float)t.scale), least(-INFINITY);
    const Dropout dropout(t, h);
    tile.hash_with(dropout.row_key);
    Vec top[NV], total[NV];
    for (int v = 0; v < NV; v++) top[v] = least, total[v] = Vec(0.0f);

    Walk walk(t, t.rows, h.head, block, 0, t.causal ? lo + tile.rows : t.length, E::ROUND);
    Runs runs;
    while (walk.next(runs)) {
        E::template dot<NP, true>(h.k, t.length, depth, runs, q, s, h.v);
        Vec before[NV], base[NV];
        for (int v = 0; v < NV; v++) before[v] = top[v];
        for_each_row<TM>(runs, E::ROUND, s, [&](int64_t key, float *p) {
            const Vec offset(h.key_offset[key]);
            for (int v = 0; v < NV; v++) {
                Vec x = multiply_add(read(p + v * W), scale, offset);
                if (t.causal && key > lo) x = tile.place[v] >= (int)key ? x.x : least.x;
                top[v] = larger(x, top[v]);
                write(p + v * W, x);
            }
        });
        for (int v = 0; v < NV; v++) {
            // A row that has seen nothing yet has the base 0: its exponentials are then 0, not NaN.
            base[v] = top[v].x == least.x ? Lanes{} : top[v].x;
            if (!lanes_of(top[v].x != before[v].x)) continue;
            const Vec factor = exponential(before[v] - base[v]);
            total[v] = total[v] * factor;
            for (int d = 0; d < depth; d++) write(y + d * TM + v * W, read(y + d * TM + v * W) * factor);
        }
        for_each_row<TM>(runs, E::ROUND, s, [&](int64_t key, float *p) {
            for (int v = 0; v < NV; v++) {
                Vec x = exponential(read(p + v * W) - base[v]);
                total[v] = total[v] + x;
                if (dropout.active()) x = dropout.only(x, tile.hash[v], dropout.column(key));
                write(p + v * W, x);
            }
        });
        E::template sum<NP>(h.v, t.length, depth, runs, s, y);
    }
    float factor[TM];
    for (int i = 0; i < TM; i++) {
        const float sum = total[i / W].x[i % W], most = top[i / W].x[i % W];
        factor[i] = sum == 0.0f ? 0.0f : dropout.factor / sum;
        if (i < tile.rows) t.lse[(h.batch * t.heads + h.head) * t.length + lo + i] = most + logf(sum);
    }
    finish_rows<TM>(t, t.out, h.batch, h.head, lo, tile.rows, y, factor);
}

// ---- backward ----------------------------------------------------------------------------------------------------

// P and dS = P * (dP - delta) out of scores s and dP, for lanes of rows, or of columns.
template <class E, int NP, bool COLUMNS>
static inline void differentiate(const lt_attention &t, const Head &h, const Dropout &dropout,
                                 const Tile<NP * LANES> &tile, const Runs &runs, float *s, float *g) {
    constexpr int TM = NP * LANES, NV = TM / W;
    const Vec scale((float)t.scale), least(-INFINITY), kept(dropout.factor);
    Vec offset[NV], delta[NV];
    tile.load(COLUMNS ? h.key_offset : h.row_offset, -INFINITY, offset);
    tile.load(h.row_delta, 0.0f, delta);  // of columns: not used
    const float *offsets = COLUMNS ? h.row_offset : h.key_offset;
    const int64_t shift = g - s;
    for_each_row<TM>(runs, E::ROUND, s, [&](int64_t other, float *p) {
        const Vec passing(offsets[other]), its_delta(COLUMNS ? h.row_delta[other] : 0.0f);
        const bool diagonal = t.causal && (COLUMNS ? other < tile.lo + TM - 1 : other > tile.lo);
        for (int v = 0; v < NV; v++) {
            // Rounded as in the forward pass before the row's maximum leaves: no exponential of it is above 1.
            Vec x = multiply_add(read(p + v * W), scale, COLUMNS ? offset[v] : passing);
            x = x + (COLUMNS ? passing : offset[v]);
            if (diagonal) x = (COLUMNS ? tile.place[v] <= (int)other : tile.place[v] >= (int)other) ? x.x : least.x;
            x = exponential(x);
            Vec dp = read(p + shift + v * W), used = x;
            if (dropout.active()) {
                const uint32_t hash = COLUMNS ? dropout.row(other) : dropout.column(other);
                dp = dropout.only(dp * kept, tile.hash[v], hash);
                used = dropout.only(x, tile.hash[v], hash);
            }
            write(p + shift + v * W, x * (dp - (COLUMNS ? its_delta : delta[v])));
            if (COLUMNS) write(p + v * W, used);
        }
    });
}

template <class E, int NP, bool COLUMNS>
static void backward_tile(const lt_attention &t, const Head *group, int64_t block, int64_t lo, int64_t end) {
    constexpr int TM = NP * LANES;
    typedef typename E::Packed Packed;
    const int depth = depth_of(t, E::DEPTH);
    alignas(64) Packed first[MOST * TM], second[MOST * TM];  // q and dout, or k and v
    alignas(64) float s[CHUNK * TM], g[CHUNK * TM], y[MOST * TM], z[COLUMNS ? MOST * TM : 1];
    const int64_t batch = group->batch, heads = t.heads / t.kv_heads;
    const int64_t head = COLUMNS ? group->head / heads : group->head;
    Tile<TM> tile(lo, end);
    pack_tile<E, NP>(t, COLUMNS ? t.k : t.q, batch, head, lo, tile.rows, depth, first);
    pack_tile<E, NP>(t, COLUMNS ? t.v : t.dout, batch, head, lo, tile.rows, depth, second);
    memset(y, 0, sizeof(float) * (size_t)(depth * TM));
    if (COLUMNS) memset(z, 0, sizeof(float) * (size_t)(depth * TM));

    Runs runs;
    for (int64_t i = 0; i < (COLUMNS ? heads : 1); i++) {
        const Head &h = group[i];
        const Dropout dropout(t, h);
        tile.hash_with(COLUMNS ? dropout.column_key : dropout.row_key);
        const void *a = COLUMNS ? h.q : h.k, *b = COLUMNS ? h.dout : h.v;
        Walk walk(t, COLUMNS ? t.columns : t.rows, h.head, block, COLUMNS && t.causal ? lo : 0,
                  !COLUMNS && t.causal ? lo + tile.rows : t.length, E::ROUND);
        while (walk.next(runs)) {
            E::template dot<NP, true>(a, t.length, depth, runs, first, s, b);
            E::template dot<NP, false>(b, t.length, depth, runs, second, g, b);
            differentiate<E, NP, COLUMNS>(t, h, dropout, tile, runs, s, g);
            E::template sum<NP>(a, t.length, depth, runs, g, y);
            if (COLUMNS) E::template sum<NP>(b, t.length, depth, runs, s, z);
        }
    }
    float factor[TM];
    for (float &f : factor) f = (float)t.scale;
    finish_rows<TM>(t, COLUMNS ? t.dk : t.dq, batch, head, lo, tile.rows, y, factor);
    if (!COLUMNS) return;
    for (float &f : factor) f = Dropout(t, *group).factor;
    finish_rows<TM>(t, t.dv, batch, head, lo, tile.rows, z, factor);
}

// ---- the table ---------------------------------------------------------------------------------------------------

template <int N>
struct Panels {
    static constexpr int value = N;
};

// Calls work(engine, panels of a tile) with the products that fit the problem.
template <class Work>
static inline void with_products(const lt_attention &t, Work work) {
#ifdef LT_TILES
    if (t.dtype == LT_BF16 && t.block % LANES == 0) return work(Amx{}, Panels<1>{});
#endif
    if (W == 16 && t.block % (2 * LANES) == 0) work(Fma{}, Panels<2>{});  // a broadcast element serves two vectors
    else work(Fma{}, Panels<1>{});
}

// Calls work(first row, end) for the tiles of a block.
template <class Work>
static inline void for_each_tile(const lt_attention &t, int64_t block, int rows, Work work) {
    const int64_t end = (block + 1) * t.block < t.length ? (block + 1) * t.block : t.length;
    for (int64_t lo = block * t.block; lo < end; lo += rows) work(lo, end);
}

static int64_t packed_bytes(const lt_attention &t) {
    int64_t bytes = 0;
    with_products(t, [&](auto e, auto) {
        bytes = e.packed_bytes((t.length + PIECE - 1) / PIECE * PIECE, depth_of(t, e.DEPTH));
    });
    return bytes;
}

static const void *as_it_is(const lt_attention &t, const lt_rows &from, int64_t batch, int64_t head) {
    const void *stream = nullptr;
    with_products(t, [&](auto e, auto) {
        stream = e.as_it_is(from, head_of(from, t.dtype, batch, head), t.dtype, (int)t.dim);
    });
    return stream;
}

static void pack_piece(const lt_attention &t, const lt_rows &from, int64_t batch, int64_t head, int64_t piece,
                       void *to) {
    const char *base = head_of(from, t.dtype, batch, head);
    const int64_t lo = piece * PIECE, hi = lo + PIECE < t.length ? lo + PIECE : t.length;
    with_products(t, [&](auto e, auto) {
        e.pack(from, base, t.dtype, lo, hi, t.length, (int)t.dim, depth_of(t, e.DEPTH), to);
    });
}

static void row_delta(const lt_attention &t, int64_t batch, int64_t head, int64_t lo, int64_t hi, float *delta) {
    const char *out = head_of(t.out, t.dtype, batch, head), *dout = head_of(t.dout, t.dtype, batch, head);
    for (int64_t i = lo; i < hi; i++) {
        const char *a = out + i * t.out.row * width(t.dtype), *b = dout + i * t.dout.row * width(t.dtype);
        Vec sum(0.0f);
        for_each_vector(0, t.dim, [&](auto at, int64_t d) {
            sum = multiply_add(at.load(a, t.dtype, d), at.load(b, t.dtype, d), sum);
        });
        delta[i] = 0.0f;
        for (int v = 0; v < W; v++) delta[i] += sum.x[v];
    }
}

static void attention_forward(const lt_attention &t, const Head &h, int64_t block) {
    with_products(t, [&](auto e, auto panels) {
        constexpr int NP = decltype(panels)::value;
        [[maybe_unused]] const typename decltype(e)::Session session;
        for_each_tile(t, block, NP * LANES, [&](int64_t lo, int64_t end) {
            forward_tile<decltype(e), NP>(t, h, block, lo, end);
        });
    });
}

template <bool COLUMNS>
static void attention_backward(const lt_attention &t, const Head *group, int64_t block) {
    with_products(t, [&](auto e, auto panels) {
        constexpr int NP = decltype(panels)::value;
        [[maybe_unused]] const typename decltype(e)::Session session;
        for_each_tile(t, block, NP * LANES, [&](int64_t lo, int64_t end) {
            backward_tile<decltype(e), NP, COLUMNS>(t, group, block, lo, end);
        });
    });
}

static constexpr AttentionKernels attention = {
    packed_bytes,      as_it_is,                  pack_piece,               row_delta,
    attention_forward, attention_backward<false>, attention_backward<true>,
};

}  // namespace LT_NAMESPACE
