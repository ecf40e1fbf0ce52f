"""Files of ``torch.save`` and the metadata of DCP, read as data: nothing in them is imported or executed.

Note [Read as data]
    ``torch.load(weights_only=True)`` makes tensors, numbers, text and plain containers, and refuses every class that is
    not on a list. ``safe_globals`` puts the classes on it that checkpoints of DeepSpeed and Lightning hold: each under
    its name in the file, with a ``Stub`` or one of the functions below in its place. So no class of the file is ever
    needed, and no attribute is set on anything but a stub.

    DCP's ``.metadata`` is a pickle of a protocol that this loader does not read. There ``pickle.Unpickler`` works on
    stubs that are made anew for each file: a pickle may also set attributes of the classes that it names.
"""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pickle
import pickletools
import re
import threading
import zipfile
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import torch

from lt_zero.checkpoint.formats.records import (
    MappedRecords,
    Record,
    check,
    checking_pool,
    identity_of,
    is_values,
    jobs_of,
    records_of,
)
from lt_zero.common.errors import CheckpointError
from lt_zero.common.tensor_tree import dense_tensors
from lt_zero.core.stores.direct_file import unreadable
from lt_zero.core.stores.regular_file import open_bytes, own_path, read_bytes

VERSION = "pytorch-lightning_version"  # in every checkpoint that Lightning wrote
_ZIP, _OLD_FORMAT = b"PK\x03\x04", b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_MOST_METADATA = 1 << 28  # bytes; a million pieces of tensors take a half
_lock = threading.Lock()  # torch's list of admitted classes is one for the process


class Stub:
    """Stand-in for an object of a class that is not loaded: the arguments of its constructor, and its attributes."""

    kind = ""  # the class's name in the file
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Stub:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: Any) -> None:
        """Nothing: a pickle may make an object without it."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        """The class's name in the file: errors quote what a damaged file says."""
        return f"<{self.kind}>"

    def get(self, key: str, default: Any = None) -> Any:
        """An attribute."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


def _stub(name: str) -> type[Stub]:
    return type("Stub", (Stub,), {"kind": name})


def _text(value: Any) -> str:
    """The value of an enumeration's member, which is a string."""
    if not isinstance(value, str):
        raise pickle.UnpicklingError(f"an enumeration of {type(value).__name__}")
    return value


def _path(*parts: Any) -> str:
    return str(PurePosixPath(*map(_text, parts)))


def _number(kind: Any, data: Any) -> Any:
    """A scalar of numpy as a Python number."""
    if not isinstance(kind, Stub) or kind.kind != "numpy.dtype" or not isinstance(data, bytes):
        raise pickle.UnpicklingError("a numpy scalar of an unknown kind")
    code = str(kind.args[0])
    order = ">" if isinstance(kind.state, tuple) and ">" in kind.state[1:2] else "<"
    if code[:1] not in "biufc" or not code[1:].isdigit() or len(data) != int(code[1:]):
        raise pickle.UnpicklingError(f"a numpy scalar of type {code} in {len(data)} bytes")
    return np.frombuffer(data, np.dtype(order + code))[0].item()


_MADE: dict[str, Callable[..., Any]] = {
    "lightning.pytorch.trainer.states.RunningStage": _text,
    "pytorch_lightning.trainer.states.RunningStage": _text,
    "pathlib.PosixPath": _path,
    "pathlib.PurePosixPath": _path,
    "pathlib._local.PosixPath": _path,
    "pathlib._local.PurePosixPath": _path,
    "builtins.bytes": lambda: b"",
    "builtins.frozenset": frozenset,
    "numpy.core.multiarray.scalar": _number,
    "numpy._core.multiarray.scalar": _number,
}
_STUBS = (
    "numpy.dtype",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.config.DeepSpeedConfig",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "argparse.Namespace",
    "datetime.timedelta",
)
_ADMITTED = [*((make, name) for name, make in _MADE.items()), *((_stub(name), name) for name in _STUBS)]
_METADATA = re.compile(  # of DCP
    r"torch\.distributed\.checkpoint\.(filesystem\._Storage(Info|Prefix)|metadata\.(\w+))|pathlib(\._local)?\.PosixPath"
    r"|torch\.serialization\._get_layout"
)


@contextlib.contextmanager
def empty_bytes() -> Iterator[None]:
    """Context in which torch reads ``b""`` with ``weights_only=True``: pickle writes it as a call of ``bytes``."""
    name = "builtins.bytes"
    with _lock, torch.serialization.safe_globals([(_MADE[name], name)]):
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


