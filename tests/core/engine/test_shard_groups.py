"""``mics_shard_size``: states are sharded inside groups of ranks, and every group has all of them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lt_zero
from lt_zero import ConfigError
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.optim import Lamb
from tests.support.features import needs
from tests.support.matrix import only_rows
from tests.support.models import Net, next_token_loss
from tests.support.parity import RELEASE, Case, check, config_of, full_values
from tests.support.pool import Pool

PAIRS = {"mics_shard_size": 2}


def _exact(stage: int, optimizer: str, zero: dict[str, Any], micro: int) -> None:
    engine = check(Case(Net, next_token_loss, stage, optimizer, steps=3, micro=micro, zero=zero))
    size = zero.get("mics_shard_size") or 4 // zero["dp_replicate_size"]
    assert all(bucket.compute.shard.numel() * size == bucket.layout.numel for bucket in engine.buckets)


@pytest.mark.parametrize(
    ("stage", "optimizer", "size", "shared"),
    only_rows(
        [(1, "adamw", 1, "0"), (3, "sgd", 2, "1")],
        itertools.product([1, 2, 3], ["sgd", "adamw"], [2, 1], ["1", "0"]),
    ),
)
def test_equals_single_process(pool: Pool, stage: int, optimizer: str, size: int, shared: str) -> None:
    """With windows and with sockets; groups of one rank, too, given by their size (AdamW) or their number (SGD)."""
    groups = {"mics_shard_size": size} if optimizer == "adamw" else {"dp_replicate_size": 4 // size}
    zero = {**groups, **(RELEASE if stage == 3 else {})}
    env = {"LT_ZERO_SHARED_MEMORY": shared}
    pool.run(4, _exact, stage, optimizer, zero, 2, env=env)


def _train(stage: int, zero: dict[str, Any], dtype: torch.dtype | None, kind: str) -> dict[str, np.ndarray]:
    """Weights after steps with clipping."""
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(stage, zero, dtype))
    made: torch.optim.Optimizer = (
        Lamb(model.parameters(), lr=1e-2) if kind == "lamb" else torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    owner = lt_zero.ShardedOptimizer(engine, made)
    for step in range(3):
        made.zero_grad()
        next_token_loss(model, step, 0, dist.get_rank()).float().backward()
        owner.grads.clip_norm(0.1)
        made.step()
    values = {name: value.float().numpy() for name, value in full_values(engine).items()}
    engine.offload_manager.close()
    return values


@pytest.mark.parametrize(
    ("stage", "dtype", "kind"),
    only_rows([(3, torch.bfloat16, "adamw")], itertools.product([1, 2, 3], [None, torch.bfloat16], ["adamw", "lamb"])),
)
def test_shared_memory_gives_the_bits_of_one_group(
    pool: Pool, stage: int, dtype: torch.dtype | None, kind: str
) -> None:
    want, *_ = pool.run(4, _train, stage, {}, dtype, kind)
    for got in pool.run(4, _train, stage, PAIRS, dtype, kind):
        for name, value in want.items():
            np.testing.assert_array_equal(got[name], value, err_msg=name)


@needs("offload")
@pytest.mark.parametrize(("stage", "kind"), only_rows([(3, "lamb")], itertools.product([1, 2, 3], ["adamw", "lamb"])))
def test_replicas_stay_equal(pool: Pool, tmp_path: Path, stage: int, kind: str) -> None:
    """To the bit, over sockets, with states in files."""
    where = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {**PAIRS, "offload_optimizer": where, **({"offload_param": where} if stage == 3 else {})}
    first, *others = pool.run(4, _train, stage, zero, None, kind, env={"LT_ZERO_SHARED_MEMORY": "0"})
    for got in others:
        for name, value in first.items():
            np.testing.assert_array_equal(got[name], value, err_msg=name)
    plain, *_ = pool.run(4, _train, stage, {}, None, kind)
    for name, value in plain.items():
        np.testing.assert_allclose(first[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def _another_on_the_group(second: dict[str, Any]) -> str:
    """The error of a second model that would change the group of the first, which goes on; and none without the first.

    Returns the error's text.
    """
    group = ShardGroup.of_all(World.join(torch.device("cpu")))
    torch.manual_seed(0)
    model = Net()
    torch.manual_seed(0)
    reference = Net()
    engine = lt_zero.shard(model, config_of(3, RELEASE), group=group)
    with pytest.raises(ConfigError) as caught:
        lt_zero.shard(Net(), config_of(3, **second), group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lt_zero.ShardedOptimizer(engine, optimizer)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        next_token_loss(model, step, 0, dist.get_rank()).backward()
        for rank in range(dist.get_world_size()):
            (next_token_loss(reference, step, 0, rank) / dist.get_world_size()).backward()
        optimizer.step()
        plain.step()
    for name, value in full_values(engine).items():
        torch.testing.assert_close(value, reference.get_parameter(name).detach(), rtol=1e-5, atol=1e-6, msg=name)
    lt_zero.shard(Net(), config_of(3, RELEASE), group=group)
    own = ShardGroup(group.world, group.parts, group.divisor)
    lt_zero.shard(Net(), config_of(3, **second), group=own)
    del engine, model, optimizer
    lt_zero.shard(Net(), config_of(3, **second), group=group)  # nobody uses it as it was
    return str(caught.value)


@pytest.mark.parametrize(
    ("second", "told"),
    only_rows(
        [({"zero": PAIRS}, r"mics_shard_size \(4 until now, now 2\)")],
        [
            ({"zero": PAIRS}, r"mics_shard_size \(4 until now, now 2\)"),
            ({"gradient_allreduce_op": "sum"}, r"gradient_allreduce_op"),
            ({"prescale_gradients": True}, r"gradient_predivide_factor"),
        ],
    ),
)
def test_a_group_that_is_used_is_not_changed(pool: Pool, second: dict[str, Any], told: str) -> None:
    for text in pool.run(4, _another_on_the_group, second):
        assert re.search(told, text), text
        assert "a group of its own" in text


def _refused() -> list[str]:
    found = []
    for zero in (PAIRS, {"dp_replicate_size": 2}, {"mics_shard_size": 1, "dp_replicate_size": 3}, WRONG):
        try:
            lt_zero.shard(Net(), config_of(2, zero))
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found


WRONG = {"mics_shard_size": 3, "dp_replicate_size": 3}


def test_groups_have_to_divide_the_ranks_and_agree(pool: Pool) -> None:
    for size, number, both, contradict in pool.run(3, _refused):
        assert "mics_shard_size=2" in size
        assert "write one of 1, 3" in size
        assert "dp_replicate_size=2" in number
        assert "write one of 1, 3" in number
        assert both == ""
        assert "dp_replicate_size=3, but zero_optimization.mics_shard_size=3 makes 1 groups" in contradict


def test_estimates_know_groups() -> None:
    with pytest.raises(ConfigError, match="mics_shard_size=3"):
        lt_zero.estimate(1e9, {"zero_optimization": {"stage": 3, "mics_shard_size": 3}}, 8)

    def states(**zero: int) -> int:
        cast = lt_zero.estimate(1e9, {"zero_optimization": {"stage": 3, **zero}}, 8, ranks_per_node=8)
        return sum(n for (place, kind), n in cast.phases["step"].items() if (place, kind) == ("device", "moments"))

    assert states() >= 1e9
    assert states(mics_shard_size=4) == pytest.approx(2 * states(), rel=0.01)
    assert states(mics_shard_size=8) == states()
    assert states(dp_replicate_size=2) == states(mics_shard_size=4)
