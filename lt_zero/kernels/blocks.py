"""Block-wise compression to 8, 4, 2 or 1 bits an element, and sums of decoded buffers.

A flat tensor is cut into blocks; each has one fp32 scale. A buffer holds first the codes of all elements, ``bits``
each, the first one in the lowest bits of a byte, padded with zeros to a multiple of 16 bytes; then the scales, padded
likewise. So one collective sends all of it, and buffers laid end to end stay aligned.

8, 4 bits
    Uniform levels (ZeRO++, arXiv:2306.10209, section 3.1): scale = largest magnitude / (127 or 7), code = x / scale
    rounded to nearest even, in two's complement. An element is off by half a scale at most, up to fp32 rounding. A
    block of zeros, or one whose scale would be below fp32's smallest normal number, has scale 0 and decodes to zeros.
1 bit
    Sign times scale = mean magnitude (signSGD with a norm, arXiv:1901.09847), the best scale for given signs.
2 bits
    Four levels, +-0.567 and +-1.893 times the mean magnitude, and the nearest is taken: the quantizer of least squared
    error for a Gaussian (Lloyd-Max: 0.1175 of the variance is lost, 0.363 with 1 bit).

The mean magnitude, unlike the root mean square, makes 1 and 2 bits contractions for every input, and error feedback
converges only with contractions: of n elements x, the error's squared norm is at most ``|x|_2^2 - d * |x|_1^2 / n``
with d = 1 (1 bit) or 0.81 (2 bits).

With a ``residual``, x + residual is encoded, and the residual becomes the rounding error.

A block that holds an infinity or a NaN decodes to NaN: fp16 training finds overflows in what it receives. Its residual
stays as it was, for the gradient of such a step is dropped, and must not spoil later ones.

Scales are fp32: 1.6 % of the bytes at 8 bits in blocks of 256. Scales in 16 bits would save half of it, but fp16 lacks
the range of gradients, and bf16's rounding would move all levels of a block by up to 0.4 %.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from lt_zero.kernels.dispatch import CHUNK, DTYPES, address, call, native, pointers
from lt_zero.kernels.header import CONSTANTS, STRUCTS

BITS = (8, 4, 2, 1)
GROUP, LARGEST_BLOCK, LARGEST_ROWS = 16, 1 << 16, 65535  # csrc/codec.h
CUDA_BUFFERS = CONSTANTS["LT_CUDA_BUFFERS"]
_LOW, _HIGH, _THRESHOLD = 0.5674756, 1.8930277, 1.2302517


def quantized_nbytes(numel: int, bits: int, block: int) -> int:
    """The bytes of a buffer for ``numel`` elements: a multiple of 16.

    Raises:
        ValueError: ``bits`` is not 8, 4, 2 or 1, or ``block`` no multiple of 16 from 16 to 65536.
    """
    if bits not in BITS:
        raise ValueError(f"bits is {bits}; it must be one of {', '.join(map(str, BITS))}.")
    if block % GROUP != 0 or not GROUP <= block <= LARGEST_BLOCK:
        raise ValueError(f"block is {block}; it must be a multiple of {GROUP}, from {GROUP} to {LARGEST_BLOCK}.")
    if numel < 0:
        raise ValueError(f"numel is {numel}; it must be at least 0.")
    return _codes_nbytes(numel, bits) + _padded(-(-numel // block) * 4)


def quantize(x: Tensor, bits: int, block: int, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Encode ``x + residual`` in blocks, and leave the rounding error in ``residual``.

    Args:
        x: 1D, contiguous, in fp32, bf16 or fp16.
        bits: of an element: 8, 4, 2 or 1.
        block: elements that share a scale: a multiple of 16, from 16 to 65536.
        residual: fp32, of x's size, updated; None: x alone is encoded, and the error is lost.
        out: uint8 of ``quantized_nbytes``, at an address that is a multiple of 16; a new tensor if None.

    Returns:
        ``out``.

    Raises:
        ValueError: a tensor has another size, dtype, device or layout, or ``bits`` or ``block`` is not possible.
    """
    out, lib = prepared(x, bits, block, residual, out), native(x.device)
    if lib is None:
        return quantize_reference(x, bits, block, residual, out)
    encode_natively(lib, x, residual, out, bits, block)
    return out


