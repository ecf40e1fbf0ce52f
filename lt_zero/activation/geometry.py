"""A tensor as the elements that it has, and the shape and strides that they are seen through.

What is saved is what a tensor shows, not the storage that it is a view of: of an expanded tensor the elements before
they were expanded, of a slice the slice. What is restored has the same strides, since kernels choose the order of
their sums by them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """Shape and strides over elements that are stored without gaps.

    Attributes:
        shape: of the tensor.
        strides: of the tensor, in elements.
        sides: shape of the elements that are stored, the largest stride first.
        steps: their strides in the tensor.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    sides: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements that are stored."""
        return torch.Size(self.sides).numel()

    @property
    def span(self) -> int:
        """Elements from the first that is seen to the last."""
        return 1 + sum((side - 1) * step for side, step in zip(self.sides, self.steps, strict=True))

    @property
    def dense(self) -> bool:
        """Whether elements lie side by side."""
        return self.span == self.numel

    def elements(self, tensor: Tensor) -> Tensor:
        """The elements (1D) of ``tensor``; a copy if there are gaps between them."""
        if self.dense:
            return tensor.as_strided((self.numel,), (1,), tensor.storage_offset())
        return tensor.as_strided(self.sides, self.steps, tensor.storage_offset()).contiguous().view(-1)

    def restore(self, elements: Tensor) -> Tensor:
        """The tensor that has the elements (1D); a view of them if they lie side by side."""
        if not self.dense:
            spread = elements.new_empty(self.span)  # 1D
            spread.as_strided(self.sides, self.steps).copy_(elements.view(self.sides))
            elements = spread
        return elements.as_strided(self.shape, self.strides)


def geometry_of(tensor: Tensor) -> Geometry | None:
    """How ``tensor`` lies in memory; None if elements overlap otherwise than by being expanded, or there are none."""
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
