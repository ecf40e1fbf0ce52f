"""Every optimizer that a configuration can name, at all stages on 1 to 3 ranks, against torch in one process.

Note [Tolerance]
    The reference runs in 64 and in 32 bits. Sharding changes the order of sums and nothing else, so weights may be as
    far from the 64-bit ones as torch's own 32-bit run is, up to a small factor, for other orders lose other bits; and
    each of the steps rounds a weight once. The weights have to move a hundred times as far, or the test shows nothing.

Note [Which run]
    The whole matrix takes minutes, so it is marked slow. The fast tests run each row once, on 2 or 3 ranks, at stages
    that differ from row to row, for fewer steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import lt_zero
from lt_zero.optim import OneCycle, build_optimizer
from tests.support.matrix import only
from tests.support.parity import STAGES, config_of, full_values
from tests.support.pool import Pool

STEPS, FEW, FACTOR, MOVES = 50, 20, 8, 100
Weights = dict[str, np.ndarray[Any, Any]]


class Odd(nn.Module):
    """Sizes that no number of ranks divides, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)
        self.unused = nn.Parameter(torch.ones(13))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def loss_of(model: nn.Module, step: int, ranks: Iterable[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Of the batches of these ranks together."""
    generators = [torch.Generator().manual_seed(100 * step + rank) for rank in ranks]
    parts = [torch.randn(4, 8, generator=generator, dtype=torch.float32) for generator in generators]
    x, y = torch.cat(parts).to(dtype).split([5, 3], dim=1)
    return (model(x) - y).square().mean()


class Formula(Optimizer):
    """A rule for one weight as papers write it, applied to whole tensors.

    Args:
        rule: from weight, gradient, state and step number (from 1) to the new weight.
    """

    def __init__(self, params: Any, rule: Callable[[Tensor, Tensor, dict[str, Tensor], int], Tensor]) -> None:
        super().__init__(params, {})
        self.rule, self.number = rule, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.number += 1
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.copy_(self.rule(p, p.grad, self.state[p], self.number))


def lion(w: Tensor, g: Tensor, state: dict[str, Tensor], number: int) -> Tensor:
    """arXiv:2302.06675, with a rate of 0.003, betas of 0.9 and 0.98 and a decay of 0.1."""
    m = state.get("m", torch.zeros_like(w))
    state["m"] = 0.98 * m + (1 - 0.98) * g
    return w - 0.003 * ((0.9 * m + (1 - 0.9) * g).sign() + 0.1 * w)


def uncorrected(w: Tensor, g: Tensor, state: dict[str, Tensor], number: int) -> Tensor:
    """arXiv:1412.6980 without section 3, with a rate of 0.003, betas of 0.9 and 0.99, eps 1e-6, a decoupled decay."""
    m = state["m"] = 0.9 * state.get("m", torch.zeros_like(w)) + 0.1 * g
    v = state["v"] = 0.99 * state.get("v", torch.zeros_like(w)) + (1 - 0.99) * g * g
    return w * (1 - 0.003 * 0.1) - 0.003 * m / (v.sqrt() + 1e-6)


@dataclass(frozen=True)
class Row:
    """An optimizer block, and what it has to equal.

    Attributes:
        type, params: of the block.
        reference: from parameters; the class ``torch.optim.<type>`` with the same ``params`` unless it is given.
        stages: at which it runs.
    """

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)
    reference: Callable[[Any], Optimizer] | None = None
    stages: tuple[int, ...] = tuple(STAGES)

    def expected(self, parameters: Any) -> Optimizer:
        if self.reference is not None:
            return self.reference(parameters)
        return getattr(torch.optim, self.type)(parameters, **self.params)


L2 = {"lr": 0.01, "weight_decay": 0.1}
BETAS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
ROWS: dict[str, Row] = {
    "Adam": Row("Adam", {**BETAS, "adam_w_mode": False}, lambda p: torch.optim.Adam(p, **BETAS)),
    "DeepSpeed's Adam": Row("Adam", BETAS, lambda p: torch.optim.AdamW(p, **BETAS)),
    "AdamW": Row("AdamW", BETAS),
    "AdamW amsgrad": Row("AdamW", {**BETAS, "amsgrad": True}),
    "uncorrected": Row(
        "AdamW",
        {"lr": 0.003, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "bias_correction": False},
        lambda p: Formula(p, uncorrected),
    ),
    "Lion": Row("Lion", {"lr": 0.003, "betas": (0.9, 0.98), "weight_decay": 0.1}, lambda p: Formula(p, lion)),
    "Adagrad": Row("Adagrad", {**L2, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "SGD": Row("SGD", {**L2, "momentum": 0.9, "nesterov": True}),
    "RMSprop": Row("RMSprop", {**L2, "momentum": 0.5, "centered": True}),
    "NAdam": Row("NAdam", BETAS),
    "RAdam": Row("RAdam", BETAS),
    "Adamax": Row("Adamax", BETAS),
    "Adadelta": Row("Adadelta", {"lr": 1.0, "eps": 1e-4, "weight_decay": 0.1}),
}


def _sharded(runs: list[tuple[str, int]], steps: int) -> dict[tuple[str, int], Weights]:
    """The weights of each optimizer at each stage after all steps."""
    found: dict[tuple[str, int], Weights] = {}
    for name, stage in runs:
        row = ROWS[name]
        torch.manual_seed(0)
        model = Odd()
        engine = lt_zero.shard(model, config_of(stage))
        optimizer = build_optimizer(row.type, row.params, model.parameters())
        lt_zero.ShardedOptimizer(engine, optimizer)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, step, [dist.get_rank()]).backward()
            optimizer.step()
        found[name, stage] = {key: value.numpy() for key, value in full_values(engine).items()}
    return found


def alone(make: Callable[[Any], Optimizer], world: int, steps: int, dtype: torch.dtype) -> tuple[Weights, Weights]:
    """The weights before and after the same steps in one process."""
    torch.manual_seed(0)
    model = Odd().to(dtype)
    before = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, range(world), dtype).backward()
        optimizer.step()
    return before, {name: p.detach().numpy() for name, p in model.named_parameters()}


EVERY = [(name, stage) for name, row in ROWS.items() for stage in row.stages]


@pytest.mark.parametrize("world", only([3], [2, 3]))
def test_some_as_in_one_process(pool: Pool, world: int) -> None:
    rows = [(number, name, ROWS[name].stages) for number, name in enumerate(ROWS) if number % 2 == world % 2]
    compare(pool, world, [(name, stages[(number // 2 + world) % len(stages)]) for number, name, stages in rows], FEW)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_as_in_one_process(pool: Pool, world: int) -> None:
    for half in (EVERY[::2], EVERY[1::2]):  # a task of the pool has limited time
        compare(pool, world, half, STEPS)


def compare(pool: Pool, world: int, runs: list[tuple[str, int]], steps: int) -> None:
    """All ranks' weights with the reference. See Note [Tolerance]."""
    got = pool.run(world, _sharded, runs, steps)
    for name in dict.fromkeys(name for name, _ in runs):
        expected, stages = ROWS[name].expected, [stage for other, stage in runs if other == name]
        before, exact = alone(expected, world, steps, torch.float64)
        _, torchs = alone(expected, world, steps, torch.float32)
        for key, want in exact.items():
            rounding = steps * 2.0**-24 * np.abs(want).max()
            bound = FACTOR * np.abs(torchs[key] - want).max() + rounding
            moved = np.abs(want - before[key]).max()
            assert moved == 0 if key == "unused" else moved > MOVES * bound, f"{name}, {key}: {moved} of {bound}"
            for (rank, found), stage in itertools.product(enumerate(got), stages):
                off = np.abs(found[name, stage][key] - want).max()
                assert off <= bound, f"{name} at stage {stage}, rank {rank} of {world}, {key}: {off} > {bound}"


CYCLE = {"cycle_first_step_size": 10, "cycle_second_step_size": 12, "cycle_min_mom": 0.5, "cycle_max_mom": 0.95}


def _cycled(fused: bool) -> tuple[list[float], Weights]:
    torch.manual_seed(0)
    model = Odd()
    engine = lt_zero.shard(model, config_of(2, fused_step=fused))
    optimizer = build_optimizer("AdamW", {"lr": 1e-3}, model.parameters())
    sharded = lt_zero.ShardedOptimizer(engine, optimizer)
    assert (sharded.fused is not None) == fused
    schedule = OneCycle(optimizer, 1e-3, 2e-2, **CYCLE)
    betas = []
    for step in range(30):
        optimizer.zero_grad()
        loss_of(model, step, [dist.get_rank()]).backward()
        sharded.grads.clip_norm(0.5)
        betas.append(optimizer.param_groups[0]["betas"][0])
        optimizer.step()
        schedule.step()
    return betas, {key: value.numpy() for key, value in full_values(engine).items()}


def _plain_adamw(dtype: torch.dtype) -> tuple[list[float], Weights]:
    """AdamW in plain arithmetic; beta1 moves as the schedule says in words: low, then down and up against the rate."""
    torch.manual_seed(0)
    model = Odd().to(dtype)
    state: dict[str, tuple[Tensor, Tensor]] = {}
    betas = []
    for step in range(30):
        model.zero_grad()
        loss_of(model, step, range(2), dtype).backward()
        height = max(0.0, min(step / 10, 1 - (step - 10) / 12))
        lr = 1e-3 + (2e-2 - 1e-3) * height
        beta1, beta2 = (0.95 - (0.95 - 0.5) * height if step else 0.5), 0.99  # as DeepSpeed's: it starts low
        betas.append(beta1)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.grad is None:
                    continue
                m, v = state.get(name, (torch.zeros_like(p), torch.zeros_like(p)))
                m, v = beta1 * m + (1 - beta1) * p.grad, beta2 * v + (1 - beta2) * p.grad**2
                state[name] = m, v
                m, v = m / (1 - beta1 ** (step + 1)), v / (1 - beta2 ** (step + 1))
                p.sub_(lr * m / (v.sqrt() + 1e-8))
    return betas, {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("fused", only([True], [True, False]))
def test_the_kernel_takes_the_momentum_of_the_cycle(pool: Pool, fused: bool) -> None:
    want_betas, want = _plain_adamw(torch.float64)
    _, rounded = _plain_adamw(torch.float32)
    torch.manual_seed(0)
    start = {name: p.detach().numpy() for name, p in Odd().named_parameters()}
    for betas, got in pool.run(2, _cycled, fused):
        assert betas == pytest.approx(want_betas, abs=1e-12)
        assert (min(betas), max(betas)) == pytest.approx((0.5, 0.95))
        for key, value in want.items():
            bound = FACTOR * np.abs(rounded[key] - value).max() + 30 * 2.0**-24 * np.abs(value).max()
            assert np.abs(got[key] - value).max() <= bound, key
            assert key == "unused" or np.abs(start[key] - value).max() > MOVES * bound, key
