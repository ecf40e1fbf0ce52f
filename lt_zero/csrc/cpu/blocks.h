// Block-wise compression for one instruction set. Included by kernels.h.
//
// A block passes through the cache two or three times (its largest magnitude, for 1 and 2 bits their mean, the codes),
// but through memory once.
#pragma once

#include "codec.h"
#include "cpu/table.h"
#include "cpu/vec.h"

namespace LT_NAMESPACE {

typedef double Doubles __attribute__((vector_size(4 * W)));  // half as many lanes

static inline Vec choose(Ints mask, Vec yes, Vec no) {
    return (Lanes)(((Ints)yes.x & mask) | ((Ints)no.x & ~mask));
}

static inline void widen(Vec a, Doubles &lo, Doubles &hi) {
#if defined(__AVX512F__)
    lo = (Doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)a.x));
    hi = (Doubles)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)a.x, 1));
#elif defined(__AVX2__)
    lo = (Doubles)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)a.x));
    hi = (Doubles)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)a.x, 1));
#else
    for (int i = 0; i < W / 2; i++) {
        lo[i] = a.x[i];
        hi[i] = a.x[i + W / 2];
    }
#endif
}

// What is compressed: x, plus what earlier calls left over.
struct Input {
    const void *x;
    const float *residual;
    int dtype;

    template <class At>
    Vec load(At at, int64_t i) const {
        Vec c = at.load(x, dtype, i);
        return residual ? c + at.load(residual, LT_FP32, i) : c;
    }
};

static int32_t largest_magnitude(const Input &input, int64_t lo, int64_t hi) {
    Ints largest = {};
    for_each_vector(lo, hi, [&](auto at, int64_t i) {
        prefetch(input.x, input.dtype, i);
        if (input.residual) prefetch(input.residual, LT_FP32, i);
        largest = larger(largest, magnitude_bits(input.load(at, i)));
    });
    return largest_lane(largest);
}

static double sum_of_magnitudes(const Input &input, int32_t largest, int64_t lo, int64_t hi) {
    const Doubles shift = unit_shift(largest) - Doubles{};
    Doubles sums[2] = {};
    for_each_vector(lo, hi, [&](auto at, int64_t i) {
        Doubles l, h;
        widen((Lanes)magnitude_bits(input.load(at, i)), l, h);
        // Rounded to multiples of one unit, magnitudes add up exactly, so any order of the lanes gives the same sum.
        sums[0] += l + shift - shift;
        sums[1] += h + shift - shift;
    });
    double sum = 0.0;
    for (int i = 0; i < W / 2; i++) sum += sums[0][i] + sums[1][i];
    return sum;
}

// The codes of a group, a byte each, are two words.
struct Group {
    uint64_t words[2] = {0, 0};

    // The codes of lanes i ... i + W - 1.
    Ints get(int i) const {
#if defined(__AVX512F__)
        (void)i;  // a load of both words would wait until their stores are done
        return (Ints)_mm512_cvtepu8_epi32(_mm_set_epi64x((int64_t)words[1], (int64_t)words[0]));
#elif defined(__AVX2__)
        return (Ints)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)words[i / 8]));
#else
        return from_bytes((const char *)words + i);
#endif
    }

    void put(int i, Ints codes) { to_bytes((char *)words + i, codes); }

    template <int BITS>
    void pack(uint8_t *out) const {
        for (int half = 0; half < 2; half++) {
            const uint64_t packed = pack8(words[half], BITS);
            memcpy(out + BITS * half, &packed, BITS);
        }
    }

    template <int BITS>
    void unpack(const uint8_t *in) {
        for (int half = 0; half < 2; half++) {
            uint64_t packed = 0;
            memcpy(&packed, in + BITS * half, BITS);
            words[half] = unpack8(packed, BITS);
        }
    }
};

// Codes of a vector, and the values that they decode to. NORMAL: levels of NormalFloat.
template <int BITS, bool NORMAL>
struct Encoder {
    Vec inverse, scale;  // of 8 and 4 bits
    Vec low, high, threshold;

