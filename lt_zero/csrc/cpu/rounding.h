// Stochastic rounding to bf16, for one instruction set: lt_zero/ops/rounding.py describes it. Included by kernels.h.
#pragma once

#include "cpu/table.h"
#include "cpu/vec.h"

namespace LT_NAMESPACE {

constexpr int kNumbers = 16, kGroup = 128;  // numbers of Philox, and elements that have their bits
constexpr int kParts = kNumbers / W;

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

// Four words of each of the numbers `number` to `number` + W - 1, none of which carries into the upper word.
static inline void philox(const lt_rounding &t, uint64_t number, Bits words[4]) {
    Bits a = Bits{} + (uint32_t)number, b = Bits{} + (uint32_t)(number >> 32);
    for (int i = 0; i < W; i++) a[i] += (uint32_t)i;
    Bits c = Bits{} + (uint32_t)t.step, d = Bits{} + (uint32_t)(t.step >> 32);
    uint32_t low = (uint32_t)t.seed, high = (uint32_t)(t.seed >> 32);
    for (int round = 0; round < 7; round++) {
        const Bits first = upper_product(a, 0xd2511f53u), first_low = a * 0xd2511f53u;
        const Bits second = upper_product(c, 0xcd9e8d57u), second_low = c * 0xcd9e8d57u;
        a = second ^ b ^ low;
        b = second_low;
        c = first ^ d ^ high;
        d = first_low;
        low += 0x9e3779b9u;
        high += 0xbb67ae85u;
    }
    words[0] = a;
    words[1] = b;
    words[2] = c;
    words[3] = d;
}

// The bits of W elements, of which the upper halves are what is rounded.
static inline Bits rounded_randomly(Bits bits, Bits random) {
    const Bits magnitude = bits & 0x7fffffffu, nearest = bits + 0x7fffu + (bits >> 16 & 1u);
    const Bits rounded = magnitude > 0x7f7f0000u ? nearest : bits + random;
    return magnitude > 0x7f800000u ? Bits{} + 0x7fc00000u : rounded;
}

// Elements that follow each other in the parameter: the first of them is number `index` there.
static void round_row(const lt_rounding &t, const float *src, uint16_t *dst, int64_t index, int64_t count) {
    const int64_t end = index + count;
    for (int64_t group = index / kGroup * kGroup; group < end; group += kGroup) {
        Bits words[kParts][4];
        for (int part = 0; part < kParts; part++)
            philox(t, (uint64_t)(group / kGroup * kNumbers + part * W), words[part]);
        if (group >= index && group + kGroup <= end) {
            for (int half = 0; half < 8; half++)
                for (int part = 0; part < kParts; part++) {
                    const int64_t at = group - index + half * kNumbers + part * W;
                    const Bits word = words[part][half / 2];
                    Bits bits;
                    memcpy(&bits, src + at, sizeof bits);
                    store_upper(dst + at, rounded_randomly(bits, half % 2 ? word >> 16 : word & 0xffffu));
                }
            continue;
        }
        for (int64_t i = group < index ? index : group; i < group + kGroup && i < end; i++) {
            const int at = (int)(i - group), half = at / kNumbers, number = at % kNumbers;
            const uint32_t word = words[number / W][half / 2][number % W];
            uint32_t bits;
            memcpy(&bits, src + (i - index), sizeof bits);
            const Bits one = rounded_randomly(Bits{} + bits, Bits{} + (half % 2 ? word >> 16 : word & 0xffffu));
            dst[i - index] = (uint16_t)(one[0] >> 16);
        }
    }
}

// Elements [lo, hi) of the list.
static void round_stochastic(const lt_rounding &t, int64_t lo, int64_t hi) {
    while (lo < hi) {
        const int64_t row = lo / t.row, within = lo - row * t.row, rest = t.row - within;
        const int64_t count = rest < hi - lo ? rest : hi - lo;
        round_row(t, t.src + lo, (uint16_t *)t.dst + lo, t.first + row * t.stride + within, count);
        lo += count;
    }
}

}  // namespace LT_NAMESPACE
