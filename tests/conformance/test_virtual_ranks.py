"""Three faces train to the same bits on 1, 2 and 3 ranks, and go on with them elsewhere, with six virtual ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lt_zero
from lt_zero import FabricZeroStrategy
from tests.support.features import needs
from tests.support.lightning_tools import sharded_trainer, torchrun_env
from tests.support.pool import Pool

pytestmark = needs("virtual_ranks")

VIRTUAL = 6
RANKS = (1, 2, 3)
ACCUMULATED = 2  # rounds of a step
EPOCHS = 2
LIMIT = 0.1  # of the norm, which is larger
CONFIG = {"reproducible": {"virtual_ranks": VIRTUAL}}


class Rows(Dataset[Tensor]):
    """Rows for four rounds of batches of two, of which some are repeated."""

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(5, generator=torch.Generator().manual_seed(index))


class Net(nn.Module):
    """Draws random numbers and has running averages; sums of its losses depend on their order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 1))

    def forward(self, rows: Tensor) -> Tensor:
        loss: Tensor = self.layers(rows).square().mean()
        return loss


def _loader() -> DataLoader[Tensor]:
    return DataLoader(Rows(), batch_size=2)


def _sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


class _Fit(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.digests: list[str] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.digests.append(lt_zero.weights_digest(self.net))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _sgd(self.net)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return _loader()


def _trainer(stage: int, net: nn.Module, folder: Path, resumes: bool) -> list[str]:
    module = _Fit(net)
    keeps = pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    kwargs = {"max_epochs": EPOCHS, "accumulate_grad_batches": ACCUMULATED, "gradient_clip_val": LIMIT}
    trainer = sharded_trainer(stage, config=CONFIG, callbacks=[keeps], enable_checkpointing=True, **kwargs)
    trainer.fit(module, ckpt_path=str(folder / "epoch=0.ckpt") if resumes else None)
    # The hook is called for each micro-batch that this rank runs, after the step of its round.
    turns = VIRTUAL // dist.get_world_size()
    return module.digests[ACCUMULATED * turns - 1 :: ACCUMULATED * turns]


def _fabric(stage: int, net: nn.Module, folder: Path, resumes: bool) -> list[str]:
    strategy = FabricZeroStrategy(stage=stage, config=CONFIG)
    fabric = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    model, optimizer = fabric.setup(net, _sgd(net))
    loader = fabric.setup_dataloaders(_loader())
    state = {"model": model, "optimizer": optimizer}
    if resumes:
        fabric.load(folder / "saved", state)
    backwards = ACCUMULATED * VIRTUAL // dist.get_world_size()
    digests = []
    for epoch in range(1 if resumes else 0, EPOCHS):
        for number, batch in enumerate(loader, 1):
            fabric.backward(model(batch) / ACCUMULATED)
            if number % backwards == 0:
                fabric.clip_gradients(model, optimizer, max_norm=LIMIT)
                optimizer.step()
                optimizer.zero_grad()
                digests.append(lt_zero.weights_digest(net))
        if epoch == 0:
            fabric.save(folder / "saved", state)
    return digests


def _loop(stage: int, net: nn.Module, folder: Path, resumes: bool) -> list[str]:
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": ACCUMULATED}
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": LIMIT, **sizes, **CONFIG}
    made = lt_zero.initialize(model=net, optimizer=_sgd(net), training_data=Rows(), config=config)
    engine: Any = made[0]
    loader: Any = made[2]
    digests = []
    try:
        if resumes:
            engine.load_checkpoint(str(folder))
        for epoch in range(1 if resumes else 0, EPOCHS):
            for batch in loader:
                engine.backward(engine(batch))
                at_boundary = engine.is_gradient_accumulation_boundary()
                engine.step()
                if at_boundary:
                    digests.append(lt_zero.weights_digest(net))
            if epoch == 0:
                engine.save_checkpoint(str(folder))
    finally:
        engine.destroy()
    return digests


_FACES: dict[str, Callable[[int, nn.Module, Path, bool], list[str]]] = {
    "trainer": _trainer,
    "fabric": _fabric,
    "loop": _loop,
}


def _digests(face: str, stage: int, folder: Path, resumes: bool = False) -> list[str]:
    """The digest of the weights after each step, or after each of the second epoch."""
    os.environ.update(torchrun_env())
    torch.manual_seed(0)
    net = Net()
    torch.manual_seed(
        5 + dist.get_rank() + 100 * resumes
    )  # rank 0's random numbers are taken, or those that were saved
    return _FACES[face](stage, net, folder, resumes)


@pytest.mark.parametrize(("face", "stage"), [("trainer", 1), ("fabric", 3), ("loop", 2)])
def test_steps_have_the_same_bits_on_any_number_of_ranks(pool: Pool, tmp_path: Path, face: str, stage: int) -> None:
    found = {}
    for ranks in RANKS:
        folder = tmp_path / str(ranks)
        folder.mkdir()
        found[ranks] = pool.run(ranks, _digests, face, stage, folder)
    [wanted] = found[1]
    assert len(wanted) == 4
    assert len(set(wanted)) == 4
    for ranks in RANKS:
        assert found[ranks] == [wanted] * ranks, ranks
    [went_on] = pool.run(1, _digests, face, stage, tmp_path / "2", True)
    assert went_on == wanted[2:]
