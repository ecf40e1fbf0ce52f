"""A tensor that is stored in a record of an NVMe file between uses. The engine sees stored tensors, never files.

ZeRO-Infinity, arXiv:2104.07857, section 5: states are stored on NVMe and streamed through memory.

Note [Life of stored tensors]
    here      in memory
    leaving   being written; the buffer is still allocated
    away      only in the file, the buffer is freed; lent views read NaN
    coming    being read into a new buffer
    ``bring`` leads to *here* from every state; from *leaving* it needs no read. So correctness does not depend on
    prefetching. A loop that brings many buckets on demand calls ``tidy`` after each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto

import torch
from torch import Tensor

from lt_zero.common.timing import phase
from lt_zero.io.buffer_pool import Buffers
from lt_zero.io.direct_file import Nowhere, SwapFile
from lt_zero.io.thread_pool import SwapError, Transfer

_CPU = torch.device("cpu")


class _At(Enum):
    HERE = auto()
    LEAVING = auto()
    AWAY = auto()
    COMING = auto()


class StoredTensor:
    """A 1D host tensor that is stored in a file between uses. It starts in memory, filled with zeros.

    Args:
        numel: elements.
        dtype: of the tensor.
        file: the file with the record.
        record: index of the record, which must be large enough for the tensor.
        buffers: supplies host memory.
        report: receives errors. See nvme_files.py, Note [A failing disk].
        scratch: changes that a step makes to the values need not be written.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        file: SwapFile | Nowhere,
        record: int,
        buffers: Buffers,
        report: Callable[[SwapError], None],
        scratch: bool = False,
    ) -> None:
        self._report = report
        self.numel, self.dtype, self._scratch = numel, dtype, scratch
        self._file, self._record, self._buffers = file, record, buffers
        self._lent: list[tuple[weakref.ref[Tensor], int]] = []
        self._transfer: Transfer | None = None
        self._buffer: Tensor | None = None
        self._allocate().zero_()
        self._at = _At.HERE
        self._dirty = True  # the file lacks the current values

    def _allocate(self) -> Tensor:
        self._buffer = self._buffers.take(self._file.size_of(self._record))
        return self._buffer[: self._file.size_of(self._record)]

    @property
    def tensor(self) -> Tensor:
        """The values if they are in memory, otherwise NaN of the same shape. A new tensor object on each access."""
        if self._buffer is None:
            return torch.full((), torch.nan, dtype=self.dtype, device=_CPU).expand(self.numel)
        return self._buffer[: self.numel * self.dtype.itemsize].view(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def here(self) -> bool:
        return self._at is _At.HERE

    @property
    def takes_memory(self) -> bool:
        return self._buffer is not None

    def lend(self, offset: int, shape: torch.Size, kind: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """A view of some elements that callers may keep. It follows the values into new buffers; away it reads NaN.

        ``kind`` wraps the view in another type that has ``data``, such as ``Parameter``.
        """
        view = torch.empty(0, dtype=self.dtype, device=_CPU)  # an ordinary view would keep the first buffer alive
        view = kind(view) if kind is not None else view
        view.data = self._part(offset, shape)
        self._lent = [(ref, lo) for ref, lo in self._lent if ref() is not None]
        self._lent.append((weakref.ref(view), offset))
        return view

    def owns(self, value: Tensor) -> bool:
        """Whether ``value`` is a view that ``lend`` returned."""
        return any(ref() is value for ref, _ in self._lent)

    def _part(self, offset: int, shape: torch.Size) -> Tensor:
        part = self.tensor[offset : offset + shape.numel()]
        return part.view(shape) if self._buffer is not None else part[:1].view([1] * len(shape)).expand(shape)

    def _show(self) -> None:
        for ref, offset in self._lent:
            if (view := ref()) is not None:
                view.data = self._part(offset, view.shape)

    def prefetch(self) -> None:
        """Start reading if the tensor is away."""
        if self._at is _At.AWAY:
            buffer = self._allocate()
            self._at = _At.COMING
            self._start(self._file.read, buffer)

    def bring(self, write: bool = True) -> Tensor:
        """The tensor, read if necessary; ``write``: the caller changes it, so it is written back."""
        self.prefetch()
        if self._at is not _At.HERE:
            self._wait()
            self._at = _At.HERE
            self._show()
        self._dirty |= write
        return self.tensor

    def bring_for_step(self) -> None:
        """``bring`` for an optimizer step, which changes the values."""
        self.bring(write=not self._scratch)

    def hold(self) -> Tensor:
        """The tensor with undefined values, for a caller that overwrites all of it; nothing is read."""
        self._wait()
        if self._at is _At.AWAY:
            self._allocate()
        self._at, self._dirty = _At.HERE, True
        self._show()
        return self.tensor

    def put_away(self) -> None:
        """Start writing if the values were changed. ``wait_written`` completes this and frees the buffer."""
        if self._at is _At.COMING:
            self.bring(write=False)
        if self._at is not _At.HERE:
            return
        self._at = _At.LEAVING
        if self._dirty:
            assert self._buffer is not None
            self._dirty = False
            self._start(self._file.write, self._buffer[: self._file.size_of(self._record)])

    def wait_written(self) -> None:
        """Wait for a write that ``put_away`` started, and free the buffer."""
        if self._at is _At.LEAVING:
            self._wait()
            self._leave()

    def discard(self) -> None:
        """Free the buffer and drop the values, which must not be read afterwards."""
        self._wait()
        if self._buffer is not None:
            self._leave()
        self._dirty = False

    def _leave(self) -> None:
        assert self._buffer is not None
        self._buffers.give(self._buffer)
        self._buffer, self._at = None, _At.AWAY
        self._show()

    def _start(self, move: Callable[[int, Tensor], Transfer], buffer: Tensor) -> None:
        try:
            self._transfer = move(self._record, buffer)
        except SwapError as error:
            self._fail(error)

    def _wait(self) -> None:
        try:
            if self._transfer is not None:
                with phase("offload", "file"):
                    self._transfer.wait()
        except SwapError as error:
            self._fail(error)
        self._transfer = None  # only now: a KeyboardInterrupt may have ended the wait early

    def _fail(self, error: SwapError) -> None:
        self._report(error)
        if self._buffer is not None and self.dtype.is_floating_point:
            self.tensor.fill_(torch.nan)


def wait_all_written(tensors: Iterable[StoredTensor]) -> None:
    """Wait for the writes that ``put_away`` started, and free the buffers."""
    for tensor in tensors:
        tensor.wait_written()


def tidy(tensors: Sequence[StoredTensor]) -> None:
    """Write tensors to their files and free their buffers. See Note [Life of stored tensors]."""
    for tensor in tensors:
        tensor.put_away()
    wait_all_written(tensors)
