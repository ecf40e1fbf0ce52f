"""Reusable buffers for tensors that are read from files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from lt_zero.io.pinned import aligned_buffer


class Buffers:
    """Buffers of stored tensors; a freed buffer is reused without faulting in new pages. Thread-safe.

    Args:
        spare: number of free buffers that are kept.
        make: allocates a 1D uint8 tensor of at least the given number of bytes.
    """

    def __init__(self, spare: int = 2, make: Callable[[int], Tensor] = aligned_buffer) -> None:
        self._make = make
        self._few, self._spare, self._free = spare, spare, list[Tensor]()
        self._streams = 0  # contexts of ``many`` that are open
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """An uninitialized buffer (1D uint8) of at least ``nbytes``."""
        with self._lock:
            fitting = [b for b in self._free if nbytes <= b.numel() <= nbytes + nbytes // 4]
            if fitting:
                best = min(fitting, key=lambda b: b.numel())
                self._free = [b for b in self._free if b is not best]
                return best
        return self._make(nbytes)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer, which the caller must not use again."""
        with self._lock:
            self._free = [*self._free, buffer][-self._spare :]

    @property
    def nbytes(self) -> int:
        """Bytes of free buffers."""
        return sum(buffer.numel() for buffer in self._free)

    @contextmanager
    def many(self, count: int) -> Iterator[None]:
        """Keep ``count`` free buffers while buckets are streamed through memory."""
        with self._lock:
            self._streams, self._spare = self._streams + 1, max(self._spare, count)
        try:
            yield
        finally:
            with self._lock:
                self._streams -= 1
                if not self._streams:
                    self._spare, self._free = self._few, self._free[-self._few :]
