"""The NVMe files of one rank, and how a step streams buckets through memory.

Note [Streaming buckets]
    While bucket k is stepped, k+1 is read and k-1 is written. At most ``room`` buckets are in memory at a time; with
    room for two, nothing is read ahead while another bucket is being written.

Note [A failing disk]
    If a rank raised where its disk fails, the others would hang in the next collective. Instead the rank keeps the
    first error (``NvmeFiles.problem``) and sets the lost values to NaN. The ranks agree on raising at fixed points:
    before a step, after it, and before weights leave the engine (OffloadManager.check).
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from lt_zero.common.progress_bar import progress_bar
from lt_zero.config.blocks.offload import Aio
from lt_zero.io.block_transfer import in_words
from lt_zero.io.buffer_pool import Buffers
from lt_zero.io.direct_file import Nowhere, SwapFile
from lt_zero.io.private_folder import SwapFolder
from lt_zero.io.thread_pool import IoPool, SwapError
from lt_zero.offload.nvme_store import StoredTensor, wait_all_written


class NvmeFiles:
    """The files of one rank: one per kind of state, with one record per bucket.

    Args:
        path: a folder on the disk.
        rank: of this process.
        aio: block size, threads and queue depth of the I/O.
        numels: elements of this rank's shard of each bucket.
        room: buckets that may be in memory at a time; see Note [Streaming buckets].
    """

    def __init__(self, path: Path, rank: int, aio: Aio, numels: Sequence[int], room: int = 3) -> None:
        self.folder = SwapFolder(path, rank)
        self.pool = IoPool(aio.intra_op_parallelism, aio.block_size, aio.in_flight, aio.checksum)
        self._numels, self._room = list(numels), room
        self._files: dict[str, SwapFile | Nowhere] = {}
        self.problem: SwapError | None = None  # the first error; see Note [A failing disk]
        self._buffers = Buffers()
        self._lock = threading.Lock()  # any thread may create stored tensors

    def stored_tensor(self, kind: str, record: int, dtype: torch.dtype) -> StoredTensor:
        """A new stored tensor for ``kind`` ("master", "exp_avg") of bucket ``record``."""
        name = f"{kind}-{str(dtype).removeprefix('torch.')}"
        with self._lock:
            return self._stored_tensor(kind, name, record, dtype)

    def _stored_tensor(self, kind: str, name: str, record: int, dtype: torch.dtype) -> StoredTensor:
        if name not in self._files:
            plain = re.sub(r"[^\w.-]", "_", name)  # state names of custom optimizers may hold any character
            self._files[name] = self._make(
                f"{len(self._files)}-{plain}"[:100], [numel * dtype.itemsize for numel in self._numels]
            )
        scratch = kind == "grad"
        return StoredTensor(self._numels[record], dtype, self._files[name], record, self._buffers, self._note, scratch)

    def _make(self, name: str, sizes: list[int]) -> SwapFile | Nowhere:
        try:
            self.folder.require(sum(sizes))
            with progress_bar(f"Reserving {in_words(sum(sizes))} in {self.folder.path}"):
                return SwapFile(self.folder.path / name, sizes, self.pool)
        except SwapError as error:
            self._note(error)
            return Nowhere(sizes, error)

    def _note(self, error: SwapError) -> None:
        self.problem = self.problem or error

    def require(self, bytes_per_element: int) -> None:
        """Check that the disk has space for states that do not exist yet.

        Raises:
            SwapError: the free space is too small.
        """
        self.folder.require(bytes_per_element * sum(self._numels))

    def stream(
        self, groups: Sequence[Callable[[], list[StoredTensor]]], read_ahead: bool, behind: bool
    ) -> Iterator[int]:
        """Bring groups of stored tensors into memory, one after the other. See Note [Streaming buckets].

        Args:
            groups: one function per bucket that returns its stored tensors; it is called again after the visit, so
                tensors that the visit created are written too.
            read_ahead: read the next group during a visit.
            behind: write the previous group during a visit.

        Yields:
            The index of the group that is in memory.
        """
        with self.streaming():
            yield from self._stream(groups, read_ahead, behind)

    def streaming(self) -> AbstractContextManager[None]:
        """A context in which freed buffers are kept for the next bucket."""
        return self._buffers.many(16)

    def _stream(
        self, groups: Sequence[Callable[[], list[StoredTensor]]], read_ahead: bool, behind: bool
    ) -> Iterator[int]:
        leaving: deque[list[StoredTensor]] = deque()
        for number, group in enumerate(groups):
            for tensor in group():
                tensor.prefetch()
            if read_ahead and number + 1 < len(groups) and 2 + len(leaving) <= self._room:
                for tensor in groups[number + 1]():
                    tensor.prefetch()
            for tensor in group():
                tensor.bring_for_step()
            yield number
            leaving.append(group())  # evaluated once: the write has to be waited for on these tensors
            for tensor in leaving[-1]:
                tensor.put_away()
            while len(leaving) > (max(0, min(1, self._room - 2)) if behind else 0):
                wait_all_written(leaving.popleft())
        for tensors in leaving:
            wait_all_written(tensors)

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
        return sum(file.size_of(i) for file in self._files.values() for i in range(len(self._numels)))
