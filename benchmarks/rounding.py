"""Time of an optimizer step with bf16 master weights: to the nearest beside stochastic rounding, in one process.

    python benchmarks/rounding.py       # benchmarks/results/rounding_cpu.md
    LT_ZERO_NATIVE=0 python benchmarks/rounding.py --out /dev/stdout    # without the kernel

Both kinds of steps take turns. Times are medians of the process's CPU time on one thread, which other processes on the
machine disturb less than the time on the wall.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from measuring import ROOT, cpu_name, versions
from torch import nn

import lt_zero

LAYERS, WIDTH, ROUNDS = 8, 1024, 15
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "AdamW, fp32 moments": ("AdamW", {"lr": 1e-4}, {}),
    "AdamW, bf16 moments": ("AdamW", {"lr": 1e-4}, {"optimizer_states": {"dtype": "bf16"}}),
    "SGD with momentum": ("SGD", {"lr": 1e-4, "momentum": 0.9}, {}),
}


def stepper(kind: str, options: dict[str, Any], keys: dict[str, Any], stochastic: bool) -> Callable[[], float]:
    """A function that takes a step and returns the seconds of the optimizer's part."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    low = {"enabled": True, "bf16_master_weights_and_grads": True, "stochastic_rounding": stochastic}
    config = {"log_level": "error", "zero_optimization": {"stage": 1}, "bf16": low, **keys}
    engine = lt_zero.shard(model, lt_zero.ZeroConfig.of(config))
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    lt_zero.ShardedOptimizer(engine, optimizer)
    x = torch.randn(2, WIDTH, dtype=torch.bfloat16)

    def step() -> float:
        optimizer.zero_grad()
        model(x).float().sum().backward()
        start = time.process_time()
        optimizer.step()
        return time.process_time() - start

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "rounding_cpu.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = ["| step | to the nearest | stochastic | ratio |", "| --- | --- | --- | --- |"]
    for name, case in CASES.items():
        steps = [stepper(*case, stochastic) for stochastic in (False, True)]
        times = [[step() for step in steps] for _ in range(ROUNDS + 2)][2:]  # the first ones make states
        nearest, stochastic = (statistics.median(column) for column in zip(*times, strict=True))
        cells = (f"{nearest * 1e3:.1f} ms", f"{stochastic * 1e3:.1f} ms", f"{stochastic / nearest:.2f}")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    head = f"# rounding: a step of {LAYERS * WIDTH**2 / 1e6:.1f} million bf16 master weights\n"
    setting = f"{date.today()}, {versions('cpu')}, {cpu_name()}; CPU time on one thread, medians of {ROUNDS}\n"
    args.out.write_text("\n".join([head, setting, "`python benchmarks/rounding.py`\n", *rows]) + "\n")


if __name__ == "__main__":
    main()
