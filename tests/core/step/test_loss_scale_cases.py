"""Defects that a reviewer found in the precision work, each with the smallest run that shows it."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lt_zero
from lt_zero import ZeroConfig, ZeroPrecision
from lt_zero.checkpoint.native.full_states import full_optimizer_state
from lt_zero.checkpoint.native.load_states import load_full_optimizer_state
from lt_zero.config.precision import dtype_policy
from lt_zero.core.engine.full_params import restore_whole
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.training.build import shard
from tests.support.constant_module import Constant
from tests.support.lightning_tools import GPT
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss, tokens
from tests.support.overflowing import Overflowing, make_trainer, plugin_of
from tests.support.parity import STAGES, config_of, full_values
from tests.support.pool import Pool

BF16, FP16 = torch.bfloat16, torch.float16


class ManualClip(GPT):
    """Clips by hand; the first step overflows on rank 1."""

    def __init__(self, world: int, algorithm: str) -> None:
        super().__init__(world)
        self.automatic_optimization, self.algorithm = False, algorithm

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss * float("inf") if batch_idx == 0 and self.global_rank == 1 else loss)
        self.clip_gradients(optimizer, 0.5, self.algorithm)
        optimizer.step()


def _manual_clip(stage: int, algorithm: str) -> int:
    trainer = make_trainer("16-true", stage, max_steps=2)
    trainer.fit(ManualClip(2, algorithm))
    return plugin_of(trainer).skipped_steps


@pytest.mark.parametrize("algorithm", only(["norm"], ["norm", "value"]))
@pytest.mark.parametrize("stage", only([3], [0, 3]))
def test_clipping_by_hand_does_not_hide_overflow(pool: Pool, algorithm: str, stage: int) -> None:
    assert pool.run(2, _manual_clip, stage, algorithm) == [1, 1]


class Dropping(Overflowing):
    """Its hook throws bad gradients away before the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        if not torch.isfinite(torch.stack(norms)).all():
            self.zero_grad()


def _dropping(stage: int) -> Any:
    config = {"fp16": {"initial_scale_power": 8, "hysteresis": 1}}
    trainer = make_trainer("16-true", stage, config, max_steps=4, use_distributed_sampler=False)
    trainer.fit(Dropping(2, {0, 1}))
    return plugin_of(trainer).skipped_steps, plugin_of(trainer).loss_scale


@pytest.mark.parametrize("stage", only([3], [0, 3]))
def test_hook_that_drops_gradients_leaves_the_verdict(pool: Pool, stage: int) -> None:
    assert pool.run(2, _dropping, stage)[0] == (2, 64.0)


def _tiny(stage: int, keys: dict[str, Any]) -> float:
    """Gradients that only a loss scale lifts into fp16's range."""
    model = Constant(7)
    config = config_of(stage, {}, FP16, **keys)
    engine = lt_zero.shard(model, config)
    opt = torch.optim.SGD(model.parameters(), lr=1e6)
    sharded = lt_zero.ShardedOptimizer(engine, opt)
    gate = LossScaleController(engine.policy)
    assert gate.scaler is not None
    gate.scaler.scale = 2.0**20
    gate.before_backward([sharded])
    (model(torch.full((7,), 1e-9)) * gate.scale).backward()
    gate.examine(sharded)
    gate.clip_norm(sharded, 1.0)
    opt.step()
    return float(full_values(engine)["weight"][0])


@pytest.mark.parametrize(
    ("stage", "accumulators"), only_rows([(0, "fp32"), (3, "fp16")], itertools.product(STAGES, ["fp32", "fp16"]))
)
def test_small_gradients_survive_16_bit_accumulators(pool: Pool, stage: int, accumulators: str) -> None:
    keys = {"data_types": {"grad_accum_dtype": accumulators}}
    assert pool.run(2, _tiny, stage, keys)[0] == pytest.approx(-1e-3, rel=2e-2)


def _state_between(stage: int, first: dict[str, Any], second: dict[str, Any]) -> set[torch.dtype]:
    def run(keys: dict[str, Any]) -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = Net()
        engine = lt_zero.shard(model, config_of(stage, {}, BF16, **keys))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return model, optimizer, lt_zero.ShardedOptimizer(engine, optimizer)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        batch = tokens(0, 0, dist.get_rank())
        model(batch).float().square().mean().backward()
        optimizer.step()

    model, optimizer, sharded = run(first)
    step(model, optimizer)
    box = [full_optimizer_state(sharded)]
    dist.broadcast_object_list(box)
    model, optimizer, sharded = run(second)
    load_full_optimizer_state(sharded, box[0])
    step(model, optimizer)
    return {v.dtype for state in optimizer.state.values() for v in state.values() if v.dim() > 0}


