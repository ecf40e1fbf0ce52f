"""Lightning's callbacks that freeze, unfreeze, prune or copy parameters: exact, or refused before anything is done."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
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
        (lambda: type("Mine", (callbacks.WeightAveraging,), {})(), r"Mine \(a WeightAveraging\)"),
        (lambda: Yours(1e-2), r"Yours \(a StochasticWeightAveraging\)"),
        (lambda: ModelPruning("l1_unstructured", amount=0.5), "ModelPruning"),
    ],
)
def test_what_needs_whole_parameters_is_refused_at_stage_3(make: Any, name: str) -> None:
    trainer = single_trainer(strategy="zero_3", callbacks=[make()], **RUN)
    with pytest.raises(TypeError, match=f"{name} .*stage=2"):
        trainer.fit(GPT())


def _pruning() -> ModelPruning:
    return ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.3, use_lottery_ticket_hypothesis=False)


def _uses(trainer: pl.Trainer, module: GPT) -> dict[str, float]:
    """What the entry points tell of a model that was fitted, then fitted again."""
    trainer.fit(module)
    trainer.limit_val_batches = 1.0
    rows = [*trainer.validate(module, verbose=False), *trainer.test(module, verbose=False)]
    predicted = trainer.predict(module, GPT(1).loader())
    assert predicted
    trainer.limit_val_batches, trainer.fit_loop.max_epochs = 0, 4
    trainer.fit(module)
    return {name: value for row in rows for name, value in row.items()}


def _pruned(stage: int, folder: str) -> Any:
    trainer = sharded_trainer(stage, callbacks=[_pruning()], **RUN)
    seen = _uses(trainer, GPT(dist.get_world_size()))
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    again = GPT(dist.get_world_size())
    other = sharded_trainer(stage, **RUN)
    other.validate(again, ckpt_path=f"{folder}/last.ckpt", verbose=False)
    return seen, weights(trainer), weights(other)


@pytest.mark.parametrize("stage", only([2], [0, 1, 2]))
def test_pruning(pool: Pool, tmp_path: Path, stage: int) -> None:
    """The callback takes parameters off the module, and puts other tensors into them with ``p.data = ...``."""
    seen, got, saved = pool.run(2, _pruned, stage, str(tmp_path))[0]
    trainer = single_trainer(callbacks=[_pruning()], **RUN)
    assert seen == pytest.approx(_uses(trainer, GPT()), rel=1e-5)
    assert_same(got, weights(trainer))
    assert_same(saved, weights(trainer))


def _replace(module: GPT, how: str) -> None:
    with torch.no_grad():
        if how == "one":  # of another size
            module.temperature = nn.Parameter(torch.full((5, module.temperature.shape[1]), 0.5))
        elif how == "all":
            generator = torch.Generator().manual_seed(5)
            shapes = {name: value.shape for name, value in module.state_dict().items()}
            new = {name: torch.rand(shape, generator=generator) / 10 for name, shape in shapes.items()}
            module.load_state_dict(new, assign=True)
        else:  # untied
            module.net.head.weight = nn.Parameter(torch.full(module.net.head.weight.shape, 0.1))


class Replaced(GPT):
    """Other Parameter objects take the place of its own between two runs."""

    how = "one"

    def on_fit_end(self) -> None:
        self.hooks = [*getattr(self, "hooks", []), len(self.net.blocks[0]._forward_hooks)]
        _replace(self, self.how)


def _replaced(how: str, stage: int | None) -> Any:
    trainer = sharded_trainer(stage, **RUN) if stage is not None else single_trainer(**RUN)
    module = Replaced(dist.get_world_size() if stage is not None else 1)
    module.how = how
    seen = _uses(trainer, module)
    assert len(set(module.hooks)) == 1, "an engine whose parameters are all gone leaves no hooks behind"
    return seen, weights(trainer)


@pytest.mark.parametrize(("how", "stage"), only_rows([("all", 3)], [("one", 3), ("all", 3), ("all", 1), ("untied", 2)]))
def test_parameters_that_are_replaced_between_runs(pool: Pool, how: str, stage: int) -> None:
    seen, got = pool.run(2, _replaced, how, stage)[0]
    wanted, want = _replaced(how, None)
    assert seen == pytest.approx(wanted, rel=1e-5)
    assert_same(got, want)
