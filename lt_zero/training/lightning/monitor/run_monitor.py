"""Monitoring of a run: starts the monitors that the configuration enables.

steps_per_print, csv_monitor, ...       a line and metrics every N steps    step_metrics.py, loggers.py
wall_clock_breakdown, memory_breakdown  time and memory of a step           breakdown.py, timing.py
flops_profiler                          operations per module               flops_profiler.py, flops.py
comms_logger                            a table of collectives              training/lightning/monitor/comm_log.py
lt_zero.jsonl                           all that is no metric               run_record.py
dump_state, trials of lt-zero tune                                          here
log_level, disable_python_gc are of every run: training/lightning/monitoring.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Set
from contextlib import ExitStack, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from pydantic import BaseModel
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lt_zero.common.console import RunConsole
from lt_zero.common.errors import Path
from lt_zero.common.fields import thawed
from lt_zero.common.output import Lenient
from lt_zero.common.phases import phase
from lt_zero.common.tables import show
from lt_zero.common.tensor_tree import rows_of
from lt_zero.config import ZeroConfig
from lt_zero.config.document import masked
from lt_zero.config.options import recorded_collectives
from lt_zero.core.comm.world import World
from lt_zero.training.lightning.model_report import memory_report
from lt_zero.training.lightning.monitor.breakdown import EVERY, MemoryPhases, StepClock
from lt_zero.training.lightning.monitor.comm_log import CommLog, comm_table
from lt_zero.training.lightning.monitor.flops import FlopCount
from lt_zero.training.lightning.monitor.flops_profiler import Profiler
from lt_zero.training.lightning.monitor.loggers import attach_loggers
from lt_zero.training.lightning.monitor.run_record import RunRecord
from lt_zero.training.lightning.monitor.step_metrics import RunObserver, StepPrinter
from lt_zero.training.lightning.monitoring import CommRecord, RunMonitor, T
from lt_zero.training.lightning.setup import RunSnapshot
from lt_zero.training.session import TimedRun


class Monitors(RunMonitor):
    """Runs the monitors of the configuration around the calls of a strategy; none is a Callback.

    ``RunObserver``s are notified. ``FlopCount`` and ``Profiler`` wrap calls, ``CommLog`` replaces the collectives.

    Attributes:
        flops: operations of a micro-batch on this rank, if a monitor needs them.
    """

    def __init__(self, config: ZeroConfig, trial: TimedRun | None = None) -> None:
        super().__init__(config)
        every, profiles = config.steps_per_print, config.flops_profiler
        logs = any(b.enabled for b in (config.csv_monitor, config.tensorboard, config.wandb, config.comet))
        watched = logs or every is not None or config.gradient_noise_scale
        self.new_log = CommLog if config.comms_logger.enabled else None
        self.flops = FlopCount() if watched or profiles.enabled else None
        self._profiler = Profiler(profiles, self.flops) if profiles.enabled and self.flops is not None else None
        self._observers: list[RunObserver] = []
        self._record = RunRecord()
        if watched or config.wall_clock_breakdown or config.memory_breakdown or config.comms_logger.enabled:
            self._observers.append(self._record)
        if config.wall_clock_breakdown:
            self._observers.append(StepClock(every or EVERY))
        elif watched:
            self._observers.append(StepClock(every, times=False))
        if config.memory_breakdown:
            self._observers.append(MemoryPhases(every or EVERY, self._record.write_memory))
        if watched:
            self._observers.append(StepPrinter(every, self.flops))
        if trial is not None:
            self._observers.append(TrialObserver(trial))
        self.watches = bool(self._observers) or self.flops is not None
        self._clean = True  # whether the run ended without an error

    # ---- the run -------------------------------------------------------------------------------------------------

    @override
    def attach(self, trainer: pl.Trainer, rank: int, local_rank: int) -> None:
        """Attach loggers before profilers, checkpoints or hyper-parameters use their folder."""
        config = self._config
        attach_loggers(trainer, [config.tensorboard, config.csv_monitor, config.wandb, config.comet])
        super().attach(trainer, rank, local_rank)

    @override
    def record(self, world: World, new: bool) -> None:
        if isinstance(world.log, CommLog):
            world.log.configure(recorded_collectives(self._config.comms_logger)) if new else world.log.clear()

    @override
    def collectives(self, world: World) -> list[CommRecord] | None:
        return world.log.records() if isinstance(world.log, CommLog) else None

    @override
    def start(self, run: RunSnapshot, new: bool) -> None:
        config, world = run.config, run.engine.world
        if self.flops is not None and new:
            self.flops.reset()
        if isinstance(world.log, CommLog):
            self._for_this_run.callback(self._show_comms, world.log, world.rank)
        if self._profiler is not None:
            profiler = self._profiler
            profiler.start(world)
            self._for_this_run.callback(lambda: profiler.show(self._clean))
        for observer in self._observers:
            observer.start(run)
            self._for_this_run.callback(observer.stop)
        super().start(run, new)
        if config.dump_state and new:
            dump_state(run)

    @override
    def stop(self, clean: bool) -> None:
        self._clean = clean
        super().stop(clean)

    def _show_comms(self, log: CommLog, rank: int) -> None:
        if rank == 0 and (records := log.records(wait=self._clean)):
            self._record.write_collectives(records, rank)
            show(comm_table(records), RunConsole(width=None if Lenient(sys.stdout).isatty() else 160))

    # ---- a step --------------------------------------------------------------------------------------------------

    @override
    def training_step(self, module: pl.LightningModule, batch: Any, call: Callable[[], T]) -> T:
        """Run a training step, counting or timing this micro-batch if it was requested."""
        for observer in self._observers:
            observer.before_forward(module)
        manual = not module.automatic_optimization
        with ExitStack() as measured:
            if self._profiler is not None:
                step, device = module.trainer.global_step, module.trainer.strategy.root_device
                measured.enter_context(self._profiler.forward(module, step, device, manual))
            if self.flops is not None:
                measured.enter_context(self.flops.forward(module, rows_of(batch), manual))
            output = call()
        for observer in self._observers:
            observer.after_forward(module, batch, output)
        return output

    @override
    def backward(self, module: pl.LightningModule, loss: Tensor, call: Callable[[], T]) -> T:
        for observer in self._observers:
            observer.before_backward(module)
        with ExitStack() as measured:
            measured.enter_context(phase("backward"))
            if self._profiler is not None:
                measured.enter_context(self._profiler.backward())
            if self.flops is not None:
                measured.enter_context(self.flops.backward(loss))
            output = call()
        for observer in self._observers:
            observer.after_backward(module)
        return output

    @override
    def optimizer_step(self, module: pl.LightningModule, optimizer: Optimizer, call: Callable[[], T]) -> T:
        with self.flops.paused() if self.flops is not None else nullcontext():
            output = call()
        for observer in self._observers:
            observer.after_step(module, optimizer)
        return output

    @override
    def before_validation(self) -> None:
        for observer in self._observers:
            observer.pause()

    @override
    def after_validation(self) -> None:
        for observer in self._observers:
            observer.resume()


class TrialObserver(RunObserver):
    """Times the steps of a run that ``lt-zero tune`` has started, and ends it."""

    def __init__(self, trial: TimedRun) -> None:
        self._trial = trial
        self._first: Optimizer | None = None  # with manual optimization a step is that of the first optimizer

    def start(self, run: RunSnapshot) -> None:
        trainer = run.trainer
        assert trainer is not None
        steps, micro = trainer.accumulate_grad_batches, run.config.train_micro_batch_size_per_gpu
        micro = micro * run.config.micro_batches if micro is not None else None  # in a pipeline: of the data loader
        self._first, saves = run.optimizers[0] if run.optimizers else None, bool(trainer.checkpoint_callbacks)
        run.session.start_trial(run.engine, run.config, accumulation=steps, micro=micro, saves=saves)

    def after_forward(self, module: pl.LightningModule, batch: Any, output: Any) -> None:
        self._trial.see_batch(batch)

    def after_step(self, module: pl.LightningModule, optimizer: Optimizer) -> None:
        if optimizer is self._first:
            self._trial.end_step()

    def pause(self) -> None:
        self._trial.leave_out()


# ---- dump_state ----------------------------------------------------------------------------------------------------


def dump_state(run: RunSnapshot) -> None:
    """``dump_state``: rank 0 prints the resolved configuration with masked secrets, and the bytes of model states.

    Units and dtypes are left out, as their tables are printed whenever an engine is built.
    """
    if run.rank != 0:
        return
    table = Table(title="Model states, bytes")
    for column in ("kind", "this rank", "replicated"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for kind, (here, replicated) in memory_report(run.engine, run.sharded).items():
        table.add_row(kind, f"{here:,}", f"{replicated:,}")
    console = RunConsole()
    text = "\n".join(
        ["Configuration of ZeroStrategy, defaults included:", *config_lines(run.config, run.config.secret)]
    )
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    show(table, console)


def config_lines(block: BaseModel, secret: Set[Path] = frozenset(), path: Path = ()) -> list[str]:
    """All keys of a configuration with their values as lines of YAML, secrets masked."""
    lines, indent = [], "  " * (len(path) + 1)
    for name in type(block).model_fields:
        value = getattr(block, name)
        if isinstance(value, BaseModel):
            lines += [f"{indent}{name}:", *config_lines(value, secret, (*path, name))]
        else:
            value = masked(thawed(value), secret, path=(*path, name))
            shown = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None
            lines.append(f"{indent}{name}: {shown or json.dumps(value, default=str)}")
    return lines
