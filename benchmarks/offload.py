"""A model whose states do not fit: one rank, optimizer and parameters in files. Memory, time and disk speed.

    python benchmarks/offload.py [--depth 31] [--width 1024] [--steps 3] [--path /tmp] [--out results.md]

Each case runs in a process of its own, so that its peak memory is its own. "raw" is what plain reads and writes of the
same blocks reach in the same process, right before and after. Beside backward or the next forward, the step's reads and
writes hide behind computing: there the time of all three phases counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from measuring import child, finish, give, markdown, memory

CASES: dict[str, dict[str, Any]] = {
    "in memory": {},
    "optimizer in files": {"optimizer": True},
    "optimizer and parameters in files": {"optimizer": True, "params": True},
    "the same, checksums": {"optimizer": True, "params": True, "checksum": True},
    "the same, beside the next forward": {"optimizer": True, "params": True, "overlap": True},
    "no clipping: in memory": {"clip": False},
    "no clipping: optimizer and parameters in files": {
        "optimizer": True,
        "params": True,
        "clip": False,
        "overlap": False,
    },
    "no clipping: the same, beside backward": {"optimizer": True, "params": True, "clip": False},
    "no clipping: the same, checksums": {"optimizer": True, "params": True, "clip": False, "checksum": True},
}


def config_of(case: dict[str, Any], path: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 3, "stage3_max_reuse_distance": 0}
    if case.get("optimizer"):
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": path, "overlap_step": case.get("overlap", "auto")}
    if case.get("params"):
        zero["offload_param"] = {"device": "nvme", "nvme_path": path, "max_in_cpu": 0, "buffer_count": 1}
    return {"zero_optimization": zero, "aio": {"checksum": case.get("checksum", False)}}


def run(name: str, depth: int, width: int, steps: int, path: str) -> dict[str, Any]:
    import torch
    from peers import GPT, batches

    import lt_zero
    from lt_zero.offload.nvme_store import probe

    bare = memory()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    with torch.device("meta"):
        model = GPT(depth, width)
    engine = lt_zero.shard(model, lt_zero.ZeroConfig.of(config_of(CASES[name], path)), torch.device("cpu"))
    sharded = lt_zero.ShardedOptimizer(engine, torch.optim.AdamW(model.parameters(), lr=1e-4))
    data = batches(0)
    tier = getattr(engine.offload_manager, "optim", None)  # None: it does not offload
    raw = [probe(tier.folder, tier.pool, 512 << 20)] if tier is not None else []
    phases: list[tuple[float, float, float]] = []
    losses, clips = [], CASES[name].get("clip", True)
    for _ in range(steps + 1):  # the first makes the optimizer's states
        start = time.perf_counter()
        loss = model(*(part[:1] for part in next(data)))  # one sequence: activations are not what this is about
        with nullcontext() if clips else sharded.overlap.beside_backward():
            loss.backward()
        middle = time.perf_counter()
        if clips:
            sharded.grads.clip_norm(1.0)
        clipped = time.perf_counter()
        sharded.optimizer.step()
        end = time.perf_counter()
        sharded.optimizer.zero_grad()
        losses.append(loss.item())
        phases.append((middle - start, clipped - middle, end - clipped))
    raw += [probe(tier.folder, tier.pool, 512 << 20)] if tier is not None else []
    alone = tier is not None and (clips or CASES[name].get("overlap") is False) and not CASES[name].get("overlap")
    elements = (
        sum(b.shard_range[1] - b.shard_range[0] for b in engine.buckets) if alone else 0
    )  # the disk works for the step only
    reads, writes = 16 * elements, 12 * elements  # master, two moments; the gradient is read only
    compute, norm, step = (statistics.median(row[i] for row in phases[1:]) for i in range(3))
    found = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "peak": memory("VmHWM"),
        "bare": bare,
        "compute": compute,
        "norm": norm,
        "step": step,
        "steps": [row[2] for row in phases[1:]],
        "total": statistics.median(map(sum, phases[1:])),
        "loss": losses,
        "reads": reads / 1e9,
        "writes": writes / 1e9,
    }
    if alone:
        read, write = (statistics.mean(getattr(s, side) for s in raw) for side in ("read", "write"))
        found |= {"raw_read": read / 1e9, "raw_write": write / 1e9}
        found["limit"] = reads / read + writes / write  # reads and writes share the path
    return found


def measure(case: str, depth: int, width: int, steps: int, path: str) -> dict[str, Any]:
    """What ``run`` measures of a case, in a process of its own."""
    sizes = {"--depth": depth, "--width": width, "--steps": steps, "--path": path, "--run": case}
    found: dict[str, Any] = child("offload.py", *(str(word) for pair in sizes.items() for word in pair))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=31)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--path", default="/tmp")
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        give(run(args.run, args.depth, args.width, args.steps, args.path))
        return
    rows = []
    for case in args.cases:
        rows.append((case, measure(case, args.depth, args.width, args.steps, args.path)))
        print(case, rows[-1][1])
    finish(table(rows), args.out)


def table(rows: list[tuple[str, dict[str, Any]]]) -> list[str]:
    numel = rows[0][1]["parameters"]
    lines = [f"# Offload: {numel / 1e6:.0f}M parameters in fp32, AdamW, one rank, two threads", ""]
    head = ["", "peak RSS MB (bare process)", "forward + backward s", "norm s", "step s", "all s", "GB of the step"]
    cells = []
    for case, r in rows:
        speed, raw = "-", "-"
        if r["reads"]:
            speed = f"{(r['reads'] + r['writes']) / r['step']:.2f} = {r['limit'] / r['step']:.0%} of raw"
            raw = f"{r['raw_read']:.2f} / {r['raw_write']:.2f}"
        resident = f"{r['peak']:.0f} ({r['bare']:.0f})"
        times = [f"{r[part]:.2f}" for part in ("compute", "norm", "step", "total")]
        moved = f"{r['reads']:.1f} + {r['writes']:.1f}" if r["reads"] else "-"
        cells.append([case, resident, *times, moved, speed, raw])
    lines += markdown([*head, "GB/s", "raw r / w"], cells)
    for clips, what in ((True, "with"), (False, "without")):
        losses = [r["loss"] for case, r in rows if CASES[case].get("clip", True) is clips]
        same = all(loss == losses[0] for loss in losses)
        lines += ["", f"Losses of all cases {what} clipping are {'bitwise equal' if same else 'NOT equal'}."]
    return lines


if __name__ == "__main__":
    main()
