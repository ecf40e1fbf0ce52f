// The kernels for one instruction set: Note [One pass] each reads and writes every byte once.
//
// Included by avx512.cpp, avx2.cpp, neon.cpp and portable.cpp, each compiled with its own flags.
#pragma once

#include "cpu/attention.h"
#include "cpu/blocks.h"
#include "cpu/rounding.h"
#include "cpu/table.h"
#include "cpu/topk.h"
#include "cpu/vec.h"
#include "update.h"
#include "cpu/moments.h"

namespace LT_NAMESPACE {

struct Scaled {
    bool active;
    float factor;

    Scaled(const float *a, const float *b, float c) : active(a || b || c != 1.0f), factor(c) {
        if (a) factor *= *a;
        if (b) factor *= *b;
    }

    Vec operator()(Vec x) const { return active ? x * Vec(factor) : x; }
};

// A dtype that is known when a kernel is compiled: its loop has no branches on it.
template <int dtype>
struct Known {
    Known(int) {}
    operator int() const { return dtype; }
};

// One tensor of an optimizer step.
template <class Param, class Grad = int, class State = int, class Out = int>
struct RowOf {
    const lt_tensors &list;
    int64_t tensor;  // in the list
    void *param;
    const void *grad;
    void *state1, *state2, *out;
    Param param_dtype;
    Grad grad_dtype;
    State state_dtype;
    Out out_dtype;
    bool maximize;
    Scaled scaled;
    const uint16_t *random = nullptr;  // of the elements from `drawn` on; none: weights are rounded to the nearest
    int64_t drawn = 0;

    RowOf(const lt_tensors &t, int64_t k)
        : list(t), tensor(k), param(t.param[k]), grad(t.grad[k]), state1(t.state1 ? t.state1[k] : nullptr),
          state2(t.state2 ? t.state2[k] : nullptr), out(t.out ? t.out[k] : nullptr), param_dtype(t.param_dtype),
          grad_dtype(t.grad_dtype), state_dtype(t.state_dtype), out_dtype(t.out_dtype), maximize(t.maximize != 0),
          scaled(t.scale, t.clip, 1.0f) {}

    // Calls body(lanes, i) for the vectors of [lo, hi), whose random bits are drawn before if they need some.
    template <class Body>
    void for_each(int64_t lo, int64_t hi, Body body) {
        if (param_dtype == LT_FP32 || !list.places) return for_each_vector(lo, hi, body);
        uint16_t bits[kTile];
        random = bits;
        for (drawn = lo; drawn < hi; drawn += kTile) {
            const int64_t end = drawn + kTile < hi ? drawn + kTile : hi;
            draw(list.places, list.place_count, tensor, drawn, end, bits);
            for_each_vector(drawn, end, body);
        }
    }

    __attribute__((always_inline)) void prefetch(int64_t i) const {
        LT_NAMESPACE::prefetch(param, param_dtype, i);
        LT_NAMESPACE::prefetch(grad, grad_dtype, i);
        if (state1) LT_NAMESPACE::prefetch(state1, state_dtype, i);
        if (state2) LT_NAMESPACE::prefetch(state2, state_dtype, i);
    }

    template <class At>
    Vec weights(At at, int64_t i) const {
        return at.load(param, param_dtype, i);
    }

    template <class At>
    Vec gradient(At at, int64_t i) const {
        Vec g = scaled(at.load(grad, grad_dtype, i));
        return maximize ? -g : g;
    }

