"""The step of Adam and AdamW in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lt_zero.kernels.dispatch import (
    are_coded,
    exact_sqrt,
    factor_of,
    gradient,
    skipped,
    state_code,
    step_operator,
    store,
)
from lt_zero.kernels.header import STRUCTS
from lt_zero.kernels.steps.weights import weight_chunks


def adam_step_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    outs: Sequence[Tensor] | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: float,
    decoupled: bool = True,
    maximize: bool = False,
    scale: Tensor | None = None,
    clip: Tensor | None = None,
    found_inf: Tensor | None = None,
    places: Tensor | None = None,
) -> None:
    """Unscale, clip, update moments and weights, and write the low-precision copy: one pass over memory.

    Args:
        params: master weights in fp32 or bf16, contiguous, any shape; updated. The step is computed in fp32.
        grads: of the same sizes, in fp32, bf16 or fp16.
        exp_avgs, exp_avg_sqs: first and second moments in fp32 or bf16, or as codes (1D uint8, moments.py); updated.
        outs: receive the updated weights, rounded to their dtype (fp32, bf16 or fp16; beside bf16 weights bf16).
        lr, beta1, beta2, eps, weight_decay: as in ``torch.optim.AdamW``.
        step: the number of this step, from 1.
        decoupled: AdamW's weight decay; False adds it to the gradient.
        maximize: negates the gradient.
        scale, clip: one fp32 number each on the parameters' device; gradients are multiplied by their product.
        found_inf: one fp32 number; if it is not zero nothing is written, without synchronizing with the host.
        places: of all elements, from ``place_table``: weights in bf16 are rounded up or down at random. None: to the
            nearest.

    Raises:
        ValueError: a list does not match ``params`` in length, size, device or dtype.
    """
    if skipped(found_inf):
        return
    factor = factor_of(scale, clip)
    coded, decoded = [exp_avgs, exp_avg_sqs], are_coded(exp_avgs, exp_avg_sqs)
    if decoded:
        sizes = [p.numel() for p in params]
        exp_avgs, exp_avg_sqs = (
            [state_code().decode(rows, numel, signed) for rows, numel in zip(state, sizes, strict=True)]
            for state, signed in zip(coded, (True, False), strict=True)
        )
    # Corrections of the bias are in fp64, as in torch. The kernels compute the lines below in this order: another one
    # changes the last bit.
    step_size, correction2 = lr / (1.0 - beta1**step), (1.0 - beta2**step) ** 0.5
    for weights, grad, exp_avg, exp_avg_sq in weight_chunks(params, outs, places, grads, exp_avgs, exp_avg_sqs):
        p = weights.values
        g = gradient(grad, factor, maximize)
        m = exp_avg.float()
        v = exp_avg_sq.float()
        if weight_decay != 0.0 and decoupled:
            p.mul_(1.0 - lr * weight_decay)
        elif weight_decay != 0.0:
            g = g.add(p, alpha=weight_decay)
        m.lerp_(g, 1.0 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
        p.addcdiv_(m, exact_sqrt(v).div_(correction2).add_(eps), value=-step_size)
        store(exp_avg, m)
        store(exp_avg_sq, v)
        weights.keep()
    for state, values, signed in zip(coded, (exp_avgs, exp_avg_sqs), (True, False), strict=True) if decoded else ():
        for rows, value in zip(state, values, strict=True):
            state_code().encode(value, signed, rows)


adam_step = step_operator(adam_step_reference, STRUCTS["lt_adam"])
