"""Tensors of an accelerator on their way into a file, through two pinned buffers in host memory.

While the threads of the file write what is in one buffer, the other one is filled. Copies to pageable memory, as
``Tensor.cpu`` makes them, would go through a buffer of the driver's, and each would allocate memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from lt_zero.common import accelerator
from lt_zero.io.checked_file import STEP, Sink
from lt_zero.io.pinned import host_buffer, rounded

RING_BUFFER = 4 * STEP  # bytes of each of the two buffers
_ALIGN = 64  # bytes: where parts begin


class StagingRing:
    """The buffers of one save; they are allocated with the first tensor that needs them.

    ``nbytes``: of each buffer, a multiple of 64.
    """

    def __init__(self, nbytes: int = RING_BUFFER) -> None:
        self._nbytes, self._buffers = nbytes, list[Tensor]()
        self._number = self._used = 0  # the buffer that is being filled, and bytes in it
        self._read: list[tuple[Sink | None, int]] = [(None, 0), (None, 0)]  # the file of each, and where it ended there

    def parts(self, values: Tensor, sink: Sink) -> Iterator[Tensor]:
        """The elements of ``values`` (1D) in host memory, in order; each part has to be written before the next one.

        ``sink``: the file to which they go. What is on the host, or is no plain tensor, is one part.
        """
        staged = accelerator.holds(values) and accelerator.has_streams(values.device)
        if not staged or type(values) is not Tensor or values.is_quantized:
            yield values.cpu()
            return
        done, size = 0, values.dtype.itemsize
        while done < values.numel():
            room = self._room(size, sink)
            part = values[done : done + room // size]
            start, done = self._used, done + part.numel()
            self._used = rounded(start + part.nbytes, _ALIGN)
            target = self._buffers[self._number][start : start + part.nbytes].view(values.dtype)
            target.copy_(part, non_blocking=True)
            copied = accelerator.event(values.device, blocking=True)
            copied.record(accelerator.current_stream(values.device))
            copied.synchronize()
            yield target

    def _room(self, size: int, sink: Sink) -> int:
        """Bytes that are free in the current buffer, which has room for ``size`` at least."""
        if not self._buffers:
            self._buffers = [host_buffer(self._nbytes, pin=True)[: self._nbytes] for _ in self._read]
        if self._nbytes - self._used < size:
            self._read[self._number] = sink, sink.position
            self._number, self._used = 1 - self._number, 0
            reader, end = self._read[self._number]
            # A file that was closed reads nothing any more.
            if reader is sink:
                sink.wait_written(end)
        return self._nbytes - self._used
