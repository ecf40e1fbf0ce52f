// The C ABI of compression on the CPU. Flat tensors are cut into pieces that threads take from a counter, as in api.cpp.
#include <cstring>

#include "cpu/parallel.h"

#define LT_NAMESPACE lt_shared
#include "codec.h"

using namespace lt_shared;

namespace {

bool blocks_ok(const lt_blocks *t) {
    return t && t->numel >= 0 && t->block >= GROUP && t->block <= LARGEST_BLOCK && t->block % GROUP == 0 &&
           (t->bits == 8 || t->bits == 4 || t->bits == 2 || t->bits == 1) && is_dtype(t->dtype);
}

// Calls work(lo, hi) for pieces of whole blocks.
template <class Work>
void for_each_piece(const lt_blocks &t, int threads, Work work) {
    const int64_t piece = std::max<int64_t>(1, BLOCK / t.block) * t.block;
    for_each_index((size_t)((t.numel + piece - 1) / piece), t.numel <= SMALL ? 1 : threads,
                   [&](size_t i) { work((int64_t)i * piece, std::min((int64_t)(i + 1) * piece, t.numel)); });
}

void clear(uint8_t *out, int64_t from, int64_t to) { std::memset(out + from, 0, (size_t)(to - from)); }

}  // namespace

LT_API int lt_cpu_encode_blocks(const lt_blocks *t, const void *x, float *residual, void *out, int threads) {
    if (!blocks_ok(t) || (t->numel > 0 && (!x || !out))) return LT_BAD_ARGUMENT;
    if (t->numel == 0) return LT_OK;
    uint8_t *bytes = (uint8_t *)out;
    const int64_t scales = codes_bytes(t->numel, t->bits), used = scales + 4 * blocks_in(t->numel, t->block);
    clear(bytes, t->numel * t->bits / 8, scales);  // padding has a value, too: equal inputs make equal buffers
    clear(bytes, used, padded(used));
    const Kernels &k = lt_kernels();
    for_each_piece(*t, threads, [&](int64_t lo, int64_t hi) { k.encode_blocks(*t, x, residual, bytes, lo, hi); });
    return LT_OK;
}

LT_API int lt_cpu_decode_blocks(const lt_blocks *t, int64_t count, const void *const *buffers, double factor, void *out,
                                int threads) {
    if (!blocks_ok(t) || count < 1 || !buffers || (t->numel > 0 && !out)) return LT_BAD_ARGUMENT;
    const Kernels &k = lt_kernels();
    for_each_piece(*t, threads, [&](int64_t lo, int64_t hi) {
        k.decode_blocks(*t, count, (const uint8_t *const *)buffers, (float)factor, out, lo, hi);
    });
    return LT_OK;
}
