// Moments in 8 bits: what the CPU's and CUDA's kernels share. The format is described in lt_zero/ops/moments.py.
#pragma once

#include <stdint.h>
#include <string.h>

#include "lt_zero.h"

#ifndef LT_FN
#define LT_FN static inline
#endif

namespace LT_NAMESPACE {

constexpr int kCoded = 256;                        // elements of a block
constexpr int kRecord = kCoded + 4;                // bytes: codes, and the scale
constexpr uint32_t kFirstStart = (127u - 24) << 7; // upper half of the bits of 2^-24
constexpr uint32_t kStarts = (127u << 7) - kFirstStart + 1;

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

// The code of a state on one device.
struct Coding {
    const float *levels, *middles;
    const uint8_t *starts;
    bool is_signed;
};

LT_FN Coding make_coding(const float *numbers, const void *starts, bool is_signed) {
    const float *levels = numbers + (is_signed ? 0 : 256);
    return Coding{levels, levels + (is_signed ? 128 : 256), (const uint8_t *)starts + (is_signed ? 0 : kStarts),
                  is_signed};
}

LT_FN float decoded(const Coding &coding, uint8_t code, float scale) {
    if (!coding.is_signed) return coding.levels[code] * scale;
    uint32_t bits = bits_of(coding.levels[code & 127]) | (uint32_t)(code & 128) << 24;  // branches would be mispredicted
    float level;
    memcpy(&level, &bits, sizeof level);
    return level * scale;
}

// `scale` is above 0, and at least |x|.
LT_FN uint8_t encoded(const Coding &coding, float x, float scale) {
    float ratio = x / scale;
    uint32_t bits = bits_of(ratio), sign = bits >> 31;
    if (sign && !coding.is_signed) return 0;
    bits &= 0x7fffffffu;
    uint32_t code = coding.starts[bits >> 16 < kFirstStart ? 0 : (bits >> 16) - kFirstStart];
    float magnitude;
    memcpy(&magnitude, &bits, sizeof magnitude);
    code += magnitude > coding.middles[code];
    if (coding.is_signed) return (uint8_t)(code | (code ? sign << 7 : 0));
    return (uint8_t)(code == 0 && bits != 0 ? 1 : code);
}

}  // namespace LT_NAMESPACE
