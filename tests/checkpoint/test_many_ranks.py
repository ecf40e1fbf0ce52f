"""One of many ranks: what it saves, tells and plans does not grow with their number."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn

import lt_zero
from lt_zero.checkpoint.native import pieces
from lt_zero.checkpoint.native.save import DirectoryWriter, bundle
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.engine.engine import Engine
from tests.support.parity import config_of
from tests.support.simulated import one_of

CPU = torch.device("cpu")


def net(width: int = 64) -> nn.Sequential:
    units = (nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(4))
    return nn.Sequential(*units)


def with_states(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer the states of a step."""
    for bucket in engine.buckets:
        for index, parameter in enumerate(bucket.params):
            for piece in bucket.pieces_of(index):
                states = {key: torch.zeros(piece.numel) for key in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.tensor(1.0), **states}


class Saved(NamedTuple):
    """What a rank does for a save.

    ``told``: the names of whose counters it tells the others. ``entries``, ``boxes``: in its plan.
    """

    told: list[str]
    entries: int
    boxes: int


def saved(world: int, rank: int, **zero: Any) -> Saved:
    """What ``rank`` of ``world`` does for a save."""
    told: dict[str, Any] = {}
    gather = Ranks.host_gather

    def noting(self: Ranks, value: Any, name: str) -> list[Any]:
        told[name] = value
        return gather(self, value, name)

    with one_of(world, CPU, rank) as group, mock.patch.object(Ranks, "host_gather", noting):
        engine = lt_zero.shard(net(), config_of(3, zero), CPU, group=group)
        optimizer = torch.optim.AdamW(engine.root.parameters())
        sharded = lt_zero.ShardedOptimizer(engine, optimizer)
        with_states(engine, optimizer)
        state = pieces.weight_fragments(engine)
        content = {"state_dict": state, "optimizer_states": [pieces.optimizer_fragments(sharded)]}
        made = bundle(content, [pieces.parameter_names(optimizer, engine)], engine.world, {}, {})
        plan = DirectoryWriter(None, made, rank).own_parts()  # type: ignore[arg-type]
        return Saved(
            list(told["optimizer states that are no tensors"]), len(plan), sum(len(p.boxes) for p in plan.values())
        )


@pytest.mark.parametrize("zero", [{}, {"mics_shard_size": 2}], ids=["all", "replicas"])
def test_one_rank_tells_the_counters_of_a_parameter(zero: dict[str, Any]) -> None:
    told = Counter(name for rank in range(4) for name in saved(4, rank, **zero).told)
    assert told == Counter(name for name, _ in net().named_parameters())


def test_what_a_rank_plans_does_not_grow_with_the_ranks() -> None:
    few, many = saved(8, 5), saved(512, 5)
    assert 0 < many.entries <= few.entries
    assert 0 < many.boxes <= few.boxes
    assert len(many.told) <= len(few.told)
