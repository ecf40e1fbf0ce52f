"""NormalFloat: 4 bits an element, 16 levels that are equally likely for normal weights (QLoRA, arXiv:2305.14314).

A flat tensor is cut into blocks of 64 elements with one fp32 scale each, the largest magnitude; a code is the number of
the level that is nearest to x / scale. A buffer holds the codes of all elements first, the first one in the lower bits
of a byte, padded with zeros to a multiple of 16 bytes; then the scales, padded likewise: 4.5 bits an element. Levels
and blocks are those of bitsandbytes without double quantisation, so decoded values are the same.

The largest element of a block is decoded exactly, as 1 and -1 are levels. So encoding what was decoded gives the same
codes and scales: weights that are saved and loaded again do not change.

A block that holds an infinity or a NaN decodes to NaN, and its codes are zeros, as is all padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from lt_zero.common.codec import Codec, RestingCodec
from lt_zero.kernels.blocks import check_buffers, decode_natively, encode_natively, prepared, quantized_nbytes
from lt_zero.kernels.codecs import INT8
from lt_zero.kernels.dispatch import native

LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_CHUNK = 1 << 18  # elements that are in fp32 at a time, on a CPU in its cache; a multiple of the block


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two levels (fp32) that each byte stands for, as one int64: (256,)."""
    # The table is kept, so it may not be one of inference mode.
    with torch.inference_mode(False):
        levels, byte = torch.tensor(LEVELS, dtype=torch.float32), torch.arange(256)
        return levels[torch.stack([byte & 15, byte >> 4], 1)].view(torch.int64).flatten().to(device)


def _middles() -> list[float]:
    """The values between two levels, in fp32: above one, the next level is nearer."""
    levels = torch.tensor(LEVELS, dtype=torch.float32)
    return ((levels[1:] + levels[:-1]) / 2).tolist()


@dataclass(frozen=True)
class NormalFloat4(Codec):
    """Codes of 4 bits and a scale for each ``block`` elements, a multiple of 16."""

    block: int = 64
    fixed_size: ClassVar[bool] = True

    def nbytes(self, numel: int) -> int:
        return quantized_nbytes(numel, 4, self.block)

    def encode(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        out, lib = prepared(x, 4, self.block, residual, out), native(x.device)
        if lib is None:
            return self.encode_reference(x, residual, out)
        encode_natively(lib, x, residual, out, 4, self.block, normal=True)
        return out

    def encode_reference(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """``encode`` in torch operations."""
        out = prepared(x, 4, self.block, residual, out).zero_()
        codes, scales = self._sections(out, x.numel())
        middles = _middles()
        step = _step(x.device)
        for first in range(0, x.numel(), step):
            part = slice(first, min(first + step, x.numel()))
            values = x[part].float() if residual is None else x[part].float() + residual[part]
            rows = self._rows(values)
            scale = rows.abs().amax(1)
            scale.masked_fill_(~scale.isfinite(), torch.nan)
            at = slice(first // self.block, first // self.block + len(rows))
            scales[at] = scale
            rows = rows / torch.where(scale == 0, 1.0, scale)[:, None]  # NaN, above no middle, where the scale is NaN
            code = torch.zeros_like(rows, dtype=torch.uint8)
            # Faster than ``bucketize``, which searches for each element.
            for middle in middles:
                code += rows > middle
            code.view(-1)[values.numel() :] = 0
            pairs = code.view(-1)[: values.numel() + values.numel() % 2].view(-1, 2)
            codes[first // 2 : first // 2 + len(pairs)] = pairs[:, 0] | pairs[:, 1] << 4
        if residual is not None:
            self._keep_errors(x, out, scales, residual)
        return out

    def _keep_errors(self, x: Tensor, out: Tensor, scales: Tensor, residual: Tensor) -> None:
        """Leave the rounding errors of ``x + residual`` in ``residual``, except in blocks that are not finite."""
        decoded = torch.empty_like(residual)
        self.decode_sum_reference([out], decoded)
        finite = scales.isfinite().repeat_interleave(self.block)[: x.numel()]
        residual.copy_(torch.where(finite, x.float() + residual - decoded, residual))

    def decode_sum(self, buffers: Sequence[Tensor], out: Tensor, scale: float = 1.0) -> None:
        check_buffers(buffers, out, 4, self.block)
        lib = native(out.device)
        if lib is None:
            return self.decode_sum_reference(buffers, out, scale)
        return decode_natively(lib, buffers, out, 4, self.block, scale, normal=True)

    def decode_sum_reference(self, buffers: Sequence[Tensor], out: Tensor, scale: float = 1.0) -> None:
        """``decode_sum`` in torch operations."""
        check_buffers(buffers, out, 4, self.block)
        pairs = _pairs(out.device)
        step = _step(out.device)
        for first in range(0, out.numel(), step):
            size = min(step, out.numel() - first)
            total: Tensor | None = None
            for buffer in buffers:
                codes, scales = self._sections(buffer, out.numel())
                here = codes[first // 2 : first // 2 + -(-size // 2)].int()
                # One copy of 8 bytes for two elements: several times as fast as rows of two.
                values = self._rows(torch.index_select(pairs, 0, here).view(torch.float32))
                values *= scales[first // self.block : first // self.block + len(values), None]
                total = values if total is None else total.add_(values)
            assert total is not None
            if scale != 1.0:
                total *= scale
            out[first : first + size].copy_(total.view(-1)[:size])

    def _rows(self, values: Tensor) -> Tensor:
        """[blocks, block], filled up with zeros; a view if there is nothing to fill."""
        rest = -values.numel() % self.block
        return (torch.nn.functional.pad(values, (0, rest)) if rest else values).view(-1, self.block)

    def _sections(self, buffer: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Views of a buffer: the codes (uint8, two a byte), and the scales (fp32)."""
        start, count = self.nbytes(numel) - _padded(4 * -(-numel // self.block)), -(-numel // self.block)
        return buffer[: -(-numel // 2)], buffer[start : start + 4 * count].view(torch.float32)


def _step(device: torch.device) -> int:
    """Elements that are in fp32 at a time: more on a device that is fed with few, large operations."""
    return _CHUNK if device.type == "cpu" else 64 * _CHUNK


def _padded(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


NF4 = NormalFloat4()
RESTING: Mapping[int, RestingCodec] = {8: INT8, 4: NF4}
"""Codecs of weights that rest encoded, by bits."""
