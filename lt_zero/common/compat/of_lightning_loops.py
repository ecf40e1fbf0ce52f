"""Private APIs of Lightning's training loops and of the values that modules log. Checked on lightning 2.6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

ARGUMENTS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_STATES = ("value", "cumulated_batch_size")  # of a value that is no torchmetrics.Metric


class TrainingLoops:
    """The loops of a Trainer that fits, and what they do between the hooks that are called last and the next batch.

    Lightning's loops can only be resumed between batches, and do not know all cases of that. The methods ``end_...``
    each do a part of an iteration that the public methods of the loops do not offer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._fit, self._epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop

    @property
    def hook(self) -> str | None:
        """The name of the hook of callbacks and module that is running; None between hooks."""
        module = self._trainer.lightning_module
        return getattr(module, "_current_fx_name", None)

    def in_epoch(self) -> None:
        """Let values that are logged next be added to those of the epoch: its first batch was before."""
        self._trainer._logger_connector._first_loop_iter = False

    def end_step(self) -> None:
        """Log what belongs to the last step; after the hooks ``on_train_batch_end``."""
        logs = self._trainer._logger_connector
        logs.on_batch_end()
        logs.update_train_step_metrics()

    def end_batch(self, validated: bool) -> None:
        """End the batch: validate if that is due and was not done (``validated``), step schedules, count the step."""
        self._epoch.val_loop.restarting = False
        self._epoch._skip_next_val = validated
        self._epoch.on_advance_end(self._fit._data_fetcher)

    def end_epoch(self, after_hooks: bool) -> None:
        """End the epoch, with its hooks or (``after_hooks``) after these: step schedules, log, count the epoch."""
        self._fit._restarting = False  # else schedules that follow a metric are left out
        if not after_hooks:
            self._fit.on_advance_end()
            return
        logs = self._trainer._logger_connector
        logs.epoch_end_reached()
        logs.on_epoch_end()
        if self._epoch._num_ready_batches_reached():
            self._epoch.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        self._epoch._batches_that_stepped -= 1
        logs.update_train_epoch_metrics()
        self._epoch._batches_that_stepped += 1
        self._fit.epoch_progress.increment_completed()

    def begin_epoch(self) -> None:
        """Let the loops begin an epoch as they do in a run that was not resumed."""
        self._epoch.batch_progress.reset_on_run()
        for loop in (self._fit, self._epoch, self._epoch.val_loop):
            loop._restarting = False
            loop.reset_restart_stage()

    def continue_epoch(self) -> None:
        """Let the loops go on with the next batch: all of the last one is done.

        Without a stage of restart Lightning repeats or skips nothing, but counts a step. While the outer loop is
        restarting, the epoch's end leaves out schedules that follow a metric.
        """
        self._fit._restarting = False
        self._epoch.reset_restart_stage()
        if self._epoch.restarting and not self._epoch._should_accumulate():
            self._epoch._batches_that_stepped -= 1


def _progress(trainer: Any) -> dict[str, Any]:
    """The counters of steps, batches and epochs of a Trainer that fits."""
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    return {
        "epochs": fit.epoch_progress,
        "batches": epoch.batch_progress,
        "schedules": epoch.scheduler_progress,
        "automatic": epoch.automatic_optimization.optim_progress,
        "manual": epoch.manual_optimization.optim_step_progress,
    }


def progress_of(trainer: Any) -> dict[str, Any]:
    """Counts of steps, batches and epochs that a Trainer has done, as plain numbers."""
    counts = {name: counter.state_dict() for name, counter in _progress(trainer).items()}
    return {**counts, "logged steps": trainer.fit_loop.epoch_loop._batches_that_stepped}


def set_progress(trainer: Any, counts: Mapping[str, Any]) -> None:
    """Let a Trainer report that it has come as far as ``progress_of`` says of another one."""
    for name, counter in _progress(trainer).items():
        counter.load_state_dict(counts[name])
    trainer.fit_loop.epoch_loop._batches_that_stepped = counts["logged steps"]


# ---- logged values ---------------------------------------------------------------------------------------------------


def shown_metrics(trainer: Any) -> dict[str, dict[str, Any]]:
    """The last values of all metrics, as callbacks, loggers and progress bars see them; the dictionaries are live."""
    logs = trainer._logger_connector
    return {"callback": logs._callback_metrics, "logged": logs._logged_metrics, "bar": logs._progress_bar_metrics}


def metrics_of_validation(trainer: Any) -> set[str]:
    """Names of the ``torchmetrics.Metric`` objects that validation logs."""
    return _attributes(trainer.fit_loop.epoch_loop.val_loop._results)


def metrics_of_training(trainer: Any) -> set[str]:
    """Names of the ``torchmetrics.Metric`` objects that training logs."""
    return _attributes(trainer.fit_loop.epoch_loop._results)


def _attributes(results: Any) -> set[str]:
    return {entry.meta.metric_attribute for entry in results.values() if not entry.is_tensor} - {None}


class LoggedValue(NamedTuple):
    """A value that training has logged, at one moment: later ones do not change it."""

    meta: Any
    reset: bool
    cache: Any
    states: dict[str, Tensor]


def logged_values(trainer: Any) -> list[LoggedValue]:
    """The values that training has logged. Copies nothing: Lightning adds values into new tensors."""
    return [
        LoggedValue(
            entry.meta,
            entry.has_reset,
            entry._forward_cache,
            {name: getattr(entry, name) for name in _STATES if entry.is_tensor and hasattr(entry, name)},
        )
        for entry in trainer.fit_loop.epoch_loop._results.values()
    ]


def packed(values: list[LoggedValue]) -> tuple[list[dict[str, Any]], list[str]]:
    """Logged values as plain containers and copied tensors, and the names of those that cannot be saved.

    Values that were reset, since the epoch has ended, are in neither. Nothing is computed or exchanged.
    """
    found, lost = [], []
    for meta, reset, cache, states in values:
        if meta.sync.group is not None:
            lost.append(meta.name)
        if reset or meta.sync.group is not None:
            continue
        state: dict[str, Any] = {name: getattr(meta, name) for name in ARGUMENTS}
        state |= {"reduce": meta.reduce_fx.__name__, "builtin": meta.reduce_fx in (sum, min, max)}
        state |= {"sync": meta.sync.should, "op": meta.sync.op, "rank_zero": meta.sync.rank_zero_only}
        state |= {"attribute": meta.metric_attribute}
        state["cache"] = cache.detach().cpu().clone() if isinstance(cache, Tensor) else None
        state["states"] = {name: value.detach().cpu().clone() for name, value in states.items()}
        found.append(state)
    return found, lost


def count_of_updates(metric: Any) -> int:
    """The number of times that a ``torchmetrics.Metric`` was updated since it was reset."""
    return int(metric._update_count)


def set_count_of_updates(metric: Any, count: int) -> None:
    """Set what ``count_of_updates`` tells, and drop the value that was computed before."""
    metric._update_count = count
    metric._computed = None
