"""Files that ``torch.save`` wrote: their objects, with tensors that stay in the file until they are read.

Note [Where a tensor's bytes are]
    A file is a zip archive of uncompressed records: ``data.pkl`` and one per storage. Python's ``zipfile`` finds the
    records. The older format (``_use_new_zipfile_serialization=False``; DeepSpeed has a setting for it) is a row of
    pickles, and the storages behind them in the order of the last pickle, each after its length. In both the bytes
    of an element are at a known place, so a range of a tensor is read with one request, and nothing else is.

Note [Checksums]
    Records of a zip archive have a CRC-32 of all of their bytes, so reading a range cannot check it. ``verify`` reads
    everything for that. Writers may leave checksums out; those of the small records tell whether they did.
"""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any

import torch

from lt_zero.checkpoint.formats.admitted import Global, Maker, Refused
from lt_zero.checkpoint.formats.handles import Storage, Window, expect, is_count, tensor, typed_tensor, with_attributes
from lt_zero.checkpoint.formats.unpickle import DAMAGE, Machine, load_pickle
from lt_zero.common.errors import CheckpointError

_STORAGES = {
    f"{module}.{name}Storage": getattr(torch, dtype)
    for module in ("torch", "torch.storage")
    for name, dtype in {
        "Double": "float64",
        "Float": "float32",
        "Half": "float16",
        "BFloat16": "bfloat16",
        "Long": "int64",
        "Int": "int32",
        "Short": "int16",
        "Char": "int8",
        "Byte": "uint8",
        "Bool": "bool",
        "ComplexFloat": "complex64",
        "ComplexDouble": "complex128",
        "Untyped": "uint8",
    }.items()
}
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_START = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_CRC_STEP = 1 << 22


