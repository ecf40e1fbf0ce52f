// The C ABI of compression on the CPU. Flat tensors are cut into pieces that threads take from a counter, as in api.cpp.
#include <cstring>

#include "cpu/parallel.h"

#define LT_NAMESPACE lt_shared
#include "codec.h"

using namespace lt_shared;

namespace {

bool blocks_ok(const lt_blocks *t) {
    return t && t->rows >= 0 && t->rows <= LARGEST_ROWS && t->numel >= 0 && t->block >= GROUP &&
           t->block <= LARGEST_BLOCK && t->block % GROUP == 0 && (!t->normal || t->bits == 4) &&
           (t->bits == 8 || t->bits == 4 || t->bits == 2 || t->bits == 1) && is_dtype(t->dtype);
}

// Calls work(row, lo, hi) for pieces of whole blocks of each row.
template <class Work>
void for_each_piece(const lt_blocks &t, int threads, Work work) {
    const int64_t piece = std::max<int64_t>(1, BLOCK / t.block) * t.block;
    const int64_t pieces = (t.numel + piece - 1) / piece;
    for_each_index((size_t)(pieces * t.rows), t.numel * t.rows <= SMALL ? 1 : threads, [&](size_t i) {
        const int64_t row = (int64_t)i / pieces, lo = ((int64_t)i - row * pieces) * piece;
        work(row, lo, std::min(lo + piece, t.numel));
    });
}

// Which bin has the element of rank `rank` (from 1) when bins are counted from the last one down; `rank` becomes that
// within the bin.
int32_t find_bin(const uint32_t *bins, size_t slices, size_t count, int64_t &rank) {
    for (size_t bin = count; bin-- > 0;) {
        int64_t held = 0;
        for (size_t slice = 0; slice < slices; slice++) held += bins[slice * count + bin];
        if (held >= rank) return (int32_t)bin;
        rank -= held;
    }
    return 0;
}

// Histograms of `count` bins by slices of the tensor, a slice for each thread, and the bin of `rank`.
template <class Fill>
int32_t ranked_bin(int64_t numel, int threads, size_t count, int64_t &rank, Fill fill) {
    const int64_t slices = numel <= SMALL ? 1 : std::max(1, threads), each = (numel + slices - 1) / slices;
    std::vector<uint32_t> bins((size_t)slices * count);
    for_each_index((size_t)slices, threads, [&](size_t i) {
        const int64_t lo = std::min((int64_t)i * each, numel);
        fill(lo, std::min(lo + each, numel), bins.data() + i * count);
    });
    return find_bin(bins.data(), (size_t)slices, count, rank);
}

// The bits of the k-th largest magnitude; `ties`: how many elements that equal it are among the k.
int32_t find_threshold(const float *c, int64_t numel, int64_t k, int threads, int64_t &ties) {
    const Kernels &kernels = lt_kernels();
    ties = k;
    const int32_t upper = ranked_bin(numel, threads, 1 << 16, ties, [&](int64_t lo, int64_t hi, uint32_t *bins) {
        kernels.upper_histogram(c, lo, hi, bins);
    });
    const int32_t lower = ranked_bin(numel, threads, 1 << 15, ties, [&](int64_t lo, int64_t hi, uint32_t *bins) {
        kernels.lower_histogram(c, lo, hi, upper, bins);
    });
    return upper << 15 | lower;
}

void clear(uint8_t *out, int64_t from, int64_t to) { std::memset(out + from, 0, (size_t)(to - from)); }

}  // namespace

LT_API int lt_cpu_encode_blocks(const lt_blocks *t, const void *x, float *residual, void *out, int threads) {
    if (!blocks_ok(t) || (t->numel > 0 && (!x || !out))) return LT_BAD_ARGUMENT;
    if (t->numel == 0) return LT_OK;
    uint8_t *bytes = (uint8_t *)out;
    const int64_t scales = codes_bytes(t->numel, t->bits), used = scales + 4 * blocks_in(t->numel, t->block);
    const int64_t buffer = padded(used), x_row = t->numel * (t->dtype == LT_FP32 ? 4 : 2);
    // Padding is cleared, too, so that equal inputs make equal buffers.
    for (int64_t row = 0; row < t->rows; row++) {
        clear(bytes + row * buffer, t->numel * t->bits / 8, scales);
        clear(bytes + row * buffer, used, buffer);
    }
    const Kernels &k = lt_kernels();
    for_each_piece(*t, threads, [&](int64_t row, int64_t lo, int64_t hi) {
        float *left = residual ? residual + row * t->residual_row : nullptr;
        k.encode_blocks(*t, (const char *)x + row * x_row, left, bytes + row * buffer, lo, hi);
    });
    return LT_OK;
}

LT_API int lt_cpu_decode_blocks(const lt_blocks *t, int64_t count, const void *const *buffers, double factor, void *out,
                                int threads) {
    if (!blocks_ok(t) || count < 1 || (count > 1 && t->rows > 1) || !buffers || (t->numel > 0 && !out))
        return LT_BAD_ARGUMENT;
    const int64_t buffer = buffer_bytes(t->numel, t->block, t->bits), out_row = t->numel * (t->dtype == LT_FP32 ? 4 : 2);
    const Kernels &k = lt_kernels();
    for_each_piece(*t, threads, [&](int64_t row, int64_t lo, int64_t hi) {
        const uint8_t *own = (const uint8_t *)buffers[0] + row * buffer;
        const uint8_t *const *in = row ? &own : (const uint8_t *const *)buffers;
        k.decode_blocks(*t, count, in, (float)factor, (char *)out + row * out_row, lo, hi);
    });
    return LT_OK;
}

LT_API int lt_cpu_select_topk(const float *c, int64_t numel, int64_t k, int32_t *indices, int threads) {
    if (numel < 0 || numel > INT32_MAX || k < 0 || k > numel || (k > 0 && (!c || !indices))) return LT_BAD_ARGUMENT;
    if (k == 0) return LT_OK;
    return guarded([&] {
        int64_t ties;
        const int32_t threshold = find_threshold(c, numel, k, threads, ties);
        struct Piece {
            int64_t lo, hi, above, equal, place;
        };
        std::vector<Piece> pieces;
        for (int64_t lo = 0; lo < numel; lo += BLOCK) pieces.push_back({lo, std::min(lo + BLOCK, numel), 0, 0, 0});
        const int most = numel <= SMALL ? 1 : threads;
        const Kernels &kernels = lt_kernels();
        for_each_index(pieces.size(), most, [&](size_t i) {
            Piece &p = pieces[i];
            kernels.count_from(c, p.lo, p.hi, threshold, &p.above, &p.equal);
        });
        int64_t place = 0;
        for (Piece &p : pieces) {
            p.place = place;
            p.equal = std::min(p.equal, ties);  // the first ones
            ties -= p.equal;
            place += p.above + p.equal;
        }
        for_each_index(pieces.size(), most, [&](size_t i) {
            const Piece &p = pieces[i];
            if (p.above + p.equal > 0) kernels.indices_from(c, p.lo, p.hi, threshold, p.equal, indices + p.place);
        });
    });
}
