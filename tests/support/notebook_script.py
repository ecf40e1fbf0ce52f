"""What a notebook does: fits with one device and with two, then calls in the parent process, which is no rank. See e2e.

It is to be run by ``python -i``, as an interactive process, whose ranks are forked.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

import lt_zero


class Model(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Inside(pl.Callback):
    """What the error in the parent says to do."""

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.strategy.export(f"{FOLDER}/weights.pt", dtype=torch.float32)
        trainer.save_checkpoint(f"{FOLDER}/last.ckpt")


def fit(
    steps: int, *callbacks: pl.Callback, devices: int = 2, model: Model | None = None, **options: Any
) -> tuple[pl.Trainer, Model]:
    pl.seed_everything(1, verbose=False)
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = lt_zero.ZeroStrategy(config=config)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=steps,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        **quiet,
    )
    model = model or Model()
    trainer.fit(model, **options)
    return trainer, model


def weights(model: Model) -> dict[str, torch.Tensor]:
    with lt_zero.gathered(model):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def main() -> None:
    _, alone = fit(3, devices=1)
    copied = Model()
    copied.load_state_dict(weights(alone))
    torch.set_num_threads(3)
    torch.randn(300, 300) @ torch.randn(300, 300)  # leaves threads of OpenMP, which the ranks do not have
    fit(3, model=alone)
    fit(3, model=copied)
    both = all(torch.equal(value, weights(copied)[name]) for name, value in weights(alone).items())
    trainer, model = fit(3, Inside())
    exported = torch.load(f"{FOLDER}/weights.pt", weights_only=True)
    same = all(torch.equal(value, exported[name]) for name, value in model.state_dict().items())
    strategy, told = trainer.strategy, []
    for call in (
        lambda: strategy.export(f"{FOLDER}/late.pt"),
        strategy.full_state_dict,
        strategy.memory_report,
        lambda: trainer.save_checkpoint(f"{FOLDER}/late.ckpt"),
    ):
        try:
            call()
        except RuntimeError as error:
            told.append(str(error))
    trainer.save_checkpoint(f"{FOLDER}/weights.ckpt", weights_only=True)
    trainer.test(model, verbose=False)
    _, resumed = fit(5, ckpt_path=f"{FOLDER}/last.ckpt")
    _, whole = fit(5)
    moved = not torch.equal(whole.layer.weight, model.layer.weight)
    equal = moved and torch.equal(resumed.layer.weight, whole.layer.weight)
    found = {"same": same, "told": told, "resumed": equal, "files": sorted(os.listdir(FOLDER)), "both": both}
    print("RESULT " + json.dumps({**found, "steps": [trainer.global_step, trainer.current_epoch]}))


FOLDER = sys.argv[1] if len(sys.argv) > 1 else ""

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
