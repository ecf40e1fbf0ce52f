"""Train a small Llama with each layer cut over two ranks and ZeRO stage 3 over the others; resume without tensor ranks.

python examples/tensor_parallel.py                             # 4 processes: 2 tensor ranks x 2 data ranks
python examples/tensor_parallel.py --resume --ranks 3 --tensor 1 --steps 60   # 3 data ranks resume
"""

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader

from corpus import Windows, read_text
from lt_zero import ZeroStrategy

VOCABULARY, WIDTH, HEADS, CONTEXT, BATCH = 256, 96, 6, 64, 12


class Attention(nn.Module):
    """Causal attention. A rank with some rows of ``q``, ``k`` and ``v`` has correspondingly fewer heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.RMSNorm(WIDTH), Attention(), nn.RMSNorm(WIDTH)
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, 256, bias=False),
            nn.Linear(WIDTH, 256, bias=False),
            nn.Linear(256, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


CUT = {  # what a rank has of a block: rows of what widens, columns of what narrows, whose outputs are summed
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "gate": ColwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


class Llama(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def configure_model(self) -> None:
        # None without tensor parallelism. Lightning calls this in each run: a model is parallelized once.
        if self.device_mesh is not None and not any(isinstance(p, DTensor) for p in self.parameters()):
            for block in self.blocks:
                parallelize_module(block, self.device_mesh["tensor_parallel"], CUT)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        ids, targets = batch
        loss = F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(ranks: int, tensor: int, stage: int, steps: int, folder: Path, resume: bool, **trainer: Any) -> float:
    """Train, save and export; returns the last loss."""
    strategy = ZeroStrategy(stage=stage, tensor_parallel_size=tensor)
    run = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=ranks,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        **trainer,
    )
    data = DataLoader(Windows(read_text(validation=False), CONTEXT), batch_size=BATCH * tensor // ranks, drop_last=True)
    run.fit(Llama(), data, ckpt_path=folder / "last.ckpt" if resume else None)
    run.save_checkpoint(folder / "last.ckpt")
    strategy.export(folder / "weights.safetensors", dtype="fp16", overwrite=True)
    loss = float(run.callback_metrics["loss"])
    if run.is_global_zero:
        sizes = f"{ranks // tensor} data ranks x {tensor} tensor ranks, stage {stage}"
        print(f"{sizes}: loss {loss:.3f} after {steps} steps")
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("out/tensor_parallel"))
    parser.add_argument("--resume", action="store_true")
    main(**vars(parser.parse_args()))
