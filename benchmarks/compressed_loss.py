"""What compression costs in loss: the demo's GPT on the demo's text after 300 steps of AdamW on 2 nodes of 2 ranks.

    python benchmarks/compressed_loss.py            # benchmarks/results/compressed_loss.md

Each setting starts from the same weights and sees the same batches. The learning rate is warmed up over 30 steps.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring import ROOT, versions
from torch import Tensor
from torch.nn import functional as F

import lt_zero
from lt_zero.optim import build_optimizer

sys.path.insert(0, str(ROOT / "examples"))
from corpus import read_text  # noqa: E402
from gpt import GPT  # noqa: E402

RANKS, PER_NODE, CONTEXT, WARM_UP = 4, 2, 64, 30
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": PER_NODE}


def compressed(algorithm: str, **keys: Any) -> dict[str, Any]:
    return {"gradient_compression": {"algorithm": algorithm, **keys}}


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


# Name -> stages, configuration. The first is what the others are compared with.
SETTINGS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "dense": ((0, 1, 2, 3), {}),
    "2bit": ((0, 2), compressed("2bit")),
    "2bit between nodes": ((0, 2), compressed("2bit", hierarchical_compress=True)),
    "2bit, warmup_steps 100": ((0, 2), compressed("2bit", warmup_steps=100)),
    "1bit": ((0, 2), compressed("1bit")),
    "1bit, warmup_steps 100": ((0, 2), compressed("1bit", warmup_steps=100)),
    "topk 1 %, warmup_steps 100": ((0, 2), compressed("topk", warmup_steps=100)),
    "OneBitAdam, freeze_step 100": ((0, 1), optimizer("OneBitAdam", freeze_step=100)),
    "ZeroOneAdam": ((0,), optimizer("ZeroOneAdam", var_freeze_step=200)),
    "zero_quantized_weights": ((3,), {"zero_optimization": {"zero_quantized_weights": True}}),
    "zero_quantized_gradients": ((2, 3), {"zero_optimization": {"zero_quantized_gradients": True}}),
    "ZeRO++, all three": ((3,), {"zero_optimization": QUANTIZED}),
}


def batch(text: Tensor, draws: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(0, len(text) - CONTEXT - 1, (rows,), generator=draws).tolist()
    found = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
    return found[:, :-1], found[:, 1:]


def loss_of(stage: int, config: dict[str, Any], args: argparse.Namespace) -> float:
    """The validation loss after training; in a process group."""
    torch.manual_seed(0)
    model = GPT(depth=2, width=96, context=CONTEXT)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **config.get("zero_optimization", {})}
    engine = lt_zero.shard(model, lt_zero.ZeroConfig.of({**config, "zero_optimization": zero, "log_level": "error"}))
    block = config.get("optimizer", {"type": "AdamW", "params": {}})
    optimizer = build_optimizer(block["type"], block["params"], model.parameters())
    lt_zero.ShardedOptimizer(engine, optimizer)
    text, draws = read_text(validation=False), torch.Generator().manual_seed(dist.get_rank())
    for step in range(args.steps):
        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, (step + 1) / WARM_UP)
        optimizer.zero_grad()
        tokens, following = batch(text, draws, 8)
        F.cross_entropy(model(tokens).flatten(0, 1), following.flatten()).backward()
        optimizer.step()
    engine.finish_steps()
    text, draws, total = read_text(validation=True), torch.Generator().manual_seed(99), 0.0
    with torch.no_grad():
        for _ in range(20):
            tokens, following = batch(text, draws, 16)
            total += F.cross_entropy(model(tokens).flatten(0, 1), following.flatten()).item()
    return total / 20


def work(rank: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ["LT_ZERO_NODE_RANK"] = str(rank // PER_NODE)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    stages = (0, 1, 2, 3)
    rows = ["| sent | " + " | ".join(f"stage {stage}" for stage in stages) + " |", "| --- |" + " --- |" * len(stages)]
    plain: dict[int, float] = {}
    for name, (fitting, config) in SETTINGS.items():
        if args.only and name != "dense" and args.only not in name:
            continue
        cells = []
        for stage in stages:
            loss = loss_of(stage, config, args) if stage in fitting else 0.0
            cells.append(f"{loss:.3f} ({loss / plain.setdefault(stage, loss) - 1:+.1%})" if loss else "")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
        print(rows[-1], file=sys.stderr) if rank == 0 else None
    if rank == 0:
        head = "# compressed_loss: validation loss of the demo's GPT where less is sent\n"
        setting = f"{date.today()}, {versions('cpu')}; {args.steps} steps of AdamW at {args.lr:g}, 2 nodes of 2 ranks\n"
        args.out.write_text("\n".join([head, setting, "`python benchmarks/compressed_loss.py`\n", *rows]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="default %(default)s")
    parser.add_argument("--lr", type=float, default=2e-3, help="default %(default)s")
    parser.add_argument("--only", default="", help="settings with this in their name")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "compressed_loss.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, args), nprocs=RANKS)


if __name__ == "__main__":
    main()
