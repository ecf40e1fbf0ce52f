"""Where a flat storage rests between uses: in a record of a file. The engine does not see files, only homes.

ZeRO-Infinity, arXiv:2104.07857, section 5: states live on NVMe and stream through memory.

Note [Life of a home]
    here      the tensor has its values
    leaving   they are being written; the memory is still taken
    away      the memory is given back; views that were lent read NaN
    coming    memory is there again, the values are being read
    ``bring`` leads to *here* from everywhere. A home that is leaving is here again without a read.

Note [On demand]
    Code that asks for a tensor that is away gets it (``bring``); correctness does not depend on plans. Whoever walks
    over many buckets that way calls ``tidy`` after each.
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
    """A 1D tensor in host memory that rests in a file. It starts here, with zeros.

    Args:
        numel: elements.
        dtype: of the tensor.
        file: has the record.
        record: number of the record, which has room for the tensor.
        buffers: where memory comes from.
        report: is told what goes wrong. See nvme_files.py, Note [A failing disk].
        scratch: what a step does with the values is not kept.
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
        self._dirty = True  # the file does not have the values

    def _allocate(self) -> Tensor:
        self._buffer = self._buffers.take(self._file.size_of(self._record))
        return self._buffer[: self._file.size_of(self._record)]

    @property
    def tensor(self) -> Tensor:
        """The values while they are here; otherwise NaN in their shape. It is another tensor each time."""
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
        """A view of some elements for others to keep, which follows them: while they are away it reads NaN.

        ``kind`` makes something else of the view that has ``data``, such as a ``Parameter``.
        """
        view = torch.empty(0, dtype=self.dtype, device=_CPU)  # a real view would keep the first buffer alive
        view = kind(view) if kind is not None else view
        view.data = self._part(offset, shape)
        self._lent = [(ref, lo) for ref, lo in self._lent if ref() is not None]
        self._lent.append((weakref.ref(view), offset))
        return view

    def owns(self, value: Tensor) -> bool:
        """Whether ``value`` is something that was lent."""
        return any(ref() is value for ref, _ in self._lent)

    def _part(self, offset: int, shape: torch.Size) -> Tensor:
        part = self.tensor[offset : offset + shape.numel()]
        return part.view(shape) if self._buffer is not None else part[:1].view([1] * len(shape)).expand(shape)

    def _show(self) -> None:
        for ref, offset in self._lent:
            if (view := ref()) is not None:
                view.data = self._part(offset, view.shape)

    def prefetch(self) -> None:
        """Start reading, if it is away."""
        if self._at is _At.AWAY:
            buffer = self._allocate()
            self._at = _At.COMING
            self._start(self._file.read, buffer)

    def bring(self, write: bool = True) -> Tensor:
        """The tensor with its values; ``write``: they will be changed."""
        self.prefetch()
        if self._at is not _At.HERE:
            self._wait()
            self._at = _At.HERE
            self._show()
        self._dirty |= write
        return self.tensor

    def bring_for_step(self) -> None:
        """The values, to be changed by an optimizer's step."""
        self.bring(write=not self._scratch)

    def hold(self) -> Tensor:
        """The tensor with undefined values, to be overwritten as a whole."""
        self._wait()
        if self._at is _At.AWAY:
            self._allocate()
        self._at, self._dirty = _At.HERE, True
        self._show()
        return self.tensor

    def put_away(self) -> None:
        """Start writing, if values were changed. ``wait_written`` ends it and gives the memory back."""
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
        """Wait until what is leaving has left."""
        if self._at is _At.LEAVING:
            self._wait()
            self._leave()

    def discard(self) -> None:
        """Give the memory back; the values are not needed any more, and must not be asked for."""
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
        self._transfer = None  # not before: an interrupt may come while it moves

    def _fail(self, error: SwapError) -> None:
        self._report(error)
        if self._buffer is not None and self.dtype.is_floating_point:
            self.tensor.fill_(torch.nan)


def wait_all_written(homes: Iterable[StoredTensor]) -> None:
    """Wait until those that are leaving have left."""
    for home in homes:
        home.wait_written()


def tidy(homes: Sequence[StoredTensor]) -> None:
    """Put homes away and wait until they have left. See Note [On demand]."""
    for home in homes:
        home.put_away()
    wait_all_written(homes)