def encode_natively(
    lib: ctypes.CDLL, x: Tensor, residual: Tensor | None, out: Tensor, bits: int, block: int, normal: bool = False
) -> None:
    """Encode checked tensors by a kernel; ``normal``: in the levels of ``nf4.py``."""
    blocks = STRUCTS["lt_blocks"](rows=1, numel=x.numel(), block=block, bits=bits, dtype=DTYPES[x.dtype], normal=normal)
    call(lib, "encode_blocks", x.device, ctypes.byref(blocks), address(x), address(residual), address(out))


def quantize_rows(x: Tensor, bits: int, block: int, residual: Tensor | None, out: Tensor) -> Tensor:
    """Do for each row of ``x`` what ``quantize`` does, all in one call.

    Args:
        x: [rows, numel], contiguous, in fp32, bf16 or fp16; 65535 rows at most.
        bits, block: as in ``quantize``.
        residual: fp32, [rows, numel], updated, its rows contiguous; None: the errors are lost.
        out: uint8, [rows, quantized_nbytes], contiguous, at an address that is a multiple of 16.

    Returns:
        ``out``.

    Raises:
        ValueError: as in ``quantize``.
    """
    rows, numel = _check_rows("x", x, list(DTYPES), x.device)
    _check_rows("out", out, [torch.uint8], x.device, (rows, quantized_nbytes(numel, bits, block)))
    if residual is not None:
        _check_rows("residual", residual, [torch.float32], x.device, (rows, numel), strided=True)
    lib = native(x.device)
    if x.numel() == 0:
        return out
    if lib is None:
        return _quantize_rows_reference(x, bits, block, residual, out)
    stride = residual.stride(0) if residual is not None else 0
    blocks = STRUCTS["lt_blocks"](
        rows=rows, numel=numel, residual_row=stride, block=block, bits=bits, dtype=DTYPES[x.dtype]
    )
    call(lib, "encode_blocks", x.device, ctypes.byref(blocks), address(x), address(residual), address(out))
    return out


def _quantize_rows_reference(x: Tensor, bits: int, block: int, residual: Tensor | None, out: Tensor) -> Tensor:
    rows, numel = x.shape
    if rows < 2 or numel % block != 0:
        for number in range(rows):
            quantize_reference(x[number], bits, block, residual[number] if residual is not None else None, out[number])
        return out
    # Rows of whole blocks are encoded as one tensor, so that operators do not grow with the rows: only places differ.
    left = residual.reshape(-1) if residual is not None else None
    codes, scales = _sections(quantize_reference(x.view(-1), bits, block, left), x.numel(), bits, block)
    out.zero_()
    for target, values in zip(_row_sections(out, numel, bits, block), (codes, scales), strict=True):
        target.copy_(values[: target.numel()].view(rows, -1))
    if residual is not None and left is not None and left.data_ptr() != residual.data_ptr():
        residual.copy_(left.view(rows, -1))
    return out


