"""A transport from outside moves what ranks exchange, and nothing changes."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

import lt_zero
from tests.outside.counted import Counted
from tests.support.models import Net, next_token_loss
from tests.support.outside import transport
from tests.support.parity import config_of, full_values
from tests.support.pool import Pool


def _trained() -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        next_token_loss(model, step, 0, dist.get_rank()).backward()
        optimizer.step()
    return {name: value.numpy() for name, value in full_values(engine).items()}


def _trained_outside() -> tuple[dict[str, np.ndarray], set[str], list[tuple[str, int]]]:
    Counted.calls.clear()
    with transport(Counted):
        values = _trained()
    return values, {name for name, _ in Counted.calls}, list(Counted.calls)


def test_a_transport_from_outside_trains_to_the_same_weights(pool: Pool) -> None:
    want = pool.run(2, _trained, env={"LT_ZERO_SHARED_MEMORY": "0"})[0]
    (first, names, calls), (other, _, same) = pool.run(2, _trained_outside)
    assert {"all_gather", "reduce_scatter"} <= names
    assert calls == same, "ranks move the same in the same order"
    for name, value in want.items():
        np.testing.assert_array_equal(first[name], value, err_msg=name)
        np.testing.assert_array_equal(other[name], value, err_msg=name)
