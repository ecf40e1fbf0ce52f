"""Files that ``torch.load`` reads, written as a stream: one tensor at a time, and their containers last.

Note [Order in the file]
    ``torch.save`` needs the whole object first. A zip has its directory at the end, so the records may have any order:
    here the tensors' values come first, and the pickle that refers to them by number comes last. ``torch.load`` finds
    them through the directory, also with ``mmap=True`` and ``weights_only=True``.

Note [Each tensor a file]
    ``torch.distributed.checkpoint`` reads a tensor as bytes ``[offset, offset + length)`` of a file, which must be a
    file of ``torch.save``. With ``blobs=True`` they are: the values stand between the bytes that torch.save writes
    before and behind them (``_save_framing``). The directory at the end points to the header directly before the
    values, so the whole is a file of ``torch.save``, too.

Note [Checksums of values]
    A zip has a CRC of each record. torch does not check it, other readers do. It costs a pass over the values, so with
    ``blobs=True`` it is 0 (as with ``torch.serialization.set_crc32_options(False)``): the manifest has checksums there.
    Otherwise it stands behind the values, in a data descriptor.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lt_zero.core.stores.pinned import view_of

_U32, _DESCRIBED, _PADDING = 0xFFFFFFFF, 0x0008, 0x5A4C  # of zip: largest short size, flag of a descriptor, a tag
ALIGNMENT = 64  # bytes, of values in the file: as torch.save does, for mmap
# The classes that torch.save names for a storage; those of other dtypes are untyped.
_STORAGES: dict[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex128: torch.ComplexDoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
}

Write = Callable[[bytes | Tensor], object]


class TensorRecord(NamedTuple):
    """A tensor in a ``TorchFile``: where its (row-major) values begin, and the number of its record.

    ``blob``: offset and length of the bytes that are a file of their own, (0, 0) without ``blobs``. ``first``: its
    first element's number in the record.
    """

    start: int
    blob: tuple[int, int]
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: int
    first: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TorchFile:
    """A file that ``torch.load(path, weights_only=True)`` reads, written in order and without holding any tensor.

    Args:
        write: takes the file's bytes, strictly in order: ``bytes``, or the values of a tensor as a 1D uint8 CPU tensor
            that shares its memory (and is the caller's again when ``write`` has returned).
        blobs: make each tensor readable on its own, and leave out checksums. About 1.5 KB more for each; see
            Note [Each tensor a file].
    """

    def __init__(self, write: Write, blobs: bool = False) -> None:
        self._write, self._blobs = write, blobs
        self._records: list[zipfile.ZipInfo] = []
        self._stored: list[TensorRecord] = []
        self._finished = False
        self.position = 0  # bytes written so far

    def add(self, tensor: Tensor) -> TensorRecord:
        """Write a tensor's values now: dense, contiguous and on the CPU. Parameters are saved as plain tensors.

        Raises:
            ValueError: the tensor is not, or the file is finished; nothing was written.
        """
        return self._add(tuple(tensor.shape), tensor.dtype, [_bytes_of(tensor, tensor.dtype)])

    def add_parts(self, shape: Sequence[int], dtype: torch.dtype, parts: Iterable[Tensor]) -> TensorRecord:
        """Write a tensor from parts, row-major: contiguous CPU tensors of any shape.

        Raises:
            ValueError: a part has another dtype, or all of them another number of elements. The file is of no use then.
        """
        return self._add(tuple(shape), dtype, (_bytes_of(part, dtype) for part in parts))

    def _add(self, shape: tuple[int, ...], dtype: torch.dtype, parts: Iterable[Tensor]) -> TensorRecord:
        """``add_parts`` of parts as 1D uint8."""
        if self._finished:
            raise ValueError("The file is finished: nothing can be added after its directory.")
        key, first = len(self._records), self.position
        record = zipfile.ZipInfo(f"archive/data/{key}")
        record.file_size = record.compress_size = math.prod(shape) * dtype.itemsize
        record.CRC = 0
        large = record.file_size >= _U32
        if self._blobs:
            first += -first % ALIGNMENT
            head, tail, header = _save_framing(shape, dtype)
            record.header_offset = first + header
            self._put(bytes(first - self.position) + head)
        else:
            record.flag_bits, record.header_offset = _DESCRIBED, first
            # The extra field of a record may hold anything that begins with a tag and a length.
            room = -(first + len(record.FileHeader(large)) + 4) % ALIGNMENT
            record.extra = struct.pack("<HH", _PADDING, room) + bytes(room)
            self._put(record.FileHeader(large))
            record.extra = b""
        start = self.position
        for data in parts:
            self._put(data)
            if data.numel() and not self._blobs:
                record.CRC = zlib.crc32(view_of(data), record.CRC)
        written = self.position - start
        if written != record.file_size:
            raise ValueError(f"{written} bytes came of a tensor {shape} of {dtype}, not {record.file_size}.")
        if not self._blobs:
            tail = struct.pack(f"<LL{'QQ' if large else 'LL'}", 0x08074B50, record.CRC, written, written)
        self._put(tail)
        blob = (first, self.position - first) if self._blobs else (0, 0)
        self._records.append(record)
        self._stored.append(TensorRecord(start, blob, shape, dtype, key))
        return self._stored[-1]

    def finish(self, value: Any) -> None:
        """Write ``value``, which ``torch.load`` returns, and the directory.

        In its nested containers a ``TensorRecord`` of this file stands for its tensor; where it occurs twice, both have
        one storage. Tensors are added (whole and contiguous, views do not stay views).

        Raises:
            ValueError: a ``TensorRecord`` of another file; a tensor that is not dense; the file is finished.
            pickle.PicklingError, TypeError, AttributeError: something in it cannot be pickled; names it.
        """
        if self._finished:
            raise ValueError("The file is finished already.")
        buffer = io.BytesIO()
        _TensorPickler(buffer, self).dump(value)
        self._finished = True
        end = _HeaderCapture()
        end.skipped = self.position
        with zipfile.ZipFile(end, "w") as archive:  # type: ignore[call-overload]
            archive.filelist += self._records
            for name, content in (("data.pkl", buffer.getvalue()), ("byteorder", sys.byteorder), ("version", "3\n")):
                archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
        self._put(bytes(end.data))

    def stored(self, value: TensorRecord | Tensor) -> TensorRecord:
        """The record of a tensor in this file; the tensor is added now if it is not a ``TensorRecord``."""
        if isinstance(value, TensorRecord):
            if value.key >= len(self._stored) or self._stored[value.key].start != value.start:
                raise ValueError(f"{value} is of another file: add the tensor to this one.")
            return value
        value = value.detach()
        if value.layout == torch.strided:  # otherwise ``add`` raises an error that names the layout
            value = value.resolve_conj().resolve_neg().cpu().contiguous()
        return self.add(value)

    def record_size(self, stored: TensorRecord) -> int:
        """Bytes of the record that a tensor is in."""
        return self._records[stored.key].file_size

    def _put(self, data: bytes | Tensor) -> None:
        size = data.numel() if isinstance(data, Tensor) else len(data)
        if size:
            self._write(data)
            self.position += size


def _bytes_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory of a tensor of this dtype as 1D uint8, not copied."""
    if tensor.dtype != dtype:
        raise ValueError(f"A part is {tensor.dtype}, its tensor {dtype}.")
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"Only dense, contiguous tensors on the CPU can be saved, not one of shape {tuple(tensor.shape)},"
            f" {tensor.layout}, strides {tensor.stride() if tensor.layout == torch.strided else 'none'}, on"
            f" {tensor.device}."
        )
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise ValueError("Quantized, conjugated and negated views cannot be saved: resolve or dequantize them first.")
    plain = tensor.detach()
    if type(plain) is not Tensor:
        if type(plain).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # of a DTensor a part is in this memory
            kind = f"{type(plain).__module__}.{type(plain).__qualname__}"
            raise ValueError(f"A {kind} cannot be saved: make it a plain tensor.")
        plain = plain.as_subclass(Tensor)
    return plain.reshape(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


class _StorageId(tuple[Any, ...]):
    """Pickled as a persistent id."""


class _TensorPickler(pickle.Pickler):
    """Pickles each ``TensorRecord``, and each tensor once it is in the file, as torch.save pickles a tensor."""

    def __init__(self, buffer: io.BytesIO, file: TorchFile) -> None:
        super().__init__(buffer, protocol=2)
        self._file = file

    def persistent_id(self, obj: Any) -> Any:
        return tuple(obj) if type(obj) is _StorageId else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, (TensorRecord, Tensor)):
            return NotImplemented
        stored = self._file.stored(obj)
        kind, strides, rebuild, more = _form_of(stored.shape, stored.dtype)
        nbytes = self._file.record_size(stored)
        numel = nbytes if kind is torch.UntypedStorage else nbytes // stored.dtype.itemsize
        storage = _StorageId(("storage", kind, str(stored.key), "cpu", numel))
        # A new OrderedDict for each tensor, since it becomes the tensor's dict of hooks.
        return rebuild, (storage, stored.first, stored.shape, strides, False, OrderedDict(), *more)


