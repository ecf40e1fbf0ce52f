// Stochastic rounding to bf16, for one instruction set: lt_zero/kernels/rounding.py describes it. Included by kernels.h.
#pragma once

#include "cpu/table.h"
#include "cpu/vec.h"

namespace LT_NAMESPACE {

// The upper halves of the products, of 64 bits.
static inline Bits upper_product(Bits a, uint32_t b) {
#if defined(__AVX512F__)
    const __m512i factor = _mm512_set1_epi32((int)b), even = _mm512_mul_epu32((__m512i)a, factor);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
    return (Bits)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
#elif defined(__AVX2__)
    const __m256i factor = _mm256_set1_epi32((int)b), even = _mm256_mul_epu32((__m256i)a, factor);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), factor);
    return (Bits)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
#elif defined(__aarch64__)
    const uint64x2_t low = vmull_n_u32(vget_low_u32((uint32x4_t)a), b);
    const uint64x2_t high = vmull_n_u32(vget_high_u32((uint32x4_t)a), b);
    return (Bits)vuzp2q_u32(vreinterpretq_u32_u64(low), vreinterpretq_u32_u64(high));
#else
    Bits r;
    for (int i = 0; i < W; i++) r[i] = (uint32_t)((uint64_t)a[i] * b >> 32);
    return r;
#endif
}

}  // namespace LT_NAMESPACE

#include "stochastic.h"  // which finds the function above

namespace LT_NAMESPACE {

constexpr int kTile = 1024;  // elements whose random bits are drawn at a time, and stay in the first cache

// Draws 16 random bits for each of `count` elements that follow each other in the parameter from number `index` on.
static void draw_stretch(const lt_place &place, int64_t index, int64_t count, uint16_t *out) {
    const int64_t end = index + count;
    for (int64_t group = index / kPhiloxGroup * kPhiloxGroup; group < end; group += kPhiloxGroup) {
        const int64_t lo = group < index ? index : group, hi = group + kPhiloxGroup < end ? group + kPhiloxGroup : end;
        uint16_t some[kPhiloxGroup];
        uint16_t *bits = hi - lo == kPhiloxGroup ? out + (group - index) : some;
        for (int part = 0; part < kNumbers; part += W) {
            const uint64_t number = (uint64_t)(group / kPhiloxGroup * kNumbers + part);
            Bits low = Bits{} + (uint32_t)number;  // numbers of a group do not carry into the upper word
            for (int i = 0; i < W; i++) low[i] += (uint32_t)i;
            const Words<Bits> words = philox(low, Bits{} + (uint32_t)(number >> 32), place);
            for (int half = 0; half < kPhiloxGroup / kNumbers; half++) {
                const Bits word = words.word[half / 2];
                store_upper(bits + half * kNumbers + part, half % 2 ? word : word << 16);
            }
        }
        if (bits == some) memcpy(out + (lo - index), some + (lo - group), sizeof *some * (size_t)(hi - lo));
    }
}

// Draws 16 random bits for each of the elements [lo, hi) of a tensor.
static void draw(const lt_place *places, int64_t place_count, int64_t tensor, int64_t lo, int64_t hi, uint16_t *out) {
    PlaceCursor cursor = find_place(places, place_count, tensor, lo);
    for (int64_t i = lo; i < hi;) {
        move_to(cursor, i);
        const Stretch stretch = stretch_from(*cursor.place, i);
        const int64_t rest = (cursor.next < hi ? cursor.next : hi) - i;
        const int64_t count = stretch.count < rest ? stretch.count : rest;
        draw_stretch(*cursor.place, stretch.index, count, out + (i - lo));
        i += count;
    }
}

// The upper halves are numbers of bf16, rounded by the random bits of elements `i` and following.
template <class At>
static inline Bits random_bfloat(At at, const uint16_t *random, int64_t i, Vec x) {
    return rounded_randomly((Bits)x.x, (Bits)at.load(random, LT_BF16, i).x >> 16);
}

// Elements [lo, hi) of the list.
static void round_stochastic(const lt_rounding &t, int64_t lo, int64_t hi) {
    uint16_t random[kTile];
    for (int64_t begin = lo; begin < hi; begin += kTile) {
        const int64_t end = begin + kTile < hi ? begin + kTile : hi;
        draw(&t.place, 1, 0, begin, end, random);
        for_each_vector(begin, end, [&](auto at, int64_t i) {
            at.store_upper(t.dst, i, random_bfloat(at, random, i - begin, at.load(t.src, LT_FP32, i)));
        });
    }
}

}  // namespace LT_NAMESPACE
