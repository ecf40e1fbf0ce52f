"""Forecasts of memory know the buffers of ordered sums, and that nothing waits for its reduction."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import lt_zero
from lt_zero.core.engine.storage_plan import HOST
from lt_zero.planning.check import setup_of
from lt_zero.planning.forecast import GRADS, LOCAL, REDUCE, forecast
from lt_zero.training.build import built_by
from tests.support.features import needs
from tests.support.matrix import only_rows
from tests.support.models import Net, next_token_loss
from tests.support.parity import config_of
from tests.support.pool import Pool

pytestmark = needs("virtual_ranks")


def _bytes(stage: int) -> tuple[list[int], list[int]]:
    """Bytes of buffers, gradients and local gradients between two backwards: those there are, and those forecast."""
    model = Net()
    engine = lt_zero.shard(model, config_of(stage, reproducible={"virtual_ranks": 2 * dist.get_world_size()}))
    optimizer = torch.optim.AdamW(model.parameters())
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(2):
        with engine.no_sync():
            next_token_loss(model, step, 0, dist.get_rank()).backward()
    grads = sum(bucket.grads.nbytes for bucket in engine.buckets)
    local = sum(bucket.grads.local.nbytes for bucket in engine.buckets if bucket.grads.local is not None)
    cast = forecast(engine.plan, built_by(engine), engine.policy, setup_of(engine, [optimizer], accumulates=True))
    phase = cast.phases["accumulation"]
    return [engine.reducer.buffer_bytes, grads, local], [phase.get((HOST, kind), 0) for kind in (REDUCE, GRADS, LOCAL)]


@pytest.mark.parametrize(
    ("ranks", "stage", "shared"),
    only_rows([(1, 2, "1"), (2, 0, "0"), (2, 2, "1")], [(n, s, m) for n in (1, 2) for s in range(4) for m in "01"]),
)
def test_as_many_bytes_as_forecast(pool: Pool, ranks: int, stage: int, shared: str) -> None:
    for found, wanted in pool.run(ranks, _bytes, stage, env={"LT_ZERO_SHARED_MEMORY": shared}):
        assert found == wanted
        assert found[0] > 0
        assert found[1] > 0
        assert found[2] == 0
