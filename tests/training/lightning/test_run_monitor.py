"""All monitors beside each other, in the runs in which they met each other's faults."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lt_zero import ZeroPrecision, ZeroStrategy
from tests.support.lightning_tools import QUIET

pytestmark = pytest.mark.filterwarnings("ignore")


class Kept(DummyLogger):
    """Keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: Any = None, **_: Any) -> None:
        self.seen.append((step, dict(metrics)))


class Model(pl.LightningModule):
    """Batches of two rows; the last one of the epoch has one."""

    def __init__(self, width: int = 4, manual: bool = False, fails: type[BaseException] | None = None) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.automatic_optimization, self.width, self.fails = not manual, width, fails

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.fails is not None and batch_idx == 1:
            raise self.fails
        self.log("batch", float(batch_idx))
        if self.automatic_optimization:
            return self.two(self.one(batch)).square().mean()
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(self.two(self.one(batch)).square().mean())
            optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.one, self.two)]

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(5, self.width), batch_size=2)  # type: ignore[arg-type]


def trainer_for(config: dict[str, Any], **options: Any) -> pl.Trainer:
    strategy = ZeroStrategy(config={"zero_optimization": {"stage": 2}, **config})
    return pl.Trainer(**{**QUIET, "devices": 1, "max_epochs": 1, "strategy": strategy, **options})


def test_all_metrics_of_a_batch_have_its_step() -> None:
    logger = Kept()
    config = {"steps_per_print": 1, "wall_clock_breakdown": True}
    trainer = trainer_for(config, logger=logger, log_every_n_steps=1, plugins=[ZeroPrecision("16-mixed")], max_epochs=2)
    with redirect_stdout(io.StringIO()):
        trainer.fit(Model(manual=True))
    steps: dict[str, list[int]] = {}
    for step, metrics in logger.seen:
        for name in metrics:
            steps.setdefault(name, []).append(step)
    assert steps["batch"] == [0, 1, 2, 3, 4, 5], "as self.log counts"
    for name in ("time/forward_ms", "zero/loss_scale", "loss_scale"):
        assert steps[name] == [step for step in range(6) for _ in range(2)], f"{name}: two optimizers"


def test_operations_are_those_of_the_model_that_is_fitted() -> None:
    trainer = trainer_for({"steps_per_print": 1})
    strategy: Any = trainer.strategy
    counted = []
    for epochs, width in ((1, 4), (2, 8)):
        trainer.fit_loop.max_epochs = epochs
        with redirect_stdout(io.StringIO()):
            trainer.fit(Model(width))
        counted.append(strategy.monitor.flops.flops_of(1))
    assert counted == [5 * 2 * 4 * 4, 5 * 2 * 8 * 8], "the first layer has no gradient of its input"


def test_a_short_batch_counts_in_proportion() -> None:
    trainer = trainer_for({"steps_per_print": 1})
    strategy: Any = trainer.strategy
    *_, printer = strategy.monitor._observers
    told: list[float | None] = []
    before = printer._operations

    def operations() -> float | None:
        told.append(before())
        return told[-1]

    printer._operations = operations
    with redirect_stdout(io.StringIO()):
        trainer.fit(Model())
    assert told == [None, 2 * 160.0, 160.0]


@pytest.mark.parametrize("fails", [ZeroDivisionError, KeyboardInterrupt])
def test_a_run_that_fails_is_not_told_to_train_longer(fails: type[BaseException]) -> None:
    trainer = trainer_for({"flops_profiler": {"enabled": True, "profile_step": 9}})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises((fails, SystemExit)):
            trainer.fit(Model(fails=fails))
    assert not [str(one.message) for one in seen if "flops_profiler" in str(one.message)]


class Unsized(IterableDataset[Tensor]):
    """Has no length."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(self.rows, 4))


class Validated(Model):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.two(self.one(batch)).mean())


@pytest.mark.parametrize("rows", [6, 0])
def test_data_without_a_length(rows: int) -> None:
    config = {"steps_per_print": 1, "wall_clock_breakdown": True, "memory_breakdown": True}
    trainer = trainer_for(config)
    with redirect_stdout(io.StringIO()) as text:
        trainer.fit(Validated(), *(DataLoader(Unsized(rows), batch_size=2) for _ in range(2)))
    assert trainer.global_step == rows // 2
    assert text.getvalue().count(": loss=") == rows // 2
