"""``gradient_noise_scale`` against gradients of one process, in each face, and against a noise that is known."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import lt_zero
from tests.support.lightning_tools import sharded_trainer
from tests.support.matrix import only_rows
from tests.support.pool import Pool

STEPS, ROWS = 4, 2  # rows of a micro-batch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.two(torch.tanh(self.one(x))) + self.two(self.one(x)) - 1).square().mean()
        return loss


def micro_batch(number: int) -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(number))


def expected(parts: int) -> list[float | None]:
    """The noise scale after each step of SGD with momentum, from the gradients of ``parts`` micro-batches."""
    net, averages, found = Net(), None, list[float | None]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        rows = []
        for part in range(parts):
            grads = torch.autograd.grad(net(micro_batch(step * parts + part)), list(net.parameters()))
            rows.append(torch.cat([grad.flatten() for grad in grads]).double())
        small = sum(float(row.square().sum()) for row in rows) / parts
        mean = torch.stack(rows).mean(0)
        big, size = float(mean.square().sum()), ROWS * parts
        noise, signal = (small - big) / (1 / ROWS - 1 / size), (size * big - ROWS * small) / (size - ROWS)
        averages = (noise, signal) if averages is None else (
            0.9 * averages[0] + 0.1 * noise,
            0.9 * averages[1] + 0.1 * signal,
        )  # fmt: skip
        found.append(averages[0] / averages[1] if averages[1] > 0 else None)
        torch.nn.utils.vector_to_parameters(mean.float(), [p.grad for p in _with_grads(net)])  # type: ignore[arg-type]
        optimizer.step()
    return found


def _with_grads(net: nn.Module) -> list[nn.Parameter]:
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return list(net.parameters())


def _config(stage: int, gas: int, folder: str, **keys: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": gas,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_noise_scale": True,
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"},
        **keys,
    }


def _loop(folder: str, stage: int, gas: int, fp16: bool = False) -> None:
    size, rank, keys = dist.get_world_size(), dist.get_rank(), dict[str, Any]()
    if fp16:
        keys["fp16"] = {"enabled": True, "initial_scale_power": 4}
    keys["optimizer"] = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    engine, *_ = lt_zero.initialize(model=Net(), config=_config(stage, gas, folder, **keys))
    for step in range(STEPS):
        for micro in range(gas):
            engine.backward(engine(micro_batch((step * gas + micro) * size + rank)))
            engine.step()
    engine.destroy()


class _Module(pl.LightningModule):
    def __init__(self, batches: int) -> None:
        super().__init__()
        self.net, self.batches = Net(), batches

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        loss: Tensor = self.net(batch)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        every: Any = [micro_batch(number) for number in range(self.batches)]
        return DataLoader(every, batch_size=None, sampler=DistributedSampler(every, shuffle=False))


def _trainer(folder: str, stage: int, gas: int) -> None:
    config = _config(stage, gas, folder, steps_per_print=1)
    for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
        del config[key]
    module = _Module(STEPS * gas * dist.get_world_size())
    sharded_trainer(stage, config=config, accumulate_grad_batches=gas, max_steps=STEPS, logger=None).fit(module)


FACES = {"loop": _loop, "trainer": _trainer}
FILES = {"loop": "Train_Samples_gradient_noise_scale.csv", "trainer": "version_0/metrics.csv"}
COLUMNS = {"loop": "gradient_noise_scale", "trainer": "zero/gradient_noise_scale"}


def _train(face: str, folder: str, stage: int, gas: int) -> None:
    FACES[face](folder, stage, gas)


def written(folder: Path, face: str) -> list[float]:
    with (folder / "job" / FILES[face]).open(newline="") as file:
        return [float(row[COLUMNS[face]]) for row in csv.DictReader(file) if row[COLUMNS[face]]]


@pytest.mark.parametrize(
    ("face", "ranks", "stage", "gas"),
    only_rows(
        [("loop", 2, 3, 3), ("trainer", 2, 2, 3)],
        [
            *((face, ranks, stage, 1) for face in FACES for ranks in (2, 3) for stage in (0, 1, 2, 3)),
            *((face, ranks, stage, 3) for face in FACES for ranks in (1, 2) for stage in (0, 2, 3)),
        ],
    ),
)
def test_it_is_that_of_one_process(pool: Pool, tmp_path: Path, face: str, ranks: int, stage: int, gas: int) -> None:
    pool.run(ranks, _train, face, str(tmp_path), stage, gas)
    wanted = [value for value in expected(ranks * gas) if value is not None]
    assert len(wanted) > 1
    assert written(tmp_path, face) == pytest.approx([max(0.0, value) for value in wanted], rel=1e-3)


@pytest.mark.slow
def test_the_loss_scale_does_not_count(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _loop, str(tmp_path), 2, 2, True)
    wanted = [value for value in expected(4) if value is not None]
    assert written(tmp_path, "loop") == pytest.approx([max(0.0, value) for value in wanted], rel=0.1)


def test_a_noise_that_is_known(tmp_path: Path) -> None:
    """Gradients are the samples themselves: normal numbers around ``mean``."""
    width, mean, size, count = 300, 0.25, 4, 8

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(width))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).mean()

    keys = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "train_micro_batch_size_per_gpu": size}
    torch.manual_seed(0)
    engine, *_ = lt_zero.initialize(model=Line(), config=_config(0, count, str(tmp_path)) | keys)
    for _ in range(30 * count):
        engine.backward(engine(mean + torch.randn(size, width)))
        engine.step()
    engine.destroy()
    assert written(tmp_path, "loop")[-1] == pytest.approx(1 / mean**2, rel=0.15)  # S = width, |G|^2 = width * mean^2


def test_what_has_no_noise_scale(tmp_path: Path) -> None:
    optimizer = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with pytest.raises(
        lt_zero.ConfigError, match="gradient_noise_scale=true compares micro-batches, and a step has one"
    ):
        lt_zero.initialize(model=Net(), config=_config(0, 1, str(tmp_path), **optimizer))
    summed = {**optimizer, "gradient_allreduce_op": "sum"}
    with pytest.raises(lt_zero.ConfigError, match="gradient_noise_scale=true needs the mean of ranks"):
        lt_zero.initialize(model=Net(), config=_config(0, 2, str(tmp_path), **summed))
