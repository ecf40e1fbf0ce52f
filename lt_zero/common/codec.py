"""The codec of a collective: a flat tensor to bytes, and received bytes to a sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


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


class RestingCodec(Codec, Protocol):
    """Codec of weights that rest encoded.

    Attributes:
        block: elements that are encoded together, so that parameters begin at multiples of it.
    """

    @property
    def block(self) -> int: ...
