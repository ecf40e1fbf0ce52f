// Block-wise compression: what the CPU's and CUDA's kernels share. The format, and where its numbers come from, is
// described in lt_zero/kernels/blocks.py and features/quantize/nf4.py, beside the torch references.
//
// Every sum and maximum over a block is exact, so its order is free and all implementations give the same bits:
// magnitudes are compared as integers, and added up in fp64 after rounding them to a common unit.
#pragma once

#include <float.h>
#include <stdint.h>
#include <string.h>

#include "lt_zero.h"

#ifndef LT_FN
#define LT_FN static inline
#endif

namespace LT_NAMESPACE {

constexpr int GROUP = 16;                     // elements whose codes are packed together; a block is a multiple of it
constexpr int64_t LARGEST_BLOCK = 1 << 16;    // sums of 2^16 magnitudes of 36 bits are exact in fp64
constexpr int64_t LARGEST_ROWS = 65535;       // CUDA's limit of a grid's second dimension
constexpr int32_t INFINITE = 0x7f800000;      // bits of |x| from here on: infinity and NaN
constexpr float ROUND = 12582912.0f;          // 1.5 * 2^23: x + ROUND - ROUND rounds x to an integer
constexpr float LOW_LEVEL = 0.5674756f;       // of 2 bits, in units of the mean magnitude: Lloyd-Max for a Gaussian
constexpr float HIGH_LEVEL = 1.8930277f;
constexpr float THRESHOLD = 1.2302517f;       // half-way between them

LT_FN int64_t padded(int64_t bytes) { return (bytes + 15) / 16 * 16; }
LT_FN int64_t codes_bytes(int64_t numel, int bits) { return padded((numel * bits + 7) / 8); }
LT_FN int64_t blocks_in(int64_t numel, int64_t block) { return (numel + block - 1) / block; }
LT_FN int64_t buffer_bytes(int64_t numel, int64_t block, int bits) {
    return codes_bytes(numel, bits) + padded(4 * blocks_in(numel, block));
}

LT_FN int32_t magnitude_bits(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff;
}

LT_FN float float_of(int32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

LT_FN float not_a_number() { return float_of(0x7fc00000); }

// Uniform levels (8 and 4 bits) from the largest magnitude. A scale without a finite reciprocal counts as 0.
LT_FN float uniform_scale(int32_t largest, int bits) {
    if (largest >= INFINITE) return not_a_number();
    float scale = float_of(largest) / (bits == 8 ? 127.0f : 7.0f);
    return scale < FLT_MIN ? 0.0f : scale;
}

// NormalFloat: 16 levels, rising, in units of the largest magnitude.
struct NormalLevels {
    float level[16];
};

LT_FN constexpr NormalLevels normal_levels() {
    return NormalLevels{{-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
                         -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
                         0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
                         0.7229568362236023f, 1.0f}};
}

LT_FN float normal_scale(int32_t largest) { return largest >= INFINITE ? not_a_number() : float_of(largest); }

// (|x| + unit_shift) - unit_shift rounds to a multiple of 2^-36 times the power of two above the largest magnitude.
LT_FN double unit_shift(int32_t largest) {
    int64_t exponent = (largest >> 23) - 126 + 16, bits = (exponent + 1023) << 52 | (int64_t)1 << 51;  // 1.5 * 2^it
    double shift;
    memcpy(&shift, &bits, sizeof shift);
    return shift;
}

LT_FN float mean_scale(int32_t largest, double sum, int64_t count) {
    return largest >= INFINITE ? not_a_number() : (float)(sum / (double)count);
}

// 1 and 2 bits: the lowest bit of a code is the sign, the other one chooses the level.
struct Levels {
    float low, high, threshold;
};

LT_FN Levels make_levels(float scale, int bits) {
    if (bits == 1) return Levels{scale, scale, not_a_number()};  // nothing is above the threshold
    return Levels{scale * LOW_LEVEL, scale * HIGH_LEVEL, scale * THRESHOLD};
}

// Eight codes of one byte each, in the order of memory, to 8 * bits bits and back. Little-endian, as all targets are.
LT_FN uint64_t pack8(uint64_t x, int bits) {
    if (bits == 8) return x;
    if (bits == 4) {
        x = (x | x >> 4) & 0x00ff00ff00ff00ffull;
        x = (x | x >> 8) & 0x0000ffff0000ffffull;
        return (x | x >> 16) & 0xffffffffull;
    }
    if (bits == 2) {
        x = (x | x >> 6) & 0x000f000f000f000full;
        x = (x | x >> 12) & 0x000000ff000000ffull;
        return (x | x >> 24) & 0xffffull;
    }
    x = (x | x >> 7) & 0x0003000300030003ull;
    x = (x | x >> 14) & 0x0000000f0000000full;
    return (x | x >> 28) & 0xffull;
}

LT_FN uint64_t unpack8(uint64_t x, int bits) {
    if (bits == 8) return x;
    if (bits == 4) {
        x = (x | x << 16) & 0x0000ffff0000ffffull;
        x = (x | x << 8) & 0x00ff00ff00ff00ffull;
        return (x | x << 4) & 0x0f0f0f0f0f0f0f0full;
    }
    if (bits == 2) {
        x = (x | x << 24) & 0x000000ff000000ffull;
        x = (x | x << 12) & 0x000f000f000f000full;
        return (x | x << 6) & 0x0303030303030303ull;
    }
    x = (x | x << 28) & 0x0000000f0000000full;
    x = (x | x << 14) & 0x0003000300030003ull;
    return (x | x << 7) & 0x0101010101010101ull;
}

}  // namespace LT_NAMESPACE
