"""Experts over ranks through a Trainer, Fabric and a loop, against one process: own mixtures, and transformers'."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

import lt_zero
from lt_zero import FabricZeroStrategy
from tests.support.lightning_tools import sharded_trainer, torchrun_env
from tests.support.matrix import only_rows
from tests.support.mixtures import Loss, Mixture, square
from tests.support.model_mixtures import build, same_lengths
from tests.support.parity import OPTIMIZERS
from tests.support.pool import Pool

STEPS, ACCUMULATES = 2, 2
TRANSFORMERS = find_spec("transformers") is not None
MODELS: dict[str, tuple[Callable[[], Any], Loss]] = {"own": (Mixture, square)}
MODELS |= {kind: (partial(build, kind), same_lengths) for kind in ("mixtral", "gpt_oss") if TRANSFORMERS}
KEYS: dict[str, Any] = {"expert_parallel": {"enabled": True, "autoep_size": 2}}


def _one_process(kind: str, ranks: int, optimizer: str) -> dict[str, Tensor]:
    build_model, loss = MODELS[kind]
    model = build_model()
    made = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        made.zero_grad()
        for number in range(ACCUMULATES):
            for rank in range(ranks):
                (loss(model, step * ACCUMULATES + number, rank) / (ranks * ACCUMULATES)).backward()
        made.step()
    return {name: p.detach() for name, p in model.named_parameters()}


class Trained(pl.LightningModule):
    """A mixture that makes its own batches."""

    def __init__(self, kind: str, optimizer: str) -> None:
        super().__init__()
        build_model, self.loss = MODELS[kind]
        self.net, self.optimizer = build_model(), optimizer
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(self.net, batch_idx, self.global_rank)
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.arange(STEPS * ACCUMULATES), batch_size=1)  # type: ignore[arg-type]


def _trainer(kind: str, stage: int, optimizer: str, keys: dict[str, Any]) -> dict[str, Tensor]:
    module, how = Trained(kind, optimizer), {"accumulate_grad_batches": ACCUMULATES, "use_distributed_sampler": False}
    trainer = sharded_trainer(stage, config=keys, max_steps=STEPS, **how)
    trainer.fit(module)
    weights: dict[str, Tensor] = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    return {name.removeprefix("net."): value for name, value in weights.items()}


def _fabric(kind: str, stage: int, optimizer: str, keys: dict[str, Any]) -> dict[str, Tensor]:
    os.environ.update(torchrun_env())
    block = {"stage": stage, "stage3_param_persistence_threshold": 0}
    size, config = keys["expert_parallel"]["autoep_size"], {"zero_optimization": block}
    strategy = FabricZeroStrategy(config=config, expert_parallel_size=size)
    fabric = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    build_model, loss = MODELS[kind]
    net = build_model()
    model, made = fabric.setup(net, OPTIMIZERS[optimizer](net.parameters()))
    for number in range(STEPS * ACCUMULATES):
        ends = number % ACCUMULATES == ACCUMULATES - 1
        with fabric.no_backward_sync(model, enabled=not ends):
            fabric.backward(loss(model, number, fabric.global_rank) / ACCUMULATES)
        if ends:
            made.step()
            made.zero_grad()
    return dict(strategy.full_state_dict(model))


def _loop(kind: str, stage: int, optimizer: str, keys: dict[str, Any]) -> dict[str, Tensor]:
    build_model, loss = MODELS[kind]
    block = {"stage": stage, "stage3_param_persistence_threshold": 0}
    given = {"zero_optimization": block, "gradient_accumulation_steps": ACCUMULATES, **keys}
    given["train_micro_batch_size_per_gpu"] = 2
    with lt_zero.Init(config=given, enabled=stage == 3 and kind == "own"):
        net = build_model()
    engine, *_ = lt_zero.initialize(model=net, optimizer=OPTIMIZERS[optimizer](net.parameters()), config=given)
    for number in range(STEPS * ACCUMULATES):
        engine.backward(loss(engine, number, dist.get_rank()))
        engine.step()
    weights = engine.module_state_dict()
    engine.destroy()
    return dict(weights)


FACES: dict[str, Callable[..., dict[str, Tensor]]] = {"trainer": _trainer, "fabric": _fabric, "loop": _loop}
Row = tuple[str, str, int, str, dict[str, Any]]


def _weights(rows: list[Row]) -> list[dict[str, Tensor]]:
    found = []
    for face, *row in rows:
        torch.manual_seed(0)
        found.append(FACES[face](*row))
    return found


def _check(pool: Pool, ranks: int, rows: list[Row]) -> None:
    for row, weights in zip(rows, pool.run(ranks, _weights, rows)[0], strict=True):
        wanted = _one_process(row[1], ranks, row[3])
        for name, want in wanted.items():
            torch.testing.assert_close(weights[name], want, rtol=1e-4, atol=2e-5, msg=f"{row}: {name}")


OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
AWAY: dict[str, Any] = {**KEYS, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **OFFLOAD}}
COVER: list[Row] = [("fabric", "own", 2, "sgd", KEYS), ("loop", "own", 3, "adamw", KEYS)]
COVER += [("trainer", kind, 3, "adamw", KEYS) for kind in list(MODELS)[1:2]]
EVERY = [
    (face, kind, stage, ("adamw", "sgd")[stage % 2], KEYS)
    for face, kind, stage in itertools.product(FACES, MODELS, range(4))
]
EVERY += [("loop", kind, 3, "adamw", AWAY) for kind in MODELS]


@pytest.mark.parametrize(("ranks", "rows"), only_rows([(2, COVER)], [(2, COVER), (4, EVERY)]))
def test_each_face_trains_as_one_process(pool: Pool, ranks: int, rows: list[Row]) -> None:
    _check(pool, ranks, rows)


# ---- precision, and what transformers reads --------------------------------------------------------------------------


def _losses(kind: str, precision: Any, config: dict[str, Any]) -> list[float]:
    module = Trained(kind, "sgd")
    how: dict[str, Any] = {"max_steps": 4, "precision": precision, "use_distributed_sampler": False}
    sharded_trainer(2, config=config, **how).fit(module)
    return module.losses


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
@pytest.mark.parametrize("kind", list(MODELS))
def test_precisions(pool: Pool, kind: str, precision: Any) -> None:
    """Losses are near those of a run with all experts on each rank."""
    wanted = pool.run(2, _losses, kind, precision, {})
    for losses, want in zip(pool.run(2, _losses, kind, precision, KEYS), wanted, strict=True):
        assert losses == pytest.approx(want, rel=0.01)


def _export(kind: str, folder: str) -> dict[str, Tensor]:
    module = Trained(kind, "adamw")
    trainer = sharded_trainer(3, config=KEYS, max_steps=2, use_distributed_sampler=False)
    trainer.fit(module)
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    weights: dict[str, Tensor] = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    return weights


@pytest.mark.skipif(not TRANSFORMERS, reason="needs transformers")
@pytest.mark.parametrize("kind", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_exports_are_read_by_transformers_and_saved_again(pool: Pool, tmp_path: Path, kind: str) -> None:
    import transformers

    wanted = pool.run(2, _export, kind, str(tmp_path))[0]
    lt_zero.export(tmp_path / "last.ckpt", tmp_path / "hf", dtype="fp32", shard_size="1GB", strip_prefix="net.")
    build(kind).config.save_pretrained(tmp_path / "hf")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    read.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    for model in (read, again):
        found = dict(model.named_parameters())
        assert {f"net.{name}" for name in found} == wanted.keys()
        assert all(torch.equal(value, wanted[f"net.{name}"]) for name, value in found.items())
