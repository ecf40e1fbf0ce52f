"""Copies between device and host memory that overlap with compute.

Note [Order of copies]
    Copies of one copy stream run one after the other. A copy starts after the work that the current stream had queued,
    or after an event that the caller took earlier (``now``): until then the source may not be computed and the target
    may be in use. Users of the result wait for the copy event: ``wait`` makes the current stream wait, without blocking
    the host; ``synchronize`` blocks the host. Until then the event keeps both tensors alive, and the source must not be
    written. The target's memory belongs to the stream that waits, so freeing it afterwards is safe.

Note [Late copies]
    A CPU has no streams. In tests a copy stream can defer copies until they are waited for: code that forgets to wait
    reads the old values, and code that changes the source too early copies the changed ones.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lt_zero.common import accelerator
from lt_zero.common.phases import phase
from lt_zero.core.stores.store import CopyEvent


class _Done:
    def wait(self) -> None:
        return None

    synchronize = wait


DONE: CopyEvent = _Done()


class CopyStream:
    """Copies in one direction.

    Args:
        device: the device end of the copies.
        late: defer copies. See Note [Late copies].
        limit: copies that may be in flight, which keep their tensors alive; beyond it the host waits for the oldest.
    """

    def __init__(self, device: torch.device, late: bool = False, limit: int | None = None) -> None:
        self._stream = accelerator.stream(device) if accelerator.has_streams(device) else None
        self._device, self._late = device, late
        self._limit, self._begun = limit, deque[CopyEvent]()
        self._waiting: deque[_Late] = deque()
        self._lock = threading.RLock()

    def now(self) -> Any:
        """An event after all work that the current stream has queued; None without streams."""
        if self._stream is None:
            return None
        # ``blocking``: a host thread that waits sleeps instead of spinning.
        event = accelerator.event(self._device, blocking=True)
        event.record()
        return event

    @torch.no_grad()
    def copy(self, target: Tensor, source: Tensor, after: Any = None) -> CopyEvent:
        """Start ``target.copy_(source)``; one of the two is on the device. See Note [Order of copies].

        Args:
            target: same number of elements; another dtype costs a temporary copy.
            source: host memory must be pinned, or the copy blocks the host.
            after: event after which the copy may start; default: ``now()``.
        """
        event = self._begin(target, source, after)
        if self._limit is not None:
            self._begun.append(event)
            if len(self._begun) > self._limit:
                # Wait for the oldest copy: each copy in flight keeps its tensors alive.
                self._begun.popleft().synchronize()
        return event

    def _begin(self, target: Tensor, source: Tensor, after: Any) -> CopyEvent:
        if self._stream is None:
            if not self._late:
                target.copy_(source)
                return DONE
            self._waiting.append(_Late(self, target, source))
            return self._waiting[-1]
        self._stream.wait_event(after if after is not None else self.now())
        with accelerator.use(self._stream):
            target.copy_(source, non_blocking=True)
            return _OnStream(self.now(), (target, source))

    @contextmanager
    def in_line(self) -> Iterator[None]:
        """Context that runs device work on this stream, after the copies so far."""
        self.flush()
        if self._stream is None:
            yield
        else:
            with accelerator.use(self._stream):
                yield

    def flush(self, last: _Late | None = None) -> None:
        """Carry out deferred copies, up to ``last``."""
        with self._lock:
            while self._waiting and (last is None or not last.done):
                self._waiting.popleft().carry_out()

    def mark(self) -> CopyEvent:
        """One event after all copies that were started."""
        if self._stream is None:
            # Another thread may be carrying out the last copy.
            with self._lock:
                return self._waiting[-1] if self._waiting else DONE
        with accelerator.use(self._stream):
            return _OnStream(self.now(), ())


class _OnStream:
    def __init__(self, end: Any, tensors: tuple[Tensor, ...]) -> None:
        self._end, self._tensors = end, tensors

    def wait(self) -> None:
        with phase("offload", "copy"):
            self._end.wait()
        self._tensors = ()

    def synchronize(self) -> None:
        with phase("offload", "copy"):
            self._end.synchronize()
        self.wait()


class _Late:
    def __init__(self, stream: CopyStream, target: Tensor, source: Tensor) -> None:
        self._copy_stream = stream
        self._tensors = [target, source]
        self.done = False

    def carry_out(self) -> None:
        with torch.no_grad():
            self._tensors[0].copy_(self._tensors[1])
        # As on a real stream, a finished copy keeps no tensors.
        self._tensors.clear()
        self.done = True

    def wait(self) -> None:
        if not self.done:
            with phase("offload", "copy"):
                self._copy_stream.flush(self)

    synchronize = wait


class StagingBuffers:
    """A few host buffers through which tensors are copied to the device. Thread-safe.

    Args:
        make: allocates a 1D uint8 tensor of the given number of bytes.
        nbytes: size of each buffer.
        count: number of buffers.
    """

    def __init__(self, make: Callable[[int], Tensor], nbytes: int, count: int = 2) -> None:
        self.nbytes = nbytes * count
        self.free: queue.SimpleQueue[tuple[Tensor, CopyEvent]] = queue.SimpleQueue()
        for _ in range(count):
            self.free.put((make(nbytes), DONE))

    def take(self, numel: int, dtype: torch.dtype) -> StagingBuffer:
        """A free buffer as a 1D tensor of ``numel`` elements; blocks until one is free."""
        buffer, event = self.free.get()
        event.synchronize()
        return StagingBuffer(self, buffer, buffer[: numel * dtype.itemsize].view(dtype))


@dataclass(frozen=True, eq=False)
class StagingBuffer:
    """A staging buffer in use: fill ``tensor`` (1D), then ``send`` it."""

    buffers: StagingBuffers
    whole: Tensor
    tensor: Tensor

    def give_back(self, after: CopyEvent = DONE) -> None:
        """Return the buffer; ``after``: a copy that still reads it."""
        self.buffers.free.put((self.whole, after))

    def send(self, stream: CopyStream, target: Tensor, after: Any = None) -> CopyEvent:
        """Start copying the buffer to ``target`` and return it; the caller must not touch it again."""
        event = stream.copy(target, self.tensor, after)
        self.give_back(event)
        return event
