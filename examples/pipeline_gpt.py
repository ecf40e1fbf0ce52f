"""Train a small GPT in two pipelines of two stages, with ZeRO over the pipelines, and resume without them.

python examples/pipeline_gpt.py                             # 4 processes: 2 stages x 2 data ranks
python examples/pipeline_gpt.py --resume --ranks 3 --stages 1 --steps 60    # 3 data ranks resume, each with all layers
python examples/pipeline_gpt.py --ranks 8 --tensor 2 --precision bf16-mixed   # 2 stages x 2 data x 2 tensor ranks
"""

import argparse
import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from corpus import Windows, read_text
from lt_zero import ZeroStrategy
from lt_zero.parallel import LayerSpec, Pipeline, TiedLayerSpec

VOCABULARY, WIDTH, HEADS, CONTEXT, DEPTH, BATCH = 256, 96, 6, 64, 4, 24


class Positions(nn.Module):
    """Adds a learned vector for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[: x.shape[1]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS  # tensor ranks share the heads: lt_zero sets it to those of this rank
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        heads = [part(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


# Which rank has which part of a layer, if there are tensor ranks.
RULES = [
    {"patterns": [r".*\.(q|k|v|up)\.weight"], "partition_type": "column"},
    {"patterns": [r".*\.(out|down)\.weight"], "partition_type": "row"},
]


def small_embedding() -> nn.Embedding:
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    nn.init.normal_(embedding.weight, std=0.02)
    return embedding


def head(embedding: nn.Embedding, x: Tensor) -> Tensor:
    """Compute logits with the weight of the embedding, which the first and the last stage share."""
    return x @ embedding.weight.T


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GPT(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.pipe: Pipeline | None = None

    def configure_model(self) -> None:
        # Lightning calls this in each run, when the ranks are known: a rank makes its own layers only.
        if self.pipe is None:
            torch.manual_seed(0)
            layers = [
                TiedLayerSpec("embed", small_embedding),
                LayerSpec(Positions),
                *(LayerSpec(Block) for _ in range(DEPTH)),
                LayerSpec(nn.LayerNorm, WIDTH),
                TiedLayerSpec("embed", small_embedding, forward_fn=head),
            ]
            self.pipe = Pipeline(layers, loss_fn=mean_loss)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        assert self.pipe is not None
        # The forwards and backwards of all micro-batches run here; this is the mean of their losses.
        loss: Tensor = self.pipe(*batch)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        assert self.pipe is not None
        self.log("val_loss", self.pipe(*batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(options: argparse.Namespace) -> float:
    """Train, save and export; returns the perplexity of validation text."""
    ranks, stages, tensor, folder = options.ranks, options.stages, options.tensor, options.folder
    data_ranks = ranks // (stages * tensor)
    config: dict[str, Any] = {"pipeline": {"schedule": "1F1B", "num_microbatches": 4}} if stages > 1 else {}
    if tensor > 1:
        config["tensor_parallel"] = {"partition_config": {"layer_specs": RULES}}
    strategy = ZeroStrategy(options.zero, config, tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=ranks,
        precision=options.precision,
        max_steps=options.steps,
        val_check_interval=options.steps,
        check_val_every_n_epoch=None,
        logger=False,
        enable_checkpointing=False,
    )
    train = Windows(read_text(validation=False), CONTEXT)
    validation = Windows(read_text(validation=True), CONTEXT, 192)
    size = options.batch // data_ranks
    loaders = DataLoader(train, size, shuffle=True, drop_last=True), DataLoader(validation, size)
    trainer.fit(GPT(), *loaders, ckpt_path=folder / "last.ckpt" if options.resume else None)
    trainer.save_checkpoint(folder / "last.ckpt")
    strategy.export(folder / "weights.safetensors", dtype="fp16", overwrite=True)
    found = trainer.callback_metrics
    perplexity = math.exp(float(found["val_loss"]))
    if trainer.is_global_zero:
        sizes = f"{stages} stages x {data_ranks} data x {tensor} tensor ranks, ZeRO stage {options.zero}"
        print(f"{sizes}: loss {float(found['loss']):.3f} after {options.steps} steps, perplexity {perplexity:.3f}")
    return perplexity


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--batch", type=int, default=24, help="windows of all data ranks in a step")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("out/pipeline_gpt"))
    parser.add_argument("--resume", action="store_true")
    main(parser.parse_args())
