"""Train the demo's GPT on texts of 8,192 bytes, with dense and with block-sparse attention, and compare both.

python examples/long_context.py                             # 2 processes on the CPU, or every GPU (12 minutes)
python examples/long_context.py --stage 2 --precision bf16-mixed
python examples/long_context.py --context 4096 --steps 50   # shorter
"""

import argparse
import os
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Timer
from torch.utils.data import DataLoader

from corpus import Windows, read_text
from gpt import GPT
from lt_zero import ZeroStrategy
from lt_zero.attention import SparseSelfAttention
from train_gpt import GPTModule, silence_warnings, use_threads

# Each byte sees its window of 512 bytes, and the last 64 bytes of every window before it.
PATTERN = {"mode": "fixed", "block": 64, "num_local_blocks": 8, "num_global_blocks": 1, "attention": "unidirectional"}


class LongGPT(GPTModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, betas=(0.9, 0.95))


def train(args: argparse.Namespace, sparse: bool) -> tuple[float, float]:
    """Train a model; returns its perplexity on validation text, and seconds per step."""
    L.seed_everything(0)
    config: dict[str, Any] = {"zero_optimization": {"stage": args.stage}}
    if sparse:
        config["sparse_attention"] = PATTERN  # the strategy gives it to each SparseSelfAttention
    timer = Timer()
    trainer = L.Trainer(
        strategy=ZeroStrategy(config=config),
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        precision=args.precision,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        callbacks=[timer],
        enable_checkpointing=False,
        limit_val_batches=0,
        logger=False,
    )
    options = {"attend": SparseSelfAttention} if sparse else {}
    model = LongGPT(GPT(depth=args.depth, width=args.width, context=args.context, **options))
    trainer.fit(model, DataLoader(Windows(read_text(validation=False), args.context), batch_size=1, shuffle=True))
    trainer.limit_val_batches = 1.0
    validation = DataLoader(Windows(read_text(validation=True), args.context, args.texts), batch_size=1)
    (result,) = trainer.validate(model, validation, verbose=False)
    return float(result["val_perplexity"]), timer.time_elapsed("train") / args.steps


def main(arguments: list[str] | None = None) -> list[tuple[float, float]]:
    """Train both models; returns perplexity and seconds per step of the dense and of the sparse one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--texts", type=int, default=16, help="texts of the validation")
    args = parser.parse_args(arguments)
    silence_warnings()
    use_threads(None, args.devices)
    found = [train(args, sparse) for sparse in (False, True)]
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        for name, (perplexity, seconds) in zip(("dense", "sparse"), found, strict=True):
            print(f"{name:>6}: perplexity {perplexity:.3f}, {seconds:.2f} s per step")
        (dense, slow), (sparse, fast) = found
        print(f"sparse / dense: perplexity {sparse / dense:.3f}, time {fast / slow:.2f}")
    return found


if __name__ == "__main__":
    main()
