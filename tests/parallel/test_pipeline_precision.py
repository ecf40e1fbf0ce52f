"""Pipelines in low and high precision, with one loss scale, and steps that all stages skip."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn

from lt_zero.config.precision import dtype_policy
from tests.support.matrix import cover, only
from tests.support.parity import OPTIMIZERS, STAGES, full_grads
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


@pytest.mark.parametrize(("mode", "stage", "optimizer"), cover(list(MODES), STAGES, list(OPTIMIZERS)))
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


@pytest.mark.parametrize("stage", only([0, 3], STAGES))
@pytest.mark.parametrize("layer", only(["pipe.layers.2.up.bias"], ["pipe.layers.2.up.bias", "pipe.layers.5.up.bias"]))
def test_all_stages_skip_a_step_that_overflows_in_one(pool: Pool, stage: int, layer: str) -> None:
    with_overflow, without = (pool.run(2, _gated, stage, layer, {1, 2}, drop)[0] for drop in (False, True))
    assert all(torch.equal(value, with_overflow[name]) for name, value in without.items())
