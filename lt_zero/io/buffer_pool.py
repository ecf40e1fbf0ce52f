"""Memory for what comes from files, passed on from one home to the next."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from lt_zero.io.pinned import aligned_buffer


class Buffers:
    """Memory for what is here: what one home gives back the next one gets, without new pages. Any thread may use it.

    Args:
        spare: buffers that are kept although nobody uses them.
    """

    def __init__(self, spare: int = 2) -> None:
        self._few, self._spare, self._free = spare, spare, list[Tensor]()
        self._walks = 0  # that are going on
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """A buffer (1D uint8) of ``nbytes``, with any content."""
        with self._lock:
            fitting = [b for b in self._free if nbytes <= b.numel() <= nbytes + nbytes // 4]
            if fitting:
                best = min(fitting, key=lambda b: b.numel())
                self._free = [b for b in self._free if b is not best]
                return best
        return aligned_buffer(nbytes)

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back; nobody may use it any more."""
        with self._lock:
            self._free = [*self._free, buffer][-self._spare :]

    @property
    def nbytes(self) -> int:
        """Memory of the spare ones."""
        return sum(buffer.numel() for buffer in self._free)

    @contextmanager
    def many(self, count: int) -> Iterator[None]:
        """Keep more spare buffers while something walks over all homes."""
        with self._lock:
            self._walks, self._spare = self._walks + 1, max(self._spare, count)
        try:
            yield
        finally:
            with self._lock:
                self._walks -= 1
                if not self._walks:
                    self._spare, self._free = self._few, self._free[-self._few :]
