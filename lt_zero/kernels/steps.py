"""Optimizer steps in one pass over memory, as torch.optim and ``lt_zero.optim`` compute them.

Each reference defines its operation: the same numbers to the last bit where torch fuses multiply and add.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lt_zero.kernels.dispatch import (
    address,
    are_coded,
    call,
    check_list,
    chunks,
    exact_sqrt,
    factor_of,
    gradient,
    native,
    operator,
    pointer,
    random_rounding,
    scratch,
    skipped,
    state_code,
    step_operator,
    step_tensors,
    store,
)
from lt_zero.kernels.header import STRUCTS


@dataclass(frozen=True)
class _Weights:
    """A chunk of master weights in a reference.

    Attributes:
        values: in fp32, where the step is computed: ``stored`` itself, or a copy.
        stored: the master weights.
        out: receives a copy of these, or None.
        places: of all elements of the list, or None.
        tensor: number of the tensor.
        lo: number of the first element in it.
    """

    values: Tensor
    stored: Tensor
    out: Tensor | None
    places: Tensor | None
    tensor: int
    lo: int

    def keep(self) -> None:
        """Round ``values`` to the master weights, and copy these to ``out``."""
        if self.places is not None:
            random_rounding()(self.values, self.stored, self.places, self.tensor, self.lo)
        else:
            store(self.stored, self.values)
        store(self.out, self.stored)


def _weight_chunks(
    params: Sequence[Tensor], outs: Sequence[Tensor] | None, places: Tensor | None, *lists: Sequence[Tensor] | None
) -> Iterator[tuple[Any, ...]]:
    """Yield ``_Weights`` of one chunk after the other, and the same chunk of each of ``lists``."""
    for number, param in enumerate(params):
        own = ([tensors[number]] if tensors else None for tensors in (outs, *lists))
        lo = 0
        for stored, out, *others in chunks([param], *own):
            yield _Weights(stored.float(), stored, out, places, number, lo), *others
            lo += stored.numel()


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
    for weights, grad, exp_avg, exp_avg_sq in _weight_chunks(params, outs, places, grads, exp_avgs, exp_avg_sqs):
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
    for weights, grad, exp_avg in _weight_chunks(params, outs, places, grads, exp_avgs):
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
    for weights, grad, state_sum in _weight_chunks(params, outs, places, grads, state_sums):
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
    for weights, grad, momentum_buffer in _weight_chunks(params, outs, places, grads, momentum_buffers):
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


# ---- LAMB: two passes, as its trust ratios need the norms of full parameters -----------------------------------------


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
    for weights, m, v in _weight_chunks(params, outs, places, exp_avgs, exp_avg_sqs):
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
