"""The step of Adagrad in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lt_zero.kernels.dispatch import exact_sqrt, factor_of, gradient, skipped, step_operator, store
from lt_zero.kernels.header import STRUCTS
from lt_zero.kernels.steps.weights import weight_chunks


def adagrad_step_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state_sums: Sequence[Tensor],
    outs: Sequence[Tensor] | None = None,
    *,
    lr: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    scale: Tensor | None = None,
    clip: Tensor | None = None,
    found_inf: Tensor | None = None,
    places: Tensor | None = None,
) -> None:
    """One step of Adagrad in one pass over memory.

    Args:
        state_sums: sums of squared gradients in fp32 or bf16; updated.
        lr: the decayed rate: ``lr / (1 + (step - 1) * lr_decay)`` of ``torch.optim.Adagrad``.
        eps, weight_decay: as in ``torch.optim.Adagrad``.
        params, grads, outs, maximize, scale, clip, found_inf, places: as in ``adam_step``, as the errors.
    """
    if skipped(found_inf):
        return
    factor = factor_of(scale, clip)
    for weights, grad, state_sum in weight_chunks(params, outs, places, grads, state_sums):
        p = weights.values
        g = gradient(grad, factor, maximize)
        total = state_sum.float()
        if weight_decay != 0.0:
            g = g.add(p, alpha=weight_decay)
        total.addcmul_(g, g)
        p.addcdiv_(g, exact_sqrt(total).add_(eps), value=-lr)
        store(state_sum, total)
        weights.keep()


adagrad_step = step_operator(adagrad_step_reference, STRUCTS["lt_adagrad"])
