"""Pipelines in low and high precision, with one loss scale, and steps that all stages skip."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lt_zero import ZeroPrecision
from lt_zero.config.precision import dtype_policy
from tests.support.lightning_tools import sharded_trainer
from tests.support.matrix import only, only_rows
from tests.support.parity import OPTIMIZERS, STAGES, full_grads
from tests.support.pipeline_module import BATCH, Module, Texts
from tests.support.pipelines import Model, Ranks, Run, all_weights, batch, start
from tests.support.pool import Pool

STEPS, PARTS, SCALE = 3, 4, 2.0**8  # of micro-batches, two rows each
TIED = "pipe.tied.embed.weight"
MODES = {
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "64-true": torch.float64,
}
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1000, "hysteresis": 9}


class Trained(NamedTuple):
    """By parameter."""

    gradients: dict[str, Tensor]  # of the first step
    weights: dict[str, Tensor]  # after the last


def _loss(model: Model, mode: str, step: int, rows: slice = slice(None)) -> Tensor:
    x, y = batch(step, 0)
    with torch.autocast("cpu", MODES[mode] if "mixed" in mode else torch.bfloat16, enabled="mixed" in mode):
        return model.loss(x[rows], y[rows])


def _lowered(master: Model, mode: str) -> Model:
    """A copy with the weights of a forward: under autocast norms and vectors of users' modules stay fp32."""
    model = copy.deepcopy(master).to(MODES[mode])
    if "mixed" in mode:
        kept = {f"{name}." for name, module in master.named_modules() if isinstance(module, nn.LayerNorm)}
        values = dict(master.named_parameters())
        for name, parameter in model.named_parameters():
            if name == "scale" or name.startswith(tuple(kept)):
                parameter.data = values[name].detach().clone()
    return model


def _plain(mode: str, optimizer: str) -> Trained:
    """Plain PyTorch in one process, over micro-batches: master weights of 32 bits, or of 64 for that mode."""
    master, gradients = Model().double() if mode == "64-true" else Model(), dict[str, Tensor]()
    made = OPTIMIZERS[optimizer](master.parameters())
    for step in range(STEPS):
        made.zero_grad()
        for number in range(PARTS):
            model = _lowered(master, mode)
            scale = (SCALE if mode.startswith("16") else 1.0) / PARTS
            (_loss(model, mode, step, slice(2 * number, 2 * number + 2)) * scale).backward()
            for mine, theirs in zip(master.parameters(), model.parameters(), strict=True):
                assert theirs.grad is not None
                part = theirs.grad.to(mine.dtype) / (scale * PARTS)
                mine.grad = part if mine.grad is None else mine.grad + part
        gradients = gradients or {name: cast(Tensor, p.grad).clone() for name, p in master.named_parameters()}
        made.step()
    return Trained(gradients, {name: p.detach() for name, p in master.named_parameters()})


def _start(mode: str, stage: int, optimizer: str) -> Run:
    keys: dict[str, Any] = {"fp16": FP16} if mode.startswith("16") else {}
    return start(Ranks(), stage, optimizer, policy=partial(dtype_policy, mode=mode), **keys)


def _backward(run: Run, mode: str, number: int) -> None:
    with run.engine.forward_scope():
        loss = _loss(run.model, mode, number)
    assert loss.isfinite()
    run.optimizer.zero_grad()
    run.begin()
    (loss * run.gate.scale).backward()
    run.gate.unscale(run.sharded)


def _step(run: Run) -> None:
    if not run.gate.skip:
        run.optimizer.step()
    run.gate.conclude(run.sharded, 0)


def _trained(mode: str, stage: int, optimizer: str) -> Trained:
    """Those of all stages of a pipeline. Collective."""
    run, gradients = _start(mode, stage, optimizer), dict[str, Tensor]()
    for number in range(STEPS):
        _backward(run, mode, number)
        for theirs in run.engine.world.host_gather(full_grads(run.engine) if number == 0 else {}, "gradients"):
            gradients |= theirs
        _step(run)
    assert run.gate.skipped == 0
    return Trained(gradients, all_weights(run.engine))


@pytest.mark.parametrize(
    ("mode", "stage", "optimizer"),
    only_rows([("bf16-true", 1, "sgd"), ("16-mixed", 3, "adamw")], itertools.product(MODES, STAGES, OPTIMIZERS)),
)
def test_a_run_is_that_of_plain_pytorch(pool: Pool, mode: str, stage: int, optimizer: str) -> None:
    """Gradients have its bits, except those of the tied weight: the parts of its two stages are added in fp32.

    So weights end as far from those in fp64 as its own, within what that and the kernels of optimizers round.
    """
    exact, plain = _plain("64-true", optimizer), _plain(mode, optimizer)
    ours = pool.run(2, _trained, mode, stage, optimizer)[0]
    for name, gradient in plain.gradients.items():
        assert name == TIED or torch.equal(ours.gradients[name].to(gradient.dtype), gradient), name
    assert ours.weights.keys() == plain.weights.keys()
    floor = 1e-12 if mode == "64-true" else 1e-7
    for got, theirs, want in zip(ours, plain, exact, strict=True):
        for name, value in want.items():
            error, bound = ((of[name] - value).norm() for of in (got, theirs))
            assert error <= 1.25 * bound + floor, f"{name}: error {error:g}, plain PyTorch {bound:g}"


