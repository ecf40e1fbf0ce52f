"""Two hosts of one rank each train a step; the argument ``kubeflow`` passes Lightning's environment."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import KubeflowEnvironment
from lightning.pytorch.demos.boring_classes import BoringModel

from lt_zero import ZeroStrategy
from tests.support.lightning_tools import QUIET

if __name__ == "__main__":
    plugins: list[Any] = [KubeflowEnvironment()] if "kubeflow" in sys.argv else []
    where: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "num_nodes": 2, "plugins": plugins}
    trainer = pl.Trainer(**{**QUIET, **where, "max_steps": 1, "strategy": ZeroStrategy(stage=2)})
    trainer.fit(BoringModel())
    print(f"RESULT {trainer.global_rank} of {trainer.world_size} on {trainer.node_rank}", flush=True)
