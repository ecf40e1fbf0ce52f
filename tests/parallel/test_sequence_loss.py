"""The mean over tokens of sequences that are cut over ranks, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lt_zero.core.comm.sequence import SequenceGroup
from lt_zero.parallel import SequenceRanks, token_mean
from tests.support.joined import use
from tests.support.pool import Pool

BATCH, LENGTH, WIDTH = 3, 8, 5
CPU = torch.device("cpu")


def group_of(ranks: list[int]) -> ProcessGroup:
    """This rank's group of neighbours."""
    made = [dist.new_group(range(first, first + len(ranks))) for first in range(0, dist.get_world_size(), len(ranks))]
    return made[dist.get_rank() // len(ranks)]  # type: ignore[no-any-return]


def whole_mean(weight: Tensor, inputs: Tensor, mask: Tensor | None) -> Tensor:
    losses = (inputs @ weight).square()
    mask = torch.ones_like(losses) if mask is None else mask.double()
    return (losses * mask).sum() / mask.sum()


def mask_of(kind: str, data: int) -> Tensor | None:
    at = torch.arange(data * BATCH * LENGTH).view(data, BATCH, LENGTH)
    if kind == "none":
        return None
    return at % 7 > 2 + 3 * (at >= LENGTH * BATCH) if kind == "uneven" else (at % 5) / 3


def check(sequence: int, over: str, kind: str) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    data = world // sequence
    torch.manual_seed(3)
    weight = torch.randn(WIDTH, dtype=torch.float64, requires_grad=True)
    inputs, mask = torch.randn(data, BATCH, LENGTH, WIDTH, dtype=torch.float64), mask_of(kind, data)
    if over == "data":
        wanted = whole_mean(weight, inputs, mask)
    else:
        each = [whole_mean(weight, inputs[d], None if mask is None else mask[d]) for d in range(data)]
        wanted = torch.stack(each).mean()
    (grad,) = torch.autograd.grad(wanted, weight)

    group = group_of(list(range(sequence)))
    every = SequenceGroup.of(dist.group.WORLD, CPU)
    ranks = SequenceRanks(SequenceGroup.of(group, CPU), every)
    use(ranks)
    d, part = rank // sequence, rank % sequence
    mine = inputs[d].chunk(sequence, 1)[part]
    own = None if mask is None else mask[d].chunk(sequence, 1)[part]
    value = token_mean((mine @ weight).square(), own, over)
    (found,) = torch.autograd.grad(value, weight)
    dist.all_reduce(found)
    torch.testing.assert_close(found / world, grad, rtol=0, atol=1e-12)
    if over == "data":
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)
    else:
        torch.testing.assert_close(value, each[d], rtol=0, atol=1e-12)
    use(None)


def check_all(sequence: int) -> None:
    for over in ("sequence", "data"):
        for kind in ("none", "uneven", "weights"):
            check(sequence, over, kind)


@pytest.mark.parametrize(("world", "sequence"), [(2, 2), (4, 2)])
def test_the_mean_is_that_of_one_process(pool: Pool, world: int, sequence: int) -> None:
    pool.run(world, check_all, sequence)


def test_no_tokens_are_no_loss() -> None:
    losses = torch.tensor([[1.0, float("nan")]], requires_grad=True)
    value = token_mean(losses, torch.zeros(1, 2, dtype=torch.bool))
    value.backward()
    assert value == 0
    assert losses.grad is not None
    assert not losses.grad.any()


def test_what_does_not_count_may_be_infinite() -> None:
    losses = torch.tensor([[1.0, 3.0, float("inf")]], requires_grad=True)
    token_mean(losses, torch.tensor([1, 1, 0])).backward()
    assert losses.grad is not None
    assert losses.grad.tolist() == [[0.5, 0.5, 0.0]]


def test_wrong_masks_are_errors() -> None:
    losses = torch.ones(2, 3)
    with pytest.raises(ValueError, match="does not broadcast"):
        token_mean(losses, torch.ones(2, 4))
    with pytest.raises(ValueError, match="requires a gradient"):
        token_mean(losses, torch.ones(2, 3, requires_grad=True))
    with pytest.raises(ValueError, match="over='ranks'"):
        token_mean(losses, over="ranks")
