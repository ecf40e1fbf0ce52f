"""Storage for saved activations between forward and backward: on the device, in host memory, or in files.

Note [A source that changes]
    A copy to the host overlaps with compute, so nobody may write to the source before it is done. Autograd does not
    see a forward that changes its own input. Therefore the source's version is compared when the copy is waited for,
    and ``bring`` raises the error that autograd raises for a saved tensor that was changed.

Note [Life of a saved tensor in files]
    put       the bytes are copied to a host buffer; when the copy is done, a thread starts to write
    leaving   being written; until that is done the tensor is served from the buffer
    away      only in a record of a file
    coming    being read into a buffer, then copied to the device
    At most ``_ROOM`` buffers are in use: then ``put`` waits for the oldest write, and a prefetch does nothing. A tensor
    that backward asks for always gets a buffer.

Errors are handled as in nvme_store.py, Note [A failing disk]: a tensor that could not be written stays in memory, and
one that could not be read is NaN.
"""

from __future__ import annotations

import functools
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lt_zero.common.compat import version_of
from lt_zero.config.blocks import Aio
from lt_zero.io.direct_file import SwapFile
from lt_zero.io.pinned import host_buffer
from lt_zero.io.private_folder import SwapFolder
from lt_zero.io.thread_pool import IoPool, SwapError, Transfer
from lt_zero.offload.copy_streams import DONE, CopyEvent, CopyStream
from lt_zero.offload.reuse import Loan, Memory, Stock

_IN_FLIGHT = 4  # copies to the host in flight; each keeps its source alive
_ROOM = 4  # host buffers for writes and reads
_KEPT = 8  # passes after which an unused file is removed
_FIT = 4  # a record may be larger than its tensor by 1/_FIT


class Place(Protocol):
    """The stored bytes of one saved activation."""

    def prefetch(self) -> bool:
        """Start copying to the device; False if there is no buffer for that."""

    def bring(self) -> Tensor:
        """A copy on the device, 1D uint8. Always a copy: recomputation may change it, a retained graph asks again.

        Raises:
            RuntimeError: the source was changed before it was copied.
        """

    def free(self) -> None:
        """Release the memory. The last call on this object."""


class Rest(Protocol):
    """Stores saved activations: on the device, in host memory or in files."""

    problem: SwapError | None  # the first error; see offload/nvme_store.py, Note [A failing disk]

    def put(self, source: Tensor) -> Place:
        """Store the bytes (1D uint8, on the device). See Note [A source that changes]."""

    def end_pass(self) -> None:
        """Called between passes, when nothing is stored."""

    def stats(self) -> dict[str, int]:
        """``made``: allocations so far; ``memory``, ``disk``: bytes allocated, in use or not."""

    def close(self) -> None:
        """Release everything. Idempotent."""


class Source:
    """The source of a copy to the host. See Note [A source that changes]."""

    def __init__(self, tensor: Tensor, event: CopyEvent) -> None:
        self._tensor = None if event is DONE else tensor
        self._version, self.event, self._changed = version_of(tensor), event, 0

    def wait_copied(self, host: bool = False) -> None:
        """Make the current stream, or the host, wait for the copy, and drop the source."""
        if host:
            self.event.synchronize()
        else:
            self.event.wait()
        if self._tensor is not None:
            self._changed = version_of(self._tensor) - self._version
        self._tensor, self.event = None, DONE

    def check(self) -> None:
        """Raise if the source was changed before the copy was waited for."""
        if self._changed:
            raise changed(self._version + self._changed, self._version)


