"""A Trainer on a GPU in every precision: fit, validate, save, resume, export, and the device's skip flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lt_zero import ZeroStrategy
from lt_zero.core.engine.full_values import full_parameters
from tests.support.lightning_tools import trust

pytestmark = pytest.mark.gpu

MODES = ["32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"]
WIDTH = 32
SHARDED = {"stage3_param_persistence_threshold": 0}  # or parameters of this size stay whole


class Module(pl.LightningModule):
    """``overflow``: the steps whose loss is too large for fp16."""

    def __init__(self, overflow: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        self.overflow, self.scales = overflow, list[float]()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.net(batch[0].to(self.net[0][0].weight.dtype)).float().square().mean()
        return loss * 1e30 if self.trainer.global_step in self.overflow and index < 3 else loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        loss = self.net(batch[0].to(self.net[0][0].weight.dtype)).float().square().mean()
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(device: torch.device, mode: str, stage: int, folder: Path, steps: int, path: Path | None = None, **keys: Any):
    data = TensorDataset(torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(data, batch_size=4)
    trainer = pl.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        strategy=ZeroStrategy(stage, {"zero_optimization": SHARDED if stage == 3 else {}}),
        precision=mode,
        max_steps=steps,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        val_check_interval=4,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(**keys)
    trainer.fit(module, loader, loader, ckpt_path=path, **trust(False))
    return trainer


def values(trainer: pl.Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, _, value in full_parameters(trainer.strategy.engine)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_resumed_run_ends_where_a_straight_one_does(
    device: torch.device, tmp_path: Path, stage: int, mode: str
) -> None:
    half = fit(device, mode, stage, tmp_path, 3)
    half.save_checkpoint(tmp_path / "half.ckpt")
    want = values(fit(device, mode, stage, tmp_path, 6))
    resumed = fit(device, mode, stage, tmp_path, 6, tmp_path / "half.ckpt")
    assert resumed.global_step == 6
    for name, value in values(resumed).items():
        assert torch.equal(value, want[name]), name
    assert torch.isfinite(resumed.callback_metrics["loss"])


@pytest.mark.parametrize("mode", ["16-mixed", "16-true"])
@pytest.mark.parametrize("stage", [1, 3])
def test_overflows_skip_steps_and_halve_the_scale(device: torch.device, tmp_path: Path, stage: int, mode: str) -> None:
    if device.type == "cpu" and mode == "16-mixed":
        pytest.skip("Lightning takes bf16-mixed on a CPU")
    trainer = fit(device, mode, stage, tmp_path, 6, overflow=(0,))
    plugin = trainer.precision_plugin
    assert plugin.skipped_steps > 0
    assert all(torch.isfinite(value).all() for value in values(trainer).values())
