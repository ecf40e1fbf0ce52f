"""Storage for saved activations between forward and backward: on the device, in host memory, or in files.

Note [A source that changes]
    A copy to the host overlaps with compute, so the source must not be written before it is done. Autograd does not see
    a forward that changes its own input. Therefore the source's version is compared when the copy is waited for, and
    ``bring`` raises the error that autograd raises for a saved tensor that was changed.

Note [Life of a saved activation]
    put       the bytes are copied to a buffer; with files, a thread starts to write it when the copy is done
    leaving   being copied or written; until that is done the activation is served from the buffer
    away      with files: only in a record
    coming    being read into a buffer; with a device that is apart, then copied to the device
    At most ``_LEAVING`` activations are leaving: then ``put`` waits for the oldest. With files, a prefetch does nothing
    if ``_BUFFERS`` buffers are in use. An activation that backward asks for always gets a buffer.
    Errors are handled as in nvme_store.py, Note [A failing disk]: an activation that could not be written stays in its
    buffer, and one that could not be read is NaN.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lt_zero.common import accelerator
from lt_zero.common.compat import version_of
from lt_zero.core.stores.io_options import IoOptions, SwapError
from lt_zero.core.stores.store import CopyEvent
from lt_zero.core.stores.thread_pool import IoPool, Transfer
from lt_zero.features.activation_checkpointing.reuse import Loan, Memory
from lt_zero.offload.copy_streams import DONE, CopyStream
from lt_zero.offload.private_folder import SwapFolder
from lt_zero.offload.swap_file import SwapFile

_LEAVING = 4  # copies and writes in flight; each copy keeps its source alive, each write its buffer
_BUFFERS = 4  # buffers in use beyond which nothing is read ahead
_UNUSED_PASSES = 8  # passes after which an unused file is removed
_SLACK = 4  # a record may be larger than its activation by 1/_SLACK
_CPU = torch.device("cpu")


def changed(found: int, expected: int) -> RuntimeError:
    """Autograd's error for a saved tensor that was changed in place."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: an input of "
        f"a checkpointed module is at version {found}; expected version {expected} instead. Write to a copy of it."
    )


class Storage:
    """Keeps saved activations in reusable memory, or, with ``files``, on a disk.

    Args:
        memory: allocator of the buffers, on the device or in (pinned) host memory.
        device: device of the activations.
        apart: the buffers are not in the device's memory; copies then overlap with compute (copy_streams.py).
        files: None: activations stay in their buffers.

    Attributes:
        problem: the first error; see offload/nvme_store.py, Note [A failing disk].
        buffers: activations that have a buffer.
    """

    def __init__(self, memory: Memory, device: torch.device, apart: bool, files: ActivationFiles | None = None) -> None:
        self.memory = memory
        self.device = device
        self.apart = apart
        self.files = files
        self.problem: SwapError | None = None
        self.buffers = 0
        # Copies within the device's memory are in line with compute: on another stream they would only keep their
        # sources alive for longer.
        where, late = (device, device.type == "cpu") if apart else (_CPU, False)
        self.to_buffer = CopyStream(where, late)
        self.to_device = CopyStream(where, late)
        self._leaving: deque[StoredActivation] = deque()

    @property
    def is_at_hand(self) -> bool:
        """True if ``bring`` is no more than a copy within the device's memory."""
        return not self.apart and self.files is None

    def put(self, source: Tensor) -> StoredActivation:
        """Store the bytes (1D uint8, on the device). See Note [A source that changes]."""
        while len(self._leaving) >= _LEAVING:
            self._leaving.popleft().wait_left(host=True)
        record = None
        try:
            record = self.files.take(source.numel()) if self.files is not None else None
        except SwapError as error:
            self.note(error)
        self._leaving.append(StoredActivation(self, source, record))
        return self._leaving[-1]

    def target(self, nbytes: int) -> Tensor:
        """Memory of the device (1D uint8) for a copy of an activation."""
        if self.apart:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        loan = self.memory.take(nbytes)
        tensor = loan.lend(nbytes)
        loan.give_back()
        return tensor

    def after(self, copy: CopyEvent, begin: Callable[[], Transfer]) -> FollowingTransfer:
        """The transfer that ``begin`` starts once ``copy`` has ended.

        Raises:
            SwapError: it cannot be started.
        """
        assert self.files is not None
        return FollowingTransfer(self.files.pool, self.device, copy, begin)

    def note(self, error: SwapError) -> None:
        """Keep the first error."""
        self.problem = self.problem or error

    def end_pass(self) -> None:
        """End a pass, when nothing is stored."""
        while self._leaving:
            self._leaving.popleft().wait_left()
        if self.files is not None:
            self.files.end_pass()

    def stats(self) -> dict[str, int]:
        """``made``: allocations so far; ``memory``, ``disk``: bytes allocated, in use or not."""
        made, disk = (self.files.made, self.files.nbytes) if self.files is not None else (0, 0)
        return {"made": self.memory.made + made, "memory": self.memory.nbytes, "disk": disk}

    def close(self) -> None:
        """Release everything. Idempotent."""
        self.end_pass()
        if self.files is not None:
            self.files.close()


