"""Host time of a step beside FSDP2's: what a rank's Python and launches cost when the computation is tiny.

One process is rank 0 of a group on torch's fake backend, so that neither other ranks nor a network are measured. The
fake collectives copy once for each rank, which real ones do not: their time is subtracted. The cost is the time of a
step less that of the same model without sharding in the same round (median over interleaved rounds), per unit.

    python benchmarks/host_cost.py --ranks 8,512
    python benchmarks/host_cost.py --device cuda
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measuring import Rounds, child, finish, give, interleaved, markdown, ratio, timed
from peers import GPT, Step, adamw, plain_step
from torch.testing._internal.distributed.fake_pg import FakeStore

DEPTH, WIDTH = 24, 64


class Backend:
    """Adds up the time inside of the backend's collectives, in its context."""

    NAMES = ("all_gather_single", "reduce_scatter_single", "_allgather_base", "_reduce_scatter_base")

    def __init__(self) -> None:
        self.seconds = 0.0
        # As the class has them: what getattr returns would not be bound to an instance when it is put back.
        own = vars(dist.ProcessGroup)
        self._real = {name: own[name] for name in self.NAMES if name in own}

    def __enter__(self) -> Backend:
        for name, real in self._real.items():
            setattr(dist.ProcessGroup, name, self._timed(real))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(dist.ProcessGroup, name, real)

    def _timed(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return real(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return call


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


def measure(ranks: int, device: torch.device, rounds: int) -> Rounds:
    """Microseconds per step and unit in each round, by peer."""
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

    def time_of(step: Step) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        backend.seconds = 0.0
        return timed(partial(step, ids, ids))() - backend.seconds

    with Backend() as backend:
        found = interleaved({name: partial(time_of, step) for name, step in peers.items()}, rounds, warm_up=3)
    base = found.pop("plain")
    return {
        name: [(all_of_it - without) / DEPTH * 1e6 for all_of_it, without in zip(seconds, base, strict=True)]
        for name, seconds in found.items()
    }


def in_process(ranks: int, device: str, rounds: int) -> Rounds:
    """``measure`` in a process of its own."""
    options = {"--ranks": ranks, "--device": device, "--rounds": rounds}
    words = [str(word) for pair in options.items() for word in pair]
    found: Rounds = child("host_cost.py", "--worker", *words)
    return found


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
        give(measure(int(args.ranks), torch.device(args.device), args.rounds))
        return
    found = {ranks: in_process(int(ranks), args.device, args.rounds) for ranks in args.ranks.split(",")}
    rows = []
    for name in next(iter(found.values())):
        rows.append([name, *(f"{median(costs[name]):.0f}" for costs in found.values())])
    for ours, theirs in (("lt_zero, stage 2", "FSDP2, weights kept"), ("lt_zero, stage 3", "FSDP2")):
        ratios = [f"{ratio(costs[ours], costs[theirs]).median:.2f}" for costs in found.values()]
        rows.append([f"{ours} / {theirs}", *ratios])
    head = f"GPT of {DEPTH} blocks, width {WIDTH}, AdamW (fused), torch {torch.__version__}"
    table = markdown(["host us per step and unit", *(f"{ranks} ranks" for ranks in found)], rows)
    finish([head, "", *table], args.out)


if __name__ == "__main__":
    main()
