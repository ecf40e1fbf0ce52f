"""Defers SIGTERM and SLURM's requeue signal to the end of the same batch on all ranks.

Lightning's handlers broadcast, save and log when the signal arrives, possibly inside a collective. Here they only
record it. All ranks agree on a point (comm/agreement.py) and do there what Lightning does: stop after the batch with
SIGTERMException, on which callbacks may save, or save a checkpoint and requeue the job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lt_zero.comm.agreement import Agreement
from lt_zero.common.compat import SignalOverride

log = logging.getLogger("lt_zero")
STOP, REQUEUE = "stop", "requeue"


class Signals:
    """Signal handling of one run.

    Args:
        trainer: its handlers are replaced until ``give_back``.
        agreement: agrees with all ranks on a batch.
    """

    def __init__(self, trainer: pl.Trainer, agreement: Agreement) -> None:
        self._trainer, self._agreement = trainer, agreement
        self._agreed: list[str] = []
        self._override = SignalOverride(trainer, lambda: agreement.wish(STOP), lambda: agreement.wish(REQUEUE))

    def give_back(self) -> None:
        """Restore Lightning's handlers."""
        self._override.give_back()

    def pass_point(self, trains: bool) -> None:
        """Called by all ranks during a batch; ``trains``: of training. Collective if there was a signal."""
        agreed = self._agreement.passed(trains)
        if not agreed:
            return
        self._agreed += agreed
        if STOP in agreed:
            if self._trainer.is_global_zero:
                log.warning("SIGTERM: all ranks stop after this batch.")
            self._override.stop()  # Lightning checks this at the end of a batch

    def begin_batch(self, trains: bool, saving: Callable[[], AbstractContextManager[object]]) -> None:
        """Between batches: save and requeue if that was agreed on. Collective if there was a signal.

        Args:
            trains: whether the batch is one of training.
            saving: a context in which saves are synchronous, as the job ends soon.

        Raises:
            SIGTERMException: where Lightning does not check whether to stop.
        """
        self.pass_point(trains)
        if REQUEUE in self._agreed:
            with saving():
                self._override.requeue()
        self._agreed.clear()
        if self._trainer.received_sigterm and self._trainer.state.fn == TrainerFn.PREDICTING:
            raise SIGTERMException
