"""The rest of the iteration in which a checkpoint was saved: a resumed run does it before the next batch.

Note [The rest of an iteration]
    Checkpoints are saved in hooks, in the middle of Lightning's loops. In the run that is not interrupted the rest of
    the loop's body follows: the log of the step, a validation that is due, schedules that follow a metric, the end of
    the epoch with its hooks and its log. Lightning's own resume skips most of that, and counts epochs and steps of the
    log wrongly at some points. So a checkpoint tells what is left, and a resumed run does it at the end of
    ``on_train_start``, with the counters as they were. Hooks that run while the checkpoint is saved are not called
    again, except ``on_train_epoch_start``.

    An epoch that ``max_steps`` or ``trainer.should_stop`` ended before its last batch goes on in the resumed run: the
    run that is not interrupted does not end it there.
"""

from __future__ import annotations

from typing import Any, Literal, cast, get_args

import lightning.pytorch as pl

from lt_zero.common.compat.of_lightning_loops import TrainingLoops

# What comes next: the log of the step; validation, if it is due; the end of the batch; the end of the epoch after its
# hooks; the begin of an epoch; the next batch.
Rest = Literal["step", "validation", "batch", "epoch", "begin", "nothing"]
RESTS: tuple[str, ...] = get_args(Rest)


def rest_of(trainer: pl.Trainer) -> Rest:
    """Tell what is left now, at a save."""
    hook = TrainingLoops(trainer).hook
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    epochs: Any = trainer.fit_loop.epoch_progress.current
    if trainer.validating:
        return "batch" if hook == "on_validation_end" else "validation"
    if batches.processed == batches.ready == batches.completed + 1:
        return "step"
    if epochs.processed == epochs.ready == epochs.completed + 1:
        return "epoch"
    begins = epochs.started < epochs.ready or epochs.ready == 0  # in its hooks, or before those of the first one
    return "begin" if begins else "nothing"


def correct_counters(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Set Lightning's counters to what was trained on, before its loops read them.

    Args:
        state: of ``DataPosition``.
    """
    loop = trainer.fit_loop
    batches: Any = loop.epoch_loop.batch_progress
    if state["ended"]:
        position = batches.current.processed
    else:
        position = state["consumed"]
        if state["counted"] and position:
            _set_epochs(trainer, processed=-1, completed=-1)
            loop.restarting = True
    surplus = batches.current.processed - position
    _set_all(batches.total, batches.total.processed - surplus)
    _set_all(batches.current, position)


def do_rest(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Do what was left when ``state`` was saved. Collective, where that is.

    Args:
        state: of ``DataPosition``.
    """
    loops, rest = TrainingLoops(trainer), cast(Rest, state["rest"])
    epochs: Any = trainer.fit_loop.epoch_progress
    if rest == "begin":
        for tracker in (epochs.total, epochs.current):
            _set_all(tracker, tracker.processed)
        loops.begin_epoch()
        return
    if not state["ended"] and epochs.current.processed == epochs.current.ready:
        return  # no epoch was begun
    if rest in ("step", "validation", "batch") and not state["window"]:
        if state["ended"]:
            _set_epochs(trainer, processed=-1, completed=-1)
        loops.in_epoch()
        if rest == "step":
            loops.end_step()
        loops.end_batch(validated=rest == "batch")
    if not state["ended"]:
        if state["consumed"]:
            loops.in_epoch()
        loops.continue_epoch()
        return
    if rest == "nothing" and state["counted"]:
        _set_epochs(trainer, processed=0, completed=0)
    elif rest == "epoch":
        _set_epochs(trainer, processed=0, completed=-1)
        loops.end_epoch(after_hooks=True)
    else:
        _set_epochs(trainer, processed=-1, completed=-1)
        loops.end_epoch(after_hooks=False)
    loops.begin_epoch()


def _set_all(tracker: Any, count: int) -> None:
    for name in ("ready", "started", "processed", "completed"):
        setattr(tracker, name, count)


def _set_epochs(trainer: pl.Trainer, processed: int, completed: int) -> None:
    """Set two counters of epochs relative to the epochs that were begun."""
    epochs: Any = trainer.fit_loop.epoch_progress
    for tracker in (epochs.total, epochs.current):
        tracker.processed = tracker.ready + processed
        tracker.completed = tracker.ready + completed