    explicit Encoder(float s)
        : inverse(s == 0.0f ? 0.0f : 1.0f / s), scale(s), low(make_levels(s, BITS).low),
          high(make_levels(s, BITS).high), threshold(make_levels(s, BITS).threshold) {}

    Vec operator()(Vec c, Ints &codes) const {
        if constexpr (BITS >= 4) {
            // The sum has no room for a fraction: it is rounded to nearest even, and its lowest bits are the integer in
            // two's complement.
            Vec shifted = c * inverse + Vec(ROUND);
            codes = (Ints)shifted.x & ((1 << BITS) - 1);
            return (shifted - Vec(ROUND)) * scale;
        } else {
            Ints above = (Lanes)magnitude_bits(c) > threshold.x, negative = c.x < Lanes{};
            codes = (negative & 1) | (above & 2);
            return (Lanes)((Ints)choose(above, high, low).x ^ (negative & INT32_MIN));
        }
    }
};

constexpr NormalLevels NORMAL_LEVELS = normal_levels();

template <>
struct Encoder<4, true> {
    Vec scale, unit;

    explicit Encoder(float s) : scale(s), unit(s == 0.0f ? 1.0f : s) {}

    Vec operator()(Vec c, Ints &codes) const {
        const float *level = NORMAL_LEVELS.level;
        const Vec ratio = c / unit;
        codes = Ints{};
        for (int k = 0; k < 15; k++) codes -= ratio.x > Vec((level[k + 1] + level[k]) / 2).x;  // a mask is -1
        return look_up<16>(level, codes) * scale;
    }
};

template <int BITS, bool NORMAL>
struct Decoder {
    Vec scale, low, high;

    explicit Decoder(float s) : scale(s), low(make_levels(s, BITS).low), high(make_levels(s, BITS).high) {}

    Vec operator()(Ints codes) const {
        if constexpr (BITS >= 4) {
            constexpr int SIGN = 1 << (BITS - 1);
            return Vec(__builtin_convertvector((codes ^ SIGN) - SIGN, Lanes)) * scale;
        } else {
            return (Lanes)((Bits)choose(-(codes >> 1), high, low).x ^ (Bits)codes << 31);
        }
    }
};

template <>
struct Decoder<4, true> {
    Vec scale;

    explicit Decoder(float s) : scale(s) {}

    Vec operator()(Ints codes) const { return look_up<16>(NORMAL_LEVELS.level, codes) * scale; }
};

// Calls body(lanes, i) for the vectors of one group of 16 elements, the last of which may be short.
template <class Body>
static inline void for_each_in_group(int64_t lo, int64_t hi, Body body) {
    if (hi - lo == GROUP) {
        for (int64_t i = lo; i < hi; i += W) body(Whole{}, i);
    } else {
        for_each_vector(lo, hi, body);
    }
}

template <int BITS, bool NORMAL>
static void encode_block(const Input &input, float *residual, float scale, uint8_t *out, int64_t lo, int64_t hi) {
    const Encoder<BITS, NORMAL> encode(scale);
    for (int64_t begin = lo; begin < hi; begin += GROUP) {
        Group group;
        for_each_in_group(begin, begin + GROUP < hi ? begin + GROUP : hi, [&](auto at, int64_t i) {
            Vec c = input.load(at, i);
            Ints codes;
            Vec value = encode(c, codes);
            group.put((int)(i - begin), (Ints)at.only(Vec((Lanes)codes)).x);  // padding is zeros
            if (residual) at.store(residual, LT_FP32, i, c - value);
        });
        group.pack<BITS>(out + begin * BITS / 8);
    }
}

