"""Tensors that stay in their file until they are read. See Note [Where a tensor's bytes are] in torchread.py."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lt_zero.checkpoint.formats.admitted import DTYPES, Global, Refused
from lt_zero.checkpoint.formats.unpickle import Machine
from lt_zero.common.errors import CheckpointError


class Window(io.RawIOBase):
    """Bytes ``start`` to ``stop`` of a file, as a file to read."""

    def __init__(self, path: Path, start: int = 0, stop: int | None = None) -> None:
        super().__init__()
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"Cannot open {path}: {error.strerror}. Is the checkpoint complete?") from error
        size = os.fstat(self._fd).st_size
        stop = size if stop is None else stop
        if not 0 <= start <= stop <= size:
            os.close(self._fd)
            raise CheckpointError(
                f"{path} has {size} bytes, but the checkpoint says that bytes {start} to {stop} of it are in use: it "
                "was cut off or replaced. Take another checkpoint."
            )
        self._start, self.size, self._position = start, stop - start, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError(f"byte {base + offset} of a file")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self.size - self._position))
        got = os.preadv(self._fd, [view[:wanted]], self._start + self._position) if wanted else 0
        self._position += got
        return got

    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes; never makes room for more than there are."""
        left = max(0, self.size - self._position)
        return super().read(left if size is None or size < 0 else min(size, left)) or b""

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()


@dataclass(frozen=True)
class Storage:
    """A run of elements in a file."""

    path: Path
    offset: int  # bytes
    nbytes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Handle:
    """A tensor in a file. ``start`` and ``stride`` count elements of the storage."""

    storage: Storage
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    def is_contiguous(self) -> bool:
        """Whether the elements follow each other in the file."""
        step = 1
        for size, own in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and own != step:
                return False
            step *= size
        return True

    def fill(self, target: Tensor) -> None:
        """Read the whole of a contiguous tensor into a contiguous one of its shape and dtype."""
        if self.numel:
            read_bytes(target, self.storage.path, self.storage.offset + self.start * self.dtype.itemsize)

    def read(self) -> Tensor:
        """The whole tensor, contiguous.

        Raises:
            CheckpointError: the file is not what it was when it was opened.
        """
        if not self.numel:
            return torch.empty(self.shape, dtype=self.dtype)
        extent = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        flat = torch.empty(extent, dtype=self.dtype)
        read_bytes(flat, self.storage.path, self.storage.offset + self.start * self.dtype.itemsize)
        return flat.as_strided(self.shape, self.stride).contiguous()

    def read_into(self, target: Tensor, start: int) -> None:
        """Fill ``target`` (1D, contiguous) with the elements of a flat tensor from ``start``."""
        stop = start + target.numel()
        if self.stride != (1,) or not 0 <= start <= stop <= self.shape[0] or target.dtype != self.dtype:
            raise CheckpointError(
                f"{self.storage.path} has a tensor of shape {self.shape} ({self.dtype}) where a flat one of "
                f"{target.dtype} with elements {start} to {stop} should be: the files do not belong together."
            )
        read_bytes(target, self.storage.path, self.storage.offset + (self.start + start) * self.dtype.itemsize)


def read_bytes(target: Tensor, path: Path, offset: int) -> None:
    """Fill a contiguous tensor with the bytes of a file from ``offset``."""
    with Window(path, offset, offset + target.numel() * target.element_size()) as window:
        view = target.reshape(-1).view(torch.uint8).numpy().data
        done = 0
        while done < len(view):
            got = window.readinto(view[done:])
            if not got:
                raise CheckpointError(f"{path} became shorter while it was read. Take another checkpoint.")
            done += got


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def expect(value: Any) -> Handle:
    if not isinstance(value, Handle):
        raise ValueError(f"a tensor was expected, not {type(value).__name__}")
    return value


def tensor(machine: Machine, args: tuple[Any, ...]) -> Any:
    storage, start, shape, stride = args[:4]
    counts = isinstance(shape, tuple) and isinstance(stride, tuple) and len(shape) == len(stride) <= 64
    if not isinstance(storage, Storage) or not counts or not all(map(is_count, (start, *shape, *stride))):
        raise ValueError("a tensor without a storage, or with an impossible shape")
    numel, elements = 1, storage.nbytes // storage.dtype.itemsize
    for size in shape:
        numel *= size
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if numel else 0
    if start + extent > elements or numel > elements:  # expanded tensors are not saved as parameters
        raise ValueError(f"a tensor of shape {shape} does not fit into its storage of {elements} elements")
    return Handle(storage, start, shape, (1,) if len(shape) == 1 and shape[0] <= 1 else stride)


def typed_tensor(machine: Machine, args: tuple[Any, ...]) -> Handle:
    """Of dtypes without storage classes of their own: (storage, start, shape, stride, grad, hooks, dtype)."""
    storage, dtype = args[0], args[6]
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype) or str(dtype) not in DTYPES:
        raise ValueError("a tensor without a storage or a dtype")
    usable = storage.nbytes - storage.nbytes % dtype.itemsize
    return expect(tensor(machine, (Storage(storage.path, storage.offset, usable, dtype), *args[1:4])))


def with_attributes(machine: Machine, args: tuple[Any, ...]) -> Handle:
    """A tensor whose Python attributes were saved with it; those are left out."""
    function, kind, inner, _ = args
    if str(kind) not in ("torch.Tensor", "torch.nn.parameter.Parameter") or not isinstance(function, Global):
        raise Refused(f"a tensor of class {kind}")
    return expect(machine.made(function, inner))
