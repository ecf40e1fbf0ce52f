"""What fewer bits in training states cost in loss: the demo's GPT on the demo's text, in one process.

    python benchmarks/moments_loss.py               # moments: benchmarks/results/moments_loss.md
    python benchmarks/moments_loss.py --of masters  # master weights: benchmarks/results/masters_loss.md

All runs start from the same weights and see the same batches. The learning rate is warmed up over 30 steps and falls
along a cosine to a tenth.
"""

from __future__ import annotations

import argparse
import math
import sys
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compressed_loss import CONTEXT, GPT, WARM_UP, batch, read_text
from measuring import ROOT, versions
from torch.nn import functional as F

import lt_zero

LOW = {"enabled": True, "bf16_master_weights_and_grads": True}


class Setting(NamedTuple):
    """Training that every column of a table goes through."""

    beta2: float
    steps: int
    rate: float = 3e-3


class Table(NamedTuple):
    """Columns with their configurations; the first is what the others are compared with."""

    title: str
    columns: dict[str, dict[str, Any]]
    rows: tuple[Setting, ...]


TABLES = {
    "moments": Table(
        "moments in fewer bits",
        {dtype: {"optimizer_states": {"dtype": dtype}} for dtype in ("fp32", "bf16", "int8")},
        (Setting(0.95, 300), Setting(0.95, 2000), Setting(0.999, 300), Setting(0.999, 2000)),
    ),
    "masters": Table(
        "weights of bf16 in forward, and master weights",
        {
            "fp32": {"bf16": {"enabled": True}},
            "bf16, to the nearest": {"bf16": LOW},
            "bf16, stochastic": {"bf16": {**LOW, "stochastic_rounding": True}},
        },
        (Setting(0.95, 300), Setting(0.95, 2000), Setting(0.95, 300, 3e-4), Setting(0.95, 2000, 3e-4)),
    ),
}


def loss_of(config: dict[str, Any], setting: Setting) -> float:
    """The validation loss after training."""
    torch.manual_seed(0)
    model = GPT(depth=2, width=96, context=CONTEXT)
    engine = lt_zero.shard(
        model, lt_zero.ZeroConfig.of({"log_level": "error", **config, "zero_optimization": {"stage": 0}})
    )
    rate, steps = setting.rate, setting.steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, setting.beta2), weight_decay=0.1)
    lt_zero.ShardedOptimizer(engine, optimizer)
    text, draws = read_text(validation=False), torch.Generator().manual_seed(0)
    for step in range(steps):
        progress = max(0, step - WARM_UP) / (steps - WARM_UP)
        falling = 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
        optimizer.param_groups[0]["lr"] = rate * falling * min(1.0, (step + 1) / WARM_UP)
        optimizer.zero_grad()
        tokens, following = batch(text, draws, 8)
        F.cross_entropy(model(tokens).float().flatten(0, 1), following.flatten()).backward()
        optimizer.step()
    text, draws, total = read_text(validation=True), torch.Generator().manual_seed(99), 0.0
    with torch.no_grad():
        for _ in range(20):
            tokens, following = batch(text, draws, 16)
            total += F.cross_entropy(model(tokens).float().flatten(0, 1), following.flatten()).item()
    return total / 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=TABLES, default="moments", help="what has fewer bits; default %(default)s")
    parser.add_argument("--longest", type=int, default=2000, help="leave out settings of more steps than this")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/<of>_loss.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table, out = TABLES[args.of], args.out or ROOT / "benchmarks" / "results" / f"{args.of}_loss.md"
    rows = [f"| AdamW | {' | '.join(table.columns)} |", "| --- |" + " --- |" * len(table.columns)]
    for setting in table.rows:
        if setting.steps > args.longest:
            continue
        losses = [loss_of(config, setting) for config in table.columns.values()]
        cells = [f"{losses[0]:.3f}", *(f"{loss:.3f} ({loss / losses[0] - 1:+.1%})" for loss in losses[1:])]
        name = f"`beta2={setting.beta2:g}`, `lr={setting.rate:g}`, {setting.steps:,} steps"
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
        print(rows[-1], file=sys.stderr, flush=True)
    head = f"# {args.of}_loss: validation loss of the demo's GPT with {table.title}\n"
    command = f"python benchmarks/moments_loss.py --of {args.of}"
    text = [head, f"{date.today()}, {versions('cpu')}; one process\n", f"`{command}`\n", *rows]
    out.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
