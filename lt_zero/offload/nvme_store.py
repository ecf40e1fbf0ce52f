"""Tensors of buckets in records of NVMe files. The engine sees stores, never files.

ZeRO-Infinity, arXiv:2104.07857, section 5: states are stored on NVMe and streamed through memory.

Note [Life of stored tensors]
    here      in memory
    leaving   being written; the buffer is still allocated
    away      only in the file, the buffer is freed; lent views read NaN
    coming    being read into a new buffer
    ``read`` and ``write`` lead to *here* from every state; from *leaving* they need no read. So correctness does not
    depend on prefetching. A loop that reads many buckets on demand calls ``put_away`` after each.

Note [A failing disk]
    If a rank raised where its disk fails, the others would hang in the next collective. Instead the rank keeps the
    first error (``NvmeFiles.problem``) and sets the lost values to NaN. The ranks agree on raising at fixed points:
    before a step, after it, and before weights leave the engine (OffloadManager.check).
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum, auto
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lt_zero.common.moment_form import MomentForm
from lt_zero.common.phases import phase
from lt_zero.common.progress_bar import progress_bar
from lt_zero.common.units import exact_bytes
from lt_zero.core.stores.io_options import IoOptions, SwapError
from lt_zero.core.stores.pinned import BufferPool, aligned_buffer, host_buffer, rounded
from lt_zero.core.stores.store import CODES, STATE, WEIGHTS, Place, Sized, Speed, Store, record_nbytes
from lt_zero.core.stores.thread_pool import IoPool, Transfer
from lt_zero.offload.host_store import FedStore, HostLink, StreamedStore
from lt_zero.offload.private_folder import SwapFolder
from lt_zero.offload.swap_file import Nowhere, SwapFile


class _At(Enum):
    HERE = auto()
    LEAVING = auto()
    AWAY = auto()
    COMING = auto()


class NvmeStore(StreamedStore):
    """Keeps a tensor in a record of a file. It starts in memory, filled with zeros.

    Args:
        numel: elements.
        dtype: of the tensor.
        file: the file with the record.
        record: index of the record, which must be large enough for the tensor.
        buffers: supplies host memory.
        report: receives errors. See Note [A failing disk].
        link: to the device; None: the device is the CPU.
        scratch: changes that a step makes to the values need not be written.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        file: SwapFile | Nowhere,
        record: int,
        buffers: BufferPool,
        report: Callable[[SwapError], None],
        link: HostLink | None = None,
        scratch: bool = False,
    ) -> None:
        super().__init__(numel, dtype, link)
        self._report = report
        self._scratch = scratch
        self._file = file
        self._record = record
        self._buffers = buffers
        self._transfer: Transfer | None = None
        self._buffer: Tensor | None = None
        self._allocate().zero_()
        self._at = _At.HERE
        self._dirty = True  # the file lacks the current values

    def _allocate(self) -> Tensor:
        nbytes = self._file.size_of(self._record)
        self._buffer = self._buffers.take(nbytes)
        self._tensor = self._buffer[: self.numel * self.dtype.itemsize].view(self.dtype)
        return self._buffer[:nbytes]

    def prefetch(self) -> None:
        if self._at is _At.AWAY:
            buffer = self._allocate()
            self._at = _At.COMING
            self._start(self._file.read, buffer)

    def _have(self) -> None:
        self.prefetch()
        if self._at is not _At.HERE:
            self._wait()
            self._at = _At.HERE
            self._show()

    def read(self) -> Tensor:
        self._have()
        self.wait_arrived()
        return self.tensor

    def write(self) -> Tensor:
        self._dirty = True
        return self.read()

    def begin_step(self) -> None:
        self._have()
        self._dirty |= not self._scratch

    def overwrite(self) -> Tensor:
        self.wait_arrived()
        # A transfer in flight still reads or fills the buffer that is overwritten.
        self._wait()
        if self._at is _At.AWAY:
            self._allocate()
        self._at = _At.HERE
        self._dirty = True
        self._show()
        return self.tensor

    def end_use(self) -> None:
        self.wait_arrived()
        # An unused prefetch still fills the buffer, and has to end before the buffer is given back.
        if self._at is _At.COMING:
            self._have()
        if self._at is not _At.HERE:
            return
        self._at = _At.LEAVING
        if self._dirty:
            assert self._buffer is not None
            self._dirty = False
            self._start(self._file.write, self._buffer[: self._file.size_of(self._record)])

    def wait_written(self) -> None:
        if self._at is _At.LEAVING:
            self._wait()
            self._leave()

    def discard(self) -> None:
        self.wait_arrived()
        self._wait()
        self._landing = None
        if self._buffer is not None:
            self._leave()
        self._dirty = False

    def _leave(self) -> None:
        assert self._buffer is not None
        self._buffers.give(self._buffer)
        self._buffer = self._tensor = None
        self._at = _At.AWAY
        # The buffer is free for others from here on: lent views must read NaN instead of foreign values.
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
        # Forget the transfer only after the wait: a KeyboardInterrupt may end the wait early.
        self._transfer = None

    def _fail(self, error: SwapError) -> None:
        self._report(error)
        if self._buffer is not None and (self.dtype.is_floating_point or self.dtype == torch.uint8):
            self.tensor.fill_(self.lost)


