"""Adam (arXiv:1412.6980, algorithm 1) and AdamW (arXiv:1711.05101, algorithm 2), as torch.optim computes them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lt_zero.ops import library
from lt_zero.ops.lists import call, chunks, exact_sqrt, factor_of, native
from lt_zero.ops.step import (
    COMMON,
    gradient,
    nothing,
    register,
    skipped,
    step_tensors,
    store_copy,
    store_state,
    widened,
)


def adam_step(
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
) -> None:
    """Unscale, clip, update moments and weights, and write the low-precision copy: one pass over memory.

    Args:
        params: fp32 master weights, contiguous, any shape; updated.
        grads: of the same sizes, in fp32, bf16 or fp16.
        exp_avgs, exp_avg_sqs: first and second moments in fp32 or bf16; updated.
        outs: receive the updated weights, rounded to their dtype (fp32, bf16 or fp16).
        lr, beta1, beta2, eps, weight_decay: as in ``torch.optim.AdamW``.
        step: the number of this step, from 1.
        decoupled: AdamW's weight decay; False adds it to the gradient.
        maximize: negates the gradient.
        scale, clip: one fp32 number each on the parameters' device; gradients are multiplied by their product.
        found_inf: one fp32 number; if it is not zero nothing is written, without synchronizing with the host.

    Raises:
        ValueError: a list does not match ``params`` in length, size, device or dtype.
    """
    if len(params) > 0:
        torch.ops.lt_zero.adam_step(
            list(params),
            list(grads),
            list(exp_avgs),
            list(exp_avg_sqs),
            list(outs or ()),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            decoupled=decoupled,
            maximize=maximize,
            scale=scale,
            clip=clip,
            found_inf=found_inf,
        )


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
) -> None:
    """``adam_step`` in torch operations, bitwise equal where torch fuses multiply and add."""
    if skipped(found_inf):
        return
    factor = factor_of(scale, clip)
    step_size, correction2 = lr / (1.0 - beta1**step), (1.0 - beta2**step) ** 0.5
    for p, grad, exp_avg, exp_avg_sq, out in chunks(params, grads, exp_avgs, exp_avg_sqs, outs):
        g, m, v = gradient(grad, factor, maximize), widened(exp_avg), widened(exp_avg_sq)
        if weight_decay != 0.0 and decoupled:
            p.mul_(1.0 - lr * weight_decay)
        elif weight_decay != 0.0:
            g = g.add(p, alpha=weight_decay)
        m.lerp_(g, 1.0 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
        p.addcdiv_(m, exact_sqrt(v).div_(correction2).add_(eps), value=-step_size)
        store_state(exp_avg, m)
        store_state(exp_avg_sq, v)
        store_copy(out, p)


def _run(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    outs: list[Tensor],
    decoupled: bool = True,
    **options: Any,
) -> None:
    tensors = step_tensors(params, grads, (exp_avgs, exp_avg_sqs), outs, **options)
    lib, device = native(params[0].device), params[0].device
    if lib is None:
        adam_step_reference(params, grads, exp_avgs, exp_avg_sqs, outs, decoupled=decoupled, **options)
        return
    numbers = [options[name] for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "step")]
    call(lib, "adam_step", device, ctypes.byref(tensors), ctypes.byref(library.Adam(*numbers, decoupled)))


register(
    "adam_step",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] outs, *, "
    f"float lr, float beta1, float beta2, float eps, float weight_decay, float step, bool decoupled=True, {COMMON}"
    ") -> ()",
    _run,
    nothing,
)
