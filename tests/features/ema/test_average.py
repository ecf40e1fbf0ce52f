"""The averages of weights among the states of a bucket: apart from the optimizer's, counted, and freed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.core.engine.averaged_weights import average_of
from lt_zero.features.ema.average import WeightAverage
from lt_zero.planning.check import measured
from lt_zero.planning.forecast import MOMENTS
from tests.support.features import needs
from tests.support.lightning_tools import quick
from tests.support.matrix import only
from tests.support.models import Net, next_token_loss
from tests.support.offload_runs import blocks
from tests.support.parallel_nets import Net as MeshNet
from tests.support.parallel_nets import Ranks, all_weights, loss_of, reference_step, start
from tests.support.parity import OPTIMIZERS, STAGES, config_of, full_values
from tests.support.pool import Pool


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, whose state has the name that averages have."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["ema"] = state["ema"].mul_(0.9).add_(p.grad) if state else p.grad.clone()
                p.sub_(state["ema"], alpha=group["lr"])


def _train(zero: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights and their averages."""
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(1, zero=zero))
    sharded = lt_zero.ShardedOptimizer(engine, Momentum(model.parameters()))
    average = WeightAverage(engine)
    assert average_of(engine) is average
    for step in range(3):
        next_token_loss(model, step, 0, 0).backward()
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
        before = measured(engine, [sharded]).get(MOMENTS, 0)
        average.update(0.5)
        if step == 0 and not zero:
            held = sum(bucket.compute.shard.nbytes for bucket in engine.buckets)
            assert measured(engine, [sharded])[MOMENTS] == before + held
    with average.showing(True):
        shown = full_values(engine)
    trained = full_values(engine)
    engine.detach()
    assert average_of(engine) is None
    assert not any(bucket.states.beside for bucket in engine.buckets)
    return trained, shown


def _share_a_name(folder: str) -> None:
    want, found = _train({}), _train(blocks(folder, False))
    for values, others in zip(want, found, strict=True):
        assert all(torch.equal(others[name], value) for name, value in values.items())
    assert not all(torch.equal(want[1][name], value) for name, value in want[0].items())


@needs("offload")
def test_an_optimizer_may_have_a_state_of_the_same_name(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, _share_a_name, str(tmp_path))


def _validate_on_a_slow_rank(folder: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    engine = lt_zero.shard(model, config_of(3, {"stage3_prefetch_bucket_size": 0}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    lt_zero.ShardedOptimizer(engine, optimizer)
    average, x = WeightAverage(engine), torch.ones(3, 4)
    for _ in range(2):
        average.update(0.5)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    goes_on, before_write = Path(folder) / "goes on", engine.before_write

    def tell() -> None:
        goes_on.touch()
        before_write()

    def wait(*_: object) -> None:
        while not goes_on.exists():
            time.sleep(0.01)

    with average.showing(True), torch.no_grad():
        twin = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))
        twin.load_state_dict(full_values(engine))
        if dist.get_rank() == 0:
            found = model(x)
            # The other rank goes on where this one waits for it, at the latest.
            mock.patch.object(engine, "before_write", tell).start()
        else:
            model[1].register_forward_pre_hook(wait, prepend=True)
            found = model(x)
        torch.testing.assert_close(found, twin(x))
    mock.patch.stopall()
    engine.detach()


def test_weights_come_back_when_all_ranks_have_used_the_averages(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _validate_on_a_slow_rank, str(tmp_path))


def _decays() -> str:
    rank = dist.get_rank()
    with quick():
        engine = lt_zero.shard(Net(), config_of(3))
    sharded = lt_zero.ShardedOptimizer(engine, torch.optim.SGD(engine.root.parameters(), lr=0.1))
    next_token_loss(engine.root, 0, 0, rank).backward()
    sharded.optimizer.step()
    average = WeightAverage(engine)
    average.update(0.5 if rank == 1 else 0.9)
    with pytest.raises(RuntimeError) as caught:
        average.swap()
    return str(caught.value)


def test_averages_decay_alike(pool: Pool) -> None:
    for told in pool.run(2, _decays):
        assert "the decay of the average of weights is 0.9 on rank 0 and 0.5 on rank 1" in told, told


def _of_tensor_ranks(stage: int) -> None:
    run = start(Ranks(2, 2), stage, "adamw")
    reference = MeshNet()
    expected = OPTIMIZERS["adamw"](reference.parameters())
    averages = dict[str, Tensor]()
    average = WeightAverage(run.engine)
    for step in range(3):
        run.optimizer.zero_grad()
        loss_of(run.model, step, run.data_rank, 0).backward()
        run.sharded.grads.clip_norm(0.05)
        reference_step(reference, expected, step, run.ranks.data, 1, 0.05)
        run.optimizer.step()
        average.update(0.75)
        for name, p in reference.named_parameters():
            averages[name] = averages[name] * 0.75 + p.detach() * 0.25 if name in averages else p.detach().clone()
    with average.showing(True):
        shown = all_weights(run.engine)
    for name, value in averages.items():
        torch.testing.assert_close(shown[name], value, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", only([1, 3], STAGES))
def test_averages_of_parts_of_tensors(pool: Pool, stage: int) -> None:
    pool.run(4, _of_tensor_ranks, stage)
