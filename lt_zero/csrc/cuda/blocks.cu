// Block-wise compression; ../codec.h has what the CPU's kernels share.
//
// A row of the grid has a tensor and its buffer. A warp encodes a block, so that its maximum and its sum need no barrier.
// A thread works on 8 neighbours at a time, the fewest elements whose codes fill whole bytes at every width: at a block
// of 256 each thread has 8 of them.
//
// Notes:
// - Blocks are read two or three times, in which all reads but the first find them in a cache. Those of 1 bit are too
//   large for the first-level cache, and stay in registers.
// - Decoding needs no scratch: a thread adds up the buffers in registers. Their addresses travel in the kernel's
//   parameters; more of them than fit are added by several launches that carry the sum in `out`.
#include "launch.cuh"
#include "view.cuh"
#include "warp.cuh"

#include "../codec.h"

namespace lt_cuda {

constexpr int kUnit = 8;  // elements of a thread's access
// Exact for the sums of codec.h, and so the same in every lane.
LT_DEVICE double warp_total(double x) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(kWarpMask, x, distance);
    return x;
}

// n elements from i on; zeros in place of further ones.
template <class T>
LT_DEVICE Lanes<kUnit> load_unit(const T *data, int64_t i, int n, bool aligned) {
    if (n == kUnit && aligned) return View<T>((void *)data).template load<kUnit>(i);
    Lanes<kUnit> values;
#pragma unroll
    for (int k = 0; k < kUnit; ++k) values[k] = Float(k < n ? widen(data[i + k]) : 0.0f);
    return values;
}

template <class T>
LT_DEVICE void store_unit(T *data, int64_t i, int n, bool aligned, Lanes<kUnit> values) {
    if (n == kUnit && aligned) return View<T>(data).template store<kUnit>(i, values);
#pragma unroll
    for (int k = 0; k < kUnit; ++k)
        if (k < n) narrow(values[k].x, data[i + k]);
}

template <int BITS>
struct CodesOf;
template <>
struct CodesOf<8> {
    typedef uint64_t type;
};
template <>
struct CodesOf<4> {
    typedef uint32_t type;
};
template <>
struct CodesOf<2> {
    typedef uint16_t type;
};
template <>
struct CodesOf<1> {
    typedef uint8_t type;
};

// What is compressed: x, plus what earlier calls left over.
template <class T>
struct Input {
    const T *x;
    const float *residual;
    bool aligned, residual_aligned;

    LT_DEVICE Input(const T *x, const float *residual)
        : x(x), residual(residual), aligned(View<T>((void *)x).template aligned<kUnit>()),
          residual_aligned(View<float>((void *)residual).template aligned<kUnit>()) {}

    LT_DEVICE Lanes<kUnit> load(int64_t i, int n) const {
        Lanes<kUnit> c = load_unit(x, i, n, aligned);
        if (residual) {
            Lanes<kUnit> left = load_unit(residual, i, n, residual_aligned);
#pragma unroll
            for (int k = 0; k < kUnit; ++k) c[k] = c[k] + left[k];
        }
        return c;
    }
};

// Units of a thread that stay in registers: with 1 bit all of a block of 1,024.
template <int BITS>
constexpr int kHeld = BITS == 1 ? 4 : 0;

// The elements of a block that are a thread's of its warp.
template <class T, int BITS>
class Own {
  public:
    LT_DEVICE Own(const Input<T> &input, int64_t begin, int64_t end)
        : input(input), begin(begin), end(end), held(end - begin <= kHeld<BITS> * kLanes * kUnit) {
        if (!held) return;
#pragma unroll
        for (int u = 0; u < kHeld<BITS>; ++u) {
            const int64_t i = place(u);
            if (i < end) units[u] = input.load(i, count(i));
        }
    }

    // Calls body(i, n, c) for each unit: its first element, how many there are, and their values.
    template <class Body>
    LT_DEVICE void for_each(Body body) const {
        if (held) {
#pragma unroll
            for (int u = 0; u < kHeld<BITS>; ++u) {
                const int64_t i = place(u);
                if (i < end) body(i, count(i), units[u]);
            }
        } else {
#pragma unroll 1
            for (int64_t i = place(0); i < end; i += kLanes * kUnit) body(i, count(i), input.load(i, count(i)));
        }
    }

