"""Hooks on modules that do not go where a copy of the module goes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch


class Hook:
    """A function that is called as a hook of a module.

    In a copy of the module (pickled, or deep-copied) it is a function that does nothing: what it belongs to trains this
    module, in this process. torch.compile breaks the graph at it instead of tracing what it does.
    """

    __slots__ = ("__weakref__", "_call")

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call: Callable[..., Any] = torch.compiler.disable(call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return operator.getitem, ((no_hook,), 0)


def no_hook(*args: Any, **kwargs: Any) -> None:
    """What is left of a hook in a copy of its module."""


class Here:
    """Mixed into what belongs to this process: a copy has None in its place."""

    def __reduce__(self) -> Any:
        return type(None), ()
