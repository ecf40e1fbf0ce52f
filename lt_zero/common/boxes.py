"""Boxes (hyperrectangles) of tensors: what a rank has of a tensor of the model, what is saved, and what is read.

Note [Boxes]
    A parameter of an engine is a box of a tensor of the model: usually all of it, but the ranks of another dimension
    of parallelism may have its other rows or columns. A shard of a bucket cuts through parameters: a rank owns elements
    [lo, hi) of its box, in row-major order. Checkpoints, as those of torch.distributed.checkpoint, consist of boxes. A
    flat range is a few of them: the rest of a row, full rows, the beginning of a row, and so on for each dimension.
    Each is contiguous in the range, so nothing is copied to be written.

Note [Exact cover]
    Boxes cover a tensor exactly if the sum of their indicator functions is that of the tensor. Such a sum is known by
    its corners, each with a sign: a polynomial with a variable for each coordinate of each axis. So the sums are equal
    if the polynomials are, which is tried at one random point modulo a large prime: equal polynomials always agree, and
    others do by chance in one of 2**50 cases. That takes a time proportional to the number of boxes, where comparing
    them with each other would let a file of some megabytes keep its reader for hours. Boxes that follow each other in
    row-major order, as those of flat ranges do, need no polynomial.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from torch import Tensor

_PRIME = (1 << 61) - 1
_COMPARED = 300  # boxes among which an error names two that overlap

Shape = tuple[int, ...]


class Box(NamedTuple):
    """The elements of a tensor from ``offsets`` on, ``sizes`` along each axis."""

    offsets: Shape
    sizes: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return f"[{', '.join(f'{low}:{low + size}' for low, size in zip(*self, strict=True))}]"

    def shifted(self, offsets: Shape) -> Box:
        """The same elements in a larger tensor, where this box's tensor begins at ``offsets``."""
        return Box(tuple(a + b for a, b in zip(self.offsets, offsets, strict=True)), self.sizes)

    def inside(self, outer: Box) -> Box:
        """The same elements, of ``outer`` as a tensor."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def common(self, other: Box) -> Box | None:
        """The elements that are in both; None if there are none."""
        offsets, sizes = list[int](), list[int]()
        for a, n, b, m in zip(*self, *other, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if low >= high:
                return None
            offsets.append(low)
            sizes.append(high - low)
        return Box(tuple(offsets), tuple(sizes))

    def is_contiguous_in(self, shape: Shape) -> bool:
        """True if its elements follow each other in a tensor of this shape."""
        first = next((axis for axis, size in enumerate(self.sizes) if size > 1), len(shape))
        return self.sizes[first + 1 :] == shape[first + 1 :]

    def split(self, largest: int) -> list[Box]:
        """Boxes of at most ``largest`` elements, if cutting along the first axis that is longer than 1 suffices."""
        axis = next((i for i, size in enumerate(self.sizes) if size > 1), None)
        if axis is None or self.numel <= largest:
            return [self]
        step = max(1, largest // math.prod(self.sizes[axis + 1 :]))
        parts = []
        for cut in range(0, self.sizes[axis], step):
            low, size = self.offsets[axis] + cut, min(step, self.sizes[axis] - cut)
            offsets = (*self.offsets[:axis], low, *self.offsets[axis + 1 :])
            parts.append(Box(offsets, (*self.sizes[:axis], size, *self.sizes[axis + 1 :])))
        return parts

    def of(self, tensor: Tensor) -> Tensor:
        """A view of its elements of ``tensor``."""
        for axis, (low, size) in enumerate(zip(*self, strict=True)):
            if size != tensor.shape[axis]:
                tensor = tensor.narrow(axis, low, size)
        return tensor


@dataclass(frozen=True)
class ParamSpec:
    """A parameter of an engine as a part of a tensor of the model. See Note [Boxes].

    Args:
        name: of the parameter in the module, and of the tensor in checkpoints.
        global_shape: of the tensor.
        local_box: what the parameter is of it.

    Raises:
        ValueError: the box is not inside of the tensor.
    """

    name: str
    global_shape: Shape
    local_box: Box

    def __post_init__(self) -> None:
        check_inside(f"ParamSpec {self.name!r}", self.global_shape, self.local_box)

    @classmethod
    def whole(cls, name: str, shape: Shape) -> ParamSpec:
        """A parameter that is all of its tensor."""
        return cls(name, shape, Box.whole(shape))

    @property
    def shape(self) -> Shape:
        """The shape of the parameter."""
        return self.local_box.sizes

    @property
    def is_whole(self) -> bool:
        return self.local_box.sizes == self.global_shape

    def stacked(self, rows: int) -> ParamSpec:
        """The spec of a tensor with a first axis of ``rows``, of which each is like the parameter."""
        box = Box((0, *self.local_box.offsets), (rows, *self.local_box.sizes))
        return ParamSpec(self.name, (rows, *self.global_shape), box)


def flat_index(shape: Shape, offsets: Shape) -> int:
    """The row-major index of the element at ``offsets``."""
    index = 0
    for size, offset in zip(shape, offsets, strict=True):
        index = index * size + offset
    return index


def cut_range(shape: Shape, lo: int, hi: int, largest: int | None = None) -> list[Box]:
    """Cut elements [lo, hi) of a row-major tensor into boxes, in order. See Note [Boxes].

    ``largest``: maximum elements of a box; see ``Box.split``.

    >>> [str(box) for box in cut_range((4, 3), 2, 10)]
    ['[0:1, 2:3]', '[1:3, 0:3]', '[3:4, 0:1]']
    """
    if math.prod(shape) == 0:
        return [Box.whole(shape)]
    found = _cut(shape, lo, hi)
    return [part for box in found for part in box.split(largest)] if largest else found


def _cut(shape: Shape, lo: int, hi: int) -> list[Box]:
    if lo >= hi:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, last = -(-lo // row), hi // row  # full rows are [first, last)

    def within(number: int, start: int, stop: int) -> list[Box]:
        """Boxes of elements [start, stop) of the tensor, which lie in one row."""
        inner = _cut(shape[1:], start - number * row, stop - number * row)
        return [Box((number, *offsets), (1, *sizes)) for offsets, sizes in inner]

    if first > last:
        return within(last, lo, hi)
    body = [Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))] if first < last else []
    return within(first - 1, lo, first * row) + body + within(last, last * row, hi)


def check_inside(name: str, shape: Shape, box: Box) -> None:
    """Check that a box lies inside of a tensor.

    Raises:
        ValueError: it does not; names the tensor.
    """
    low, sizes = box
    known = len(low) == len(sizes) == len(shape)
    if not known or any(a < 0 or n < 0 or a + n > size for a, n, size in zip(low, sizes, shape, strict=True)):
        raise ValueError(f"{name} of shape {shape} has a part of {sizes} at {low}")


def check_cover(name: str, shape: Shape, boxes: Sequence[Box]) -> None:
    """Check that each element of a tensor is in exactly one box. See Note [Exact cover].

    Raises:
        ValueError: a box is not inside of the tensor, boxes overlap, or elements are in none; names the tensor.
    """
    if len(boxes) == 1 and boxes[0] == ((0,) * len(shape), shape):
        return  # most tensors
    if _follow_each_other(shape, boxes):
        return
    for box in boxes:
        check_inside(name, shape, box)
    total, numel = sum(box.numel for box in boxes), math.prod(shape)
    if total != numel:
        what = "lacks" if total < numel else "has twice"
        raise ValueError(
            f"{name} of shape {shape} {what} elements: its parts have {total} of {numel} together{_clash(boxes)}"
        )
    chance = random.SystemRandom()
    values: list[dict[int, int]] = [{} for _ in shape]  # of the variables, by axis
    for box in (*boxes, Box.whole(shape)):
        for known, low, size in zip(values, *box, strict=True):
            for end in (low, low + size):
                if end not in known:
                    known[end] = chance.randrange(_PRIME)

    def volume(box: Box) -> int:
        product = 1
        for known, low, size in zip(values, *box, strict=True):
            product = product * (known[low + size] - known[low]) % _PRIME
        return product

    if (sum(map(volume, boxes)) - volume(Box.whole(shape))) % _PRIME:
        raise ValueError(f"{name} of shape {shape} has parts that overlap, and lacks elements{_clash(boxes)}")


def _follow_each_other(shape: Shape, boxes: Sequence[Box]) -> bool:
    """True if the boxes, in row-major order, cover the tensor without a gap and each is contiguous in it."""
    end = 0
    for offsets, sizes in sorted(boxes):
        if not len(offsets) == len(sizes) == len(shape):
            return False
        index, numel = 0, 1
        for low, size, length in zip(offsets, sizes, shape, strict=True):
            if low < 0 or size < 0 or low + size > length or (numel > 1 and size != length):
                return False
            index, numel = index * length + low, numel * size
        if index != end:
            return False
        end += numel
    return end == math.prod(shape)


def _clash(boxes: Sequence[Box]) -> str:
    """Two boxes that overlap, as text; "" if there are none among the first."""
    pairs = combinations(sorted(boxes)[:_COMPARED], 2)
    return next((f"; {one} and {other} overlap" for one, other in pairs if one.common(other) is not None), "")
