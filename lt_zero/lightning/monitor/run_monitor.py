"""Monitoring in ``ZeroStrategy``: starts the monitors that the configuration enables.

steps_per_print, csv_monitor, ...       a line and metrics every N steps    console.py, step_metrics.py, loggers.py
wall_clock_breakdown, memory_breakdown  time and memory of a step           breakdown.py, timing.py
flops_profiler                          operations per module               flops_profiler.py, flops.py
comms_logger                            a table of collectives              comm/comm_log.py
dump_state, log_level, disable_python_gc                                    console.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from rich.console import Console
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lt_zero.comm.comm_log import CommLog, CommRecord, LoggedComm, comm_table
from lt_zero.comm.communicator import Comm
from lt_zero.common.progress_bar import set_local_rank
from lt_zero.common.timing import phase
from lt_zero.lightning.batch_size import rows_of
from lt_zero.lightning.checkpoint_service import CheckpointingStrategy
from lt_zero.lightning.monitor.breakdown import EVERY, MemoryPhases, StepClock
from lt_zero.lightning.monitor.console import StepPrinter, dump_state, gc_disabled, logger_level
from lt_zero.lightning.monitor.flops import FlopCount
from lt_zero.lightning.monitor.flops_profiler import Profiler
from lt_zero.lightning.monitor.loggers import attach_loggers
from lt_zero.lightning.monitor.run_observer import RunObserver
from lt_zero.lightning.precision import sharded_of


class MonitoredStrategy(CheckpointingStrategy):
    """Calls the monitors of the configuration; none is a Callback.

    ``RunObserver``s are notified. ``FlopCount`` and ``Profiler`` wrap calls, ``LoggedComm`` replaces the collectives.
    """

    _of_a_run = CheckpointingStrategy._of_a_run | {"flops", "_profiler", "_observers", "_for_this_run", "_clean"}

    @override
    def _begin(self) -> None:
        super()._begin()
        config, every, profiles = self.config, self.config.steps_per_print, self.config.flops_profiler
        logs = any(b.enabled for b in (config.csv_monitor, config.tensorboard, config.wandb, config.comet))
        watched = logs or every is not None
        self.flops = FlopCount() if watched or profiles.enabled else None  # of a micro-batch, on this rank
        self._profiler = Profiler(profiles, self.flops) if profiles.enabled and self.flops is not None else None
        self._observers: list[RunObserver] = []
        if config.wall_clock_breakdown:
            self._observers.append(StepClock(every or EVERY))
        if config.memory_breakdown:
            self._observers.append(MemoryPhases(every or EVERY))
        if watched:
            self._observers.append(StepPrinter(every, self.flops))
        self._for_this_run = ExitStack()  # closed at the end of a run
        self._clean = True  # whether the run ended without an error

    @property
    def _module(self) -> pl.LightningModule:
        assert isinstance(self.lightning_module, pl.LightningModule)
        return self.lightning_module

    @override
    def setup_environment(self) -> None:
        """Attach loggers before profilers, checkpoints or hyper-parameters use their folder."""
        super().setup_environment()
        config = self.config
        assert self.lightning_module is not None
        attach_loggers(
            self.lightning_module.trainer, [config.tensorboard, config.csv_monitor, config.wandb, config.comet]
        )
        self._for_this_run.close()
        if isinstance(self.comm, LoggedComm):
            self.comm.log.clear()
        self._for_this_run.enter_context(logger_level(config.log_level, self.global_rank))
        set_local_rank(self.local_rank)  # spawned processes do not have it in their environment

    @property
    def comm_class(self) -> type[Comm]:
        """The class of the communicator, which records collectives if ``comms_logger`` is enabled."""
        return LoggedComm if self.config.comms_logger.enabled else Comm

    def log_comms(self) -> None:
        """Start recording the collectives of a run."""
        if isinstance(self.comm, LoggedComm):
            self.comm.log.configure(self.config.comms_logger)

    def comms_summary(self) -> list[CommRecord]:
        """The cost of this rank's collectives since the last ``fit`` (or other entry point) began.

        Raises:
            RuntimeError: nothing is recorded.
        """
        return self._comm_log().records()

    def _comm_log(self) -> CommLog:
        if not isinstance(self.comm, LoggedComm):
            raise RuntimeError(
                "Collectives are only recorded with comms_logger.enabled: true, once Trainer.fit, validate, test or "
                "predict has begun. Enable it and start a run first."
            )
        return self.comm.log

    def _show_comms(self) -> None:
        if self.is_global_zero and (records := self._comm_log().records(wait=self._clean)):
            Console(width=None if sys.stdout.isatty() else 160).print(comm_table(records))

    def _show_profile(self) -> None:
        if self._profiler is not None:
            self._profiler.show(self._clean)

    def start_monitoring(self, new: bool) -> None:
        """Start the monitors of a fit; ``new``: its engine was just built."""
        if self.flops is not None:
            self.flops.start(new)
        if self.config.comms_logger.enabled:
            self._for_this_run.callback(self._show_comms)
        if self._profiler is not None:
            self._profiler.start(self.engine.comm)
            self._for_this_run.callback(self._show_profile)
        for observer in self._observers:
            observer.start(self)
            self._for_this_run.callback(observer.stop)
        self._for_this_run.enter_context(gc_disabled(self.config.disable_python_gc))
        if self.config.dump_state and new:
            dump_state(self.config, self.engine, [s for s in map(sharded_of, self.optimizers) if s is not None])

    def stop_monitoring(self, clean: bool) -> None:
        """Stop the monitors of a run; ``clean``: it ended without an error."""
        self._clean = clean
        self._for_this_run.close()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        for observer in self._observers:
            observer.before_forward()
        with self._counted(args):
            output = super().training_step(*args, **kwargs)
        for observer in self._observers:
            observer.after_forward(self._module, args[0] if args else None, output)
        return output

    @contextmanager
    def _counted(self, args: tuple[Any, ...]) -> Iterator[None]:
        """Context of a training step that counts or times this micro-batch if it was requested."""
        if self.flops is None:
            yield
            return
        module = self._module
        manual = not module.automatic_optimization
        with ExitStack() as measured:
            if self._profiler is not None:
                step = module.trainer.global_step
                measured.enter_context(self._profiler.forward(module, step, self.root_device, manual))
            measured.enter_context(self.flops.forward(module, rows_of(args[0]) if args else None, manual))
            yield

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        for observer in self._observers:
            observer.before_backward()
        with ExitStack() as measured:
            measured.enter_context(phase("backward"))
            if self._profiler is not None:
                measured.enter_context(self._profiler.backward())
            if self.flops is not None:
                measured.enter_context(self.flops.backward(closure_loss))
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        for observer in self._observers:
            observer.after_backward()
        return loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        with self.flops.paused() if self.flops is not None else nullcontext():
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        for observer in self._observers:
            observer.after_step(self._module, optimizer)
        return output

    @override
    def on_validation_start(self) -> None:
        for observer in self._observers:
            observer.pause()

    @override
    def on_validation_end(self) -> None:
        for observer in self._observers:
            observer.resume()
