"""The rest of the iteration in which a checkpoint is saved: a resumed run does it before the next batch (resume.py).

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

from typing import Any, Literal, get_args

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