def quantize_reference(
    x: Tensor, bits: int, block: int, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """``quantize`` in torch operations."""
    # Padding is sent, too: with zeros there equal inputs have equal buffers.
    out = prepared(x, bits, block, residual, out).zero_()
    codes, scales = _sections(out, x.numel(), bits, block)
    # Whole blocks at a time: a block has 16 elements or more, so its codes begin at a whole byte.
    size = max(1, CHUNK // block) * block
    for lo in range(0, x.numel(), size):
        left = residual[lo : lo + size] if residual is not None else None
        c = x[lo : lo + size].float()
        c = c + left if left is not None else c
        code, value, scale = _encoded(_rows(c, block), bits, c.numel())
        first = lo // block
        scales[first : first + scale.numel()] = scale
        packed = _packed(code.view(-1), bits)[: -(-c.numel() * bits // 8)]
        codes[lo * bits // 8 :][: packed.numel()] = packed
        if left is not None:
            good = scale.isfinite().repeat_interleave(block)[: c.numel()]
            left.copy_(torch.where(good, c - value.view(-1)[: c.numel()], left))
    return out


def dequantize_sum(buffers: Sequence[Tensor], out: Tensor, bits: int, block: int, scale: float = 1.0) -> None:
    """Write ``scale`` times the sum of the decoded buffers, added up in fp32 in their order and rounded once.

    Args:
        buffers: at least one, each uint8 as ``quantize`` makes them for ``out.numel()`` elements.
        out: 1D, contiguous, in fp32, bf16 or fp16; written.
        bits, block: as the buffers were made.
        scale: rounded to fp32.

    Raises:
        ValueError: a tensor has another size, dtype, device or layout, or ``bits`` or ``block`` is not possible.
    """
    check_buffers(buffers, out, bits, block)
    lib = native(out.device)
    if lib is None:
        return dequantize_sum_reference(buffers, out, bits, block, scale)
    return decode_natively(lib, buffers, out, bits, block, scale)


def decode_natively(
    lib: ctypes.CDLL,
    buffers: Sequence[Tensor],
    out: Tensor,
    bits: int,
    block: int,
    scale: float,
    normal: bool = False,
) -> None:
    """Decode checked tensors by a kernel; ``normal``: from the levels of ``nf4.py``."""
    total = out
    if len(buffers) > CUDA_BUFFERS and out.device.type != "cpu":  # several launches carry the sum in fp32
        total = torch.empty_like(out, dtype=torch.float32)
    blocks = STRUCTS["lt_blocks"](
        rows=1, numel=out.numel(), block=block, bits=bits, dtype=DTYPES[total.dtype], normal=normal
    )
    given = (len(buffers), pointers(buffers), scale, address(total))
    call(lib, "decode_blocks", out.device, ctypes.byref(blocks), *given)
    if total is not out:
        out.copy_(total)


def dequantize_sum_reference(buffers: Sequence[Tensor], out: Tensor, bits: int, block: int, scale: float = 1.0) -> None:
    """``dequantize_sum`` in torch operations."""
    check_buffers(buffers, out, bits, block)
    size = max(1, CHUNK // block) * block
    for lo in range(0, out.numel(), size):
        target, first = out[lo : lo + size], lo // block
        total = None
        for buffer in buffers:
            codes, scales = _sections(buffer, out.numel(), bits, block)
            count = -(-target.numel() // block)
            code = _unpacked(codes[lo * bits // 8 :][: -(-target.numel() * bits // 8)], bits)
            value = _decoded(_rows(code, block), scales[first : first + count, None], bits)
            value = value.view(-1)[: target.numel()]
            total = value if total is None else total + value
        if total is not None:
            target.copy_(total * scale)


def dequantize_rows(buffers: Tensor, out: Tensor, bits: int, block: int, scale: float = 1.0) -> None:
    """Write ``scale`` times what each buffer decodes to into its row, all in one call.

    Args:
        buffers: uint8, [rows, quantized_nbytes], contiguous, at an address that is a multiple of 16.
        out: [rows, numel], contiguous, in fp32, bf16 or fp16; written; 65535 rows at most.
        bits, block: as the buffers were made.
        scale: rounded to fp32.

    Raises:
        ValueError: as in ``dequantize_sum``.
    """
    rows, numel = _check_rows("out", out, list(DTYPES), out.device)
    _check_rows("buffers", buffers, [torch.uint8], out.device, (rows, quantized_nbytes(numel, bits, block)))
    lib = native(out.device)
    if out.numel() == 0:
        return None
    if lib is None:
        return _dequantize_rows_reference(buffers, out, bits, block, scale)
    blocks = STRUCTS["lt_blocks"](rows=rows, numel=numel, block=block, bits=bits, dtype=DTYPES[out.dtype])
    call(lib, "decode_blocks", out.device, ctypes.byref(blocks), 1, pointers([buffers]), scale, address(out))
    return None


def _dequantize_rows_reference(buffers: Tensor, out: Tensor, bits: int, block: int, scale: float) -> None:
    rows, numel = out.shape
    if rows < 2 or numel % block != 0:
        for buffer, row in zip(buffers.unbind(), out.unbind(), strict=True):
            dequantize_sum_reference([buffer], row, bits, block, scale)
        return
    # As in ``_quantize_rows_reference``.
    whole = buffers.new_zeros(quantized_nbytes(out.numel(), bits, block))
    of_whole = _sections(whole, out.numel(), bits, block)
    for target, values in zip(of_whole, _row_sections(buffers, numel, bits, block), strict=True):
        target[: values.numel()].view(rows, -1).copy_(values)
    dequantize_sum_reference([whole], out.view(-1), bits, block, scale)


def dequantize(buffer: Tensor, out: Tensor, bits: int, block: int) -> None:
    """Decode one buffer into ``out``; arguments as in ``dequantize_sum``."""
    dequantize_sum([buffer], out, bits, block)


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_flat(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], numel: int, device: torch.device) -> None:
    """Check that ``tensor`` is 1D, contiguous, of ``numel`` elements in one of ``dtypes`` and on ``device``.

    Raises:
        ValueError: it is not.
    """
    shape, names = tuple(tensor.shape), ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if shape != (numel,) or tensor.dtype not in dtypes or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {shape}, dtype {tensor.dtype}, on {tensor.device}, contiguous: "
            f"{tensor.is_contiguous()}; ({numel},) contiguous elements of {names} on {device} are needed."
        )


def check_buffer(name: str, buffer: Tensor, nbytes: int, device: torch.device) -> None:
    """Check that ``buffer`` is 1D, contiguous, uint8, of ``nbytes`` at a multiple of 16, on ``device``.

    Raises:
        ValueError: it is not.
    """
    check_flat(name, buffer, [torch.uint8], nbytes, device)
    if buffer.data_ptr() % 16 != 0:
        raise ValueError(
            f"{name} starts {buffer.data_ptr() % 16} bytes after a multiple of 16; cut buffers from an allocation of "
            "their own, at multiples of their size."
        )


def _check_rows(
    name: str,
    tensor: Tensor,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    shape: tuple[int, int] | None = None,
    strided: bool = False,
) -> tuple[int, int]:
    """Check a tensor of rows and return its shape; ``strided``: only each row has to be contiguous."""
    wanted = shape or (tuple(tensor.shape) if tensor.dim() == 2 else (-1, -1))
    good = tuple(tensor.shape) == wanted and wanted[0] <= LARGEST_ROWS
    good = good and tensor.dtype in dtypes and tensor.device == device
    good = good and (tensor[:1].is_contiguous() if strided else tensor.is_contiguous())
    if not good or (tensor.dtype == torch.uint8 and tensor.data_ptr() % 16 != 0):
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()}, dtype {tensor.dtype}, on "
            f"{tensor.device}, at address {tensor.data_ptr():#x}; contiguous rows of {names} on {device} are needed, "
            f"{LARGEST_ROWS} at most, bytes at a multiple of 16{f', of shape {shape}' if shape else ''}."
        )
    return wanted[0], wanted[1]


def prepared(x: Tensor, bits: int, block: int, residual: Tensor | None, out: Tensor | None) -> Tensor:
    """Check the arguments of ``quantize`` and return ``out``, a new tensor if it is None.

    Raises:
        ValueError: as in ``quantize``.
    """
    nbytes = quantized_nbytes(x.numel(), bits, block)
    check_flat("x", x, list(DTYPES), x.numel(), x.device)
    if residual is not None:
        check_flat("residual", residual, [torch.float32], x.numel(), x.device)
    if out is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=x.device)
    check_buffer("out", out, nbytes, x.device)
    return out


def check_buffers(buffers: Sequence[Tensor], out: Tensor, bits: int, block: int) -> None:
    """Check the arguments of ``dequantize_sum``.

    Raises:
        ValueError: as there.
    """
    nbytes = quantized_nbytes(out.numel(), bits, block)
    check_flat("out", out, list(DTYPES), out.numel(), out.device)
    if len(buffers) == 0:
        raise ValueError("buffers is empty; at least one is needed.")
    for number, buffer in enumerate(buffers):
        check_buffer(f"buffers[{number}]", buffer, nbytes, out.device)


# ---- for references --------------------------------------------------------------------------------------------------


def _padded(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def _codes_nbytes(numel: int, bits: int) -> int:
    return _padded(-(-numel * bits // 8))


def _sections(buffer: Tensor, numel: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Views of a buffer: the codes, and the scales (fp32)."""
    start, count = _codes_nbytes(numel, bits), -(-numel // block)
    return buffer[:start], buffer[start : start + 4 * count].view(torch.float32)


def _row_sections(buffers: Tensor, numel: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Views of rows of buffers, of whole blocks each: the codes, and the scales (fp32)."""
    start, count = _codes_nbytes(numel, bits), numel // block
    return buffers[:, : numel * bits // 8], buffers[:, start : start + 4 * count].view(torch.float32)


def _rows(flat: Tensor, block: int) -> Tensor:
    """[blocks, block], filled up with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)


def _encoded(c: Tensor, bits: int, numel: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (uint8) and values of [blocks, block], the first ``numel`` elements of them real; and the scales."""
    largest = c.abs().amax(1)
    bad = ~largest.isfinite()
    if bits >= 4:
        scale = largest / (127.0 if bits == 8 else 7.0)
        # A subnormal scale can have an infinite inverse, and is flushed to zero on some devices.
        scale[scale < torch.finfo(torch.float32).tiny] = 0.0
    else:
        scale = _mean_magnitudes(c, largest, numel)
    scale[bad] = torch.nan
    column = scale[:, None]
    if bits >= 4:
        inverse = torch.where(column == 0.0, 0.0, 1.0 / column)
        # Multiply by the inverse, as the kernels do: a division would round some codes to the other side.
        q = (c * inverse).round().masked_fill_(bad[:, None], 0.0)
        code = (q.to(torch.int8) & (0xF if bits == 4 else -1)).view(torch.uint8)
    else:
        code = (c < 0.0).to(torch.uint8)
        if bits == 2:
            code |= (c.abs() > column * _THRESHOLD).to(torch.uint8) << 1
        # A block that decodes to NaN has codes of 0, as from the kernels.
        code.masked_fill_(bad[:, None], 0)
    return code, _decoded(code, column, bits), scale


def _mean_magnitudes(c: Tensor, largest: Tensor, numel: int) -> Tensor:
    """The mean magnitude of each block; a sum of multiples of one unit per block, exact in fp64 in any order."""
    # Adding and subtracting 1.5 * 2^exponent rounds each magnitude to a multiple of 2^(exponent - 52). The sum of a
    # block has less than 2^52 such units, as magnitudes are below 2^(exponent - 16): it is exact.
    exponent = (largest.view(torch.int32) >> 23).long() - 126 + 16
    shift = (((exponent + 1023) << 52) | (1 << 51)).view(torch.float64)[:, None]  # 1.5 * 2^exponent
    count = torch.full_like(largest, c.shape[1], dtype=torch.float64)
    # The last block may be shorter: its padding does not count in the mean.
    count[-1] = numel - (c.shape[0] - 1) * c.shape[1]
    return (c.abs().double().add_(shift).sub_(shift).sum(1) / count).float()


def _decoded(code: Tensor, scale: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return code.view(torch.int8).float() * scale
    if bits == 4:
        # Flipping the sign bit and subtracting 8 extends four bits in two's complement.
        return ((code ^ 8).float() - 8.0) * scale
    magnitude = scale if bits == 1 else torch.where(code >= 2, scale * _HIGH, scale * _LOW)
    return torch.where(code & 1 == 1, -magnitude, magnitude)


def _packed(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (codes.view(-1, 8 // bits) << shifts).sum(1, dtype=torch.uint8)


def _unpacked(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return ((codes[:, None] >> shifts) & ((1 << bits) - 1)).view(-1)
