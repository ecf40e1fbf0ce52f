"""DeepSpeed's names, where its scripts import them from, for what access.py does, and for their arguments.

``safe_get_full_...`` and ``safe_set_full_...`` are collective; values of setters are the same on all ranks. With
``local`` they are this rank's elements (1D). Getters return None for parameters that are not trained
(``requires_grad=False``), as DeepSpeed's do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.common.arguments import expect
from lt_zero.training.loop import access


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config FILE`` to a script's arguments; ``initialize(args)`` reads them."""
    expect(parser, argparse.ArgumentParser, "lt_zero.add_config_arguments(parser=...)", "pass an ArgumentParser")
    group = parser.add_argument_group("lt_zero")
    group.add_argument("--deepspeed", action="store_true", help="accepted as in scripts for DeepSpeed")
    group.add_argument("--deepspeed_config", help="the configuration's file")
    return parser


def _is_frozen(param: Parameter) -> bool:
    return isinstance(param, Tensor) and not param.requires_grad


def safe_get_full_fp32_param(param: Parameter) -> Tensor | None:
    """``full_master``, in fp32."""
    return None if _is_frozen(param) else access.full_master(param).float()


def safe_set_full_fp32_param(param: Parameter, value: Tensor) -> None:
    """``set_full_master``."""
    access.set_full_master(param, value)


def safe_get_full_grad(param: Parameter) -> Tensor | None:
    """``full_grad``, in fp32."""
    grad = None if _is_frozen(param) else access.full_grad(param)
    return None if grad is None else grad.float()


def safe_set_full_grad(param: Parameter, value: Tensor) -> None:
    """``set_full_grad``."""
    access.set_full_grad(param, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[Parameter], update_func: Callable[[Tensor, Parameter], Tensor]
) -> None:
    """Replace gradients by ``update_func(gradient, parameter)``, one after the other, where there are any."""
    for param in param_list:
        if (grad := safe_get_full_grad(param)) is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_get_full_optimizer_state(param: Parameter, optim_state_key: str) -> Tensor | None:
    """``full_state``; None if there is no such state."""
    if _is_frozen(param):
        return None
    try:
        found: Tensor = access.full_state(param, optim_state_key)
    except KeyError:  # on all ranks
        return None
    return found


def safe_set_full_optimizer_state(param: Parameter, value: Tensor, optim_state_key: str) -> None:
    """``set_full_state``."""
    access.set_full_state(param, value, optim_state_key)


def safe_get_local_fp32_param(param: Parameter) -> Tensor | None:
    """``local_master``, in fp32."""
    return None if _is_frozen(param) else access.local_master(param).float()


def safe_get_local_grad(param: Parameter) -> Tensor | None:
    """``local_grad``, in fp32."""
    found = None if _is_frozen(param) else access.local_grad(param)
    return None if found is None else found.float()


def safe_get_local_optimizer_state(param: Parameter, optim_state_key: str) -> Tensor | None:
    """``local_state``."""
    return None if _is_frozen(param) else access.local_state(param, optim_state_key)


@torch.no_grad()
def safe_set_local_fp32_param(param: Parameter, value: Tensor) -> None:
    """Set this rank's elements; the compute copies follow. Collective: all ranks set theirs."""
    access.set_local_master(param, value)


def safe_set_local_grad(param: Parameter, value: Tensor) -> None:
    """Set this rank's elements of the averaged gradient."""
    access.set_local_grad(param, value)


def safe_set_local_optimizer_state(param: Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's elements of a state."""
    access.set_local_state(param, value, optim_state_key)
