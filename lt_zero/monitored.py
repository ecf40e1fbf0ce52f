"""The part of ``ZeroStrategy`` that shows what happens: loggers, printed lines, the log level, the state."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer
from typing_extensions import override

from lt_zero.checkpointing import CheckpointingStrategy
from lt_zero.loggers import attach_loggers
from lt_zero.monitoring import StepPrinter, dump_state, gc_disabled, logger_level
from lt_zero.precision import sharded_of


class MonitoredStrategy(CheckpointingStrategy):
    """Calls the monitors of the configuration where they have something to see."""

    def __init__(self, **kwargs: Any) -> None:
        every = self.config.steps_per_print
        self._printer = StepPrinter(every) if every is not None else None
        self._for_this_run = ExitStack()  # what is undone when a run ends
        super().__init__(**kwargs)

    @override
    def setup_environment(self) -> None:
        """Loggers are there before anybody asks for their folder: profilers, checkpoints, hyper-parameters."""
        super().setup_environment()
        config = self.config
        assert self.lightning_module is not None
        attach_loggers(
            self.lightning_module.trainer, [config.tensorboard, config.csv_monitor, config.wandb, config.comet]
        )
        self._for_this_run.close()
        self._for_this_run.enter_context(logger_level(config.log_level, self.global_rank))

    def start_monitoring(self, new: bool) -> None:
        """A fit begins; ``new``: with an engine that was built for it."""
        if self._printer is not None:
            self._printer.start()
        self._for_this_run.enter_context(gc_disabled(self.config.disable_python_gc))
        if self.config.dump_state and new:
            dump_state(self.config, self.engine, [s for s in map(sharded_of, self.optimizers) if s is not None])

    def stop_monitoring(self) -> None:
        """The run has ended, maybe with an error."""
        self._for_this_run.close()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._printer is None:
            return super().training_step(*args, **kwargs)
        self._printer.before_training_step()
        output = super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        self._printer.after_training_step(self.lightning_module, args[0] if args else None, output)
        return output

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._printer is not None:
            assert isinstance(self.lightning_module, pl.LightningModule)
            self._printer.after_optimizer_step(self.lightning_module, optimizer)
        return output

    @override
    def on_validation_start(self) -> None:
        if self._printer is not None:
            self._printer.pause()

    @override
    def on_validation_end(self) -> None:
        if self._printer is not None:
            self._printer.resume()
