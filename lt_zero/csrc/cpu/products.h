// The two matrix products of attention, on vectors (Fma) and on AMX tiles (Amx). Included by attention.h.
//
// A tile of attention has 16 or 32 lanes: rows of one operand, which stay. The rows of the other operand, the stream,
// pass by in runs of neighbours. One row of scores is one row of the stream against all lanes:
//
//     dot:  s[n][lane]  = sum over d of stream[n][d] * lanes[lane][d]
//     sum:  y[d][lane] += sum over n of stream[n][d] * s[n][lane]
//
// So softmax has its maximum and sum within a lane, masks cost nothing where they are not needed, and any list of
// columns is as fast as neighbouring ones, without a copy. Streams are packed once for each head.
#pragma once

#include "cpu/attention_table.h"
#include "cpu/vec.h"

namespace LT_NAMESPACE {

constexpr int LANES = 16;         // of a panel
constexpr int VECS = LANES / W;   // vectors of a panel
constexpr int MOST = 256;         // head_dim
constexpr int CHUNK = 128;        // rows of the stream between two updates of the maximum: the scores stay in L1

struct Run {
    int start, count;
};

// Neighbouring rows of the stream, `rows` of them in all, and where the next chunk starts.
struct Runs {
    Run run[CHUNK + 1];
    int count, rows;
};

static inline Vec read(const float *p) { return load(p, LT_FP32, 0); }
static inline void write(float *p, Vec a) { store(p, LT_FP32, 0, a); }

// Elements of a tensor as fp32; beyond `dim`, up to `depth`, zeros.
static inline void widen(const lt_rows &t, const char *head, int dtype, int64_t row, int dim, int depth, float *out) {
    const char *p = head + row * t.row * width(dtype);
    for_each_vector(0, dim, [&](auto at, int64_t k) { at.store(out, LT_FP32, k, at.load(p, dtype, k)); });
    for (int k = dim; k < depth; k++) out[k] = 0.0f;
}

// fp32 products with multiply-adds of a broadcast element and a vector of lanes. Packed streams are
// [depth / 64][rows][64]: with a constant stride the addresses of 16 rows are one register and constants.
struct Fma {
    typedef float Packed;
    static constexpr int DEPTH = 16, ROUND = 1;  // what head_dim and the rows of a run are rounded up to
    static constexpr int PART = 64;              // elements of a row that stand together

    struct Session {};  // what must last while products are computed

    static int64_t packed_bytes(int64_t rows, int depth) {
        return (depth + PART - 1) / PART * PART * rows * (int64_t)sizeof(Packed);
    }

    // A tensor that has this form need not be packed.
    static const void *as_it_is(const lt_rows &t, const char *head, int dtype, int dim) {
        return dtype == LT_FP32 && dim == PART && t.row == PART ? head : nullptr;
    }

    static void pack(const lt_rows &t, const char *head, int dtype, int64_t lo, int64_t hi, int64_t length, int dim,
                     int depth, void *to) {
        float row[MOST + PART] = {};
        for (int64_t i = lo; i < hi; i++) {
            widen(t, head, dtype, i, dim, depth, row);
            for (int64_t k = 0; k < depth; k += PART)
                memcpy((float *)to + k * length + i * PART, row + k, sizeof(float) * PART);
        }
    }

    static void pack_lanes(const lt_rows &t, const char *head, int dtype, int64_t lo, int rows, int dim, int depth,
                           Packed *lanes) {
        float row[MOST] = {};
        for (int i = 0; i < LANES; i++) {
            if (i < rows) widen(t, head, dtype, lo + i, dim, depth, row);
            else memset(row, 0, sizeof row);
            for (int k = 0; k < depth; k++) lanes[k * LANES + i] = row[k];
        }
    }

    // Rows (or dimensions) that are computed together: as many sums as the registers hold, 8 at least to hide latency.
    template <int NP>
    static constexpr int TOGETHER = W == 16 ? 16 / NP : W == 8 && VECS * NP == 2 ? 4 : 2;

