"""Python's collector of reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled(disable: bool = True) -> Iterator[None]:
    """Context (or decorator) without automatic collection of reference cycles.

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