@pytest.mark.parametrize(
    ("stage", "lowers"), only_rows([(0, True), (3, False)], itertools.product([0, 3], [False, True]))
)
def test_moments_are_loaded_in_the_running_dtype(pool: Pool, stage: int, lowers: bool) -> None:
    low = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    settings = ({}, low) if lowers else (low, {})
    assert pool.run(2, _state_between, stage, *settings)[0] == {BF16 if lowers else torch.float32}


def _restored(stage: int) -> None:
    torch.manual_seed(0)
    model = Net()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = shard(model, config_of(stage, {}, BF16))
    for name, value in full_values(engine).items():
        assert torch.equal(value, before[name]), f"{name}: frozen or not, no digit is lost"
    restore_whole(engine)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    again = shard(model, config_of(stage))
    next_token_loss(model, 0, 0, 0).backward()
    assert all(torch.equal(value, before[name]) for name, value in full_values(again).items())


@pytest.mark.parametrize("stage", only([1, 3], STAGES))
def test_weights_come_back_as_they_were(pool: Pool, stage: int) -> None:
    pool.run(2, _restored, stage)


def _target_network(stage: int) -> None:
    """A frozen copy that is updated in place (BYOL, target networks)."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"net": nn.Linear(4, 4), "target": nn.Linear(4, 4).requires_grad_(False)})
    engine = lt_zero.shard(model, config_of(stage, {}, BF16))
    opt = torch.optim.SGD(model["net"].parameters(), lr=0.1)
    lt_zero.ShardedOptimizer(engine, opt)
    for _ in range(2):
        opt.zero_grad()
        x = torch.ones(2, 4, dtype=BF16)
        (model["net"](x) - model["target"](x)).float().square().mean().backward()
        opt.step()
        with torch.no_grad():
            model["target"].weight.fill_(0.5)
    assert (full_values(engine)["target.weight"] == 0.5).all()


@pytest.mark.parametrize("stage", only([2], [0, 1, 2]))
def test_target_network(pool: Pool, stage: int) -> None:
    pool.run(2, _target_network, stage)


def _reads(stage: int) -> float:
    model = Constant(7)
    lt_zero.shard(model, config_of(stage, {}, BF16))
    model(torch.arange(7.0)).backward()
    assert model.weight.grad is not None
    return float(model.weight.grad.abs().max())


def test_whole_gradients_can_be_read_in_16_bit_runs(pool: Pool) -> None:
    assert pool.run(2, _reads, 0)[0] == 6.0


class Counting(torch.optim.SGD):
    """Counts its steps per group, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_groups_count_a_staged_step_once() -> None:
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)  # torch now calls hooks for the parent's step too
    model = Net()
    engine = lt_zero.shard(model, config_of(1, {}, BF16, data_types={"grad_accum_dtype": "bf16"}))
    opt = Counting(model.parameters(), lr=0.1)
    lt_zero.ShardedOptimizer(engine, opt)
    for step in range(3):
        opt.zero_grad()
        next_token_loss(model, step, 0, 0).backward()
        opt.step()
    assert opt.param_groups[0]["k"] == 3


def test_static_scale_is_not_overwritten_by_a_ddp_checkpoint() -> None:
    plugin = ZeroPrecision("16-mixed")
    plugin.configure(ZeroConfig.of({"fp16": {"loss_scale": 128}}))
    plugin.on_load_checkpoint({"MixedPrecision": {"scale": 16384.0}})
    assert plugin.loss_scale == 128.0


class BadInValidation(GPT):
    """Only validation has outputs that are not finite; training overflows in a loss outside of modules."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch) * 1e38 * 1e38

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.net.blocks[0](torch.full((1, 10), float("inf"), dtype=FP16))


def _blame() -> str:
    config = {"fp16": {"initial_scale_power": 0, "hysteresis": 3}}
    warnings.filterwarnings("ignore")
    trainer = make_trainer("16-true", 1, config, max_steps=6, val_check_interval=1)
    with pytest.raises(RuntimeError) as error:
        trainer.fit(BadInValidation(dist.get_world_size()))
    return str(error.value)


def test_validation_is_not_blamed(pool: Pool) -> None:
    text = pool.run(2, _blame)[0]
    assert "every module's output was finite" in text
    assert "blocks" not in text.split("In forward")[1]


class OwnNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


def test_norms_that_users_write_run_in_mixed_modes() -> None:
    for dtype, mode in ((FP16, "16-mixed"), (BF16, "bf16-mixed")):
        model = nn.Sequential(nn.Linear(4, 6), OwnNorm(6), nn.Linear(6, 2))
        shard(model, config_of(2), policy=dtype_policy(ZeroConfig(), mode))
        with torch.autocast("cpu", dtype, cache_enabled=False):
            loss = model[2](model[1](model[0](torch.randn(3, 4)).float())).sum()
        loss.backward()
        assert torch.isfinite(loss)