class NvmeFiles:
    """The files of one rank: one per kind of state, with one record per bucket.

    Args:
        path: a folder on the disk.
        rank: of this process.
        files: how they are read and written.
        numels: elements of this rank's shard of each bucket.
        moments: how optimizer states of each bucket are kept.
        trains: buckets for whose master weights, gradients and states the files have records from the start; None: all.
            A bucket that trains later gets files of its own.
        codec: of weights that rest encoded (``CODES``).
        room: buckets that may be in memory at a time; see ``store.stream``.
        pin: pin the buffers, which are copied to and from a GPU: copies of pageable memory block the host.

    Attributes:
        problem: the first error. See Note [A failing disk].
        where: the folder, for the user.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        files: IoOptions,
        numels: Sequence[int],
        moments: Sequence[MomentForm],
        trains: Sequence[bool] | None = None,
        codec: Sized | None = None,
        room: int = 3,
        pin: bool = False,
    ) -> None:
        self.folder = SwapFolder(path, rank)
        self.pool = IoPool.of(files)
        self._numels = list(numels)
        self.room = room
        self.where = str(self.folder.path.parent)
        self._moments = list(moments)
        self._trains = list(trains or [True] * len(numels))
        self._codec = codec
        self._files: dict[str, SwapFile | Nowhere] = {}
        self.problem: SwapError | None = None
        self._buffers = BufferPool(spare=room + 1, make=partial(host_buffer, pin=True)) if pin else BufferPool()
        # Any thread may create stored tensors.
        self._lock = threading.Lock()

    def place(self, record: int, link: HostLink | None) -> Place:
        """The place of the stores of bucket ``record``; ``link`` to the device, if that is not the CPU."""

        def store(kind: str, numel: int, dtype: torch.dtype) -> Store:
            if kind.startswith(STATE) and dtype == self._moments[record].dtype:
                name = kind
                sizes = self._moment_sizes()
            else:
                sizes = [record_nbytes(n, dtype, self._codec if kind.endswith(CODES) else None) for n in self._numels]
                name = f"{kind}-{str(dtype).removeprefix('torch.')}"
            file = self._file_of(name, record, sizes, of_step=kind not in (WEIGHTS, CODES))
            return NvmeStore(numel, dtype, file, record, self._buffers, self._note, link, scratch=kind == "grad")

        return Place(
            store, offloads=True, streamed=True, feed=partial(FedStore, link=link) if link is not None else None
        )

    def _moment_sizes(self) -> list[int]:
        """Bytes of an element-wise state of each bucket."""
        return [form.nbytes(n) for form, n in zip(self._moments, self._numels, strict=True)]

    def _stepped(self, sizes: Sequence[int]) -> list[int]:
        """These sizes, without those of buckets that do not train."""
        return [size if trains else 0 for size, trains in zip(sizes, self._trains, strict=True)]

    def _file_of(self, name: str, record: int, sizes: list[int], of_step: bool) -> SwapFile | Nowhere:
        """The file of a kind of values of bucket ``record``, and of all others that have it from the start.

        Args:
            sizes: bytes of each bucket's.
            of_step: only buckets that train have it.
        """
        if of_step and not self._trains[record]:  # it trains by now
            name, sizes = f"{name}-{record}", [size if i == record else 0 for i, size in enumerate(sizes)]
        elif of_step:
            sizes = self._stepped(sizes)
        with self._lock:
            if name not in self._files:
                # State names of custom optimizers may hold any character.
                plain = re.sub(r"[^\w.-]", "_", name)
                try:
                    self.folder.require(sum(sizes))
                    with progress_bar(f"Reserving {exact_bytes(sum(sizes))} in {self.folder.path}"):
                        path = self.folder.path / f"{len(self._files)}-{plain}"[:100]
                        self._files[name] = SwapFile(path, sizes, self.pool)
                except SwapError as error:
                    self._note(error)
                    self._files[name] = Nowhere(sizes, error)
            return self._files[name]

    def _note(self, error: SwapError) -> None:
        self.problem = self.problem or error

    def require(self, states: int) -> None:
        """Check that the disk has space for so many states per element, which do not exist yet.

        Raises:
            SwapError: the free space is too small.
        """
        self.folder.require(states * sum(self._stepped(self._moment_sizes())))

    def streaming(self) -> AbstractContextManager[None]:
        """Context that keeps freed buffers for the next bucket."""
        return self._buffers.reserve(16)

    def speed(self, nbytes: int) -> Speed:
        """Measured bytes per second of reads and of writes, with about ``nbytes``."""
        return probe(self.folder, self.pool, nbytes)

    def rest(self) -> None:
        """End the I/O threads; the next access starts them again."""
        self.pool.rest()

    def close(self) -> None:
        """Remove the files."""
        for file in self._files.values():
            file.close()
        self._files = {}
        self.pool.close()
        self.folder.close()

    @property
    def spare_nbytes(self) -> int:
        """Bytes of buffers that are kept for the next stored tensor."""
        return self._buffers.nbytes

    @property
    def bytes_on_disk(self) -> int:
        """Bytes that are stored."""
        return sum(file.size_of(i) for file in self._files.values() for i in range(len(self._numels)))


# ---- speed of the disk ---------------------------------------------------------------------------------------------

_SECONDS = 0.45  # per direction
_LEAST = 16 << 20  # bytes of a record: large enough that the latency of a request does not matter


def probe(folder: SwapFolder, pool: IoPool, nbytes: int = 256 << 20) -> Speed:
    """Write and read a file of ``nbytes``, or as much of it as takes about a second.

    Raises:
        SwapError: the disk has too little space or fails.
    """
    size = rounded(max(1, min(nbytes, max(_LEAST, pool.threads * pool.block_size))))
    count = max(1, nbytes // size)
    folder.require(size * count)
    file = SwapFile(folder.path / f"probe-{secrets.token_hex(4)}", [size] * count, pool)
    try:
        buffers = [aligned_buffer(file.size_of(0)) for _ in range(2)]  # 1D
        # Noise cannot be compressed, so the measured speed is that of the disk.
        noise = torch.empty(min(size, 4 << 20), dtype=torch.uint8)
        noise.random_(0, 256, generator=torch.Generator().manual_seed(nbytes))
        for part in (part for buffer in buffers for part in buffer.split(noise.numel())):
            part.copy_(noise[: part.numel()])
        records, write = _run(file.write, count, buffers)
        return Speed(read=_run(file.read, records, buffers)[1], write=write)
    finally:
        file.close()


def _run(transfer: Callable[[int, Tensor], Transfer], count: int, buffers: list[Tensor]) -> tuple[int, float]:
    """Transfer records with two in flight, until all are done or ``_SECONDS`` have passed.

    Returns:
        The number of records that were transferred, and the bytes per second.
    """
    start = time.perf_counter()
    records = 0
    moving: list[Transfer] = []
    while records < count and (records == 0 or time.perf_counter() - start < _SECONDS):
        if len(moving) == len(buffers):
            moving.pop(0).wait()
        moving.append(transfer(records, buffers[records % len(buffers)]))
        records += 1
    for last in moving:
        last.wait()
    return records, records * buffers[0].numel() / max(time.perf_counter() - start, 1e-9)
