"""Short runs with virtual ranks, whose bits ``make same-bits`` compares between numbers of ranks.

``torchrun`` starts this file with a number of ranks. Each run writes what rank 0 logs, the digest of the weights after
each step, and at the end the states of its optimizer, its buffers and its loss scale.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

import lt_zero
from lt_zero import ZeroStrategy

VIRTUAL = 12
RANKS = (1, 2, 3, 4, 6)
WIDTH = 6
SAMPLES = 111  # ten for each virtual rank, nine of them padding
ROWS = 2  # of a micro-batch
STEPS = 20
SAVED = 7  # steps before the checkpoint, in the middle of an epoch
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
OVERFLOWS = 4  # the round in which the loss of some micro-batches is infinite

Values = dict[str, Any]  # by name


class Samples(Dataset[tuple[int, Tensor]]):
    """Numbered rows, to which noise of two generators is added."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return index, row + 0.1 * torch.randn(WIDTH) + float(np.random.random())


class Net(nn.Module):
    """``norm``: with BatchNorm; ``dropout``: the share of dropped elements."""

    def __init__(self, norm: bool, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 11)
        self.norm = nn.BatchNorm1d(11) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(11, 7)
        self.last = nn.Linear(7, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(torch.tanh(self.norm(self.first(x))))
        return self.last(F.gelu(self.hidden(x)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        stage: of ZeRO.
        precision: of the Trainer.
        kind: what it has beside a plain run.
        virtual: virtual ranks.
    """

    stage: int
    precision: str
    kind: str
    virtual: int = VIRTUAL

    @property
    def name(self) -> str:
        return f"{self.virtual}-{self.stage}-{self.precision}-{self.kind}"

    @property
    def accumulates(self) -> int:
        """Rounds of a step."""
        return 2 if self.kind == "accumulation" else 1


KINDS = ("dropout", "batch norm", "clipping", "accumulation", "offload")
PRECISIONS = ("32-true", "bf16-mixed", "16-true")
RUNS = {run.name: run for run in itertools.starmap(Run, itertools.product(range(4), PRECISIONS, KINDS))}


class Module(L.LightningModule):
    """Trains the net of a run, and logs what ranks have to reduce."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        torch.manual_seed(0)
        self.net = Net(run.kind == "batch norm", 0.2 if run.kind == "dropout" else 0.0)
        self.metric = MeanMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        numbers, rows = batch
        loss = self.net(rows).square().mean() + 0.01 * torch.rand(()).item()
        rounds = self.trainer.fit_loop.epoch_loop.total_batch_idx
        if self.run.precision == "16-true" and rounds == OVERFLOWS and 5 in numbers % 7:
            loss = loss * torch.inf
        self.log("first", loss.detach())
        self.log("mean", loss.detach(), sync_dist=True)
        self.metric.update(loss.detach())
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return loss  # type: ignore[no-any-return]

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[1]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.run.stage % 2:
            optimizer: Any = torch.optim.AdamW(self.parameters(), lr=1e-2)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Notes(Callback):
    """Notes what is logged, and the digest of the weights, after each round; saves after ``SAVED`` steps."""

    def __init__(self, checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint
        self.found = Values()
        self._saved = False

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        at = f"epoch {trainer.current_epoch}, round {batch_idx}"
        self.found[f"{at}: weights"] = lt_zero.weights_digest(module)
        for name, value in trainer.callback_metrics.items():
            if not name.startswith(("metric", "val")):
                self.found[f"{at}: {name}"] = value.clone()
        self.found[f"{at}: steps"] = trainer.global_step
        if self.checkpoint is not None and trainer.global_step == SAVED and not self._saved:
            self._saved = True
            trainer.save_checkpoint(self.checkpoint)

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self.found[f"epoch {trainer.current_epoch}: metric"] = trainer.callback_metrics["metric"].clone()

    def on_validation_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        if "val_loss" in trainer.callback_metrics:
            self.found[f"epoch {trainer.current_epoch}: val_loss"] = trainer.callback_metrics["val_loss"].clone()


def _at_the_end(trainer: L.Trainer, module: Any) -> Iterator[tuple[str, Any]]:
    """Whole states, buffers and the loss scale. Collective."""
    for name, parameter in module.named_parameters():
        yield name, lt_zero.full_master(parameter).clone()
        for key in STATES:
            try:
                yield f"{name}, {key}", lt_zero.full_state(parameter, key).clone()
            except (KeyError, ValueError):
                continue
    for name, buffer in module.named_buffers():
        yield f"buffer {name}", buffer.clone()
    controller: Any = trainer.precision_plugin
    yield "loss scale", controller.loss_scale_controller.scale
    yield "skipped steps", controller.loss_scale_controller.skipped


def take(run: Run, ranks: int, folder: Path, checkpoint: Path, resumes: bool, steps: int = STEPS) -> Values:
    """The values of ``run`` on this rank, which saves ``checkpoint`` in its middle, or goes on from it.

    Args:
        ranks: of the run.
        folder: empty, for files of the run.
        steps: of the whole run.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(1)
    notes = Notes(None if resumes else checkpoint)
    zero: dict[str, Any] = {"stage": run.stage, "stage3_param_persistence_threshold": 0}
    if run.kind == "offload" and run.stage > 0:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder)}
    keys = {"zero_optimization": zero, "reproducible": {"virtual_ranks": run.virtual}}
    if run.precision == "16-true":
        keys["fp16"] = {"initial_scale_power": 10}
    trainer = L.Trainer(
        strategy=ZeroStrategy(config=keys),
        accelerator="cpu",
        devices=ranks,
        precision=run.precision,  # type: ignore[arg-type]
        max_steps=steps,
        accumulate_grad_batches=run.accumulates,
        gradient_clip_val=0.05 if run.kind == "clipping" else None,
        callbacks=[notes],
        default_root_dir=folder,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(run)
    train = DataLoader(Samples(), batch_size=ROWS, shuffle=True, drop_last=True)
    trainer.fit(
        module,
        train,
        DataLoader(Samples(), batch_size=ROWS),
        ckpt_path=str(checkpoint) if resumes else None,
        weights_only=False,
    )
    return {**notes.found, **dict(_at_the_end(trainer, module))}


def main(folder: Path, checkpoints: Path, resumes: bool, names: list[str]) -> None:
    """Write ``folder/NAME.pt`` for each of the runs, on rank 0."""
    warnings.simplefilter("ignore")
    virtual = os.environ.get("SAME_BITS_VIRTUAL")
    for name in names:
        place = folder / f"{name} files"
        place.mkdir(parents=True, exist_ok=True)
        run = replace(RUNS[name], virtual=int(virtual)) if virtual else RUNS[name]
        found = take(run, int(os.environ["WORLD_SIZE"]), place, checkpoints / f"{name}.ckpt", resumes)
        if os.environ["RANK"] == "0":
            torch.save(found, folder / f"{name}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "resume", sys.argv[4:])
