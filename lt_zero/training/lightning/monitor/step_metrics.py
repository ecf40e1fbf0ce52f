"""Observers of a fit, and ``steps_per_print``: metrics of optimizer steps, as a printed line and for loggers.

Note [Printing without a Callback]
    An observer is not a Callback: it would appear in ``trainer.callbacks``, and its hooks around backward would look
    like user code that reads gradients. Metrics stay on the device until a line is due; then all ranks read them in
    the same step, since means over ranks and the skip flag are collective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import lightning.pytorch as pl
import psutil
import torch
from torch import Tensor
from torch.optim import Optimizer

from lt_zero.common import accelerator
from lt_zero.common.compat import logged_step
from lt_zero.common.tensor_tree import rows_of
from lt_zero.core.followers import Figure, figures_of
from lt_zero.training.lightning.monitor.flops import FlopCount
from lt_zero.training.lightning.monitor.printing import print_line
from lt_zero.training.lightning.precision import ZeroPrecision
from lt_zero.training.lightning.setup import RunSnapshot
from lt_zero.training.session import Session


class RunObserver:
    """Hooks of a fit, called on every rank; no-ops by default. See Note [Printing without a Callback]."""

    def start(self, run: RunSnapshot) -> None:
        """A fit begins."""

    def stop(self) -> None:
        """The fit has ended, maybe with an error."""

    def before_forward(self, module: pl.LightningModule) -> None: ...

    def after_forward(self, module: pl.LightningModule, batch: Any, output: Any) -> None:
        """``training_step`` has returned; with manual optimization backward and steps ran inside."""

    def before_backward(self, module: pl.LightningModule) -> None: ...

    def after_backward(self, module: pl.LightningModule) -> None:
        """Gradients are reduced."""

    def after_step(self, module: pl.LightningModule, optimizer: Optimizer) -> None:
        """An optimizer has stepped or skipped its step; schedules and ``trainer.global_step`` are not updated yet."""

    def pause(self) -> None:
        """Validation begins."""

    def resume(self) -> None:
        """Training continues."""


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of a step, None if unknown; ``StepPrinter`` documents them."""

    step: int
    optimizer: int | None  # its index, if there are several
    rates: tuple[float, ...]  # learning rate of each group
    loss: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped_steps: int | None = None
    samples_per_s: float | None = None
    tflops: float | None = None
    memory_gb: float | None = None
    figures: tuple[tuple[Figure, float | None], ...] = ()  # of features

    def line(self) -> str:
        """The printed line, ``step 10: loss=2.31, lr=0.001, ...``."""
        rates = [f"{rate:.6g}" for rate in self.rates]
        several = f"[{', '.join(rates)}]" if rates else None
        parts: list[tuple[str, Any, str]] = [
            ("optimizer", self.optimizer, ""),
            ("loss", self.loss, ".6g"),
            ("lr", rates[0] if len(set(self.rates)) == 1 else several, ""),
            ("grad_norm", self.grad_norm, ".6g"),
            ("loss_scale", self.loss_scale, ".10g"),
            ("skipped_steps", self.skipped_steps, ""),
            ("samples/s", self.samples_per_s, ".4g"),
            ("TFLOP/s", self.tflops, ".4g"),
            ("memory_gb", self.memory_gb, ".4g"),
            *((figure.label, value, ".4g") for figure, value in self.figures),
        ]
        return f"step {self.step}: " + ", ".join(f"{name}={v:{form}}" for name, v, form in parts if v is not None)

    def metrics(self, split_rates: bool = False) -> dict[str, float]:
        """The logged metrics, under ``zero/``; ``split_rates``: a rate per group even if all are equal.

        >>> StepMetrics(3, 1, (0.1, 0.2), loss=2.0).metrics()
        {'zero/loss': 2.0, 'zero/optimizer_1/lr_0': 0.1, 'zero/optimizer_1/lr_1': 0.2}
        """
        own = "zero/" if self.optimizer is None else f"zero/optimizer_{self.optimizer}/"
        split = split_rates or len(set(self.rates)) > 1
        rates = {f"{own}lr_{group}" if split else f"{own}lr": rate for group, rate in enumerate(self.rates)}
        shared = ("loss_scale", "skipped_steps", "samples_per_s", "tflops", "memory_gb")
        found = {"zero/loss": self.loss, **rates, f"{own}grad_norm": self.grad_norm}
        found |= {f"zero/{name}": getattr(self, name) for name in shared}
        found |= {f"zero/{figure.name}": value for figure, value in self.figures}
        return {name: value for name, value in found.items() if value is not None}


