"""Private APIs around torch.compile and what its graphs are made for. Checked on torch 2.11 to 2.15."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as module_of_modules


class GlobalPreHook:
    """A hook before the forwards of all modules that is registered and removed again and again.

    It always has the same place in torch's table. Graphs of torch.compile are made for certain contents of the table,
    so with another place each time they would be compiled again each time, and soon not any more.

    Args:
        hook: is called with the module and its positional arguments.
    """

    def __init__(self, hook: Callable[[torch.nn.Module, Any], Any]) -> None:
        self._hook = hook
        self._place: int | None = None

    @property
    def registered(self) -> bool:
        return self._place in module_of_modules._global_forward_pre_hooks

    def register(self, registered: bool) -> None:
        """Register the hook, or remove it."""
        table = module_of_modules._global_forward_pre_hooks
        if not registered and self._place is not None:
            table.pop(self._place, None)
        elif registered and self._place is None:
            self._place = module_of_modules.register_module_forward_pre_hook(self._hook).id
        elif registered and self._place is not None:
            table[self._place] = self._hook


def compiled_frames() -> int:
    """The number of times that torch.compile has compiled a function in this process since its last reset."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return sum(dynamo.FRAME_COMPILE_COUNTER.values()) if dynamo is not None else 0


def has_compiled_nodes(loss: torch.Tensor) -> bool:
    """True if the autograd graph of ``loss`` contains compiled nodes."""
    seen, stack = set[Any](), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if node.name().startswith("CompiledFunction"):
            return True
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
    return False


def is_compiled(module: torch.nn.Module) -> bool:
    """True if ``module`` is compiled, by ``torch.compile`` or ``compile()``."""
    return type(module).__name__ == "OptimizedModule" or vars(module).get("_compiled_call_impl") is not None


def undo_compile(module: torch.nn.Module) -> None:
    """Let a module that ``module.compile()`` has compiled run as before; torch has no call for that."""
    module._compiled_call_impl = None


def is_call_of(frame: Any, module: torch.nn.Module) -> bool:
    """True if ``frame`` is that of torch's code which calls the hooks and the forward of ``module``."""
    return frame.f_code is torch.nn.Module._call_impl.__code__ and frame.f_locals["self"] is module
