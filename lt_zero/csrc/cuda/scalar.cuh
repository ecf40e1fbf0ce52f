// Scalars of the device code: Float, which is update.h's V on CUDA, and the 16-bit storage formats.
//
// Notes:
// - All arithmetic is fp32 on Float, one rounding an operation. `*` and `+` must stay two operations: build with
//   -fmad=false. Division and square root are nvcc's default IEEE ones, and denormals are kept: never -use_fast_math.
// - Float's functions are hidden friends: only an argument that is a Float finds them, so that none of them takes the
//   place of a double function of <math.h> in host code.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

#define LT_NAMESPACE lt_cuda
#define LT_FN __host__ __device__ __forceinline__
#define LT_DEVICE __device__ __forceinline__
#define LT_EXPORT extern "C" __attribute__((visibility("default")))

namespace lt_cuda {

struct Float {
    float x;

    Float() = default;
    explicit LT_FN Float(float value) : x(value) {}

    friend LT_FN Float operator+(Float a, Float b) { return Float(a.x + b.x); }
    friend LT_FN Float operator-(Float a, Float b) { return Float(a.x - b.x); }
    friend LT_FN Float operator*(Float a, Float b) { return Float(a.x * b.x); }
    friend LT_FN Float operator/(Float a, Float b) { return Float(a.x / b.x); }
    friend LT_FN Float fma(Float a, Float b, Float c) { return Float(::fmaf(a.x, b.x, c.x)); }
    friend LT_FN Float multiply_add(Float a, Float b, Float c) { return fma(a, b, c); }
    friend LT_FN Float smaller(Float a, Float b) { return Float(a.x < b.x ? a.x : b.x); }
    friend LT_FN Float sqrt(Float a) { return Float(::sqrtf(a.x)); }
    friend LT_FN Float sign(Float a) { return Float((float)((a.x > 0.0f) - (a.x < 0.0f))); }  // of NaN: 0, as in torch
};

// The bits of a stored element. Not __half and __nv_bfloat16, whose operators would make it easy to compute in them.
struct fp16 {
    uint16_t bits;
};

struct bf16 {
    uint16_t bits;
};

// In place of the element type of a tensor that is not there.
struct None {};

LT_DEVICE float widen(float x) { return x; }
LT_DEVICE float widen(bf16 x) { return __uint_as_float((uint32_t)x.bits << 16); }
LT_DEVICE float widen(fp16 x) { return __half2float(__ushort_as_half(x.bits)); }

// Round to nearest, ties to even.
LT_DEVICE void narrow(float x, float &to) { to = x; }
LT_DEVICE void narrow(float x, fp16 &to) { to.bits = __half_as_ushort(__float2half_rn(x)); }

// By hand because the GPU's own conversion makes every NaN 0x7FFF, torch on the CPU 0x7FC0.
LT_DEVICE void narrow(float x, bf16 &to) {
    uint32_t bits = __float_as_uint(x);
    to.bits = (uint16_t)(x != x ? 0x7FC0u : (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace lt_cuda

#include "../update.h"
