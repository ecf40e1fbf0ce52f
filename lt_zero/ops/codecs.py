"""Codecs of collectives: a flat tensor to bytes, and received bytes to a sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from lt_zero.ops.quantize import (
    check_flat,
    dequantize_rows,
    dequantize_sum,
    quantize,
    quantize_rows,
    quantized_nbytes,
)
from lt_zero.ops.sparsify import VALUES, decode_topk_add, encode_topk, topk_max_nbytes


class Codec(Protocol):
    """Compression with error feedback. A codec has no state: residuals are the caller's.

    NaNs and infinities of the input are NaNs or infinities of what is decoded, and never stay in a residual.
    """

    @property
    def fixed_size(self) -> bool:
        """True if the bytes depend on the number of elements only."""

    def nbytes(self, numel: int) -> int:
        """The bytes for ``numel`` elements; without ``fixed_size``, at most."""

    def encode(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Encode ``x + residual``, and leave the rounding error in ``residual``.

        Args:
            x: 1D, contiguous, in fp32, bf16 or fp16.
            residual: fp32, of x's size, updated; None: the error is lost.
            out: uint8 of ``nbytes(x.numel())``, at an address that is a multiple of 16; a new tensor if None.

        Returns:
            The bytes to send: ``out``, or without ``fixed_size`` its beginning.
        """

    def decode_sum(self, buffers: Sequence[Tensor], out: Tensor, scale: float = 1.0) -> None:
        """Write ``scale`` times the sum of the decoded buffers, added up in fp32.

        Args:
            buffers: at least one, each encoded from as many elements as ``out`` has.
            out: 1D, contiguous, in fp32, bf16 or fp16; written.
            scale: rounded to fp32.
        """

    def encode_rows(self, x: Tensor, residual: Tensor | None, out: Tensor) -> None:
        """Encode each row as ``encode`` does; with ``fixed_size`` only.

        Args:
            x: [rows, numel], contiguous.
            residual: [rows, numel], its rows contiguous; or None.
            out: uint8, [rows, nbytes(numel)], contiguous.
        """
        for number, row in enumerate(out.unbind()):
            self.encode(x[number], residual[number] if residual is not None else None, row)

    def decode_rows(self, buffers: Tensor, out: Tensor, scale: float = 1.0) -> None:
        """Decode each row of ``buffers`` ([rows, bytes], contiguous) into that of ``out``, multiplied by ``scale``."""
        for buffer, row in zip(buffers.unbind(), out.unbind(), strict=True):
            self.decode_sum([buffer], row, scale)

    def decoded(self, x: Tensor) -> Tensor:
        """``x`` (1D), encoded and decoded again, in its dtype."""
        out = torch.empty_like(x)
        self.decode_sum([self.encode(x)], out)
        return out


@dataclass(frozen=True)
class BlockCodec(Codec):
    """Block-wise compression (``lt_zero.ops.quantize``).

    Attributes:
        bits: of an element: 8, 4, 2 or 1.
        block: elements that share a scale: a multiple of 16, from 16 to 65536.
    """

    bits: int
    block: int
    fixed_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        quantized_nbytes(0, self.bits, self.block)  # checks them

    def nbytes(self, numel: int) -> int:
        return quantized_nbytes(numel, self.bits, self.block)

    def encode(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return quantize(x, self.bits, self.block, residual, out)

    def decode_sum(self, buffers: Sequence[Tensor], out: Tensor, scale: float = 1.0) -> None:
        dequantize_sum(buffers, out, self.bits, self.block, scale)

    def encode_rows(self, x: Tensor, residual: Tensor | None, out: Tensor) -> None:
        quantize_rows(x, self.bits, self.block, residual, out)

    def decode_rows(self, buffers: Tensor, out: Tensor, scale: float = 1.0) -> None:
        dequantize_rows(buffers, out, self.bits, self.block, scale)


INT8, INT4 = BlockCodec(8, 256), BlockCodec(4, 256)
TWO_BITS, ONE_BIT = BlockCodec(2, 256), BlockCodec(1, 1024)  # 93.4 % and 96.8 % fewer bytes than fp32


@dataclass(frozen=True)
class TopK(Codec):
    """The largest magnitudes (``lt_zero.ops.sparsify``).

    Attributes:
        share: of the elements, above 0, up to 1; at least one element is sent.
        values: fp32 or bf16; rounding errors of bf16 are kept in the residual.
        huffman: code the bytes; without it they are as many as ``nbytes`` at most.
    """

    share: float
    values: torch.dtype = torch.float32
    huffman: bool = True
    fixed_size: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share is {self.share}; it must be above 0 and at most 1.")
        if self.values not in VALUES:
            raise ValueError(f"values is {self.values}; torch.float32 or torch.bfloat16 is needed.")

    def count(self, numel: int) -> int:
        """The number of elements sent, of ``numel``."""
        return min(numel, math.ceil(self.share * numel))

    def nbytes(self, numel: int) -> int:
        return topk_max_nbytes(numel, self.count(numel), self.values)

    def encode(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        encoded = encode_topk(x, self.count(x.numel()), residual, self.values, self.huffman)
        if out is None:
            return encoded
        check_flat("out", out, [torch.uint8], self.nbytes(x.numel()), x.device)
        return out[: encoded.numel()].copy_(encoded)

    def decode_sum(self, buffers: Sequence[Tensor], out: Tensor, scale: float = 1.0) -> None:
        if len(buffers) == 0:
            raise ValueError("buffers is empty; at least one is needed.")
        # A buffer adds to its own elements only, so the sum begins at zero. It is in fp32, and rounded once at the end.
        total = out.zero_() if out.dtype == torch.float32 else torch.zeros_like(out, dtype=torch.float32)
        for buffer in buffers:
            decode_topk_add(buffer, total, scale)
        if total is not out:
            out.copy_(total)
