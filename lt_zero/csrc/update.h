// The update rules, element by element, for every instruction set and for CUDA: written once, over a type V that is a
// vector of fp32 lanes on the CPU and one float on CUDA.
//
// Each operation is rounded once. Products and sums are fused only where `fma` is written, and there torch fuses too
// (lerp, addcmul, add with alpha), so that the results are those of torch.optim's plain implementation, up to torch's
// own square root, which is not correctly rounded everywhere.
#pragma once

#include <math.h>

#include "lt_zero.h"

#ifndef LT_FN
#define LT_FN static inline
#endif

namespace LT_NAMESPACE {

// torch.lerp: a + weight * (b - a), from the nearer end.
struct Lerp {
    float coefficient;
    bool near;
};

LT_FN Lerp make_lerp(double weight) {
    float w = (float)weight;
    return w < 0.5f ? Lerp{w, true} : Lerp{w - 1.0f, false};
}

template <class V>
LT_FN V lerp(V a, V b, Lerp weight) {
    if (weight.near) return fma(V(weight.coefficient), b - a, a);  // GCC would write both to memory for `?:`
    return fma(V(weight.coefficient), b - a, b);
}

// Constants of one call, computed on the host in fp64 and rounded once, as torch does with Python scalars.
struct AdamRule {
    Lerp first;
    float beta2, square, correction2, eps, step_size, shrink, l2;
    bool decoupled, decays;
};

struct LionRule {
    Lerp update, momentum;
    float lr, shrink;
    bool decays;
};

struct AdagradRule {
    float lr, eps, l2;
    bool decays;
};

struct SgdRule {
    float lr, momentum, gain, l2;
    bool has_momentum, nesterov, first, decays;
};

struct LambRule {
    Lerp first;
    float beta2, square, eps, decay;
    bool decays;
};

inline AdamRule make_rule(const lt_adam &o) {
    double correction1 = 1.0 - ::pow(o.beta1, o.step), correction2 = ::sqrt(1.0 - ::pow(o.beta2, o.step));
    return AdamRule{make_lerp(1.0 - o.beta1),
                    (float)o.beta2,
                    (float)(1.0 - o.beta2),
                    (float)correction2,
                    (float)o.eps,
                    (float)(-(o.lr / correction1)),
                    (float)(1.0 - o.lr * o.weight_decay),
                    (float)o.weight_decay,
                    o.decoupled != 0,
                    o.weight_decay != 0.0};
}

inline LionRule make_rule(const lt_lion &o) {
    return LionRule{make_lerp(1.0 - o.beta1), make_lerp(1.0 - o.beta2), (float)o.lr,
                    (float)(1.0 - o.lr * o.weight_decay), o.weight_decay != 0.0};
}

inline AdagradRule make_rule(const lt_adagrad &o) {
    return AdagradRule{(float)-o.lr, (float)o.eps, (float)o.weight_decay, o.weight_decay != 0.0};
}

inline SgdRule make_rule(const lt_sgd &o) {
    return SgdRule{(float)-o.lr,         (float)o.momentum, (float)(1.0 - o.dampening), (float)o.weight_decay,
                   o.momentum != 0.0,    o.nesterov != 0,   o.first != 0,               o.weight_decay != 0.0};
}

inline LambRule make_rule(const lt_lamb &o) {
    return LambRule{make_lerp(1.0 - o.beta1), (float)o.beta2,        (float)(1.0 - o.beta2),
                    (float)o.eps,             (float)o.weight_decay, o.weight_decay != 0.0};
}

// Adam (arXiv:1412.6980, algorithm 1) and AdamW (arXiv:1711.05101, algorithm 2).
template <class V>
LT_FN void update(const AdamRule &r, V &p, V g, V &m, V &v) {
    if (r.decays) {
        if (r.decoupled) p = p * V(r.shrink);
        else g = fma(V(r.l2), p, g);
    }
    m = lerp(m, g, r.first);
    v = fma(V(r.square) * g, g, v * V(r.beta2));
    p = p + V(r.step_size) * m / (sqrt(v) / V(r.correction2) + V(r.eps));
}

// Lion (arXiv:2302.06675, algorithm 2).
template <class V>
LT_FN void update(const LionRule &r, V &p, V g, V &m) {
    if (r.decays) p = p * V(r.shrink);
    p = p - V(r.lr) * sign(lerp(m, g, r.update));
    m = lerp(m, g, r.momentum);
}

// Adagrad (Duchi, Hazan, Singer, JMLR 12, 2011) with torch's place for eps.
template <class V>
LT_FN void update(const AdagradRule &r, V &p, V g, V &sum) {
    if (r.decays) g = fma(V(r.l2), p, g);
    sum = fma(g, g, sum);
    p = p + V(r.lr) * g / (sqrt(sum) + V(r.eps));
}

// SGD with momentum as in torch.optim.SGD.
template <class V>
LT_FN void update(const SgdRule &r, V &p, V g, V &momentum) {
    if (r.decays) g = fma(V(r.l2), p, g);
    if (r.has_momentum) {
        momentum = r.first ? g : fma(V(r.gain), g, momentum * V(r.momentum));
        g = r.nesterov ? fma(V(r.momentum), momentum, g) : momentum;
    }
    p = fma(V(r.lr), g, p);
}

// LAMB (arXiv:1904.00962, algorithm 2) without its bias correction: the moments, and the update before the trust ratio.
template <class V>
LT_FN void update(const LambRule &r, V g, V &m, V &v) {
    m = lerp(m, g, r.first);
    v = fma(V(r.square) * g, g, v * V(r.beta2));
}

template <class V>
LT_FN V direction(const LambRule &r, V p, V m, V v) {
    V u = m / (sqrt(v) + V(r.eps));
    return r.decays ? fma(V(r.decay), p, u) : u;
}

}  // namespace LT_NAMESPACE
