"""What the tests of streams share: places to write to, files to read from, tensors of every kind."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]
SHAPES = [(), (0,), (1,), (7,), (2, 3), (0, 3), (3, 0, 2), (1, 1, 5), (2, 1, 3, 1)]


class Sink:
    """Collects a file; tells borrowed tensors from copies."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.addresses: list[int] = []

    def __call__(self, part: bytes | Tensor) -> None:
        if isinstance(part, Tensor):
            assert part.dtype == torch.uint8
            assert part.dim() == 1
            assert part.is_contiguous()
            self.addresses.append(part.data_ptr())
            part = part.numpy().tobytes()
        self.data += part

    def load(self, lo: int = 0, hi: int | None = None, **options: Any) -> Any:
        return torch.load(io.BytesIO(self.data[lo:hi]), weights_only=True, **options)


class Slice(io.RawIOBase):
    """A part of a file as a file, as torch.distributed.checkpoint makes them."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self.file, self.offset, self.length, self.at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.length)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        self.file.seek(self.offset + self.at)
        count = max(min(len(buffer), self.length - self.at), 0)
        got: int = self.file.readinto(memoryview(buffer)[:count])
        self.at += got
        return got


def raw(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(left: Tensor, right: Tensor) -> None:
    assert type(left) is Tensor
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert left.stride() == right.stride()
    assert not left.requires_grad
    assert raw(left) == raw(right)


def some(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(0, 2, (nbytes,)).to(torch.uint8)  # bytes that are a bool
    return values.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)