def load(
    path: Path,
    start: int = 0,
    stop: int | None = None,
    inert: Collection[str] = (),
    mapped: MappedRecords | None = None,
) -> Any:
    """The object of a file, or of a part of one, that ``torch.save`` wrote. See Note [Read as data].

    Tensors of a whole file are mapped and never written. ``mapped`` gets their records, and must be asked before their
    values are used; without it, all are checked now. A part (bytes ``start`` to ``stop``) is read and checked at once.
    So is a file of torch before 1.6, but it has no checksums. ``inert``: names of further classes; their objects become
    a ``Stub``.

    Raises:
        CheckpointError: the file is missing or damaged, or has refused content; names it.
    """
    with opened(path, start, stop) as file, ThreadPoolExecutor(1) as beside:
        head = file.read(len(_OLD_FORMAT))
        if not head.startswith(_ZIP) and head != _OLD_FORMAT:
            raise CheckpointError(f"{path} is no file that torch.save wrote (it begins with {head[:8]!r}).")
        try:
            records = records_of(file) if head != _OLD_FORMAT else []
            check(file, [record for record in records if not is_values(record)], path)
            file.seek(0)
            maps = head != _OLD_FORMAT and stop is None
            values = [record for record in records if is_values(record)]
            checking = None if maps else beside.submit(_check_again, path, start, stop, values)
            admitted = [*_ADMITTED, *((_stub(name), name) for name in inert)]
            with _lock, torch.serialization.safe_globals(admitted):  # type: ignore[arg-type]
                source = own_path(file.fileno(), path) if maps else file
                value = torch.load(source, map_location="cpu", weights_only=True, mmap=maps)
            if checking is not None:
                checking.result()
            tensors = dense_tensors(value)
        except CheckpointError:
            raise
        except Exception as error:  # a damaged file may be anything to the loader
            raise explained(error, path) from None
        if maps:
            place = mapped or MappedRecords()
            place.add(path, identity_of(file), values, next((t for t in tensors if t.numel()), None))
            if mapped is None:
                place.check_all()
    return value


def _check_again(path: Path, start: int, stop: int | None, records: list[Record]) -> None:
    """Check records while another thread reads them: the disk reads them once."""
    with opened(path, start, stop) as file:
        check(file, records, path)


def check_file(path: Path, number: int = 0, of: int = 1) -> None:
    """Compare the checksums of a file of ``torch.save`` with its content.

    Each of several processes does a share of the values, and the rest: what could fail at once in the loader.

    Raises:
        CheckpointError: it is damaged, or cannot be read; names it.
    """
    with opened(path) as file:
        try:
            records = records_of(file) if file.read(len(_ZIP)) == _ZIP else []
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


def has_checksums(path: Path, start: int = 0, stop: int | None = None) -> bool:
    """Read all of a file of ``torch.save`` and compare its checksums; False if it has none.

    Raises:
        CheckpointError: a record is damaged; names it.
    """
    with opened(path, start, stop) as file:
        if file.read(len(_ZIP)) != _ZIP:
            return False
        try:
            records = records_of(file)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, OSError) as error:
            raise explained(error, path) from error
        if any(record.crc is None for record in records):
            return False
        check(file, records, path)
    return True


def load_metadata(path: Path) -> Any:
    """The object of a ``.metadata`` file, with a ``Stub`` for each object of a class. See Note [Read as data].

    Raises:
        CheckpointError: the file is damaged, or names what no metadata needs.
    """
    try:
        data = read_bytes(path, _MOST_METADATA)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        for code, number, _ in pickletools.genops(data):
            # The memo is a list: a large number would make room for as many entries.
            if "PUT" in code.name and (number or 0) > len(data):
                raise ValueError(f"{code.name} of {number}")
        return _Unpickler(data).load()
    except Exception as error:  # a damaged file may be anything to the loader
        raise explained(error, path) from None


class _Unpickler(pickle.Unpickler):
    """Makes stubs, sizes, dtypes and plain containers."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._known: dict[str, Any] = {"torch.Size": tuple, "collections.OrderedDict": collections.OrderedDict}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if _METADATA.fullmatch(full):
            self._known.setdefault(full, _stub(full))
        if full not in self._known:
            raise pickle.UnpicklingError(f"GLOBAL {full}")
        return self._known[full]
