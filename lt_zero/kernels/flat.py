"""Operations on flat tensors that belong to no optimizer: how sums are rounded, and kernels for norms and casts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from lt_zero.kernels.dispatch import (
    DTYPES,
    address,
    call,
    check_list,
    check_scalar,
    chunks,
    native,
    operator,
    pointer,
    pointers,
    scratch,
    sizes,
)
from lt_zero.kernels.header import STRUCTS

# ---- sums -----------------------------------------------------------------------------------------------------------


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums for a result in ``dtype``, which is rounded once."""
    return torch.promote_types(dtype, torch.float32)


def store(out: Tensor, value: Tensor, add: bool, factor: float) -> None:
    """``out = value * factor`` or ``out += value * factor``; ``value`` may be overwritten."""
    value = value.to(wide(value.dtype))
    # Multiply first: with ``alpha`` some elements would be rounded once, and others twice.
    if add:
        out.add_(value if factor == 1.0 else value.mul_(factor))
    elif factor == 1.0:
        out.copy_(value)
    else:
        torch.mul(value, factor, out=out)


# ---- kernels --------------------------------------------------------------------------------------------------------


def norm_squared_reference(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements (0D, fp64), accumulated in fp64.

    It is finite exactly if every element is, as squares of fp32 numbers do not overflow fp64. It does not depend on
    the number of threads.

    Args:
        tensors: contiguous, on one device, each in fp32, bf16 or fp16.

    Raises:
        ValueError: a tensor is not contiguous, has another dtype, or another device than the first.
    """
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device if len(tensors) > 0 else None)
    for (chunk,) in chunks(tensors):
        if chunk.device.type == "cpu":
            total += chunk.double().square_().sum()
        else:
            total += torch.linalg.vector_norm(chunk, dtype=torch.float64).square()
    return total


def accumulate_reference(
    accumulators: Sequence[Tensor], values: Sequence[Tensor], *, factor: float = 1.0, scale: Tensor | None = None
) -> None:
    """Add ``values * factor * scale`` to the accumulators.

    Args:
        accumulators: fp32, contiguous; updated.
        values: of the same sizes, in fp32, bf16 or fp16.
        factor: rounded to fp32.
        scale: one fp32 number on the same device.

    Raises:
        ValueError: a list does not match ``accumulators`` in length, size, device or dtype.
    """
    for accumulator, value in chunks(accumulators, values):
        accumulator.add_(_scaled(value, factor, scale))


def cast_scale_reference(
    outs: Sequence[Tensor], values: Sequence[Tensor], *, factor: float = 1.0, scale: Tensor | None = None
) -> None:
    """Store ``values * factor * scale``, computed in fp32 and rounded once.

    Args:
        outs: contiguous, of one dtype: fp32, bf16 or fp16; written.
        values: of the same sizes, in fp32, bf16 or fp16.
        factor: rounded to fp32.
        scale: one fp32 number on the same device.

    Raises:
        ValueError: a list does not match ``outs`` in length, size, device or dtype.
    """
    for out, value in chunks(outs, values):
        out.copy_(_scaled(value, factor, scale))


def take_edits_reference(masters: Sequence[Tensor], shown: Sequence[Tensor]) -> None:
    """Copy the elements of ``shown`` that differ from the rounded ``masters``, as they were edited, to these.

    Args:
        masters: fp32, contiguous; the elements that differ are written.
        shown: of the same sizes, in bf16 or fp16.

    Raises:
        ValueError: a list does not match ``masters`` in length, size, device or dtype.
    """
    for master, value in chunks(masters, shown):
        # Select with ``where``: indexing by a mask would wait for a GPU.
        torch.where(master.to(value.dtype) != value, value.to(master.dtype), master, out=master)


def _scaled(value: Tensor, factor: float, scale: Tensor | None) -> Tensor:
    if scale is not None:
        return value.float() * (scale * factor)
    return value.float() * factor if factor != 1.0 else value


def _run_norm(tensors: list[Tensor]) -> Tensor:
    device = tensors[0].device
    for number, tensor in enumerate(tensors):
        if tensor.device != device:
            raise ValueError(f"tensors[{number}] is on {tensor.device}, the first one on {device}.")
        check_list(f"tensors[{number}:]", [tensor], [tensor], list(DTYPES))
    lib = native(device)
    if lib is None:
        return norm_squared_reference(tensors)
    total = torch.empty((), dtype=torch.float64, device=device)
    dtypes = (ctypes.c_int32 * len(tensors))(*[DTYPES[t.dtype] for t in tensors])
    mixed = STRUCTS["lt_mixed"](count=len(tensors), numel=sizes(tensors), data=pointers(tensors), dtype=dtypes)
    workspace = scratch(lib, tensors, device)
    call(lib, "norm_squared", device, ctypes.byref(mixed), address(total), *pointer(workspace))
    return total


def _pairs(
    names: tuple[str, str], dst: list[Tensor], src: list[Tensor], factor: float, scale: Tensor | None
) -> ctypes.Structure:
    dst_dtype = check_list(names[0], dst, dst, list(DTYPES))
    src_dtype = check_list(names[1], src, dst, list(DTYPES))
    check_scalar("scale", scale, dst[0].device)
    return STRUCTS["lt_pairs"](
        count=len(dst),
        numel=sizes(dst),
        dst=pointers(dst),
        src=pointers(src),
        dst_dtype=DTYPES[dst_dtype],
        src_dtype=DTYPES[src_dtype],
        factor=factor,
        scale=address(scale),
    )


def _run_accumulate(
    accumulators: list[Tensor], values: list[Tensor], factor: float = 1.0, scale: Tensor | None = None
) -> None:
    check_list("accumulators", accumulators, accumulators, [torch.float32])
    pairs = _pairs(("accumulators", "values"), accumulators, values, factor, scale)
    lib = native(accumulators[0].device)
    if lib is None:
        accumulate_reference(accumulators, values, factor=factor, scale=scale)
        return
    call(lib, "accumulate", accumulators[0].device, ctypes.byref(pairs))


def _run_cast(outs: list[Tensor], values: list[Tensor], factor: float = 1.0, scale: Tensor | None = None) -> None:
    pairs = _pairs(("outs", "values"), outs, values, factor, scale)
    lib = native(outs[0].device)
    if lib is None:
        cast_scale_reference(outs, values, factor=factor, scale=scale)
        return
    call(lib, "cast_scale", outs[0].device, ctypes.byref(pairs))


def _run_edits(masters: list[Tensor], shown: list[Tensor]) -> None:
    check_list("masters", masters, masters, [torch.float32])
    check_list("shown", shown, masters, [torch.bfloat16, torch.float16])
    device, pairs = masters[0].device, _pairs(("masters", "shown"), masters, shown, 1.0, None)
    lib = native(device)
    # On a CPU, where a digest finds edits, the reference is fast enough for those that there are.
    if lib is None or not hasattr(lib, f"lt_{device.type}_take_edits"):
        take_edits_reference(masters, shown)
        return
    call(lib, "take_edits", device, ctypes.byref(pairs))


def _fake_norm(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((), dtype=torch.float64)


norm_squared = operator(
    norm_squared_reference,
    _run_norm,
    written=(),
    fake=_fake_norm,
    empty=lambda: torch.zeros((), dtype=torch.float64),
)
accumulate = operator(accumulate_reference, _run_accumulate, written=("accumulators",))
cast_scale = operator(cast_scale_reference, _run_cast, written=("outs",))
take_edits = operator(take_edits_reference, _run_edits, written=("masters",))
