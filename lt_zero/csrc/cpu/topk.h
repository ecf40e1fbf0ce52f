// The passes of a selection of the largest magnitudes, for one instruction set. Included by kernels.h.
//
// Magnitudes are compared as the integers that their bits are: the order of the numbers, with NaN above infinity.
#pragma once

#include "codec.h"
#include "cpu/table.h"
#include "cpu/vec.h"

namespace LT_NAMESPACE {

// Calls vector(i, magnitudes) for whole vectors of [lo, hi), and scalar(i, magnitude) for what is left.
template <class Vector, class Scalar>
static inline void for_each_magnitude(const float *c, int64_t lo, int64_t hi, Vector vector, Scalar scalar) {
    int64_t i = lo;
    for (; i + W <= hi; i += W) {
        prefetch(c, LT_FP32, i);
        vector(i, magnitude_bits(load(c, LT_FP32, i)));
    }
    for (; i < hi; i++) scalar(i, magnitude_bits(c[i]));
}

static void upper_histogram(const float *c, int64_t lo, int64_t hi, uint32_t *bins) {
    for_each_magnitude(
        c, lo, hi,
        [&](int64_t, Ints m) {
            int32_t upper[W];
            m >>= 15;
            memcpy(upper, &m, sizeof upper);
            for (int i = 0; i < W; i++) bins[upper[i]]++;
        },
        [&](int64_t, int32_t m) { bins[m >> 15]++; });
}

static void lower_histogram(const float *c, int64_t lo, int64_t hi, int32_t upper, uint32_t *bins) {
    for_each_magnitude(
        c, lo, hi,
        [&](int64_t, Ints m) {
            for (uint32_t hit = lanes_of((m >> 15) == upper); hit; hit &= hit - 1)
                bins[m[__builtin_ctz(hit)] & 0x7fff]++;
        },
        [&](int64_t, int32_t m) {
            if (m >> 15 == upper) bins[m & 0x7fff]++;
        });
}

static void count_from(const float *c, int64_t lo, int64_t hi, int32_t threshold, int64_t *above, int64_t *equal) {
    Ints more = {}, same = {};  // minus the numbers, for a mask is -1
    for_each_magnitude(
        c, lo, hi,
        [&](int64_t, Ints m) {
            more += m > threshold;
            same += m == threshold;
        },
        [&](int64_t, int32_t m) {
            more[0] -= m > threshold;
            same[0] -= m == threshold;
        });
    *above = *equal = 0;
    for (int i = 0; i < W; i++) {
        *above -= more[i];
        *equal -= same[i];
    }
}

static void indices_from(const float *c, int64_t lo, int64_t hi, int32_t threshold, int64_t ties, int32_t *indices) {
    auto take = [&](int64_t i, int32_t m) {
        if (m == threshold && ties-- <= 0) return;
        *indices++ = (int32_t)i;
    };
    for_each_magnitude(
        c, lo, hi,
        [&](int64_t i, Ints m) {
            for (uint32_t hit = lanes_of(m >= threshold); hit; hit &= hit - 1) {
                const int lane = __builtin_ctz(hit);
                take(i + lane, m[lane]);
            }
        },
        [&](int64_t i, int32_t m) {
            if (m >= threshold) take(i, m);
        });
}

}  // namespace LT_NAMESPACE
