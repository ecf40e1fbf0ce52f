"""The files of one rank, and how a step goes through what rests in them.

Note [Walking]
    A step visits one bucket after the other: while k is stepped, k+1 is read and k-1 is written. At most ``room``
    buckets have memory at a time; with two of them nothing is read ahead while something is written.

Note [A failing disk]
    The disk of one rank fails while the others go on to the next collective. So nothing is raised where it happens: the
    first problem is kept (``NvmeFiles.problem``), values that could not be read or kept become NaN, and the ranks agree
    on raising where they meet anyway: before a step, after it, and before weights leave the engine
    (OffloadManager.check).
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
        self._files: dict[str, SwapFile | Nowhere] = {}
        self.problem: SwapError | None = None  # the first; see Note [A failing disk]
        self._buffers = Buffers()
        self._lock = threading.Lock()  # homes are made in any thread

    def stored_tensor(self, kind: str, record: int, dtype: torch.dtype) -> StoredTensor:
        """A new home for ``kind`` ("master", "exp_avg") of bucket ``record``."""
        name = f"{kind}-{str(dtype).removeprefix('torch.')}"
        with self._lock:
            return self._stored_tensor(kind, name, record, dtype)

    def _stored_tensor(self, kind: str, name: str, record: int, dtype: torch.dtype) -> StoredTensor:
        if name not in self._files:
            plain = re.sub(r"[^\w.-]", "_", name)  # users' optimizers name states as they like
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
        """Check that the disk has room for states that are not there yet.

        Raises:
            SwapError: it has not.
        """
        self.folder.require(bytes_per_element * sum(self._numels))

    def stream(
        self, groups: Sequence[Callable[[], list[StoredTensor]]], read_ahead: bool, behind: bool
    ) -> Iterator[int]:
        """Visit groups of homes (one group per bucket; asked for when needed). See Note [Walking].

        Args:
            groups: what to bring for each visit; what a visit adds is put away with it.
            read_ahead: read the next group during a visit.
            behind: write the last group during a visit.

        Yields:
            The number of the group that is here.
        """
        with self.streaming():
            yield from self._stream(groups, read_ahead, behind)

    def streaming(self) -> AbstractContextManager[None]:
        """Around visits to one bucket after the other: memory that one gives back is kept for the next."""
        return self._buffers.many(16)

    def _stream(
        self, groups: Sequence[Callable[[], list[StoredTensor]]], read_ahead: bool, behind: bool
    ) -> Iterator[int]:
        leaving: deque[list[StoredTensor]] = deque()
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
                wait_all_written(leaving.popleft())
        for rest in leaving:
            wait_all_written(rest)

    def rest(self) -> None:
        """End the threads until the next access."""
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
        """Memory that is kept for the next home."""
        return self._buffers.nbytes

    @property
    def bytes_on_disk(self) -> int:
        return sum(file.size_of(i) for file in self._files.values() for i in range(len(self._numels)))
