"""The Trainer's features under ZeroStrategy give what one process gives."""

from __future__ import annotations

import copy
import csv
import functools
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

import lt_zero
from tests.support.lightning_tools import (
    BATCH,
    FULL,
    GPT,
    QUIET,
    ROWS,
    assert_same,
    sharded_trainer,
    single_trainer,
    weights,
)
from tests.support.matrix import only, only_rows
from tests.support.pool import Pool

STAGES = [0, 1, 2, 3]


def _fit(stage: int, rows: int, options: dict[str, Any]) -> tuple[Any, int, dict[str, float]]:
    trainer = sharded_trainer(stage, **options)
    trainer.fit(GPT(dist.get_world_size(), rows=rows))
    return weights(trainer), trainer.global_step, {k: float(v) for k, v in trainer.callback_metrics.items()}


FITS: dict[str, tuple[int, int, dict[str, Any]]] = {  # batches in an epoch, steps, options
    "plain": (2, 4, {}),
    "accumulate": (3, 6, {"accumulate_grad_batches": 2, "max_epochs": 3}),  # windows of 2 batches and 1 in each epoch
    "clip-norm": (2, 4, {"gradient_clip_val": 0.3}),
    "clip-value": (2, 4, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
}


@functools.cache
def _single(case: str) -> Any:
    """The weights, steps and metrics of one process."""
    batches, _, options = FITS[case]
    trainer = single_trainer(**{"max_epochs": 2, **options})
    trainer.fit(GPT(rows=batches * 3 * BATCH))
    return weights(trainer), trainer.global_step, {k: float(v) for k, v in trainer.callback_metrics.items()}


FAST = [(3, "accumulate", 3), (1, "clip-value", 2)]  # of stages, ranks and norms: tests/conformance/test_weights.py


@pytest.mark.parametrize(("stage", "case", "world"), only_rows(FAST, itertools.product(STAGES, FITS, [3, 2])))
def test_fit_equals_single_process(pool: Pool, stage: int, case: str, world: int) -> None:
    (batches, steps, options), (want, count, measured) = FITS[case], _single(case)
    got, made, metrics = pool.run(world, _fit, stage, batches * 3 * BATCH, {"max_epochs": 2, **options})[0]
    assert made == count == steps
    assert_same(got, want)
    assert metrics["val/dataloader_idx_1"] == pytest.approx(measured["val/dataloader_idx_1"], rel=1e-4)


class Logits(GPT):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)


def _everything(trainer: pl.Trainer, module: pl.LightningModule, path: str) -> dict[str, Any]:
    """Each of the Trainer's entry points, the losses they report and the weights they leave."""
    found: dict[str, Any] = {"validated": trainer.validate(module)}
    assert not trainer.optimizers, "evaluation builds no optimizer"
    trainer.fit(module)
    found |= {"tested": trainer.test(module), "fitted": copy.deepcopy(weights(trainer))}
    found["predicted"] = torch.cat(trainer.predict(module)).numpy()  # type: ignore[arg-type]
    trainer.save_checkpoint(path)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    found["fitted on"] = copy.deepcopy(weights(trainer))
    found["restored"] = trainer.validate(module, ckpt_path=path)
    return found | {"of the checkpoint": weights(trainer)}


def _sharded_everything(stage: int, path: str) -> dict[str, Any]:
    trainer = sharded_trainer(stage, {"stage3_max_reuse_distance": 0}, max_epochs=1, num_sanity_val_steps=2)
    return _everything(trainer, Logits(dist.get_world_size(), "adamw"), path)


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_any_order_on_one_trainer(pool: Pool, stage: int, tmp_path: Path) -> None:
    want = _everything(single_trainer(max_epochs=1), Logits(1, "adamw"), str(tmp_path / "one.ckpt"))
    ranks = pool.run(2, _sharded_everything, stage, str(tmp_path / "two.ckpt"))
    for rank, got in enumerate(ranks):
        for name in ("validated", "tested", "restored"):
            for mine, theirs in zip(got[name], want[name], strict=True):
                assert mine == pytest.approx(theirs, rel=1e-5), (rank, name)
        # The sampler deals the rows out in turn.
        np.testing.assert_allclose(got["predicted"], want["predicted"][rank::2], rtol=1e-4, atol=1e-5)
    for name in ("fitted", "fitted on", "of the checkpoint"):
        assert_same(ranks[0][name], want[name], rtol=1e-4, atol=1e-5)
    assert_same(want["of the checkpoint"], want["fitted"])
    assert not np.array_equal(want["fitted"]["net.scale"], want["fitted on"]["net.scale"])


