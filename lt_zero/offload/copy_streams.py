"""Copies between a device's memory and the host's that run beside what the device computes.

Note [Order of copies]
    Copies of one lane run one after the other, on a stream of their own. A copy begins when what the current stream had
    queued is done, or another moment that the caller names (``now``): before that, the source may not be computed or
    the target be in use. Whoever needs the result waits: ``wait`` on behalf of the current stream, which costs the host
    nothing, ``synchronize`` on behalf of the host. Until then the ticket keeps both tensors alive, and nobody may write
    to the source. Memory that the target lives in belongs to the stream that waits, so freeing it later is in order.

Note [Late copies]
    A CPU has no streams. For tests a lane can put copies off until somebody waits for them: whoever forgets to wait
    reads what was there before, and whoever changes the source too early sends that.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from lt_zero.common.timing import phase


class CopyEvent(Protocol):
    """A copy on its way."""

    def wait(self) -> None:
        """What the current stream runs from now on may use the target, and change the source."""

    def synchronize(self) -> None:
        """The host may."""


class _Done:
    def wait(self) -> None:
        return None

    synchronize = wait


DONE: CopyEvent = _Done()


class CopyStream:
    """Copies in one direction.

    Args:
        device: whose memory is at one end.
        late: see Note [Late copies].
        limit: of copies that are on their way, and keep their tensors alive; the host waits for the oldest.
    """

    def __init__(self, device: torch.device, late: bool = False, limit: int | None = None) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._late = late
        self._limit, self._begun = limit, deque[CopyEvent]()
        self._waiting: deque[_Late] = deque()
        self._lock = threading.RLock()

    def now(self) -> Any:
        """The moment at which all that the current stream has queued is done; None without streams."""
        if self._stream is None:
            return None
        moment = torch.cuda.Event(blocking=True)  # who waits for it on the host leaves the core to others
        moment.record()
        return moment

    @torch.no_grad()
    def copy(self, target: Tensor, source: Tensor, after: Any = None) -> CopyEvent:
        """Start ``target.copy_(source)``; one of them is on the device. See Note [Order of copies].

        Args:
            target: as many elements, of the same dtype or it takes a temporary copy.
            source: in page-locked memory, or the host waits for the copy.
            after: the moment before which it must not begin; None: now.
        """
        event = self._begin(target, source, after)
        if self._limit is not None:
            self._begun.append(event)
            if len(self._begun) > self._limit:
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
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return _OnStream(self.now(), (target, source))

    @contextmanager
    def in_line(self) -> Iterator[None]:
        """What is launched on the device inside comes after the copies so far."""
        self.flush()
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def flush(self, last: _Late | None = None) -> None:
        """Carry out late copies, up to ``last``."""
        with self._lock:
            while self._waiting and (last is None or not last.done):
                self._waiting.popleft().carry_out()

    def mark(self) -> CopyEvent:
        """All that this lane has begun, as one."""
        if self._stream is None:
            with self._lock:  # or another thread is carrying the last one out
                return self._waiting[-1] if self._waiting else DONE
        with torch.cuda.stream(self._stream):
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
    def __init__(self, lane: CopyStream, target: Tensor, source: Tensor) -> None:
        self._lane, self._tensors, self.done = lane, [target, source], False

    def carry_out(self) -> None:
        with torch.no_grad():
            self._tensors[0].copy_(self._tensors[1])
        self._tensors.clear()  # as a copy on a stream lets go of them
        self.done = True

    def wait(self) -> None:
        if not self.done:
            with phase("offload", "copy"):
                self._lane.flush(self)

    synchronize = wait


class StagingBuffers:
    """A few buffers in host memory through which tensors leave for the device. Any thread may use them.

    Args:
        make: gives a 1D tensor of so many bytes.
        nbytes: of each.
        count: of them.
    """

    def __init__(self, make: Callable[[int], Tensor], nbytes: int, count: int = 2) -> None:
        self.nbytes = nbytes * count
        self._free: queue.SimpleQueue[tuple[Tensor, CopyEvent]] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put((make(nbytes), DONE))

    def take(self, numel: int, dtype: torch.dtype) -> StagingBuffer:
        """A free one; waits until there is one."""
        buffer, event = self._free.get()
        event.synchronize()
        return StagingBuffer(buffer, buffer[: numel * dtype.itemsize].view(dtype), self._free)


class StagingBuffer:
    """A buffer that somebody fills."""

    def __init__(self, buffer: Tensor, tensor: Tensor, free: queue.SimpleQueue[tuple[Tensor, CopyEvent]]) -> None:
        self.tensor = tensor  # 1D
        self._buffer, self._free = buffer, free

    def give_back(self) -> None:
        """It was not filled."""
        self._free.put((self._buffer, DONE))

    def send(self, lane: CopyStream, target: Tensor, after: Any = None) -> CopyEvent:
        """Start ``lane.copy`` of it to ``target``; nobody may fill it any more."""
        event = lane.copy(target, self.tensor, after)
        self._free.put((self._buffer, event))
        return event
