"""Records of files of ``torch.save``, and what compares them with their checksums.

Note [Checked when used]
    Files of ``torch.save`` are zips with a CRC for each tensor; torch does not check it. Their tensors are mapped into
    memory, so the address of a tensor leads to its record. Before a tensor is used, threads read its record from the
    file, piece by piece. That fills the page cache, and the cache serves the mapping, so the disk reads each byte once.
    The threads read a little ahead, and the caller waits for no record that it does not use. A disk that fails is an
    error with the file's name here, and would be a SIGBUS in the mapping. For the latter reason files without checksums
    (safetensors) are read in the same way. A run that goes on may replace or remove a mapped file; its bytes are then
    read from memory, where they are still those of the old file.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

from torch import Tensor

from lt_zero.common.errors import CheckpointError
from lt_zero.core.stores.direct_file import unreadable
from lt_zero.core.stores.regular_file import open_regular

PIECE = 256 << 10  # bytes that are read at a time
_PART = 16 << 20  # bytes of a large record that a thread checks
_JOB = 4 << 20  # bytes of records that are checked together, if they are small
_THREADS = 4
_HEADER = 30  # bytes of a record's header in a zip, before its name


class Record(NamedTuple):
    """A part of a file: its name and place in bytes, and its checksum if it has one."""

    name: str
    start: int
    size: int
    crc: int | None = None


def records_of(file: IO[bytes]) -> list[Record]:
    """The records of a zip, in the order of their places. See Note [Checked when used].

    Writers may leave checksums out; those of the records that every file has tell whether they did.

    Raises:
        ValueError, zipfile.BadZipFile: a record is compressed, lies outside of the file or in another record.
    """
    size = file.seek(0, os.SEEK_END)
    found = []
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                # torch would take compressed bytes for values.
                raise ValueError(f"its record {info.filename} is compressed")
            file.seek(info.header_offset)
            header = file.read(_HEADER)
            if len(header) < _HEADER or header[:4] != b"PK\x03\x04":
                raise zipfile.BadZipFile(f"its record {info.filename} is not where the directory says")
            inner = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            name = info.filename.partition("/")[2] or info.filename
            found.append(Record(name, info.header_offset + _HEADER + inner, info.file_size, info.CRC))
    found.sort(key=lambda record: (record.start, record.size))
    for record, after in zip(found, [record.start for record in found[1:]] + [size], strict=True):
        if record.start + record.size > after:
            raise ValueError(f"its record {record.name} of {record.size} bytes does not fit into the file")
    if not any(_crc(file, record) == record.crc for record in found if not is_values(record)):
        found = [record._replace(crc=None) for record in found]
    return found


def is_values(record: Record) -> bool:
    """True if a record has the values of a tensor; the others are small."""
    return record.name.startswith("data/")


class _ReadBuffer(threading.local):
    """Memory to read into, of a thread: small enough to stay in the processor's cache for the checksum."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(PIECE))


_buffer = _ReadBuffer()


