"""SGD with momentum, as torch.optim computes it."""

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


def sgd_step(
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
) -> None:
    """One step of SGD in one pass over memory.

    Args:
        params: fp32 master weights, contiguous, any shape; updated.
        grads: of the same sizes, in fp32, bf16 or fp16.
        momentum_buffers: in fp32 or bf16; updated. Empty if ``momentum`` is 0.
        outs: receive the updated weights, rounded to their dtype.
        lr, momentum, dampening, weight_decay, nesterov: as in ``torch.optim.SGD``.
        first: whether the momentum buffers are uninitialized; they are written, not read.
        maximize, scale, clip, found_inf: as in ``adam_step``.

    Raises:
        ValueError: a list does not match ``params`` in length, size, device or dtype.
    """
    if len(params) > 0:
        torch.ops.lt_zero.sgd_step(
            list(params),
            list(grads),
            list(momentum_buffers),
            list(outs or ()),
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            first=first,
            maximize=maximize,
            scale=scale,
            clip=clip,
            found_inf=found_inf,
        )


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
) -> None:
    """``sgd_step`` in torch operations."""
    if skipped(found_inf):
        return
    factor = factor_of(scale, clip)
    for p, grad, momentum_buffer, out in chunks(params, grads, momentum_buffers, outs):
        g = gradient(grad, factor, maximize)
        if weight_decay != 0.0:
            g = g.add(p, alpha=weight_decay)
        if momentum != 0.0:
            buffer = widened(momentum_buffer)
            buffer.copy_(g) if first else buffer.mul_(momentum).add_(g, alpha=1.0 - dampening)
            store_state(momentum_buffer, buffer)
            g = g.add(buffer, alpha=momentum) if nesterov else buffer
        p.add_(g, alpha=-lr)
        store_copy(out, p)


def _run(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    outs: list[Tensor],
    **options: Any,
) -> None:
    tensors = step_tensors(params, grads, (momentum_buffers,) if options["momentum"] != 0.0 else (), outs, **options)
    lib, device = native(params[0].device), params[0].device
    if lib is None:
        sgd_step_reference(params, grads, momentum_buffers, outs, **options)
        return
    numbers = [options[name] for name in ("lr", "momentum", "dampening", "weight_decay", "nesterov", "first")]
    call(lib, "sgd_step", device, ctypes.byref(tensors), ctypes.byref(library.Sgd(*numbers)))


register(
    "sgd_step",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(d!)[] outs, *, "
    f"float lr, float momentum, float dampening, float weight_decay, bool nesterov, bool first, {COMMON}) -> ()",
    _run,
    nothing,
)
