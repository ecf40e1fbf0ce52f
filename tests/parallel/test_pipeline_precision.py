"""Pipelines in low and high precision, with one loss scale, and steps that all stages skip."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lt_zero.config.precision import dtype_policy
from tests.support.matrix import only
from tests.support.parity import OPTIMIZERS, STAGES
from tests.support.pipelines import Model, Ranks, Run, all_weights, batch, start
from tests.support.pool import Pool

STEPS, PARTS, SCALE = 3, 4, 2.0**8  # of micro-batches, two rows each
MODES = {
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "64-true": torch.float64,
}
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1000, "hysteresis": 9}


def _loss(model: Model, mode: str, step: int, rows: slice = slice(None)) -> Tensor:
    x, y = batch(step, 0)
    with torch.autocast("cpu", MODES[mode] if "mixed" in mode else torch.bfloat16, enabled="mixed" in mode):
        return model.loss(x[rows], y[rows])


def _plain(mode: str, optimizer: str) -> dict[str, Tensor]:
    """Plain PyTorch in one process, over micro-batches: master weights of 32 bits, or of 64 for that mode.

    Under autocast, too, its weights are of the lower precision, as those of the engine are.
    """
    master = Model().double() if mode == "64-true" else Model()
    made = OPTIMIZERS[optimizer](master.parameters())
    for step in range(STEPS):
        made.zero_grad()
        for number in range(PARTS):
            model = copy.deepcopy(master).to(MODES[mode])
            scale = (SCALE if mode.startswith("16") else 1.0) / PARTS
            (_loss(model, mode, step, slice(2 * number, 2 * number + 2)) * scale).backward()
            for mine, theirs in zip(master.parameters(), model.parameters(), strict=True):
                assert theirs.grad is not None
                part = theirs.grad.to(mine.dtype) / (scale * PARTS)
                mine.grad = part if mine.grad is None else mine.grad + part
        made.step()
    return {name: p.detach() for name, p in master.named_parameters()}


def _start(mode: str, stage: int, optimizer: str) -> Run:
    keys: dict[str, Any] = {"fp16": FP16} if mode.startswith("16") else {}
    return start(Ranks(), stage, optimizer, policy=partial(dtype_policy, mode=mode), **keys)


def _step(run: Run, mode: str, number: int) -> Tensor:
    with run.engine.forward_scope():
        loss = _loss(run.model, mode, number)
    run.optimizer.zero_grad()
    run.begin()
    (loss * run.gate.scale).backward()
    run.gate.unscale(run.sharded)
    if not run.gate.skip:
        run.optimizer.step()
    run.gate.conclude(run.sharded, 0)
    return loss.detach()


def _errors(mode: str, stage: int, optimizer: str) -> None:
    exact, theirs, run = _plain("64-true", optimizer), _plain(mode, optimizer), _start(mode, stage, optimizer)
    for step in range(STEPS):
        assert _step(run, mode, step).isfinite()
    assert run.gate.skipped == 0
    got, floor = all_weights(run.engine), 1e-12 if mode == "64-true" else 1e-7
    errors, bounds = ({name: (of[name] - exact[name]).norm() for name in exact} for of in (got, theirs))
    for name, error in errors.items():  # some have six elements, so that rounding may be twice as large by chance
        assert error <= 4 * bounds[name] + floor, f"{name}: error {error:g}, plain PyTorch {bounds[name]:g}"
    error, bound = (torch.stack(list(of.values())).norm() for of in (errors, bounds))
    assert error <= 2 * bound + floor, f"error {error:g}, plain PyTorch {bound:g}"


@pytest.mark.parametrize(("mode", "stage"), [*((mode, 1) for mode in MODES), ("16-true", 0)])
def test_error_is_that_of_plain_pytorch(pool: Pool, mode: str, stage: int) -> None:
    pool.run(2, _errors, mode, stage, "sgd")


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "stage"), [("16-true", 3), ("16-mixed", 2), ("64-true", 3)])
def test_error_is_that_of_plain_pytorch_with_adamw(pool: Pool, mode: str, stage: int) -> None:
    """Not with bf16, which rounds some gradients to the other sign: the first step of AdamW is their sign."""
    pool.run(2, _errors, mode, stage, "adamw")


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
        _step(run, "16-true", step)
        if handle is not None:
            handle.remove()
    assert run.gate.skipped == (0 if drop else len(bad))
    return all_weights(run.engine)


@pytest.mark.parametrize("stage", only([0, 3], STAGES))
@pytest.mark.parametrize("layer", only(["pipe.layers.2.up.bias"], ["pipe.layers.2.up.bias", "pipe.layers.5.up.bias"]))
def test_all_stages_skip_a_step_that_overflows_in_one(pool: Pool, stage: int, layer: str) -> None:
    with_overflow, without = (pool.run(2, _gated, stage, layer, {1, 2}, drop)[0] for drop in (False, True))
    assert all(torch.equal(value, with_overflow[name]) for name, value in without.items())
