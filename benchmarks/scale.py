"""Step time and peak memory of models of 10M to 400M parameters on 1 to 8 ranks, and the start-up of many units.

    python benchmarks/scale.py --out benchmarks/results/scale_cpu.md
    python benchmarks/scale.py --ranks 1,2 --sizes 10M,30M --parts steps
    python benchmarks/scale.py --parts start-up --units 1000
    python benchmarks/scale.py --parts many --out benchmarks/results/rank_of_many_cpu.md

Steps: the GPT of step_time.py, fp32, ranks of one thread each on this machine. The peers of a combination take turns,
and ratios to DDP are taken within a round. What the package's estimate says does not fit into memory is left out, and
peers that do not fit beside each other take turns with DDP in smaller groups. A step has few tokens, so that all can be
measured in minutes: communication and the optimizer weigh more than in a real run.

Start-up: blocks of 50 layers with 4 inputs and 4 outputs, 100 parameters each. From the built module to one that can be
trained (planning, layout, memory checks, buffers, hooks, the optimizer), then the first two steps. Two ranks over gloo,
and rank 0 of 512 over torch's fake backend (lt_zero). If other programs run, CPU seconds tell more.

Many: what a rank of hundreds and of thousands does for set-up, saves and loads (rank_of_many.py).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import step_time
import torch
import torch.distributed as dist
from measuring import child, cpu_name, finish, give, markdown, ratio, result_of, versions
from peers import GPT, adamw, batches, plain_step, worker
from step_time import Peer
from torch import Tensor, nn

STAGES = {f"lt_zero-{stage}": {"stage": stage} for stage in range(4)}
RELEASES = {"lt_zero-3-release": {"stage": 3, "stage3_max_reuse_distance": 0}}  # as FSDP2 does after forward
PEERS = ["ddp", "fsdp2", *STAGES, *RELEASES]
STARTS = ["ddp", "fsdp2", *STAGES, "lt_zero-3-meta", "lt_zero-3-init"]
LAYERS = 50  # of a block of the start-up's model
TIMES = ["module", "start-up", "first step", "second step"]
MANY = [512, 4096]  # ranks
GB = 1e9


class Size(NamedTuple):
    """A GPT, and the tokens of a rank's micro-batch, which is one sequence."""

    depth: int
    width: int
    tokens: int = 32


SIZES = {"10M": Size(4, 384), "30M": Size(8, 512), "100M": Size(14, 768), "400M": Size(24, 1152)}
SIZES["tiny"] = Size(2, 64)  # to try this script


# ---- steps: what fits ------------------------------------------------------------------------------------------------


def needs(size: Size, ranks: int) -> dict[str, float]:
    """Bytes that the ranks of each peer need together, by the package's estimate.

    DDP holds what stage 0 does and buckets of gradients, FSDP2 what a releasing stage 3 does. Each rank builds the
    whole model.
    """
    from lt_zero import estimate

    with torch.device("meta"):
        model = GPT(size.depth, size.width)
    whole = 4.0 * sum(p.numel() for p in model.parameters())  # fp32
    found: dict[str, float] = {}
    for name, block in {**STAGES, **RELEASES}.items():
        cast = estimate(model, {"zero_optimization": block}, ranks, device="cpu", saves=False)
        built = ranks * whole * (1 + 1 / ranks)
        found[name] = max(cast.node("host"), built) + ranks * 0.1 * GB
    return {"ddp": found["lt_zero-0"] + ranks * whole, "fsdp2": found["lt_zero-3-release"], **found}


def groups(needed: Mapping[str, float], room: float, reference: str = "ddp") -> list[list[str]]:
    """Peers that are alive together, each group within ``room``; with the reference where it fits, too.

    >>> groups({"ddp": 4, "a": 3, "b": 2, "c": 5, "d": 9}, 8)
    [['ddp', 'a'], ['ddp', 'b'], ['c']]
    """
    others = [name for name in needed if name != reference and needed[name] <= room]
    base = needed[reference]
    beside = [name for name in others if base + needed[name] <= room]
    found: list[list[str]] = []
    for name in beside:
        if found and sum(needed[peer] for peer in found[-1]) + needed[name] <= room:
            found[-1].append(name)
        else:
            found.append([reference, name])
    if not found and base <= room:
        found.append([reference])
    return found + [[name] for name in others if name not in beside]


# ---- steps: measuring ------------------------------------------------------------------------------------------------


