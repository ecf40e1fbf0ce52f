"""Module hooks that are not copied with the module."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch


class Hook:
    """A function that is called as a hook of a module.

    In a pickled or deep-copied module it is a no-op, as it refers to the engine of the original. torch.compile breaks
    the graph at it instead of tracing it.
    """

    __slots__ = ("__weakref__", "_call")

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call: Callable[..., Any] = torch.compiler.disable(call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":  # torch.jit.script is the only one that needs it
            raise AttributeError(
                "torch.jit.script cannot compile a module that lt_zero has sharded, as it has hooks. Script a new "
                "module with the weights that `lt_zero.export` writes, or use torch.compile."
            )
        raise AttributeError(name)

    def __reduce__(self) -> Any:
        return operator.getitem, ((no_hook,), 0)


def no_hook(*args: Any, **kwargs: Any) -> None:
    """The no-op that replaces a hook in a copy of its module."""


class ProcessLocal:
    """Mixin for objects bound to this process: copies contain None in their place."""

    def __reduce__(self) -> Any:
        return type(None), ()
