"""Storage for saved activations between forward and backward: on the device, in host memory, or in files.

Note [A source that changes]
    A copy to the host overlaps with compute, so the source must not be written before it is done. Autograd does not see
    a forward that changes its own input. Therefore the source's version is compared when the copy is waited for, and
    ``bring`` raises the error that autograd raises for a saved tensor that was changed.

Note [Life of a saved tensor in files]
    put       the bytes are copied to a host buffer; when the copy is done, a thread starts to write
    leaving   being written; until that is done the tensor is served from the buffer
    away      only in a record of a file
    coming    being read into a buffer, then copied to the device
    At most ``_BUFFERS`` buffers are in use: then ``put`` waits for the oldest write, and a prefetch does nothing. A
    tensor that backward asks for always gets a buffer.
    Errors are handled as in nvme_store.py, Note [A failing disk]: a tensor that could not be written stays in memory,
    and one that could not be read is NaN.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lt_zero.common.compat import version_of
from lt_zero.config.blocks import Aio
from lt_zero.io.pinned import host_buffer
from lt_zero.io.private_folder import SwapFolder
from lt_zero.io.swap_file import SwapFile
from lt_zero.io.thread_pool import IoPool, SwapError, Transfer
from lt_zero.offload.copy_streams import DONE, CopyEvent, CopyStream
from lt_zero.offload.reuse import Loan, LoanPool, Memory

_IN_FLIGHT = 4  # copies to the host in flight; each keeps its source alive
_BUFFERS = 4  # host buffers for writes to files and reads
_UNUSED_PASSES = 8  # passes after which an unused file is removed
_SLACK = 4  # a record may be larger than its tensor by 1/_SLACK


class StoredActivation(Protocol):
    """The stored bytes of one saved activation; ``nbytes``: how many."""

    @property
    def nbytes(self) -> int: ...

    def prefetch(self) -> bool:
        """Start copying to the device; False if there is no buffer for that."""

    def bring(self) -> Tensor:
        """A copy on the device, 1D uint8. Always a copy: recomputation may change it, a retained graph asks again.

        Raises:
            RuntimeError: the source was changed before it was copied.
        """

    def free(self) -> None:
        """Release the memory. The last call on this object."""


class Storage:
    """Base class of stores of saved activations.

    Args:
        memory: allocator of the memory for them.

    Attributes:
        problem: the first error; see offload/nvme_store.py, Note [A failing disk].
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.problem: SwapError | None = None

    def put(self, source: Tensor) -> StoredActivation:
        """Store the bytes (1D uint8, on the device). See Note [A source that changes]."""
        raise NotImplementedError

    def end_pass(self) -> None:
        """End a pass, when nothing is stored."""

    def stats(self) -> dict[str, int]:
        """``made``: allocations so far; ``memory``, ``disk``: bytes allocated, in use or not."""
        return {"made": self.memory.made, "memory": self.memory.nbytes, "disk": 0}

    def close(self) -> None:
        """Release everything. Idempotent."""
        self.end_pass()


class DeviceStorage(Storage):
    """Keeps saved activations in other memory of the device."""

    def put(self, source: Tensor) -> StoredActivation:
        return _OnDevice(self.memory, source)


class _OnDevice:
    def __init__(self, memory: Memory, source: Tensor) -> None:
        self._memory, self._loan, self.nbytes = memory, memory.take(source.numel()), source.numel()
        self._loan.tensor[: self.nbytes].copy_(source)

    def prefetch(self) -> bool:
        return True

    def bring(self) -> Tensor:
        loan = self._memory.take(self.nbytes)
        tensor = loan.lend(self.nbytes)
        loan.give_back()
        return tensor.copy_(self._loan.tensor[: self.nbytes])

    def free(self) -> None:
        self._loan.give_back()


class HostStorage(Storage):
    """Keeps saved activations in host memory; copies overlap with compute (copy_streams.py).

    Args:
        memory: allocator of pinned host memory.
        device: device of the activations.
        apart: whether the device has memory of its own, apart from the host's.
    """

    def __init__(self, memory: Memory, device: torch.device, apart: bool = True) -> None:
        super().__init__(memory)
        self.device, self.apart = device, apart
        late = apart and device.type == "cpu"
        self.to_host, self.to_device = CopyStream(device, late), CopyStream(device, late)
        self._leaving: deque[InHost] = deque()

    def put(self, source: Tensor) -> StoredActivation:
        self._leaving.append(InHost(self, source, source.numel()))
        stored = self._leaving[-1]
        if len(self._leaving) > _IN_FLIGHT:
            self._leaving.popleft().wait_copied(host=True)
        return stored

    def end_pass(self) -> None:
        while self._leaving:
            self._leaving.popleft().wait_left()


