"""Checks lists of tensors and converts them to pointers and sizes for the C ABI."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lt_zero.ops import library

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # lt_dtype
LOW_STATE = (torch.float32, torch.bfloat16)
CHUNK = 1 << 17  # elements that a reference processes at a time, so that its temporaries stay in the CPU's cache


def check_list(
    name: str, tensors: Sequence[Tensor], like: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> torch.dtype:
    """The common dtype of ``tensors``.

    Raises:
        ValueError: they differ from ``like`` in number, size or device, are not contiguous, or do not share one of
            ``dtypes``.
    """
    if len(tensors) != len(like):
        raise ValueError(f"{name} has {len(tensors)} tensors, but {len(like)} are needed: one for each parameter.")
    dtype, device = tensors[0].dtype, like[0].device
    # One pass per property takes a quarter of the time of one loop over thousands of tensors.
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
    """Check that ``scalar`` is None or one fp32 number on ``device``.

    Raises:
        ValueError: it is not.
    """
    if scalar is not None and (scalar.numel() != 1 or scalar.dtype != torch.float32 or scalar.device != device):
        raise ValueError(
            f"{name} has shape {tuple(scalar.shape)}, dtype {scalar.dtype}, on {scalar.device}; "
            f"one float32 number on {device} is needed."
        )


def pointers(tensors: Sequence[Tensor]) -> Any:
    """``void *[]`` of data pointers; None for an empty list."""
    return (ctypes.c_void_p * len(tensors))(*map(Tensor.data_ptr, tensors)) if tensors else None


def sizes(tensors: Sequence[Tensor]) -> Any:
    """``int64_t[]`` of numbers of elements."""
    return (ctypes.c_int64 * len(tensors))(*map(Tensor.numel, tensors))


def address(tensor: Tensor | None) -> int | None:
    """The address of the first element; None for None."""
    return tensor.data_ptr() if tensor is not None else None


def native(device: torch.device) -> ctypes.CDLL | None:
    """The library of kernels for ``device``; None if the references run."""
    if device.type == "cpu":
        return library.cpu()
    return library.cuda() if device.type == "cuda" else None


def available(device: torch.device) -> bool:
    """Whether native kernels run for tensors on ``device``; compiles them on first use."""
    return native(device) is not None


def fits(out: Tensor, value: Tensor, add: bool = False) -> bool:
    """Whether ``cast_scale`` (with ``add``: ``accumulate``) accepts these tensors."""
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
    """Workspace for the partial sums of CUDA kernels that return a result; None on the CPU.

    Keep it until the kernel is launched; then it may be freed, as the allocator reuses it on the same stream.
    """
    if device.type == "cpu":
        return None
    nbytes = lib.lt_cuda_scratch(len(tensors), sizes(tensors))
    return torch.empty(max(1, nbytes), dtype=torch.uint8, device=device)


def pointer(workspace: Tensor | None) -> tuple[int, ...]:
    """The argument for ``scratch``, which kernels on the CPU do not have."""
    return (workspace.data_ptr(),) if workspace is not None else ()


def factor_of(scale: Tensor | None, clip: Tensor | None) -> Tensor | None:
    """The factor of the gradients: ``scale * clip`` in fp32; None if it is 1."""
    if scale is None or clip is None:
        return scale if clip is None else clip
    return scale * clip


def exact_sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root of fp32 numbers; torch's may be off by one ulp on the CPU."""
    return x.double().sqrt_().float()


def chunks(*lists: Sequence[Tensor] | None) -> Iterator[tuple[Any, ...]]:
    """Cut the tensors of all lists alike: yields one 1D chunk of at most ``CHUNK`` elements per list.

    A missing or empty list yields None.
    """
    count = len(lists[0] or ())
    for number in range(count):
        flat = [tensors[number].view(-1) if tensors else None for tensors in lists]
        for lo in range(0, max(row.numel() for row in flat if row is not None), CHUNK):
            yield tuple(row[lo : lo + CHUNK] if row is not None else None for row in flat)
