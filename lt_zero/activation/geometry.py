"""Splits a tensor into its distinct elements and its shape and strides.

Only the elements that a tensor shows are saved, not its whole storage: of an expanded tensor those before the expand,
of a slice the slice. A restored tensor has the same strides, because kernels choose the order of summation by them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """Shape and strides of a tensor, and the layout of its distinct elements.

    Attributes:
        shape: of the tensor.
        strides: of the tensor, in elements.
        sides: sizes of the dimensions with distinct elements, by decreasing stride.
        steps: the strides of these dimensions.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    sides: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of distinct elements."""
        return torch.Size(self.sides).numel()

    @property
    def span(self) -> int:
        """Elements of storage from the first to the last distinct element."""
        return 1 + sum((side - 1) * step for side, step in zip(self.sides, self.steps, strict=True))

    @property
    def dense(self) -> bool:
        """Whether the elements are contiguous in storage, in any order."""
        return self.span == self.numel

    def elements(self, tensor: Tensor) -> Tensor:
        """The distinct elements (1D) of ``tensor``; a copy if they are not dense."""
        if self.dense:
            return tensor.as_strided((self.numel,), (1,), tensor.storage_offset())
        return tensor.as_strided(self.sides, self.steps, tensor.storage_offset()).contiguous().view(-1)

    def restore(self, elements: Tensor) -> Tensor:
        """The tensor with these elements (1D); a view of them if they are dense."""
        if not self.dense:
            spread = elements.new_empty(self.span)  # 1D
            spread.as_strided(self.sides, self.steps).copy_(elements.view(self.sides))
            elements = spread
        return elements.as_strided(self.shape, self.strides)


def geometry_of(tensor: Tensor) -> Geometry | None:
    """The layout of ``tensor``; None if it is empty, or if elements overlap in another way than by ``expand``."""
    if tensor.numel() == 0:
        return None
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    real = sorted(((step, side) for side, step in pairs if side > 1 and step > 0), reverse=True)
    reach = 1
    for step, side in reversed(real):
        if step < reach:
            return None
        reach += (side - 1) * step
    sides, steps = tuple(side for _, side in real), tuple(step for step, _ in real)
    return Geometry(tuple(tensor.shape), tuple(tensor.stride()), sides, steps)
