"""An optimizer from outside, by the path of its class, steps shards as one process steps the whole model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import lt_zero
from lt_zero import ConfigError, ZeroConfig
from tests.outside.scaled import Scaled
from tests.support.models import Net, next_token_loss
from tests.support.pool import Pool

STEPS = 3
PARAMS = {"lr": 0.05, "momentum": 0.8}


def _config(stage: int) -> dict[str, object]:
    return {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "tests.outside.scaled.Scaled", "params": PARAMS},
        "train_micro_batch_size_per_gpu": 3,
    }


def _as_one_process(stage: int) -> None:
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    optimizer = Scaled(plain.parameters(), lr=0.05, momentum=0.8)
    engine, made, *_ = lt_zero.initialize(model=model, config=_config(stage))
    assert type(made) is Scaled
    assert {key: made.param_groups[0][key] for key in PARAMS} == PARAMS
    world = dist.get_world_size()
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world):
            (next_token_loss(plain, step, 0, rank) / world).backward()
        optimizer.step()
        engine.backward(next_token_loss(engine, step, 0, dist.get_rank()))
        engine.step()
        for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(lt_zero.full_master(parameter), wanted.detach())
    moved = [lt_zero.full_master(parameter) for parameter in model.parameters()]
    torch.manual_seed(0)
    # A parameter of zeros stays: the length of its step is a part of its norm.
    assert all(
        torch.equal(value, first) == (not first.any()) for value, first in zip(moved, Net().parameters(), strict=True)
    )
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_it_trains_to_the_weights_of_one_process(pool: Pool, stage: int) -> None:
    pool.run(2, _as_one_process, stage)


def test_its_block_is_checked() -> None:
    config = {"optimizer": {"type": "tests.outside.scaled.Scaled", "params": {"lr": -1, "momentun": 0.5}}}
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.of(config)
    assert sorted(problem.key for problem in caught.value.problems) == [
        "optimizer.params.lr",
        "optimizer.params.momentun",
    ]
