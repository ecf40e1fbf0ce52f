"""Asking the user for training loaders: a resumed run asks as the run that was not interrupted has asked last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lt_zero.common.random_states import RandomStates


class LoaderRequest:
    """The last call of ``train_dataloader``: in which epoch it was, and with which random states.

    Data may depend on both: with ``reload_dataloaders_every_n_epochs`` it is meant to. Lightning asks a resumed run in
    the epoch in which it resumes, and counts the epochs until it asks again from there.
    """

    def __init__(self) -> None:
        self._trainer: pl.Trainer | None = None
        self._ask: Callable[[], Any] | None = None  # Lightning's
        self._again: tuple[int, RandomStates] | None = None  # what the next call is to see
        self._epoch = 0
        self._states: RandomStates | None = None

    def watch(self, trainer: pl.Trainer) -> None:
        """Look at the calls of this trainer, until ``release``."""
        if self._trainer is None:
            source: Any = trainer.fit_loop._data_source
            self._trainer, self._ask = trainer, source.dataloader
            source.dataloader = self._called

    def release(self) -> None:
        if self._trainer is not None:
            vars(self._trainer.fit_loop._data_source).pop("dataloader", None)
            self._trainer = self._ask = None

    def _called(self) -> Any:
        assert self._trainer is not None
        assert self._ask is not None
        progress = self._trainer.fit_loop.epoch_progress.current
        again, self._again = self._again, None
        if again is None:
            self._epoch, self._states = progress.completed, RandomStates.now()
            return self._ask()
        before, completed = RandomStates.now(), progress.completed
        self._epoch, self._states = again
        progress.completed = self._epoch  # the module's and the Trainer's current_epoch
        self._states.apply()
        try:
            return self._ask()
        finally:
            progress.completed = completed
            before.apply()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "states": self._states.state_dict() if self._states is not None else None}

    def repeat(self, epoch: int, states: RandomStates | None) -> None:
        """The next call is to see what the saved run's last one has seen."""
        assert self._trainer is not None
        asked = self._states is not None  # before the checkpoint was read: the program wanted the number of steps
        if states is None or (asked and epoch == self._epoch):
            return
        self._again = (epoch, states)
        if asked:
            self._trainer.fit_loop._combined_loader = None

    def restore_schedule(self) -> None:
        """Make the Trainer ask again when the run that was not interrupted does."""
        if self._trainer is not None:
            self._trainer.fit_loop._last_train_dl_reload_epoch = self._epoch
