// Adam and AdamW on CUDA. The rules are spread over files because kernels for all dtypes take seconds to compile, and
// files compile in parallel.
#include "step.cuh"
#include "warp.cuh"

#include "../coded.h"

namespace lt_cuda {

constexpr int kShare = kCoded / kLanes;  // elements of a block that a thread has
static_assert(kChunk % kCoded == 0, "a chunk is a whole number of blocks");

// What a warp writes of one state: the largest magnitude is known only when all of the block is updated.
LT_DEVICE void encode_moments(const Coding &coding, uint8_t *record, int count, const Float *values) {
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
        if (i < count) record[i] = scale > 0.0f ? encoded(coding, values[k].x, scale) : 0;
    }
}

// A warp has a block of elements, each thread every 32nd of them.
template <class Grad>
__global__ void __launch_bounds__(kThreads, 3) coded_adam_kernel(const __grid_constant__ Step<AdamRule> step,
                                                                           const __grid_constant__ Coding first,
                                                                           const __grid_constant__ Coding second) {
    if (step.gate.closed()) return;
    const Float factor = step.gate.factor();
    const int lane = (int)(threadIdx.x % kLanes), warp = (int)(threadIdx.x / kLanes);
    for_each_chunk(step.batch, [&](const Chunk &chunk) {
        View<float> param(step.batch, PARAM, chunk);
        View<Grad, STREAMED> grad(step.batch, GRAD, chunk);
        OutView out(step.batch, OUT, chunk, step.out_dtype);
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
                    Lanes<1> p = param.load<1>(begin + i), g = grad.template load<1>(begin + i);
                    m[k] = Float(decoded(first, record1[i], scale1));
                    v[k] = Float(decoded(second, record2[i], scale2));
                    update(step.rule, p[0], g[0] * factor, m[k], v[k]);
                    param.store<1>(begin + i, p);
                    out.store<1>(begin + i, p);
                }
            }
            encode_moments(first, record1, count, m);
            encode_moments(second, record2, count, v);
        }
    });
}

static int run_coded(const lt_tensors *tensors, const AdamRule &rule, void *stream) {
    if (!tensors->levels || !tensors->starts) return LT_BAD_ARGUMENT;
    lt_tensors t = *tensors;
    t.state_dtype = LT_FP32;
    if (!tensors_valid(&t, 2)) return LT_BAD_ARGUMENT;
    auto kernel = t.grad_dtype == LT_BF16   ? coded_adam_kernel<bf16>
                  : t.grad_dtype == LT_FP16 ? coded_adam_kernel<fp16>
                                            : coded_adam_kernel<float>;
    const Coding first = make_coding(t.levels, t.starts, true), second = make_coding(t.levels, t.starts, false);
    Step<AdamRule> step = {rule, Gate(t), t.out ? t.out_dtype : kAbsent, {}};
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
