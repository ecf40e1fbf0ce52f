"""Vector norms of any order, of elements that lie in several tensors, or on several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


class VectorNorm:
    """A norm of one order, made of parts: each describes some of the elements, and parts are combined.

    A part is a row of three numbers (fp64): a sum or an extremum, whether an element is NaN, and whether there are
    elements. Parts are combined by the sums, or the maxima, of their numbers, as ``takes_maximum`` says. NaN and "no
    elements" have numbers of their own because collectives may lose NaN in a maximum, and because no elements have no
    minimum.

    Args:
        order: any that ``torch.linalg.vector_norm`` takes, except NaN.

    Raises:
        ValueError: the order is NaN.
    """

    columns = 3

    def __init__(self, order: float) -> None:
        self.order = float(order)
        if math.isnan(self.order):
            raise ValueError("norm_type=nan: a norm has no such order. Pass a number, or inf or -inf.")
        self.takes_maximum = math.isinf(self.order)

    def nothing(self, rows: int, device: torch.device) -> Tensor:
        """Parts without elements ([rows, 3])."""
        made = torch.zeros(rows, self.columns, dtype=torch.float64, device=device)
        if self.order == -math.inf:
            made[:, 0] = -math.inf
        return made

    def part(
        self, elements: Iterable[Tensor], device: torch.device, share: float = 1.0, factor: Tensor | None = None
    ) -> Tensor:
        """The part (1D) that these tensors are.

        Args:
            elements: of any shape.
            device: of the result.
            share: by what a sum is multiplied, where other ranks count the same elements, too; an extremum is not.
            factor: by what the elements are to be multiplied (0D, positive); not for order 0.
        """
        found = self.nothing(1, device)[0]
        for tensor in elements:
            if tensor.numel() == 0:
                continue
            dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
            dense = dense.abs() if dense.is_complex() else dense
            norm = torch.linalg.vector_norm(dense, self.order, dtype=torch.float64).to(device)
            norm = norm if factor is None else norm * factor.to(device, torch.float64)
            there = torch.ones_like(norm)
            if self.takes_maximum:
                extremum = norm if self.order > 0 else -norm
                is_nan = norm.isnan()
                row = torch.stack([torch.where(is_nan, -math.inf, extremum), is_nan.to(norm.dtype), there])
            else:
                total = norm if self.order == 0 else norm**self.order
                row = torch.stack([total * share, torch.zeros_like(norm), there])
            found = self.combine(found, row)
        return found

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        """The part that two parts are together."""
        return torch.maximum(one, other) if self.takes_maximum else one + other

    def finish(self, parts: Tensor, among: int = 1) -> Tensor:
        """The norms ([rows], fp64) of combined ``parts`` ([rows, 3]); 0 without elements, as torch's total norm.

        Args:
            parts: combined.
            among: the power mean over so many norms, instead of the norm of all elements.
        """
        value = parts[:, 0]
        if self.takes_maximum:
            value = value if self.order > 0 else -value
            value = torch.where(parts[:, 1] > 0, math.nan, value)
        elif self.order != 0:
            value = (value / among) ** (1.0 / self.order)
        return torch.where(parts[:, 2] > 0, value, 0.0)
