// The products of attention on AMX tiles: bf16 in, sums in fp32. Included by attention.h for the CPUs that have them.
//
// A tile is 16 rows of 64 bytes; a product of two has 16 x 16 sums over 32 dimensions. Its second factor holds pairs of
// rows: [pairs][lane][2]. Instructions are written out, as compilers know them by flags that older ones refuse.
#pragma once

#include "cpu/products.h"

#define LT_TILE_ZERO(c) asm volatile("tilezero %%tmm" #c ::)
#define LT_TILE_LOAD(c, base, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #c ::"r"((const void *)(base)), "r"((int64_t)(stride)) : "memory")
#define LT_TILE_STORE(c, base, stride) \
    asm volatile("tilestored %%tmm" #c ", (%0,%1,1)" ::"r"((void *)(base)), "r"((int64_t)(stride)) : "memory")
#define LT_TILE_ADD(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)  // c += a * b

namespace LT_NAMESPACE {

// Packed streams are rows [rows][depth] for `dot`, then [rows / 32][depth][32] for `sum`.
struct Amx {
    typedef uint16_t Packed;
    static constexpr int DEPTH = 32, ROUND = LANES, GROUP = 32;
    static constexpr int BYTES = 64;  // of a row of a tile

    // Tiles 0 to 3: sums. 4 and 5: the factors; 6 and 7: factors of half the depth, for 16 rows of a stream.
    struct Session {
        Session() {
            alignas(64) uint8_t shape[64] = {1};
            for (int c = 0; c < 8; c++) {
                shape[16 + 2 * c] = c == 6 ? BYTES / 2 : BYTES;
                shape[48 + c] = c == 7 ? 8 : 16;
            }
            asm volatile("ldtilecfg %0" ::"m"(shape));
        }
        ~Session() { asm volatile("tilerelease" ::); }
    };

    static int64_t padded(int64_t rows) { return (rows + GROUP - 1) / GROUP * GROUP; }

    static int64_t packed_bytes(int64_t rows, int depth) { return 2 * padded(rows) * depth * (int64_t)sizeof(Packed); }

    static const void *as_it_is(const lt_rows &, const char *, int, int) { return nullptr; }

    static void read_row(const lt_rows &t, const char *head, int64_t row, int dim, Packed *to) {
        memcpy(to, head + row * t.row * 2, 2 * (size_t)dim);
    }

    static void pack(const lt_rows &t, const char *head, int, int64_t lo, int64_t hi, int64_t length, int dim,
                     int depth, void *to) {
        static_assert(PIECE == GROUP, "a piece is a group");
        Packed *rows = (Packed *)to + lo * depth, *sums = (Packed *)to + (padded(length) + lo) * depth;
        memset(rows, 0, sizeof(Packed) * (size_t)(GROUP * depth));
        for (int64_t i = lo; i < hi; i++) read_row(t, head, i, dim, rows + (i - lo) * depth);
        for (int k = 0; k < depth; k++)
            for (int i = 0; i < GROUP; i++) sums[k * GROUP + i] = rows[i * depth + k];
    }

    static void pack_lanes(const lt_rows &t, const char *head, int, int64_t lo, int rows, int dim, int depth,
                           Packed *lanes) {
        for (int i = 0; i < LANES; i++) {
            Packed row[MOST] = {};
            if (i < rows) read_row(t, head, lo + i, dim, row);
            for (int k = 0; k < depth; k += 2) memcpy(lanes + k * LANES + 2 * i, row + k, 2 * sizeof(Packed));
        }
    }

    // N tiles of rows from `a` on.
    template <int N>
    static void dot_rows(const char *a, int64_t stride, int depth, const Packed *lanes, float *s) {
        LT_TILE_ZERO(0);
        if (N > 1) LT_TILE_ZERO(1);
        if (N > 2) LT_TILE_ZERO(2);
        if (N > 3) LT_TILE_ZERO(3);
        for (int k = 0; k < depth; k += DEPTH, a += BYTES) {
            LT_TILE_LOAD(5, lanes + k * LANES, BYTES);
            LT_TILE_LOAD(4, a, stride);
            LT_TILE_ADD(0, 4, 5);
            if (N > 1) LT_TILE_LOAD(4, a + LANES * stride, stride);
            if (N > 1) LT_TILE_ADD(1, 4, 5);
            if (N > 2) LT_TILE_LOAD(4, a + 2 * LANES * stride, stride);
            if (N > 2) LT_TILE_ADD(2, 4, 5);
            if (N > 3) LT_TILE_LOAD(4, a + 3 * LANES * stride, stride);
            if (N > 3) LT_TILE_ADD(3, 4, 5);
        }
        LT_TILE_STORE(0, s, BYTES);
        if (N > 1) LT_TILE_STORE(1, s + LANES * LANES, BYTES);
        if (N > 2) LT_TILE_STORE(2, s + 2 * LANES * LANES, BYTES);
        if (N > 3) LT_TILE_STORE(3, s + 3 * LANES * LANES, BYTES);
    }

    template <int NP, bool FETCH>
    static void dot(const void *stream, int64_t, int depth, const Runs &runs, const Packed *lanes, float *s,
                    const void *) {
        const int64_t stride = depth * (int64_t)sizeof(Packed);
        for (const Run *run = runs.run; run < runs.run + runs.count; run++) {
            const char *a = (const char *)stream + run->start * stride;
            const int tiles = (run->count + LANES - 1) / LANES;
            {
                const char *next = (const char *)stream + run[1].start * stride;
                for (int64_t i = 0; i < LANES * stride; i += BYTES) __builtin_prefetch(next + i);
            }
            int i = 0;
            for (; i + 4 <= tiles; i += 4, a += 4 * LANES * stride, s += 4 * LANES * LANES)
                dot_rows<4>(a, stride, depth, lanes, s);
            for (; i < tiles; i++, a += LANES * stride, s += LANES * LANES) dot_rows<1>(a, stride, depth, lanes, s);
        }
    }

    // Rows 2n and 2n + 1 of s, rounded to bf16, as pairs.
    static void make_pairs(const float *s, int rows, uint32_t *pairs) {
        auto rounded = [](const float *p) {
            const Bits bits = (Bits)read(p).x;
            // To nearest even: half of the last kept bit is added, less one unit if that bit is even.
            return bits + 0x7fff + (bits >> 16 & 1);
        };
        for (int n = 0; n < rows; n += 2, s += 2 * LANES, pairs += LANES) {
            const Bits both = rounded(s) >> 16 | (rounded(s + LANES) & 0xffff0000);
            memcpy(pairs, &both, sizeof both);
        }
    }

    // 64 dimensions of y, or 32.
    template <bool WIDE>
    static void sum_part(const char *from, int depth, const Runs &runs, const uint32_t *pairs, float *y) {
        LT_TILE_LOAD(0, y, BYTES);
        LT_TILE_LOAD(1, y + LANES * LANES, BYTES);
        if (WIDE) LT_TILE_LOAD(2, y + 2 * LANES * LANES, BYTES);
        if (WIDE) LT_TILE_LOAD(3, y + 3 * LANES * LANES, BYTES);
        for (const Run *run = runs.run; run < runs.run + runs.count; run++) {
            const int end = run->start + (run->count + LANES - 1) / LANES * LANES;
            for (int i = run->start; i < end;) {
                const char *a = from + (int64_t)(i / GROUP) * depth * BYTES + i % GROUP * 2;
                if (i % GROUP == 0 && i + GROUP <= end) {
                    LT_TILE_LOAD(5, pairs, BYTES);
                    LT_TILE_LOAD(4, a, BYTES);
                    LT_TILE_ADD(0, 4, 5);
                    LT_TILE_LOAD(4, a + 16 * BYTES, BYTES);
                    LT_TILE_ADD(1, 4, 5);
                    if (WIDE) {
                        LT_TILE_LOAD(4, a + 32 * BYTES, BYTES);
                        LT_TILE_ADD(2, 4, 5);
                        LT_TILE_LOAD(4, a + 48 * BYTES, BYTES);
                        LT_TILE_ADD(3, 4, 5);
                    }
                    i += GROUP, pairs += GROUP / 2 * LANES;
                } else {
                    LT_TILE_LOAD(7, pairs, BYTES);
                    LT_TILE_LOAD(6, a, BYTES);
                    LT_TILE_ADD(0, 6, 7);
                    LT_TILE_LOAD(6, a + 16 * BYTES, BYTES);
                    LT_TILE_ADD(1, 6, 7);
                    if (WIDE) {
                        LT_TILE_LOAD(6, a + 32 * BYTES, BYTES);
                        LT_TILE_ADD(2, 6, 7);
                        LT_TILE_LOAD(6, a + 48 * BYTES, BYTES);
                        LT_TILE_ADD(3, 6, 7);
                    }
                    i += LANES, pairs += LANES / 2 * LANES;
                }
            }
        }
        LT_TILE_STORE(0, y, BYTES);
        LT_TILE_STORE(1, y + LANES * LANES, BYTES);
        if (WIDE) LT_TILE_STORE(2, y + 2 * LANES * LANES, BYTES);
        if (WIDE) LT_TILE_STORE(3, y + 3 * LANES * LANES, BYTES);
    }

    template <int NP>
    static void sum(const void *stream, int64_t length, int depth, const Runs &runs, const float *s, float *y) {
        alignas(64) uint32_t pairs[CHUNK / 2 * LANES];
        make_pairs(s, runs.rows, pairs);
        const char *from = (const char *)stream + padded(length) * depth * (int64_t)sizeof(Packed);
        for (int d = 0; d < depth; d += 64) {
            if (d + 64 <= depth) sum_part<true>(from + d * BYTES, depth, runs, pairs, y + d * LANES);
            else sum_part<false>(from + d * BYTES, depth, runs, pairs, y + d * LANES);
        }
    }
};

}  // namespace LT_NAMESPACE
