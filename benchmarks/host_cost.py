"""Host time of a step beside FSDP2's: what a rank's Python and launches cost when the computation is tiny.

One process is rank 0 of a group on torch's fake backend, so that neither other ranks nor a network are measured. The
fake collectives copy once for each rank, which real ones do not: their time is subtracted. The cost is the time of a
step less that of the same model without sharding (median over interleaved rounds), per unit.

    python benchmarks/host_cost.py --ranks 8,512
    python benchmarks/host_cost.py --device cuda
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from peers import GPT, plain_step
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

DEPTH, WIDTH = 24, 64
Step = Callable[[Tensor, Tensor], Tensor]


class Backend:
    """Adds up the time inside of the backend's collectives."""

    seconds = 0.0

    @classmethod
    def install(cls) -> None:
        for name in ("all_gather_single", "reduce_scatter_single", "_allgather_base", "_reduce_scatter_base"):
            if hasattr(dist.ProcessGroup, name):
                setattr(dist.ProcessGroup, name, cls._timed(getattr(dist.ProcessGroup, name)))

    @classmethod
    def _timed(cls, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return real(*args, **kwargs)
            finally:
                cls.seconds += time.perf_counter() - start

        return call


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def fsdp2(device: torch.device, reshard: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = GPT(DEPTH, WIDTH).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    return plain_step(model, adamw(model))


def lt_zero(device: torch.device, stage: int) -> Step:
    import lt_zero

    block = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    model = GPT(DEPTH, WIDTH)
    engine = lt_zero.shard(model, {"zero_optimization": block}, device)
    optimizer = adamw(model)
    lt_zero.ShardedOptimizer(engine, optimizer)
    return plain_step(model, optimizer)


def measure(ranks: int, device: torch.device, rounds: int) -> dict[str, float]:
    """Microseconds per step and unit, by peer."""
    Backend.install()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    plain = GPT(DEPTH, WIDTH).to(device)
    peers = {
        "plain": plain_step(plain, adamw(plain)),
        "FSDP2, weights kept": fsdp2(device, reshard=False),
        "lt_zero, stage 2": lt_zero(device, 2),
        "FSDP2": fsdp2(device, reshard=True),
        "lt_zero, stage 3": lt_zero(device, 3),
    }
    ids = torch.zeros(1, 8, dtype=torch.long, device=device)
    times: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(rounds + 3):
        for name, step in peers.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            Backend.seconds, start = 0.0, time.perf_counter()
            step(ids, ids)
            if number >= 3:
                times[name].append(time.perf_counter() - start - Backend.seconds)
    base = median(times.pop("plain"))
    return {name: (median(seconds) - base) / DEPTH * 1e6 for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,512", help="sizes of the group, one process each")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write the table to this file")
    args = parser.parse_args()
    if args.worker:
        torch.set_num_threads(1)
        for name, cost in measure(int(args.ranks), torch.device(args.device), args.rounds).items():
            print(f"{name}\t{cost:.1f}")
        return
    found: dict[str, dict[str, float]] = {}
    for ranks in args.ranks.split(","):
        command = [sys.executable, "-W", "ignore", __file__, "--worker", "--ranks", ranks, "--device", args.device]
        output = subprocess.run([*command, "--rounds", str(args.rounds)], capture_output=True, text=True, check=True)
        lines = [line.split("\t") for line in output.stdout.splitlines() if "\t" in line]
        found[ranks] = {name: float(cost) for name, cost in lines}
    rows = [f"| host us per step and unit | {' | '.join(f'{ranks} ranks' for ranks in found)} |"]
    rows.append("|---|" + "---|" * len(found))
    for name in next(iter(found.values())):
        rows.append(f"| {name} | {' | '.join(f'{costs[name]:.0f}' for costs in found.values())} |")
    for ours, theirs in (("lt_zero, stage 2", "FSDP2, weights kept"), ("lt_zero, stage 3", "FSDP2")):
        ratios = [f"{costs[ours] / costs[theirs]:.2f}" for costs in found.values()]
        rows.append(f"| {ours} / {theirs} | {' | '.join(ratios)} |")
    head = f"GPT of {DEPTH} blocks, width {WIDTH}, AdamW (fused), torch {torch.__version__}"
    text = "\n".join([head, "", *rows])
    print(text)
    if args.out is not None:
        args.out.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
