"""Which rank writes which boxes of a tensor: each element once, and all of them.

torch.distributed.checkpoint's planner has objects for each part, which it copies, logs and pickles several times: that
took most of the time of saving thousands of small tensors. Here equal parts of different tensors (whole, of a common
shape) are one object, which a pickle holds once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from lt_zero.common.boxes import Box, Shape, check_cover, cut_range
from lt_zero.common.errors import CheckpointError

LARGEST = 1 << 30  # maximum bytes of a box, so that replicated tensors can be divided among the ranks
_SHOWN = 4  # ranks, and boxes of each, in an error


class Part(NamedTuple):
    """What a rank has, or is to write, of a tensor: boxes, each contiguous in what the rank has."""

    shape: Shape  # of the tensor
    dtype: torch.dtype
    boxes: tuple[Box, ...]

    @property
    def nbytes(self) -> int:
        return sum(box.numel for box in self.boxes) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        return len(self.boxes) == 1 and self.boxes[0].sizes == self.shape


Plan = Mapping[str, Part]  # of one rank, by the tensor's name


def part_of(shape: Shape, dtype: torch.dtype, box: Box, lo: int, hi: int) -> Part:
    """Elements [lo, hi) in row-major order of a box of a tensor."""
    return _part_of(shape, dtype, box, lo, hi, max(1, LARGEST // dtype.itemsize))


@functools.lru_cache(4096)
def _part_of(shape: Shape, dtype: torch.dtype, box: Box, lo: int, hi: int, largest: int) -> Part:
    found = cut_range(box.sizes, lo, hi, largest)
    if box.sizes != shape:
        found = [inner.shifted(box.offsets) for inner in found if box.numel or not math.prod(shape)]
    return Part(shape, dtype, tuple(found))


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
    try:
        check_cover(name, shape, list(owners))
    except ValueError as error:
        has = [f"rank {rank} has {_listed(part.boxes)}" for rank, part in list(parts.items())[:_SHOWN]]
        has += [f"{len(parts) - _SHOWN} more ranks have parts"] if len(parts) > _SHOWN else []
        raise CheckpointError(
            f"{name} of {shape} cannot be saved: {error} ({'; '.join(has)}; others have nothing of it). Change the "
            "state dict in the same way on all ranks."
        ) from None
    found: dict[int, list[Box]] = {}
    for box, ranks in sorted(owners.items()):
        rank = min(ranks, key=loads.__getitem__)
        loads[rank] += box.numel * dtype.itemsize
        found.setdefault(rank, []).append(box)
    return {
        r: parts[r] if len(own) == len(parts[r].boxes) else Part(shape, dtype, tuple(own)) for r, own in found.items()
    }


def _listed(boxes: Sequence[Box]) -> str:
    return ", ".join(map(str, boxes[:_SHOWN])) + (", ..." if len(boxes) > _SHOWN else "")
