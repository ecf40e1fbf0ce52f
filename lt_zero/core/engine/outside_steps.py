"""Calls of a model, or of a part of it, outside of a step under mixed precision: in callbacks, hooks and scripts.

Note [Autocast outside of steps]
    Under mixed precision the weights in memory are in 16 bits, and a step runs under autocast. Elsewhere (sampling in a
    callback, ``trainer.model(x)``, ``pl_module.net(x)``) nothing enables it, because with other strategies the weights
    are in fp32 there and need none: fp32 inputs would meet 16-bit weights. So the outermost module of the model that is
    called without autocast runs under it, and its outputs become fp32. Its results are those of a step, and so, up to
    the rounding of the compute dtype, those of fp32 weights. Any module may be called, so the hooks are global ones.
    Within a step (``within_step``), and inside of the outermost module, there are none: they would cost time for each
    layer. A compiled module that is called outside of steps is compiled as in a step: torch calls the hook before it
    enters the graph, and it is gone while that runs. The process may have compiled models of which the hook knows
    nothing, also after the run: their graphs leave it out, since only the modules that it concerns have a mark.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lt_zero.common.compat import in_running_backward
from lt_zero.common.compat.of_compile import GlobalPreHook, is_call_of
from lt_zero.common.module_hooks import Hook, ProcessLocal
from lt_zero.common.tensor_tree import map_tensors

_LOW = (torch.float16, torch.bfloat16)


@dataclass
class _OutermostCall:
    """The running call of an outermost module.

    Attributes:
        module: the module.
        context: its autocast.
        handles: of the hooks on the module while the call runs.
        inner: calls of the same module inside of it that run.
    """

    module: nn.Module
    context: torch.autocast
    handles: list[Any] = field(default_factory=list)
    inner: int = 0


class _RunningCall(threading.local):
    """Holder of the running call of this thread: autocast belongs to a thread, too."""

    def __init__(self) -> None:
        self.open: _OutermostCall | None = None


_calls = _RunningCall()
# Modules with 16-bit weights inside: how they compute.
_modules: WeakKeyDictionary[nn.Module, tuple[str, torch.dtype]] = WeakKeyDictionary()
# An attribute of these modules, for graphs that call them.
_MARK = "_lt_zero_runs_under_autocast"
_quiet = 0  # steps and outermost calls that run


class _Mark(ProcessLocal):
    """Value of the attribute. Copies of a module, which no hook concerns, have None."""


class AutocastOutsideOfSteps:
    """Handle of an engine: until ``remove``, modules run under autocast if they are called without it.

    Args:
        modules: those that have weights in ``dtype`` inside.
        dtype: the compute dtype.
        device_type: of the weights.
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype, device_type: str) -> None:
        # What ``torch.compile(module)`` returns warns at each call that global hooks run for it as well. The hook does
        # nothing for it, as it is none of the modules here.
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
        self._mine = list(modules)
        for module in self._mine:
            _modules[module] = device_type, dtype
            vars(module)[_MARK] = _Mark()
        _update()

    def remove(self) -> None:
        _end_interrupted()
        for module in self._mine:
            _modules.pop(module, None)
            vars(module).pop(_MARK, None)
        self._mine = []
        _update()


@contextmanager
def within_step() -> Iterator[None]:
    """Context of a step, which enables autocast itself: no call of a module is looked at."""
    _end_interrupted()
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    global _quiet
    _quiet += change
    _update()


def _update() -> None:
    """Register the global hook, or remove it, as it is needed."""
    # Ask for a module: a dictionary of weak references may still count those that are gone.
    needed = _quiet == 0 and next(iter(_modules.keys()), None) is not None
    if needed != _hook.registered:
        _hook.register(needed)


def _begin(module: nn.Module, args: Any) -> None:
    """Enable autocast for a module that is called without it."""
    how = _modules.get(module)
    if how is None:
        # The last of the modules may be gone. Removing the hook when it is collected would be too early: that may be
        # while torch.compile traces code in which the hook is called.
        _update()
        return
    # A recomputation in backward is as the forward was, in which the user may have disabled autocast.
    if torch.is_autocast_enabled(how[0]) or in_running_backward():
        return
    # Without a cache: the weights have the compute dtype, and what is left to cast may change between calls.
    call = _OutermostCall(module, torch.autocast(how[0], dtype=how[1], cache_enabled=False))
    call.context.__enter__()
    _calls.open = call
    _count(1)

    def enter(module: nn.Module, args: Any) -> None:
        call.inner += 1

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        if call.inner > 0:  # the module has called itself
            call.inner -= 1
            return None
        _end(call)
        return map_tensors(output, _widen)

    # torch has collected the hooks before this call already: ``enter`` is called for those inside of it only.
    call.handles.append(module.register_forward_pre_hook(Hook(enter)))
    call.handles.append(module.register_forward_hook(Hook(leave), always_call=True))


_hook = GlobalPreHook(Hook(_begin, mark=_MARK))


def _end_interrupted() -> None:
    """End a call that a KeyboardInterrupt has ended, after which torch calls no hook: autocast would stay enabled."""
    call = _calls.open
    if call is None:
        return
    frame = inspect.currentframe()
    while frame is not None:
        if is_call_of(frame, call.module):
            return  # it runs, and what it calls begins a step of its own
        frame = frame.f_back
    _end(call)


def _end(call: _OutermostCall) -> None:
    _calls.open = None
    for handle in call.handles:
        handle.remove()
    call.context.__exit__(None, None, None)
    _count(-1)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _LOW else tensor
