"""Where the elements of a parameter are in flat rows that ranks share. See the notes of deepspeed.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lt_zero.common.errors import CheckpointError

Spans = tuple[tuple[int, int, int], ...]  # (rank, start, stop) in that rank's row, in the order of the elements


@dataclass(frozen=True)
class Place:
    """Where a parameter is: the number of its row, and which elements of it on which rank."""

    group: int
    shape: tuple[int, ...]
    spans: Spans


def _numel(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def cut_evenly(group: int, shapes: Mapping[str, tuple[int, ...]], rows: Sequence[int], file: Path) -> dict[str, Place]:
    """Each parameter is cut by itself; ``rows``: the length of each rank's row.

    Raises:
        CheckpointError: the rows have another length than the shapes need.
    """
    world, offset = len(rows), 0
    places = {}
    for name, shape in shapes.items():
        numel = _numel(shape)
        part = -(-numel // world)
        spans = tuple(
            (rank, offset, offset + min(part, numel - rank * part)) for rank in range(world) if rank * part < numel
        )
        places[name] = Place(group, shape, spans)
        offset += part
    if any(row != offset for row in rows):
        raise CheckpointError(
            f"{file} and its neighbours have {list(rows)} elements of group {group}, but the parameters need {offset} "
            "each: the files do not belong together, or the weights were offloaded to NVMe and not saved."
        )
    return places


def cut_rows(
    group: int,
    shapes: Mapping[str, tuple[int, ...]],
    gaps: Sequence[int],
    rows: Sequence[int],
    cut_off: Sequence[int],
    file: Path,
) -> dict[str, Place]:
    """The row of all parameters is cut into equal parts.

    Args:
        gaps: elements between a parameter and the next.
        rows: what there is of each rank's part.
        cut_off: what is missing at its end.

    Raises:
        CheckpointError: the parts are not equal, or have another length than the shapes need.
    """
    part = rows[0] + cut_off[0]
    needed = sum(map(_numel, shapes.values())) + sum(gaps)
    equal = all(row + missing == part for row, missing in zip(rows, cut_off, strict=True))
    if not equal or len(gaps) != len(shapes) or sum(rows) < needed or min(cut_off) < 0 or min(gaps, default=0) < 0:
        raise CheckpointError(
            f"{file} and its neighbours have {list(rows)} elements of group {group} (and {list(cut_off)} of padding), "
            f"but the parameters need {needed}: the files do not belong together. Take another checkpoint."
        )
    places, offset = {}, 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        stop = offset + _numel(shape)
        spans = tuple(
            (rank, max(offset, rank * part) - rank * part, min(stop, (rank + 1) * part) - rank * part)
            for rank in range(len(rows))
            if max(offset, rank * part) < min(stop, (rank + 1) * part)
        )
        places[name] = Place(group, shape, spans)
        offset = stop + gap
    return places
