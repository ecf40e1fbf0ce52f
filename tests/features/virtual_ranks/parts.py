"""Fits with virtual ranks of models, and rows, of which ranks have parts."""

from __future__ import annotations

import os
import random
from typing import Any

import lightning as L
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import lt_zero
from lt_zero import FabricZeroStrategy
from lt_zero.common.errors import ConfigError
from lt_zero.parallel import LocalRandom, Pipeline
from tests.support import pipelines, sequences
from tests.support.lightning_tools import sharded_trainer, torchrun_env
from tests.support.mixtures import Mixture
from tests.support.parallel_module import Rows
from tests.support.pipeline_module import Texts

COUNT = 4  # virtual ranks
STATES = ("exp_avg", "exp_avg_sq")
Values = dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)
        self.inner, self.outer = nn.Dropout(0.2), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.outer(self.down(self.inner(torch.tanh(self.up(self.norm(x))))))
        return result


class Fitted(pl.LightningModule):
    """Logs what ranks have to reduce. Saves ``into`` a file, if there is one, after the first round of epoch 1."""

    into: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.logged: Values = {}
        self.metric = MeanMetric()
        torch.manual_seed(0)
        self.net: nn.Module = nn.Identity()

    def loss(self, batch: Any) -> Tensor:
        found: Tensor = self.net(batch).square().mean()
        return found

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("first", loss.detach())
        self.log("mean", loss.detach(), sync_dist=True, on_step=True, on_epoch=True)
        self.metric.update(loss.detach())
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        at = f"epoch {self.current_epoch}, round {index}"
        self.logged[f"{at}: weights"] = lt_zero.weights_digest(self)
        found = self.trainer.callback_metrics
        self.logged |= {f"{at}: {name}": found[name].clone() for name in ("first", "mean_step")}
        if self.into is not None and self.current_epoch == 1 and index == 0:
            self.trainer.save_checkpoint(self.into)

    def on_train_epoch_end(self) -> None:
        found = self.trainer.callback_metrics
        at = f"epoch {self.current_epoch}"
        self.logged |= {f"{at}: {name}": found[name].clone() for name in ("mean_epoch", "metric")}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), batch_size=4, shuffle=True)


class TensorParts(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Block(), nn.BatchNorm1d(6), Block())

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "inner": LocalRandom()}
        for block in (self.net[0], self.net[2]):  # type: ignore[index]
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)


class SequenceParts(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.net = sequences.Decoder(dropout=0.2)

    def loss(self, batch: Any) -> Tensor:
        found: Tensor = self.net(**batch)
        return found

    def train_dataloader(self) -> Any:
        return DataLoader(sequences.Rows(12), batch_size=1, shuffle=True, collate_fn=sequences.first)


class Stages(Fitted):
    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.net = Pipeline(pipelines.specs(tied=False, dropout=0.2), loss_fn=pipelines.mean_loss)

    def loss(self, batch: Any) -> Tensor:
        found: Tensor = self.net(batch[:, :-1], batch[:, 1:])
        return found

    def train_dataloader(self) -> Any:
        return DataLoader(Texts(), batch_size=3, shuffle=True, drop_last=True)


class ExpertParts(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.net = Mixture()

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch[None])


KINDS: dict[str, tuple[type[Fitted], dict[str, Any]]] = {
    "tensor": (TensorParts, {"tensor_parallel": {"autotp_size": 2}}),
    "sequence": (SequenceParts, {"sequence_parallel_size": 2}),
    "pipeline": (Stages, {"pipeline": {"stages": 2, "num_microbatches": 3}}),
    "experts": (ExpertParts, {"expert_parallel": {"enabled": True, "autoep_size": 2}}),
}


def values(kind: str, stage: int, into: str | None = None, path: str | None = None) -> Values:
    """What a run has logged, and the digests of its weights; at the end its states and buffers.

    Args:
        into: a checkpoint is saved into this file in the second epoch.
        path: of the checkpoint from which the run goes on.
    """
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5 + dist.get_rank())
    made, keys = KINDS[kind]
    config = {"reproducible": {"virtual_ranks": COUNT}, **keys}
    module = made()
    module.into = into
    sharded_trainer(stage, config=config, max_epochs=2, gradient_clip_val=0.1).fit(module, ckpt_path=path)
    found = dict(module.logged)
    for name, parameter in module.named_parameters():
        found |= {f"{name}, {key}": lt_zero.full_state(parameter, key).clone() for key in STATES}
    return found | {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}


class Tied(Fitted):
    def configure_model(self) -> None:
        self.net = Pipeline(pipelines.specs(), loss_fn=pipelines.mean_loss)


def refusal() -> str:
    """The error of a fit whose pipeline has a layer at two stages."""
    keys = {"reproducible": {"virtual_ranks": COUNT}, **KINDS["pipeline"][1]}
    with pytest.raises(ConfigError) as caught:
        sharded_trainer(1, config=keys, max_epochs=1).fit(Tied())
    return str(caught.value)


_SEQUENCES = {"reproducible": {"virtual_ranks": COUNT}, "sequence_parallel_size": 2, "zero_optimization": {"stage": 2}}


def _decoder() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = sequences.Decoder(dropout=0.2)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _turns() -> int:
    return COUNT * 2 // dist.get_world_size()


def loop_digests() -> list[str]:
    """The digest after each step of a loop whose ranks have parts of sequences."""
    model, optimizer = _decoder()
    data = {"training_data": sequences.Rows(12), "collate_fn": sequences.first}
    config = {**_SEQUENCES, "train_micro_batch_size_per_gpu": 1}
    engine, _, loader, _ = lt_zero.initialize(model=model, optimizer=optimizer, config=config, **data)
    digests = []
    for number, batch in enumerate(loader, 1):
        engine.backward(engine(**batch))
        engine.step()
        if number % _turns() == 0:
            digests.append(lt_zero.weights_digest(engine.module))
    return digests


def refusal_of_fabric() -> str:
    """The error of Fabric for a model whose ranks have parts of sequences."""
    os.environ.update(torchrun_env())
    strategy = FabricZeroStrategy(config=_SEQUENCES)
    fabric = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    with pytest.raises(ConfigError) as caught:
        fabric.setup(*_decoder())
    return str(caught.value)