class TorchReader:
    """The object of a file, or of a part of one, that ``torch.save`` wrote; ``value`` has ``Handle`` for tensors.

    Args:
        path: the file.
        start, stop: the part, in bytes; default: all of it.
        inert: names of classes whose objects are kept as data, beside those that the formats need.

    Raises:
        CheckpointError: it is damaged, or holds what is not read; names the file.
    """

    def __init__(self, path: Path, start: int = 0, stop: int | None = None, inert: Collection[str] = ()) -> None:
        self.path = path
        self._part = start, stop
        self._inert = inert
        self._records: dict[str, zipfile.ZipInfo] = {}
        self._legacy: dict[str, tuple[torch.dtype, int]] = {}  # key -> dtype, elements
        self._places: dict[str, int] = {}  # of storages: bytes from the start of the file
        with Window(path, start, stop) as window:
            self._window = window
            head = window.read(len(_LEGACY_START))
            window.seek(0)
            try:
                self.value = self._from_pickles() if head == _LEGACY_START else self._from_zip(head)
            except (*DAMAGE, zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError) as error:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f"{path} is damaged: {error}. Take another checkpoint.") from error

    # ---- zip archives ------------------------------------------------------------------------------------------

    def _from_zip(self, head: bytes) -> Any:
        if head[:4] != b"PK\x03\x04":
            raise CheckpointError(f"{self.path} is no file that torch.save wrote (it begins with {head[:8]!r}).")
        with zipfile.ZipFile(self._window) as archive:
            records = archive.infolist()
        folder = records[0].filename.split("/")[0] + "/" if records else ""
        self._records = {info.filename.removeprefix(folder): info for info in records}
        if len(self._records) != len(records) or "data.pkl" not in self._records:
            raise ValueError("it has no record data.pkl, or a record twice")
        if "byteorder" in self._records and self._content("byteorder") != b"little":
            raise CheckpointError(f"{self.path} was written on a big-endian machine, which is not supported.")
        data = self._content("data.pkl")
        return load_pickle(self._machine(self._zip_storage), data, len(data), self.path)

    def _place(self, name: str) -> int:
        """Where a record's bytes begin in the window."""
        info = self._records[name]
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise ValueError(f"its record {name} is compressed or encrypted")
        self._window.seek(info.header_offset)
        magic, lengths = struct.unpack("<4s22x4s", self._window.read(30))
        place: int = info.header_offset + 30 + sum(struct.unpack("<HH", lengths))
        if magic != b"PK\x03\x04" or place + info.file_size > self._window.size:
            raise ValueError(f"its record {name} is not where it should be")
        return place

    def _content(self, name: str) -> bytes:
        self._window.seek(self._place(name))
        return self._window.read(self._records[name].file_size)

    def _zip_storage(self, identity: Any) -> Storage:
        dtype, key, numel = self._identified(identity, 5)
        name = f"data/{key}"
        if name not in self._places:
            self._places[name] = self._place(name)
        if numel * dtype.itemsize > self._records[name].file_size:
            raise ValueError(f"its record {name} is shorter than the {numel} elements of its storage")
        return Storage(self.path, self._part[0] + self._places[name], numel * dtype.itemsize, dtype)

    def verify(self) -> bool:
        """Read everything and compare checksums; False if the file has none. See Note [Checksums].

        Raises:
            CheckpointError: a record is not what was written; names it.
        """
        with Window(self.path, *self._part) as window:
            small = [name for name in ("byteorder", "version") if name in self._records]
            if not any(self._is_intact(window, name) for name in small):
                return False
            for name in self._records:
                if not self._is_intact(window, name):
                    raise CheckpointError(
                        f"{self.path} is damaged: the checksum of its record {name} is wrong. Take another checkpoint."
                    )
        return True

    def _is_intact(self, window: Window, name: str) -> bool:
        info, place = self._records[name], self._places.get(name)
        if place is None:
            self._window = window
            place = self._place(name)
        window.seek(place)
        found, left = 0, info.file_size
        while left:
            data = window.read(min(left, _CRC_STEP))
            if not data:
                return False
            found, left = zlib.crc32(data, found), left - len(data)
        return found == info.CRC

    # ---- the older format --------------------------------------------------------------------------------------

    def _from_pickles(self) -> Any:
        """See Note [Where a tensor's bytes are]."""
        machine = self._machine(self._legacy_storage)
        with _buffered(self._window) as stream:
            size = self._window.size
            header = [load_pickle(Machine(), stream, size, self.path) for _ in range(3)]
            if header[0] != _LEGACY_MAGIC or not isinstance(header[2], dict) or not header[2].get("little_endian"):
                raise ValueError("its header is not that of a file written on a little-endian machine")
            before = stream.tell()
            load_pickle(machine, stream, size, self.path)  # tells dtypes, on which offsets depend
            keys = load_pickle(Machine(), stream, size, self.path)
            place = stream.tell()
            for key in keys:
                dtype, numel = self._legacy[key]
                stream.seek(place)
                (stored,) = struct.unpack("<q", stream.read(8))
                if stored != numel or place + 8 + numel * dtype.itemsize > size:
                    raise ValueError(f"its storage {key} has {stored} elements, not {numel}, or is cut off")
                self._places[key] = place + 8
                place += 8 + numel * dtype.itemsize
            stream.seek(before)
            return load_pickle(machine, stream, size, self.path)

    def _legacy_storage(self, identity: Any) -> Storage:
        dtype, key, numel = self._identified(identity, 6)
        if identity[5] is not None:
            raise Refused("a view of a storage, as torch wrote them before 1.0")
        if self._legacy.setdefault(key, (dtype, numel)) != (dtype, numel):
            raise ValueError(f"its storage {key} has two kinds")
        return Storage(self.path, self._part[0] + self._places.get(key, 0), numel * dtype.itemsize, dtype)

    # ---- both --------------------------------------------------------------------------------------------------

    def _identified(self, identity: Any, length: int) -> tuple[torch.dtype, str, int]:
        if not isinstance(identity, tuple) or len(identity) != length or identity[0] != "storage":
            raise ValueError("a persistent id is none of a storage")
        _, kind, key, _, numel, *_ = identity
        dtype = _STORAGES.get(str(kind)) if isinstance(kind, Global) else None
        if dtype is None or not isinstance(key, str) or not is_count(numel):
            raise ValueError("a persistent id is none of a storage that can be read")
        return dtype, key, numel

    def _machine(self, persistent: Any) -> Machine:
        makers: dict[str, Maker] = {
            "torch._utils._rebuild_tensor_v2": tensor,
            "torch._utils._rebuild_tensor_v3": typed_tensor,
            "torch._utils._rebuild_parameter": lambda machine, args: expect(args[0]),
            "torch._tensor._rebuild_from_type_v2": with_attributes,
        }
        kinds = {*_STORAGES, "torch.Tensor", "torch.nn.parameter.Parameter"}
        return Machine(makers, persistent, self._inert, kinds)


@contextlib.contextmanager
def _buffered(window: Window) -> Iterator[IO[bytes]]:
    stream = _Bounded(window)
    try:
        yield stream
    finally:
        stream.detach()


class _Bounded(io.BufferedReader):
    """Makes no room for what is not there: a damaged length may be anything."""

    def __init__(self, window: Window) -> None:
        super().__init__(window)
        self._size = window.size

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > self._size:
            raise ValueError(f"{size} bytes are expected, in a file of {self._size}")
        return super().read(size)

    def readline(self, size: int | None = -1) -> bytes:
        return super().readline(1 << 16)
