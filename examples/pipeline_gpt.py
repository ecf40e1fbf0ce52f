"""Train a small GPT, of whose layers two ranks have a half each, with ZeRO over two such pipelines; go on without them.

python examples/pipeline_gpt.py                             # 4 processes: 2 stages x 2 data ranks
python examples/pipeline_gpt.py --resume --ranks 3 --stages 1 --steps 60    # 3 data ranks go on, each with all layers
"""

import argparse
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
    """Adds a vector for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[: x.shape[1]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.feed(self.norm2(x))
        return result


def small_embedding() -> nn.Embedding:
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    nn.init.normal_(embedding.weight, std=0.02)
    return embedding


def head(embedding: nn.Embedding, x: Tensor) -> Tensor:
    """Logits by the weight of the embedding, which the first and the last stage have."""
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
        ids, targets = batch
        assert self.pipe is not None
        loss: Tensor = self.pipe(
            ids, targets
        )  # the forwards and backwards of all micro-batches; the mean of their losses
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(ranks: int, stages: int, zero: int, steps: int, folder: Path, resume: bool, **trainer: Any) -> float:
    """Train, save and export; returns the last loss."""
    pipeline = {"schedule": "1F1B", "num_microbatches": 4} if stages > 1 else {}
    strategy = ZeroStrategy(stage=zero, pipeline_parallel_size=stages, config={"pipeline": pipeline})
    run = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=ranks,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        **trainer,
    )
    data = DataLoader(Windows(read_text(validation=False), CONTEXT), batch_size=BATCH * stages // ranks, drop_last=True)
    run.fit(GPT(), data, ckpt_path=folder / "last.ckpt" if resume else None)
    run.save_checkpoint(folder / "last.ckpt")
    strategy.export(folder / "weights.safetensors", overwrite=True)
    loss = float(run.callback_metrics["loss"])
    if run.is_global_zero:
        sizes = f"{stages} stages x {ranks // stages} data ranks, ZeRO stage {zero}"
        print(f"{sizes}: loss {loss:.3f} after {steps} steps")
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("out/pipeline_gpt"))
    parser.add_argument("--resume", action="store_true")
    main(**vars(parser.parse_args()))
