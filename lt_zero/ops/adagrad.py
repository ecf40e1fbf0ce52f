"""Adagrad (Duchi, Hazan, Singer, JMLR 12, 2011), as torch.optim computes it."""

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


def adagrad_step(
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
) -> None:
    """One step of Adagrad in one pass over memory.

    Args:
        params: fp32 master weights, contiguous, any shape; updated.
        grads: of the same sizes, in fp32, bf16 or fp16.
        state_sums: sums of squared gradients in fp32 or bf16; updated.
        outs: receive the updated weights, rounded to their dtype.
        lr: the decayed rate: ``lr / (1 + (step - 1) * lr_decay)`` of ``torch.optim.Adagrad``.
        eps, weight_decay: as in ``torch.optim.Adagrad``.
        maximize, scale, clip, found_inf: as in ``adam_step``.

    Raises:
        ValueError: a list does not match ``params`` in length, size, device or dtype.
    """
    if len(params) > 0:
        torch.ops.lt_zero.adagrad_step(
            list(params),
            list(grads),
            list(state_sums),
            list(outs or ()),
            lr=lr,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            scale=scale,
            clip=clip,
            found_inf=found_inf,
        )


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
) -> None:
    """``adagrad_step`` in torch operations."""
    if skipped(found_inf):
        return
    factor = factor_of(scale, clip)
    for p, grad, state_sum, out in chunks(params, grads, state_sums, outs):
        g, total = gradient(grad, factor, maximize), widened(state_sum)
        if weight_decay != 0.0:
            g = g.add(p, alpha=weight_decay)
        total.addcmul_(g, g)
        p.addcdiv_(g, exact_sqrt(total).add_(eps), value=-lr)
        store_state(state_sum, total)
        store_copy(out, p)


def _run(
    params: list[Tensor],
    grads: list[Tensor],
    state_sums: list[Tensor],
    outs: list[Tensor],
    **options: Any,
) -> None:
    tensors = step_tensors(params, grads, (state_sums,), outs, **options)
    lib, device = native(params[0].device), params[0].device
    if lib is None:
        adagrad_step_reference(params, grads, state_sums, outs, **options)
        return
    numbers = [options[name] for name in ("lr", "eps", "weight_decay")]
    call(lib, "adagrad_step", device, ctypes.byref(tensors), ctypes.byref(library.Adagrad(*numbers)))


register(
    "adagrad_step",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state_sums, Tensor(d!)[] outs, *, "
    f"float lr, float eps, float weight_decay, {COMMON}) -> ()",
    _run,
    nothing,
)
