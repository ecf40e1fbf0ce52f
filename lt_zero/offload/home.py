"""Where a flat storage rests between uses: in a record of a file. The engine does not see files, only homes.

ZeRO-Infinity, arXiv:2104.07857, section 5: states live on NVMe and stream through memory.

Note [Life of a home]
    here      the tensor has its values
    leaving   they are being written; the memory is still taken
    away      the memory is given back; views of the tensor stay valid as objects, those that were lent read NaN
    coming    memory is there again, the values are being read
    ``bring`` leads to *here* from everywhere. A home that is leaving is here again without a read.

Note [Walking]
    A step visits one bucket after the other: while k is stepped, k+1 is read and k-1 is written. At most ``room``
    buckets have memory at a time; with two of them nothing is read ahead while something is written.

Note [On demand]
    Code that asks for a tensor that is away gets it (``use``); correctness does not depend on plans. Whoever walks over
    many buckets that way calls ``tidy`` after each.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from pathlib import Path

import torch
from torch import Tensor

from lt_zero.config.offload import Aio
from lt_zero.core.storage import FlatStorage
from lt_zero.offload.files import SwapFile
from lt_zero.offload.folder import SwapFolder
from lt_zero.offload.pool import IoPool, Transfer

_CPU = torch.device("cpu")


class _At(Enum):
    HERE = auto()
    LEAVING = auto()
    AWAY = auto()
    COMING = auto()


class FileHome:
    """A 1D tensor in host memory that rests in a file. It starts here, with zeros.

    Args:
        numel: elements.
        dtype: of the tensor.
        file: has the record.
        record: number of the record, which has room for the tensor.
    """

    def __init__(self, numel: int, dtype: torch.dtype, file: SwapFile, record: int) -> None:
        self._storage = FlatStorage(numel, dtype, _CPU, round_to=file.size_of(record))
        self.tensor = self._storage.tensor
        self._file, self._record = file, record
        self._at, self._transfer = _At.HERE, None
        self._dirty = True  # the file does not have the values
        self._lent: list[tuple[weakref.ref[Tensor], int]] = []

    _transfer: Transfer | None

    @property
    def here(self) -> bool:
        return self._at is _At.HERE

    @property
    def takes_memory(self) -> bool:
        return self._at is not _At.AWAY

    def lend(self, offset: int, shape: torch.Size) -> Tensor:
        """A view of some elements for others to keep: while the values are away it reads NaN instead of zeros."""
        view = self._part(offset, shape)
        self._lent = [(ref, lo) for ref, lo in self._lent if ref() is not None]
        self._lent.append((weakref.ref(view), offset))
        return view

    def owns(self, value: Tensor) -> bool:
        """Whether ``value`` is something that was lent."""
        return any(ref() is value for ref, _ in self._lent)

    def _part(self, offset: int, shape: torch.Size) -> Tensor:
        return self.tensor[offset : offset + shape.numel()].view(shape)

    def _show(self, there: bool) -> None:
        nan = torch.full((), torch.nan, dtype=self.tensor.dtype, device=_CPU)
        for ref, offset in self._lent:
            if (view := ref()) is not None:
                view.data = self._part(offset, view.shape) if there else nan.expand(view.shape)

    def prefetch(self) -> None:
        """Start reading, if it is away."""
        if self._at is _At.AWAY:
            self._storage.allocate()
            self._transfer = self._file.read(self._record, self._storage.raw)
            self._at = _At.COMING

    def bring(self, write: bool = True) -> Tensor:
        """The tensor with its values; ``write``: they will be changed.

        Raises:
            SwapError: a write or read failed.
        """
        self.prefetch()
        if self._at is not _At.HERE:
            coming = self._at is _At.COMING
            self._wait()
            self._at = _At.HERE
            self._show(True) if coming else None
        self._dirty |= write
        return self.tensor

    def hold(self) -> Tensor:
        """The tensor with undefined values, to be overwritten as a whole."""
        self._wait()
        if self._at is _At.AWAY:
            self._storage.allocate()
        if self._at in (_At.AWAY, _At.COMING):
            self._show(True)
        self._at, self._dirty = _At.HERE, True
        return self.tensor

    def put_away(self) -> None:
        """Start writing, if values were changed, else give the memory back. ``settle`` ends it."""
        if self._at is _At.COMING:
            self.bring(write=False)
        if self._at is not _At.HERE:
            return
        self._at = _At.LEAVING
        if self._dirty:
            self._transfer = self._file.write(self._record, self._storage.raw)
            self._dirty = False

    def settle(self) -> None:
        """Wait until what is leaving has left."""
        if self._at is _At.LEAVING:
            self._wait()
            self._storage.free()
            self._at = _At.AWAY
            self._show(False)

    def _wait(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()


class Tier:
    """The files of one rank: one per kind of state, with a record for each bucket.

    Args:
        path: a folder on the disk.
        rank: of this process.
        aio: how to read and write.
        numels: elements that this rank holds of each bucket.
        room: buckets that may have memory at a time; see Note [Walking].
    """

    def __init__(self, path: Path, rank: int, aio: Aio, numels: Sequence[int], room: int = 3) -> None:
        self.folder = SwapFolder(path, rank)
        self.pool = IoPool(aio.intra_op_parallelism, aio.block_size, aio.in_flight, aio.checksum)
        self._numels, self._room = list(numels), room
        self._files: dict[str, SwapFile] = {}
        self._homes: list[FileHome] = []

    def home(self, kind: str, record: int, dtype: torch.dtype) -> FileHome:
        """A new home for ``kind`` ("master", "exp_avg") of bucket ``record``.

        Raises:
            SwapError: the disk has no room for all buckets' states of this kind.
        """
        name = f"{kind}-{str(dtype).removeprefix('torch.')}"
        if name not in self._files:
            sizes = [numel * dtype.itemsize for numel in self._numels]
            self.folder.require(sum(sizes))
            self._files[name] = SwapFile(self.folder.path / name, sizes, self.pool)
        home = FileHome(self._numels[record], dtype, self._files[name], record)
        self._homes.append(home)
        return home

    def require(self, bytes_per_element: int) -> None:
        """Check that the disk has room for states that are not there yet.

        Raises:
            SwapError: it has not.
        """
        self.folder.require(bytes_per_element * sum(self._numels))

    def walk(self, groups: Sequence[Callable[[], list[FileHome]]], read_ahead: bool, behind: bool) -> Iterator[int]:
        """Visit groups of homes (one group per bucket; asked for when needed). See Note [Walking].

        Args:
            groups: what to bring for each visit; what a visit adds is put away with it.
            read_ahead: read the next group during a visit.
            behind: write the last group during a visit.

        Yields:
            The number of the group that is here.
        """
        leaving: deque[list[FileHome]] = deque()
        for number, group in enumerate(groups):
            for home in group():
                home.prefetch()
            if read_ahead and number + 1 < len(groups) and 2 + len(leaving) <= self._room:
                for home in groups[number + 1]():
                    home.prefetch()
            for home in group():
                home.bring()
            yield number
            for home in group():
                home.put_away()
            leaving.append(group())
            while len(leaving) > (max(0, min(1, self._room - 2)) if behind else 0):
                _settle(leaving.popleft())
        for rest in leaving:
            _settle(rest)

    def close(self) -> None:
        """Remove the files."""
        for file in self._files.values():
            file.close()
        self._files, self._homes = {}, []
        self.pool.close()
        self.folder.close()

    @property
    def bytes_on_disk(self) -> int:
        return sum(file.size_of(i) for file in self._files.values() for i in range(len(self._numels)))


def _settle(homes: list[FileHome]) -> None:
    for home in homes:
        home.settle()


def tidy(homes: Sequence[FileHome]) -> None:
    """Put homes away and wait until they have left. See Note [On demand]."""
    for home in homes:
        home.put_away()
    _settle(list(homes))
