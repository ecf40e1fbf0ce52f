"""What an optimizer's ``step`` gets as its closure, with and without a Trainer."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import SGD, Optimizer

import lt_zero
from tests.support.lightning_tools import BoringModel, assert_same, sharded_trainer, single_trainer, weights
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.parity import TORCH_FUSES, config_of, full_values
from tests.support.pool import Pool


class Strict(SGD):
    """Insists on a closure, and returns what it makes of its result."""

    losses: list[float]

    def step(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self.losses = [*getattr(self, "losses", []), float(loss)]
        super().step()
        return ("stepped", loss)


class Forgets(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step()


class Without(SGD):
    def step(self) -> Any:  # type: ignore[override]
        return super().step()


class Sam(Optimizer):
    """Evaluates the loss at weights that it has moved, in the way of most implementations."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        moves = [p.grad.sign() * 1e-3 for p in parameters]
        for p, move in zip(parameters, moves, strict=True):
            p.add_(move)
        with torch.enable_grad():
            closure()
        for p, move in zip(parameters, moves, strict=True):
            p.sub_(move).sub_(p.grad, alpha=0.1)


class Twice(SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        super().step()
        return closure()


class Assigns(SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


class Model(BoringModel):
    def __init__(self, cls: type[Optimizer], manual: bool = False, passes: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer.reset_parameters()
        self.cls, self.passes, self.outputs = cls, passes, list[Any]()
        self.automatic_optimization = not manual
        self.manual_passes = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        def loss() -> Tensor:
            return self.layer(torch.ones(2, 32) * (batch_idx + 1)).square().mean()

        if self.automatic_optimization:
            return loss()
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            self.manual_passes += 1
            optimizer.zero_grad()
            value = loss()
            self.manual_backward(value)
            return value.detach()

        self.outputs.append(optimizer.step(closure))
        return None

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure) if self.passes else optimizer.step()

    def configure_optimizers(self) -> Any:
        return self.cls(self.parameters(), lr=0.01)  # type: ignore[call-arg]


def _fit(stage: int, cls: type[Optimizer], manual: bool = False, passes: bool = True) -> Any:
    model, options = Model(cls, manual, passes), {"max_steps": 3, "limit_val_batches": 0}
    trainer = sharded_trainer(stage, **options)
    trainer.fit(model)
    return weights(trainer), getattr(trainer.optimizers[0], "losses", None), model.manual_passes, model.outputs


def _same(stage: int, cls: type[Optimizer], manual: bool) -> None:
    expected = Model(cls, manual)
    single = single_trainer(max_steps=3, limit_val_batches=0)
    single.fit(expected)
    got, losses, passes, outputs = _fit(stage, cls, manual)
    if dist.get_rank() == 0:
        assert_same(got, weights(single))
    assert losses == pytest.approx(getattr(single.optimizers[0], "losses", None), rel=1e-5)
    assert passes == expected.manual_passes
    assert [output[0] for output in outputs] == [output[0] for output in expected.outputs]


@pytest.mark.parametrize(
    ("stage", "manual"), only_rows([(1, True), (3, False)], itertools.product([1, 3], [False, True]))
)
def test_a_step_that_insists_on_a_closure(pool: Pool, stage: int, manual: bool) -> None:
    pool.run(2, _same, stage, Strict, manual)


def _without(stage: int) -> None:
    want, *_ = _fit(stage, SGD)
    got, *_ = _fit(stage, Without)
    assert_same(got, want, rtol=0 if TORCH_FUSES else 1e-6, atol=0 if TORCH_FUSES else 1e-8)


def test_a_step_without_a_closure(pool: Pool) -> None:
    pool.run(2, _without, 2)


def _forgotten() -> None:
    with pytest.raises(MisconfigurationException, match="closure hasn't been executed by Forgets.step"):
        _fit(1, Forgets)
    with pytest.raises(MisconfigurationException, match="The closure hasn't been executed"):
        _fit(1, SGD, passes=False)


def test_a_closure_that_is_forgotten_is_an_error(pool: Pool) -> None:
    pool.run(2, _forgotten)


def _refused(cls: type[Optimizer], match: str, manual: bool) -> None:
    with pytest.raises(RuntimeError, match=match):
        _fit(2, cls, manual)


OTHER_PASSES = {Sam: "Sam.step .* at other weights", Twice: "Twice.step .* again"}


@pytest.mark.parametrize(
    ("cls", "manual"), only_rows([(Sam, False), (Twice, True)], itertools.product(OTHER_PASSES, [False, True]))
)
@pytest.mark.filterwarnings("ignore")
def test_another_pass_is_refused_by_name(pool: Pool, cls: type[Optimizer], manual: bool) -> None:
    pool.run(2, _refused, cls, OTHER_PASSES[cls], manual)


def _assigned(stage: int) -> None:
    torch.manual_seed(0)
    net = Net()
    other = copy.deepcopy(net)
    engines = [lt_zero.shard(model, config_of(stage)) for model in (net, other)]
    optimizers = [cls(e.root.parameters(), lr=0.1) for e, cls in zip(engines, (Assigns, SGD), strict=True)]
    for engine, optimizer in zip(engines, optimizers, strict=True):
        lt_zero.ShardedOptimizer(engine, optimizer)
        for step in range(3):
            next_token_loss(engine.root, step, 0, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
    got, want = (full_values(engine) for engine in engines)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", only([0, 3], [0, 2, 3]))
def test_weights_that_a_step_assigns_arrive(pool: Pool, stage: int) -> None:
    pool.run(2, _assigned, stage)
