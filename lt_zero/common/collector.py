"""Python's garbage collector while many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Context, or decorator, without collections, for code that makes no cycles that hold tensors.

    Plans of large models are hundreds of thousands of objects. While they are made, the collector would visit all
    objects of the process several times, and find nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
