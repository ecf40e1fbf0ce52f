"""Gradients that are parts of a sum without saying so are an error after the first backward."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lt_zero.parallel import PartialGradient
from tests.support.lightning_tools import quick, sharded_trainer
from tests.support.matrix import only
from tests.support.pool import Pool


class Scaled(pl.LightningModule):
    """One scale for features of which each tensor rank has some. ``told``: that its gradient is a part of a sum."""

    def __init__(self, told: bool) -> None:
        super().__init__()
        self.told = told
        torch.manual_seed(0)
        self.up, self.scale, self.down = nn.Linear(6, 10), Scale(), nn.Linear(10, 6)

    def configure_model(self) -> None:
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        plan |= {"scale": PartialGradient()} if self.told else {}
        assert self.device_mesh is not None
        parallelize_module(self, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.down(self.scale(torch.tanh(self.up(batch)))).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), batch_size=4)  # type: ignore[arg-type]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x * self.weight
        return result


def _fit(stage: int, told: bool) -> str:
    with quick():
        trainer = sharded_trainer(stage, config={"tensor_parallel": {"autotp_size": 2}}, max_steps=2)
        if told:
            trainer.fit(Scaled(told))
            return ""
        with pytest.raises(RuntimeError) as caught:
            trainer.fit(Scaled(told))
        assert trainer.global_step == 0
    return str(caught.value)


@pytest.mark.parametrize("stage", only([3], [1, 3]))
def test_parts_of_a_sum_are_named_on_all_ranks(pool: Pool, stage: int) -> None:
    for text in pool.run(2, _fit, stage, False):
        assert "Ranks 0 and 1" in text
        assert "different gradients of 'scale.weight', which are not cut" in text
    assert pool.run(2, _fit, stage, True) == [""] * 2
