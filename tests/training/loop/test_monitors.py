"""``csv_monitor``, ``tensorboard``, ``wandb`` and ``comet`` in a loop: DeepSpeed's events, in its files."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lt_zero
from lt_zero.training.run_file import NAME
from tests.support.pool import Pool

SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.1, "warmup_max_lr": 0.4, "warmup_num_steps": 3}}


def train(steps: int, folder: Path | None = None, resume: Path | None = None, **blocks: Any) -> list[float]:
    """Two micro-batches a step on each rank; returns this rank's mean losses."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "optimizer": SGD}
    engine, *_ = lt_zero.initialize(model=model, config={**config, "zero_optimization": {"stage": 1}, **blocks})
    if resume is not None:
        engine.load_checkpoint(resume)
    found = []
    for step in range(engine.global_steps, steps):
        rows = torch.randn(2 * size, 3, generator=torch.Generator().manual_seed(step))[2 * rank : 2 * rank + 2]
        losses = [engine(row[None]).float().pow(2).mean() for row in rows]
        for loss in losses:
            engine.backward(loss)
            engine.step()
        found.append(float(sum(loss.item() for loss in losses)) / 2)
    if folder is not None:
        engine.save_checkpoint(folder)
    engine.destroy()
    return found


def files_in(folder: Path) -> dict[str, list[list[str]]]:
    return {path.name: list(csv.reader(path.open(newline=""))) for path in folder.glob("*.csv")}


def block(folder: Path) -> dict[str, Any]:
    return {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "job"}}


def _means(folder: Path) -> list[float]:
    return train(2, **(block(folder) if dist.get_rank() == 0 else {}))  # the block may differ between ranks


def test_files_have_the_means_of_ranks(pool: Pool, tmp_path: Path) -> None:
    one, two = pool.run(2, _means, tmp_path)
    rows = files_in(tmp_path / "job")["Train_Samples_train_loss.csv"]
    assert (rows[0], [row[0] for row in rows[1:]]) == (["step", "train_loss"], ["4", "8"])  # samples
    means = [(a + b) / 2 for a, b in zip(one, two, strict=True)]
    assert [float(row[1]) for row in rows[1:]] == pytest.approx(means, rel=1e-6)


def test_a_run_goes_on_in_its_files(tmp_path: Path) -> None:
    blocks = {**block(tmp_path), "scheduler": WARMUP, "gradient_clipping": 1.0}
    train(2, tmp_path / "saved", **blocks)
    for name, rest in (("Train_Samples_lr.csv", "1"), (NAME, '{"kind": "ste')):  # as of a killed run
        with (tmp_path / "job" / name).open("a") as file:
            file.write(rest)
    train(4, resume=tmp_path / "saved", **blocks)
    found = files_in(tmp_path / "job")
    assert sorted(found) == [f"Train_Samples_{name}.csv" for name in ("grad_norm", "lr", "train_loss")]
    rates = found["Train_Samples_lr.csv"]
    assert [row[0] for row in rates] == ["step", "2", "4", "6", "8"]
    assert [float(row[1]) for row in rates[1:]] == pytest.approx([0.1, 0.1, 0.1 + 0.3 * 0.63093, 0.4], rel=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "job" / NAME).read_text().splitlines()]
    assert [(line["kind"], line["at"]) for line in lines] == [
        *[("start", 0), ("steps", [4])],  # samples; the first step has no time
        *[("start", 4), ("steps", [8])],
    ]


def test_skipped_steps_and_the_loss_scale(tmp_path: Path) -> None:
    train(3, **block(tmp_path), fp16={"enabled": True, "initial_scale_power": 40, "hysteresis": 1})
    found = files_in(tmp_path / "job")
    assert [row[1] for row in found["Train_Samples_skipped_steps.csv"]] == ["skipped_steps", "1", "2", "3"]
    assert [float(row[1]) for row in found["Train_Samples_loss_scale.csv"][1:]] == [2.0**39, 2.0**38, 2.0**37]
    assert "Train_Samples_grad_norm.csv" not in found  # it is infinite


