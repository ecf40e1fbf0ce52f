"""Moments in 8 bits: codes of blocks of 256 elements, each with its largest magnitude (arXiv:2110.02861).

A tensor is a row of records, one per block: 256 bytes of codes, then the scale, the largest magnitude of the block, in
fp32. The codes are the paper's dynamic codes: seven decades below the scale, the upper ones in finer steps. Values with
a sign have 127 magnitudes and zero; others (second moments) have 254 of their own, zero and the scale.

Three things differ from the paper's table, so that training goes on from a checkpoint bit for bit, which holds values:

- The largest magnitude is a level for both signs. Then encoding what was decoded gives the same codes.
- A scale below 2^-100 counts as 0, because products with it would round in fp32's denormal numbers.
- A second moment that is not zero is never rounded to zero: its update would be divided by eps alone.

A block with an infinity or a NaN decodes to NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lt_zero.common.compat import argument_names, no_torch_function, wrapper_tensor, written_arguments
from lt_zero.common.moment_form import EncodedTensor, Lend, MomentForm, PlainMoments
from lt_zero.kernels.dispatch import TAKE_CODES, StateCode

BLOCK = 256  # elements
SMALLEST = 4096  # elements of a parameter
RECORD = BLOCK + 4  # bytes: codes, and the scale
_SMALLEST = 2.0**-100


def coded_nbytes(numel: int) -> int:
    """Bytes of ``numel`` elements."""
    return -(-numel // BLOCK) * RECORD


@functools.cache
def level_table(device: torch.device) -> Tensor:
    """The code on ``device``: [768] fp32.

    128 magnitudes with a sign, and what lies half-way to the next one; 256 without, likewise. Half-way beyond the last
    is infinity.
    """
    numbers = []
    for doubled in (1, 2):
        levels = [0.0]
        for exponent in range(7):
            count = doubled * 2**exponent
            levels += [(0.1 + 0.9 * (2 * j + 1) / (2 * count)) * 10.0 ** (exponent - 6) for j in range(count)]
        values = torch.tensor([*levels[:-1], 1.0] if doubled == 1 else [*levels, 1.0], dtype=torch.float64)
        numbers += [values.float(), ((values[1:] + values[:-1]) / 2).float(), torch.tensor([torch.inf])]
    return torch.cat(numbers).to(device)


def levels_of(device: torch.device, signed: bool) -> tuple[Tensor, Tensor]:
    """Magnitudes, rising, and the numbers half-way to the next one."""
    first, count = (0, 128) if signed else (256, 256)
    table = level_table(device)
    return table[first : first + count], table[first + count : first + 2 * count - 1]


def encode(values: Tensor, signed: bool, out: Tensor) -> None:
    """Encode ``values`` (any shape) into ``out`` (uint8, ``coded_nbytes``)."""
    flat = values.detach().reshape(-1).float()
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scale = rows.abs().amax(1, keepdim=True)
    scale = torch.where(scale.isfinite(), torch.where(scale < _SMALLEST, 0.0, scale), torch.nan)
    ratio = rows / scale  # NaN for zeros without a scale, and where there is a NaN
    ratio = torch.where(scale > 0, ratio, 0.0)
    _, middles = levels_of(values.device, signed)
    if signed:
        codes = torch.bucketize(ratio.abs(), middles)
        codes = torch.where((ratio < 0) & (codes > 0), codes + 128, codes)
    else:
        codes = torch.bucketize(ratio.clamp(min=0.0), middles)
        codes = torch.where((ratio > 0) & (codes == 0), 1, codes)
    records = out.view(-1, RECORD)
    records[:, :BLOCK] = codes.to(torch.uint8)
    records[:, BLOCK:] = scale.contiguous().view(torch.uint8)


def decode(rows: Tensor, numel: int, signed: bool) -> Tensor:
    """The first ``numel`` elements (1D fp32) of records (1D uint8)."""
    records = rows.reshape(-1, RECORD)
    levels, _ = levels_of(rows.device, signed)
    levels = torch.cat([levels, -levels]) if signed else levels
    scale = records[:, BLOCK:].contiguous().view(torch.float32)
    return (levels[records[:, :BLOCK].long()] * scale).view(-1)[:numel]


def check_codes(states: Sequence[Sequence[Tensor]], params: Sequence[Tensor]) -> None:
    """Raise ValueError if states are no codes for parameters of these sizes, on their device."""
    for number, state in enumerate(states):
        if len(state) != len(params):
            raise ValueError(f"state {number} has {len(state)} tensors, but {len(params)} are needed.")
        for row, param in zip(state, params, strict=True):
            nbytes, fits = coded_nbytes(param.numel()), row.is_contiguous() and row.data_ptr() % 4 == 0
            if row.dtype != torch.uint8 or row.numel() != nbytes or row.device != param.device or not fits:
                raise ValueError(
                    f"state {number} has {row.numel()} elements of {row.dtype} on {row.device}; {nbytes} contiguous "
                    f"bytes on {param.device}, at a multiple of 4, are needed for codes of {param.numel()} elements."
                )


CODE = StateCode(check=check_codes, levels=level_table, encode=encode, decode=decode)


# ---- where they are kept -------------------------------------------------------------------------------------------

# States that are never negative: their codes need no sign.
_SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "sum"}


@dataclass(frozen=True)
class CodedMoments:
    """Moments in 8 bits. Those of embeddings and of small parameters stay wide, as the paper recommends."""

    name: str = "int8"
    dtype: torch.dtype = torch.uint8
    align: int = BLOCK
    bytes_per_element: float = RECORD / BLOCK
    value_nbytes: int = 4
    not_of: tuple[type[nn.Module], ...] = (nn.Embedding, nn.EmbeddingBag)

    @property
    def least(self) -> int:
        return SMALLEST

    def is_taken_by(self, step: str) -> bool:
        return step in TAKE_CODES

    def length(self, numel: int) -> int:
        return coded_nbytes(numel)

    def nbytes(self, numel: int) -> int:
        return coded_nbytes(numel)

    def view(self, lend: Lend, lo: int, shape: torch.Size, key: str) -> Tensor:
        return CodedTensor(
            lend(coded_nbytes(lo), torch.Size([coded_nbytes(shape.numel())])), shape, key not in _SQUARES
        )

    def keeps(self, value: Tensor) -> bool:
        return isinstance(value, CodedTensor)

    def kept(self, value: Tensor, key: str) -> Tensor:
        if self.keeps(value) or not value.is_floating_point():
            return value
        rows = torch.empty(coded_nbytes(value.numel()), dtype=torch.uint8, device=value.device)
        made = CodedTensor(rows, value.shape, key not in _SQUARES)
        encode(value, made.signed, rows)
        return made

    def form_of(self, value: Tensor) -> MomentForm:
        return self if value.is_floating_point() else PlainMoments(value.dtype)


class CodedTensor(EncodedTensor):
    """A tensor that is kept in records of codes. Operations decode it, and encode what they have written.

    Args:
        rows: the records (1D uint8).
        shape: of the tensor, which is fp32.
        signed: whether its code has a sign.
    """

    signed: bool
    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, rows: Tensor, shape: torch.Size, signed: bool) -> CodedTensor:
        made: CodedTensor = wrapper_tensor(cls, tuple(shape), torch.float32, rows.device)
        made.rows, made.signed = rows, signed
        return made

    @override
    def decoded(self) -> Tensor:
        return decode(self.rows, self.shape.numel(), self.signed).view(self.shape)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given = {**dict(zip(argument_names(func), args, strict=False)), **(kwargs or {})}
        written = written_arguments(func)
        changed: list[tuple[CodedTensor, Tensor]] = []

        def plain(value: Any, keeps: bool) -> Any:
            if isinstance(value, CodedTensor):
                values = value.decoded()
                if keeps:
                    changed.append((value, values))
                return values
            return type(value)([plain(item, keeps) for item in value]) if isinstance(value, list | tuple) else value

        given = {name: plain(value, name in written) for name, value in given.items()}
        out = func(*[given.pop(name) for name, _ in zip(argument_names(func), args, strict=False)], **given)
        for coded, values in changed:
            encode(values, coded.signed, coded.rows)
        return next((coded for coded, values in changed if out is values), out)

    def fill_(self, value: Any) -> Tensor:
        """Set all elements to a number; 0 needs no values in between, which take many times the bytes of the codes."""
        if isinstance(value, int | float) and value == 0:
            self.rows.zero_()
            return self
        return super().fill_(value)

    def data_ptr(self) -> int:
        return self.rows.data_ptr()

    def untyped_storage(self) -> Any:
        return self.rows.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.decoded()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.decoded().__reduce_ex__(protocol)