class Forked:
    """A rank that is forked from a process with all imports: those of 8 ranks would take a minute for each peer."""

    def __init__(
        self, command: list[str], *, env: dict[str, str], pass_fds: Iterable[int], stdout: Any, **_: Any
    ) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(
            [
                "torch._dynamo",
                "torch.distributed.fsdp",
                "lt_zero.training.build",
                "lt_zero.core.step.sharded_optimizer",
                "step_time",
            ]
        )
        connections = [Connection(os.dup(descriptor)) for descriptor in pass_fds]
        self._process = context.Process(target=_forked, args=(connections[0], env, stdout.name), daemon=True)
        self._process.start()

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def _forked(connection: Connection, env: dict[str, str], log: str) -> None:
    os.environ.update(env)
    with open(log, "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    model = GPT(1, 64)  # one step, so that pages of the libraries do not count as the peer's memory
    plain_step(model, adamw(model))(*next(batches(0, 1, 8)))
    worker(connection.fileno())


def measure_group(names: list[str], args: argparse.Namespace) -> list[Peer]:
    """Let these peers take turns."""
    peers = [Peer(name, launch=Forked) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        try:
            step_time.warm_up(peers, args, Path(folder))
            for _ in range(args.rounds):
                for peer in peers:
                    peer.attempt(lambda: peer.measure(args.steps))  # noqa: B023 - called at once
        finally:
            for peer in peers:
                peer.stop()
    return peers


def cells(name: str, needed: float, found: list[list[Peer]]) -> tuple[str, str]:
    """Step time relative to DDP, or in ms for DDP and where DDP did not fit; and MB of memory per rank."""
    for group in found:
        known = {peer.name: peer for peer in group if not peer.error}
        if name in known:
            peer, base = known[name], known.get("ddp")
            alone = f"{1000 * median(peer.seconds):.0f} ms"
            relative = alone if base in (None, peer) else f"{ratio(peer.seconds, base.seconds).median:.2f}"
            return relative, f"{peer.memory:.0f}"
        if any(peer.name == name for peer in group):
            return "failed", "failed"
    return f"needs {needed / GB:.0f} GB", "-"


def steps(args: argparse.Namespace) -> list[str]:
    """The two tables: step times and memory."""
    from lt_zero.common.host_memory import host_memory

    deadline = time.monotonic() + 60 * args.minutes
    names = args.peers.split(",")
    times = list[list[str]]()
    memories = list[list[str]]()
    for label in args.sizes.split(","):
        for ranks in map(int, args.ranks.split(",")):
            size, room = SIZES[label], 0.9 * host_memory().nbytes
            needed = {name: value for name, value in needs(size, ranks).items() if name in ("ddp", *names)}
            words = {"depth": size.depth, "width": size.width, "ranks": ranks, "sequences": 1, "length": size.tokens}
            words |= {"rounds": args.rounds, "steps": 1, "warmup": 2}
            options = step_time.parse([part for key, value in words.items() for part in (f"--{key}", str(value))])
            found: list[list[Peer]] = []
            for group in groups(needed, room) if time.monotonic() < deadline else ():
                print(f"{label}, {ranks} ranks: {', '.join(group)}", file=sys.stderr)
                found.append(measure_group(group, options))
            both = [cells(name, needed[name], found) for name in names]
            if time.monotonic() >= deadline and not found:
                both = [("not measured: no time left", "-")] * len(names)
            times.append([label, str(ranks), *(time for time, _ in both)])
            memories.append([label, str(ranks), *(memory for _, memory in both)])
    head = ["parameters", "ranks", *names]
    title = "Step time relative to DDP in the same round (median); of DDP, or where it did not fit, ms:"
    return [title, "", *markdown(head, times), "", "Peak memory, MB per rank:", "", *markdown(head, memories), ""]


# ---- start-up --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Layers in a row, with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def many(units: int) -> nn.Module:
    """A model of so many blocks."""
    return nn.Sequential(*[Block() for _ in range(units)])


def started(peer: str, units: int) -> tuple[dict[str, list[float]], Callable[[], None]]:
    """Build the model and prepare it for training; seconds and CPU seconds of both, and a function for a step."""
    from lt_zero import Init, initialize

    fused_adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    kind, *variant = peer.split("-")
    config = {"zero_optimization": {"stage": int((variant or "0")[0]), "stage3_param_persistence_threshold": 0}}
    context = {"meta": torch.device("meta"), "init": Init(config=config)} if kind == "lt_zero" else {}
    found: dict[str, list[float]] = {}
    with timer(found, "module"), context.get(variant[-1] if variant else "", nullcontext()):
        model = many(units)
    x = torch.randn(2, 4)
    with timer(found, "start-up"):
        if kind == "lt_zero":
            engine, *_ = initialize(model=model, optimizer=fused_adamw, config=config)

            def step() -> None:
                engine.backward(engine(x).mean())
                engine.step()

            return found, step
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        elif kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for block in model.children():
                fully_shard(block)  # type: ignore[call-overload]
            fully_shard(model)
        optimizer = fused_adamw(model.parameters())

    def plain() -> None:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return found, plain


class timer:  # noqa: N801 - reads as a function
    """Context that notes its seconds and this process's CPU seconds under a name."""

    def __init__(self, found: dict[str, list[float]], name: str) -> None:
        self._found, self._name = found, name

    def __enter__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self._found[self._name] = [time.perf_counter() - self._start[0], time.process_time() - self._start[1]]


def start_worker(args: argparse.Namespace) -> None:
    """One rank: in a group of two over ``args.store``, or without one in a fake group of 512."""
    torch.set_num_threads(1)
    __import__("torch._dynamo")  # optimizers import it when first used
    if args.store:
        dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=2)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        os.environ["LT_ZERO_MEMORY_CHECK"] = "0"  # this machine has room for one rank, not for all that are simulated

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=512)
    found, step = started(args.start, args.units)
    give(found)  # if the steps are given up
    for name in TIMES[2:]:
        with timer(found, name):
            step()
    give(found)
    sys.stdout.flush()
    os._exit(0)  # tearing down groups one rank at a time may hang