def test_the_host_does_not_wait_for_a_gpu(tmp_path: Path) -> None:
    """A device with streams: the events of a step are written at the next one, the last ones at the end."""
    seen, waits = [], mock.MagicMock()

    class Probe(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(files_in(tmp_path / "job").get("Train_Samples_loss_scale.csv", [])))
            return super().forward(x)

    with mock.patch("lt_zero.training.loop.monitors.accelerator") as device:
        device.has_streams.return_value = True
        device.fetch.side_effect = lambda values: (values.clone(), waits)
        config = {"optimizer": SGD, "fp16": {"enabled": True, "initial_scale_power": 4}, **block(tmp_path)}
        engine, *_ = lt_zero.initialize(model=Probe(3, 1), config={**config, "zero_optimization": {"stage": 1}})
        for _ in range(3):
            engine.backward(engine(torch.ones(1, 3)).float().mean())
            engine.step()
        engine.destroy()
    assert seen == [0, 0, 2]  # with the header
    assert [len(rows) for rows in files_in(tmp_path / "job").values()] == [4] * 5
    assert waits.synchronize.call_count == 3


def test_a_disk_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    engine, *_ = lt_zero.initialize(model=nn.Linear(3, 1), config={"optimizer": SGD, **block(tmp_path)})
    shutil.rmtree(tmp_path / "job")
    with pytest.warns(UserWarning, match="A monitor cannot write .*job"):
        engine.monitor.write_events([("a", 1.0, 1)])
    engine.monitor.write_events([("a", 1.0, 1)])
    engine.destroy()


def test_services_get_the_same_events() -> None:
    wandb, comet, board = mock.MagicMock(), mock.MagicMock(), mock.MagicMock()
    modules = {"wandb": wandb, "comet_ml": comet, "torch.utils.tensorboard": board}
    blocks = {
        "wandb": {"enabled": True, "project": "p", "team": "t"},
        "comet": {"enabled": True, "project": "q", "experiment_name": "e", "samples_log_interval": 3},
        "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "j"},
    }
    with mock.patch.dict(sys.modules, modules), mock.patch("lt_zero.training.loop.monitors.RunFile"):
        losses = train(3, **blocks)
    assert wandb.init.call_args.kwargs == {"project": "p", "group": None, "entity": "t"}
    logged = [call for call in wandb.init.return_value.log.call_args_list if "Train/Samples/train_loss" in call.args[0]]
    assert [call.kwargs["step"] for call in logged] == [2, 4, 6]
    assert [call.args[0]["Train/Samples/train_loss"] for call in logged] == pytest.approx(losses, rel=1e-6)
    assert comet.start.call_args.kwargs == {"project": "q"}
    experiment = comet.start.return_value
    experiment.set_name.assert_called_once_with("e")
    sent = [call.kwargs for call in experiment.log_metric.call_args_list]
    assert [each["step"] for each in sent if each["name"] == "Train/Samples/lr"] == [2, 6]
    board.SummaryWriter.assert_called_once_with(str(Path("logs", "j")))
    assert len(board.SummaryWriter.return_value.add_scalar.call_args_list) == 6


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with (
        mock.patch.dict(sys.modules, {"wandb": None}),
        pytest.raises(lt_zero.ConfigError, match="pip install -U wandb"),
    ):
        train(1, wandb={"enabled": True})
    (tmp_path / "file").touch()
    with pytest.raises(lt_zero.ConfigError, match=r"csv_monitor.output_path='.*file'.*Name another folder"):
        train(1, **block(tmp_path / "file"))


def test_events_of_ones_own(tmp_path: Path) -> None:
    engine, *_ = lt_zero.initialize(model=nn.Linear(2, 2), config={"optimizer": SGD, **block(tmp_path)})
    assert engine.monitor.enabled
    engine.monitor.write_events([("Eval/my accuracy", 0.5, 8), ("plain", torch.tensor(1), 8)])
    engine.destroy()
    found = files_in(tmp_path / "job")
    assert found["Eval_my_accuracy.csv"] == [["step", "my accuracy"], ["8", "0.5"]]
    assert found["plain.csv"] == [["step", "plain"], ["8", "1.0"]]
