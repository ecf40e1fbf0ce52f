"""Sums over ranks that have parts of a vocabulary."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as ProcessGroup


def maximum(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """The maximum over the ranks, in place. Collective over ``group``; None: this rank alone."""
    if group is not None:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return values


def total(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over the ranks, in place. Collective over ``group``; None: this rank alone."""
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


def rows_before(rows: int, group: ProcessGroup | None, device: torch.device) -> tuple[int, int]:
    """Count the rows that the ranks before this one have, and those that all have. Collective over ``group``."""
    if group is None:
        return 0, rows
    mine = torch.tensor([rows], device=device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    counts = torch.cat(parts).tolist()
    return sum(counts[: dist.get_rank(group)]), sum(counts)
