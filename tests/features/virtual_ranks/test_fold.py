"""``reproducible.virtual_ranks``: weights have the same bits, whatever ranks run the micro-batches of a round."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lt_zero
from tests.support.features import needs
from tests.support.matrix import only
from tests.support.models import Net, next_token_loss
from tests.support.parity import OPTIMIZERS, config_of, full_values
from tests.support.pool import Pool

pytestmark = needs("virtual_ranks")

VIRTUAL = 6
RANKS = [1, 2, 3]


def train(stage: int, name: str = "sgd", dtype: torch.dtype | None = None, syncs: bool = False, **keys: Any) -> Any:
    """The weights after three steps of ``VIRTUAL`` micro-batches each, of which rank r runs every N-th."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = Net()
    zero = keys.pop("zero", None)
    keys = {"reproducible": {"virtual_ranks": VIRTUAL}, **keys}
    engine = lt_zero.shard(model, config_of(stage, zero, dtype, **keys))
    optimizer = OPTIMIZERS[name](model.parameters())
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        for turn in range(VIRTUAL // ranks):
            last = turn == VIRTUAL // ranks - 1
            with nullcontext() if last or syncs else engine.no_sync():
                next_token_loss(model, step, 0, turn * ranks + rank).backward()
        optimizer.step()
    return {name: value.numpy() for name, value in full_values(engine).items()}


def same(found: Any, wanted: Any, what: object) -> None:
    """Fail unless both have the same bits."""
    for name, value in wanted.items():
        assert value.tobytes() == found[name].tobytes(), (what, name)


@pytest.mark.parametrize("stage", only([2], [0, 1, 2, 3]))
def test_weights_have_the_same_bits(pool: Pool, stage: int) -> None:
    wanted = pool.run(1, train, 0)[0]
    for ranks in RANKS:
        for found in pool.run(ranks, train, stage):
            same(found, wanted, ranks)
