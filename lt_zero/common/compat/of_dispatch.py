"""Private APIs of torch by which operations are watched, below autograd and in it. Checked on torch 2.11 to 2.15."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """Intercepts every operation below autograd, on the thread that enters the mode and in backward.

    A subclass implements ``run(op, args, kwargs)``, which calls or replaces the operation. The mode that was entered
    last runs first; inside ``run`` the modes that were entered before it are active.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def __enter__(self) -> Any:
        return super().__enter__()  # type: ignore[no-untyped-call]


def without_values() -> Any:
    """Context in which new tensors have a shape, a dtype and a device, but neither memory nor values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def alias_with_version(tensor: torch.Tensor) -> torch.Tensor:
    """A detached alias, made below autograd, that shares the version counter."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def current_node() -> Any:
    """The autograd node that the calling thread is executing; None outside of one."""
    return torch._C._current_autograd_node()


def is_higher_order(func: Any) -> bool:
    """True if an operator takes functions as arguments (flex_attention, cond)."""
    return isinstance(func, HigherOrderOperator)