@functools.lru_cache(4096)
def _form_of(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[type, tuple[int, ...], Any, tuple[Any, ...]]:
    """The pickle of a tensor by torch.save: class of its storage, strides, function, last arguments."""
    rebuild, arguments = torch.empty(0, dtype=dtype, device="cpu").__reduce_ex__(2)
    strides = torch.empty(shape, device="meta").stride()
    return _STORAGES.get(dtype, torch.UntypedStorage), strides, rebuild, tuple(arguments[6:])


class _HeaderCapture:
    """A file that keeps what is written to it, except the bytes at ``address``, which are not touched."""

    address = -1
    skipped = 0  # bytes before, or not kept

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Any) -> int:
        nbytes = memoryview(data).nbytes
        if nbytes and self.address >= 0 and np.frombuffer(data, np.uint8).ctypes.data == self.address:
            self.skipped += nbytes
        else:
            self.data += data
        return nbytes

    def tell(self) -> int:
        return self.skipped + len(self.data)

    def flush(self) -> None:
        """Nothing."""


@functools.lru_cache(4096)
def _save_framing(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes, int]:
    """The bytes of torch.save before and behind a tensor's values, and the offset of the header before these.

    Without checksums it does not depend on the values, which are not read here. The option is one for the process, so a
    torch.save of another thread may write no checksums at this moment.
    """
    template = torch.empty(shape, dtype=dtype, device="cpu")
    recorder = _HeaderCapture()
    recorder.address = template.data_ptr()
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(template, recorder)  # type: ignore[arg-type]
    finally:
        torch.serialization.set_crc32_options(checksums)
    data = bytes(recorder.data)
    header = data.index(b"archive/data/0") - 30
    values = header + 30 + sum(struct.unpack_from("<HH", data, header + 26))
    return data[:values], data[values:], header