    LT_DEVICE int64_t numel() const { return end - begin; }

  private:
    const Input<T> &input;
    const int64_t begin, end;
    const bool held;
    Lanes<kUnit> units[kHeld<BITS> > 0 ? kHeld<BITS> : 1];

    LT_DEVICE int64_t place(int u) const { return begin + ((int64_t)u * kLanes + threadIdx.x % kLanes) * kUnit; }
    LT_DEVICE int count(int64_t i) const { return end - i < kUnit ? (int)(end - i) : kUnit; }
};

template <bool NORMAL, class T, int BITS>
LT_DEVICE float block_scale(const Own<T, BITS> &own, int32_t &largest) {
    largest = 0;
    own.for_each([&](int64_t, int, Lanes<kUnit> c) {
#pragma unroll
        for (int k = 0; k < kUnit; ++k) {
            int32_t bits = magnitude_bits(c[k].x);
            largest = bits > largest ? bits : largest;
        }
    });
    largest = warp_max(largest);
    if (NORMAL) return normal_scale(largest);
    if (BITS >= 4) return uniform_scale(largest, BITS);
    if (largest == 0 || largest >= INFINITE) return mean_scale(largest, 0.0, 1);
    const double shift = unit_shift(largest);
    double sum = 0.0;
    own.for_each([&](int64_t, int, Lanes<kUnit> c) {
#pragma unroll
        for (int k = 0; k < kUnit; ++k) sum += (double)fabsf(c[k].x) + shift - shift;
    });
    return mean_scale(largest, warp_total(sum), own.numel());
}

template <int BITS>
LT_DEVICE uint32_t encode_element(float c, float scale, float inverse, const Levels &levels, float &value) {
    if (BITS >= 4) {
        float shifted = c * inverse + ROUND;
        value = (shifted - ROUND) * scale;
        return __float_as_uint(shifted) & (BITS == 8 ? 0xffu : 0xfu);
    }
    const bool above = fabsf(c) > levels.threshold, negative = c < 0.0f;
    float magnitude = above ? levels.high : levels.low;
    value = negative ? -magnitude : magnitude;
    return (uint32_t)negative | (uint32_t)above << 1;
}

template <int BITS>
LT_DEVICE float decode_element(uint32_t code, float scale, const Levels &levels) {
    if (BITS == 8) return (float)(int8_t)code * scale;
    if (BITS == 4) return (float)((int)(code ^ 8u) - 8) * scale;
    float magnitude = code & 2u ? levels.high : levels.low;
    return code & 1u ? -magnitude : magnitude;
}

// Of NormalFloat.
LT_DEVICE uint32_t encode_normal(float c, float scale, float &value) {
    constexpr NormalLevels levels = normal_levels();
    const float ratio = c / (scale == 0.0f ? 1.0f : scale);
    uint32_t code = 0;
    value = levels.level[0] * scale;
#pragma unroll
    for (int k = 0; k < 15; ++k) {
        const bool above = ratio > (levels.level[k + 1] + levels.level[k]) / 2;
        code += above;
        value = above ? levels.level[k + 1] * scale : value;
    }
    return code;
}

// Zeros after the codes and after the scales.
LT_DEVICE void clear_padding(uint8_t *out, int64_t numel, int64_t block, int bits) {
    const int64_t scales = codes_bytes(numel, bits), used = scales + 4 * blocks_in(numel, block);
    int64_t at = (numel + kUnit - 1) / kUnit * bits + threadIdx.x;
    if (at < scales) out[at] = 0;
    at = used + threadIdx.x;
    if (at < padded(used)) out[at] = 0;
}

