"""Files that ``torch.load`` reads, written as a stream: one tensor at a time, and what holds them last.

Note [Order in the file]
    ``torch.save`` wants the whole object first. A zip has its directory at the end, so the records can come in any
    order: here the tensors' values come first, each when it is there, and the pickle that refers to them by number
    comes last. ``torch.load`` finds all of it through the directory, also with ``mmap=True`` and ``weights_only=True``.

Note [Two zips in one]
    ``torch.distributed.checkpoint`` reads a tensor as bytes ``[offset, offset + length)`` of a file and expects them to
    be a file of ``torch.save`` of their own. With ``blobs=True`` they are, without a second copy of the values:

        header of record ``data/7`` of the whole file
        its extra field: padding | all records of the small zip, up to the header of its record ``data/0``
        the values, which follow both headers
        the directory of the small zip, at a place that the large zip's directory does not mention

    The extra field of a zip record may hold anything that begins with a tag and a length; readers skip it.

Note [Checksums of values]
    A zip has a CRC of each record. torch does not look at it, other readers do. It costs a pass over the values, so it
    is 0 unless asked for (as with ``torch.serialization.set_crc32_options(False)``). It is known when the values are
    written, so it stands behind them, in a data descriptor: one, that both zips refer to.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lt_zero.checkpoint.native.zipped import Record, aligned_header, descriptor, directory, local_header
from lt_zero.io.pinned import view_of

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


@dataclass(frozen=True)
class Stored:
    """A tensor in a ``TorchFile``.

    ``start``: where its values begin in the file, row-major, in the machine's byte order. ``blob``: offset and length
    of the bytes that are a file of their own, (0, 0) without ``blobs``. ``key``: the number of its record.
    """

    start: int
    blob: tuple[int, int]
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: int

    @property
    def nbytes(self) -> int:
        return _nbytes(self.shape, self.dtype)


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


class TorchFile:
    """A file that ``torch.load(path, weights_only=True)`` reads, written in order and without holding any tensor.

    Args:
        write: takes the file's bytes, strictly in order: ``bytes``, or the values of a tensor as a 1D uint8 CPU tensor
            that shares its memory (and is the caller's again when ``write`` has returned).
        blobs: make each tensor readable on its own, see Note [Two zips in one]; about 1 KB more for each.
        checksums: also a CRC of the values, see Note [Checksums of values].
    """

    def __init__(self, write: Write, blobs: bool = False, checksums: bool = False) -> None:
        self._write = write
        self._blobs, self._checksums = blobs, checksums
        self._records: list[Record] = []
        self._starts: list[int] = []  # of the values of each tensor
        self._finished = False
        self.position = 0  # bytes written so far

    def add(self, tensor: Tensor) -> Stored:
        """Write a tensor's values now. Parameters are saved as plain tensors.

        Args:
            tensor: dense, contiguous and on the CPU.

        Raises:
            ValueError: it is not, or the file is finished.
        """
        data = _bytes_of(tensor)
        return self._add(tuple(tensor.shape), tensor.dtype, [data])

    def add_parts(self, shape: Sequence[int], dtype: torch.dtype, parts: Iterable[Tensor]) -> Stored:
        """Write a tensor whose values come one part after the other, row-major: contiguous CPU tensors of any shape.

        Raises:
            ValueError: a part has another dtype, or all of them another number of elements. The file is of no use then.
        """
        return self._add(tuple(shape), dtype, (_bytes_of(part, dtype) for part in parts))

    def _add(self, shape: tuple[int, ...], dtype: torch.dtype, parts: Iterable[Tensor]) -> Stored:
        if self._finished:
            raise ValueError("The file is finished: nothing can be added after its directory.")
        key, nbytes = len(self._starts), _nbytes(shape, dtype)
        record = Record(b"archive/data/%d" % key, self.position, nbytes, 0, self._checksums)
        head = _blob_head(dtype, shape, self._checksums)[0] if self._blobs else b""
        try:
            header = aligned_header(record, ALIGNMENT, head)
        except ValueError:
            raise ValueError(f"A tensor with {len(shape)} dimensions cannot be saved: reshape it.") from None
        self._put(header)
        start = self.position
        record = record._replace(crc=self._put_values(parts))
        if self.position - start != nbytes:
            raise ValueError(f"{self.position - start} bytes came of a tensor {shape} of {dtype}, not {nbytes}.")
        self._put(descriptor(record))
        blob = (0, 0)
        if self._blobs:
            self._put(_blob_tail(dtype, shape, self._checksums, record.crc))
            blob = (start - len(head), self.position - start + len(head))
        self._records.append(record)
        self._starts.append(start)
        return Stored(start, blob, shape, dtype, key)

    def _put_values(self, parts: Iterable[Tensor]) -> int:
        """Write them; their CRC, if one is asked for."""
        crc = 0
        for data in parts:
            if data.numel():
                self._write(data)
                self.position += data.numel()
                if self._checksums:
                    crc = zlib.crc32(view_of(data), crc)
        return crc

    def finish(self, value: Any) -> None:
        """Write what ``torch.load`` returns, and the directory.

        Args:
            value: nested containers of plain values. A ``Stored`` of this file stands for its tensor; where it occurs
                twice, both have one storage. Tensors are added (whole and contiguous, views do not stay views).

        Raises:
            ValueError: a ``Stored`` of another file; a tensor that is not dense; the file is finished.
            pickle.PicklingError, TypeError, AttributeError: something in it cannot be pickled; names it.
        """
        if self._finished:
            raise ValueError("The file is finished already.")
        buffer = io.BytesIO()
        _Pickler(buffer, self._known, self.add).dump(value)
        self._finished = True
        for name, content in _small_records(buffer.getvalue()):
            record = Record(name, self.position, len(content), zlib.crc32(content))
            self._put(local_header(record))
            self._put(content)
            self._records.append(record)
        self._put(directory(self._records, self.position))

    def _known(self, stored: Stored) -> Stored:
        if stored.key >= len(self._starts) or self._starts[stored.key] != stored.start:
            raise ValueError(f"{stored} is of another file: add the tensor to this one.")
        return stored

    def _put(self, data: bytes) -> None:
        if data:
            self._write(data)
            self.position += len(data)


def _bytes_of(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The memory of a tensor (of this dtype) as 1D uint8, not copied."""
    if dtype not in (None, tensor.dtype):
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
    return plain.reshape(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


# ---- the pickle --------------------------------------------------------------------------------------------------


class _Storage(NamedTuple):
    """Pickled as a persistent id."""

    kind: type
    key: str
    numel: int


class _Pickler(pickle.Pickler):
    """Pickles each ``Stored`` as torch.save pickles the tensor that it stands for."""

    def __init__(self, file: io.BytesIO, known: Callable[[Stored], Stored], add: Callable[[Tensor], Stored]) -> None:
        super().__init__(file, protocol=2)
        self._known, self._add = known, add

    def persistent_id(self, obj: Any) -> Any:
        return ("storage", obj.kind, obj.key, "cpu", obj.numel) if type(obj) is _Storage else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Stored):
            return _reduced(self._known(obj))
        if type(obj) in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
            dense = obj.detach()
            if dense.layout == torch.strided:  # or `add` names the trouble
                dense = dense.resolve_conj().resolve_neg().cpu().contiguous()
            return _reduced(self._add(dense))
        if isinstance(obj, Tensor):
            raise ValueError(
                f"A {type(obj).__module__}.{type(obj).__qualname__} cannot be saved: make it a plain tensor."
            )
        return NotImplemented


def _reduced(stored: Stored) -> tuple[Any, tuple[Any, ...]]:
    """How torch pickles such a tensor: a function and its arguments."""
    rebuild, rest = _rebuild(stored.dtype)
    kind = _STORAGES.get(stored.dtype, torch.UntypedStorage)
    numel = stored.nbytes // (stored.dtype.itemsize if stored.dtype in _STORAGES else 1)
    storage = _Storage(kind, str(stored.key), numel)
    # The hooks are a dict of its own for each tensor: it becomes the tensor's.
    return rebuild, (storage, 0, stored.shape, _strides(stored.shape), False, OrderedDict(), *rest)


@functools.cache
def _rebuild(dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    """The function that torch pickles tensors of ``dtype`` with, and its arguments after the hooks."""
    function, arguments = torch.empty(0, dtype=dtype, device="cpu").__reduce_ex__(2)
    return function, arguments[6:]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


# ---- files in the file -------------------------------------------------------------------------------------------


def _small_records(pickled: bytes) -> list[tuple[bytes, bytes]]:
    return [
        (b"archive/data.pkl", pickled),
        (b"archive/byteorder", sys.byteorder.encode()),
        (b"archive/version", b"3\n"),
    ]


@functools.lru_cache(4096)
def _blob_head(dtype: torch.dtype, shape: tuple[int, ...], checksums: bool) -> tuple[bytes, tuple[Record, ...]]:
    """What comes before the values in a file with this tensor only, and the records in it, the values' last."""
    stored = Stored(0, (0, 0), shape, dtype, 0)
    buffer = io.BytesIO()
    _Pickler(buffer, lambda same: same, _no_tensor).dump(stored)
    head, records = b"", []
    for name, content in _small_records(buffer.getvalue()):
        records.append(Record(name, len(head), len(content), zlib.crc32(content)))
        head += local_header(records[-1]) + content
    records.append(Record(b"archive/data/0", len(head), stored.nbytes, 0, checksums))
    return head + local_header(records[-1]), tuple(records)


@functools.lru_cache(4096)
def _blob_tail(dtype: torch.dtype, shape: tuple[int, ...], checksums: bool, crc: int) -> bytes:
    """What comes after the values (and their descriptor) in a file with this tensor only."""
    head, (*small, values) = _blob_head(dtype, shape, checksums)
    values = values._replace(crc=crc)
    return directory([*small, values], len(head) + values.nbytes + len(descriptor(values)))


def _no_tensor(tensor: Tensor) -> Stored:
    raise AssertionError("A pickled Stored holds no tensor.")
