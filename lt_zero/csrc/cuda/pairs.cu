// Copies with a change of dtype and scale, and accumulation into fp32.
//
// Notes:
// - cast_scale works in place between dtypes of one size: a thread reads its elements before it writes them.
#include "launch.cuh"
#include "view.cuh"

namespace lt_cuda {

enum { DST, SRC };

struct Pairs {
    float factor;
    const float *scale;
    Batch<2> batch;
};

template <class Dst, class Src, bool ACCUMULATE>
__global__ void __launch_bounds__(kThreads) pairs_kernel(const __grid_constant__ Pairs pairs) {
    constexpr int kWidth = kAccess<Dst, Src>;
    const Float factor = Float(pairs.factor) * Float(pairs.scale ? *pairs.scale : 1.0f);
    // A product with 1 could change the bits of a NaN. A plain copy keeps them.
    const bool scaled = pairs.scale || pairs.factor != 1.0f;
    for_each_chunk(pairs.batch, [&](const Chunk &chunk) {
        View<Dst> dst(pairs.batch, DST, chunk);
        View<Src> src(pairs.batch, SRC, chunk);
        bool aligned = dst.template aligned<kWidth>() && src.template aligned<kWidth>();
        for_each_element<kWidth>(chunk, aligned, [&](auto width, int64_t i) {
            constexpr int W = decltype(width)::value;
            Lanes<W> x = src.template load<W>(i);
            if (scaled) {
#pragma unroll
                for (int k = 0; k < W; ++k) x[k] = x[k] * factor;
            }
            if constexpr (ACCUMULATE) {
                Lanes<W> sum = dst.template load<W>(i);
#pragma unroll
                for (int k = 0; k < W; ++k) x[k] = sum[k] + x[k];
            }
            dst.template store<W>(i, x);
        });
    });
}

using PairsKernel = void (*)(const Pairs);

template <class Dst, bool ACCUMULATE>
PairsKernel pick_src(int src) {
    switch (src) {
        case LT_FP32: return pairs_kernel<Dst, float, ACCUMULATE>;
        case LT_BF16: return pairs_kernel<Dst, bf16, ACCUMULATE>;
        case LT_FP16: return pairs_kernel<Dst, fp16, ACCUMULATE>;
        default: return nullptr;
    }
}

PairsKernel pick_cast(int dst, int src) {
    switch (dst) {
        case LT_FP32: return pick_src<float, false>(src);
        case LT_BF16: return pick_src<bf16, false>(src);
        case LT_FP16: return pick_src<fp16, false>(src);
        default: return nullptr;
    }
}

int run_pairs(PairsKernel kernel, const lt_pairs &p, void *stream) {
    if (!kernel || !lists_valid(p.count, p.numel, {p.dst, p.src})) return LT_BAD_ARGUMENT;
    Pairs pairs = {(float)p.factor, p.scale, {}};
    return for_each_batch(pairs.batch, p.count, p.numel, {p.dst, p.src},
                          [&] { return launch_chunks(kernel, pairs.batch.chunks(), stream, pairs); });
}

}  // namespace lt_cuda

using namespace lt_cuda;

LT_EXPORT int lt_cuda_accumulate(const lt_pairs *pairs, void *stream) {
    if (!pairs || pairs->dst_dtype != LT_FP32) return LT_BAD_ARGUMENT;
    return run_pairs(pick_src<float, true>(pairs->src_dtype), *pairs, stream);
}

LT_EXPORT int lt_cuda_cast_scale(const lt_pairs *pairs, void *stream) {
    if (!pairs) return LT_BAD_ARGUMENT;
    return run_pairs(pick_cast(pairs->dst_dtype, pairs->src_dtype), *pairs, stream);
}
