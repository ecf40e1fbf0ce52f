// LAMB on CUDA, in two passes: the trust ratio of a tensor needs the norms of its whole weight and its whole update,
// and under ZeRO those of all ranks' parts, so that the caller adds them up between the passes.
#include "reduce.cuh"
#include "step.cuh"
#include "view.cuh"

namespace lt_cuda {

enum { UPDATE = OUT };  // the first pass has no low-precision copy to write

// Moments, updates and, per chunk, the sums of squares of weights and updates.
template <class Grad, class State>
__global__ void __launch_bounds__(kThreads)
    lamb_update_kernel(const __grid_constant__ Step<LambRule> step, double *partial) {
    constexpr int kWidth = kAccess<float>;
    if (step.gate.closed()) return;
    const Float factor = step.gate.factor();
    for_each_chunk(step.batch, [&](const Chunk &chunk) {
        View<float> param(step.batch, PARAM, chunk), result(step.batch, UPDATE, chunk);
        View<Grad> grad(step.batch, GRAD, chunk);
        View<State> state1(step.batch, STATE1, chunk), state2(step.batch, STATE2, chunk);
        bool aligned = param.aligned<kWidth>() && result.aligned<kWidth>() && grad.template aligned<kWidth>() &&
                       state1.template aligned<kWidth>() && state2.template aligned<kWidth>();
        double param_squares = 0.0, update_squares = 0.0;
        for_each_element<kWidth>(chunk, aligned, [&](auto width, int64_t i) {
            constexpr int W = decltype(width)::value;
            Lanes<W> p = param.load<W>(i), g = grad.template load<W>(i), u;
            Lanes<W> m = state1.template load<W>(i), v = state2.template load<W>(i);
#pragma unroll
            for (int k = 0; k < W; ++k) {
                u[k] = update(step.rule, p[k], g[k] * factor, m[k], v[k]);
                param_squares = add_square(param_squares, p[k]);
                update_squares = add_square(update_squares, u[k]);
            }
            state1.template store<W>(i, m);
            state2.template store<W>(i, v);
            result.store<W>(i, u);
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
    return launch(sum_segments<2>, batch.count, kSumThreads, stream, segments, partial, norms + 2 * batch.first,
                  found_inf);
}

// ---- Second pass --------------------------------------------------------------------------------------------------

struct LambApply {
    float lr;
    int out_dtype;
    const float *trust, *found_inf;
    Batch<3> batch;  // param, update, out
};

__global__ void __launch_bounds__(kThreads) lamb_apply_kernel(const __grid_constant__ LambApply apply) {
    constexpr int kWidth = kAccess<float>;
    if (apply.found_inf && *apply.found_inf != 0.0f) return;
    for_each_chunk(apply.batch, [&](const Chunk &chunk) {
        View<float> param(apply.batch, 0, chunk), update(apply.batch, 1, chunk);
        OutView out(apply.batch, 2, chunk, apply.out_dtype);
        bool aligned = param.aligned<kWidth>() && update.aligned<kWidth>() && out.aligned<kWidth>();
        Float rate = Float(-apply.lr) * Float(apply.trust[apply.batch.first + chunk.tensor]);
        for_each_element<kWidth>(chunk, aligned, [&](auto width, int64_t i) {
            constexpr int W = decltype(width)::value;
            Lanes<W> p = param.load<W>(i), u = update.load<W>(i);
#pragma unroll
            for (int k = 0; k < W; ++k) p[k] = fma(rate, u[k], p[k]);
            param.store<W>(i, p);
            out.store<W>(i, p);
        });
    });
}

}  // namespace lt_cuda

using namespace lt_cuda;

LT_EXPORT int lt_cuda_lamb_update(const lt_tensors *tensors, const lt_lamb *options, float *const *update,
                                  double *norms, void *scratch, void *stream) {
    if (!options || !tensors_valid(tensors, 2)) return LT_BAD_ARGUMENT;
    const lt_tensors &t = *tensors;
    if (!lists_valid(t.count, t.numel, {update}) || (t.count > 0 && !norms) ||
        (!scratch && lt_cuda_scratch(t.count, t.numel) > 0))
        return LT_BAD_ARGUMENT;

    LambKernel kernel = pick_lamb(t.grad_dtype, t.state_dtype);
    double *partial = (double *)scratch;
    Step<LambRule> step = {make_rule(*options), Gate(t), kAbsent, {}};
    return for_each_batch(step.batch, t.count, t.numel, {t.param, t.grad, t.state1, t.state2, update}, [&] {
        int code = launch_chunks(kernel, step.batch.chunks(), stream, step, partial);
        return code ? code : sum_norms(step.batch, partial, norms, t.found_inf, stream);
    });
}

// The updates are those of scaled gradients already: scale, clip and maximize have no part here.
LT_EXPORT int lt_cuda_lamb_apply(const lt_tensors *tensors, const float *trust, double lr, void *stream) {
    if (!tensors_valid(tensors, 0)) return LT_BAD_ARGUMENT;
    const lt_tensors &t = *tensors;
    if (t.grad_dtype != LT_FP32 || (t.count > 0 && !trust)) return LT_BAD_ARGUMENT;

    LambApply apply = {(float)lr, t.out ? t.out_dtype : kAbsent, trust, t.found_inf, {}};
    return for_each_batch(apply.batch, t.count, t.numel, {t.param, t.grad, t.out},
                          [&] { return launch_chunks(lamb_apply_kernel, apply.batch.chunks(), stream, apply); });
}