class InHost:
    """A saved activation in a host buffer.

    Args:
        storage: whose memory and copy streams it uses.
        source: the bytes, 1D uint8.
        size: bytes of the buffer.
    """

    def __init__(self, storage: HostStorage, source: Tensor, size: int) -> None:
        self._storage, self.nbytes, self._size = storage, source.numel(), size
        self._loan: Loan | None = self._take()
        self._copied = storage.to_host.copy(self._loan.tensor[: self.nbytes], source)
        self._source = None if self._copied is DONE else source
        self._version, self._changed = version_of(source), 0
        self._target: Tensor | None = None  # on the device
        self._coming: CopyEvent = DONE  # the copy to the target

    def _take(self) -> Loan:
        return self._storage.memory.take(self._size)

    def _drop(self, after: CopyEvent = DONE) -> None:
        loan, self._loan = self._loan, None
        if loan is not None:
            loan.give_back(after)

    def wait_copied(self, host: bool = False) -> None:
        """Make the current stream, or the host, wait for the copy from the source, and drop the source."""
        if host:
            self._copied.synchronize()
        else:
            self._copied.wait()
        if self._source is not None:
            self._changed = version_of(self._source) - self._version
        self._source, self._copied = None, DONE

    wait_left = wait_copied

    def prefetch(self) -> bool:
        if self._target is None:
            self._send()
        return True

    def _send(self) -> None:
        """Start the copy to the device."""
        self.wait_copied()
        assert self._loan is not None
        self._target = torch.empty(self.nbytes, dtype=torch.uint8, device=self._storage.device)
        self._coming = self._storage.to_device.copy(self._target, self._loan.tensor[: self.nbytes])

    def bring(self) -> Tensor:
        self.wait_copied()
        if self._changed:
            raise changed(self._version + self._changed, self._version)
        if self._target is None:
            self._send()
        self._coming.wait()
        target, self._target = self._target, None
        assert target is not None
        return target

    def free(self) -> None:
        self.wait_copied()
        # Wait for the copy, which could write into memory that the allocator has reused.
        self._coming.wait()
        self._target = None
        self._drop(self._coming)


def changed(found: int, expected: int) -> RuntimeError:
    """Autograd's error for a saved tensor that was changed in place."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: an input of "
        f"a checkpointed module is at version {found}; expected version {expected} instead. Write to a copy of it."
    )


# ---- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _FileSlot:
    group: _Group
    index: int


class _Group:
    """The records of one file, all of one size."""

    def __init__(self, file: SwapFile, count: int) -> None:
        self.file, self.count, self.size = file, count, file.size_of(0)
        self.free = [_FileSlot(self, index) for index in reversed(range(count))]
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

    def take(self, nbytes: int) -> _FileSlot:
        """A record of at least ``nbytes``.

        Raises:
            SwapError: the disk has no space for it.
        """
        fitting = [g for g in self._groups if nbytes <= g.size <= max(nbytes + nbytes // _SLACK, nbytes + 4096)]
        free = [group for group in fitting if group.free]
        group = min(free, key=lambda g: g.size) if free else self._make(nbytes, max(1, sum(g.count for g in fitting)))
        group.used = self._passes
        return group.free.pop()

    def _make(self, nbytes: int, count: int) -> _Group:
        self.made += 1
        self._folder.require(nbytes * count)
        path = self._folder.path / f"activations-{self.made}"
        self._groups.append(_Group(SwapFile(path, [nbytes] * count, self._pool), count))
        return self._groups[-1]

    def end_pass(self) -> None:
        """Remove files that were not used for ``_UNUSED_PASSES`` passes."""
        self._passes += 1
        self._remove([g for g in self._groups if self._passes - g.used > _UNUSED_PASSES and len(g.free) == g.count])

    def close(self) -> None:
        self._remove(list(self._groups))

    def _remove(self, groups: list[_Group]) -> None:
        for group in groups:
            self._groups.remove(group)
            group.file.close()


class FileStorage(HostStorage):
    """Keeps saved activations in files of a private folder. See Note [Life of a saved tensor in files].

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
        super().__init__(LoanPool(partial(host_buffer, pin=device.type == "cuda")), device, apart)
        self.pool = IoPool(aio.intra_op_parallelism, aio.block_size, aio.in_flight, aio.checksum)
        self.records = _Records(self.folder, self.pool)
        self.buffers = 0  # saved activations that have a buffer

    def put(self, source: Tensor) -> StoredActivation:
        try:
            record = self.records.take(source.numel())
        except SwapError as error:
            self.note(error)
            return _NoRecord(source.clone())
        while self.buffers >= _BUFFERS and self._leaving:
            self._leaving.popleft().wait_left()
        stored = _InFile(self, record, source)
        self._leaving.append(stored)
        return stored

    def note(self, error: SwapError) -> None:
        """Keep the first error."""
        self.problem = self.problem or error

    def end_pass(self) -> None:
        super().end_pass()
        self.records.end_pass()

    def stats(self) -> dict[str, int]:
        made = self.memory.made + self.records.made
        return {"made": made, "memory": self.memory.nbytes, "disk": self.records.nbytes}

    def close(self) -> None:
        super().close()
        self.records.close()
        self.pool.close()
        self.folder.close()


