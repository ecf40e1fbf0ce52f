"""Buffers that forward changes, in a Trainer and in Fabric: as with their DDP, and in checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lt_zero import ConfigError, FabricZeroStrategy, ZeroStrategy
from tests.support.lightning_tools import QUIET, torchrun_env
from tests.support.matrix import only
from tests.support.pool import Pool

ZERO = {"zero_optimization": {"stage": 2}}


class Drifting(nn.Module):
    """Has an average of what its rank sees."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(5, 3), nn.BatchNorm1d(5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.data.lerp_(x.mean(0), 0.3)
        out: Tensor = self.linear(self.norm(x) + self.mean)
        return out


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(5, generator=torch.Generator().manual_seed(index)) + index % 2


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Drifting()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out: Tensor = self.net(batch)
        return out.square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Rows(), batch_size=4)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Rows(), batch_size=4)


def _fit(strategy: Any, steps: int, path: str | None = None, folder: str | None = None) -> dict[str, list[float]]:
    os.environ.update(torchrun_env())
    module = Module()
    saves = [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)] if folder else []
    trainer = pl.Trainer(
        **{**QUIET, "enable_checkpointing": bool(folder)},
        strategy=strategy,
        devices=dist.get_world_size(),
        max_steps=steps,
        accumulate_grad_batches=2,
        limit_val_batches=0 if folder else 1,
        val_check_interval=6,
        callbacks=saves,
    )
    trainer.fit(module, ckpt_path=path)
    return {name: value.flatten().tolist() for name, value in module.state_dict().items()}


def _trainer_as_ddp(sent: bool) -> None:
    found = _fit(ZeroStrategy(config=ZERO, broadcast_buffers=sent), 6)
    wanted = _fit(DDPStrategy(broadcast_buffers=sent, process_group_backend="gloo"), 6)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found["net.linear.weight"])
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize("sent", [True, False])
def test_a_trainers_buffers_are_those_of_ddp(pool: Pool, sent: bool) -> None:
    pool.run(2, _trainer_as_ddp, sent)


def _saves(format: str, folder: str) -> dict[str, list[float]]:
    config = {**ZERO, "checkpoint": {"format": format}, "broadcast_buffers": False}
    return _fit(ZeroStrategy(config=config), 6, folder=folder)


def _resumes(format: str, path: str) -> dict[str, list[float]]:
    config = {**ZERO, "checkpoint": {"format": format}, "broadcast_buffers": False}
    return _fit(ZeroStrategy(config=config), 6, path=path)


@pytest.mark.parametrize("format", only(["sharded"], ["sharded", "full"]))
def test_each_ranks_buffers_are_resumed(pool: Pool, tmp_path: Path, format: str) -> None:
    wanted = pool.run(2, _saves, format, str(tmp_path))
    assert wanted[0]["net.mean"] != wanted[1]["net.mean"]
    assert pool.run(2, _resumes, format, str(tmp_path / "step=3.ckpt")) == wanted


def _fabric(strategy: Any) -> tuple[Any, Any, Any]:
    os.environ.update(torchrun_env())
    fabric = L.Fabric(accelerator="cpu", strategy=strategy, devices=dist.get_world_size())
    fabric.launch()
    net = Drifting()
    return fabric, *fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))


def _steps(fabric: Any, model: Any, optimizer: Any, first: int, last: int) -> dict[str, list[float]]:
    for step in range(first, last):
        for micro in range(2):
            rows = torch.stack([Rows()[8 * step + 4 * micro + i] for i in range(4)]) + dist.get_rank()
            with fabric.no_backward_sync(model, enabled=micro == 0):
                fabric.backward(model(rows).square().mean() / 2)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.flatten().tolist() for name, value in model.module.state_dict().items()}


def _fabric_as_ddp(folder: str) -> None:
    for sent in (True, False):
        model = _fabric(FabricZeroStrategy(config=ZERO, broadcast_buffers=sent))
        found = _steps(*model, 0, 3)
        model[0].save(f"{folder}/{sent}", {"net": model[1], "optimizer": model[2]})
        found = _steps(*model, 3, 6)
        wanted = _steps(*_fabric(FabricDDP(broadcast_buffers=sent, process_group_backend="gloo")), 0, 6)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
        again = _fabric(FabricZeroStrategy(config=ZERO, broadcast_buffers=sent))
        again[0].load(f"{folder}/{sent}", {"net": again[1], "optimizer": again[2]})
        assert _steps(*again, 3, 6) == found


def test_fabrics_buffers_are_those_of_ddp_and_resume(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _fabric_as_ddp, str(tmp_path))


def test_the_argument_must_not_contradict_the_configuration() -> None:
    with pytest.raises(ConfigError, match="broadcast_buffers=True contradicts broadcast_buffers=False"):
        ZeroStrategy(config={"broadcast_buffers": False}, broadcast_buffers=True)
    assert ZeroStrategy(config={"broadcast_buffers": False}).config.broadcast_buffers is False
