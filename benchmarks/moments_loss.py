"""What moments in fewer bits cost in loss: the demo's GPT on the demo's text, in one process.

    python benchmarks/moments_loss.py            # benchmarks/results/moments_loss.md

All runs start from the same weights and see the same batches. The learning rate is warmed up over 30 steps and falls
along a cosine to a tenth.
"""

from __future__ import annotations

import argparse
import math
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch
from compressed_loss import CONTEXT, GPT, WARM_UP, batch, read_text
from measuring import ROOT, versions
from torch.nn import functional as F

import lt_zero

DTYPES = ("fp32", "bf16", "int8")
SETTINGS = ((0.95, 300), (0.95, 2000), (0.999, 300), (0.999, 2000))  # beta2, steps


def loss_of(dtype: str, beta2: float, steps: int, rate: float) -> float:
    """The validation loss after training."""
    torch.manual_seed(0)
    model = GPT(depth=2, width=96, context=CONTEXT)
    config: dict[str, Any] = {"log_level": "error", "optimizer_states": {"dtype": dtype}}
    engine = lt_zero.shard(model, lt_zero.ZeroConfig.of({**config, "zero_optimization": {"stage": 0}}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, beta2), weight_decay=0.1)
    lt_zero.ShardedOptimizer(engine, optimizer)
    text, draws = read_text(validation=False), torch.Generator().manual_seed(0)
    for step in range(steps):
        progress = max(0, step - WARM_UP) / (steps - WARM_UP)
        falling = 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
        optimizer.param_groups[0]["lr"] = rate * falling * min(1.0, (step + 1) / WARM_UP)
        optimizer.zero_grad()
        tokens, following = batch(text, draws, 8)
        F.cross_entropy(model(tokens).flatten(0, 1), following.flatten()).backward()
        optimizer.step()
    text, draws, total = read_text(validation=True), torch.Generator().manual_seed(99), 0.0
    with torch.no_grad():
        for _ in range(20):
            tokens, following = batch(text, draws, 16)
            total += F.cross_entropy(model(tokens).flatten(0, 1), following.flatten()).item()
    return total / 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=3e-3, help="default %(default)s")
    parser.add_argument("--longest", type=int, default=2000, help="leave out settings of more steps than this")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "moments_loss.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = ["| AdamW | " + " | ".join(DTYPES) + " |", "| --- |" + " --- |" * len(DTYPES)]
    for beta2, steps in SETTINGS:
        if steps > args.longest:
            continue
        losses = [loss_of(dtype, beta2, steps, args.lr) for dtype in DTYPES]
        cells = [f"{losses[0]:.3f}", *(f"{loss:.3f} ({loss / losses[0] - 1:+.1%})" for loss in losses[1:])]
        rows.append(f"| `beta2={beta2:g}`, {steps:,} steps | " + " | ".join(cells) + " |")
        print(rows[-1], file=sys.stderr, flush=True)
    head = "# moments_loss: validation loss of the demo's GPT with moments in fewer bits\n"
    setting = f"{date.today()}, {versions('cpu')}; AdamW at {args.lr:g}, one process\n"
    args.out.write_text("\n".join([head, setting, "`python benchmarks/moments_loss.py`\n", *rows]) + "\n")


if __name__ == "__main__":
    main()