class _NoRecord:
    """A saved activation that stays on the device, because no record could be allocated."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.nbytes = tensor, tensor.numel()

    def prefetch(self) -> bool:
        return True

    def bring(self) -> Tensor:
        return self._tensor.clone()

    def free(self) -> None:
        self._tensor = torch.empty(0)


class _Behind:
    """A transfer that an I/O thread starts when a copy has ended, so that no other thread waits for the copy.

    Raises:
        SwapError: the transfer cannot be started, or ended with an error; by ``wait`` as well.
    """

    def __init__(self, storage: FileStorage, copy: CopyEvent, begin: Callable[[], Transfer]) -> None:
        self._device, self._copy, self._begin = storage.device, copy, begin
        self._transfer: Transfer | None = None
        self._gate = None if copy is DONE else storage.pool.submit(1, self._follow)
        if self._gate is None:
            self._transfer = begin()

    def _follow(self, block: int) -> None:
        # A new thread's current device is the first one, where this process must not create a context.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            self._copy.synchronize()
        self._transfer = self._begin()

    @property
    def done(self) -> bool:
        return (self._gate is None or self._gate.done) and (self._transfer is None or self._transfer.done)

    def wait(self) -> None:
        if self._gate is not None:
            self._gate.wait()
        if self._transfer is not None:
            self._transfer.wait()


class _InFile(InHost):
    """A saved activation in a host buffer, in a record, or in both."""

    def __init__(self, storage: FileStorage, record: _FileSlot, source: Tensor) -> None:
        self._files, self._record = storage, record
        super().__init__(storage, source, record.group.size)
        self._read: _Behind | None = None
        self._write: _Behind | None = None
        self._left = self._stored = False  # the write has ended; the record holds the values
        try:
            self._write = _Behind(storage, self._copied, partial(self._file.write, record.index, self._buffer()))
        except SwapError as error:
            storage.note(error)

    @property
    def _file(self) -> SwapFile:
        return self._record.group.file

    def _take(self) -> Loan:
        self._files.buffers += 1
        return super()._take()

    def _drop(self, after: CopyEvent = DONE) -> None:
        self._files.buffers -= self._loan is not None
        super()._drop(after)

    def _buffer(self) -> Tensor:
        assert self._loan is not None
        return self._loan.tensor[: self._size]

    def wait_left(self, host: bool = False) -> None:
        """Wait until the tensor is written, then release the buffer."""
        if self._left:
            return
        self._left = True
        self.wait_copied(host)
        try:
            if self._write is not None:
                self._write.wait()
                self._stored = True
                # A prefetch may still copy the buffer to the device.
                self._drop(self._coming)
        except SwapError as error:
            # Keep the buffer: it has the only copy of the values.
            self._files.note(error)
        self._write = None

    def prefetch(self) -> bool:
        if self._loan is None and self._target is None:
            if self._files.buffers >= _BUFFERS:
                return False
            self._start_read()
        if self._files.apart and self._target is None and (self._read is None or self._read.done):
            self._send()
        return True

    def _start_read(self) -> None:
        self._loan = self._take()
        try:
            # The copy to the device of what was in the buffer before may not have begun.
            self._read = _Behind(
                self._files, self._loan.ready, partial(self._file.read, self._record.index, self._buffer())
            )
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
        self._files.note(error)
        # These bytes are NaN in every floating dtype.
        self._buffer().fill_(0xFF)

    def _send(self) -> None:
        self._finish_read()
        super()._send()
        # Release it only once it is stored: until then it is being written, and serves further calls.
        if self._stored:
            self._drop(self._coming)

    def bring(self) -> Tensor:
        if self._loan is None and self._target is None:
            self._start_read()
        if self._files.apart or not self._stored:
            return super().bring()
        self._finish_read()
        assert self._loan is not None
        tensor = self._loan.lend(self.nbytes)
        self._drop()
        return tensor

    def free(self) -> None:
        self.wait_left()
        self._finish_read()
        super().free()
        self._record.group.free.append(self._record)
