"""Files of ``torch.save``: opened, compared with their checksums, and errors that name them."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from lt_zero.checkpoint.native.records import check, checking_pool, identity_of, is_values, jobs_of, records_of
from lt_zero.common.errors import CheckpointError
from lt_zero.core.stores.direct_file import unreadable
from lt_zero.core.stores.regular_file import open_bytes, own_path

VERSION = "pytorch-lightning_version"  # in every checkpoint that Lightning wrote
ZIP = b"PK\x03\x04"  # the first bytes of a file
EMPTY_BYTES = "builtins.bytes"  # the class that an empty ``bytes`` is an object of
_lock = threading.Lock()  # torch's list of admitted classes is one for the process


@contextlib.contextmanager
def admitting(classes: Sequence[Any]) -> Iterator[None]:
    """Context in which torch reads these classes with ``weights_only=True``: pairs of a callable and a name."""
    with _lock, torch.serialization.safe_globals(list(classes)):
        yield


@contextlib.contextmanager
def empty_bytes() -> Iterator[None]:
    """Context in which torch reads ``b""`` with ``weights_only=True``: pickle writes it as a call of ``bytes``."""
    with admitting([(lambda: b"", EMPTY_BYTES)]):
        yield


@contextlib.contextmanager
def opened(path: Path, start: int = 0, stop: int | None = None) -> Iterator[IO[bytes]]:
    """Context that yields a regular file, or its bytes ``start`` to ``stop`` as a file."""
    try:
        file = open_bytes(path)
    except OSError as error:
        raise unreadable(path, error) from error
    with file:
        size = os.fstat(file.fileno()).st_size
        if stop is None:
            yield file
        elif not 0 <= start <= stop <= size:
            raise CheckpointError(
                f"{path} has {size} bytes, but the checkpoint says that bytes {start} to {stop} of it are in use: it "
                "was cut off or replaced. Take another checkpoint."
            )
        else:
            yield io.BufferedReader(_Part(file, start, stop - start))


class _Part(io.RawIOBase):
    """``size`` bytes of a file from ``start``, as a file: it may be a tensor of gigabytes, which is held only once."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file = file
        self._start = start
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._position)
        view = memoryview(buffer)[: max(0, self._size - self._position)]
        read: int = self._file.readinto(view)  # type: ignore[attr-defined]
        self._position += read
        return read


def check_file(path: Path, number: int = 0, of: int = 1) -> None:
    """Compare the checksums of a file of ``torch.save`` with its content.

    Each of several processes does a share of the values, and the rest: what could fail at once in the loader.

    Raises:
        CheckpointError: it is damaged, or cannot be read; names it.
    """
    with opened(path) as file:
        try:
            records = records_of(file) if file.read(len(ZIP)) == ZIP else []
        except Exception as error:
            raise explained(error, path) from None
        check(file, [record for record in records if not is_values(record)], path)
        values = [record for record in records if is_values(record) and record.size]
        jobs = jobs_of(path, identity_of(file), values)[number::of]
        with checking_pool() as pool:
            for job in jobs:
                # Keep a path to this file: a run that goes on may replace it meanwhile.
                job.place = own_path(file.fileno(), path)
                job.start(pool)
            for job in jobs:
                job.wait()


def explained(error: Exception, path: Path) -> CheckpointError:
    """The error of a reader of ``torch.save``'s files, as one that names the file and the remedy."""
    if isinstance(error, OSError) and error.errno is not None:
        return unreadable(path, error)
    text = str(error).split("\n\nCheck the documentation")[0]
    refused = re.search(r"GLOBAL (\S+)", text)
    if refused is not None:
        return CheckpointError(
            f"{path} holds {refused[1]}, which is not read, because loading it could run code. Save the checkpoint "
            f"without it; or, if its content is not needed, convert it with `lt-zero import --inert {refused[1]}`."
        )
    if "Unsupported operand" in text:
        return CheckpointError(
            f"{path} is damaged, or was saved with another pickle protocol than torch.save's own, and is not read. "
            "Save it without `pickle_protocol`, or take another copy."
        )
    reason = text.split("\n\n")[-1].split("\n")[0] if isinstance(error, pickle.UnpicklingError) else text.split("\n")[0]
    return CheckpointError(
        f"{path} is damaged: it cannot be read ({type(error).__name__}: {reason}). Take another checkpoint."
    )
