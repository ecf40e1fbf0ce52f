"""Makes the checkpoints beside this file with Lightning's ModelParallelStrategy, on CPUs (gloo, two and four ranks).

``python tests/data/tensor_parallel/make.py``, where Lightning 2.6.6 is installed. ``tp2`` has two tensor ranks,
``tp2_dp2`` two data ranks beside them that FSDP2 shards over. Each is saved as a folder of torch.distributed.checkpoint
and as one file; ``expected.pt`` has the weights and states by name.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

HERE = Path(__file__).parent
TOKENS, WIDTH = 8, 6


class Module(pl.LightningModule):
    """Matrices cut by rows and by columns, a frozen one, whole norms, a buffer; FSDP2 gets an odd number of rows.

    ``shards``: whether FSDP2 shards it over the data ranks.
    """

    shards = False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.frozen = nn.Linear(WIDTH, TOKENS)
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("calls", torch.tensor(0))

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is None or isinstance(self.up.weight, DTensor):
            return
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
            "frozen": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(self, mesh["tensor_parallel"], plan)
        self.frozen.weight.requires_grad_(False)  # torch trains all
        for child in (self.embed, self.norm, self.up, self.down, self.frozen) if self.shards else ():
            fully_shard(child, mesh=mesh["data_parallel"])

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        self.calls += 1
        logits = self.frozen(self.down(torch.tanh(self.up(self.norm(self.embed(batch))))))
        return nn.functional.cross_entropy(logits, batch.roll(1))

    def configure_optimizers(self) -> Any:
        wide = [p for p in self.parameters() if p.dim() > 1 and p.requires_grad]
        thin = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": wide}, {"params": thin, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def run(rank: int, port: int, data: int) -> None:
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2 * data, "NODE_RANK": 0, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in where.items()}, MASTER_ADDR="127.0.0.1")
    Module.shards = data > 1
    name = "tp2" if data == 1 else f"tp2_dp{data}"
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    sizes = {"data_parallel_size": data, "tensor_parallel_size": 2, "process_group_backend": "gloo"}
    for distributed in (True, False):
        torch.manual_seed(1)
        strategy = ModelParallelStrategy(save_distributed_checkpoint=distributed, **sizes)
        trainer = pl.Trainer(accelerator="cpu", devices=2 * data, strategy=strategy, max_epochs=1, **quiet)
        module = Module()
        torch.manual_seed(10)
        trainer.fit(module, torch.utils.data.DataLoader(torch.randint(TOKENS, (12 * data,)), batch_size=4))
        trainer.save_checkpoint(HERE / name / ("folder" if distributed else "file.pt"))
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(module, options=full)
    (optimizer,) = trainer.optimizers
    states = get_optimizer_state_dict(module, optimizer, options=full)
    if rank == 0:
        torch.save({"weights": weights, "state": states["state"]}, HERE / name / "expected.pt")
    torch.distributed.barrier()


if __name__ == "__main__":
    for number, data in enumerate((1, 2)):
        shutil.rmtree(HERE / ("tp2" if data == 1 else f"tp2_dp{data}"), ignore_errors=True)
        torch.multiprocessing.spawn(run, (29790 + number, data), nprocs=2 * data)