def changed(found: int, expected: int) -> RuntimeError:
    """Autograd's error for a saved tensor that was changed in place."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: an input of "
        f"a checkpointed module is at version {found}; expected version {expected} instead. Write to a copy of it."
    )


class OnDevice:
    """Stores saved activations on the device itself.

    Args:
        memory: allocator of device memory.
    """

    problem: SwapError | None = None

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def put(self, source: Tensor) -> Place:
        loan = self.memory.take(source.numel())
        loan.tensor[: source.numel()].copy_(source)
        return _DevicePlace(self, loan, source.numel())

    def end_pass(self) -> None:
        return None

    def stats(self) -> dict[str, int]:
        return {"made": self.memory.made, "memory": self.memory.nbytes, "disk": 0}

    close = end_pass


class _DevicePlace:
    def __init__(self, rest: OnDevice, loan: Loan, nbytes: int) -> None:
        self._rest, self._loan, self._nbytes = rest, loan, nbytes

    def prefetch(self) -> bool:
        return True

    def bring(self) -> Tensor:
        loan = self._rest.memory.take(self._nbytes)
        tensor = loan.lend(self._nbytes)
        loan.give_back()
        return tensor.copy_(self._loan.tensor[: self._nbytes])

    def free(self) -> None:
        self._loan.give_back()


class InHost:
    """Stores saved activations in host memory; copies overlap with compute (offload/copy_streams.py).

    Args:
        memory: allocator of pinned host memory.
        device: device of the activations.
    """

    problem: SwapError | None = None

    def __init__(self, memory: Memory, device: torch.device) -> None:
        self.memory, self.device = memory, device
        late = device.type == "cpu"
        self.to_host, self.to_device = CopyStream(device, late), CopyStream(device, late)
        self._leaving: deque[Source] = deque()

    def put(self, source: Tensor) -> Place:
        loan = self.memory.take(source.numel())
        leaving = Source(source, self.to_host.copy(loan.tensor[: source.numel()], source))
        self._leaving.append(leaving)
        if len(self._leaving) > _IN_FLIGHT:
            self._leaving.popleft().wait_copied(host=True)
        return _HostPlace(self, loan, source.numel(), leaving)

    def end_pass(self) -> None:
        while self._leaving:
            self._leaving.popleft().wait_copied()

    def stats(self) -> dict[str, int]:
        return {"made": self.memory.made, "memory": self.memory.nbytes, "disk": 0}

    def close(self) -> None:
        self.end_pass()


class _HostPlace:
    def __init__(self, rest: InHost, loan: Loan, nbytes: int, source: Source) -> None:
        self._rest, self._loan, self._nbytes, self._source = rest, loan, nbytes, source
        self._target: Tensor | None = None
        self._coming: CopyEvent = DONE

    def prefetch(self) -> bool:
        if self._target is None:
            self._source.wait_copied()
            self._target = torch.empty(self._nbytes, dtype=torch.uint8, device=self._rest.device)
            self._coming = self._rest.to_device.copy(self._target, self._loan.tensor[: self._nbytes])
        return True

    def bring(self) -> Tensor:
        self._source.wait_copied()
        self._source.check()
        self.prefetch()
        self._coming.wait()
        target, self._target = self._target, None
        assert target is not None
        return target

    def free(self) -> None:
        self._source.wait_copied()
        self._coming.wait()  # or the copy would write into memory that the allocator has reused
        self._target = None
        self._loan.give_back(self._coming)


class _Record:
    """A record of a file."""

    def __init__(self, group: _Group, index: int) -> None:
        self.group, self.index = group, index


class _Group:
    """The records of one file, all of one size."""

    def __init__(self, file: SwapFile, count: int) -> None:
        self.file, self.count, self.size = file, count, file.size_of(0)
        self.free = [_Record(self, index) for index in reversed(range(count))]
        self.used = 0  # last pass that used this file


class _Records:
    """Reusable files, created on demand."""

    def __init__(self, folder: SwapFolder, pool: IoPool) -> None:
        self._folder, self._pool = folder, pool
        self._groups: list[_Group] = []
        self._passes = self.made = 0

    @property
    def nbytes(self) -> int:
        return sum(group.file.nbytes for group in self._groups)

    def take(self, nbytes: int) -> _Record:
        """A record of at least ``nbytes``.

        Raises:
            SwapError: the disk has no space for it.
        """
        kin = [g for g in self._groups if nbytes <= g.size <= max(nbytes + nbytes // _FIT, nbytes + 4096)]
        free = [group for group in kin if group.free]
        group = min(free, key=lambda g: g.size) if free else self._make(nbytes, max(1, sum(g.count for g in kin)))
        group.used = self._passes
        return group.free.pop()

    def _make(self, nbytes: int, count: int) -> _Group:
        self.made += 1
        self._folder.require(nbytes * count)
        path = self._folder.path / f"activations-{self.made}"
        self._groups.append(_Group(SwapFile(path, [nbytes] * count, self._pool), count))
        return self._groups[-1]

    def end_pass(self) -> None:
        """Remove files that were not used for ``_KEPT`` passes."""
        self._passes += 1
        old = [g for g in self._groups if self._passes - g.used > _KEPT and len(g.free) == g.count]
        for group in old:
            self._groups.remove(group)
            group.file.close()

    def close(self) -> None:
        for group in self._groups:
            group.file.close()
        self._groups = []


class InFiles:
    """Stores saved activations in files of a private folder. See Note [Life of a saved tensor in files].

    Args:
        path: a folder on a local disk.
        rank: of this process.
        aio: block size, threads and queue depth of the I/O.
        device: device of the activations.
        apart: whether the device has memory of its own, apart from the host's.

    Raises:
        SwapError: the folder cannot be created.
    """

    def __init__(self, path: Path, rank: int, aio: Aio, device: torch.device, apart: bool) -> None:
        self.folder = SwapFolder(path, rank)
        self.pool = IoPool(aio.intra_op_parallelism, aio.block_size, aio.in_flight, aio.checksum)
        self.device, self.apart = device, apart
        self.records = _Records(self.folder, self.pool)
        self.stock = Stock(functools.partial(host_buffer, pin=device.type == "cuda"))
        late = apart and device.type == "cpu"
        self.to_host, self.to_device = CopyStream(device, late), CopyStream(device, late)
        self.problem: SwapError | None = None
        self.busy = 0  # places that have a buffer
        self._leaving: deque[_FilePlace] = deque()

    def put(self, source: Tensor) -> Place:
        try:
            record = self.records.take(source.numel())
        except SwapError as error:
            self.note(error)
            return _Stays(source.clone())
        self.make_room()
        place = _FilePlace(self, record, source)
        self._leaving.append(place)
        return place

    def note(self, error: SwapError) -> None:
        """Keep the first error."""
        self.problem = self.problem or error

    def make_room(self) -> None:
        """Wait for the oldest writes until fewer than ``_ROOM`` buffers are in use."""
        while self.busy >= _ROOM and self._leaving:
            self._leaving.popleft().wait_written()

    def end_pass(self) -> None:
        while self._leaving:
            self._leaving.popleft().wait_written()
        self.records.end_pass()

    def stats(self) -> dict[str, int]:
        made = self.stock.made + self.records.made
        return {"made": made, "memory": self.stock.nbytes, "disk": self.records.nbytes}

    def close(self) -> None:
        while self._leaving:
            self._leaving.popleft().wait_written()
        self.records.close()
        self.pool.close()
        self.folder.close()


class _Stays:
    """A tensor that stays in memory, because no record could be allocated."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def prefetch(self) -> bool:
        return True

    def bring(self) -> Tensor:
        return self._tensor.clone()

    def free(self) -> None:
        self._tensor = torch.empty(0)


