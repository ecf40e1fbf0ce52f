"""Programs that validate with an average of their weights, and train on with the weights themselves.

Two ways to swap them, each rebuilt from a public program: OpenFold's, by state dicts, and that of Stability AI's
generative-models, by ``data`` of the parameters. A run with a swap ends with the weights of one without, bit for bit.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lt_zero
from tests.support.lightning_tools import sharded_trainer
from tests.support.matrix import only_rows
from tests.support.pool import Pool

DECAY = 0.8


def _body() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 33), nn.LayerNorm(33), nn.ReLU(), nn.Linear(33, 3))


class Regression(pl.LightningModule):
    """Trains with Adam, and validates with the weights that ``averaged`` puts there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = _body()
        self.validated: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self.body(batch).float(), batch[:, :3])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(float(self.loss(batch)))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def _loader(self) -> Any:
        return DataLoader(torch.randn(24, 5, generator=torch.Generator().manual_seed(1)), batch_size=4)  # type: ignore[arg-type]

    train_dataloader = val_dataloader = _loader


class StateDicts(Regression):
    """OpenFold: the average is one of state dicts. The first validation step swaps, and its end swaps back."""

    def __init__(self) -> None:
        super().__init__()
        self.average: dict[str, Tensor] = {}
        self.cached: dict[str, Tensor] | None = None

    def _state(self) -> dict[str, Tensor]:
        with lt_zero.gathered(self.body):
            return {name: value.detach().clone() for name, value in self.body.state_dict().items()}

    def on_before_zero_grad(self, *_: Any) -> None:
        state = self._state()
        if not self.average:
            self.average = state
        for name, value in state.items():
            self.average[name] -= (1 - DECAY) * (self.average[name] - value)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.cached is None and self.average:
            self.cached = self._state()
            self.body.load_state_dict(self.average)
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        if self.cached is not None:
            self.body.load_state_dict(self.cached)
            self.cached = None


class Shadows(nn.Module):
    """The average of generative-models: fp32 buffers, which are copied to the ``data`` of parameters, and back."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, parameter in model.named_parameters():
            self.register_buffer(name.replace(".", "_"), parameter.detach().clone())
        self.stored: list[Tensor] = []

    def _pairs(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        for name, parameter in model.named_parameters():
            yield getattr(self, name.replace(".", "_")), parameter

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for shadow, parameter in self._pairs(model):
            shadow.sub_((1 - DECAY) * (shadow - parameter))

    def store(self, model: nn.Module) -> None:
        self.stored = [parameter.clone() for parameter in model.parameters()]

    def copy_to(self, model: nn.Module) -> None:
        for shadow, parameter in self._pairs(model):
            parameter.data.copy_(shadow.data)

    def restore(self, model: nn.Module) -> None:
        for parameter, value in zip(model.parameters(), self.stored, strict=True):
            parameter.data.copy_(value.data)


class Data(Regression):
    """generative-models: each validation step runs in the scope of the average."""

    def __init__(self) -> None:
        super().__init__()
        self.shadows = Shadows(self.body)

    def on_train_batch_end(self, *_: Any) -> None:
        with lt_zero.gathered(self.body):
            self.shadows.update(self.body)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        with lt_zero.gathered(self.body, write=True):
            self.shadows.store(self.body)
            self.shadows.copy_to(self.body)
        try:
            yield
        finally:
            with lt_zero.gathered(self.body, write=True):
                self.shadows.restore(self.body)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with self.scope():
            super().validation_step(batch, batch_idx)
            self.trainer.strategy.full_state_dict()  # type: ignore[attr-defined]  # takes edits over


def _fit(model: Regression, stage: int, precision: str) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after training, by their names in the body, and the losses of validations on this rank."""
    trainer = sharded_trainer(stage, precision=precision, max_epochs=3)
    found: dict[str, Tensor] = {}

    class Take(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            for name, parameter in model.body.named_parameters():
                found[name] = lt_zero.full_master(parameter)

    trainer.callbacks.append(Take())  # type: ignore[attr-defined]
    trainer.fit(model)
    return found, model.validated


def _swaps(stage: int, precision: str) -> None:
    want, plainly = _fit(Regression(), stage, precision)
    assert all(value.dtype == torch.float32 for value in want.values())
    for program in (StateDicts, Data):
        got, validated = _fit(program(), stage, precision)
        assert validated != plainly, "validation saw other weights"
        for name, value in want.items():
            assert torch.equal(got[name], value), (
                f"{program.__name__}: {name} is {(got[name] - value).abs().max():.1e} away from a run without swaps"
            )


@pytest.mark.parametrize(
    ("stage", "precision"),
    only_rows([(2, "bf16-mixed")], itertools.product([0, 2, 3], ["32-true", "bf16-mixed"])),
)
def test_swaps_leave_no_trace(pool: Pool, stage: int, precision: str) -> None:
    pool.run(2, _swaps, stage, precision)
