"""Weights and states of three faces are those of one process: stages, ranks, optimizers, precisions, clipping."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lt_zero
from tests.conformance.faces import FACES, GAS, Face, Plain, Settings, adamw, close, run, sgd
from tests.support.matrix import only_rows
from tests.support.pool import Pool

STATES = {sgd: "momentum_buffer", adamw: "exp_avg"}
LIMIT = 0.25


def _trains(plain: Plain, settings: Settings, clip: bool, face: Face) -> None:
    """Steps with accumulation, clipped or not; in fp32 weights and states are compared elementwise."""
    exact = settings.precision == "32-true"
    for step in range(2):
        for micro in range(GAS):
            face.backward(step, micro)
        plain.backward(step)
        if clip:
            face.clip(max_norm=LIMIT)
            nn.utils.clip_grad_norm_(plain.net.parameters(), LIMIT)
        face.step()
        plain.optimizer.step()
        for (name, p), q in zip(face.net.named_parameters(), plain.net.parameters(), strict=True):
            tolerance = {"rtol": 1e-5, "atol": 1e-6} if exact else {"rtol": 0.05, "atol": 0.03}
            close(lt_zero.full_master(p).float(), q.detach(), name, **tolerance)
            key = STATES[settings.optimizer]
            if exact:
                close(lt_zero.full_state(p, key), plain.optimizer.state[q][key], f"{key} of {name}", atol=1e-6)
    if exact:
        with torch.no_grad():
            found, wanted = (net(torch.arange(5)[None]) for net in (face.net, plain.net))
        close(found, wanted, "output", rtol=1e-4, atol=1e-5)


def _run(face: str, settings: Settings, clip: bool) -> None:
    run(face, settings, partial(_trains, Plain(settings.optimizer), settings, clip))


def _halves(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def _skips(face: Face) -> list[float]:
    """The learning rates after three steps, of which the gradients of the second overflow on one rank."""
    rates = []
    for step in range(3):
        before = lt_zero.full_master(next(face.net.parameters()))
        for micro in range(GAS):
            face.backward(step, micro, float("inf") if step == 1 and dist.get_rank() == 1 else 1.0)
        face.step()
        rates.append(face.optimizer.param_groups[0]["lr"])
        assert torch.equal(before, lt_zero.full_master(next(face.net.parameters()))) == (step == 1)
    return rates


def _run_skips(face: str, how: str) -> Any:
    config = {"fp16": {"initial_scale_power": 10, "hysteresis": 1}, "on_skipped_step": how}
    return run(face, Settings(2, "16-true", config=config, schedule=_halves), _skips)


HELD, ADVANCED = ("hold", [0.05, 0.05, 0.025]), ("advance", [0.05, 0.025, 0.0125])


@pytest.mark.parametrize(
    ("face", "how", "rates"),
    only_rows([*((f, *HELD) for f in FACES), ("loop", *ADVANCED)], [(f, *r) for f in FACES for r in (HELD, ADVANCED)]),
)
def test_a_skipped_step_changes_nothing(pool: Pool, face: str, how: str, rates: list[float]) -> None:
    for found in pool.run(2, _run_skips, face, how):
        assert found == rates


EXACT = [Settings(stage, optimizer=optimizer) for stage in range(4) for optimizer in (sgd, adamw)]
ROUNDED = [Settings(2, p) for p in ("bf16-true", "bf16-mixed", "16-true", "16-mixed")]
FAST = [("trainer", 6, True, 2), ("fabric", 3, False, 3), ("loop", 5, True, 2)]
ROWS = [*itertools.product(FACES, range(len(EXACT)), [True, False], [2, 3])]


@pytest.mark.parametrize(("face", "number", "clip", "ranks"), only_rows(FAST, ROWS))
def test_weights_and_states_are_those_of_one_process(
    pool: Pool, face: str, number: int, clip: bool, ranks: int
) -> None:
    pool.run(ranks, _run, face, EXACT[number], clip)


@pytest.mark.parametrize(("face", "number"), only_rows([("fabric", 1)], itertools.product(FACES, range(len(ROUNDED)))))
def test_weights_in_16_bits_are_close_to_those_of_one_process(pool: Pool, face: str, number: int) -> None:
    pool.run(2, _run, face, ROUNDED[number], True)
