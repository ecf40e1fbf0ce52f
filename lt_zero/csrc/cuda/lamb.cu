// LAMB on CUDA, in two passes: the trust ratio of a tensor needs the norms of its whole weight and its whole update,
// and under ZeRO those of all ranks' parts, so that the caller adds them up between the passes.
#include "reduce.cuh"
#include "step.cuh"
#include "view.cuh"

namespace lt_cuda {

// Moments and, per chunk, the sums of squares of weights and updates.
template <class Grad, class State>
__global__ void __launch_bounds__(kThreads)
    lamb_update_kernel(const __grid_constant__ Step<LambRule> step, double *partial) {
    constexpr int kWidth = kAccess<float>;
    if (step.gate.closed()) return;
    const Float factor = step.gate.factor();
    for_each_chunk(step.batch, [&](const Chunk &chunk) {
        Weights weights(step, chunk);
        View<Grad> grad(step.batch, GRAD, chunk);
        View<State> state1(step.batch, STATE1, chunk), state2(step.batch, STATE2, chunk);
        bool aligned = weights.aligned<kWidth>() && grad.template aligned<kWidth>() &&
                       state1.template aligned<kWidth>() && state2.template aligned<kWidth>();
        double param_squares = 0.0, update_squares = 0.0;
        for_each_element<kWidth>(chunk, aligned, [&](auto width, int64_t i) {
            constexpr int W = decltype(width)::value;
            Lanes<W> p = weights.load<W>(i), g = grad.template load<W>(i);
            Lanes<W> m = state1.template load<W>(i), v = state2.template load<W>(i);
#pragma unroll
            for (int k = 0; k < W; ++k) update(step.rule, g[k] * factor, m[k], v[k]);
            state1.template store<W>(i, m);
            state2.template store<W>(i, v);
            // The second pass reads the states as they are stored. Norms must be of the same rounded values.
            if constexpr (!std::is_same_v<State, float>) {
                m = state1.template load<W>(i);
                v = state2.template load<W>(i);
            }
#pragma unroll
            for (int k = 0; k < W; ++k) {
                param_squares = add_square(param_squares, p[k]);
                update_squares = add_square(update_squares, direction(step.rule, p[k], m[k], v[k]));
            }
        });
        param_squares = block_sum<kThreads>(param_squares);
        update_squares = block_sum<kThreads>(update_squares);
        if (threadIdx.x == 0) {
            double *sums = partial + 2 * (step.batch.first_chunk + chunk.index);
            sums[0] = param_squares;
            sums[1] = update_squares;
        }
    });
}

using LambKernel = void (*)(const Step<LambRule>, double *);

template <class Grad>
LambKernel pick_lamb_state(int state) {
    return state == LT_BF16 ? lamb_update_kernel<Grad, bf16> : lamb_update_kernel<Grad, float>;
}

LambKernel pick_lamb(int grad, int state) {
    switch (grad) {
        case LT_BF16: return pick_lamb_state<bf16>(state);
        case LT_FP16: return pick_lamb_state<fp16>(state);
        default: return pick_lamb_state<float>(state);
    }
}

// The norms of a batch's tensors. A launch of its own: all blocks of the first kernel must have finished.
int sum_norms(const Batch<LISTS> &batch, const double *partial, double *norms, const float *found_inf, void *stream) {
    static_assert(Batch<LISTS>::capacity <= Segments::capacity, "a segment for each tensor of a batch");
    Segments segments = {};
    for (int64_t i = 0; i <= batch.count; ++i) segments.start[i] = batch.first_chunk + batch.start[i];
    return launch(sum_segments<2>, dim3((unsigned)batch.count), kSumThreads, stream, segments, partial,
                  norms + 2 * batch.first, found_inf);
}

// ---- Second pass --------------------------------------------------------------------------------------------------

template <class State>
__global__ void __launch_bounds__(kThreads)
    lamb_apply_kernel(const __grid_constant__ Step<LambRule> step, const float *rates) {
    constexpr int kWidth = kAccess<float>;
    if (step.gate.closed()) return;
    for_each_chunk(step.batch, [&](const Chunk &chunk) {
        Weights weights(step, chunk);
        View<State> state1(step.batch, STATE1, chunk), state2(step.batch, STATE2, chunk);
        bool aligned = weights.aligned<kWidth>() && state1.template aligned<kWidth>() &&
                       state2.template aligned<kWidth>();
        Float rate = Float(-rates[step.batch.first + chunk.tensor]);
        for_each_element<kWidth>(chunk, aligned, [&](auto width, int64_t i) {
            constexpr int W = decltype(width)::value;
            Lanes<W> p = weights.load<W>(i), m = state1.template load<W>(i), v = state2.template load<W>(i);
#pragma unroll
            for (int k = 0; k < W; ++k) p[k] = fma(rate, direction(step.rule, p[k], m[k], v[k]), p[k]);
            weights.store<W>(i, p);
        });
    });
}

const List kNone((void *const *)nullptr);

}  // namespace lt_cuda

using namespace lt_cuda;

LT_EXPORT int lt_cuda_lamb_update(const lt_tensors *tensors, const lt_lamb *options, double *norms, void *scratch,
                                  void *stream) {
    if (!options || !tensors_valid(tensors, 2)) return LT_BAD_ARGUMENT;
    const lt_tensors &t = *tensors;
    if ((t.count > 0 && !norms) || (!scratch && lt_cuda_scratch(t.count, t.numel) > 0)) return LT_BAD_ARGUMENT;

    LambKernel kernel = pick_lamb(t.grad_dtype, t.state_dtype);
    double *partial = (double *)scratch;
    Step<LambRule> step = {make_rule(*options), Gate(t), Keeping(t), {}};
    return for_each_batch(step.batch, t.count, t.numel, {t.param, t.grad, t.state1, t.state2, kNone}, [&] {
        int code = launch_chunks(kernel, step.batch.chunks(), stream, step, partial);
        return code ? code : sum_norms(step.batch, partial, norms, t.found_inf, stream);
    });
}

// scale, clip and maximize are in the moments already.
LT_EXPORT int lt_cuda_lamb_apply(const lt_tensors *tensors, const lt_lamb *options, const float *rate, void *stream) {
    if (!options || !tensors_valid(tensors, 2)) return LT_BAD_ARGUMENT;
    const lt_tensors &t = *tensors;
    if (t.count > 0 && !rate) return LT_BAD_ARGUMENT;

    auto kernel = t.state_dtype == LT_BF16 ? lamb_apply_kernel<bf16> : lamb_apply_kernel<float>;
    Step<LambRule> step = {make_rule(*options), Gate(t), Keeping(t), {}};
    return for_each_batch(step.batch, t.count, t.numel, {t.param, kNone, t.state1, t.state2, t.out},
                          [&] { return launch_chunks(kernel, step.batch.chunks(), stream, step, rate); });
}
