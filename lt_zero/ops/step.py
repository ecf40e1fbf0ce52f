"""Shared parts of the optimizer kernels: tensor lists, gradient scaling, the low-precision copy.

Note [Skipping on the device]
    The decision to skip a step may exist on the device only. So kernels take ``found_inf`` and write nothing if it is
    not zero, without a synchronization.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lt_zero.ops import library
from lt_zero.ops.lists import DTYPES, LOW_STATE, address, check_list, check_scalar, pointers, sizes

# Arguments of every optimizer op, as a torch.library schema.
COMMON = "bool maximize=False, Tensor? scale=None, Tensor? clip=None, Tensor? found_inf=None"


def step_tensors(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    outs: Sequence[Tensor],
    *,
    maximize: bool = False,
    scale: Tensor | None = None,
    clip: Tensor | None = None,
    found_inf: Tensor | None = None,
    **options: Any,
) -> library.Tensors:
    """Check the arguments of a step and return its ``lt_tensors``, which keeps its arrays alive, but not the tensors.

    Other ``options`` are ignored.

    Raises:
        ValueError: a list does not match ``params``, or a dtype is not supported.
    """
    device = params[0].device
    if (step := options.get("step", 1.0)) < 1:
        raise ValueError(f"step is {step}; steps are counted from 1.")
    check_list("params", params, params, [torch.float32])
    grad_dtype = check_list("grads", grads, params, list(DTYPES))
    state_dtypes = {check_list("state", state, params, LOW_STATE) for state in states}
    if len(state_dtypes) > 1:
        raise ValueError(f"the optimizer's states have the dtypes {sorted(map(str, state_dtypes))}; one is needed.")
    out_dtype = check_list("outs", outs, params, list(DTYPES)) if outs else torch.float32
    for name, scalar in (("scale", scale), ("clip", clip), ("found_inf", found_inf)):
        check_scalar(name, scalar, device)
    return library.Tensors(
        count=len(params),
        numel=sizes(params),
        param=pointers(params),
        grad=pointers(grads),
        state1=pointers(states[0]) if states else None,
        state2=pointers(states[1]) if len(states) > 1 else None,
        out=pointers(outs),
        grad_dtype=DTYPES[grad_dtype],
        state_dtype=DTYPES[next(iter(state_dtypes), torch.float32)],
        out_dtype=DTYPES[out_dtype],
        maximize=maximize,
        scale=address(scale),
        clip=address(clip),
        found_inf=address(found_inf),
    )


def skipped(found_inf: Tensor | None) -> bool:
    """For references: whether the step is skipped. Synchronizes with the device."""
    return found_inf is not None and bool(found_inf)


def gradient(grad: Tensor, factor: Tensor | None, maximize: bool) -> Tensor:
    """For references: the scaled fp32 gradient; a new tensor if it differs from ``grad``."""
    g = grad.float()
    g = g * factor if factor is not None else g
    return g.neg() if maximize else g


def widened(state: Tensor) -> Tensor:
    """For references: a state in fp32; the tensor itself if it is fp32."""
    return state.float()


def store_state(state: Tensor, value: Tensor) -> None:
    """For references: write the result of ``widened`` back."""
    if value is not state:
        state.copy_(value)


def store_copy(out: Tensor | None, param: Tensor) -> None:
    """For references: write the low-precision copy of the updated weights."""
    if out is not None:
        out.copy_(param)


def register(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register ``run`` as the operator ``lt_zero::name`` on CPU and CUDA, with ``fake`` for tracing."""
    written = ["!" in argument for argument in schema.split("*,")[0].split(",")]

    def checked(*args: Any, **options: Any) -> Any:
        # As autograd does for torch's in-place operators: reject leaves, and detect modified saved tensors.
        if torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(*args)):
            raise RuntimeError(f"lt_zero::{name} has no gradient: call it under `torch.no_grad()`.")
        result = run(*args, **options)
        torch.autograd.graph.increment_version(_tensors(*itertools.compress(args, written)))
        return result

    def faked(*args: Any, **options: Any) -> Any:
        devices = {t.device for t in _tensors(*args, *options.values())}
        if len(devices) > 1:  # one meta tensor among others suffices to run this
            raise ValueError(f"lt_zero::{name} got tensors on {sorted(map(str, devices))}; one device is needed.")
        return fake(*args, **options)

    torch.library.define(f"lt_zero::{name}", schema)
    torch.library.impl(f"lt_zero::{name}", ("CPU", "CUDA"), checked)
    torch.library.register_fake(f"lt_zero::{name}", faked)


def nothing(*args: Any, **kwargs: Any) -> None:
    """The fake kernel of operators that only write into their arguments."""


def _tensors(*args: Any) -> list[Tensor]:
    lists = [arg if isinstance(arg, (list, tuple)) else [arg] for arg in args]
    return [item for items in lists for item in items if isinstance(item, Tensor)]