    template <class At>
    void finish(At at, int64_t i, Vec p) const {
        if (param_dtype == LT_FP32) {
            at.store(param, LT_FP32, i, p);
            if (out) at.store(out, out_dtype, i, p);
            return;
        }
        const Bits rounded = random ? random_bfloat(at, random, i - drawn, p) : nearest_bfloat(p);
        at.store_upper(param, i, rounded);
        if (out) at.store_upper(out, i, rounded);
    }
};

typedef Known<LT_FP32> Fp32;
typedef Known<LT_BF16> Bf16;

// Calls body(row), with a constant for the dtype of the weights.
template <class Body>
static void with_row(const lt_tensors &t, int64_t k, Body body) {
    if (t.param_dtype == LT_FP32) body(RowOf<Fp32>(t, k));
    else body(RowOf<Bf16>(t, k));
}

// The same, with constants for the usual dtypes: from bf16 to bf16 AdamW takes 0.89 of the time on AVX2 then.
template <class Body>
static void with_usual_row(const lt_tensors &t, int64_t k, Body body) {
    const bool usual = t.param_dtype == LT_FP32 && (!t.out || t.out_dtype == LT_BF16), wide = t.state_dtype == LT_FP32;
    if (usual && wide && t.grad_dtype == LT_FP32) body(RowOf<Fp32, Fp32, Fp32, Bf16>(t, k));
    else if (usual && wide && t.grad_dtype == LT_BF16) body(RowOf<Fp32, Bf16, Fp32, Bf16>(t, k));
    else if (usual && !wide && t.grad_dtype == LT_FP32) body(RowOf<Fp32, Fp32, Bf16, Bf16>(t, k));
    else if (usual && !wide && t.grad_dtype == LT_BF16) body(RowOf<Fp32, Bf16, Bf16, Bf16>(t, k));
    else with_row(t, k, body);
}

static void adam(const lt_tensors &t, const lt_adam &options, int64_t k, int64_t lo, int64_t hi) {
    const AdamRule rule = make_rule(options);
    if (t.state_dtype == LT_CODES) return with_row(t, k, [&](auto row) { coded_adam(t, row, rule, lo, hi); });
    with_usual_row(t, k, [&](auto row) {
        row.for_each(lo, hi, [&](auto at, int64_t i) {
            row.prefetch(i);
            Vec p = row.weights(at, i), g = row.gradient(at, i);
            Vec m = at.load(row.state1, row.state_dtype, i), v = at.load(row.state2, row.state_dtype, i);
            update(rule, p, g, m, v);
            at.store(row.state1, row.state_dtype, i, m);
            at.store(row.state2, row.state_dtype, i, v);
            row.finish(at, i, p);
        });
    });
}

template <class Rule, class Row>
static void one_state(const Rule &rule, Row row, int64_t lo, int64_t hi) {
    row.for_each(lo, hi, [&](auto at, int64_t i) {
        row.prefetch(i);
        Vec p = row.weights(at, i), s = at.load(row.state1, row.state_dtype, i);
        update(rule, p, row.gradient(at, i), s);
        at.store(row.state1, row.state_dtype, i, s);
        row.finish(at, i, p);
    });
}

static void lion(const lt_tensors &t, const lt_lion &options, int64_t k, int64_t lo, int64_t hi) {
    with_row(t, k, [&](auto row) { one_state(make_rule(options), row, lo, hi); });
}

static void adagrad(const lt_tensors &t, const lt_adagrad &options, int64_t k, int64_t lo, int64_t hi) {
    with_row(t, k, [&](auto row) { one_state(make_rule(options), row, lo, hi); });
}

template <class Row>
static void sgd_row(const SgdRule &rule, Row row, int64_t lo, int64_t hi) {
    if (rule.has_momentum && !rule.first) return one_state(rule, row, lo, hi);
    row.for_each(lo, hi, [&](auto at, int64_t i) {  // buffers without values are not read
        row.prefetch(i);
        Vec p = row.weights(at, i), s(0.0f);
        update(rule, p, row.gradient(at, i), s);
        if (rule.has_momentum) at.store(row.state1, row.state_dtype, i, s);
        row.finish(at, i, p);
    });
}

static void sgd(const lt_tensors &t, const lt_sgd &options, int64_t k, int64_t lo, int64_t hi) {
    with_row(t, k, [&](auto row) { sgd_row(make_rule(options), row, lo, hi); });
}

template <class Row>
static void lamb_norms(const LambRule &rule, const Row &row, int64_t lo, int64_t hi, double *norms) {
    SquareSum params, updates;
    for_each_vector(lo, hi, [&](auto at, int64_t i) {
        row.prefetch(i);
        Vec p = row.weights(at, i), g = row.gradient(at, i);
        Vec m = at.load(row.state1, row.state_dtype, i), v = at.load(row.state2, row.state_dtype, i);
        update(rule, g, m, v);
        at.store(row.state1, row.state_dtype, i, m);
        at.store(row.state2, row.state_dtype, i, v);
        // The second pass reads the states as they are stored. Norms must be of the same rounded values.
        if (row.state_dtype != LT_FP32) {
            m = at.load(row.state1, row.state_dtype, i);
            v = at.load(row.state2, row.state_dtype, i);
        }
        params.add(p);
        updates.add(at.only(direction(rule, p, m, v)));
    });
    norms[0] = params.total();
    norms[1] = updates.total();
}

static void lamb_update(const lt_tensors &t, const lt_lamb &options, int64_t k, int64_t lo, int64_t hi,
                        double *norms) {
    with_row(t, k, [&](auto row) { lamb_norms(make_rule(options), row, lo, hi, norms); });
}

static void lamb_apply(const lt_tensors &t, const lt_lamb &options, float step, int64_t k, int64_t lo, int64_t hi) {
    const LambRule rule = make_rule(options);
    with_row(t, k, [&](auto row) {
        row.for_each(lo, hi, [&](auto at, int64_t i) {
            row.prefetch(i);
            Vec p = row.weights(at, i);
            Vec m = at.load(row.state1, row.state_dtype, i), v = at.load(row.state2, row.state_dtype, i);
            row.finish(at, i, fma(Vec(step), direction(rule, p, m, v), p));
        });
    });
}

static double norm_squared(const void *data, int dtype, int64_t lo, int64_t hi) {
    // Two sums, because an addition takes several cycles and the next one to the same sum would wait for it.
    SquareSum sums[2];
    int64_t i = lo;
    for (; i + 2 * W <= hi; i += 2 * W) {
        prefetch(data, dtype, i);
        sums[0].add(load(data, dtype, i));
        sums[1].add(load(data, dtype, i + W));
    }
    for_each_vector(i, hi, [&](auto at, int64_t j) { sums[0].add(at.load(data, dtype, j)); });
    return sums[0].total() + sums[1].total();
}

static void accumulate(const lt_pairs &t, int64_t k, int64_t lo, int64_t hi) {
    const Scaled scaled(t.scale, nullptr, (float)t.factor);
    for_each_vector(lo, hi, [&](auto at, int64_t i) {
        Vec sum = at.load(t.dst[k], LT_FP32, i) + scaled(at.load(t.src[k], t.src_dtype, i));
        at.store(t.dst[k], LT_FP32, i, sum);
    });
}

static void cast_scale(const lt_pairs &t, int64_t k, int64_t lo, int64_t hi) {
    const Scaled scaled(t.scale, nullptr, (float)t.factor);
    for_each_vector(lo, hi, [&](auto at, int64_t i) {
        at.store(t.dst[k], t.dst_dtype, i, scaled(at.load(t.src[k], t.src_dtype, i)));
    });
}

}  // namespace LT_NAMESPACE

#define LT_TABLE(name)                                                                                              \
    using namespace LT_NAMESPACE;                                                                                   \
    const Kernels lt_kernels_##name = {#name,           adam,          lion,            adagrad,                    \
                                       sgd,             lamb_update,   lamb_apply,      norm_squared,               \
                                       accumulate,      cast_scale,    encode_blocks,   decode_blocks,              \
                                       upper_histogram, lower_histogram, count_from,    indices_from,               \
                                       LT_NAMESPACE::attention, round_stochastic};