class _FilePlace:
    """One tensor, in a host buffer or in a record."""

    def __init__(self, rest: InFiles, record: _Record, source: Tensor) -> None:
        self._rest, self._record, self._nbytes = rest, record, source.numel()
        self._read: Transfer | None = None
        self._target: Tensor | None = None
        self._coming: CopyEvent = DONE
        self._loan: Loan | None = self._take()
        copied = rest.to_host.copy(self._loan.tensor[: self._nbytes], source)
        self._source = Source(source, copied)
        self._written: list[Transfer] = []  # filled by the gate, if there is one
        self._gate: Transfer | None = None  # waits for the copy in an I/O thread, then starts the write
        buffer = self._loan.tensor[: record.group.size]
        try:
            if copied is DONE:
                self._written.append(record.group.file.write(record.index, buffer))
            else:
                gate = functools.partial(_write, rest.device, copied, record, buffer, self._written)
                self._gate = rest.pool.submit(1, gate, _nothing, after=None)
        except SwapError as error:
            rest.note(error)
        self._left = self._stored = False  # the write has ended; the record holds the values

    def _take(self) -> Loan:
        self._rest.busy += 1
        return self._rest.stock.take(self._record.group.size)

    def _drop(self, after: CopyEvent = DONE) -> None:
        if self._loan is not None:
            self._rest.busy -= 1
            self._loan.give_back(after)
        self._loan = None

    def wait_written(self) -> None:
        """Wait until the tensor is written, then release the buffer."""
        if self._left:
            return
        self._left = True
        self._source.wait_copied()
        try:
            if self._gate is not None:
                self._gate.wait()
            for transfer in self._written:
                transfer.wait()
            if self._written:
                self._stored = True
                self._drop()
        except SwapError as error:
            self._rest.note(error)  # the buffer is kept: it has the only copy of the values
        self._gate, self._written = None, []

    def prefetch(self) -> bool:
        if self._loan is None and self._target is None:
            if self._rest.busy >= _ROOM:
                return False
            self._start_read()
        if self._rest.apart and self._target is None and (self._read is None or self._read.done):
            self._send()
        return True

    def _start_read(self) -> None:
        self._loan = self._take()
        try:
            file, buffer = self._record.group.file, self._loan.tensor[: self._record.group.size]
            self._read = file.read(self._record.index, buffer)
        except SwapError as error:
            self._fail(error)

    def _finish_read(self) -> None:
        read, self._read = self._read, None
        try:
            if read is not None:
                read.wait()
        except SwapError as error:
            self._fail(error)

    def _fail(self, error: SwapError) -> None:
        assert self._loan is not None
        self._rest.note(error)
        self._loan.tensor.fill_(0xFF)  # NaN in every floating dtype

    def _send(self) -> None:
        """Start the copy to the device."""
        self._source.wait_copied()
        self._finish_read()
        assert self._loan is not None
        self._target = torch.empty(self._nbytes, dtype=torch.uint8, device=self._rest.device)
        self._coming = self._rest.to_device.copy(self._target, self._loan.tensor[: self._nbytes])
        if self._stored:  # otherwise the buffer is still being written, and serves further calls
            self._drop(self._coming)

    def bring(self) -> Tensor:
        self._source.wait_copied()
        self._source.check()
        if self._loan is None and self._target is None:
            self._start_read()
        if not self._rest.apart and self._stored:
            self._finish_read()
            assert self._loan is not None
            tensor = self._loan.lend(self._nbytes)
            self._drop()
            return tensor
        if self._target is None:
            self._send()
        self._coming.wait()
        target, self._target = self._target, None
        assert target is not None
        return target

    def free(self) -> None:
        self.wait_written()
        self._finish_read()
        self._coming.wait()
        self._target = None
        self._drop(self._coming)
        self._record.group.free.append(self._record)


def _write(
    device: torch.device, copied: CopyEvent, record: _Record, buffer: Tensor, written: list[Transfer], block: int
) -> None:
    """Wait for the copy from the device in an I/O thread, so that no other thread has to, and start the write."""
    # A new thread's current device is the first one, where this process must not create a context.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        copied.synchronize()
    written.append(record.group.file.write(record.index, buffer))


def _nothing(error: RuntimeError | None) -> None:
    return None