@functools.cache
def _two_epochs() -> dict[str, Any]:
    """The weights of one process after both epochs."""
    trainer = single_trainer(max_epochs=2)
    trainer.fit(GPT(1, "adamw"))
    return weights(trainer)


def _save(stage: int, path: str) -> None:
    trainer = sharded_trainer(stage, config=FULL, max_epochs=1)
    trainer.fit(GPT(dist.get_world_size(), "adamw"))
    trainer.save_checkpoint(path)


def _resume(stage: int, path: str) -> Any:
    trainer = sharded_trainer(stage, max_epochs=2)
    trainer.fit(GPT(dist.get_world_size(), "adamw"), ckpt_path=path)
    return weights(trainer)


@pytest.mark.slow  # in the fast suite: the two tests after it, and tests/conformance/test_resume.py
@pytest.mark.parametrize("stages", [(3, 1), (1, 3), (0, 3), (3, 2), (2, 0)], ids=str)
def test_checkpoint_resumes_on_another_stage_and_world(pool: Pool, tmp_path: Path, stages: tuple[int, int]) -> None:
    before, after = stages
    path = str(tmp_path / "one.ckpt")
    pool.run(3, _save, before, path)
    saved = torch.load(path, weights_only=True)
    assert saved["state_dict"].keys() == GPT().state_dict().keys()
    assert_same(pool.run(2, _resume, after, path)[0], _two_epochs(), rtol=1e-4, atol=1e-5)


def test_plain_trainer_resumes(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "one.ckpt")
    pool.run(2, _save, 3, path)
    resumed = single_trainer(max_epochs=2)
    resumed.fit(GPT(1, "adamw"), ckpt_path=path)
    assert_same(weights(resumed), _two_epochs(), rtol=1e-4, atol=1e-5)


def test_resumes_from_a_plain_trainer(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "one.ckpt")
    first = single_trainer(max_epochs=1)
    first.fit(GPT(1, "adamw"))
    first.save_checkpoint(path)
    assert_same(pool.run(2, _resume, 3, path)[0], _two_epochs(), rtol=1e-4, atol=1e-5)


def _train_from(stage: int | None, source: str | None, epochs: int, target: str) -> None:
    """Fit under a stage, or under DDP, and save."""
    options: dict[str, Any] = {"strategy": DDPStrategy(process_group_backend="gloo")} if stage is None else {}
    trainer = sharded_trainer(stage or 0, config=FULL, max_epochs=epochs, **options)
    trainer.fit(GPT(dist.get_world_size(), "adamw"), ckpt_path=source)
    trainer.save_checkpoint(target)


@pytest.mark.slow  # a file of one process, and back: the two tests before
@pytest.mark.parametrize("runs", [(None, 3), (3, None), (None, 1), (1, None)], ids=str)
def test_ddp_and_zero_resume_from_each_other(pool: Pool, tmp_path: Path, runs: tuple[int | None, int | None]) -> None:
    before, after = runs
    one, same, two = (str(tmp_path / f"{name}.ckpt") for name in ("one", "same", "two"))
    pool.run(2, _train_from, before, None, 1, one)
    pool.run(2, _train_from, after, one, 1, same)  # nothing left to train: what was loaded is saved
    pool.run(2, _train_from, after, one, 2, two)
    saved, again, later = (torch.load(path, weights_only=True) for path in (one, same, two))
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        torch.testing.assert_close(again[key], saved[key], rtol=0, atol=0)
    assert_same({k: v.numpy() for k, v in later["state_dict"].items()}, _two_epochs(), rtol=1e-4, atol=1e-5)


class Norms(Callback):
    def __init__(self) -> None:
        self.norms: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append({k: float(v) for k, v in grad_norm(pl_module, 2).items()})


