"""Makes the sharded checkpoints beside this file with Lightning's own strategies, on CPUs (gloo, two ranks).

``python tests/data/fsdp/make.py``, where Lightning 2.6.6 is installed. ``model_parallel`` is what ModelParallelStrategy
writes. FSDPStrategy takes GPUs only, and FSDP1 needs one: ``fsdp`` is the same state under the keys that
FSDPStrategy.save_checkpoint uses, written by the same function of torch.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

HERE = Path(__file__).parent


class Module(pl.LightningModule):
    """Odd sizes, a frozen parameter, buffers."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(7, width)
        self.body = nn.Linear(width, 9)
        self.frozen = nn.Linear(9, 7)
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("calls", torch.tensor(0))

    def configure_model(self) -> None:
        for child in (self.embed, self.body, self.frozen):
            fully_shard(child, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        self.calls += 1
        logits = self.frozen(torch.tanh(self.body(self.embed(batch))))
        return nn.functional.cross_entropy(logits, batch.roll(1))

    def configure_optimizers(self) -> Any:
        wide = [p for p in self.parameters() if p.dim() > 1 and p.requires_grad]
        thin = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": wide}, {"params": thin, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def run(rank: int, port: int) -> None:
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "NODE_RANK": 0, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in where.items()}, MASTER_ADDR="127.0.0.1")
    torch.manual_seed(1)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **quiet)
    module = Module()
    torch.manual_seed(10)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randint(7, (24,)), batch_size=4))
    trainer.save_checkpoint(HERE / "model_parallel")
    (optimizer,) = trainer.optimizers
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(module, options=full)
    state = get_optimizer_state_dict(module, optimizer, options=full)
    if rank == 0:
        groups = [{**group, "params": list(group["params"])} for group in state["param_groups"]]
        torch.save({"weights": weights, "state": state["state"], "groups": groups}, HERE / "expected.pt")
    mine = get_model_state_dict(module), get_optimizer_state_dict(module, optimizer)
    dcp.save({"model": mine[0], "optimizer_0": mine[1]}, checkpoint_id=HERE / "fsdp")
    if rank == 0:
        shutil.copy(HERE / "model_parallel" / "meta.pt", HERE / "fsdp")
    dist.barrier()


if __name__ == "__main__":
    for old in ("model_parallel", "fsdp"):
        shutil.rmtree(HERE / old, ignore_errors=True)
    torch.multiprocessing.spawn(run, (29790,), nprocs=2)