template <class T, int BITS, bool NORMAL>
__global__ void __launch_bounds__(kThreads, BITS == 1 ? 2 : 5)
    encode_kernel(int64_t numel, int64_t block, const T *x, float *residual, int64_t residual_row, uint8_t *out) {
    typedef typename CodesOf<BITS>::type Codes;
    x += blockIdx.y * numel;
    out += blockIdx.y * buffer_bytes(numel, block, BITS);
    if (residual) residual += blockIdx.y * residual_row;
    const Input<T> input(x, residual);
    float *scales = (float *)(out + codes_bytes(numel, BITS));
    if (blockIdx.x == 0) clear_padding(out, numel, block, BITS);
    constexpr int64_t warps = kThreads / kLanes;
    for (int64_t b = blockIdx.x * warps + threadIdx.x / kLanes; b < blocks_in(numel, block); b += gridDim.x * warps) {
        const int64_t begin = b * block, end = begin + block < numel ? begin + block : numel;
        const Own<T, BITS> own(input, begin, end);
        int32_t largest;
        const float scale = block_scale<NORMAL>(own, largest);
        const Levels levels = make_levels(scale, BITS);
        const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
        if (threadIdx.x % kLanes == 0) scales[b] = scale;
        own.for_each([&](int64_t i, int n, Lanes<kUnit> c) {
            uint64_t codes = 0;
            if (largest < INFINITE) {
#pragma unroll
                for (int k = 0; k < kUnit; ++k) {
                    float value = 0.0f;
                    uint32_t code;
                    if constexpr (NORMAL) code = k < n ? encode_normal(c[k].x, scale, value) : 0;  // padding is zeros
                    else code = encode_element<BITS>(c[k].x, scale, inverse, levels, value);
                    codes |= (uint64_t)code << (k * BITS);
                    c[k] = c[k] - Float(value);
                }
                if (residual) store_unit(residual, i, n, input.residual_aligned, c);
            }
            *(Codes *)(out + i / kUnit * BITS) = (Codes)codes;
        });
    }
}

struct Buffers {
    const uint8_t *address[LT_CUDA_BUFFERS];
};

// One launch of a sum: `first` starts it, otherwise `out` has what earlier launches added up; `last` scales it.
struct Sum {
    int64_t numel, block;
    int count;
    bool first, last;
    float factor;
};

template <class T, int BITS, bool NORMAL>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(const Sum sum, const __grid_constant__ Buffers buffers, const __grid_constant__ NormalLevels normal,
                  T *out) {
    typedef typename CodesOf<BITS>::type Codes;
    // A warp reads different levels in one access, which constant memory would do one by one.
    __shared__ float table[NORMAL ? 16 : 1];
    if (NORMAL) {
        if (threadIdx.x < 16) table[threadIdx.x] = normal.level[threadIdx.x];
        __syncthreads();
    }
    out += blockIdx.y * sum.numel;
    const int64_t row = blockIdx.y * buffer_bytes(sum.numel, sum.block, BITS);
    const bool aligned = View<T>(out).template aligned<kUnit>();
    const int64_t scales = codes_bytes(sum.numel, BITS), step = (int64_t)gridDim.x * kThreads * kUnit;
    for (int64_t i = ((int64_t)blockIdx.x * kThreads + threadIdx.x) * kUnit; i < sum.numel; i += step) {
        const int n = sum.numel - i < kUnit ? (int)(sum.numel - i) : kUnit;
        const int64_t block = i / sum.block;
        Lanes<kUnit> total;
        if (!sum.first) total = load_unit((const T *)out, i, n, aligned);
        for (int b = 0; b < sum.count; ++b) {
            const uint8_t *buffer = buffers.address[b] + row;
            const float scale = ((const float *)(buffer + scales))[block];
            const Levels levels = make_levels(scale, BITS);
            const uint64_t codes = *(const Codes *)(buffer + i / kUnit * BITS);
            const bool assign = sum.first && b == 0;
#pragma unroll
            for (int k = 0; k < kUnit; ++k) {
                uint32_t code = (uint32_t)(codes >> (k * BITS)) & ((1u << BITS) - 1u);
                Float value;
                if constexpr (NORMAL) value = Float(table[code] * scale);
                else value = Float(decode_element<BITS>(code, scale, levels));
                total[k] = assign ? value : total[k] + value;
            }
        }
#pragma unroll
        for (int k = 0; k < kUnit; ++k)
            if (sum.last) total[k] = total[k] * Float(sum.factor);
        store_unit(out, i, n, aligned, total);
    }
}