    // N rows from `a` on. Asks for as many of `next` and `other` meanwhile: hardware does not foresee other rows than
    // neighbours.
    template <int N, int NP, bool FETCH>
    __attribute__((always_inline)) static inline void dot_rows(const float *a, int64_t length, int depth,
                                                               const float *lanes, float *s, const float *next,
                                                               const float *other) {
        constexpr int NV = NP * VECS;
        Vec sums[N][NV];
#pragma GCC unroll 16
        for (int r = 0; r < N; r++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) sums[r][v] = Vec(0.0f);
        const int64_t step = length * PART;
        for (int part = 0; part < depth; part += PART, a += step, next += step, other += step) {
            const int end = depth - part < PART ? depth - part : PART;
            const float *x0 = lanes + part * LANES, *x1 = x0 + (NP - 1) * LANES * depth;
            for (int k = 0; k < end; k++, x0 += LANES, x1 += LANES) {
                if (FETCH && k < N * PART / 16) {
                    __builtin_prefetch(next + k * 16);
                    __builtin_prefetch(other + k * 16);
                }
                Vec x[NV];
#pragma GCC unroll 4
                for (int v = 0; v < NV; v++) x[v] = read((v < VECS ? x0 : x1) + v % VECS * W);
#pragma GCC unroll 16
                for (int r = 0; r < N; r++)
#pragma GCC unroll 4
                    for (int v = 0; v < NV; v++) sums[r][v] = multiply_add(Vec(a[k + r * PART]), x[v], sums[r][v]);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < N; r++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) write(s + r * NP * LANES + v * W, sums[r][v]);
    }

    // With `ahead`, a stream whose rows are needed after those of this one.
    template <int NP, bool FETCH>
    static void dot(const void *stream, int64_t length, int depth, const Runs &runs, const Packed *lanes, float *s,
                    const void *ahead) {
        constexpr int N = TOGETHER<NP>;
        const float *rows = (const float *)stream, *others = (const float *)ahead;
        for (const Run *run = runs.run; run < runs.run + runs.count; run++) {
            int64_t i = run->start;
            const int64_t end = i + run->count;
            for (; i + N <= end; i += N, s += N * NP * LANES) {
                const int64_t next = i + N < end ? i + N : run[1].start;
                dot_rows<N, NP, FETCH>(rows + i * PART, length, depth, lanes, s, rows + next * PART, others + i * PART);
            }
            for (; i < end; i++, s += NP * LANES)
                dot_rows<1, NP, false>(rows + i * PART, length, depth, lanes, s, rows, rows);
        }
    }

    template <int NP>
    static void sum(const void *stream, int64_t length, int depth, const Runs &runs, const float *s, float *y) {
        constexpr int D = TOGETHER<NP>, NV = NP * VECS;
        for (int d = 0; d < depth; d += D) {
            Vec sums[D][NV];
            float *to = y + d * NP * LANES;
#pragma GCC unroll 16
            for (int r = 0; r < D; r++)
#pragma GCC unroll 4
                for (int v = 0; v < NV; v++) sums[r][v] = read(to + r * NP * LANES + v * W);
            const float *p = s, *from = (const float *)stream + d / PART * PART * length + d % PART;
            for (int j = 0; j < runs.count; j++) {
                const float *a = from + (int64_t)runs.run[j].start * PART;
                for (int n = runs.run[j].count; n > 0; n--, a += PART, p += NP * LANES) {
                    // The stride is too long for the hardware's prefetcher. Distances of 4 to 8 rows are best.
                    __builtin_prefetch(a + 8 * PART);
                    Vec x[NV];
#pragma GCC unroll 4
                    for (int v = 0; v < NV; v++) x[v] = read(p + v * W);
#pragma GCC unroll 16
                    for (int r = 0; r < D; r++)
#pragma GCC unroll 4
                        for (int v = 0; v < NV; v++) sums[r][v] = multiply_add(Vec(a[r]), x[v], sums[r][v]);
                }
            }
#pragma GCC unroll 16
            for (int r = 0; r < D; r++)
#pragma GCC unroll 4
                for (int v = 0; v < NV; v++) write(to + r * NP * LANES + v * W, sums[r][v]);
        }
    }
};

}  // namespace LT_NAMESPACE
