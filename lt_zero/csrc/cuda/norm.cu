// The sum of squares of a list of tensors of any dtypes, for the norm of the gradients. Infinities and NaNs reach the
// result, so that it also says whether all elements are finite.
#include "reduce.cuh"
#include "view.cuh"

namespace lt_cuda {

struct Mixed {
    Batch<1> batch;
    int8_t dtype[Batch<1>::capacity];
};

template <class T>
LT_DEVICE double chunk_squares(const Batch<1> &batch, const Chunk &chunk) {
    constexpr int kWidth = kAccess<T>, kLoads = (int)(kChunk / (kThreads * kWidth));
    View<T> data(batch, 0, chunk);
    double sum = 0.0;
    if (chunk.end - chunk.begin == kChunk && data.template aligned<kWidth>()) {
        // All loads are on their way before the first is used: only reading takes time here.
        Lanes<kWidth> x[kLoads];
#pragma unroll
        for (int n = 0; n < kLoads; ++n)
            x[n] = data.template load<kWidth>(chunk.begin + ((int64_t)n * kThreads + threadIdx.x) * kWidth);
#pragma unroll
        for (int n = 0; n < kLoads; ++n)
#pragma unroll
            for (int k = 0; k < kWidth; ++k) sum = add_square(sum, x[n][k]);
        return sum;
    }
    for_each_element<kWidth>(chunk, data.template aligned<kWidth>(), [&](auto width, int64_t i) {
        constexpr int W = decltype(width)::value;
        Lanes<W> x = data.template load<W>(i);
#pragma unroll
        for (int k = 0; k < W; ++k) sum = add_square(sum, x[k]);
    });
    return sum;
}

// One kernel for all dtypes: the branch is the same for a whole block, and the partial sums keep the list's order.
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ Mixed mixed, double *partial) {
    for_each_chunk(mixed.batch, [&](const Chunk &chunk) {
        double sum;
        switch (mixed.dtype[chunk.tensor]) {
            case LT_BF16: sum = chunk_squares<bf16>(mixed.batch, chunk); break;
            case LT_FP16: sum = chunk_squares<fp16>(mixed.batch, chunk); break;
            default: sum = chunk_squares<float>(mixed.batch, chunk);
        }
        sum = block_sum<kThreads>(sum);
        if (threadIdx.x == 0) partial[mixed.batch.first_chunk + chunk.index] = sum;
    });
}

bool dtypes_valid(const lt_mixed &m) {
    if (m.count > 0 && !m.dtype) return false;
    for (int64_t i = 0; i < m.count; ++i)
        if (!is_dtype(m.dtype[i])) return false;
    return true;
}

}  // namespace lt_cuda

using namespace lt_cuda;

LT_EXPORT int lt_cuda_norm_squared(const lt_mixed *mixed, double *result, void *scratch, void *stream) {
    if (!mixed || !result || !lists_valid(mixed->count, mixed->numel, {mixed->data}) || !dtypes_valid(*mixed) ||
        (!scratch && lt_cuda_scratch(mixed->count, mixed->numel) > 0))
        return LT_BAD_ARGUMENT;

    double *partial = (double *)scratch;
    Mixed work = {};
    int code = for_each_batch(work.batch, mixed->count, mixed->numel, {mixed->data}, [&] {
        for (int64_t i = 0; i < work.batch.count; ++i) work.dtype[i] = (int8_t)mixed->dtype[work.batch.first + i];
        return launch_chunks(norm_kernel, work.batch.chunks(), stream, work, partial);
    });
    if (code) return code;
    Segments all = {};
    all.start[1] = work.batch.first_chunk;
    return launch(sum_segments<1>, 1, kSumThreads, stream, all, partial, result, nullptr);
}
