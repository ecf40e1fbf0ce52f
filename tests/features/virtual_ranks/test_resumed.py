"""A run that is resumed in the middle of an epoch, at another number of ranks, goes on with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.features.virtual_ranks.fits import Run, check, fit, full_weights, told
from tests.features.virtual_ranks.logged import Logging, Told
from tests.support.pool import Pool

HOW: dict[str, Any] = {"accumulate_grad_batches": 2, "log_every_n_steps": 1, "val_check_interval": 3, "max_epochs": 2}


class Quiet(Logging):
    """Has no hook after those of callbacks, in which the checkpoint is saved: it would not be called again."""

    on_train_batch_end = pl.LightningModule.on_train_batch_end  # type: ignore[assignment]


class _Save(pl.Callback):
    """Saves after a batch of an epoch."""

    def __init__(self, path: Path, epoch: int, batch: int) -> None:
        self.path = path
        self.at = epoch, batch

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == self.at:
            trainer.save_checkpoint(self.path)


def _trained(loader: dict[str, Any], save: tuple[Path, int, int] | None, path: Path | None) -> Run:
    """Train, and save on the way; or go on from ``path``."""
    module = Quiet(lr=0.05, **loader)
    callback = Told()
    saves = [_Save(*save)] if save is not None else []
    trainer = fit(module, callbacks=[callback, *saves], path=path, **HOW)
    logged = {key: value.item() for key, value in trainer.callback_metrics.items()}
    return told(module, (callback.calls, logged, module.by_hand, full_weights(trainer)))


def _rest(runs: list[Run], resumed: list[Run]) -> list[Run]:
    """What the resumed run repeats of one that was not interrupted."""
    rounds = len(resumed[0].seen) * len(resumed) // len(runs)
    calls, hand = len(resumed[0].more[0]), len(resumed[0].more[2])
    return [
        Run(run.seen[-rounds:], run.buffers, (run.more[0][-calls:], run.more[1], run.more[2][-hand:], run.more[3]))
        for run in runs
    ]


CASES = {
    "in the middle of an epoch": (1, 1),
    "at the end of an epoch": (0, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_at_another_number_of_ranks(pool: Pool, tmp_path: Path, case: str) -> None:
    path = tmp_path / "saved"
    whole = pool.run(2, _trained, {}, (path, *CASES[case]), None)
    for ranks in (1, 3):
        found = pool.run(ranks, _trained, {}, None, path)
        check({2: _rest(whole, found), ranks: found})
