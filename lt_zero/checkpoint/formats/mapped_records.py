"""The records of mapped files: each is compared with its checksum once, before its values are used.

See Note [Checked when used] in checkpoint/native/records.py.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from lt_zero.checkpoint.native.records import ChecksumJob, Record, checking_pool, jobs_of

_AHEAD = 64 << 20  # bytes of records that are checked before they are asked for


class MappedRecords:
    """The records of the files that a source has mapped. See Note [Checked when used]."""

    def __init__(self) -> None:
        self._starts: list[int] = []  # addresses, ascending
        self._places: list[tuple[int, ChecksumJob]] = []  # where each ends, and its job
        self._jobs: list[ChecksumJob] = []

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return checking_pool()

    def add(self, path: Path, identity: tuple[int, ...], records: Sequence[Record], tensor: Tensor | None) -> None:
        """Keep the records of a mapped file until they are needed; check them now if it is not mapped.

        ``tensor``: of the file, if there is one. ``records``: ascending.
        """
        base = None if tensor is None else _start_of_file(tensor.untyped_storage().data_ptr())
        mapped = None if tensor is None or base is None else (base, tensor)
        jobs = jobs_of(path, identity, [record for record in records if record.size], mapped)
        self._jobs += jobs
        if base is None:
            if tensor is not None:
                self._wait(jobs)
            return
        found = [(base + record.start, record.size, job) for job in jobs for record in job.records]
        at = bisect.bisect(self._starts, base)  # files do not overlap in memory
        self._starts[at:at] = [start for start, _, _ in found]
        self._places[at:at] = [(start + size, job) for start, size, job in found]

    def check(self, tensor: Tensor) -> Tensor:
        """Return the tensor, after a check of its record if it is of a mapped file.

        Raises:
            CheckpointError: its file is damaged or cannot be read; names it.
        """
        address = tensor.untyped_storage().data_ptr() if tensor.numel() else 0
        at = bisect.bisect(self._starts, address) - 1
        if at >= 0 and address < self._places[at][0]:
            job: ChecksumJob | None = self._places[at][1]
            asked = job
            ahead = 0
            while job is not None and (job is asked or ahead + job.size <= _AHEAD):
                job.start(self._pool)
                ahead += job.size
                job = job.next
            assert asked is not None
            self._wait([asked])
        return tensor

    def check_all(self) -> None:
        """Check the remaining records. Errors are those of ``check``."""
        self._wait(self._jobs)

    def _wait(self, jobs: Sequence[ChecksumJob]) -> None:
        for job in jobs:
            job.start(self._pool)
        for job in jobs:
            job.wait()


def _start_of_file(address: int) -> int | None:
    """The address of the first byte of the file mapped to ``address``; None if it cannot be found out."""
    maps = Path("/proc/self/maps")  # Linux
    for line in maps.read_text(encoding="utf-8", errors="replace").splitlines() if maps.is_file() else []:
        span, _, offset, _, inode, *_ = line.split()
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= address < high:
            return low - int(offset, 16) if inode != "0" else None
    return None
