"""Console output of a run: a line every N steps, the resolved configuration, messages of the package.

Note [Printing without a Callback]
    The printer is not a Callback: it would appear in ``trainer.callbacks``, and its hooks around backward would look
    like user code that reads gradients. Metrics stay on the device until a line is due; then all ranks read them in
    the same step, since means over ranks and the skip flag are collective.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer

from lt_zero.common.compat import logged_step
from lt_zero.common.tensor_tree import rows_of
from lt_zero.engine.engine import Engine
from lt_zero.lightning.model_report import memory_report
from lt_zero.lightning.monitor.flops import FlopCount
from lt_zero.lightning.monitor.run_observer import RunInfo, RunObserver
from lt_zero.lightning.monitor.step_metrics import StepMetrics, memory_gb
from lt_zero.lightning.precision import ZeroPrecision
from lt_zero.step.sharded_optimizer import ShardedOptimizer

# ---- a line every N steps ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """Metrics that are known only during the step."""

    number: int
    optimizer: int  # index
    rates: tuple[float, ...]  # learning rate of each group
    norm: Tensor | None  # 0D, of the gradients before clipping
    logged: int  # the step under which Lightning logs


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

    Unknown metrics are left out. The Trainer's loggers get ``zero/loss``, ``zero/lr``, ... (step_metrics.py) under
    Lightning's own step, which counts batches that step, from 0.

    See Note [Printing without a Callback].

    Args:
        every: optimizer steps, counted as ``trainer.global_step`` does: of all optimizers, including skipped ones.
            None: no line is printed, and metrics are logged every ``trainer.log_every_n_steps``.
        count: counts the operations of one micro-batch in each fit; other micro-batches count in proportion to their
            rows.
    """

    def __init__(self, every: int | None, count: FlopCount | None = None) -> None:
        if every is not None and every < 1:
            raise ValueError(f"steps_per_print={every}: write a number of steps, or leave it out to print nothing.")
        self.every, self.count = every, count
        self._norm: Tensor | None = None  # the plugin's norm at the last step, to detect a new one
        self._split_rates: set[int] = set()  # optimizers whose groups had different rates
        self.start()

    def start(self, info: RunInfo | None = None) -> None:
        """A fit begins."""
        self._due: list[_Step] = []
        self._stepped = False
        self._since: float | None = None  # seconds; start of the interval that samples/s covers
        self._paused: float | None = None
        self._samples: int | None = 0  # None: a batch had no tensor
        self._batches = 0  # micro-batches
        self._reset_losses()
        if self.count is not None:
            self.count.request()

    def _reset_losses(self) -> None:
        self._loss: Tensor | None = None  # 0D, sum over the window
        self._losses = 0

    def before_forward(self, module: pl.LightningModule) -> None:
        """Start the interval of samples/s at the first forward."""
        if self._since is None:
            self._since = time.perf_counter()

    def after_forward(self, module: pl.LightningModule, batch: Any, output: Any) -> None:
        """Count the batch; with manual optimization, print the steps inside it. Collective if a line is due."""
        rows = rows_of(batch)
        self._samples = None if rows is None or self._samples is None else self._samples + rows
        self._batches += 1
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
        plugin = trainer.precision_plugin
        assert isinstance(plugin, ZeroPrecision)
        norm = plugin.grad_norm if plugin.grad_norm is not self._norm else None
        self._norm, self._stepped = plugin.grad_norm, True
        number = trainer.global_step + 1  # Lightning increments it later
        if self._is_due(trainer, number):
            index = next(i for i, known in enumerate(trainer.strategy.optimizers) if known is optimizer)
            rates = tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)
            self._due.append(_Step(number, index, rates, norm, logged_step(trainer)))
        if module.automatic_optimization:
            self._end_step(module)

    def _is_due(self, trainer: pl.Trainer, number: int) -> bool:
        if self.every is not None:
            return number % self.every == 0
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        return bool(trainer.loggers) and every > 0 and (logged_step(trainer) + 1) % every == 0

    def pause(self) -> None:
        """Validation begins; its time is not counted."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """Training continues."""
        if self._paused is not None and self._since is not None:
            self._since += time.perf_counter() - self._paused
        self._paused = None

    def _end_step(self, module: pl.LightningModule) -> None:
        if self._due:
            self._print_due(module)
            self._due.clear()
        if self._stepped:
            self._stepped = False
            self._reset_losses()

    def _print_due(self, module: pl.LightningModule) -> None:
        trainer = module.trainer
        plugin = trainer.precision_plugin
        assert isinstance(plugin, ZeroPrecision)
        device = trainer.strategy.root_device
        flops = self._operations()
        counts = [0.0, float(self._losses > 0), float(self._samples or 0), float(self._samples is not None)]
        counts += [flops or 0.0, float(flops is not None)]
        sums = torch.tensor(counts, dtype=torch.float64, device=device)  # 1D
        if self._loss is not None:
            sums[0] = self._loss / self._losses
        sums = trainer.strategy.reduce(sums, reduce_op="sum")
        skipped = plugin.skipped_steps  # collective if the device holds a skip flag
        if trainer.is_global_zero:
            loss, losses, samples, counted, operations, known = sums.tolist()
            world, seconds = trainer.world_size, None if self._since is None else time.perf_counter() - self._since
            several = len(trainer.strategy.optimizers) > 1
            shared: dict[str, Any] = {
                "loss": loss / losses if losses else None,
                "loss_scale": plugin.loss_scale if plugin.loss_scale_controller.scaler is not None else None,
                "skipped_steps": skipped if plugin.loss_scale_controller.checks else None,
                "samples_per_s": samples / seconds if seconds and counted == world else None,
                "tflops": operations / world / seconds / 1e12 if seconds and known == world else None,
                "memory_gb": memory_gb(device),
            }
            for step in self._due:
                index, norm = step.optimizer if several else None, _norm_of(step, plugin)
                self._show(module, step, StepMetrics(step.number, index, step.rates, grad_norm=norm, **shared))
        self._since, self._samples, self._batches = time.perf_counter(), 0, 0

    def _operations(self) -> float | None:
        """Floating-point operations since the last line."""
        if self.count is None or self.count.flops_per_micro_batch is None:
            return None
        by_rows = self.count.flops_of(self._samples) if self._samples is not None else None
        return self.count.flops_per_micro_batch * self._batches if by_rows is None else by_rows

    def _show(self, module: pl.LightningModule, step: _Step, metrics: StepMetrics) -> None:
        if self.every is not None:
            module.print(metrics.line())
        if len(set(step.rates)) > 1:
            self._split_rates.add(step.optimizer)  # for good, so that columns stay the same
        for logger in module.trainer.loggers:
            logger.log_metrics(metrics.metrics(step.optimizer in self._split_rates), step=step.logged)
            logger.save()  # as Lightning does after each row


def _norm_of(step: _Step, plugin: ZeroPrecision) -> float | None:
    norm = step.norm.item() if step.norm is not None else None
    skipped = norm is not None and plugin.loss_scale_controller.checks and not math.isfinite(norm)
    return None if skipped else norm


# ---- dump_state, log_level, disable_python_gc ----------------------------------------------------------------------


def dump_state(config: BaseModel, engine: Engine, optimizers: Iterable[ShardedOptimizer]) -> None:
    """``dump_state``: rank 0 prints the resolved configuration with masked secrets, and the bytes of model states.

    Units and dtypes are left out, as their tables are printed whenever an engine is built.
    """
    if engine.comm.rank != 0:
        return
    table = Table(title="Model states, bytes")
    for column in ("kind", "this rank", "replicated"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for kind, (here, replicated) in memory_report(engine, list(optimizers)).items():
        table.add_row(kind, f"{here:,}", f"{replicated:,}")
    console = Console()
    text = "\n".join(["Configuration of ZeroStrategy, defaults included:", *config_lines(config, "  ")])
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(table)


def config_lines(block: BaseModel, indent: str = "") -> list[str]:
    """All keys of a configuration with their values as lines of YAML, secrets masked."""
    lines = []
    for name in type(block).model_fields:
        value = getattr(block, name)
        if isinstance(value, BaseModel):
            lines += [f"{indent}{name}:", *config_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {_shown(value)}")
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return json.dumps(value, default=str)


@contextmanager
def logger_level(level: str | None, rank: int = 0) -> Generator[None, None, None]:
    """``log_level``: context that sets the level of the logger "lt_zero"; None changes nothing.

    Without a handler, Python shows warnings only, so a handler to stderr is added if there is none; on ranks other than
    0 it shows warnings only. Handlers of the user get all messages on all ranks.
    """
    if level is None:
        yield
        return
    logger = logging.getLogger("lt_zero")
    before, handler = logger.level, None
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        handler.setLevel(logging.NOTSET if rank == 0 else logging.WARNING)
        logger.addHandler(handler)
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.setLevel(before)
        if handler is not None:
            logger.removeHandler(handler)


@contextmanager
def gc_disabled(disable: bool) -> Generator[None, None, None]:
    """``disable_python_gc``: context without automatic collection of reference cycles."""
    was_enabled = gc.isenabled()
    if disable:
        gc.disable()
    try:
        yield
    finally:
        if disable and was_enabled:
            gc.enable()