def _given(late: subprocess.TimeoutExpired) -> dict[str, list[float]]:
    """What a rank gave before it was given up."""
    try:
        found: dict[str, list[float]] = result_of((late.stdout or b"").decode())
    except ValueError:
        return {}
    return found


def start_up(args: argparse.Namespace) -> list[str]:
    """The table of start-ups."""
    rows: list[list[str]] = []
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    words = ["--units", str(args.units), "--start"]
    for group in ("2, gloo", "512, fake"):
        for peer in [start for start in STARTS if start.startswith(tuple(args.peers.split(",")))]:
            if not peer.startswith("lt_zero") and "fake" in group:
                continue  # DDP fails there, and FSDP2 takes minutes to cut a block of tiny parameters into 512 pieces
            print(f"start-up on {group}: {peer}", file=sys.stderr)
            with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
                store = ["--store", f"{folder}/store"] if "gloo" in group else []
                ranks = [[*words, peer, *store, "--rank", str(rank)] for rank in range(2 if store else 1)]
                missing = ""
                try:
                    first, *_ = pool.map(
                        lambda rank: child("scale.py", *rank, environment=environment, limit=args.limit), ranks
                    )
                except subprocess.TimeoutExpired as error:
                    first, missing = _given(error), f"all: more than {args.limit:.0f}"
                except RuntimeError as error:
                    print(error, file=sys.stderr)
                    first, missing = {}, "failed"
                numbers = {name: f"{wall:.1f} ({cpu:.1f})" for name, (wall, cpu) in first.items()}
                rows.append([group, peer, *(numbers.get(name, missing) for name in TIMES)])
    head = ["ranks", "peer", *TIMES]
    title = f"Start-up with {args.units:,} units of {2 * LAYERS} parameters, seconds (CPU seconds of rank 0):"
    return [title, "", *markdown(head, rows), ""]


# ---- one rank of many ------------------------------------------------------------------------------------------------


def one_of_many(args: argparse.Namespace) -> list[str]:
    """The table of what one rank of many does, a column for each number of ranks."""
    found: dict[str, Any] = {}
    for mesh in (False, True):
        for ranks in MANY:
            print(f"one of {ranks}, {'mesh' if mesh else 'stage 3'}", file=sys.stderr)
            words = ["--ranks", str(ranks), "--rank", str(ranks // 3), "--divide", str(args.divide)]
            kind = "8 tensor ranks, 4 stages, stage 1" if mesh else "stage 3"
            found[f"{ranks:,} ranks: {kind}"] = child("rank_of_many.py", *words, *(["--mesh"] if mesh else []))
    rows = [
        [
            phase,
            *(
                f"{made['phases'][phase]['seconds']:.2f} s, {made['phases'][phase]['MiB']:.0f}"
                for made in found.values()
            ),
        ]
        for phase in next(iter(found.values()))["phases"]
    ]
    counts = {"parameters of the rank's model": "parameters", "tensors that it saves a part of": "entries"}
    counts |= {"boxes that it writes": "boxes", "boxes that it finds to load": "found", "boxes of all ranks": "of all"}
    counts |= {"files of the checkpoint": "files", "files that it looks at to load": "looked at"}
    counts["bytes of the manifest"] = "manifest"
    rows += [[text, *(f"{made[key]:,}" for made in found.values())] for text, key in counts.items()]
    title = (
        f"One rank of many, CPU seconds and growth of memory in MiB; widths of Llama 2 70B divided by {args.divide}, "
        "all of its 723 tensors (on a mesh, those of a stage):"
    )
    return [title, "", *markdown(["", *found], rows), ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="start-up,steps")
    parser.add_argument("--sizes", default="10M,30M,100M,400M", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=12, help="no combination begins later")
    parser.add_argument("--units", type=int, default=1000, help="of the start-up's model")
    parser.add_argument("--divide", type=int, default=64, help="widths of the model of many ranks, by this")
    parser.add_argument("--limit", type=float, default=60, help="seconds after which a start-up is given up")
    parser.add_argument("--out", type=Path, help="write the tables to this file")
    for hidden, kind in {"start": str, "store": str, "rank": int}.items():
        parser.add_argument(f"--{hidden}", type=kind, default=kind(), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        start_worker(args)
    os.environ.update(step_time.environment(0, 1))  # of the process that ranks are forked from
    parts = {"start-up": start_up, "steps": steps, "many": one_of_many}
    lines = [f"# Scale\n\n`python benchmarks/scale.py`, {versions()}, {cpu_name()}\n"]
    for name in args.parts.split(","):
        lines += parts[name](args)
        finish(lines, args.out)  # after each part, which takes minutes


if __name__ == "__main__":
    main()
