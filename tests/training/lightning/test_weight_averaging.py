"""Callbacks that keep averages of the weights, swap them in for validation and put them into the model at the end."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.lightning_tools import GPT, Tensor, assert_same, sharded_trainer, single_trainer, weights
from tests.support.matrix import only, only_rows
from tests.support.pool import Pool

RUN: dict[str, Any] = {"max_epochs": 3, "use_distributed_sampler": False, "num_sanity_val_steps": 0}


class Validated(GPT):
    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(float(self.trainer.strategy.reduce(self.loss(batch).detach().float(), reduce_op="mean")))


def _fit(trainer: pl.Trainer, world: int, **fit: Any) -> tuple[dict[str, Any], list[float]]:
    model = Validated(world, "adamw")
    trainer.fit(model, **fit)
    return weights(trainer), model.seen


def _resumed(stage: int, precision: str, folder: str) -> Any:
    def run(**fit: Any) -> Any:
        saves = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        callbacks = [pl.callbacks.EMAWeightAveraging(decay=0.7), saves]
        trainer = sharded_trainer(stage, callbacks=callbacks, precision=precision, enable_checkpointing=True, **RUN)
        return _fit(trainer, dist.get_world_size(), **fit)

    return run(), run(ckpt_path=f"{folder}/epoch=0.ckpt")


@pytest.mark.parametrize(
    ("stage", "precision"), only_rows([(1, "bf16-true")], itertools.product([2, 1, 0], ["32-true", "bf16-true"]))
)
def test_resume(pool: Pool, tmp_path: Path, stage: int, precision: str) -> None:
    (whole, seen), (again, later) = pool.run(2, _resumed, stage, precision, str(tmp_path))[0]
    if precision == "32-true":
        want, losses = _fit(single_trainer(callbacks=[pl.callbacks.EMAWeightAveraging(decay=0.7)], **RUN), 1)
        assert_same(whole, want)
        assert seen == pytest.approx(losses)
    assert_same(again, whole, 0, 0)
    assert later == seen[len(seen) - len(later) :]


def rounded(state: dict[str, Tensor]) -> dict[str, Any]:
    return {name: value.bfloat16().float().numpy() for name, value in state.items()}


def _final(stage: int, folder: str) -> None:
    """What is in the module at the end is what is saved, exported, and trained on."""
    callback = pl.callbacks.EMAWeightAveraging(decay=0.7)
    model = Validated(dist.get_world_size(), "adamw")
    trainer = sharded_trainer(stage, callbacks=[callback], precision="bf16-true", **{**RUN, "max_epochs": 1})
    trainer.fit(model)
    assert callback._average_model is not None
    want = rounded(callback._average_model.module.state_dict())
    got = trainer.strategy.full_state_dict()
    trainer.save_checkpoint(f"{folder}/last.ckpt", weights_only=True)
    trainer.strategy.export(f"{folder}/all.pt", torch.float32)
    if dist.get_rank() == 0:
        assert_same(rounded(got), want, 0, 0)
        assert_same(rounded(torch.load(f"{folder}/all.pt", weights_only=True)), want, 0, 0)
    again = Validated(dist.get_world_size(), "adamw")
    sharded_trainer(stage, precision="bf16-true", **RUN).validate(again, ckpt_path=f"{folder}/last.ckpt")
    trainer.validate(model)
    count = len(again.seen)
    assert again.seen == model.seen[-count:]


@pytest.mark.parametrize("stage", only([2], [0, 1, 2]))
def test_the_average_is_what_is_left_under_bf16(pool: Pool, tmp_path: Path, stage: int) -> None:
    pool.run(2, _final, stage, str(tmp_path))
