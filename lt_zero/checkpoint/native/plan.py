"""The division of a save: names united over the ranks, content beside tensors, and the boxes that each rank writes.

torch.distributed.checkpoint's planner has objects for each part, which it copies, logs and pickles several times: that
took most of the time of saving thousands of small tensors. Here equal parts of different tensors (whole, of a common
shape) are one object, which a pickle holds once.

Note [Who decides the names]
    Hooks may change the state dict, often on rank 0 only: the names and ties of rank 0 are saved. Ranks with other
    layers (a stage of a pipeline) have tensors that rank 0 never had. Of ranks with the same module the first one
    decides: it tells the names that rank 0 lacks, except those that an earlier rank has told. So one rank decides on
    each name, wherever its elements are, and other ranks drop fragments under names that are not told.
    Plain tensors are saved from the rank that decides, as under DDP, even if other ranks have fragments. Whether all
    elements of a tensor are there is checked when the ranks divide what they write.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lt_zero.common.boxes import Box, Shape, check_cover, cut_range
from lt_zero.common.errors import CheckpointError
from lt_zero.common.names import merged
from lt_zero.core.comm.world import World
from lt_zero.core.engine.lazy_tensor import Fragment

LARGEST = 1 << 30  # maximum bytes of a box, so that replicated tensors can be divided among the ranks
_SHOWN = 4  # ranks, and boxes of each, in an error


@dataclass
class Names:
    """Names of the state dict, united over the ranks.

    ``writers``: all names in their order: the rank that writes the value, or None if each writes its elements.
    ``aliases``: tied name -> the name that is saved. ``tells``: this rank has told names that rank 0 lacks.
    """

    writers: dict[str, int | None]
    aliases: dict[str, str]
    tells: bool = False

    def written(self, weights: Mapping[str, Any], rank: int) -> Iterator[str]:
        """The names under which a rank saves a tensor."""
        for name, value in weights.items():
            if name in self.writers and name not in self.aliases and isinstance(value, Tensor):
                writer = self.writers[name]
                if isinstance(value, Fragment) if writer is None else writer == rank:
                    yield name

    def others(self, weights: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """Entries other than tensors that a rank saves."""
        found = {name: value for name, value in weights.items() if not isinstance(value, Tensor)}
        return {name: value for name, value in found.items() if self.writers.get(name) == rank}


def agree_on_names(weights: Mapping[str, Any], world: World, peers: Sequence[int] = ()) -> Names:
    """The names of the state dict. Collective. See Note [Who decides the names].

    ``peers``: the ranks that have the same module as this one; (): all, but for those whose fragments tell otherwise.

    Raises:
        CheckpointError: a rank lacks a tensor that it shares with rank 0, or has a plain value in its place.
    """
    kinds = {name: value.ranks if isinstance(value, Fragment) else None for name, value in weights.items()}
    ties = _ties(weights)
    first, aliases = world.host_broadcast((kinds, ties), "names of the state dict")
    if problems := world.problems(_difference(kinds, first, world.rank), "the state dict"):
        raise CheckpointError(" ".join(problems))
    names = Names({name: 0 if ranks is None else None for name, ranks in first.items()}, dict(aliases))
    new = {name: ranks for name, ranks in kinds.items() if name not in first}
    decides = peers[0] == world.rank if peers else any(ranks and ranks[0] == world.rank for ranks in new.values())
    names.tells = decides and bool(new)
    mine = {name: ranks for name, ranks in new.items() if not ranks or ranks[0] == world.rank}
    told = (mine, {alias: ties[alias] for alias in ties.keys() & mine}, list(weights)) if names.tells else None
    orders = [list(first)]
    for rank, its in enumerate(world.host_gather(told, "names that rank 0 lacks")):
        if its is not None:
            theirs, tied, order = its
            new = {name: ranks for name, ranks in theirs.items() if name not in names.writers}
            names.writers |= {name: rank if ranks is None else None for name, ranks in new.items()}
            names.aliases |= {alias: name for alias, name in tied.items() if alias in new}
            orders.append(order)
    names.writers = {name: names.writers[name] for name in merged(orders) if name in names.writers}
    return names


def _difference(kinds: Mapping[str, Any], first: Mapping[str, Any], rank: int) -> str | None:
    """Describe how this rank's names, each with its ranks or None, differ from rank 0's; None if they do not."""
    for name, ranks in first.items():
        if ranks is not None and name not in kinds and (not ranks or rank in ranks):
            return f"the state dict has no {name!r}, which rank 0 has. Change it in the same way on all ranks."
        if ranks is not None and kinds.get(name, ranks) is None:
            return f"{name!r} was replaced in the state dict, and not on rank 0. Replace it on all ranks."
    return None


def _ties(weights: Mapping[str, Any]) -> dict[str, str]:
    """Tied name -> the first name of the same tensor."""
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, value in weights.items():
        if isinstance(value, Tensor):
            key: Any = id(value)
            if not isinstance(value, Fragment) and value.numel():
                key = (value.device, value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
            if (known := first.setdefault(key, name)) != name:
                tied[name] = known
    return tied


@dataclass
class Beside:
    """Content that a rank saves beside tensors, in plain containers.

    ``optimizers``: groups and states that are no tensors, by name. ``extra``: of the state dict. ``meta``: entries of
    the checkpoint that refer to tensors. ``left_out``: names of frozen parameters.
    """

    optimizers: list[dict[str, Any]]
    extra: dict[str, Any]
    meta: dict[str, Any]
    left_out: list[str]


def unite(mine: Beside, theirs: Sequence[Beside | None]) -> None:
    """Add to rank 0's content, ``mine``, the entries of other ranks (by rank; None: it tells none) that it lacks.

    Raises:
        CheckpointError: a group of an optimizer has another option than on rank 0.
    """
    for rank, other in enumerate(theirs):
        if other is None:
            continue
        _add_missing(mine.extra, other.extra)
        _add_missing(mine.meta, other.meta)
        mine.left_out.extend(name for name in other.left_out if name not in mine.left_out)
        for number, saved in enumerate(other.optimizers):
            if number == len(mine.optimizers):
                mine.optimizers.append({"param_groups": [], "state": {}})
            _unite_optimizer(mine.optimizers[number], saved, f"rank {rank}: Optimizer {number}")


def _add_missing(mine: dict[Any, Any], theirs: Mapping[Any, Any]) -> None:
    for key, value in theirs.items():
        if key not in mine:
            mine[key] = value
        elif isinstance(mine[key], dict) and isinstance(value, Mapping):
            _add_missing(mine[key], value)


def _unite_optimizer(mine: dict[str, Any], theirs: Mapping[str, Any], where: str) -> None:
    groups, known = mine["param_groups"], {name for group in mine["param_groups"] for name in group["params"]}
    for index, group in enumerate(theirs["param_groups"]):
        new = [name for name in group["params"] if name not in known]
        if index == len(groups):
            groups.append({**group, "params": []})
        for key in groups[index].keys() | group.keys() if new else ():
            one, other = groups[index].get(key), group.get(key)
            if key != "params" and repr(one) != repr(other):
                raise CheckpointError(
                    f"{where} has {key}={other!r:.100} in parameter group {index}, and rank 0 has {one!r:.100}. Give "
                    "the groups of an optimizer the same options on all ranks."
                )
        mine_and_new = {*groups[index]["params"], *new}
        order = [name for name in group["params"] if name in mine_and_new]
        groups[index]["params"] = merged([groups[index]["params"], order])
    _add_missing(mine["state"], {name: state for name, state in theirs["state"].items() if name not in mine["state"]})


# ---- which rank writes which boxes: each element once, and all of them -----------------------------------------------


class TensorBoxes(NamedTuple):
    """Boxes of a tensor that a rank has, or is to write; each is contiguous in the rank's elements.

    ``within``: the box of the tensor that a group of ranks has together; None: it is not known. ``first``: the first
    rank of that group, by which it is known (all of its ranks in each of their plans would be ranks squared numbers on
    rank 0); None: all ranks.
    """

    shape: Shape  # of the tensor
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    within: Box | None = None
    first: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(box.numel for box in self.boxes) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        return len(self.boxes) == 1 and self.boxes[0].sizes == self.shape


BoxesByName = Mapping[str, TensorBoxes]  # of one rank, by the tensor's name


def part_of(shape: Shape, dtype: torch.dtype, box: Box, lo: int, hi: int, first: int | None = None) -> TensorBoxes:
    """Elements [lo, hi) in row-major order of a box of a tensor, which the group of rank ``first`` has together."""
    return _part_of(shape, dtype, box, lo, hi, first, max(1, LARGEST // dtype.itemsize))


@functools.lru_cache(4096)
def _part_of(
    shape: Shape, dtype: torch.dtype, box: Box, lo: int, hi: int, first: int | None, largest: int
) -> TensorBoxes:
    found = cut_range(box.sizes, lo, hi, largest)
    if box.sizes != shape:
        found = [inner.shifted(box.offsets) for inner in found if box.numel or not math.prod(shape)]
    return TensorBoxes(shape, dtype, tuple(found), box, first)


def divide(plans: Sequence[BoxesByName]) -> list[dict[str, TensorBoxes]]:
    """Choose the boxes that each rank writes; of several ranks with a box, the one with least to write takes it.

    Raises:
        CheckpointError: ranks disagree on a tensor, or do not have all of it, or have overlapping boxes of it.
    """
    tensors: dict[str, dict[int, TensorBoxes]] = {}  # the part of each rank that has one, by name
    for rank, plan in enumerate(plans):
        for name, part in plan.items():
            tensors.setdefault(name, {})[rank] = part
    chosen: list[dict[str, TensorBoxes]] = [{} for _ in plans]
    loads = [0] * len(plans)  # bytes
    for name, parts in tensors.items():
        found: dict[int, list[Box]] = {}
        for box, ranks in _owners(name, parts):
            rank = min(ranks, key=loads.__getitem__)
            loads[rank] += box.numel * parts[rank].dtype.itemsize
            found.setdefault(rank, []).append(box)
        for rank, boxes in found.items():
            part = parts[rank]
            is_all = len(boxes) == len(part.boxes)
            chosen[rank][name] = part if is_all else TensorBoxes(part.shape, part.dtype, tuple(boxes))
    # In each rank's own order: it reads one bucket after the other.
    return [{name: own[name] for name in plan if name in own} for plan, own in zip(plans, chosen, strict=True)]


def _owners(name: str, parts: Mapping[int, TensorBoxes]) -> list[tuple[Box, list[int]]]:
    """The boxes that are all of a tensor, in order, with the ranks that have each. ``parts``: by rank."""
    one = next(iter(parts.values()))
    shape, dtype, boxes, *_ = one
    if one.is_whole and all(part[:3] == one[:3] for part in parts.values()):  # most tensors
        return [(boxes[0], list(parts))]
    for rank, part in parts.items():
        if part[:2] != (shape, dtype):
            raise CheckpointError(
                f"{name} is {part.dtype} of {part.shape} on rank {rank}, and {dtype} of {shape} on another."
            )
    owners = _ranks_by_box(parts)
    try:
        try:
            check_cover(name, shape, list(owners))
        except ValueError:
            # Groups of ranks with the same elements cut them in other places, where their buckets differ in length.
            first = _of_first_groups(parts)
            if len(first) == len(parts):
                raise
            owners = _ranks_by_box(first)
            check_cover(name, shape, list(owners))
    except ValueError as error:
        has = [f"rank {rank} has {_listed(part.boxes)}" for rank, part in list(parts.items())[:_SHOWN]]
        has += [f"{len(parts) - _SHOWN} more ranks have parts"] if len(parts) > _SHOWN else []
        raise CheckpointError(
            f"{name} of {shape} cannot be saved: {error} ({'; '.join(has)}; others have nothing of it). Change the "
            "state dict in the same way on all ranks."
        ) from None
    return sorted(owners.items())


def _ranks_by_box(parts: Mapping[int, TensorBoxes]) -> dict[Box, list[int]]:
    """The ranks that have each box."""
    owners: dict[Box, list[int]] = {}
    for rank, part in parts.items():
        for box in part.boxes:
            owners.setdefault(box, []).append(rank)
    return owners


def _of_first_groups(parts: Mapping[int, TensorBoxes]) -> dict[int, TensorBoxes]:
    """The parts of one group of ranks for each box that groups have together."""
    first: dict[Box | None, int | None] = {}
    return {rank: part for rank, part in parts.items() if first.setdefault(part.within, part.first) == part.first}


def _listed(boxes: Sequence[Box]) -> str:
    return ", ".join(map(str, boxes[:_SHOWN])) + (", ..." if len(boxes) > _SHOWN else "")
