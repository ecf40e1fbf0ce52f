"""Where a flat storage rests between uses: in a record of a file. The engine does not see files, only homes.

ZeRO-Infinity, arXiv:2104.07857, section 5: states live on NVMe and stream through memory.

Note [Life of a home]
    here      the tensor has its values
    leaving   they are being written; the memory is still taken
    away      the memory is given back; views that were lent read NaN
    coming    memory is there again, the values are being read
    ``bring`` leads to *here* from everywhere. A home that is leaving is here again without a read.

Note [Walking]
    A step visits one bucket after the other: while k is stepped, k+1 is read and k-1 is written. At most ``room``
    buckets have memory at a time; with two of them nothing is read ahead while something is written.

Note [On demand]
    Code that asks for a tensor that is away gets it (``bring``); correctness does not depend on plans. Whoever walks
    over many buckets that way calls ``tidy`` after each.

Note [A failing disk]
    The disk of one rank fails while the others go on to the next collective. So nothing is raised where it happens: the
    first problem is kept (``Tier.problem``), values that could not be read or kept become NaN, and the ranks agree on
    raising where they meet anyway: before a step, after it, and before weights leave the engine (Shelves.check).
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from pathlib import Path

import torch
from torch import Tensor

from lt_zero.config.offload import Aio
from lt_zero.offload.files import SwapFile
from lt_zero.offload.folder import SwapFolder
from lt_zero.offload.memory import aligned_buffer, rounded
from lt_zero.offload.pool import IoPool, SwapError, Transfer

_CPU = torch.device("cpu")


class _At(Enum):
    HERE = auto()
    LEAVING = auto()
    AWAY = auto()
    COMING = auto()


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


class FileHome:
    """A 1D tensor in host memory that rests in a file. It starts here, with zeros.

    Args:
        numel: elements.
        dtype: of the tensor.
        file: has the record.
        record: number of the record, which has room for the tensor.
        buffers: where memory comes from.
        report: is told what goes wrong. See Note [A failing disk].
        scratch: what a step does with the values is not kept.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        file: SwapFile | _Nowhere,
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
        """Start writing, if values were changed. ``settle`` ends it and gives the memory back."""
        if self._at is _At.COMING:
            self.bring(write=False)
        if self._at is not _At.HERE:
            return
        self._at = _At.LEAVING
        if self._dirty:
            assert self._buffer is not None
            self._dirty = False
            self._start(self._file.write, self._buffer[: self._file.size_of(self._record)])

    def settle(self) -> None:
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
                self._transfer.wait()
        except SwapError as error:
            self._fail(error)
        self._transfer = None  # not before: an interrupt may come while it moves

    def _fail(self, error: SwapError) -> None:
        self._report(error)
        if self._buffer is not None and self.dtype.is_floating_point:
            self.tensor.fill_(torch.nan)


class _Nowhere:
    """Takes the place of a file that could not be made."""

    def __init__(self, sizes: list[int], error: SwapError) -> None:
        self._sizes, self._error = sizes, error

    def size_of(self, record: int) -> int:
        return rounded(self._sizes[record])

    def read(self, record: int, target: Tensor) -> Transfer:
        raise self._error

    write = read

    def close(self) -> None:
        """Nothing to do."""


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
        self._files: dict[str, SwapFile | _Nowhere] = {}
        self.problem: SwapError | None = None  # the first; see Note [A failing disk]
        self._buffers = Buffers()
        self._lock = threading.Lock()  # homes are made in any thread

    def home(self, kind: str, record: int, dtype: torch.dtype) -> FileHome:
        """A new home for ``kind`` ("master", "exp_avg") of bucket ``record``."""
        name = f"{kind}-{str(dtype).removeprefix('torch.')}"
        with self._lock:
            return self._home(kind, name, record, dtype)

    def _home(self, kind: str, name: str, record: int, dtype: torch.dtype) -> FileHome:
        if name not in self._files:
            plain = re.sub(r"[^\w.-]", "_", name)  # users' optimizers name states as they like
            self._files[name] = self._make(
                f"{len(self._files)}-{plain}"[:100], [numel * dtype.itemsize for numel in self._numels]
            )
        scratch = kind == "grad"
        return FileHome(self._numels[record], dtype, self._files[name], record, self._buffers, self._note, scratch)

    def _make(self, name: str, sizes: list[int]) -> SwapFile | _Nowhere:
        try:
            self.folder.require(sum(sizes))
            return SwapFile(self.folder.path / name, sizes, self.pool)
        except SwapError as error:
            self._note(error)
            return _Nowhere(sizes, error)

    def _note(self, error: SwapError) -> None:
        self.problem = self.problem or error

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
        with self.walking():
            yield from self._walk(groups, read_ahead, behind)

    def walking(self) -> AbstractContextManager[None]:
        """Around visits to one bucket after the other: memory that one gives back is kept for the next."""
        return self._buffers.many(16)

    def _walk(self, groups: Sequence[Callable[[], list[FileHome]]], read_ahead: bool, behind: bool) -> Iterator[int]:
        leaving: deque[list[FileHome]] = deque()
        for number, group in enumerate(groups):
            for home in group():
                home.prefetch()
            if read_ahead and number + 1 < len(groups) and 2 + len(leaving) <= self._room:
                for home in groups[number + 1]():
                    home.prefetch()
            for home in group():
                home.bring_for_step()
            yield number
            leaving.append(group())  # asked once: who leaves is not "here" any more, and has to be settled
            for home in leaving[-1]:
                home.put_away()
            while len(leaving) > (max(0, min(1, self._room - 2)) if behind else 0):
                _settle(leaving.popleft())
        for rest in leaving:
            _settle(rest)

    def close(self) -> None:
        """Remove the files."""
        for file in self._files.values():
            file.close()
        self._files = {}
        self.pool.close()
        self.folder.close()

    @property
    def spare_nbytes(self) -> int:
        """Memory that is kept for the next home."""
        return self._buffers.nbytes

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
