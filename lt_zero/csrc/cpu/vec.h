// Vec: as many fp32 lanes as the instruction set at hand has, with conversions from and to bf16 and fp16.
//
// Included once per instruction set with LT_NAMESPACE defined. Everything is internal to the including file, and no C++
// standard header is used: an inline function that the linker takes from a file compiled for AVX-512 would crash on
// older CPUs.
//
// bf16 is rounded with integer arithmetic: the instruction for it (VCVTNEPS2BF16) flushes denormals to zero.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "cpu/table.h"

#if defined(__AVX2__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC bug 105593, in its own header
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace LT_NAMESPACE {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;  // GCC compares and chooses lane by lane where vectors are wider than the instruction set's
#endif

typedef float Lanes __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Bits __attribute__((vector_size(4 * W)));
typedef uint16_t Halves __attribute__((vector_size(2 * W)));

struct Vec {
    Lanes x;

    Vec() = default;
    Vec(Lanes lanes) : x(lanes) {}
    explicit Vec(float value) : x(value - Lanes{}) {}  // in all lanes; -0 stays -0
};

static inline Vec operator+(Vec a, Vec b) { return a.x + b.x; }
static inline Vec operator-(Vec a, Vec b) { return a.x - b.x; }
static inline Vec operator*(Vec a, Vec b) { return a.x * b.x; }
static inline Vec operator/(Vec a, Vec b) { return a.x / b.x; }
static inline Vec operator-(Vec a) { return -a.x; }

#if !defined(__AVX2__)
// A vector of what each lane's number is mapped to. Made by assignments to lanes, it would be read from memory before
// they have all arrived there.
template <class T, class Map>
static inline T each_lane(Map map) {
    static_assert(W == 4, "one argument for each lane");
    return T{map(0), map(1), map(2), map(3)};
}
#endif

static inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_fmadd_ps((__m512)a.x, (__m512)b.x, (__m512)c.x);
#elif defined(__AVX2__)
    return (Lanes)_mm256_fmadd_ps((__m256)a.x, (__m256)b.x, (__m256)c.x);
#elif defined(__aarch64__)
    return (Lanes)vfmaq_f32((float32x4_t)c.x, (float32x4_t)a.x, (float32x4_t)b.x);
#else
    return each_lane<Lanes>([&](int i) { return fmaf(a.x[i], b.x[i], c.x[i]); });
#endif
}

// Where no exact rounding is needed: fmaf() without an instruction for it would take a hundred times longer.
static inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX2__) || defined(__aarch64__)
    return fma(a, b, c);
#else
    return a * b + c;
#endif
}

static inline Vec smaller(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_min_ps((__m512)a.x, (__m512)b.x);
#elif defined(__AVX2__)
    return (Lanes)_mm256_min_ps((__m256)a.x, (__m256)b.x);
#else
    return a.x < b.x ? a.x : b.x;
#endif
}

static inline Vec sqrt(Vec a) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_sqrt_ps((__m512)a.x);
#elif defined(__AVX2__)
    return (Lanes)_mm256_sqrt_ps((__m256)a.x);
#elif defined(__aarch64__)
    return (Lanes)vsqrtq_f32((float32x4_t)a.x);
#else
    return each_lane<Lanes>([&](int i) { return sqrtf(a.x[i]); });
#endif
}

static inline Vec sign(Vec a) {  // 0 for NaN, as torch.sign
    Ints s = (a.x < Lanes{}) - (a.x > Lanes{});
    return __builtin_convertvector(s, Lanes);
}

static inline Ints magnitude_bits(Vec a) { return (Ints)a.x & 0x7fffffff; }

static inline Ints larger(Ints a, Ints b) {
    Ints m = a > b;
    return (a & m) | (b & ~m);
}

static inline int32_t largest_lane(Ints a) {
    int32_t largest = 0;
    for (int i = 0; i < W; i++) largest = a[i] > largest ? a[i] : largest;
    return largest;
}

// table[index] in each lane, of COUNT numbers: a power of two from 16 on.
template <int COUNT>
static inline Vec look_up(const float *table, Ints index) {
#if defined(__AVX512F__)
    // A quarter of the time of gathers: permutations of 32 numbers, and a choice for each further bit of the index.
    if constexpr (COUNT == 16) {
        return (Lanes)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
    } else if constexpr (COUNT == 32) {
        const __m512 lo = _mm512_loadu_ps(table), hi = _mm512_loadu_ps(table + 16);
        return (Lanes)_mm512_permutex2var_ps(lo, (__m512i)index, hi);
    } else {
        const __mmask16 upper = _mm512_test_epi32_mask((__m512i)index, _mm512_set1_epi32(COUNT / 2));
        const Vec lo = look_up<COUNT / 2>(table, index), hi = look_up<COUNT / 2>(table + COUNT / 2, index);
        return (Lanes)_mm512_mask_blend_ps(upper, (__m512)lo.x, (__m512)hi.x);
    }
#elif defined(__AVX2__)
    if constexpr (COUNT == 16) {
        const __m256 lo = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)index);
        const __m256 hi = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)index);
        return (Lanes)_mm256_blendv_ps(lo, hi, (__m256)(index << 28));
    } else {
        return (Lanes)_mm256_i32gather_ps(table, (__m256i)index, 4);
    }
