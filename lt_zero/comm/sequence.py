"""Sequences that are cut over ranks: parts of them are exchanged for parts of heads, and back.

DeepSpeed-Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as ProcessGroup


def place_in(group: ProcessGroup | None) -> tuple[int, int]:
    """This rank's number in the group, and the number of its ranks."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def exchange(x: Tensor, group: ProcessGroup, to_heads: bool) -> Tensor:
    """Differentiable. ``to_heads``: [batch, heads, length / ranks, dim] -> [batch, heads / ranks, length, dim].

    Else the other way round. Collective over ``group``.
    """
    out: Tensor = _AllToAll.apply(x, group, to_heads)  # type: ignore[no-untyped-call]
    return out


def gather_tokens(mask: Tensor, group: ProcessGroup) -> Tensor:
    """[batch, length / ranks] of each rank -> [batch, length]. Not differentiable."""
    parts = [torch.empty_like(mask, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mask.detach().contiguous(), group=group)
    return torch.cat(parts, -1)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: ProcessGroup, to_heads: bool) -> Tensor:
        context.group, context.to_heads = group, to_heads
        return _exchanged(x, group, to_heads)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return exchange(grad, context.group, not context.to_heads), None, None


def _exchanged(x: Tensor, group: ProcessGroup, to_heads: bool) -> Tensor:
    ranks = dist.get_world_size(group)
    split, joined = (1, 2) if to_heads else (2, 1)
    sent = torch.stack(x.chunk(ranks, split))  # one part for each rank
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), joined)