def _gated(stage: int, layer: str, bad: set[int], drop: bool) -> dict[str, Tensor]:
    """At steps ``bad`` a gradient overflows in one layer, on the rank that has it; ``drop`` leaves these steps out."""
    run = _start("16-true", stage, "adamw")
    named: dict[str, nn.Parameter] = dict(run.model.named_parameters())
    for step in range(4):
        if drop and step in bad:
            continue
        parameter = named.get(layer)
        factor = float("inf") if step in bad else 1.0
        handle = parameter.register_hook(lambda grad, factor=factor: grad * factor) if parameter is not None else None
        _backward(run, "16-true", step)
        _step(run)
        if handle is not None:
            handle.remove()
    assert run.gate.skipped == (0 if drop else len(bad))
    return all_weights(run.engine)


def _with_and_without(stage: int, layer: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return _gated(stage, layer, {1, 2}, False), _gated(stage, layer, {1, 2}, True)


@pytest.mark.parametrize("stage", only([3], STAGES))
@pytest.mark.parametrize("layer", only(["pipe.layers.2.up.bias"], ["pipe.layers.2.up.bias", "pipe.layers.5.up.bias"]))
def test_all_stages_skip_a_step_that_overflows_in_one(pool: Pool, stage: int, layer: str) -> None:
    with_overflow, without = pool.run(2, _with_and_without, stage, layer)[0]
    assert all(torch.equal(value, with_overflow[name]) for name, value in without.items())


# ---- a Trainer -----------------------------------------------------------------------------------------------------

GOOD, BAD = [list(range(16)), list(range(12, 28))], list(range(4, 20))  # rows of windows of two batches


class Windows(Module):
    """In the second batch of window ``BAD`` a gradient of the last layer overflows."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__("adamw")
        self.rows, self.scales = rows, list[float]()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        last = dict(self.named_parameters()).get("pipe.layers.6.bias")  # a norm, of the last stage only
        bad = len(self.rows) > 32 and index == 3
        handle = last.register_hook(lambda grad: grad * torch.inf) if last is not None and bad else None
        loss = super().training_step(batch, index)
        if handle is not None:
            handle.remove()
        self.scales.append(self.trainer.precision_plugin.loss_scale)
        return loss

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Subset(Texts(), self.rows), batch_size=BATCH)


def _fit(mode: str, rows: list[int]) -> tuple[list[float], int, dict[str, Tensor]]:
    """Loss scales of batches, skipped steps and weights."""
    config = {"pipeline": {"stages": 2, "num_microbatches": 2}, "fp16": {**FP16, "hysteresis": 1}}
    how: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    trainer = sharded_trainer(1, config=config, plugins=[ZeroPrecision(mode)], use_distributed_sampler=False, **how)
    module = Windows(rows)
    trainer.fit(module)
    weights = {name: value.clone() for name, value in trainer.strategy.full_state_dict().items()}
    return module.scales, trainer.precision_plugin.skipped_steps, weights


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["16-mixed", "16-true"])
def test_a_window_that_overflows_on_the_last_stage_is_left_out_on_all(pool: Pool, mode: str) -> None:
    """And the scale falls on all of them."""
    found = pool.run(2, _fit, mode, GOOD[0] + BAD + GOOD[1])
    for scales, skipped, _ in found:
        assert scales == [SCALE] * 4 + [SCALE / 2] * 2
        assert skipped == 1
    scales, skipped, want = pool.run(2, _fit, mode, GOOD[0] + GOOD[1])[0]
    assert (scales, skipped) == ([SCALE] * 4, 0)
    torch.testing.assert_close(found[0][2], want, rtol=1e-3, atol=1e-4)


def _fit_all(mode: str) -> tuple[list[float], list[float], Tensor]:
    """Losses of training and validation, and predictions."""
    config: dict[str, Any] = {"pipeline": {"stages": dist.get_world_size(), "num_microbatches": 2}}
    config |= {"fp16": FP16} if mode.startswith("16") else {}
    how: dict[str, Any] = {"max_epochs": 2, "use_distributed_sampler": False}
    trainer, module = sharded_trainer(2, config=config, plugins=[ZeroPrecision(mode)], **how), Module()
    trainer.fit(module)
    assert trainer.precision_plugin.skipped_steps == 0
    return module.losses, module.validated, torch.cat(trainer.predict(module)).float()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_runs_in_each_precision(pool: Pool, mode: str) -> None:
    losses, validated, logits = pool.run(1, _fit_all, mode)[0]
    rounding = max(torch.finfo(MODES[mode]).eps, 1e-6)
    for got in pool.run(2, _fit_all, mode):
        assert got[0] == pytest.approx(losses, rel=4 * rounding)
        assert got[1] == pytest.approx(validated, rel=4 * rounding)
        torch.testing.assert_close(got[2], logits, rtol=16 * rounding, atol=16 * rounding)