class StoredActivation:
    """The bytes of one saved activation in a buffer, in a record, or in both.

    Args:
        storage: whose memory, copy streams and files it uses.
        source: the bytes, 1D uint8, on the device.
        record: None: it stays in the buffer.

    Attributes:
        nbytes: of the activation.
    """

    def __init__(self, storage: Storage, source: Tensor, record: ActivationRecord | None) -> None:
        self._storage = storage
        self._record = record
        self.nbytes = source.numel()
        self._size = record.size if record is not None else self.nbytes  # direct I/O moves whole blocks
        self._loan: Loan | None = None
        loan = self._take()
        self._copied = storage.to_buffer.copy(loan.tensor[: self.nbytes], source)
        self._source = None if self._copied is DONE else source
        self._version = version_of(source)
        self._changed = 0
        self._target: Tensor | None = None  # on the device
        self._coming: CopyEvent = DONE  # the copy to the target
        self._read: FollowingTransfer | None = None
        self._write: FollowingTransfer | None = None
        self._stored = False  # the record holds the values
        if record is not None:
            try:
                self._write = storage.after(self._copied, partial(record.write, self._buffer()))
            except SwapError as error:
                storage.note(error)

    def _take(self) -> Loan:
        self._storage.buffers += 1
        self._loan = self._storage.memory.take(self._size)
        return self._loan

    def _drop(self, after: CopyEvent = DONE) -> None:
        loan, self._loan = self._loan, None
        if loan is not None:
            self._storage.buffers -= 1
            loan.give_back(after)

    def _buffer(self) -> Tensor:
        assert self._loan is not None
        return self._loan.tensor[: self._size]

    # ---- leaving -----------------------------------------------------------------------------------------------

    def _wait_copied(self, host: bool = False) -> None:
        """Make the current stream, or the host, wait for the copy from the source, and drop the source."""
        if host:
            self._copied.synchronize()
        else:
            self._copied.wait()
        if self._source is not None:
            self._changed = version_of(self._source) - self._version
        self._source = None
        self._copied = DONE

    def wait_left(self, host: bool = False) -> None:
        """Wait until the activation has left: for the copy, as ``host`` says, and for a write, on the host.

        The buffer is released once it is written.
        """
        self._wait_copied(host)
        if self._write is None:
            return
        try:
            self._write.wait()
            self._stored = True
            # A prefetch may still copy the buffer to the device.
            self._drop(self._coming)
        except SwapError as error:
            # Keep the buffer: it has the only copy of the values.
            self._storage.note(error)
        # Forget the write only after the wait, which a KeyboardInterrupt may end early.
        self._write = None

    # ---- coming ------------------------------------------------------------------------------------------------

    def prefetch(self) -> bool:
        """Start to bring it; False if there is no buffer for that."""
        if self._loan is None and self._target is None:
            if self._storage.buffers >= _BUFFERS:
                return False
            self._start_read()
        # A device that is not apart needs no copy, or gets it in ``bring``: there it is in line with compute.
        if self._storage.apart and self._target is None and (self._read is None or self._read.done):
            self._send()
        return True

    def bring(self) -> Tensor:
        """A copy on the device, 1D uint8. Always a copy: recomputation may change it, a retained graph asks again.

        Raises:
            RuntimeError: the source was changed before it was copied.
        """
        if self._loan is None and self._target is None:
            self._start_read()
        if self._stored and not self._storage.apart:
            # The record keeps the values, so the buffer itself is the copy.
            self._finish_read()
            assert self._loan is not None
            tensor = self._loan.lend(self.nbytes)
            self._drop()
            return tensor
        self._wait_copied()
        if self._changed:
            raise changed(self._version + self._changed, self._version)
        if self._target is None:
            self._send()
        self._coming.wait()
        target, self._target = self._target, None
        assert target is not None
        return target

    def _start_read(self) -> None:
        assert self._record is not None
        loan = self._take()
        try:
            # The copy to the device of what was in the buffer before may not have begun.
            self._read = self._storage.after(loan.ready, partial(self._record.read, self._buffer()))
        except SwapError as error:
            self._fail(error)

    def _finish_read(self) -> None:
        try:
            if self._read is not None:
                self._read.wait()
        except SwapError as error:
            self._fail(error)
        self._read = None

    def _fail(self, error: SwapError) -> None:
        self._storage.note(error)
        # These bytes are NaN in every floating dtype.
        self._buffer().fill_(0xFF)

    def _send(self) -> None:
        """Start the copy to the device."""
        self._finish_read()
        self._wait_copied()
        assert self._loan is not None
        self._target = self._storage.target(self.nbytes)
        self._coming = self._storage.to_device.copy(self._target, self._loan.tensor[: self.nbytes])
        # Release the buffer only once it is stored: until then it is being written, and serves further calls.
        if self._stored:
            self._drop(self._coming)

    def free(self) -> None:
        """Release the memory and the record. The last call on this object."""
        self.wait_left()
        self._finish_read()
        # Wait for the copy, which could write into memory that the allocator has reused.
        self._coming.wait()
        self._target = None
        self._drop(self._coming)
        if self._record is not None:
            self._record.free()


