// Moments in 8 bits: what the CPU's and CUDA's kernels share. The format is described in lt_zero/kernels/moments.py.
#pragma once

#include <stdint.h>
#include <string.h>

#include "lt_zero.h"

#ifndef LT_FN
#define LT_FN static inline
#endif

namespace LT_NAMESPACE {

constexpr int kCoded = 256;          // elements of a block
constexpr int kRecord = kCoded + 4;  // bytes: codes, and the scale

LT_FN uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// From the bits of the largest magnitude.
LT_FN float scale_of(uint32_t largest) {
    if (largest >= 0x7f800000u) largest = 0x7fc00000u;  // infinity or NaN: all is NaN
    float scale;
    memcpy(&scale, &largest, sizeof scale);
    return scale < 0x1p-100f ? 0.0f : scale;
}

// The code of a state on one device: its levels, and what lies half-way to the next one.
template <bool SIGNED>
struct Coding {
    const float *levels, *middles;
};

template <bool SIGNED>
LT_FN Coding<SIGNED> make_coding(const float *numbers) {
    const float *levels = numbers + (SIGNED ? 0 : 256);
    return Coding<SIGNED>{levels, levels + (SIGNED ? 128 : 256)};
}

// A number whose integer part is the code of a ratio (0 to 1), or the code before it.
//
// Levels of a decade have equal distances, so codes rise with the ratio along a line, and the line of each decade is
// flatter than that of the decade before: the least of all lines is the one of the ratio's own decade. Half-way to the
// next level a line is at an integer; 0.2 above it where the next level is of another decade, and up to 0.25 beside the
// largest level. So 0.3 less is never beyond the code, with room for the lines' rounding.
template <bool SIGNED, class V>
LT_FN V near_code(V ratio) {
    auto line = [&](float inverse, float count) {
        return multiply_add(ratio, V(inverse * count / 0.9f), V(count * 0.8f / 0.9f));
    };
    V code = smaller(line(1e6f, 1.0f), line(1e5f, 2.0f));
    code = smaller(code, smaller(line(1e4f, 4.0f), line(1e3f, 8.0f)));
    code = smaller(code, smaller(line(1e2f, 16.0f), line(1e1f, 32.0f)));
    code = smaller(code, line(1.0f, 64.0f));
    return SIGNED ? code - V(0.3f) : code + code - V(1.3f);  // twice as many levels, of which the first has number 1
}

}  // namespace LT_NAMESPACE
