"""Hooks by which fp32 modules (fp32_modules.py) run in a model whose other modules run in 16 bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lt_zero.common.module_hooks import Hook
from lt_zero.common.tensor_tree import map_tensors
from lt_zero.core.engine.fp32_modules import Fp32Modules

_LOW = (torch.float16, torch.bfloat16)


class _Calls(threading.local):
    """Running forwards of fp32 modules, innermost last: the module, its context, the default dtype before it."""

    def __init__(self) -> None:
        self.open: list[tuple[nn.Module, torch.autocast, torch.dtype]] = []


def install_fp32_modules(
    fp32_modules: Fp32Modules, dtype: torch.dtype, device_type: str, cast_back: bool
) -> list[RemovableHandle]:
    """Hook the forwards of fp32 modules; a deep copy of a module shares the hooks, which ignore it.

    Inputs are cast to fp32, autocast on ``device_type`` is off inside, and with ``cast_back`` outputs are cast to
    ``dtype``. Tensors in nested tuples, lists and dicts are cast; those in other objects are not.
    """
    calls = _Calls()
    mine = {module for _, module in fp32_modules.modules}

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module not in mine:
            return None
        if torch.get_default_dtype() in _LOW:
            # No fp32 module runs with this default: what is open was left by a KeyboardInterrupt, which skips hooks.
            calls.open.clear()
        context = torch.autocast(device_type, enabled=False)
        calls.open.append((module, context, torch.get_default_dtype()))
        context.__enter__()
        torch.set_default_dtype(torch.float32)
        widen = _caster(_LOW, torch.float32)
        return map_tensors(args, widen), map_tensors(kwargs, widen)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if module not in mine or not calls.open or calls.open[-1][0] is not module:
            return None
        _, context, default = calls.open.pop()
        torch.set_default_dtype(default)
        context.__exit__(None, None, None)
        if not cast_back or calls.open:
            return None
        return map_tensors(output, _caster((torch.float32,), dtype))

    handles: list[RemovableHandle] = []
    # torch.compile breaks the graph at these hooks. They are registered to run outside of all other hooks.
    for _, module in fp32_modules.modules:
        handles.append(module.register_forward_pre_hook(Hook(before), prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(Hook(after), always_call=True))
    return handles


def _caster(sources: tuple[torch.dtype, ...], target: torch.dtype) -> Callable[[Tensor], Tensor]:
    # One cast per object: attention checks whether query, key and value are the same object.
    done: dict[int, Tensor] = {}

    def cast(tensor: Tensor) -> Tensor:
        if tensor.dtype not in sources:
            return tensor
        if id(tensor) not in done:
            done[id(tensor)] = tensor.to(target)
        return done[id(tensor)]

    return cast
