"""Peak memory and time of a step with no, full, and as little recomputation as a memory budget allows.

    python benchmarks/memory_budget.py [--depth 12] [--width 256] [--budget 0.6] [--rounds 5]

One process trains one GPT in fp32 for each case. Bytes are those of live_bytes.py over a step after the choice:
activations, gradients and temporary tensors, without weights and optimizer states.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
from live_bytes import live_bytes
from measuring import give, markdown
from peers import GPT, batches

import lt_zero

NONE, FULL, BUDGET = "no recomputation", "full recomputation", "lt_zero, memory_budget"
_STEPS = 3  # of which the first two measure


def measure(block: dict[str, Any], depth: int, width: int, rounds: int) -> tuple[float, float]:
    """MB at most in a step, and seconds of a step."""
    torch.manual_seed(0)
    model = GPT(depth, width)
    engine = lt_zero.shard(model, {"zero_optimization": {"stage": 2}, "activation_checkpointing": block})
    optimizer = torch.optim.AdamW(model.parameters())
    lt_zero.ShardedOptimizer(engine, optimizer)
    data, seconds = batches(0), list[float]()

    def step() -> None:
        start = time.perf_counter()
        model(*next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)

    for _ in range(_STEPS):
        step()
    with live_bytes() as meter:
        step()
    seconds.clear()
    for _ in range(rounds):
        step()
    engine.detach()
    return meter.peak / 1e6, statistics.median(seconds)


def cases(budget: float) -> dict[str, dict[str, Any]]:
    """Blocks ``activation_checkpointing``."""
    return {NONE: {"mode": "none"}, FULL: {"mode": "full"}, BUDGET: {"memory_budget": budget}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--budget", type=float, default=0.6, help="share of the peak without recomputation")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {name: measure(block, args.depth, args.width, args.rounds) for name, block in cases(args.budget).items()}
    rows = [[name, f"{peak:.1f}", f"{1000 * seconds:.0f}"] for name, (peak, seconds) in found.items()]
    print("\n".join(markdown(["", "MB at most in a step", "ms per step"], rows)))
    give({name: {"peak": peak, "seconds": seconds} for name, (peak, seconds) in found.items()})


if __name__ == "__main__":
    main()