class StepPrinter(RunObserver):
    """``steps_per_print``: rank 0 prints and logs metrics at every ``every``-th optimizer step.

    * ``loss``: the result of ``training_step``, averaged over the micro-batches since the last step and over the ranks.
    * ``lr``: the rate that the step used; a list if groups differ.
    * ``grad_norm``: before clipping, if ``gradient_clip_val`` clips by norm or overflow is checked.
    * ``loss_scale``: with fp16, after the step. ``skipped_steps``: so far, if overflow is checked.
    * ``samples/s``: of all ranks since the last line, without validation; samples are the rows of the first tensor of a
      batch.
    * ``TFLOP/s``: of one device, averaged over the ranks, in the same time: 10^12 operations of forward and backward.
    * ``memory_gb``: of rank 0, in 10^9 bytes. On a GPU the peak that torch had allocated since the start of the process
      or the last reset; on the CPU the current resident memory.
    * ``noise_scale``: with ``gradient_noise_scale``, in samples; and other figures of features.

    Unknown metrics are left out. The Trainer's loggers get ``zero/loss``, ``zero/lr``, ... under
    Lightning's own step, which counts batches that step, from 0.

    Args:
        every: optimizer steps, counted as ``trainer.global_step`` does: of all optimizers, including skipped ones.
            None: no line is printed, and metrics are logged every ``trainer.log_every_n_steps``.
        count: counts the operations of one micro-batch in each fit; other micro-batches count in proportion to their
            rows.
    """

    def __init__(self, every: int | None, count: FlopCount | None = None) -> None:
        self.every, self.count = every, count
        self._norm: Tensor | None = None  # the plugin's norm at the last step, to detect a new one
        self._figures: list[Figure] = []
        self._split_rates: set[int] = set()  # optimizers whose groups had different rates
        self.start()

    def start(self, run: RunSnapshot | None = None) -> None:
        self._due: list[tuple[StepMetrics, int, Tensor | None, int]] = []  # optimizer, norm, Lightning's step
        self._stepped = False
        self._since: float | None = None  # seconds; start of the interval that samples/s covers
        self._paused: float | None = None
        self._samples: int | None = 0  # None: a batch had no tensor
        self._batches = 0  # micro-batches
        self._loss: Tensor | None = None  # 0D, sum of the losses since the last step
        self._losses = 0
        if self.count is not None:
            self.count.request()
        if run is not None:
            self._measure(run)

    def _measure(self, run: RunSnapshot) -> None:
        trainer, module = run.trainer, run.module
        assert trainer is not None
        assert module is not None
        accumulates = trainer.accumulate_grad_batches if module.automatic_optimization else 1

        def weight() -> float:
            return run.loss_scale.scale / accumulates

        for figure in figures_of(run.engine):
            figure.begin(accumulates, weight)
            self._figures.append(figure)

    def stop(self) -> None:
        for figure in self._figures:
            figure.end()
        self._figures.clear()

    def before_forward(self, module: pl.LightningModule) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def after_forward(self, module: pl.LightningModule, batch: Any, output: Any) -> None:
        """Count the batch; with manual optimization, print the steps inside it. Collective if a line is due."""
        rows = rows_of(batch)
        self._samples = None if rows is None or self._samples is None else self._samples + rows
        self._batches += 1
        for figure in self._figures:
            figure.see_batch(rows or 0)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and loss.numel() == 1:
            value = loss.detach().reshape(()).float()
            self._loss = value if self._loss is None else self._loss + value
            self._losses += 1
        if not module.automatic_optimization:
            self._end_step(module)

    def after_step(self, module: pl.LightningModule, optimizer: Optimizer) -> None:
        """Record the step before schedulers step. Collective if a line is due."""
        trainer = module.trainer
        plugin = cast(ZeroPrecision, trainer.precision_plugin)
        norm = plugin.grad_norm if plugin.grad_norm is not self._norm else None  # 0D, before clipping
        self._norm, self._stepped = plugin.grad_norm, True
        number = trainer.global_step + 1  # Lightning increments it later
        if is_due(trainer, number, self.every):
            optimizers = trainer.strategy.optimizers
            index = next(i for i, known in enumerate(optimizers) if known is optimizer)
            rates = tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)
            metrics = StepMetrics(number, index if len(optimizers) > 1 else None, rates)
            self._due.append((metrics, index, norm, logged_step(trainer)))
        if module.automatic_optimization:
            self._end_step(module)

    def pause(self) -> None:
        self._paused = time.perf_counter()

    def resume(self) -> None:
        if self._paused is not None and self._since is not None:
            self._since += time.perf_counter() - self._paused
        self._paused = None

    def _end_step(self, module: pl.LightningModule) -> None:
        if self._due:
            self._print_due(module)
            self._due.clear()
        if self._stepped:
            self._stepped, self._loss, self._losses = False, None, 0

    def _print_due(self, module: pl.LightningModule) -> None:
        trainer = module.trainer
        plugin = cast(ZeroPrecision, trainer.precision_plugin)
        device, flops, samples = trainer.strategy.root_device, self._operations(), self._samples
        # Each sum is followed by the number of ranks that know their part of it.
        counts = [0.0, self._losses > 0, samples or 0, samples is not None, flops or 0.0, flops is not None]
        sums = accelerator.send(torch.tensor([float(count) for count in counts], dtype=torch.float64), device)  # 1D
        if self._loss is not None:
            sums[0] = self._loss / self._losses
        session: Session = cast(Any, trainer.strategy).session
        # Ranks that see the same data have equal counts of it, which are of whole rows.
        sums = trainer.strategy.reduce(sums, session.division.data_group, reduce_op="sum")
        # Collective if the device has a skip flag.
        skipped = plugin.skipped_steps
        figures = tuple((figure, figure.read()) for figure in self._figures)
        if trainer.is_global_zero:
            # The only copy to the host, which waits for the device.
            norms = [norm.detach().reshape(1).to(sums) for _, _, norm, _ in self._due if norm is not None]
            loss, losses, total, counted, operations, known, *read = torch.cat([sums, *norms]).tolist()
            values = iter(read)
            world, seconds = trainer.world_size, None if self._since is None else time.perf_counter() - self._since
            shared: dict[str, Any] = {
                "loss": loss / losses if losses else None,
                "loss_scale": plugin.loss_scale if plugin.scaler is not None else None,
                "skipped_steps": skipped if plugin.loss_scale_controller.checks else None,
                "samples_per_s": total / seconds if seconds and counted == session.division.data_ranks else None,
                "tflops": operations / world / seconds / 1e12 if seconds and known == world else None,
                "memory_gb": memory_gb(device),
                "figures": figures,
            }
            for metrics, index, norm, step in self._due:
                value = next(values) if norm is not None else None
                if value is not None and plugin.loss_scale_controller.checks and not math.isfinite(value):
                    value = None  # the step was skipped
                self._show(module, replace(metrics, grad_norm=value, **shared), index, step)
        self._since, self._samples, self._batches = time.perf_counter(), 0, 0

    def _operations(self) -> float | None:
        """Floating-point operations since the last line."""
        if self.count is None or self.count.flops_per_micro_batch is None:
            return None
        by_rows = self.count.flops_of(self._samples) if self._samples is not None else None
        return self.count.flops_per_micro_batch * self._batches if by_rows is None else by_rows

    def _show(self, module: pl.LightningModule, metrics: StepMetrics, optimizer: int, step: int) -> None:
        if self.every is not None:
            print_line(module, metrics.line())
        if len(set(metrics.rates)) > 1:
            # Never removed, so that columns stay the same.
            self._split_rates.add(optimizer)
        for logger in module.trainer.loggers:
            logger.log_metrics(metrics.metrics(optimizer in self._split_rates), step=step)
            logger.save()  # as Lightning does after each row


def is_due(trainer: pl.Trainer, number: int, every: int | None) -> bool:
    """True if metrics of optimizer step ``number`` are due: every ``every`` steps; None: when Lightning logs."""
    if every is not None:
        return number % every == 0
    logged: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return bool(trainer.loggers) and logged > 0 and (logged_step(trainer) + 1) % logged == 0


def memory_gb(device: torch.device) -> float:
    """The memory of this process in 10^9 bytes: on a GPU the peak that torch allocated there, else resident memory.

    The peak of device memory is not reset, as others may read it.
    """
    if accelerator.is_accelerator(device):
        return accelerator.peak_allocated(device) / 1e9
    return float(psutil.Process().memory_info().rss) / 1e9