def _crc(file: IO[bytes], record: Record) -> int:
    file.seek(record.start)
    view = _buffer.view
    total = 0
    left = record.size
    while left and (count := file.readinto(view[: min(PIECE, left)])):  # type: ignore[attr-defined]
        total, left = zlib.crc32(view[:count], total), left - count
    if left:
        raise EOFError(f"record {record.name} is cut off")
    return total


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo that of the CRC, as zlib represents them."""
    product = 0
    while a:
        if a & 1 << 31:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product


@functools.lru_cache(64)
def _shift(nbytes: int) -> int:
    """The factor of a CRC if ``nbytes`` more bytes follow: x to the power of their bits."""
    power = 1 << 31
    square = 1 << 30
    exponent = nbytes * 8
    while exponent:
        power = _times(power, square) if exponent & 1 else power
        square, exponent = _times(square, square), exponent >> 1
    return power


def joined(first: int, second: int, nbytes: int) -> int:
    """The CRC of bytes with the CRC ``first``, and ``nbytes`` after them with ``second``.

    >>> joined(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
    True
    """
    return _times(_shift(nbytes), first) ^ second


def check(file: IO[bytes], records: Iterable[Record], path: Path) -> None:
    """Read records from an open file.

    Raises:
        CheckpointError: a checksum is wrong, or the file cannot be read; names it and the record.
    """
    for record in records:
        with _naming(path):
            crc = _crc(file, record)
        _compare(record, crc, path)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error
    except EOFError as error:
        raise CheckpointError(f"{path} is damaged: its {error}. Take another checkpoint.") from error


def _compare(record: Record, crc: int, path: Path) -> None:
    if record.crc not in (None, crc):
        raise CheckpointError(
            f"{path} is damaged: the checksum of its record {record.name} is wrong. Take another checkpoint."
        )


_Mapped = tuple[int, Tensor] | None


class ChecksumJob:
    """Records of a file that are checked together, at most once: neighbours, or a large one in several threads.

    ``mapped``: the address of the mapped file, and a tensor that keeps it mapped; None: it is not mapped. ``place``:
    where the file is opened, if not at ``path``.
    """

    place: str | None = None

    def __init__(self, path: Path, identity: tuple[int, ...], records: Sequence[Record], mapped: _Mapped) -> None:
        self.path = path
        self.records = records
        self._identity = identity
        self._mapped = mapped
        self.size = sum(record.size for record in records)
        self.next: ChecksumJob | None = None
        self._started: list[Future[list[int]]] = []
        self._right = False
        self._lock = threading.Lock()

    def start(self, pool: ThreadPoolExecutor) -> None:
        """Begin, unless it has begun."""
        with self._lock:
            if self._started:
                return
            parts: list[Sequence[Record]] = [self.records]
            if self.size > 2 * _PART:
                (whole,) = self.records
                cuts = range(0, whole.size, _PART)
                parts = [[Record(whole.name, whole.start + cut, min(_PART, whole.size - cut))] for cut in cuts]
            self._started = [pool.submit(self._read, part) for part in parts]

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            CheckpointError: see ``check``; or the file was changed, or replaced while it is not mapped.
        """
        if self._right:
            # Return at once: thousands of records of a job ask one by one.
            return
        found = [future.result() for future in self._started]
        crcs = found[0]
        for number, (crc,) in enumerate(found[1:], 1):
            crcs = [joined(crcs[0], crc, min(_PART, self.size - _PART * number))]
        for record, crc in zip(self.records, crcs, strict=True):
            _compare(record, crc, self.path)
        self._right = True

    def _read(self, records: Sequence[Record]) -> list[int]:
        """The CRC of each."""
        with _naming(self.path):
            try:
                file = open(open_regular(self.place or self.path), "rb", buffering=0)  # noqa: SIM115
            except FileNotFoundError:
                if self._mapped is None:
                    raise
                return [_crc_in_memory(self._mapped[0], record) for record in records]
            with file:
                found = identity_of(file)
                if found[:2] != self._identity[:2] and self._mapped is not None:
                    return [_crc_in_memory(self._mapped[0], record) for record in records]
                if found != self._identity:
                    raise CheckpointError(f"{self.path} was changed or replaced while it was read. Load it again.")
                return [_crc(file, record) for record in records]


def _crc_in_memory(base: int, record: Record) -> int:
    return zlib.crc32((ctypes.c_char * record.size).from_address(base + record.start))


def identity_of(file: IO[bytes]) -> tuple[int, ...]:
    """The identity of an open file, which a change of its content changes."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def jobs_of(
    path: Path, identity: tuple[int, ...], records: Sequence[Record], mapped: _Mapped = None
) -> list[ChecksumJob]:
    """Neighbours of a file together, up to ``_JOB`` bytes. ``mapped``: see ``ChecksumJob``."""
    groups: list[list[Record]] = []
    filled = _JOB
    for record in records:
        if filled + record.size > _JOB:
            groups.append([])
            filled = 0
        groups[-1].append(record)
        filled += record.size
    jobs = [ChecksumJob(path, identity, group, mapped) for group in groups]
    for job, after in zip(jobs, jobs[1:], strict=False):
        job.next = after
    return jobs


def checking_pool() -> ThreadPoolExecutor:
    """Threads that read and check."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="lt_zero-checksums")
