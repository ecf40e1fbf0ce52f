"""Boxes of tensors, and which rank writes which: each part of a tensor once, and all of it.

torch.distributed.checkpoint's planner has objects for each part, which it copies, logs and pickles several times: that
took most of the time of saving thousands of small tensors. Here equal parts of different tensors (whole, of a common
shape) are one object, which a pickle holds once.

Note [Boxes]
    A shard of a bucket cuts through parameters: a rank owns elements [lo, hi) of a parameter, in row-major order.
    torch.distributed.checkpoint supports rectangles only. A flat range consists of a few: the rest of a row, full rows,
    the beginning of a row, and so on for each dimension. Each is contiguous in the range, and the intersection of two
    of them is contiguous in both, so nothing is copied to be written.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from lt_zero.common.errors import CheckpointError

LARGEST = 1 << 30  # maximum bytes of a box, so that replicated tensors can be divided among the ranks
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def boxes(shape: tuple[int, ...], lo: int, hi: int, largest: int | None = None) -> list[Box]:
    """Cut elements [lo, hi) of a row-major tensor into rectangles, in order. See Note [Boxes].

    ``largest``: maximum elements of a rectangle, if cutting along its first long dimension suffices.

    >>> boxes((4, 3), 2, 10)
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if math.prod(shape) == 0:
        return [((0,) * len(shape), shape)]
    found = _cut(shape, lo, hi)
    return [part for box in found for part in _split(box, largest)] if largest else found


def _cut(shape: tuple[int, ...], lo: int, hi: int) -> list[Box]:
    if lo >= hi:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = -(-lo // row), hi // row  # full rows are [first, last)

    def within(number: int, start: int, stop: int) -> list[Box]:
        """Rectangles of elements [start, stop) of the tensor, which lie in one row."""
        inner = _cut(shape[1:], start - number * row, stop - number * row)
        return [((number, *offsets), (1, *sizes)) for offsets, sizes in inner]

    if first > last:
        return within(last, lo, hi)
    body: list[Box] = [((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))] if first < last else []
    return within(first - 1, lo, first * row) + body + within(last, last * row, hi)


def _split(box: Box, largest: int) -> list[Box]:
    """Cut a box into boxes of at most ``largest`` elements, along the first dimension longer than 1."""
    offsets, sizes = box
    axis = next((i for i, size in enumerate(sizes) if size > 1), None)
    if axis is None or math.prod(sizes) <= largest:
        return [box]
    step = max(1, largest // math.prod(sizes[axis + 1 :]))
    parts = []
    for cut in range(0, sizes[axis], step):
        at, size = offsets[axis] + cut, min(step, sizes[axis] - cut)
        parts.append(((*offsets[:axis], at, *offsets[axis + 1 :]), (*sizes[:axis], size, *sizes[axis + 1 :])))
    return parts


def flat_index(shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    """The row-major index of the element at ``offsets``."""
    index = 0
    for size, offset in zip(shape, offsets, strict=True):
        index = index * size + offset
    return index


def common(box: Box, other: Box) -> Box | None:
    """What two boxes have in common."""
    ends = [(max(a, b), min(a + n, b + m)) for a, n, b, m in zip(*box, *other, strict=True)]
    if any(low >= high for low, high in ends):
        return None
    return tuple(low for low, _ in ends), tuple(high - low for low, high in ends)


class Part(NamedTuple):
    """What a rank has, or is to write, of a tensor: boxes, each contiguous in it."""

    shape: tuple[int, ...]  # of the tensor
    dtype: torch.dtype
    boxes: tuple[Box, ...]

    @property
    def nbytes(self) -> int:
        return sum(math.prod(sizes) for _, sizes in self.boxes) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        return len(self.boxes) == 1 and self.boxes[0][1] == self.shape


Plan = Mapping[str, Part]  # of one rank, by the tensor's name


def part_of(shape: tuple[int, ...], dtype: torch.dtype, lo: int, hi: int) -> Part:
    """Elements [lo, hi) in row-major order of a tensor."""
    return _part_of(shape, dtype, lo, hi, max(1, LARGEST // dtype.itemsize))


@functools.lru_cache(4096)
def _part_of(shape: tuple[int, ...], dtype: torch.dtype, lo: int, hi: int, largest: int) -> Part:
    return Part(shape, dtype, tuple(boxes(shape, lo, hi, largest)))


def divide(plans: Sequence[Plan]) -> list[dict[str, Part]]:
    """What each rank is to write of what it has. A box that several ranks have is written by the one with least to do.

    Raises:
        CheckpointError: ranks disagree on a tensor, or do not have all of it, or have overlapping boxes of it.
    """
    owners: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        for name in plan:
            owners.setdefault(name, []).append(rank)
    chosen: list[dict[str, Part]] = [{} for _ in plans]
    loads = [0] * len(plans)  # bytes
    for name, ranks in owners.items():
        part = plans[ranks[0]][name]
        if part.is_whole and all(plans[rank][name] == part for rank in ranks[1:]):  # most tensors
            rank = min(ranks, key=loads.__getitem__)
            loads[rank] += part.nbytes
            chosen[rank][name] = part
            continue
        for rank, part in _divide(name, {rank: plans[rank][name] for rank in ranks}, loads).items():
            chosen[rank][name] = part
    # In each rank's own order: it reads one bucket after the other.
    return [{name: own[name] for name in plan if name in own} for plan, own in zip(plans, chosen, strict=True)]


def _divide(name: str, parts: Mapping[int, Part], loads: list[int]) -> dict[int, Part]:
    """Divide the boxes of one tensor among the ranks that have them; adds to ``loads``."""
    shape, dtype = next(iter(parts.values()))[:2]
    owners: dict[Box, list[int]] = {}
    for rank, part in parts.items():
        if part[:2] != (shape, dtype):
            raise CheckpointError(
                f"{name} is {part.dtype} of {part.shape} on rank {rank}, and {dtype} of {shape} on another."
            )
        for box in part.boxes:
            owners.setdefault(box, []).append(rank)
    found: dict[int, list[Box]] = {}
    end = 0
    for (offsets, sizes), ranks in sorted(owners.items(), key=lambda item: flat_index(shape, item[0][0])):
        start = flat_index(shape, offsets)
        if start != end:
            what = f"elements {end} to {start} are on no rank" if start > end else f"boxes overlap at element {start}"
            raise CheckpointError(f"{name} of {shape} cannot be saved: {what}.")
        end = start + math.prod(sizes)
        rank = min(ranks, key=loads.__getitem__)
        loads[rank] += math.prod(sizes) * dtype.itemsize
        found.setdefault(rank, []).append((offsets, sizes))
    if end != math.prod(shape):
        raise CheckpointError(f"{name} of {shape} cannot be saved: elements from {end} on are on no rank.")
    return {
        r: parts[r] if len(own) == len(parts[r].boxes) else Part(shape, dtype, tuple(own)) for r, own in found.items()
    }
