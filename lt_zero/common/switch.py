"""Modules that get another forward in place, by a class that inherits from theirs.

Names of modules and parameters, hooks and state dicts stay as they are. Other than a forward that is assigned to the
module, the class holds for copies of the module, too.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar, cast

from torch import nn

from lt_zero.common.compat import compiled_module

T = TypeVar("T", bound=nn.Module)


class Switched:
    """Base of classes whose forward a module gets, before its own class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _remade, type(self).__bases__, vars(self)


@functools.cache
def _class_of(kind: Any, own: Any) -> Any:
    return type(own.__name__, (kind, own), {"__module__": own.__module__, "__qualname__": own.__qualname__})


def _remade(kind: type[Switched], own: type[nn.Module]) -> nn.Module:
    made = _class_of(cast(Any, kind), cast(Any, own))
    module: nn.Module = made.__new__(made)
    return module


def own_class(module: Any) -> type[nn.Module]:
    """The class of a module that may be switched, as it was before."""
    cls: type[nn.Module] = type(module)
    return cls.__bases__[1] if issubclass(cls, Switched) else cls


def switch(module: T, kind: type[Switched], call: str) -> T:
    """Give ``module`` the forward of ``kind``; ``call``: the function that the user called, for errors.

    Raises:
        ValueError: it would not run: the module has an assigned forward, or is compiled, or switched to another.
    """
    if isinstance(module, kind):
        return module
    name = type(module).__name__
    if isinstance(module, Switched):
        raise ValueError(f"{call}: the {name} has been given another forward already.")
    if compiled_module(module) is not module:
        raise ValueError(f"{call}: the module is a result of torch.compile. Pass the module, and compile the result.")
    if "forward" in vars(module):
        text = f"{call}: the {name} has a forward that was assigned to it, which would be called all the same"
        raise ValueError(f"{text}. Call {call} first, and before the model is sharded.")
    module.__class__ = _class_of(cast(Any, kind), cast(Any, type(module)))
    return module


def restore(module: nn.Module) -> None:
    """Undo ``switch``."""
    module.__class__ = own_class(module)
