"""Lightning's callbacks that freeze, unfreeze, prune or copy parameters: exact, or refused before anything is done."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint, ModelPruning, StochasticWeightAveraging
from torch import nn

from tests.support.lightning_tools import GPT, assert_same, sharded_trainer, single_trainer, weights
from tests.support.matrix import only, only_rows
from tests.support.pool import Pool

RUN: dict[str, Any] = {"max_epochs": 3, "limit_val_batches": 0, "use_distributed_sampler": False}


class Tuned(GPT):
    """Its first two blocks are frozen until epoch 1."""

    @property
    def backbone(self) -> nn.Module:
        return nn.ModuleList(self.net.blocks[:2])

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer == "sgd":
            return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return torch.optim.Adam(trained, lr=1e-2)


def _tuning() -> BackboneFinetuning:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)


def _tuned(stage: int, optimizer: str, folder: str) -> Any:
    def run(**fit: Any) -> Any:
        saves = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        trainer = sharded_trainer(stage, callbacks=[_tuning(), saves], enable_checkpointing=True, **RUN)
        trainer.fit(Tuned(dist.get_world_size(), optimizer), **fit)
        return weights(trainer)

    return run(), run(ckpt_path=f"{folder}/epoch=0.ckpt"), run(ckpt_path=f"{folder}/epoch=1.ckpt")


@pytest.mark.parametrize(("stage", "optimizer"), only_rows([(3, "sgd")], itertools.product([3, 2], ["sgd", "adam"])))
def test_finetuning_unfreezes(pool: Pool, tmp_path: Path, stage: int, optimizer: str) -> None:
    """Also when it goes on from a checkpoint from before or after that epoch, as without ZeRO."""

    def run(**fit: Any) -> Any:
        saves = ModelCheckpoint(tmp_path / "single", "{epoch}", save_top_k=-1)
        trainer = single_trainer(callbacks=[_tuning(), saves], enable_checkpointing=True, **RUN)
        trainer.fit(Tuned(1, optimizer), **fit)
        return weights(trainer)

    want = [run(), *(run(ckpt_path=tmp_path / "single" / f"epoch={epoch}.ckpt") for epoch in (0, 1))]
    for got, expected in zip(pool.run(2, _tuned, stage, optimizer, str(tmp_path / "zero"))[0], want, strict=True):
        assert_same(got, expected)


class Yours(StochasticWeightAveraging):
    pass


@pytest.mark.parametrize(
    ("make", "name"),
    [
        pytest.param(
            lambda: type("Mine", (callbacks.WeightAveraging,), {})(),
            r"Mine \(a WeightAveraging\)",
            marks=pytest.mark.skipif(not hasattr(callbacks, "WeightAveraging"), reason="since Lightning 2.6"),
        ),
        (lambda: Yours(1e-2), r"Yours \(a StochasticWeightAveraging\)"),
        (lambda: ModelPruning("l1_unstructured", amount=0.5), "ModelPruning"),
    ],
)
def test_what_needs_whole_parameters_is_refused_at_stage_3(make: Any, name: str) -> None:
    trainer = single_trainer(strategy="zero_3", callbacks=[make()], **RUN)
    with pytest.raises(TypeError, match=f"{name} .*stage=2"):
        trainer.fit(GPT())


def _pruned(stage: int, folder: str) -> Any:
    trainer = sharded_trainer(stage, callbacks=[_pruning()], **RUN)
    trainer.fit(GPT(dist.get_world_size()))
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    again = GPT(dist.get_world_size())
    other = sharded_trainer(stage, **RUN)
    other.validate(again, ckpt_path=f"{folder}/last.ckpt", verbose=False)
    return weights(trainer), weights(other)


def _pruning() -> ModelPruning:
    return ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.3, use_lottery_ticket_hypothesis=False)


@pytest.mark.parametrize("stage", only([2], [1, 2]))
def test_pruning(pool: Pool, tmp_path: Path, stage: int) -> None:
    """The callback takes parameters off the module, and puts others in their place with ``p.data = ...``."""
    got, saved = pool.run(2, _pruned, stage, str(tmp_path))[0]
    trainer = single_trainer(callbacks=[_pruning()], **RUN)
    trainer.fit(GPT())
    assert_same(got, weights(trainer))
    assert_same(saved, weights(trainer))