#else
#if defined(__aarch64__)
    if constexpr (COUNT == 16) {  // by bytes: the four of number k are 4 k ... 4 k + 3
        const uint8x16x4_t bytes = vld1q_u8_x4((const uint8_t *)table);
        return (Lanes)vqtbl4q_u8(bytes, (uint8x16_t)(index * 0x04040404 + 0x03020100));
    }
#endif
    return each_lane<Lanes>([&](int i) { return table[index[i]]; });
#endif
}

// A bit for each lane of a mask, whose lanes are all ones or zero.
static inline uint32_t lanes_of(Ints mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#else
    uint32_t lanes = 0;
    for (int i = 0; i < W; i++) lanes |= (uint32_t)(mask[i] & 1) << i;
    return lanes;
#endif
}

// ---- 16 bits -----------------------------------------------------------------------------------------------------

#if !defined(__AVX2__) && !defined(__aarch64__)
static inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, bits;
    if (rest >= 0x7c00) {
        bits = sign | 0x7f800000 | (rest & 0x3ff) << 13 | (rest > 0x7c00 ? 0x400000 : 0);
    } else if (rest >= 0x400) {
        bits = sign | ((rest << 13) + (112u << 23));
    } else {
        float magnitude = (float)rest * 0x1p-24f;  // denormals are exact in fp32
        memcpy(&bits, &magnitude, 4);
        bits |= sign;
    }
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint16_t float_to_half(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (bits >> 13 & 0x3ff));
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // from 65520 on
    if (bits >= 0x38800000) return (uint16_t)(sign | ((bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13));
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    // The last place of 0.5 is 2^-24, as that of fp16 denormals, so the addition rounds to them.
    magnitude += 0.5f;
    memcpy(&bits, &magnitude, 4);
    return (uint16_t)(sign | (bits - 0x3f000000));
}
#endif

static inline Vec from_half(const void *p) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__)
    return (Lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
    return (Lanes)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8((const uint8_t *)p)));
#else
    uint16_t h[W];
    memcpy(h, p, sizeof h);
    return each_lane<Lanes>([&](int i) { return half_to_float(h[i]); });
#endif
}

static inline void to_half(void *p, Vec a) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)a.x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)a.x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    vst1_u8((uint8_t *)p, vreinterpret_u8_f16(vcvt_f16_f32((float32x4_t)a.x)));
#else
    uint16_t h[W];
    for (int i = 0; i < W; i++) h[i] = float_to_half(a.x[i]);
    memcpy(p, h, sizeof h);
#endif
}

static inline Vec from_bfloat(const void *p) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
    return (Lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    Halves h;
    memcpy(&h, p, sizeof h);
    return (Lanes)(__builtin_convertvector(h, Bits) << 16);
#endif
}

// Stores the upper halves.
static inline void store_upper(void *p, Bits bits) {
    const Bits h = bits >> 16;
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m128i lo = _mm256_castsi256_si128((__m256i)h), hi = _mm256_extracti128_si256((__m256i)h, 1);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(lo, hi));
#else
    Halves halves = __builtin_convertvector(h, Halves);
    memcpy(p, &halves, sizeof halves);
#endif
}

// The upper halves are the nearest numbers of bf16.
static inline Bits nearest_bfloat(Vec a) {
    Bits bits = (Bits)a.x;
    Bits rounded = bits + 0x7fff + (bits >> 16 & 1);
    return a.x == a.x ? rounded : Bits{} + 0x7fc00000;  // NaN stays NaN
}

static inline void to_bfloat(void *p, Vec a) { store_upper(p, nearest_bfloat(a)); }

// ---- 8 bits ------------------------------------------------------------------------------------------------------

// GCC 12 converts between bytes and lanes one by one unless told how.
static inline Ints from_bytes(const void *p) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    return each_lane<Ints>([&](int i) { return (int32_t)((const uint8_t *)p)[i]; });
#endif
}

static inline void to_bytes(void *p, Ints a) {  // the lowest ones
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)a));
#elif defined(__AVX2__)
    const __m256i lowest = _mm256_shuffle_epi8((__m256i)a, _mm256_set1_epi32(0x0c080400));
    const __m128i lo = _mm256_castsi256_si128(lowest), hi = _mm256_extracti128_si256(lowest, 1);
    _mm_storel_epi64((__m128i *)p, _mm_unpacklo_epi32(lo, hi));
#else
    uint8_t bytes[W];
    for (int i = 0; i < W; i++) bytes[i] = (uint8_t)a[i];
    memcpy(p, bytes, sizeof bytes);
#endif
}

