"""Bytes of model states per rank, for 1 to 1024 simulated ranks, against the formulas of the ZeRO paper.

    python benchmarks/zero_memory.py [--ranks 1024] [--numel 16e6] [--out benchmarks/results/zero_memory]

Each point is a real engine on rank 0 of torch's "fake" process group, whose collectives return at once: buckets are
allocated, a step is taken, and the storages that exist are counted. Only the values of the weights are nonsense. The
table for 7.5e9 parameters is planned, not allocated.

The paper (arXiv:1910.02054, figure 1) counts 2 bytes of weights, 2 of gradients and 12 of optimizer states (fp32 master
weights and Adam's moments) per parameter. So gradients are 16-bit here (``data_types.grad_accum_dtype``), and stage 1
accumulates two micro-batches, in which it holds whole gradients; the fp32 accumulators of the default are shown, too.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import lt_zero
from lt_zero import Sizes, ZeroConfig, estimate
from lt_zero.config.precision import dtype_policy
from lt_zero.planning.check import measured
from lt_zero.planning.forecast import STATES

MODE = "bf16-mixed"
PAPER_GB = (120.0, 31.4, 16.6, 1.9)  # 7.5e9 parameters on 64 ranks


def paper(stage: int, world: int) -> float:
    """Bytes per parameter."""
    weights, gradients, states = (2 / world if stage == 3 else 2, 2 / world if stage >= 2 else 2, 12 / world)
    return weights + gradients + (states if stage else 12)


def config_of(stage: int, low: bool) -> ZeroConfig:
    """``low``: 16-bit accumulators."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return ZeroConfig.of({"zero_optimization": zero, **({"data_types": {"grad_accum_dtype": "bf16"}} if low else {})})


class Row(nn.Module):
    """Layers in a row, 4 to a block, no biases: every parameter is a matrix."""

    def __init__(self, numel: int, width: int = 1024) -> None:
        super().__init__()
        blocks = max(2, round(numel / (4 * width * width)))
        layers = ([nn.Linear(width, width, bias=False) for _ in range(4)] for _ in range(blocks))
        self.blocks = nn.ModuleList(nn.Sequential(*block) for block in layers)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def states_per_parameter(stage: int, world: int, low: bool, numel: int) -> float:
    """Of an engine on rank 0: the most that model states take in an accumulation window, after backward or a step."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if world > 1:
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    torch.manual_seed(0)
    model, config = Row(numel), config_of(stage, low)
    total = sum(p.numel() for p in model.parameters())
    engine = lt_zero.shard(model, config, policy=dtype_policy(config, MODE))
    optimizer = torch.optim.AdamW(model.parameters())
    sharded = lt_zero.ShardedOptimizer(engine, optimizer)
    most = 0
    for _ in range(2):
        optimizer.zero_grad()
        for last in (False, True) if stage == 1 else (True,):
            engine.reducer.sync = last
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.ones(1, 1024)).float().mean().backward()
            most = max(most, states(measured(engine, [sharded])))
        optimizer.step()
        most = max(most, states(measured(engine, [sharded])))
    return most / total


def states(have: dict[str, int]) -> int:
    return sum(nbytes for kind, nbytes in have.items() if kind in STATES)


def planned_gb(stage: int, low: bool) -> float:
    """Of the paper's model."""
    windows = 2 if stage == 1 else 1
    sizes = Sizes(7_500_000_000, 200_000_000)
    cast = estimate(sizes, config_of(stage, low), 64, precision=MODE, accumulate_grad_batches=windows)
    return cast.model_states() / 1e9


def report(points: dict[tuple[int, int, bool], float], worlds: list[int], numel: int) -> str:
    head = [
        "| model states | paper | 16-bit accumulators | | fp32 accumulators (default) | |",
        "|---|---|---|---|---|---|",
    ]
    lines = ["7.5e9 parameters on 64 ranks, GB (1e9 bytes) per rank, planned:", "", *head]
    for stage, want in enumerate(PAPER_GB):
        low, wide = planned_gb(stage, True), planned_gb(stage, False)
        exact = paper(stage, 64) * 7.5
        lines.append(
            f"| stage {stage} | {want} | {low:.2f} | {low / exact - 1:+.1%} | {wide:.2f} | {wide / exact - 1:+.1%} |"
        )
    lines += ["", f"Bytes per parameter on rank 0 of N simulated ranks, {numel:,} parameters, counted:", ""]
    names = [f"stage {stage} {what}" for stage in range(4) for what in ("paper", "16-bit", "fp32")]
    lines += ["| N | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for world in worlds:
        cells = [
            f"{v:.3f}" for s in range(4) for v in (paper(s, world), points[s, world, True], points[s, world, False])
        ]
        lines.append(f"| {world} | " + " | ".join(cells) + " |")
    lines += ["", *(f"- {line}" for line in verdict(points, worlds)), ""]
    return "\n".join(lines)


def verdict(points: dict[tuple[int, int, bool], float], worlds: list[int]) -> list[str]:
    def worst(stage: int, low: bool) -> float:
        return max((points[stage, w, low] / paper(stage, w) - 1 for w in worlds), key=abs)

    replicated = max((worst(stage, True) for stage in range(3)), key=abs)
    return [
        f"Stages 0, 1, 2 with 16-bit accumulators: at most {replicated:+.2%} from the paper.",
        f"Stage 3 with fp32 accumulators: at most {worst(3, False):+.2%} from the paper. It keeps no 16-bit weights "
        f"beside the master weights, which pays for fp32 gradients; with 16-bit ones: {worst(3, True):+.2%} at most.",
    ]


def draw(points: dict[tuple[int, int, bool], float], worlds: list[int], path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no picture: matplotlib is not installed (pip install lt-zero[bench])")
        return
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for stage in range(4):
        axes.plot(worlds, [paper(stage, w) for w in worlds], color=f"C{stage}", label=f"stage {stage}, paper")
        counted = [points[stage, w, stage < 3] for w in worlds]
        axes.plot(worlds, counted, "o", color=f"C{stage}", label=f"stage {stage}, lt_zero")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="bytes of model states per parameter and rank")
    axes.legend(ncols=2, fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024, help="the most that are simulated; powers of 2 from 1 on")
    parser.add_argument("--numel", type=float, default=16e6, help="parameters of the counted model")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "zero_memory")
    args = parser.parse_args()
    os.environ["LT_ZERO_MEMORY_CHECK"] = "0"  # this host has room for one rank, not for all that are simulated
    worlds = [2**i for i in range(args.ranks.bit_length())]
    points: dict[tuple[int, int, bool], float] = {}
    for world in worlds:
        for stage, low in ((s, low) for s in range(4) for low in (True, False)):
            points[stage, world, low] = states_per_parameter(stage, world, low, int(args.numel))
        print(f"{world} rank(s) done", flush=True)
    numel = sum(p.numel() for p in Row(int(args.numel)).parameters())
    text = report(points, worlds, numel)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    source = "`python benchmarks/zero_memory.py`, torch " + torch.__version__
    args.out.with_suffix(".md").write_text(f"# Model states per rank\n\n{source}\n\n{text}")
    print(text)
    draw(points, worlds, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
