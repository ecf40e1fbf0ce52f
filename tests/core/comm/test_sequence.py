"""Exchanges of parts of sequences: how many collectives, second derivatives, and ranks that do not come."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.core.comm.ranks import LaunchOrder
from lt_zero.core.comm.sequence import SequenceGroup
from lt_zero.core.comm.world import World
from lt_zero.parallel import SequenceRanks, sequence_attention
from lt_zero.parallel.sequence.ranks import current
from tests.support.joined import use
from tests.support.lightning_tools import quick
from tests.support.pool import Pool

CPU = torch.device("cpu")


def joined() -> tuple[World, SequenceGroup]:
    with quick():
        world = World.join(CPU)
    assert world.process_group is not None
    return world, SequenceGroup.joined(world, [range(world.size)], world.process_group)


def parts(*heads: int) -> list[Tensor]:
    return [torch.randn(2, count, 4, 3, requires_grad=True) for count in heads]


def counted() -> dict[str, list[int]]:
    """Collectives in forward, and in forward and backward."""
    found = {}
    for method, heads in (("ulysses", (4, 2, 2)), ("gather", (3, 1, 1))):
        with mock.patch.object(LaunchOrder, "launch", autospec=True, side_effect=LaunchOrder.launch) as launches:
            out = sequence_attention(group=dist.group.WORLD, method=method)(*parts(*heads), enable_gqa=True)
            forward = launches.call_count
            out.square().sum().backward()
            found[method] = [forward, launches.call_count]
    return found


def test_queries_keys_and_values_go_together(pool: Pool) -> None:
    """Ulysses: one exchange for heads, one back; gathered keys: one gather, one exchange of its gradients."""
    assert pool.run(2, counted)[0] == {"ulysses": [2, 4], "gather": [1, 2]}


def exchanged() -> None:
    """Rows of many sizes and dtypes, in windows that are made anew for larger ones, among all ranks and pairs."""
    _, group = joined()
    rank = group.rank
    for numel, dtype in (
        (3, torch.float32),
        (5000, torch.bfloat16),
        (7, torch.bool),
        (9000, torch.float64),
        (0, torch.int64),
    ):
        for members in (range(4), range(rank // 2 * 2, rank // 2 * 2 + 2), range(rank % 2, 4, 2)):
            at = torch.arange(4 * 4 * numel).view(4, 4, numel)  # from, to
            sent, whole = (at % 251).to(dtype), list(members)
            assert torch.equal(group.exchange(sent[rank][whole], members), sent[whole, rank])
        x = sent[rank, :, :1]
        assert torch.equal(group.gather_tokens(x), torch.cat(list(sent[:, :, :1]), -1))


def test_rows_of_any_size_arrive(pool: Pool) -> None:
    pool.run(4, exchanged)


def diverged(how: str) -> str:
    """The error of ranks, the second of which does something else."""
    world, group = joined()
    attend, other = sequence_attention(group=group.process_group), dist.get_rank() == 1
    use(ranks := SequenceRanks(group, group))
    dtype = torch.float64 if how == "wider" and other else torch.float32
    inputs = [torch.randn(1, 2, 5 if how == "longer" and other else 4, 3, dtype=dtype) for _ in range(3)]

    def step() -> None:
        if how == "elsewhere" and other:
            world.host_max(torch.zeros(1, dtype=torch.int64), "other flags").wait()
        if how == "fails" and other:
            raise RuntimeError("of rank 1")
        attend(*inputs)

    with pytest.raises(RuntimeError) as caught, world.together("a step"):
        step()
    assert ranks is current()
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("elsewhere", ["flags of 'other flags'", "all-to-all of 'parts of sequences"]),
        ("longer", ["all-to-all of 'parts of sequences, [2, 4, 1, 3, 3] float32'", "sequences, [2, 5, 1, 3, 3] float"]),
        ("wider", ["sequences, [2, 4, 1, 3, 3] float32'", "sequences, [2, 4, 1, 3, 3] float64'"]),
        ("fails", ["of rank 1"]),
    ],
)
def test_ranks_that_diverge_are_named_on_all(pool: Pool, how: str, told: list[str]) -> None:
    for text in pool.run(2, diverged, how):
        assert all(part in text for part in told), text