def _norms(stage: int, folder: str) -> Any:
    norms, logger = Norms(), CSVLogger(folder)
    trainer = sharded_trainer(
        stage, max_epochs=1, callbacks=[norms], gradient_clip_val=0.3, logger=logger, log_every_n_steps=1
    )
    trainer.fit(GPT(dist.get_world_size()))
    logger.save()
    plugin: Any = trainer.precision_plugin
    return norms.norms, float(plugin.grad_norm), logger.log_dir


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_gradient_norms_are_those_of_one_process(pool: Pool, stage: int, tmp_path: Path) -> None:
    norms = Norms()
    single_trainer(max_epochs=1, callbacks=[norms], gradient_clip_val=0.3).fit(GPT())
    got, last, log_dir = pool.run(3, _norms, stage, str(tmp_path))[0]
    assert len(got) == len(norms.norms)
    for mine, theirs in zip(got, norms.norms, strict=True):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-7), name
    assert last == pytest.approx(norms.norms[-1]["grad_2.0_norm_total"], rel=1e-4)
    text = (Path(log_dir) / "metrics.csv").read_text().splitlines()[0]
    assert "grad_norm" in text
    assert "grad_norm_clipped" in text


class Probe(Callback):
    """Identity and true shapes at every stage, all through training."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        reference = GPT()
        shapes = {n: p.shape for n, p in reference.named_parameters()}
        assert {n: p.shape for n, p in pl_module.named_parameters()} == shapes
        assert sum(p.numel() for p in pl_module.parameters()) == sum(p.numel() for p in reference.parameters())
        assert trainer.optimizers[0].param_groups[0]["params"][0] is next(iter(pl_module.parameters()))


def _callbacks(stage: int, folder: str) -> tuple[list[str], str, float]:
    logger = CSVLogger(folder)
    best = ModelCheckpoint(f"{folder}/best", monitor="val/dataloader_idx_0", save_top_k=1, save_last=True)
    trainer = sharded_trainer(
        stage,
        config=FULL,
        max_epochs=3,
        callbacks=[Probe(), LearningRateMonitor(), EarlyStopping("val/dataloader_idx_0"), best],
        logger=logger,
        enable_checkpointing=True,
        enable_model_summary=True,
        log_every_n_steps=1,
    )
    trainer.fit(GPT(dist.get_world_size()))
    return (
        sorted(p.name for p in Path(folder, "best").iterdir()),
        best.best_model_path,
        trainer.optimizers[0].param_groups[0]["lr"],
    )


@pytest.mark.slow  # one by one: test_callbacks.py, tests/checkpoint/test_trainer.py
@pytest.mark.parametrize("stage", [1, 3])
def test_callbacks(pool: Pool, stage: int, tmp_path: Path) -> None:
    names, best, rate = pool.run(2, _callbacks, stage, str(tmp_path))[0]
    assert len(names) == 2
    assert "last.ckpt" in names
    assert rate < 0.1
    loaded = GPT.load_from_checkpoint(best)
    assert all(torch.isfinite(p).all() for p in loaded.parameters())


def _throughput(stage: int, folder: str) -> str:
    monitor, logger = ThroughputMonitor(batch_size_fn=len, length_fn=torch.numel, window_size=4), CSVLogger(folder)
    trainer = sharded_trainer(stage, max_epochs=3, callbacks=[monitor], logger=logger, log_every_n_steps=1)
    module = GPT(dist.get_world_size())
    module.flops_per_batch = 1000
    trainer.fit(module)
    return logger.log_dir


@pytest.mark.parametrize("stage", only([3], [1, 3]))
def test_throughput_monitor(pool: Pool, stage: int, tmp_path: Path) -> None:
    """Rates of all ranks together, from what each of them counts."""
    log_dir = pool.run(2, _throughput, stage, str(tmp_path))[0]
    with Path(log_dir, "metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row["train/samples_per_sec"]]
    row = {name: float(value) for name, value in logged[-1].items() if value}
    batches, rows = row["train/batches"], ROWS // 4  # a rank's batch: a quarter of all rows
    assert batches == 6
    assert (row["train/samples"], row["train/lengths"]) == (batches * rows, batches * rows * 6)
    rate = row["train/batches_per_sec"]
    assert rate > 0
    for name, per_batch in {"samples": rows, "items": rows * 6, "flops": 1000}.items():
        assert row[f"train/{name}_per_sec"] == pytest.approx(rate * per_batch)
        assert row[f"train/device/{name}_per_sec"] == pytest.approx(rate * per_batch / 2)


def _export(stage: int, path: str) -> Any:
    trainer = sharded_trainer(stage, max_epochs=1)
    trainer.fit(GPT(dist.get_world_size()))
    strategy: Any = trainer.strategy
    strategy.export(path)
    strategy.export(f"{path}.same.pt", dtype="same")
    report = strategy.memory_report()
    return weights(trainer), report


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_export_is_plain_and_complete(pool: Pool, stage: int, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    got, report = pool.run(3, _export, stage, str(path))[0]
    state = torch.load(path, weights_only=True)
    same = torch.load(f"{path}.same.pt", weights_only=True)
    assert all((same[name].numpy() == got[name]).all() for name in got)
    assert state.keys() == got.keys() == same.keys()
    assert state["net.head.weight"].data_ptr() == state["net.embedding.weight"].data_ptr(), "tied weights stay tied"
    for name, value in state.items():
        assert value.dtype == torch.float16
        np.testing.assert_array_equal(value.numpy(), got[name].astype(np.float16))
    here, whole = report["optimizer"]
    assert here < whole / 2 if stage else here >= whole
    here, whole = report["weights"]
    assert here < whole / 2 if stage == 3 else here >= whole


def _refuses() -> None:
    with pytest.raises(TypeError, match="precision"):
        sharded_trainer(3, plugins=[FSDPPrecision("32-true")])
    with pytest.raises(ValueError, match="gradient_clipp1ng"):
        lt_zero.ZeroStrategy(config={"gradient_clipp1ng": 1})
    with pytest.raises(ValueError, match="contradicts"):
        lt_zero.ZeroStrategy(stage=1, config={"zero_optimization": {"stage": 2}})


def test_refusals(pool: Pool) -> None:
    pool.run(2, _refuses)


def _environment_first() -> None:
    trainer = sharded_trainer(2, max_epochs=1)
    with pytest.raises(RuntimeError, match=r"call setup_environment\(\) first"):
        trainer.strategy.setup(trainer)
    trainer.strategy.setup_environment()  # a script that wants the process group before it makes its module
    world = trainer.strategy.world
    with pytest.raises(RuntimeError, match="has no module yet"):
        trainer.strategy.setup(trainer)
    trainer.fit(GPT(2))
    assert world is not None
    assert trainer.strategy.world is world


def test_the_process_group_before_the_module(pool: Pool) -> None:
    pool.run(2, _environment_first)


def test_the_process_that_starts_the_ranks_is_none(tmp_path: Path) -> None:
    """In a notebook; tests/e2e/test_launchers.py has a whole run."""
    trainer = single_trainer(strategy=lt_zero.ZeroStrategy(start_method="fork"))
    strategy: Any = trainer.strategy
    trainer.strategy.connect(GPT())
    for call in (
        strategy.full_state_dict,
        strategy.comms_summary,
        lambda: trainer.save_checkpoint(tmp_path / "x.ckpt"),
    ):
        with pytest.raises(RuntimeError, match="This process is no rank: with start_method='fork'.*on_train_end"):
            call()
    assert not (tmp_path / "x.ckpt").exists()
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)


@pytest.mark.parametrize(
    ("strategy", "stage"),
    [
        ("zero_3", 3),
        ({"class_path": "lt_zero.ZeroStrategy", "init_args": {"config": {"zero_optimization": {"stage": 2}}}}, 2),
    ],
    ids=["name", "class"],
)
def test_lightning_cli(monkeypatch: Any, tmp_path: Path, strategy: Any, stage: int) -> None:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse, which is not a dependency")
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.setattr(sys, "argv", ["train.py"])
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps({"trainer": {**QUIET, "strategy": strategy, "devices": 1, "max_epochs": 1}}))
    cli = LightningCLI(GPT, args=["fit", "--config", str(config)], save_config_callback=None)
    assert isinstance(cli.trainer.strategy, lt_zero.ZeroStrategy)
    assert cli.trainer.strategy.stage == stage
    assert cli.trainer.global_step == 2
