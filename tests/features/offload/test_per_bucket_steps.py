"""Steps of buckets whose states rest in files: buckets left out, hooks, names of states, gradients changed in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.checkpoint.native.full_states import full_optimizer_state
from lt_zero.core.engine.whole_model import full_state_dict
from tests.support.matrix import cover, only
from tests.support.offload_runs import blocks, same
from tests.support.parity import config_of, full_values
from tests.support.pool import Pool


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9)

    def forward(self, x: Tensor, *which: str) -> Tensor:
        for name in which:
            x = getattr(self, name)(x)
        return x.square().mean()


def _build(stage: int, path: str | None, make: Any, model: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    model = model or Parts()
    engine = lt_zero.shard(model, config_of(stage, zero=blocks(path, stage == 3)))
    return model, engine, [lt_zero.ShardedOptimizer(engine, o) for o in make(model)]


def _turns(stage: int, path: str | None, make: Any, turns: list[tuple[tuple[str, ...], int]], save: bool) -> Any:
    model, engine, optimizers = _build(stage, path, make)
    for number, (which, index) in enumerate(turns):
        sharded = optimizers[index]
        sharded.optimizer.zero_grad()
        model(torch.ones(2, 9) * (1 + dist.get_rank()), *which).backward()
        sharded.optimizer.step()
        if save and number == 1:
            full_state_dict(engine)
            full_optimizer_state(sharded)
    assert not any(store.nbytes for bucket in engine.buckets for store in bucket.stores() if store.streamed)
    found = full_values(engine)
    engine.offload_manager.close()
    return found


def _one(model: nn.Module) -> list[Any]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2)]


def _two(model: Any) -> list[Any]:
    return [
        torch.optim.AdamW(model.a.parameters(), lr=1e-2),
        torch.optim.AdamW([*model.b.parameters(), *model.c.parameters()], lr=1e-2),
    ]


def _frozen(model: Any) -> list[Any]:
    model.b.requires_grad_(False)
    return _one(model)


ALL = ("a", "b", "c")
RUNS: dict[str, tuple[Any, list[tuple[tuple[str, ...], int]]]] = {
    "a unit is left out": (_one, [(ALL, 0), (("a", "c"), 0), (ALL, 0), (("b",), 0)]),
    "two optimizers": (_two, [(ALL, 0), (ALL, 1), (ALL, 1), (ALL, 0), (ALL, 1)]),
    "frozen": (_frozen, [(ALL, 0)] * 4),
}


def _equal(path: str, run: str, stage: int) -> None:
    make, turns = RUNS[run]
    want = _turns(stage, None, make, turns, False)
    for save in (False, True):
        same(_turns(stage, path, make, turns, save), want, save)


@pytest.mark.parametrize(("run", "stage"), cover([*RUNS], [3, 2, 1, 0]))
def test_buckets_that_are_not_stepped(pool: Pool, tmp_path: Path, run: str, stage: int) -> None:
    pool.run(2, _equal, str(tmp_path), run, stage)


def _small_head(path: str) -> None:
    for stage in (1, 3):
        results = []
        for where in (None, path):
            model, engine, (sharded,) = _build(stage, where, _one, nn.Linear(3, 1, bias=False))
            for _ in range(3):
                sharded.optimizer.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                sharded.optimizer.step()
            results.append(full_values(engine))
        same(results[1], results[0], stage)


def test_a_rank_without_a_piece(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _small_head, str(tmp_path))


def _hooks(path: str) -> None:
    calls: list[str] = []
    for optimizer in ("AdamW", "SGD"):
        calls.clear()
        model, _, (sharded,) = _build(1, path, lambda m, o=optimizer: [getattr(torch.optim, o)(m.parameters(), lr=0.1)])
        sharded.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        sharded.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        for _ in range(2):
            model(torch.ones(1, 9), *ALL).backward()
            sharded.optimizer.step()
        assert calls == ["pre", "post"] * 2


def test_hooks_run_once_per_step(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, _hooks, str(tmp_path))


class Momentum(torch.optim.Optimizer):
    """Names its states as the engine names its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                for key in ("master", "grad", "weights", "a/b c"):
                    row = self.state[p].setdefault(key, torch.zeros_like(p))
                    row.mul_(0.9).add_(p.grad)
                p.sub_(self.state[p]["a/b c"], alpha=group["lr"])


def _names(path: str, stage: int) -> None:
    results = []
    for where in (None, path):
        make = lambda m: [Momentum(m.parameters())]  # noqa: E731
        results.append(_turns(stage, where, make, [(ALL, 0)] * 3, True))
    same(results[1], results[0], stage)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("stage", only([3], [0, 1, 3]))
def test_states_may_have_any_name(pool: Pool, tmp_path: Path, stage: int) -> None:
    pool.run(2, _names, str(tmp_path), stage)


def _in_place(path: str) -> None:
    def make(model: nn.Module) -> list[Any]:
        return [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=True)]

    for stage in (0, 1, 3):
        results = []
        for where in (None, path):
            model, engine, (sharded,) = _build(stage, where, make)
            for _ in range(3):  # gradients add up
                model(torch.ones(1, 9), *ALL).backward()
                sharded.optimizer.step()
            results.append(full_values(engine))
        same(results[1], results[0], stage)


def test_gradients_that_a_step_changed_are_kept(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, _in_place, str(tmp_path))


def _random(path: str) -> None:
    torch.manual_seed(3)
    want = torch.rand(3)
    torch.manual_seed(3)
    engine = lt_zero.shard(nn.Linear(2, 2), config_of(1, zero=blocks(path, False)))
    torch.manual_seed(3)
    lt_zero.ShardedOptimizer(engine, torch.optim.AdamW(engine.root.parameters()))
    assert torch.equal(torch.rand(3), want)


def test_set_up_draws_no_random_numbers(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, _random, str(tmp_path))
