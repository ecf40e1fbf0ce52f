"""The numbers of a step, printed and logged: equal to a single process's, and to what others measure."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

from lt_zero import ZeroPrecision
from lt_zero.common import accelerator
from lt_zero.config.blocks import CsvMonitor
from lt_zero.training.lightning.monitor.step_metrics import StepMetrics, StepPrinter, is_due, memory_gb
from tests.support.console_tools import Clock, Observed, _observe, monitored, parsed
from tests.support.lightning_tools import GPT, single_trainer
from tests.support.pool import Pool


def rows_of(folder: Path | str) -> list[dict[str, float]]:
    """What a CSVLogger has written, without empty cells."""
    (file,) = Path(folder).rglob("metrics.csv")
    with file.open() as text:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(text)]


def ours(folder: Path | str) -> list[dict[str, float]]:
    return [row for row in rows_of(folder) if "zero/loss" in row]


# ---- the same as a single process ----------------------------------------------------------------------------------


class Norm(pl.Callback):
    """Measures the gradient norm with torch, before clipping."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.norms.append(float(torch.stack([p.grad.norm() for p in module.parameters()]).norm()))


STEPS: dict[str, Any] = {"max_epochs": 3, "log_every_n_steps": 2, "gradient_clip_val": 0.3}  # two steps in an epoch


def _plain(folder: str) -> list[float]:
    norm = Norm()
    trainer = single_trainer(logger=CSVLogger(folder), callbacks=[norm, LearningRateMonitor()], **STEPS)
    trainer.fit(GPT())
    return norm.norms


def _sharded(folder: str, stage: int) -> None:
    block = CsvMonitor(enabled=True, output_path=folder)
    monitored(stage, [block], logger=None, use_distributed_sampler=False, **STEPS).fit(GPT(dist.get_world_size()))


def test_loggers_get_what_a_single_process_logs(pool: Pool, tmp_path: Path) -> None:
    norms = pool.run(1, _plain, str(tmp_path / "plain"))[0]
    plain = rows_of(tmp_path / "plain")
    losses = {int(row["step"]): row["loss"] for row in plain if "loss" in row}
    rates = {int(row["step"]): row["lr-SGD"] for row in plain if "lr-SGD" in row}
    assert list(losses) == [1, 3, 5]
    for world, stage in ((1, 3), (2, 0), (2, 3)):
        folder = tmp_path / f"{world}-{stage}"
        pool.run(world, _sharded, str(folder), stage)
        found = ours(folder)
        late = [int(row["step"]) for row in rows_of(folder) if {"zero/late_rank", "zero/lateness_ms"} <= set(row)]
        assert late == ([1, 3, 5] if world > 1 else [])
        assert [int(row["step"]) for row in found] == [1, 3, 5], "those at which Lightning logs"
        for row in found:
            step = int(row["step"])
            assert row.pop("zero/loss") == pytest.approx(losses[step], rel=1e-5)
            assert row.pop("zero/lr") == pytest.approx(rates[step])
            assert row.pop("zero/grad_norm") == pytest.approx(norms[step], rel=1e-4)
            assert set(row) == {"step", "zero/samples_per_s", "zero/tflops", "zero/memory_gb"}


# ---- the same as the line ------------------------------------------------------------------------------------------


def _overflowing(folder: str) -> list[str]:
    options = {"plugins": ["16-mixed"], "config": {"fp16": {"initial_scale_power": 6, "hysteresis": 1}}}
    lines: list[str] = _observe(2, {**options, "logger": CSVLogger(folder)}, False, {"broken": 3})[0]
    return lines


def test_loggers_get_what_is_printed(pool: Pool, tmp_path: Path) -> None:
    lines, _ = pool.run(2, _overflowing, str(tmp_path))
    printed, logged = [parsed(line) for line in lines], ours(tmp_path)
    assert len(printed) == len(logged) == 4
    for line, row in zip(printed, logged, strict=True):
        first, second = line.pop("lr")
        line |= {
            "lr_0": first,
            "lr_1": second,
            "samples_per_s": line.pop("samples/s"),
            "tflops": line.pop("TFLOP/s"),
            "step": line["step"] - 1,
        }
        assert {name.removeprefix("zero/") for name in row} == set(line)
        for name, value in line.items():
            assert row[name if name == "step" else f"zero/{name}"] == pytest.approx(value, rel=1e-3)
    assert [row["zero/skipped_steps"] for row in logged] == [0, 1, 1, 1]
    norms = [row.get("zero/grad_norm", 0) > 0 for row in logged]
    assert norms == [True, False, True, True], "the overflow check knows it, but for the skipped step"