bool blocks_valid(const lt_blocks *t) {
    return t && t->rows >= 0 && t->rows <= LARGEST_ROWS && t->numel >= 0 && t->block >= GROUP &&
           t->block <= LARGEST_BLOCK && t->block % GROUP == 0 && (!t->normal || t->bits == 4) &&
           (t->bits == 8 || t->bits == 4 || t->bits == 2 || t->bits == 1) && is_dtype(t->dtype);
}

bool buffer_valid(const void *buffer) { return buffer && (uintptr_t)buffer % 16 == 0; }

template <class T, int BITS, bool NORMAL>
int encode_as(const lt_blocks &t, const void *x, float *residual, void *out, void *stream) {
    const int64_t warps = kThreads / kLanes, blocks = blocks_in(t.numel, t.block);
    return launch_rows(encode_kernel<T, BITS, NORMAL>, (blocks + warps - 1) / warps, t.rows, stream, t.numel, t.block,
                       (const T *)x, residual, t.residual_row, (uint8_t *)out);
}

template <class T, int BITS, bool NORMAL>
int decode_as(const lt_blocks &t, int64_t count, const void *const *buffers, float factor, void *out, void *stream) {
    const int64_t elements = (int64_t)kThreads * kUnit;
    for (int64_t done = 0; done < count; done += LT_CUDA_BUFFERS) {
        const int64_t left = count - done;
        const bool last = left <= LT_CUDA_BUFFERS;
        const Sum sum = {t.numel, t.block, last ? (int)left : LT_CUDA_BUFFERS, done == 0, last, factor};
        Buffers part = {};
        for (int b = 0; b < sum.count; ++b) part.address[b] = (const uint8_t *)buffers[done + b];
        if (int code = launch_rows(decode_kernel<T, BITS, NORMAL>, (t.numel + elements - 1) / elements, t.rows,
                                   stream, sum, part, normal_levels(), (T *)out))
            return code;
    }
    return LT_OK;
}

// Calls pick(bits, normal, element) with all three as types.
template <class T, class Pick>
int with_bits(const lt_blocks &t, Pick pick) {
    if (t.normal) return pick(std::integral_constant<int, 4>(), std::true_type(), T());
    switch (t.bits) {
        case 8: return pick(std::integral_constant<int, 8>(), std::false_type(), T());
        case 4: return pick(std::integral_constant<int, 4>(), std::false_type(), T());
        case 2: return pick(std::integral_constant<int, 2>(), std::false_type(), T());
        default: return pick(std::integral_constant<int, 1>(), std::false_type(), T());
    }
}

template <class Pick>
int with_types(const lt_blocks &t, Pick pick) {
    switch (t.dtype) {
        case LT_FP32: return with_bits<float>(t, pick);
        case LT_BF16: return with_bits<bf16>(t, pick);
        default: return with_bits<fp16>(t, pick);
    }
}

}  // namespace lt_cuda

using namespace lt_cuda;

LT_EXPORT int lt_cuda_encode_blocks(const lt_blocks *t, const void *x, float *residual, void *out, void *stream) {
    if (!blocks_valid(t) || (t->numel > 0 && (!x || !buffer_valid(out)))) return LT_BAD_ARGUMENT;
    return with_types(*t, [&](auto bits, auto normal, auto element) {
        return encode_as<decltype(element), decltype(bits)::value, decltype(normal)::value>(*t, x, residual, out, stream);
    });
}

LT_EXPORT int lt_cuda_decode_blocks(const lt_blocks *t, int64_t count, const void *const *buffers, double factor,
                                    void *out, void *stream) {
    if (!blocks_valid(t) || count < 1 || (count > 1 && t->rows > 1) || !buffers || (t->numel > 0 && !out) ||
        (count > LT_CUDA_BUFFERS && t->dtype != LT_FP32))
        return LT_BAD_ARGUMENT;
    for (int64_t b = 0; b < count; ++b)
        if (t->numel > 0 && !buffer_valid(buffers[b])) return LT_BAD_ARGUMENT;
    return with_types(*t, [&](auto bits, auto normal, auto element) {
        return decode_as<decltype(element), decltype(bits)::value, decltype(normal)::value>(*t, count, buffers, (float)factor, out, stream);
    });
}
