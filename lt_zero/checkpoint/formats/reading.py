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
import io
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from lt_zero.checkpoint.formats.mapped_records import MappedRecords
from lt_zero.checkpoint.native.records import Record, check, identity_of, is_values, records_of
from lt_zero.checkpoint.native.saved_file import EMPTY_BYTES, ZIP, admitting, explained, opened
from lt_zero.common.errors import CheckpointError
from lt_zero.common.tensor_tree import dense_tensors
from lt_zero.core.stores.direct_file import unreadable
from lt_zero.core.stores.regular_file import own_path, read_bytes

_OLD_FORMAT = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_MOST_METADATA = 1 << 28  # bytes; a million pieces of tensors take a half


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
    EMPTY_BYTES: lambda: b"",
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
        if not head.startswith(ZIP) and head != _OLD_FORMAT:
            raise CheckpointError(f"{path} is no file that torch.save wrote (it begins with {head[:8]!r}).")
        try:
            records = records_of(file) if head != _OLD_FORMAT else []
            check(file, [record for record in records if not is_values(record)], path)
            file.seek(0)
            maps = head != _OLD_FORMAT and stop is None
            values = [record for record in records if is_values(record)]
            checking = None if maps else beside.submit(_check_again, path, start, stop, values)
            admitted = [*_ADMITTED, *((_stub(name), name) for name in inert)]
            with admitting(admitted):
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


def has_checksums(path: Path, start: int = 0, stop: int | None = None) -> bool:
    """Read all of a file of ``torch.save`` and compare its checksums; False if it has none.

    Raises:
        CheckpointError: a record is damaged; names it.
    """
    with opened(path, start, stop) as file:
        if file.read(len(ZIP)) != ZIP:
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