@pytest.mark.parametrize("every", [0, 3])
def test_interval_of_the_trainer_without_printing(every: int) -> None:
    trainer: Any = type("Trainer", (), {"loggers": [object()], "log_every_n_steps": every})()
    trainer.fit_loop = trainer.epoch_loop = trainer
    due = []
    for step in range(7):
        trainer._batches_that_stepped = step
        if is_due(trainer, 99, None):
            due.append(step)
    assert due == ([2, 5] if every else []), "0 is never"


def test_names_of_groups_and_optimizers() -> None:
    same, two = StepMetrics(1, None, (0.1, 0.1)), StepMetrics(1, 1, (0.1, 0.2), loss=float("nan"))
    assert same.metrics() == {"zero/lr": 0.1}
    assert same.metrics(split_rates=True) == {"zero/lr_0": 0.1, "zero/lr_1": 0.1}
    assert list(two.metrics()) == ["zero/loss", "zero/optimizer_1/lr_0", "zero/optimizer_1/lr_1"]
    assert two.line() == "step 1: optimizer=1, loss=nan, lr=[0.1, 0.2]"
    assert same.line() == "step 1: lr=0.1"


# ---- throughput and memory, measured twice -------------------------------------------------------------------------


def set_flops(trainer: pl.Trainer, per_row: float | None) -> None:
    """What a row takes, on this rank."""
    known = None if per_row is None else per_row * 2
    values = {"flops_per_micro_batch": known, "flops_of": lambda rows: per_row and per_row * rows}
    (printer,) = [observer for observer in trainer.strategy.monitor._observers if isinstance(observer, StepPrinter)]  # type: ignore[attr-defined]
    printer.count = SimpleNamespace(**values, request=lambda: None)  # type: ignore[assignment]


def _exact(folder: str, known: bool) -> None:
    """A micro-batch takes 1 s of a clock that stands still otherwise, validation 100 s."""
    from lt_zero.training.lightning.monitor import step_metrics

    clock = Clock()
    real, step_metrics.time = step_metrics.time, clock  # type: ignore[attr-defined,assignment]
    try:
        options = {"accumulate_grad_batches": 2, "val_check_interval": 4, "max_epochs": 1}
        trainer = monitored(
            3, every=2, use_distributed_sampler=False, logger=CSVLogger(folder), plugins=[ZeroPrecision()], **options
        )
        rank = dist.get_rank()
        set_flops(trainer, (2e12, 6e12)[rank] / (2 + rank) if known or rank == 0 else None)
        trainer.fit(Observed(clock))
    finally:
        step_metrics.time = real  # type: ignore[attr-defined]


def test_operations_are_counted_per_device_without_validation(pool: Pool, tmp_path: Path) -> None:
    for known in (True, False):
        pool.run(2, _exact, str(tmp_path / str(known)), known)
        found = ours(tmp_path / str(known))
        assert len(found) == 2
        for row in found:
            assert row["zero/samples_per_s"] == pytest.approx(5)
            assert row.get("zero/tflops") == (pytest.approx(4.0) if known else None), "a rank does not know"


class Timed(GPT):
    """Takes 50 ms a micro-batch, and measures on its own: a bit less than the printer, and a bit more."""

    def __init__(self) -> None:
        super().__init__()
        self.less, self.began, self.more = 0.0, 0.0, 0.0
        self.memory = 0.0

    def on_fit_start(self) -> None:
        self.began = time.perf_counter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        start = time.perf_counter()
        time.sleep(0.05)
        self.memory = psutil.Process().memory_info().rss / 1e9
        loss = super().training_step(batch, batch_idx)
        self.less += time.perf_counter() - start
        return loss

    def on_fit_end(self) -> None:
        self.more = time.perf_counter() - self.began


def _timed(folder: str) -> tuple[float, float, float]:
    trainer = monitored(3, every=4, max_epochs=2, logger=CSVLogger(folder))
    set_flops(trainer, 5e9 / 12)
    module = Timed()
    trainer.fit(module)
    return module.less, module.more, module.memory


def test_against_a_clock_and_psutil(pool: Pool, tmp_path: Path) -> None:
    less, more, memory = pool.run(1, _timed, str(tmp_path))[0]
    (row,) = ours(tmp_path)
    seconds = 48 / row["zero/samples_per_s"]  # four micro-batches of 12 rows
    assert 0.2 <= less < seconds < more
    assert row["zero/tflops"] == pytest.approx(4 * 5e9 / seconds / 1e12, rel=1e-3)
    assert row["zero/memory_gb"] == pytest.approx(memory, rel=0.1)


def test_peak_of_a_gpu_is_read_and_not_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "peak_allocated", {torch.device("cuda:1"): 3_000_000_000}.__getitem__)
    monkeypatch.setattr(accelerator, "reset_peak", lambda *_: pytest.fail("others read it as well"))
    assert memory_gb(torch.device("cuda:1")) == 3.0
