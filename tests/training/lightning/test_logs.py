"""``lt-zero logs``: what a run has written is what the command shows, also if it was resumed, or still runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from lt_zero import ZeroStrategy
from lt_zero.cli import app
from lt_zero.training.lightning.monitor.logs import course, heading, peaks, times, traffic
from lt_zero.training.lightning.monitor.reading import STEP_MS, LoggedRun, LogsError, read_run
from lt_zero.training.run_file import NAME, RunFile, read_facts
from tests.support.lightning_tools import QUIET, torchrun_env
from tests.support.pool import Pool


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(5, 3, bias=False)

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def validation_step(self, batch: Tensor, number: int) -> None:
        self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(40, 5), batch_size=2)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def _fit(folder: str, steps: int, resume: str | None) -> None:
    os.environ.update(torchrun_env())
    blocks = {"memory_breakdown": True, "comms_logger": {"enabled": True}, "steps_per_print": 2}
    files = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}
    strategy = ZeroStrategy(config={"zero_optimization": {"stage": 2}, **blocks, **files})
    options = {"devices": dist.get_world_size(), "val_check_interval": 4, "limit_val_batches": 1, "logger": None}
    trainer = pl.Trainer(**{**QUIET, **options, "strategy": strategy, "max_steps": steps, "num_sanity_val_steps": 0})
    trainer.fit(Model(), ckpt_path=resume)
    trainer.save_checkpoint(f"{folder}/saved")


def whole(folder: Path) -> LoggedRun:
    return read_run(folder, lambda name: True)


def test_a_run_that_was_resumed_is_shown_as_one(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _fit, str(tmp_path), 6, None)
    pool.run(2, _fit, str(tmp_path), 10, str(tmp_path / "saved"))
    run = whole(tmp_path)
    assert run.path == tmp_path / "job" / "version_1" / "metrics.csv"
    assert run.earlier == [tmp_path / "job" / "version_0"]
    assert run.columns["zero/loss"][0] == [1, 3, 5, 7, 9]
    found = course(run, "zero/loss")
    assert found is not None
    assert found.first > found.last == found.least[0]
    assert (found.least[1], found.largest[1], found.broken) == (9, 1, 0)
    # The first step of each run has no time; the last number is that of the last step.
    assert run.columns[STEP_MS][0] == [1, 2, 3, 4, 5, 7, 8, 9]
    steps = times(run)
    assert steps is not None
    assert steps.slowest[0][0] == max(run.columns[STEP_MS][1]) >= steps.median > 0
    seen = peaks(run)
    assert (seen["gradients"][:2], seen["optimizer"][0]) == (
        (32, "after backward"),
        0,
    )  # half of the 15 and padding, in fp32
    sent = {row.operation: row for row in traffic(run)}
    assert (sent["reduce_scatter"].calls, sent["reduce_scatter"].nbytes, sent["reduce_scatter"].sent) == (1, 64, 32)
    assert heading(run).splitlines()[0].endswith("2 ranks, stage 2, mode 32-true, step 1 to 9")
    assert "Resumed at step 6." in heading(run)
    picture = tmp_path / "p.png"
    shown = CliRunner().invoke(app, ["logs", str(tmp_path), "--output", str(picture)])
    assert shown.exit_code == 0, shown.output
    assert picture.read_bytes()[:4] == b"\x89PNG"
    for text in ("val_loss", "Time of a step, 8 steps: median", "reduce_scatter", "after backward"):
        assert text in shown.output


def csv_of(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.csv").write_text(text)
    return folder


def test_values_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    rows = "step,zero/loss,zero/skipped_steps,zero/grad_norm\n0,nan,0,nan\n1,3,1,inf\n2,2,1,nan\n3,2.5,2,"
    shown = CliRunner().invoke(app, ["logs", str(csv_of(tmp_path, rows))])
    assert shown.exit_code == 0, shown.output
    assert "Skipped steps: 1." in shown.output  # the last line is being written
    assert [line.split() for line in shown.output.splitlines() if " loss " in line] == [
        ["loss", "3", "2", "2", "(2)", "3", "(1)", "1"]
    ]
    assert "gradient norm not finite" in " ".join(shown.output.split())


def test_events_of_a_loop(tmp_path: Path) -> None:
    """A run that went back to sample 8, and wrote its headers again, as DeepSpeed does."""
    (tmp_path / "Train_Samples_train_loss.csv").write_text("step,train_loss\n4,3\n8,2\n12,7\nstep,train_loss\n12,1\n")
    (tmp_path / "Train_Samples_lr.csv").write_text("step,lr\n4,0.5\n")
    (tmp_path / "Eval_accuracy.csv").write_text("step,accuracy\n4,0.5\n")
    file = RunFile(tmp_path, 8, ranks=3)
    for samples in (12, 16):
        file.end_step(samples)
    file.flush()
    for path in (tmp_path, tmp_path / "Train_Samples_lr.csv", tmp_path.parent):
        run = whole(path)
        assert (run.unit, run.path) == ("samples", tmp_path)
        assert {name: points for name, points in run.columns.items() if name != STEP_MS} == {
            "zero/loss": ([4, 8, 12], [3, 2, 1]),
            "zero/lr": ([4], [0.5]),
        }
        assert run.columns[STEP_MS][0] == [16]
    assert heading(run).splitlines()[1] == "Resumed at samples 8."


def test_files_of_tensorboard(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1.host").touch()
    name = "tensorboard.backend.event_processing.event_accumulator"
    with mock.patch.dict(sys.modules, {name: None}), pytest.raises(LogsError, match="Run: pip install tensorboard"):
        whole(tmp_path)
    points = [SimpleNamespace(step=4, value=2.0), SimpleNamespace(step=8, value=1.0)]
    for tag, unit in (("Train/Samples/train_loss", "samples"), ("zero/loss", "step")):
        board: Any = mock.MagicMock()
        board.EventAccumulator.return_value.Tags.return_value = {"scalars": [tag]}
        board.EventAccumulator.return_value.Scalars.return_value = points
        with mock.patch.dict(sys.modules, {name: board}):
            run = whole(tmp_path)
        assert (run.unit, run.columns) == (unit, {"zero/loss": ([4, 8], [2, 1])})


def test_what_cannot_be_shown(tmp_path: Path) -> None:
    for folder, text in (
        (tmp_path / "none", "does not exist"),
        (tmp_path, "No metrics.csv in .* or below. Set csv_mon"),
    ):
        with pytest.raises(LogsError, match=text):
            whole(folder)
    for text, message in (
        ("", "is empty"),
        ("step,zero/loss\n", "has no value yet"),
        ("step,a\n0,1\n", "no value yet"),
    ):
        shown = CliRunner().invoke(app, ["logs", str(csv_of(tmp_path / "run", text))])
        assert (shown.exit_code, message in shown.output) == (1, True), shown.output
    csv_of(tmp_path / "run", "step,zero/loss\n0,1\n")
    for line, message in (
        ("{\n", "line 1: .*Remove the line"),
        ("[1]\n", "line 1: no object"),
        ('{"kind": "steps", "at": [1], "ms": []}\n', "times of steps are damaged"),
        ('{"kind": "memory", "at": 1}\n', "a line 'memory' lacks 'moments'"),
    ):
        (tmp_path / "run" / NAME).write_text(line)
        with pytest.raises(LogsError, match=message):
            peaks(whole(tmp_path / "run"))
    (tmp_path / "run" / NAME).write_text('{"kind": "collectives", "steps": 1, "records": [{"operation": "x"}]}\n')
    shown = CliRunner().invoke(app, ["logs", str(tmp_path / "run")])
    assert (shown.exit_code, "is damaged (KeyError: 'calls'). Remove the line" in shown.output) == (1, True)
    (tmp_path / "run" / NAME).write_text('{"kind": "start", "at": 0}\n{"kind": "st')
    assert [fact["kind"] for fact in whole(tmp_path / "run").facts] == ["start"]  # the run still writes


def test_a_disk_that_fails_ends_the_file_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="lt-zero logs will lack its facts"):
        file = RunFile(tmp_path / "file", 0)
    file.write_memory(0, 0, {})


def test_pauses_are_left_out(tmp_path: Path) -> None:
    clock = SimpleNamespace(now=0.0)
    with mock.patch(
        "lt_zero.training.run_file.time", SimpleNamespace(perf_counter=lambda: clock.now, time=lambda: 0.0)
    ):
        file = RunFile(tmp_path, 0)
        for step, seconds in enumerate((1.0, 2.0, 4.0)):
            clock.now += seconds
            if step == 2:
                file.leave_out(3.0)
            file.end_step(step)
    assert read_facts(tmp_path)[1]["ms"] == [2000.0, 1000.0]
