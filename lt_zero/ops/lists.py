"""Lists of tensors as the C ABI takes them: checked once, then pointers and sizes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lt_zero.ops import library

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # lt_dtype
LOW_STATE = (torch.float32, torch.bfloat16)
CHUNK = 1 << 17  # elements that a reference works on at a time: its temporaries stay in the cache


def check_list(
    name: str, tensors: Sequence[Tensor], like: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> torch.dtype:
    """The dtype that all ``tensors`` have.

    Raises:
        ValueError: they are not as many, as large and on the same device as ``like``, contiguous, and of one dtype out
            of ``dtypes``.
    """
    if len(tensors) != len(like):
        raise ValueError(f"{name} has {len(tensors)} tensors, but {len(like)} are needed: one for each parameter.")
    dtype, device = tensors[0].dtype, like[0].device
    # One look at each property in a loop of its own: thousands of tensors take a quarter of the time.
    if (
        dtype in dtypes
        and {t.dtype for t in tensors} == {dtype}
        and {t.device for t in tensors} == {device}
        and (tensors is like or list(map(Tensor.numel, tensors)) == list(map(Tensor.numel, like)))
        and all(map(Tensor.is_contiguous, tensors))
    ):
        return dtype
    for number, (tensor, other) in enumerate(zip(tensors, like, strict=True)):
        if tensor.dtype not in dtypes or tensor.dtype != dtype:
            names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise ValueError(
                f"{name}[{number}] has dtype {tensor.dtype}; one dtype for all of {name} is needed, out of: {names}."
            )
        if tensor.numel() != other.numel() or tensor.device != device or not tensor.is_contiguous():
            raise ValueError(
                f"{name}[{number}] has shape {tuple(tensor.shape)} on {tensor.device}, contiguous: "
                f"{tensor.is_contiguous()}; {other.numel()} contiguous elements on {device} are needed."
            )
    return dtype


def check_scalar(name: str, scalar: Tensor | None, device: torch.device) -> None:
    """``scalar`` is None or one fp32 number on ``device``.

    Raises:
        ValueError: it is not.
    """
    if scalar is not None and (scalar.numel() != 1 or scalar.dtype != torch.float32 or scalar.device != device):
        raise ValueError(
            f"{name} has shape {tuple(scalar.shape)}, dtype {scalar.dtype}, on {scalar.device}; "
            f"one float32 number on {device} is needed."
        )


def pointers(tensors: Sequence[Tensor]) -> Any:
    """``void *[]``; None for an empty list."""
    return (ctypes.c_void_p * len(tensors))(*map(Tensor.data_ptr, tensors)) if tensors else None


def sizes(tensors: Sequence[Tensor]) -> Any:
    """``int64_t[]`` of elements."""
    return (ctypes.c_int64 * len(tensors))(*map(Tensor.numel, tensors))


def address(tensor: Tensor | None) -> int | None:
    """The address of the first element; None for None."""
    return tensor.data_ptr() if tensor is not None else None


def native(device: torch.device) -> ctypes.CDLL | None:
    """The kernels for ``device``; None if the references run."""
    if device.type == "cpu":
        return library.cpu()
    return library.cuda() if device.type == "cuda" else None


def available(device: torch.device) -> bool:
    """Whether native kernels run for tensors on ``device``; compiles them if that was not tried yet."""
    return native(device) is not None


def fits(out: Tensor, value: Tensor, add: bool = False) -> bool:
    """Whether ``cast_scale`` (with ``add``: ``accumulate``) takes tensors like these."""
    contiguous = value.layout is torch.strided and value.is_contiguous() and out.is_contiguous()
    dtypes = out.dtype is torch.float32 if add else out.dtype in DTYPES
    return dtypes and value.dtype in DTYPES and contiguous and value.device == out.device


def call(lib: ctypes.CDLL, operation: str, device: torch.device, *args: Any) -> None:
    """Run a kernel: on torch's threads on the CPU, on the current stream on CUDA.

    Raises:
        RuntimeError: the kernel reports an error.
    """
    if device.type == "cpu":
        code = getattr(lib, f"lt_cpu_{operation}")(*args, torch.get_num_threads())
    else:
        with torch.cuda.device(device):
            code = getattr(lib, f"lt_cuda_{operation}")(*args, torch.cuda.current_stream(device).cuda_stream)
    library.check(lib, code)


def scratch(lib: ctypes.CDLL, tensors: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """Room for partial sums, which kernels with a result take on CUDA; None on the CPU.

    Keep it until the kernel is launched; afterwards it may be freed, as the allocator reuses it on the same stream.
    """
    if device.type == "cpu":
        return None
    nbytes = lib.lt_cuda_scratch(len(tensors), sizes(tensors))
    return torch.empty(max(1, nbytes), dtype=torch.uint8, device=device)


def pointer(room: Tensor | None) -> tuple[int, ...]:
    """The last argument of kernels that take ``scratch``, if they take it on this device."""
    return (room.data_ptr(),) if room is not None else ()


def factor_of(scale: Tensor | None, clip: Tensor | None) -> Tensor | None:
    """The factor of the gradients: the product in fp32, or None."""
    if scale is None or clip is None:
        return scale if clip is None else clip
    return scale * clip


def exact_sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root of fp32 numbers; torch's own is off by one unit at times on the CPU."""
    return x.double().sqrt_().float()


def chunks(*lists: Sequence[Tensor] | None) -> Iterator[tuple[Any, ...]]:
    """Rows of 1D pieces of at most ``CHUNK`` elements, which together cover the tensors of all lists.

    A list that is missing or empty gives None.
    """
    count = len(lists[0] or ())
    for number in range(count):
        flat = [tensors[number].view(-1) if tensors else None for tensors in lists]
        for lo in range(0, max(row.numel() for row in flat if row is not None), CHUNK):
            yield tuple(row[lo : lo + CHUNK] if row is not None else None for row in flat)
