// One optimizer step over a list of tensors, for every update rule that needs one pass.
//
// Notes:
// - scale, clip and found_inf are read on the device, when the kernel runs: whoever computes them needs no
//   synchronisation, only the same stream.
// - The weights are updated from the moments as computed, before these are rounded for storage.
// - A tensor's elements are read before they are written, by the same thread; no other tensor may overlap them.
#pragma once

#include "launch.cuh"
#include "view.cuh"

#include "../stochastic.h"

namespace lt_cuda {

// What the gradients are multiplied by, and whether there is a step at all.
struct Gate {
    const float *scale, *clip, *found_inf;
    bool maximize;

    explicit Gate(const lt_tensors &t)
        : scale(t.scale), clip(t.clip), found_inf(t.found_inf), maximize(t.maximize != 0) {}

    LT_DEVICE bool closed() const { return found_inf && *found_inf != 0.0f; }

    // Multiplying by 1 or -1 is exact, so one factor serves every case.
    LT_DEVICE Float factor() const {
        Float product = Float(scale ? *scale : 1.0f) * Float(clip ? *clip : 1.0f);
        return maximize ? Float(-product.x) : product;
    }
};

enum { PARAM, GRAD, STATE1, STATE2, OUT, LISTS };

// How the updated weights are kept.
struct Keeping {
    int param_dtype, out_dtype;  // the second one may be kAbsent
    const lt_place *places;      // none: they are rounded to the nearest
    int64_t place_count;

    explicit Keeping(const lt_tensors &t)
        : param_dtype(t.param_dtype), out_dtype(t.out ? t.out_dtype : kAbsent), places(t.places),
          place_count(t.place_count) {}
};

template <class Rule>
struct Step {
    Rule rule;
    Gate gate;
    Keeping keeping;
    Batch<LISTS> batch;
};

// The master weights of a chunk, and their copy. A thread visits elements in their order.
class Weights {
  public:
    template <class Rule>
    LT_DEVICE Weights(const Step<Rule> &step, const Chunk &chunk)
        : param(step.batch, PARAM, chunk, step.keeping.param_dtype),
          out(step.batch, OUT, chunk, step.keeping.out_dtype), random(step.keeping.places != nullptr) {
        const Keeping &k = step.keeping;
        if (random) cursor = find_place(k.places, k.place_count, step.batch.first + chunk.tensor, chunk.begin);
    }

    template <int W>
    LT_DEVICE bool aligned() const {
        return param.aligned<W>() && out.aligned<W>();
    }

    template <int W>
    LT_DEVICE Lanes<W> load(int64_t i) const {
        return param.load<W>(i);
    }

    template <int W>
    LT_DEVICE void store(int64_t i, Lanes<W> values) {
        if (random) {
#pragma unroll
            for (int k = 0; k < W; ++k) {
                const uint32_t bits = __float_as_uint(values[k].x);
                const uint32_t rounded = rounded_randomly(bits, random_bits(cursor, i + k));
                values[k] = Float(__uint_as_float(rounded & 0xffff0000u));  // which is stored as it is
            }
        }
        param.store<W>(i, values);
        out.store<W>(i, values);
    }

  private:
    WeightView param, out;
    bool random;
    PlaceCursor cursor;
};

template <class Rule>
constexpr int kStates = 1;
template <>
constexpr int kStates<AdamRule> = 2;

template <class Rule>
LT_DEVICE void advance(const Rule &rule, Float &p, Float g, Float &state1, Float &state2) {
    if constexpr (kStates<Rule> == 2) update(rule, p, g, state1, state2);
    else update(rule, p, g, state1);
}

// Of an SM at once: 48 registers a thread. With 6 blocks, 40 registers, some kernels would spill.
constexpr int kStepBlocks = 5;

template <class Rule, class Grad, class State>
__global__ void __launch_bounds__(kThreads, kStepBlocks) step_kernel(const __grid_constant__ Step<Rule> step) {
    using State2 = std::conditional_t<kStates<Rule> == 2, State, None>;
    constexpr int kWidth = kAccess<float>;
    if (step.gate.closed()) return;
    const Float factor = step.gate.factor();
    for_each_chunk(step.batch, [&](const Chunk &chunk) {
        Weights weights(step, chunk);
        View<Grad, STREAMED> grad(step.batch, GRAD, chunk);
        View<State, STREAMED> state1(step.batch, STATE1, chunk);
        View<State2, STREAMED> state2(step.batch, STATE2, chunk);
        bool aligned = weights.aligned<kWidth>() && grad.template aligned<kWidth>() &&
                       state1.template aligned<kWidth>() && state2.template aligned<kWidth>();
        for_each_element<kWidth>(chunk, aligned, [&](auto width, int64_t i) {
            constexpr int W = decltype(width)::value;
            Lanes<W> p = weights.load<W>(i), g = grad.template load<W>(i);
            Lanes<W> s1 = state1.template load<W>(i), s2 = state2.template load<W>(i);
#pragma unroll
            for (int k = 0; k < W; ++k) advance(step.rule, p[k], g[k] * factor, s1[k], s2[k]);
            state1.template store<W>(i, s1);
            state2.template store<W>(i, s2);
            weights.store<W>(i, p);
        });
    });
}

template <class Rule>
using StepKernel = void (*)(const Step<Rule>);

// The kernel for dtypes that tensors_valid() has seen.
template <class Rule, class Grad>
StepKernel<Rule> pick_state(int state) {
    if constexpr (std::is_same_v<Rule, SgdRule>)
        if (state == kAbsent) return step_kernel<Rule, Grad, None>;
    return state == LT_BF16 ? step_kernel<Rule, Grad, bf16> : step_kernel<Rule, Grad, float>;
}

template <class Rule>
StepKernel<Rule> pick_kernel(int grad, int state) {
    switch (grad) {
        case LT_BF16: return pick_state<Rule, bf16>(state);
        case LT_FP16: return pick_state<Rule, fp16>(state);
        default: return pick_state<Rule, float>(state);
    }
}

// `states`: fewer than the rule's for SGD without momentum, whose state is neither read nor written.
template <class Rule>
int run_step(const lt_tensors *tensors, const Rule &rule, void *stream, int states = kStates<Rule>) {
    if (!tensors_valid(tensors, states)) return LT_BAD_ARGUMENT;
    const lt_tensors &t = *tensors;
    StepKernel<Rule> kernel = pick_kernel<Rule>(t.grad_dtype, states > 0 ? t.state_dtype : kAbsent);
    const List state1 = states > 0 ? t.state1 : nullptr, state2 = states > 1 ? t.state2 : nullptr;
    Step<Rule> step = {rule, Gate(t), Keeping(t), {}};
    return for_each_batch(step.batch, t.count, t.numel, {t.param, t.grad, state1, state2, t.out},
                          [&] { return launch_chunks(kernel, step.batch.chunks(), stream, step); });
}

}  // namespace lt_cuda
