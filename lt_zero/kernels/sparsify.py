"""Sparsification: the largest magnitudes of a tensor, and bytes that hold few elements of many.

An encoded buffer has a header, then Huffman-coded strings (huffman.py), each preceded in the header by its number of
bytes:

1. the gaps between indices, less one, shifted right by ``shift`` bits: 255 for each full 255, then the rest as a byte
2. if ``shift`` is 8 or 16: the lower bytes of the gaps, one string for each
3. the values, one string for each byte of an element, the lowest first

With a share p of the elements, gaps are near geometric, with an entropy of about log2(e / p) bits: 8.1 for 1 %. Bytes
of gaps shifted until their mean is below 256 reach that within a few percent after coding. Bytes of values are kept
apart because only the highest one (sign and exponent) shrinks. Integers are little-endian.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from lt_zero.common import accelerator
from lt_zero.kernels.blocks import check_flat
from lt_zero.kernels.dispatch import address, call, native, pointer
from lt_zero.kernels.huffman import OVERHEAD, CorruptError, huffman_decode, huffman_encode, huffman_store

VALUES = {torch.float32: 0, torch.bfloat16: 1}  # how values are kept; fp16 would overflow
_HEADER = struct.Struct("<qqBB6x")  # elements of the tensor, of them encoded, dtype of values, shift
_LARGEST = 2**31 - 1
_ESCAPE = 255


def select_topk(c: Tensor, k: int) -> Tensor:
    """The indices of the ``k`` largest magnitudes, in rising order.

    NaN counts as the largest, then infinities. Of equal magnitudes the first ones are taken, so that the result does
    not depend on the number of threads, nor on the device.

    Args:
        c: 1D, contiguous, fp32, of at most 2^31 - 1 elements.
        k: from 0 to ``c.numel()``.

    Returns:
        [k] int32.

    Raises:
        ValueError: ``c`` or ``k`` is something else.
    """
    _check_selection(c, k)
    lib = native(c.device)
    if lib is None:
        return select_topk_reference(c, k)
    indices, room = torch.empty(k, dtype=torch.int32, device=c.device), None
    # Keep the scratch memory until the kernels are launched.
    if c.device.type != "cpu":
        room = torch.empty(lib.lt_cuda_topk_scratch(c.numel()), dtype=torch.uint8, device=c.device)
    call(lib, "select_topk", c.device, address(c), c.numel(), k, address(indices), *pointer(room))
    return indices


def select_topk_reference(c: Tensor, k: int) -> Tensor:
    """``select_topk`` in torch operations."""
    _check_selection(c, k)
    if k == 0:
        return torch.empty(0, dtype=torch.int32, device=c.device)
    # Without the sign bit, the bits of fp32 numbers are ordered as the magnitudes, with infinities and NaNs last.
    magnitudes = c.view(torch.int32) & 0x7FFFFFFF
    threshold = magnitudes.kthvalue(c.numel() - k + 1).values
    above, equal = (magnitudes > threshold).nonzero(), (magnitudes == threshold).nonzero()
    return torch.cat([above, equal[: k - above.numel()]]).view(-1).sort().values.int()


def topk_max_nbytes(numel: int, k: int, values: torch.dtype = torch.float32) -> int:
    """The bytes that ``encode_topk`` needs at most."""
    shift = _shift(numel, k)
    strings = 1 + shift // 8 + values.itemsize
    gaps = k + (numel >> shift) // _ESCAPE
    return _HEADER.size + strings * (8 + OVERHEAD) + gaps + k * (shift // 8 + values.itemsize)


def encode_topk(
    x: Tensor, k: int, residual: Tensor | None = None, values: torch.dtype = torch.float32, huffman: bool = True
) -> Tensor:
    """Encode the ``k`` largest magnitudes of ``x + residual``; the residual keeps all else, and their rounding errors.

    NaNs and infinities are encoded first, so that the receiver finds an overflow; the residual is 0 where they were.

    Args:
        x: 1D, contiguous, in fp32, bf16 or fp16.
        k: from 0 to ``x.numel()``.
        residual: fp32, of x's size, updated; None: the rest is lost.
        values: fp32 or bf16, which holds values in half the bytes.
        huffman: see ``pack_sparse``.

    Returns:
        1D uint8 on x's device, of at most ``topk_max_nbytes``. The coder runs on the host.

    Raises:
        ValueError: an argument is something else.
    """
    if values not in VALUES:
        raise ValueError(f"values is {values}; torch.float32 or torch.bfloat16 is needed.")
    check_flat("x", x, [torch.float32, torch.bfloat16, torch.float16], x.numel(), x.device)
    if residual is None:
        c = x.float()
    else:
        check_flat("residual", residual, [torch.float32], x.numel(), x.device)
        # In place: c is the residual from here on, and loses what is encoded below.
        c = residual.add_(x)
    indices = select_topk(c, k)
    places = indices.long()
    chosen = c[places]
    kept = chosen.to(values)
    if residual is not None:
        residual[places] = chosen - kept.float()
    kept = kept.cpu()
    if residual is not None and not bool(kept.isfinite().all()):  # there may be more of them than k
        residual.nan_to_num_(0.0, 0.0, 0.0)
    return accelerator.send(pack_sparse(indices, kept, x.numel(), huffman), x.device)


def decode_topk_add(buffer: Tensor, out: Tensor, scale: float = 1.0) -> None:
    """Add ``scale`` times the encoded elements to ``out``.

    Args:
        buffer: as ``encode_topk`` makes it; bytes beyond its end are not looked at.
        out: 1D, contiguous, fp32, as large as the tensor that was encoded.
        scale: rounded to fp32.

    Raises:
        CorruptError: the buffer is damaged, or that of a tensor of another size.
        ValueError: ``out`` is something else.
    """
    check_flat("out", out, [torch.float32], out.numel(), out.device)
    indices, values = unpack_sparse(buffer, out.numel())
    places = accelerator.send(indices, out.device)
    out[places] += accelerator.send(values, out.device).float() * scale  # no index occurs twice


def pack_sparse(indices: Tensor, values: Tensor, numel: int, huffman: bool = True) -> Tensor:
    """The bytes (1D uint8, on the CPU) of ``values`` (fp32 or bf16) at rising ``indices`` of ``numel`` elements.

    Without ``huffman`` strings are stored as they are, which takes less time.
    """
    places, k = indices.cpu().long(), values.numel()
    shift = _shift(numel, k)
    gaps = places.diff(prepend=places.new_tensor([-1])) - 1
    high = gaps >> shift
    # A gap takes a 255 for each full 255 and one byte for the rest: here is where each gap's bytes end.
    ends = (high // _ESCAPE + 1).cumsum(0)
    escaped = torch.full((int(ends[-1]) if k else 0,), _ESCAPE, dtype=torch.uint8)
    escaped[ends - 1] = (high % _ESCAPE).to(torch.uint8)
    strings = [escaped, *(((gaps >> bits) & 255).to(torch.uint8) for bits in range(0, shift, 8))]
    strings += values.cpu().view(torch.uint8).view(k, values.itemsize).T.contiguous().unbind()
    coded = [huffman_encode(string) if huffman else huffman_store(string) for string in strings]
    header = _HEADER.pack(numel, k, VALUES[values.dtype], shift)
    header += struct.pack(f"<{len(coded)}q", *[string.numel() for string in coded])
    return torch.cat([torch.frombuffer(bytearray(header), dtype=torch.uint8), *coded])


def unpack_sparse(buffer: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Indices (int64, rising, each below ``numel``) and values of ``pack_sparse``, on the CPU.

    Raises:
        CorruptError: the buffer is damaged, or that of a tensor of another size.
    """
    data = buffer.cpu()
    if data.numel() < _HEADER.size:
        raise CorruptError(f"{data.numel()} bytes are no sparse tensor: its header has {_HEADER.size}.")
    encoded, k, kind, shift = _HEADER.unpack(data[: _HEADER.size].numpy().tobytes())
    dtype = next((dtype for dtype, number in VALUES.items() if number == kind), None)
    # Check before anything is allocated: damaged numbers would ask for any amount of memory.
    if encoded != numel or not 0 <= k <= numel or dtype is None or shift != _shift(numel, k):
        raise CorruptError(
            f"The header of a sparse tensor says: {k} of {encoded} elements, dtype {kind}, shift {shift}; "
            f"a tensor of {numel} elements is expected."
        )
    most = [k + (numel >> shift) // _ESCAPE, *[k] * (shift // 8 + dtype.itemsize)]
    escaped, *rest = _strings(data, most)
    if any(string.numel() != k for string in rest):
        raise CorruptError(f"A sparse tensor of {k} elements has strings of other sizes.")
    ends = (escaped != _ESCAPE).nonzero().view(-1)
    # Sums up to the last byte of each gap, less those up to the gap before.
    high = escaped.long().cumsum(0)[ends].diff(prepend=torch.zeros(1, dtype=torch.long))
    if ends.numel() != k or (k and int(ends[-1]) != escaped.numel() - 1):
        raise CorruptError(f"A sparse tensor of {k} elements has {ends.numel()} indices.")
    gaps = high << shift
    for number, low in enumerate(rest[: shift // 8]):
        gaps |= low.long() << 8 * number
    indices = (gaps + 1).cumsum(0) - 1
    if k and int(indices[-1]) >= numel:
        raise CorruptError(f"A sparse tensor has an index {int(indices[-1])} of {numel} elements.")
    values = torch.stack(rest[shift // 8 :], 1) if k else torch.empty(0, dtype.itemsize, dtype=torch.uint8)
    return indices, values.view(dtype).view(-1)


def _strings(data: Tensor, most: list[int]) -> list[Tensor]:
    """The decoded strings, each of at most so many bytes."""
    begin = _HEADER.size + 8 * len(most)
    if data.numel() < begin:
        raise CorruptError(f"A sparse tensor of {data.numel()} bytes has no room for its {len(most)} strings.")
    strings = []
    sizes = struct.unpack(f"<{len(most)}q", data[_HEADER.size : begin].numpy().tobytes())
    for size, limit in zip(sizes, most, strict=True):
        if not OVERHEAD <= size <= data.numel() - begin:
            raise CorruptError(f"A string of {size} bytes does not fit into a sparse tensor of {data.numel()}.")
        strings.append(huffman_decode(data[begin : begin + size], limit))
        begin += size
    return strings


def _shift(numel: int, k: int) -> int:
    """The lower bits of a gap that are kept apart: whole bytes, until the rest has a mean below 256."""
    mean = numel // max(k, 1)
    return 0 if mean < 256 else 8 if mean < 1 << 16 else 16


def _check_selection(c: Tensor, k: int) -> None:
    check_flat("c", c, [torch.float32], c.numel(), c.device)
    if c.numel() > _LARGEST:
        raise ValueError(f"c has {c.numel()} elements; indices of 32 bits reach up to {_LARGEST}.")
    if not 0 <= k <= c.numel():
        raise ValueError(f"k is {k}; from 0 to {c.numel()} elements can be selected.")
