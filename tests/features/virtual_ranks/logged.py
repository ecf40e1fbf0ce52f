"""A module that logs in all ways, and callbacks that remember what they are told."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryPrecision, BinaryRecall

from tests.features.virtual_ranks.fits import Batch, Module, Rows


class Logging(Module):
    """Logs values and metrics in training and validation, and has all hooks around batches."""

    def __init__(self, lr: float = 0.0, **loader: Any) -> None:
        super().__init__(lr, **loader)
        self.squares, self.mean, self.auroc = MeanSquaredError(), MeanMetric(), BinaryAUROC()
        self.several = MetricCollection([BinaryAccuracy(), BinaryPrecision(), BinaryRecall()])
        self.hooks: list[tuple[Any, ...]] = []
        self.by_hand: list[float] = []
        self.register_buffer("highest", torch.zeros(()))

    def _note(self, name: str, batch: Any, *more: Any) -> None:
        self.hooks.append((name, batch[2].tolist(), self.drawn(), *more))

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Any:
        rows, drawn, index = batch
        return rows + torch.randn(5) * 0.1, drawn, index

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self._note("start", batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self._note("end", batch, batch_idx, outputs["loss"].item(), outputs["more"], self.highest.item())
        self.highest.copy_(torch.maximum(self.highest, outputs["loss"] + torch.rand(())))
        self.log("at_end", outputs["loss"], sync_dist=True, on_step=True, on_epoch=True)

    def on_before_backward(self, loss: Tensor) -> None:
        self.hooks.append(("before", loss.item(), self.drawn()))

    def on_after_backward(self) -> None:
        self.hooks.append(("after", self.drawn()))

    def training_step(self, batch: Batch, batch_idx: int) -> Any:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        self._log("train", batch, loss)
        return {"loss": loss, "more": batch_idx}

    def _log(self, name: str, batch: Batch, loss: Tensor) -> None:
        for synced in (False, True):
            for reduction in ("mean", "max", "min", "sum"):
                how = {"sync_dist": synced, "on_step": name == "train", "on_epoch": True, "reduce_fx": reduction}
                self.log(f"{name} {reduction} {synced}", loss * 1.1, **how)  # type: ignore[arg-type]
        self.log(f"{name} step", loss, sync_dist=True, on_step=True, on_epoch=False)
        out = self.net(batch[0]).squeeze(1).sigmoid().detach()
        target = batch[0].sum(1)
        self.squares(out, target)
        self.mean(loss.detach())
        self.log(f"{name} squares", self.squares, on_step=True, on_epoch=True)
        self.log(f"{name} mean", self.mean, on_step=False, on_epoch=True)
        self.several(out, (target > 0).long())
        self.log_dict({f"{name} {key}": metric for key, metric in self.several.items()}, on_step=False, on_epoch=True)
        self.auroc.update(out, (target > 0).long())

    def on_train_epoch_end(self) -> None:
        self.by_hand.append(self.auroc.compute().item())
        self.auroc.reset()
        self.hooks.append(("epoch", self.drawn()))

    def on_validation_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self._note("validation start", batch, batch_idx)

    def on_validation_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self._note("validation end", batch, batch_idx, outputs.item())

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch) + torch.rand(())
        self._log("validation", batch, loss)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.auroc.reset()

    def val_dataloader(self) -> Any:
        return DataLoader(Subset(Rows(), range(20)), batch_size=2)


class Told(pl.Callback):
    """Remembers what it is told, and what is logged then."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def _note(self, name: str, trainer: pl.Trainer, *more: Any) -> None:
        logged = {key: value.item() for key, value in trainer.callback_metrics.items()}
        drawn = torch.rand(()).item(), random.random(), np.random.rand()
        self.calls.append((name, trainer.global_step, trainer.current_epoch, drawn, *more, logged))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._note("start", trainer, batch_idx, batch[2].tolist())

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self._note("zero", trainer)

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self._note("before", trainer, loss.item())

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self._note("after", trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._note("end", trainer, batch_idx, outputs["loss"].item())

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._note("validation end", trainer, batch_idx, outputs.item())

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self._note("validation", trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._note("epoch", trainer)
