"""Python's collector of reference cycles."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


@contextmanager
def gc_disabled(disable: bool = True) -> Iterator[None]:
    """Context without automatic collection of reference cycles.

    The collector looks through all objects of the process whenever their number has grown by a quarter: 0.1 s and more
    each time, while an operation makes some objects for each of thousands of tensors.
    """
    was_enabled = gc.isenabled()
    if disable:
        gc.disable()
    try:
        yield
    finally:
        if disable and was_enabled:
            gc.enable()


def without_gc(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function`` inside of ``gc_disabled``. (The context as a decorator has frames in contextlib, which warnings that
    point at the code outside of this package would name.)"""

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with gc_disabled():
            return function(*args, **kwargs)

    return called
