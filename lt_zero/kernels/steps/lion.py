"""The step of Lion in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lt_zero.kernels.dispatch import factor_of, gradient, skipped, step_operator, store
from lt_zero.kernels.header import STRUCTS
from lt_zero.kernels.steps.weights import weight_chunks


def lion_step_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    outs: Sequence[Tensor] | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool = False,
    scale: Tensor | None = None,
    clip: Tensor | None = None,
    found_inf: Tensor | None = None,
    places: Tensor | None = None,
) -> None:
    """One step of Lion in one pass over memory, with decoupled weight decay.

    Args:
        exp_avgs: momentum in fp32 or bf16; updated.
        lr, beta1, beta2, weight_decay: as in the paper.
        params, grads, outs, maximize, scale, clip, found_inf, places: as in ``adam_step``, as the errors.
    """
    if skipped(found_inf):
        return
    factor = factor_of(scale, clip)
    for weights, grad, exp_avg in weight_chunks(params, outs, places, grads, exp_avgs):
        p = weights.values
        g = gradient(grad, factor, maximize)
        m = exp_avg.float()
        if weight_decay != 0.0:
            p.mul_(1.0 - lr * weight_decay)
        # Step before the momentum changes: the direction mixes the old one with this gradient.
        p.sub_(m.lerp(g, 1.0 - beta1).sign_(), alpha=lr)
        m.lerp_(g, 1.0 - beta2)
        store(exp_avg, m)
        weights.keep()


lion_step = step_operator(lion_step_reference, STRUCTS["lt_lion"])
