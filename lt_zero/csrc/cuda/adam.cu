// Adam and AdamW on CUDA. The rules are spread over files because kernels for all dtypes take seconds to compile, and
// files compile in parallel.
#include "step.cuh"
#include "warp.cuh"

#include "../coded.h"

namespace lt_cuda {

constexpr int kShare = kCoded / kLanes;  // elements of a block that a thread has
static_assert(kChunk % kCoded == 0, "a chunk is a whole number of blocks");

template <bool SIGNED>
LT_DEVICE float decoded(const Coding<SIGNED> &coding, uint8_t code, float scale) {
    if (!SIGNED) return coding.levels[code] * scale;
    const uint32_t bits = bits_of(coding.levels[code & 127]) | (uint32_t)(code & 128) << 24;  // without a branch
    return __uint_as_float(bits) * scale;
}

// `scale` is above 0, and at least |x|.
template <bool SIGNED>
LT_DEVICE uint8_t encoded(const Coding<SIGNED> &coding, float x, float scale) {
    const float ratio = x / scale, magnitude = fabsf(ratio);
    const uint32_t sign = bits_of(ratio) >> 31;
    if (!SIGNED && sign) return 0;
    uint32_t code = (uint32_t)near_code<SIGNED>(Float(magnitude)).x;
    code += magnitude > coding.middles[code];
    if (SIGNED) return (uint8_t)(code | (code ? sign << 7 : 0));
    return (uint8_t)(code == 0 && magnitude > 0.0f ? 1 : code);
}

// What a warp writes of one state: the largest magnitude is known only when all of the block is updated. What follows
// the last element is encoded as zeros.
template <bool SIGNED>
LT_DEVICE void encode_moments(const Coding<SIGNED> &coding, uint8_t *record, const Float *values) {
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
        uint32_t bits = bits_of(values[k].x) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    const float scale = scale_of(warp_max(largest));
    const int lane = (int)(threadIdx.x % kLanes);
    if (lane == 0) *(float *)(record + kCoded) = scale;
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
        const int i = lane + k * kLanes;
        record[i] = scale > 0.0f ? encoded(coding, values[k].x, scale) : 0;
    }
}

// A warp has a block of elements, each thread every 32nd of them.
template <class Grad>
__global__ void __launch_bounds__(kThreads, 3) coded_adam_kernel(const __grid_constant__ Step<AdamRule> step,
                                                                           const __grid_constant__ Coding<true> first,
                                                                           const __grid_constant__ Coding<false> second) {
    if (step.gate.closed()) return;
    const Float factor = step.gate.factor();
    const int lane = (int)(threadIdx.x % kLanes), warp = (int)(threadIdx.x / kLanes);
    for_each_chunk(step.batch, [&](const Chunk &chunk) {
        Weights weights(step, chunk);
        View<Grad, STREAMED> grad(step.batch, GRAD, chunk);
        for (int64_t begin = chunk.begin + (int64_t)warp * kCoded; begin < chunk.end;
             begin += (int64_t)kThreads / kLanes * kCoded) {
            const int count = chunk.end - begin < kCoded ? (int)(chunk.end - begin) : kCoded;
            uint8_t *record1 = (uint8_t *)address_of(step.batch, STATE1, chunk) + begin / kCoded * kRecord;
            uint8_t *record2 = (uint8_t *)address_of(step.batch, STATE2, chunk) + begin / kCoded * kRecord;
            const float scale1 = *(const float *)(record1 + kCoded), scale2 = *(const float *)(record2 + kCoded);
            Float m[kShare], v[kShare];
#pragma unroll
            for (int k = 0; k < kShare; ++k) {
                const int i = lane + k * kLanes;
                m[k] = v[k] = Float(0.0f);
                if (i < count) {
                    Lanes<1> p = weights.load<1>(begin + i), g = grad.template load<1>(begin + i);
                    m[k] = Float(decoded(first, record1[i], scale1));
                    v[k] = Float(decoded(second, record2[i], scale2));
                    update(step.rule, p[0], g[0] * factor, m[k], v[k]);
                    weights.store<1>(begin + i, p);
                }
            }
            encode_moments(first, record1, m);
            encode_moments(second, record2, v);
        }
    });
}

static int run_coded(const lt_tensors *tensors, const AdamRule &rule, void *stream) {
    if (!tensors->levels) return LT_BAD_ARGUMENT;
    lt_tensors t = *tensors;
    t.state_dtype = LT_FP32;
    if (!tensors_valid(&t, 2)) return LT_BAD_ARGUMENT;
    auto kernel = t.grad_dtype == LT_BF16   ? coded_adam_kernel<bf16>
                  : t.grad_dtype == LT_FP16 ? coded_adam_kernel<fp16>
                                            : coded_adam_kernel<float>;
    const Coding<true> first = make_coding<true>(t.levels);
    const Coding<false> second = make_coding<false>(t.levels);
    Step<AdamRule> step = {rule, Gate(t), Keeping(t), {}};
    return for_each_batch(step.batch, t.count, t.numel, {t.param, t.grad, t.state1, t.state2, t.out},
                          [&] { return launch_chunks(kernel, step.batch.chunks(), stream, step, first, second); });
}

}  // namespace lt_cuda

using namespace lt_cuda;

LT_EXPORT int lt_cuda_adam_step(const lt_tensors *tensors, const lt_adam *options, void *stream) {
    if (!options) return LT_BAD_ARGUMENT;
    if (tensors && tensors->state_dtype == LT_CODES) return run_coded(tensors, make_rule(*options), stream);
    return run_step(tensors, make_rule(*options), stream);
}
