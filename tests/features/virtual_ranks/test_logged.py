"""Hooks, logged values, metrics and evaluations of rounds are the same at any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from tests.features.virtual_ranks.fits import COUNT, RANKS, Batch, Module, Run, by_round, check, fit, full_weights, told
from tests.features.virtual_ranks.logged import Logging, Told
from tests.support.pool import Pool

HOW: dict[str, Any] = {
    "limit_train_batches": 3,
    "val_check_interval": 2,
    "accumulate_grad_batches": 2,
    "log_every_n_steps": 1,
}


def _trained() -> tuple[Run, Run]:
    """What micro-batches saw, and what the hooks of the module did."""
    module = Logging(lr=0.05)
    callback = Told()
    trainer = fit(module, callbacks=[callback], **HOW)
    logged = {key: value.item() for key, value in trainer.callback_metrics.items()}
    of_rank_0 = callback.calls, logged, module.by_hand, full_weights(trainer)
    return told(module, of_rank_0), Run(module.hooks, {}, None)


def _hooks(runs: list[Run], ranks: int) -> dict[str, Any]:
    """The calls of hooks by names, of all micro-batches in order."""
    names = {call[0] for call in runs[0].seen}
    return {
        name: by_round([Run([call for call in run.seen if call[0] == name], {}) for run in runs])
        for name in names - {"epoch"}
    } | {"epoch": [call for call in runs[0].seen if call[0] == "epoch"]}


def test_hooks_values_and_metrics_are_the_same_at_any_number_of_ranks(pool: Pool) -> None:
    found = {ranks: pool.run(ranks, _trained) for ranks in RANKS}
    check({ranks: [seen for seen, _ in of_ranks] for ranks, of_ranks in found.items()})
    hooks = {ranks: _hooks([calls for _, calls in of_ranks], ranks) for ranks, of_ranks in found.items()}
    assert hooks[2] == hooks[1]
    assert hooks[3] == hooks[1]
    assert len(hooks[1]["start"]) == 2 * 3 * COUNT
    assert len(hooks[1]["validation end"]) == 2 * 2 * COUNT  # 20 rows, padded to 24: two rounds of batches of two
    calls, logged, _, _ = found[1][0][0].more
    losses = [micro[5] for micro in by_round([seen for seen, _ in found[1]])][-3 * COUNT :]
    first = losses[::COUNT]
    of_all = {"mean": sum(losses) / len(losses), "sum": sum(losses), "max": max(losses), "min": min(losses)}
    of_first = {"mean": sum(first) / len(first), "sum": sum(first), "max": max(first), "min": min(first)}
    for synced, want in ((True, of_all), (False, of_first)):
        found_here = {name: logged[f"train {name} {synced}_epoch"] / 1.1 for name in want}
        assert found_here == pytest.approx(want)
    assert logged["train step"] == pytest.approx(sum(losses[-COUNT:]) / COUNT)
    assert [call[4] for call in calls if call[0] == "end"] == [0, 1, 2] * 2, "callbacks are called once in a round"


class Deciding(Module):
    """Its schedule follows a value of each micro-batch that is not reduced."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("drawn", batch[1].mean(), on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.9, cooldown=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "drawn", "interval": "step"}}


def _decided() -> tuple[int, float]:
    """After how many epochs a fit has stopped, and the last learning rate."""
    trainer = fit(Deciding(), callbacks=[EarlyStopping("drawn_epoch", patience=1)], max_epochs=8)
    return trainer.current_epoch, trainer.optimizers[0].param_groups[0]["lr"]


def test_decisions_follow_the_first_virtual_rank_where_values_are_not_reduced(pool: Pool) -> None:
    (alone,) = pool.run(1, _decided)
    assert pool.run(2, _decided) == [alone] * 2
    assert alone[0] < 8, "the run was stopped"
