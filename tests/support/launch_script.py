"""A training script that prints one JSON line per rank; started by the launchers in tests/e2e/test_launchers.py."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.distributed.tensor import DTensor

import lt_zero


class Model(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and self.global_rank == FAILS:
            raise ValueError("broken on purpose")
        return self.layer(batch).square().mean()


def main(strategy: str | lt_zero.ZeroStrategy) -> None:
    warnings.filterwarnings("ignore")
    pl.seed_everything(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model)
    with torch.no_grad(), lt_zero.gathered(model):
        values = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        total = sum(float(value.double().sum()) for value in values)
    line = {
        "rank": trainer.global_rank,
        "world": trainer.world_size,
        "sum": round(total, 6),
        "mpi": "mpi4py" in sys.modules,
    }
    print("RESULT " + json.dumps(line), flush=True)


FAILS = next((int(argument[7:]) for argument in sys.argv if argument.startswith("--fail=")), None)  # a rank

if __name__ == "__main__":
    start_method = sys.argv[1]
    config: dict[str, Any] = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    if "--tensor" in sys.argv:
        rule = {"patterns": ["layer.weight"], "partition_type": "column", "gather_output": True}
        config["tensor_parallel"] = {"autotp_size": 2, "partition_config": {"layer_specs": [rule]}}
    if start_method == "name":
        main("zero_2_spawn")
    else:
        main(lt_zero.ZeroStrategy(config=config, start_method=start_method))  # type: ignore[arg-type]