# ---- files -----------------------------------------------------------------------------------------------------------


class FollowingTransfer:
    """A transfer that an I/O thread starts when a copy has ended, so that no other thread waits for the copy.

    Args:
        pool: the I/O threads.
        device: of the copy.
        copy: is waited for.
        begin: starts the transfer.

    Raises:
        SwapError: the transfer cannot be started, or ended with an error; by ``wait`` as well.
    """

    def __init__(self, pool: IoPool, device: torch.device, copy: CopyEvent, begin: Callable[[], Transfer]) -> None:
        self._device = device
        self._copy = copy
        self._begin = begin
        self._transfer: Transfer | None = None
        self._gate = None if copy is DONE else pool.submit(1, self._follow)
        if self._gate is None:
            self._transfer = begin()

    def _follow(self, block: int) -> None:
        # A new thread's current device is the first one, where this process must not create a context.
        with accelerator.on(self._device):
            self._copy.synchronize()
        self._transfer = self._begin()

    @property
    def done(self) -> bool:
        return (self._gate is None or self._gate.done) and (self._transfer is None or self._transfer.done)

    def wait(self) -> None:
        """Wait until the transfer has ended."""
        # The thread that opens the gate also makes the transfer, so the order matters.
        if self._gate is not None:
            self._gate.wait()
        if self._transfer is not None:
            self._transfer.wait()


class _Group:
    """The records of one file, all of one size."""

    def __init__(self, file: SwapFile, count: int) -> None:
        self.file = file
        self.count = count
        self.size = file.size_of(0)
        self.free = [ActivationRecord(self, index) for index in reversed(range(count))]
        self.used = 0  # last pass that used this file


@dataclass(frozen=True, eq=False)
class ActivationRecord:
    """Room for one activation in a file; ``free`` returns it."""

    group: _Group
    index: int

    @property
    def size(self) -> int:
        """Bytes of the buffers that are written and read."""
        return self.group.size

    def write(self, buffer: Tensor) -> Transfer:
        return self.group.file.write(self.index, buffer)

    def read(self, buffer: Tensor) -> Transfer:
        return self.group.file.read(self.index, buffer)

    def free(self) -> None:
        self.group.free.append(self)


class ActivationFiles:
    """Records for activations, in files of a private folder that are made on demand and used again.

    Args:
        path: a folder on a local disk.
        rank: of this process.
        files: how they are read and written.

    Attributes:
        made: files so far.

    Raises:
        SwapError: the folder cannot be created.
    """

    def __init__(self, path: Path, rank: int, files: IoOptions) -> None:
        self.folder = SwapFolder(path, rank)
        self.pool = IoPool.of(files)
        self._groups: list[_Group] = []
        self._passes = self.made = 0

    @property
    def nbytes(self) -> int:
        return sum(group.file.nbytes for group in self._groups)

    def take(self, nbytes: int) -> ActivationRecord:
        """A record of at least ``nbytes``.

        Raises:
            SwapError: the disk has no space for it.
        """
        fitting = [g for g in self._groups if nbytes <= g.size <= max(nbytes + nbytes // _SLACK, nbytes + 4096)]
        free = [group for group in fitting if group.free]
        # Each new file doubles the records of its size, so that few files are open.
        group = min(free, key=lambda g: g.size) if free else self._make(nbytes, max(1, sum(g.count for g in fitting)))
        group.used = self._passes
        return group.free.pop()

    def _make(self, nbytes: int, count: int) -> _Group:
        self.made += 1
        self.folder.require(nbytes * count)
        path = self.folder.path / f"activations-{self.made}"
        self._groups.append(_Group(SwapFile(path, [nbytes] * count, self.pool), count))
        return self._groups[-1]

    def end_pass(self) -> None:
        """Remove files that were not used for ``_UNUSED_PASSES`` passes."""
        self._passes += 1
        self._remove([g for g in self._groups if self._passes - g.used > _UNUSED_PASSES and len(g.free) == g.count])

    def _remove(self, groups: list[_Group]) -> None:
        for group in groups:
            self._groups.remove(group)
            group.file.close()

    def close(self) -> None:
        """Remove the files and the folder, and end the threads. Idempotent."""
        self._remove(list(self._groups))
        self.pool.close()
        self.folder.close()
