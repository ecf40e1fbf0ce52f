"""Norms of gradients that do not depend on how the elements are cut into shards, buckets and pieces.

Note [Exact sums]
    A sum of floating-point numbers depends on its order, and the order on the cut. Parameters and shards begin at
    multiples of ``BLOCK`` elements in flat tensors, so that a cut never divides a block of a parameter. The powers in a
    block are added in fp64, halves to halves, in an order that is written out here.

    The sums of blocks are added as integers: as a number of digits of ``_BITS`` bits, of which digit k counts multiples
    of 2^(_BITS * k). Each is split into such digits without a rounding, chunk by chunk. In a chunk the digits of one
    place are less than 2^_BITS, so that fp64 adds them up exactly, in any order. Python adds up the sums of chunks, and
    ranks add their digits in fp64, which is exact for up to 2^(53 - _BITS) of them. At the end the digits become one
    integer, whatever the carries were, which is rounded to fp64 once.

    Squares of numbers of up to 32 bits are exact in fp64. Other powers are rounded to it element by element, in whole
    vectors: at the end of a row the loops of torch would use another function for powers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from typing_extensions import override

from lt_zero.common import accelerator
from lt_zero.common.norms import VectorNorm
from lt_zero.kernels.flat import wide

_BITS = 36
_LOWEST = -30  # the place of the lowest digit: the smallest fp64 number is 2^-1074
_DIGITS = 59  # the largest are below 2^1024
_CHUNK = 1 << 17  # elements, whose powers stay in the cache
_CHUNK_OF_DEVICE = 1 << 22  # elements: a GPU takes large pieces, which cost memory for their powers
_ROW = 1 << 22  # elements: of the sums of so many the digits of one place add up to less than 2^53
_SUMS_OF_DEVICE = 1 << 22  # blocks, whose sums a GPU splits into digits together: the host waits twice for all of them
_OF_ONE_THREAD = 1 << 15  # elements: torch divides no fewer among threads, at any place
BLOCK = 64  # elements: a power of 2, and a multiple of every vector


def norm_of_order(order: float) -> VectorNorm:
    """A norm of this order with the same bits for every cut. Extrema and counts have them anyway."""
    return VectorNorm(order) if order == 0.0 or math.isinf(order) else ExactNorm(order)


class ExactNorm(VectorNorm):
    """A norm of a finite order, not 0, from exact sums of powers. See Note [Exact sums].

    A part is a row of digits, the lowest first, then how many blocks have an infinite power, how many a NaN, and how
    many tensors there are.
    """

    columns = _DIGITS + 3

    @override
    def part(
        self, elements: Iterable[Tensor], device: torch.device, share: float = 1.0, factor: Tensor | None = None
    ) -> Tensor:
        """As ``VectorNorm.part``; ``factor``: may be multiplied before this, with the same bits.

        Each tensor begins at a multiple of ``BLOCK`` elements of its parameter, or of parameters that begin so.

        Raises:
            ValueError: ``share`` is neither 0 nor 1: a sum that is divided is not exact.
        """
        if share not in (0.0, 1.0):
            raise ValueError(f"share={share}: each element has to be counted by one rank. Pass 0 or 1.")
        found, count = _Total(), 0
        of_device: list[Tensor] = []
        for tensor in elements:
            if tensor.numel() == 0:
                continue
            count += 1
            dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
            if dense.is_complex():
                dense = torch.view_as_real(dense.resolve_conj()) if self.order == 2.0 else dense.abs()
            dense = dense.reshape(-1)
            if accelerator.holds(dense):
                of_device += [self._sums_of_blocks(chunk, factor) for chunk in dense.split(_CHUNK_OF_DEVICE)]
                if sum(map(len, of_device)) >= _SUMS_OF_DEVICE:
                    found.add_of_device(torch.cat(of_device))
                    of_device.clear()
                continue
            # The sums of several chunks are split into digits together: that takes a few operations of any length.
            for row in dense.split(_ROW):
                found.add(torch.cat([self._sums_of_blocks(chunk, factor) for chunk in row.split(_CHUNK)]))
        if of_device:
            found.add_of_device(torch.cat(of_device))
        total = found.total
        digits = [(total >> (_BITS * place)) & ((1 << _BITS) - 1) for place in range(_DIGITS - 1)]
        digits.append(total >> (_BITS * (_DIGITS - 1)))
        row = torch.tensor([*digits, found.infinite, found.undefined, count], dtype=torch.float64)
        return (row * share).to(device)

    def _sums_of_blocks(self, elements: Tensor, factor: Tensor | None) -> Tensor:
        """The sums (1D, fp64) of the powers of the magnitudes in each block."""
        numel = elements.numel()
        if factor is not None:
            # Rounded as the product is that a step takes.
            elements = elements.to(wide(elements.dtype)) * factor.to(elements.device)
        powers = torch.empty(-(-numel // BLOCK) * BLOCK, dtype=torch.float64, device=elements.device)
        powers[:numel] = elements
        powers[numel:] = 1.0  # zeros have no negative powers
        if self.order == 2.0:
            powers.square_()
        elif self.order == 1.0:
            powers.abs_()
        elif accelerator.holds(powers):
            powers.abs_().pow_(self.order)
        else:
            for piece in powers.abs_().split(_OF_ONE_THREAD):
                piece.pow_(self.order)
        powers[numel:] = 0.0
        width = BLOCK
        rows = powers.view(-1, width)
        while width > 1:
            width //= 2
            rows = rows[:, :width] + rows[:, width:]
        return rows.view(-1)

    @override
    def finish(self, parts: Tensor, among: int = 1) -> Tensor:
        found = []
        for row in parts.tolist():
            *digits, infinite, undefined, count = row
            total = sum(int(digit) << (_BITS * place) for place, digit in enumerate(digits))
            # The quotient is rounded once. Roots are taken here, as torch's depend on how many it takes at once.
            value = total / (1 << (-_BITS * _LOWEST)) / among
            norm = math.sqrt(value) if self.order == 2.0 else _root(value, self.order)
            norm = math.nan if undefined else _root(math.inf, self.order) if infinite else norm
            found.append(norm if count else 0.0)
        return torch.tensor(found, dtype=torch.float64).to(parts.device)


def _root(value: float, order: float) -> float:
    """``value ** (1 / order)``, also of 0 for negative orders."""
    if value == 0.0 and order < 0.0:
        return math.inf
    return float(value ** (1.0 / order))


class _Total:
    """A sum of sums of blocks.

    Attributes:
        total: of those that are finite, in units of the lowest digit.
        infinite, undefined: how many are infinite, or NaN.
    """

    def __init__(self) -> None:
        self.total = 0
        self.infinite = 0.0
        self.undefined = 0.0

    def add(self, sums: Tensor) -> None:
        """Add the sums of the blocks of ``_ROW`` elements (1D, fp64; overwritten)."""
        most = float(sums.max())
        if math.isfinite(most):
            self.total += _exact_sum(sums, most)
            return
        self.undefined += float(sums.isnan().sum())
        self.infinite += float(sums.isinf().sum())

    def add_of_device(self, sums: Tensor) -> None:
        """Add the sums of any number of blocks (1D, fp64; overwritten). The host waits twice for their device."""
        least = torch.where(sums > 0.0, sums, math.inf).min()
        facts = torch.stack([sums.max(), least, sums.isnan().sum(), sums.isinf().sum()])
        highest, lowest, undefined, infinite = facts.tolist()
        self.undefined += undefined
        self.infinite += infinite
        if undefined or infinite or not highest:
            return
        first = (math.frexp(highest)[1] - 1) // _BITS
        # No sum has a bit below that of the last place of the least one.
        last = max(_LOWEST, (math.frexp(lowest)[1] - 53) // _BITS)
        length = _ROW // BLOCK
        rest = torch.nn.functional.pad(_scaled(sums, first), (0, -len(sums) % length)).view(-1, length)
        digits = []
        for _ in range(first, last - 1, -1):
            whole = rest.round()
            digits.append(whole.sum(1))
            rest = rest.sub_(whole).mul_(2.0**_BITS)
        for place, of_rows in zip(range(first, last - 1, -1), torch.stack(digits).tolist(), strict=True):
            self.total += sum(map(int, of_rows)) << (_BITS * (place - _LOWEST))


def _scaled(summands: Tensor, place: int) -> Tensor:
    """``summands`` (fp64; overwritten) in units of a digit."""
    # In two factors, each of which fp64 has.
    half = -(_BITS * place) // 2
    return summands.mul_(2.0**half).mul_(2.0 ** (-(_BITS * place) - half))


def _exact_sum(summands: Tensor, most: float) -> int:
    """The sum of ``summands`` (1D, fp64, not negative; overwritten), in units of the lowest digit.

    ``most``: the largest of them. Digits may be negative, as each is rounded to the nearest.
    """
    total = 0
    place = (math.frexp(most)[1] - 1) // _BITS if most else _LOWEST
    rest = _scaled(summands, place)
    whole = torch.empty_like(rest)
    while place >= _LOWEST:
        torch.round(rest, out=whole)
        total += int(whole.sum()) << (_BITS * (place - _LOWEST))
        rest.sub_(whole)
        if not int(torch.count_nonzero(rest)):  # ``any`` takes twice as long
            break
        rest.mul_(2.0**_BITS)
        place -= 1
    return total
