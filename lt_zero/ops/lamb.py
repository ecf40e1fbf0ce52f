"""LAMB (arXiv:1904.00962, algorithm 2) in two passes, as its trust ratios need the norms of full parameters.

A rank may own only a fragment of a parameter. So the first pass returns squared norms per fragment, which the ranks
sum, and the second pass takes the trust ratios.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lt_zero.ops import library
from lt_zero.ops.lists import (
    address,
    call,
    check_list,
    chunks,
    exact_sqrt,
    factor_of,
    native,
    pointer,
    pointers,
    scratch,
)
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


def lamb_update(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: float,
    bias_correction: bool = True,
    maximize: bool = False,
    scale: Tensor | None = None,
    clip: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """The first pass: the moments, and the updates before the trust ratio.

    Args:
        params: fp32 master weights, contiguous, any shape; only read.
        grads: of the same sizes, in fp32, bf16 or fp16.
        exp_avgs, exp_avg_sqs: first and second moments in fp32 or bf16; updated.
        updates: fp32; receive Adam's update plus ``weight_decay`` times the weights.
        beta1, beta2, eps, weight_decay, bias_correction: as in the paper.
        step: the number of this step, from 1.
        maximize, scale, clip, found_inf: as in ``adam_step``.

    Returns:
        [len(params), 2] fp64: the squared norms of the weights and of the updates; zeros if ``found_inf`` is set.

    Raises:
        ValueError: a list does not match ``params`` in length, size, device or dtype.
    """
    if len(params) == 0:
        return torch.zeros(0, 2, dtype=torch.float64)
    norms: Tensor = torch.ops.lt_zero.lamb_update(
        list(params),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        list(updates),
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        bias_correction=bias_correction,
        maximize=maximize,
        scale=scale,
        clip=clip,
        found_inf=found_inf,
    )
    return norms


def lamb_update_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: float,
    bias_correction: bool = True,
    maximize: bool = False,
    scale: Tensor | None = None,
    clip: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """``lamb_update`` in torch operations."""
    norms = torch.zeros(len(params), 2, dtype=torch.float64, device=params[0].device)
    if skipped(found_inf):
        return norms
    factor = factor_of(scale, clip)
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = (1.0 - beta2**step) ** 0.5 if bias_correction else 1.0
    for row, *tensors in zip(norms, params, grads, exp_avgs, exp_avg_sqs, updates, strict=True):
        for p, grad, exp_avg, exp_avg_sq, update in chunks(*([tensor] for tensor in tensors)):
            g, m, v = gradient(grad, factor, maximize), widened(exp_avg), widened(exp_avg_sq)
            m.lerp_(g, 1.0 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
            u = m.div(correction1).div_(exact_sqrt(v).div_(correction2).add_(eps))
            if weight_decay != 0.0:
                u.add_(p, alpha=weight_decay)
            store_state(exp_avg, m)
            store_state(exp_avg_sq, v)
            update.copy_(u)
            row += torch.stack([p.double().square().sum(), u.double().square().sum()])
    return norms


def lamb_apply(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    trust_ratios: Tensor,
    outs: Sequence[Tensor] | None = None,
    *,
    lr: float,
    found_inf: Tensor | None = None,
) -> None:
    """The second pass: add ``-lr * trust_ratio * update`` to the weights.

    Args:
        params: fp32 master weights, contiguous, any shape; updated.
        updates: fp32, as ``lamb_update`` wrote them.
        trust_ratios: [len(params)] fp32, on the parameters' device.
        outs: receive the updated weights, rounded to their dtype.
        lr: the learning rate.
        found_inf: as in ``adam_step``.

    Raises:
        ValueError: a list does not match ``params`` in length, size, device or dtype.
    """
    if len(params) > 0:
        lists = (list(params), list(updates), trust_ratios, list(outs or ()))
        torch.ops.lt_zero.lamb_apply(*lists, lr=lr, found_inf=found_inf)


def lamb_apply_reference(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    trust_ratios: Tensor,
    outs: Sequence[Tensor] | None = None,
    *,
    lr: float,
    found_inf: Tensor | None = None,
) -> None:
    """``lamb_apply`` in torch operations."""
    if skipped(found_inf):
        return
    steps = trust_ratios * -lr
    for number, (param, update) in enumerate(zip(params, updates, strict=True)):
        param.addcmul_(update.view(param.shape), steps[number])
        store_copy(outs[number] if outs else None, param)


def _run_update(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    updates: list[Tensor],
    bias_correction: bool = True,
    **options: Any,
) -> Tensor:
    tensors = step_tensors(params, grads, (exp_avgs, exp_avg_sqs), [], **options)
    check_list("updates", updates, params, [torch.float32])
    lib, device = native(params[0].device), params[0].device
    if lib is None:
        lists = (params, grads, exp_avgs, exp_avg_sqs, updates)
        return lamb_update_reference(*lists, bias_correction=bias_correction, **options)
    norms = torch.empty(len(params), 2, dtype=torch.float64, device=device)
    numbers = library.Lamb(*[options[n] for n in ("beta1", "beta2", "eps", "weight_decay", "step")], bias_correction)
    arguments = (ctypes.byref(tensors), ctypes.byref(numbers), pointers(updates), address(norms))
    workspace = scratch(lib, params, device)
    call(lib, "lamb_update", device, *arguments, *pointer(workspace))
    return norms


def _run_apply(
    params: list[Tensor],
    updates: list[Tensor],
    trust_ratios: Tensor,
    outs: list[Tensor],
    *,
    lr: float,
    found_inf: Tensor | None = None,
) -> None:
    tensors = step_tensors(params, updates, (), outs, found_inf=found_inf)
    check_list("updates", updates, params, [torch.float32])
    check_list("trust_ratios", [trust_ratios], [params[0].new_empty(len(params))], [torch.float32])
    lib, device = native(params[0].device), params[0].device
    if lib is None:
        lamb_apply_reference(params, updates, trust_ratios, outs, lr=lr, found_inf=found_inf)
        return
    call(lib, "lamb_apply", device, ctypes.byref(tensors), address(trust_ratios), lr)


def _fake_update(params: list[Tensor], *args: Any, **options: Any) -> Tensor:
    return params[0].new_empty((len(params), 2), dtype=torch.float64)


register(
    "lamb_update",
    "(Tensor[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] updates, *, "
    f"float beta1, float beta2, float eps, float weight_decay, float step, bool bias_correction=True, {COMMON}"
    ") -> Tensor",
    _run_update,
    _fake_update,
)
register(
    "lamb_apply",
    "(Tensor(a!)[] params, Tensor[] updates, Tensor trust_ratios, Tensor(d!)[] outs, *, float lr, "
    "Tensor? found_inf=None) -> ()",
    _run_apply,
    nothing,
)
