"""The forms of collectives that lt_zero launches, by themselves. These run on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NUMEL = 5000


def place(kind: str) -> torch.device:
    """The device that all ranks share."""
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


def numbers(rank: int, device: torch.device, numel: int = NUMEL) -> Tensor:
    """Other values for every rank; sums of few ranks are exact in fp32."""
    return torch.arange(numel, device=device, dtype=torch.float32).remainder(997) + 1000 * (rank + 1)


def all_numbers(device: torch.device, numel: int = NUMEL) -> Tensor:
    """Those of all ranks: [ranks, numel]."""
    return torch.stack([numbers(rank, device, numel) for rank in range(dist.get_world_size())])


def all_reduce(device: torch.device) -> None:
    total = numbers(dist.get_rank(), device)
    dist.all_reduce(total, async_op=True).wait()
    assert torch.equal(total, all_numbers(device).sum(0))


def largest(device: torch.device) -> None:
    found = numbers(dist.get_rank(), device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    assert torch.equal(found, all_numbers(device)[-1])


def broadcast(device: torch.device) -> None:
    found = numbers(dist.get_rank(), device)
    dist.broadcast(found, dist.get_world_size() - 1, async_op=True).wait()
    assert torch.equal(found, all_numbers(device)[-1])


def gather_in_place(device: torch.device) -> None:
    """Each rank's part is where it will be in the result."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    flat = torch.zeros(dist.get_world_size() * NUMEL, device=device)
    own = flat.narrow(0, dist.get_rank() * NUMEL, NUMEL).copy_(numbers(dist.get_rank(), device))
    gather(flat, own, async_op=True).wait()
    assert torch.equal(flat, all_numbers(device).flatten())


def exchange(device: torch.device) -> None:
    """All-to-all of parts of other lengths: rank i sends j + 1 elements to rank j."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lengths = [other + 1 for other in range(world)]
    sent = numbers(rank, device, sum(lengths))
    found = torch.empty(world * (rank + 1), device=device)
    dist.all_to_all_single(found, sent, [rank + 1] * world, lengths, async_op=True).wait()
    first = sum(lengths[:rank])
    assert torch.equal(found, all_numbers(device, sum(lengths))[:, first : first + rank + 1].flatten())


def batched_messages(device: torch.device) -> None:
    """Each rank sends to the next one, and receives from the one before it, in one batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = torch.empty(NUMEL, device=device)
    before = (rank - 1) % world
    sends = dist.P2POp(dist.isend, numbers(rank, device), (rank + 1) % world)
    for work in dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, found, before)]):
        work.wait()
    assert torch.equal(found, numbers(before, device))


def lone_messages(device: torch.device) -> None:
    """From rank 0 to rank 1 and back, each by itself, as the schedules of torch's pipelines send them."""
    rank = dist.get_rank()
    if rank > 1:
        return
    found = torch.empty(NUMEL, device=device)
    for sender in range(2):
        tensor = numbers(rank, device) if rank == sender else found
        move: Callable[..., Any] = dist.isend if rank == sender else dist.irecv
        move(tensor, 1 - rank).wait()
    assert torch.equal(found, numbers(1 - rank, device))


def reduce_scatter_in_place(device: torch.device) -> None:
    """Each rank's part of the sum comes to where it is in what is summed. gloo's is not used."""
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    rank, world = dist.get_rank(), dist.get_world_size()
    flat = numbers(rank, device, world * NUMEL)
    part = slice(rank * NUMEL, (rank + 1) * NUMEL)
    scatter(flat[part], flat, async_op=True).wait()
    assert torch.equal(flat[part], all_numbers(device, world * NUMEL).sum(0)[part])


def split(device: torch.device) -> None:
    """Groups of the even and the odd ranks, split off the default one in one operation. gloo cannot."""
    parts = [list(range(first, dist.get_world_size(), 2)) for first in range(2)]
    group = dist.split_group(dist.group.WORLD, parts)
    mine = parts[dist.get_rank() % 2]
    total = numbers(dist.get_rank(), device)
    dist.all_reduce(total, group=group)
    assert torch.equal(total, all_numbers(device)[mine].sum(0))


FORMS: dict[str, Callable[[torch.device], None]] = {
    "all-reduce": all_reduce,
    "largest": largest,
    "broadcast": broadcast,
    "all-gather": gather_in_place,
    "all-to-all": exchange,
    "batched messages": batched_messages,
    "lone messages": lone_messages,
}
OF_NCCL: dict[str, Callable[[torch.device], None]] = {"reduce-scatter": reduce_scatter_in_place, "split": split}


def check(kind: str, form: str) -> None:
    """A form of collective, five times: the first connects what the others use."""
    for _ in range(5):
        (FORMS | OF_NCCL)[form](place(kind))
