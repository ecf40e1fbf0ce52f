"""Lion (arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lt_zero.ops import library
from lt_zero.ops.lists import call, chunks, factor_of, native
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


def lion_step(
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
) -> None:
    """One step of Lion in one pass over memory, with decoupled weight decay.

    Args:
        params: fp32 master weights, contiguous, any shape; updated.
        grads: of the same sizes, in fp32, bf16 or fp16.
        exp_avgs: momentum in fp32 or bf16; updated.
        outs: receive the updated weights, rounded to their dtype.
        lr, beta1, beta2, weight_decay: as in the paper.
        maximize, scale, clip, found_inf: as in ``adam_step``.

    Raises:
        ValueError: a list does not match ``params`` in length, size, device or dtype.
    """
    if len(params) > 0:
        torch.ops.lt_zero.lion_step(
            list(params),
            list(grads),
            list(exp_avgs),
            list(outs or ()),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            maximize=maximize,
            scale=scale,
            clip=clip,
            found_inf=found_inf,
        )


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
) -> None:
    """``lion_step`` in torch operations."""
    if skipped(found_inf):
        return
    factor = factor_of(scale, clip)
    for p, grad, exp_avg, out in chunks(params, grads, exp_avgs, outs):
        g, m = gradient(grad, factor, maximize), widened(exp_avg)
        if weight_decay != 0.0:
            p.mul_(1.0 - lr * weight_decay)
        p.sub_(m.lerp(g, 1.0 - beta1).sign_(), alpha=lr)
        m.lerp_(g, 1.0 - beta2)
        store_state(exp_avg, m)
        store_copy(out, p)


def _run(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    outs: list[Tensor],
    **options: Any,
) -> None:
    tensors = step_tensors(params, grads, (exp_avgs,), outs, **options)
    lib, device = native(params[0].device), params[0].device
    if lib is None:
        lion_step_reference(params, grads, exp_avgs, outs, **options)
        return
    numbers = [options[name] for name in ("lr", "beta1", "beta2", "weight_decay")]
    call(lib, "lion_step", device, ctypes.byref(tensors), ctypes.byref(library.Lion(*numbers)))


register(
    "lion_step",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(d!)[] outs, *, "
    f"float lr, float beta1, float beta2, float weight_decay, {COMMON}) -> ()",
    _run,
    nothing,
)
