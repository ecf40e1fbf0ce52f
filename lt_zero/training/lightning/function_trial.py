"""Trains the module that a function returns, for ``lt-zero tune pkg.mod:function``; the trial ends the process."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lt_zero.common import accelerator
from lt_zero.training.lightning.strategy import ZeroStrategy

_FORMS = "a LightningModule with train_dataloader, or (module, loss(module, batch), make_batch())"


class _Batches(IterableDataset[Any]):
    def __init__(self, make_batch: Callable[[], Any]) -> None:
        self._make_batch = make_batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._make_batch()


class _LossModule(pl.LightningModule):
    """A module with a loss and batches, stepped by AdamW unless the configuration names an optimizer."""

    def __init__(self, module: nn.Module, loss: Callable[[nn.Module, Any], Tensor], make_batch: Callable[[], Any]):
        super().__init__()
        self.module, self._loss, self._make_batch = module, loss, make_batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(self.module, batch)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(_Batches(self._make_batch), batch_size=None)


class _WithAdamW(_LossModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def made_by(place: str, batch_size: int | None, optimizer: bool) -> pl.LightningModule:
    """Call the function ``pkg.mod:function``, and return a module of its result.

    ``optimizer``: the configuration has one.

    Raises:
        TypeError: it is nothing that can be trained.
    """
    module, _, name = place.partition(":")
    function = getattr(importlib.import_module(module), name)
    made = function() if batch_size is None else function(batch_size=batch_size)
    if isinstance(made, pl.LightningModule):
        return made
    if isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module):
        return (_LossModule if optimizer else _WithAdamW)(*made)
    raise TypeError(f"{place} returned {type(made).__name__}, which is not {_FORMS}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place")
    parser.add_argument("--config")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--micro-batch", type=int)
    given = parser.parse_args()
    sys.path.insert(0, str(Path.cwd()))
    strategy = ZeroStrategy(config=given.config)
    # Tensor ranks have to make the same batches.
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=accelerator.default_kind().type,
        devices=given.ranks or (accelerator.count() or 1),
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(made_by(given.place, given.micro_batch, strategy.config.optimizer is not None))


if __name__ == "__main__":
    main()
