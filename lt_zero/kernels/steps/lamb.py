"""The step of LAMB in two passes over memory, as its trust ratios need the norms of full parameters."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lt_zero.kernels.dispatch import (
    address,
    call,
    check_list,
    chunks,
    exact_sqrt,
    factor_of,
    gradient,
    native,
    operator,
    pointer,
    scratch,
    skipped,
    step_tensors,
    store,
)
from lt_zero.kernels.header import STRUCTS
from lt_zero.kernels.steps.weights import weight_chunks


def lamb_update_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    scale: Tensor | None = None,
    clip: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """The first pass of LAMB: the moments, and the norms. A rank may hold fragments only: add the norms over the ranks.

    The update is ``exp_avg / (sqrt(exp_avg_sq) + eps) + weight_decay * param``, as ``lt_zero.optim.Lamb`` computes it.
    It is not stored: the second pass computes it again.

    Args:
        params: master weights in fp32 or bf16, contiguous, any shape; only read.
        grads: of the same sizes, in fp32, bf16 or fp16.
        exp_avgs, exp_avg_sqs: first and second moments in fp32 or bf16; updated.
        beta1, beta2, eps, weight_decay: as in ``lt_zero.optim.Lamb``.
        maximize, scale, clip, found_inf: as in ``adam_step``.

    Returns:
        [len(params), 2] fp64: the squared norms of the weights and of the updates; zeros if ``found_inf`` is set.

    Raises:
        ValueError: a list does not match ``params`` in length, size, device or dtype.
    """
    norms = torch.zeros(len(params), 2, dtype=torch.float64, device=params[0].device)
    if skipped(found_inf):
        return norms
    factor = factor_of(scale, clip)
    for row, *tensors in zip(norms, params, grads, exp_avgs, exp_avg_sqs, strict=True):
        for p, grad, exp_avg, exp_avg_sq in chunks(*([tensor] for tensor in tensors)):
            g = gradient(grad, factor, maximize)
            m = exp_avg.float()
            v = exp_avg_sq.float()
            m.lerp_(g, 1.0 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
            store(exp_avg, m)
            store(exp_avg_sq, v)
            # From the moments as they were stored: the second pass reads them rounded, and its update has to have this
            # norm.
            update = _lamb_direction(p.float(), exp_avg, exp_avg_sq, eps, weight_decay)
            row += torch.stack([p.double().square().sum(), update.double().square().sum()])
    return norms


def lamb_apply_reference(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    rates: Tensor,
    outs: Sequence[Tensor] | None = None,
    *,
    eps: float,
    weight_decay: float,
    found_inf: Tensor | None = None,
    places: Tensor | None = None,
) -> None:
    """The second pass of LAMB: subtract ``rate * update`` from the weights.

    Args:
        params: master weights in fp32 or bf16, contiguous, any shape; updated.
        exp_avgs, exp_avg_sqs: as ``lamb_update`` left them.
        rates: [len(params)] fp32, on the parameters' device: learning rate times trust ratio.
        outs: receive the updated weights, rounded to their dtype.
        eps, weight_decay: as in ``lamb_update``.
        found_inf, places: as in ``adam_step``.

    Raises:
        ValueError: a list does not match ``params`` in length, size, device or dtype.
    """
    if skipped(found_inf):
        return
    for weights, m, v in weight_chunks(params, outs, places, exp_avgs, exp_avg_sqs):
        update = _lamb_direction(weights.values, m, v, eps, weight_decay)
        weights.values.addcmul_(update, rates[weights.tensor], value=-1.0)
        weights.keep()


def _lamb_direction(p: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, eps: float, weight_decay: float) -> Tensor:
    update = exp_avg.float().div(exact_sqrt(exp_avg_sq.float()).add_(eps))
    return update.add_(p, alpha=weight_decay) if weight_decay != 0.0 else update


def _run_lamb_update(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    **options: Any,
) -> Tensor:
    lib, device = native(params[0].device), params[0].device
    # Check all arguments also where the reference runs: it is to refuse what the kernel refuses.
    tensors = step_tensors(params, grads, (exp_avgs, exp_avg_sqs), [], **options)
    numbers: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    if lib is None:
        return lamb_update_reference(params, grads, exp_avgs, exp_avg_sqs, **numbers, **options)
    norms, room = torch.empty(len(params), 2, dtype=torch.float64, device=device), scratch(lib, params, device)
    lamb = STRUCTS["lt_lamb"](**numbers)
    call(lib, "lamb_update", device, ctypes.byref(tensors), ctypes.byref(lamb), address(norms), *pointer(room))
    return norms


def _run_lamb_apply(
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    rates: Tensor,
    outs: list[Tensor],
    eps: float,
    weight_decay: float,
    found_inf: Tensor | None = None,
    places: Tensor | None = None,
) -> None:
    lib, device = native(params[0].device), params[0].device
    # Every list of tensors has gradients; this pass does not read them.
    tensors = step_tensors(params, params, (exp_avgs, exp_avg_sqs), outs, found_inf=found_inf, places=places)
    check_list("rates", [rates], [params[0].new_empty(len(params))], [torch.float32])
    if lib is None:
        options: dict[str, Any] = {"eps": eps, "weight_decay": weight_decay, "found_inf": found_inf, "places": places}
        lamb_apply_reference(params, exp_avgs, exp_avg_sqs, rates, outs, **options)
        return
    lamb = STRUCTS["lt_lamb"](eps=eps, weight_decay=weight_decay)
    call(lib, "lamb_apply", device, ctypes.byref(tensors), ctypes.byref(lamb), address(rates))


def _fake_lamb_update(params: list[Tensor], *args: Any, **options: Any) -> Tensor:
    return params[0].new_empty((len(params), 2), dtype=torch.float64)


lamb_update = operator(
    lamb_update_reference,
    _run_lamb_update,
    written=("exp_avgs", "exp_avg_sqs"),
    fake=_fake_lamb_update,
    empty=lambda: torch.zeros(0, 2, dtype=torch.float64),
)
lamb_apply = operator(lamb_apply_reference, _run_lamb_apply, written=("params", "outs"))
