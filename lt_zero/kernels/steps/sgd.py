"""The step of SGD in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lt_zero.kernels.dispatch import factor_of, gradient, skipped, step_operator, store
from lt_zero.kernels.header import STRUCTS
from lt_zero.kernels.steps.weights import weight_chunks


def sgd_step_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    outs: Sequence[Tensor] | None = None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
    maximize: bool = False,
    scale: Tensor | None = None,
    clip: Tensor | None = None,
    found_inf: Tensor | None = None,
    places: Tensor | None = None,
) -> None:
    """One step of SGD in one pass over memory.

    Args:
        momentum_buffers: in fp32 or bf16; updated. Empty if ``momentum`` is 0.
        lr, momentum, dampening, weight_decay, nesterov: as in ``torch.optim.SGD``.
        first: whether the momentum buffers are uninitialized; they are written, not read.
        params, grads, outs, maximize, scale, clip, found_inf, places: as in ``adam_step``, as the errors.
    """
    if skipped(found_inf):
        return
    factor = factor_of(scale, clip)
    for weights, grad, momentum_buffer in weight_chunks(params, outs, places, grads, momentum_buffers):
        p = weights.values
        g = gradient(grad, factor, maximize)
        if weight_decay != 0.0:
            g = g.add(p, alpha=weight_decay)
        if momentum != 0.0:
            buffer = momentum_buffer.float()
            # A first step only writes the buffer: it may hold NaNs, and 0 * NaN is NaN.
            buffer.copy_(g) if first else buffer.mul_(momentum).add_(g, alpha=1.0 - dampening)
            store(momentum_buffer, buffer)
            g = g.add(buffer, alpha=momentum) if nesterov else buffer
        p.add_(g, alpha=-lr)
        weights.keep()


sgd_step = step_operator(sgd_step_reference, STRUCTS["lt_sgd"])