// ---- memory ------------------------------------------------------------------------------------------------------

static inline int width(int dtype) { return dtype == LT_FP32 ? 4 : 2; }

// The branch on dtype goes the same way for a whole call, so it is predicted; memory is what the kernels wait for.
static inline Vec load(const void *base, int dtype, int64_t i) {
    const char *p = (const char *)base + i * width(dtype);
    if (dtype == LT_BF16) return from_bfloat(p);
    if (dtype == LT_FP16) return from_half(p);
    Vec r;
    memcpy(&r.x, p, sizeof r.x);
    return r;
}

static inline void store(void *base, int dtype, int64_t i, Vec a) {
    char *p = (char *)base + i * width(dtype);
    if (dtype == LT_BF16) to_bfloat(p, a);
    else if (dtype == LT_FP16) to_half(p, a);
    else memcpy(p, &a.x, sizeof a.x);
}

// Asks for what will be needed some vectors later: with four or five streams the hardware alone does not keep up.
// Inlined by force: to GCC a function that only prefetches does nothing, and it drops the calls.
__attribute__((always_inline)) static inline void prefetch(const void *base, int dtype, int64_t i) {
    __builtin_prefetch((const char *)base + i * width(dtype) + lt_prefetch_ahead);
}

// All W lanes, and the first n of them (the others read as zeros): the same maths for the end of a tensor.
struct Whole {
    Vec load(const void *base, int dtype, int64_t i) const { return LT_NAMESPACE::load(base, dtype, i); }
    void store(void *base, int dtype, int64_t i, Vec a) const { LT_NAMESPACE::store(base, dtype, i, a); }
    void store_upper(void *base, int64_t i, Bits bits) const { LT_NAMESPACE::store_upper((uint16_t *)base + i, bits); }
    Vec only(Vec a) const { return a; }
};

struct First {
    int n;

    Vec load(const void *base, int dtype, int64_t i) const {
        char buffer[sizeof(Lanes)] = {};
        memcpy(buffer, (const char *)base + i * width(dtype), (size_t)(n * width(dtype)));
        return LT_NAMESPACE::load(buffer, dtype, 0);
    }

    void store(void *base, int dtype, int64_t i, Vec a) const {
        char buffer[sizeof(Lanes)];
        LT_NAMESPACE::store(buffer, dtype, 0, a);
        memcpy((char *)base + i * width(dtype), buffer, (size_t)(n * width(dtype)));
    }

    void store_upper(void *base, int64_t i, Bits bits) const {
        uint16_t buffer[W];
        LT_NAMESPACE::store_upper(buffer, bits);
        memcpy((uint16_t *)base + i, buffer, (size_t)n * sizeof *buffer);
    }

    // 0 in the lanes beyond the end, which may hold 0 / 0.
    Vec only(Vec a) const {
        char buffer[sizeof(Lanes)];
        store(buffer, LT_FP32, 0, a);
        return load(buffer, LT_FP32, 0);
    }
};

// Calls body(lanes, i) for the vectors of [lo, hi); the last one may be partial.
template <class Body>
static inline void for_each_vector(int64_t lo, int64_t hi, Body body) {
    int64_t i = lo;
    for (; i + W <= hi; i += W) body(Whole{}, i);
    if (i < hi) body(First{(int)(hi - i)}, i);
}

// ---- sums in fp64 ------------------------------------------------------------------------------------------------

struct SquareSum {
#if defined(__AVX512F__)
    __m512d lo = _mm512_setzero_pd(), hi = _mm512_setzero_pd();
#elif defined(__AVX2__)
    __m256d lo = _mm256_setzero_pd(), hi = _mm256_setzero_pd();
#else
    double lanes[W] = {};
#endif

    void add(Vec a) {
#if defined(__AVX512F__)
        __m512d l = _mm512_cvtps_pd(_mm512_castps512_ps256((__m512)a.x));
        __m512d h = _mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)a.x, 1));
        lo = _mm512_fmadd_pd(l, l, lo);
        hi = _mm512_fmadd_pd(h, h, hi);
#elif defined(__AVX2__)
        __m256d l = _mm256_cvtps_pd(_mm256_castps256_ps128((__m256)a.x));
        __m256d h = _mm256_cvtps_pd(_mm256_extractf128_ps((__m256)a.x, 1));
        lo = _mm256_fmadd_pd(l, l, lo);
        hi = _mm256_fmadd_pd(h, h, hi);
#else
        for (int i = 0; i < W; i++) lanes[i] += (double)a.x[i] * (double)a.x[i];
#endif
    }

    double total() const {
#if defined(__AVX2__)
        double lanes[W];
        memcpy(lanes, &lo, sizeof lo);
        memcpy(lanes + W / 2, &hi, sizeof hi);
#endif
        double sum = 0.0;
        for (int i = 0; i < W; i++) sum += lanes[i];
        return sum;
    }
};

}  // namespace LT_NAMESPACE
