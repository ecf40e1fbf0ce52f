"""What a run printed, parsed."""

from __future__ import annotations

import io
import math
import os
import re
from contextlib import redirect_stdout
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import nn
from torch.utils.data import DataLoader

from lt_zero import ZeroPrecision, ZeroStrategy
from lt_zero.config.blocks import Comet, CsvMonitor, TensorBoard, Wandb
from lt_zero.training.lightning.monitor import breakdown, step_metrics
from tests.support.lightning_tools import QUIET, torchrun_env


class Monitored(ZeroStrategy):
    """Counts reductions."""

    reductions = 0

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        self.reductions += tensor.dtype == torch.float64  # Lightning's own are of other dtypes
        return super().reduce(tensor, *args, **kwargs)


NAMES = {CsvMonitor: "csv_monitor", TensorBoard: "tensorboard", Wandb: "wandb", Comet: "comet"}


def monitored(
    stage: int, blocks: Any = (), every: int | None = None, config: dict[str, Any] | None = None, **kwargs: Any
) -> pl.Trainer:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    keys = {NAMES[type(block)]: block.model_dump(exclude_unset=True) for block in blocks}
    strategy = Monitored(config={"zero_optimization": zero, "steps_per_print": every, **keys, **(config or {})})
    os.environ.update(torchrun_env())
    return pl.Trainer(**{**QUIET, "strategy": strategy, "devices": dist.get_world_size(), **kwargs})


class Clock:
    """Stands still but for what the module says its steps take."""

    def __init__(self) -> None:
        self.now = 50.0

    def perf_counter(self) -> float:
        return self.now


class Bar(TQDMProgressBar):
    """A progress bar that notes what is printed around it."""

    def __init__(self) -> None:
        super().__init__()
        self.printed: list[str] = []

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        self.printed.append(sep.join(args))


class Observed(pl.LightningModule):
    """Records on its own what a line is to say; rank r has 2 + r rows per batch, a batch takes 1 s."""

    def __init__(self, clock: Clock, manual: bool = False, broken: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 1)
        self.automatic_optimization = not manual
        self.clock, self.broken = clock, broken
        self.losses: list[float] = []
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 1
        rows = batch["rows"][1]
        loss = self.second(self.first(rows).tanh()).square().mean()
        if self.broken == batch_idx:
            loss = loss * float("inf")
        self.losses.append(loss.item())
        if self.automatic_optimization:
            return loss if batch_idx % 2 else {"loss": loss, "other": 1}
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.second(self.first(rows).tanh()).square().mean())
            self.norms.append(float(self.trainer.strategy.grad_norm(optimizer)))
            if optimizer is self.optimizers()[1]:
                self.clip_gradients(optimizer, gradient_clip_val=0.01)
            optimizer.step()
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 100

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.automatic_optimization:
            self.norms.append(float(self.trainer.strategy.grad_norm(optimizer)))
        super().configure_gradient_clipping(optimizer, *args, **kwargs)

    def configure_optimizers(self) -> Any:
        if not self.automatic_optimization:
            return [torch.optim.SGD(layer.parameters(), lr) for layer, lr in ((self.first, 0.1), (self.second, 0.2))]
        groups = [{"params": self.first.parameters()}, {"params": self.second.parameters(), "lr": 0.02}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[Any]:
        generator, rows = torch.Generator().manual_seed(dist.get_rank()), 2 + dist.get_rank()
        data = [{"name": "x", "rows": [None, torch.randn(rows, 3, generator=generator)]} for _ in range(8)]
        return DataLoader(data, batch_size=None)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def _observe(every: int, options: dict[str, Any], bar: bool = False, module: dict[str, Any] | None = None) -> Any:
    clock, shown = Clock(), Bar()
    real, step_metrics.time = step_metrics.time, clock  # type: ignore[attr-defined,assignment]
    if bar:
        options = {**options, "callbacks": [shown], "enable_progress_bar": True}
    options = {**options, "plugins": [ZeroPrecision(mode) for mode in options.get("plugins", ())]}
    try:
        # On a machine with other work a rank may in truth be late.
        with redirect_stdout(io.StringIO()) as stdout, mock.patch.object(breakdown, "LATE_SHARE", math.inf):
            trainer = monitored(3, every=every, max_epochs=1, use_distributed_sampler=False, **options)
            model = Observed(clock, **(module or {}))
            trainer.fit(model)
    finally:
        step_metrics.time = real  # type: ignore[attr-defined]
    lines = shown.printed if bar else [line for line in stdout.getvalue().splitlines() if line.startswith("step ")]
    return lines, model.losses, model.norms, trainer.strategy.reductions  # type: ignore[attr-defined]


def parsed(line: str) -> dict[str, Any]:
    number, _, values = line.removeprefix("step ").partition(": ")
    found = dict(re.findall(r"([\w/]+)=(\[[^]]*\]|[^,]+)", values))
    numbers = {k: [float(x) for x in v[1:-1].split(",")] if v[0] == "[" else float(v) for k, v in found.items()}
    return {"step": int(number), **numbers}