template <int BITS, bool NORMAL = false>
static void encode_bits(const lt_blocks &t, const void *x, float *residual, uint8_t *out, int64_t lo, int64_t hi) {
    const Input input{x, residual, t.dtype};
    char *scales = (char *)out + codes_bytes(t.numel, BITS);
    for (int64_t begin = lo; begin < hi; begin += t.block) {
        const int64_t end = begin + t.block < hi ? begin + t.block : hi;
        const int32_t largest = largest_magnitude(input, begin, end);
        float scale;
        if constexpr (NORMAL) scale = normal_scale(largest);
        else if constexpr (BITS >= 4) scale = uniform_scale(largest, BITS);
        else scale = largest == 0 || largest >= INFINITE
                         ? mean_scale(largest, 0.0, 1)
                         : mean_scale(largest, sum_of_magnitudes(input, largest, begin, end), end - begin);
        memcpy(scales + begin / t.block * 4, &scale, 4);
        if (largest < INFINITE) encode_block<BITS, NORMAL>(input, residual, scale, out, begin, end);
        // The block decodes to NaN, whatever its codes are. Its residual stays as it was, for a step that is skipped.
        else memset(out + begin * BITS / 8, 0, (size_t)((end - begin + GROUP - 1) / GROUP * GROUP * BITS / 8));
    }
}

static void encode_blocks(const lt_blocks &t, const void *x, float *residual, uint8_t *out, int64_t lo, int64_t hi) {
    switch (t.bits) {
        case 8: return encode_bits<8>(t, x, residual, out, lo, hi);
        case 4:
            if (t.normal) return encode_bits<4, true>(t, x, residual, out, lo, hi);
            return encode_bits<4>(t, x, residual, out, lo, hi);
        case 2: return encode_bits<2>(t, x, residual, out, lo, hi);
        default: return encode_bits<1>(t, x, residual, out, lo, hi);
    }
}

// sum[i - lo] += the values of one buffer; `first`: = instead.
template <int BITS, bool NORMAL>
static void add_block(float *sum, bool first, float scale, const uint8_t *in, int64_t lo, int64_t hi) {
    const Decoder<BITS, NORMAL> decode(scale);
    for (int64_t begin = lo; begin < hi; begin += GROUP) {
        Group group;
        group.unpack<BITS>(in + begin * BITS / 8);
        float *target = sum + (begin - lo);  // has room for a whole group
        for (int i = 0; i < GROUP; i += W) {
            Vec value = decode(group.get(i));
            store(target, LT_FP32, i, first ? value : load(target, LT_FP32, i) + value);
        }
    }
}

// Sums stay in the first-level cache: a part of a block at a time, one buffer after the other.
template <int BITS, bool NORMAL = false>
static void decode_bits(const lt_blocks &t, int64_t count, const uint8_t *const *in, float factor, void *out,
                        int64_t lo, int64_t hi) {
    constexpr int64_t PART = 1024;
    alignas(64) float sum[PART];
    for (int64_t begin = lo; begin < hi;) {
        const int64_t block = begin / t.block, block_end = (block + 1) * t.block;
        int64_t end = begin + PART < block_end ? begin + PART : block_end;
        if (end > hi) end = hi;
        for (int64_t k = 0; k < count; k++) {
            float scale;
            memcpy(&scale, in[k] + codes_bytes(t.numel, BITS) + 4 * block, 4);
            add_block<BITS, NORMAL>(sum, k == 0, scale, in[k], begin, end);
        }
        for_each_vector(begin, end, [&](auto at, int64_t i) {
            at.store(out, t.dtype, i, load(sum, LT_FP32, i - begin) * Vec(factor));
        });
        begin = end;
    }
}

static void decode_blocks(const lt_blocks &t, int64_t count, const uint8_t *const *in, float factor, void *out,
                          int64_t lo, int64_t hi) {
    switch (t.bits) {
        case 8: return decode_bits<8>(t, count, in, factor, out, lo, hi);
        case 4:
            if (t.normal) return decode_bits<4, true>(t, count, in, factor, out, lo, hi);
            return decode_bits<4>(t, count, in, factor, out, lo, hi);
        case 2: return decode_bits<2>(t, count, in, factor, out, lo, hi);
        default: return decode_bits<1>(t, count, in, factor, out, lo, hi);
    }
}

}  // namespace LT_NAMESPACE
