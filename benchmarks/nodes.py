"""Time and traffic of a step on two simulated nodes: one GPT under DDP, FSDP2 and lt_zero, at several link rates.

    python benchmarks/nodes.py                      # benchmarks/results/nodes.md; as root, with iproute2
    python benchmarks/nodes.py --quick --peers "DDP; lt_zero stage 2"
    python benchmarks/nodes.py --rates 1000 --slow 1:50   # at each rate once more with node 1 sending 50 Mbit/s

Each round takes the peers in turn. Their four processes are forked from four that have imported everything; the
model is built and warmed up on unlimited links, then the links are shaped to each rate and a few steps are measured,
from a barrier to the barrier after the last step has ended in every rank. Ratios to DDP are taken within a round.
Bytes are counted by the kernel where they leave a node, with the headers of packets.

All ranks share this machine's cores. So computing takes longer than on two nodes, and hides more of the communication;
a low rate shows what a peer sends, a high one what it costs otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._dynamo  # optimizers import it when first used
import torch.distributed as dist
from measuring import ROOT, cpu_name, markdown, ratio, versions
from peers import GPT, Step, adamw, batches, fsdp2_step, plain_step
from simulated_nodes import NodesUnavailable, SimulatedNodes, sent_by
from step_time import PeerFailed, Worker, answers_of, environment
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import lt_zero
from lt_zero.optim import build_optimizer

NODES, PER_NODE = 2, 2
RATES = (2000, 400, 100)  # Mbit/s
WARM_UP = 2  # steps; PowerSGD compresses from the third one on
TOLERANT_STEPS = 8  # with slow_node_tolerance: those in which late gradients arrive are among them
SEED = 0

ZERO_PLUS_PLUS = {
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
    "zero_hpz_partition_size": PER_NODE,
}

# What lt_zero is measured with: a name in the table -> its configuration.
MODES: dict[str, dict[str, Any]] = {
    "lt_zero stage 0": {"zero_optimization": {"stage": 0}},
    "lt_zero stage 1": {"zero_optimization": {"stage": 1}},
    "lt_zero stage 2": {"zero_optimization": {"stage": 2}},
    "lt_zero stage 3": {"zero_optimization": {"stage": 3}},
    "lt_zero stage 2, topology 1": {"zero_optimization": {"stage": 2}, "communication": {"topology": 1}},
    "lt_zero stage 0, tolerance 0.5": {"communication": {"slow_node_tolerance": 0.5}},
    "lt_zero stage 0, 1bit": {"gradient_compression": {"algorithm": "1bit", "exclude": []}},
    "lt_zero stage 0, 2bit": {"gradient_compression": {"algorithm": "2bit"}},
    "lt_zero stage 0, topk 1 %, Huffman": {"gradient_compression": {"algorithm": "topk", "huffman_coding": True}},
    "lt_zero stage 0, 1bit between nodes": {
        "gradient_compression": {"algorithm": "1bit", "exclude": [], "hierarchical_compress": True}
    },
    "lt_zero stage 2, 1bit": {
        "zero_optimization": {"stage": 2},
        "gradient_compression": {"algorithm": "1bit", "exclude": []},
    },
    # Frozen after the first step, which is one of the warm-up: their losses are those of a variance of one step.
    "lt_zero stage 0, OneBitAdam": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-5, "freeze_step": 1}}},
    "lt_zero stage 1, OneBitAdam": {
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-5, "freeze_step": 1}},
    },
    "lt_zero stage 0, OneBitLamb": {"optimizer": {"type": "OneBitLamb", "params": {"lr": 1e-5, "freeze_step": 1}}},
    "lt_zero stage 0, ZeroOneAdam, 4 local steps": {
        "optimizer": {
            "type": "ZeroOneAdam",
            "params": {"lr": 1e-5, "var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 4},
        }
    },
    "lt_zero stage 2, ZeRO++": {
        "zero_optimization": {"stage": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True},
    },
    "lt_zero stage 3, ZeRO++": {"zero_optimization": {"stage": 3, **ZERO_PLUS_PLUS}},
    "lt_zero stage 3, mics_shard_size 2": {"zero_optimization": {"stage": 3, "mics_shard_size": PER_NODE}},
}


# ---- the peers (these run in workers) ------------------------------------------------------------------------------


@dataclass
class Trained:
    """A step of a peer, what waits until all of it has ended, and how many steps have one exchange."""

    step: Step
    finish: Callable[[], object] = lambda: None
    period: int = 1


def ddp(model: GPT) -> Trained:
    return Trained(plain_step(nn.parallel.DistributedDataParallel(model), adamw(model)))


def ddp_bf16(model: GPT) -> Trained:
    wrapped = nn.parallel.DistributedDataParallel(model)
    # By its own name, DDP refuses the hook without NCCL.
    wrapped.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    return Trained(plain_step(wrapped, adamw(model)))


def ddp_powersgd(model: GPT) -> Trained:
    def compress(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        # The hook launches from callbacks, and gloo matches collectives in the order of their launches: with two
        # buckets under way that order differs from rank to rank. So each bucket waits; little is left to overlap.
        future = powerSGD_hook(state, bucket)
        future.wait()
        return future

    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2), compress)
    return Trained(plain_step(wrapped, adamw(model)))


def of_lt_zero(model: GPT, config: dict[str, Any]) -> Trained:
    engine = lt_zero.shard(model, lt_zero.ZeroConfig.of(config))
    own = config.get("optimizer")
    optimizer = build_optimizer(own["type"], own["params"], model.parameters()) if own else adamw(model)
    lt_zero.ShardedOptimizer(engine, optimizer)
    # Updated weights are still gathered when a step returns: the next forward waits for them.
    period = own["params"].get("local_step_clipper", 1) if own else 1
    return Trained(plain_step(model, optimizer), engine.finish_steps, period)


PEERS: dict[str, Callable[[GPT], Trained]] = {
    "DDP": ddp,
    "DDP, bf16_compress": ddp_bf16,
    "DDP, PowerSGD of rank 2": ddp_powersgd,
    "FSDP2": lambda model: Trained(fsdp2_step(model, (NODES * PER_NODE,))),
    "HSDP (FSDP2, replicated over nodes)": lambda model: Trained(fsdp2_step(model, (NODES, PER_NODE))),
    **{name: partial(of_lt_zero, config=config) for name, config in MODES.items()},
}


@dataclass(frozen=True)
class Job:
    """What the ranks have to set up."""

    peer: str
    depth: int
    width: int
    store: str


def set_up(peer: str, depth: int, width: int) -> Trained:
    """The peer with a GPT of the same weights on all ranks; in a process group."""
    torch.manual_seed(SEED)
    return PEERS[peer](GPT(depth, width))


def measure(trained: Trained, data: Iterator[tuple[Tensor, Tensor]], count: int) -> dict[str, Any]:
    """Seconds and bytes from this rank's node, per step; and the loss of the last step, averaged over the ranks."""
    count *= trained.period
    dist.barrier()
    sent = sent_by()
    dist.barrier()  # a rank that goes on first sends before the other has read
    start = time.perf_counter()
    for _ in range(count):
        loss = trained.step(*next(data))
    trained.finish()
    dist.barrier()
    seconds, sent = time.perf_counter() - start, sent_by() - sent
    dist.barrier()
    dist.all_reduce(loss)
    return {"seconds": seconds / count, "sent": sent / count, "loss": loss.item() / dist.get_world_size()}


def serve(connection: Connection, job: Job, rank: int) -> None:
    """Set up the peer, then measure as often as asked."""
    dist.init_process_group("gloo", init_method=f"file://{job.store}", rank=rank, world_size=NODES * PER_NODE)
    trained, data = set_up(job.peer, job.depth, job.width), batches(rank)
    measure(trained, data, WARM_UP)
    connection.send({})
    while count := connection.recv():
        connection.send(measure(trained, data, count))
    connection.send({})


def worker(descriptor: int) -> None:
    """A fork per job: no peer inherits memory, threads or connections of the one before. It leaves by ``os._exit``."""
    connection, rank = Connection(descriptor), int(os.environ["RANK"])
    torch.set_num_threads(1)
    connection.send({})
    while True:
        job = Job(*connection.recv())
        child = os.fork()
        if child == 0:
            try:
                serve(connection, job, rank)
            except BaseException as error:
                traceback.print_exc()
                connection.send({"error": f"{type(error).__name__}: {error}"})
                os._exit(1)
            os._exit(0)
        os.waitpid(child, 0)


# ---- the coordinator -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Links:
    """What nodes may send, in Mbit/s: all ``rate``, but node ``slow`` its ``slow_rate``."""

    rate: int
    slow: int | None = None
    slow_rate: int = 0

    def __str__(self) -> str:
        return f"{self.rate} Mbit/s" + ("" if self.slow is None else f", node {self.slow} at {self.slow_rate}")

    @property
    def steps(self) -> int:
        """How many are measured in a round."""
        return max(1, (self.rate if self.slow is None else self.slow_rate) // 1000)


@dataclass
class Result:
    """What one peer measured."""

    seconds: dict[Links, list[float]] = field(default_factory=dict)  # seconds per step on the slowest rank
    sent: list[float] = field(default_factory=list)  # bytes per step of the node that sent most
    loss: float = float("nan")
    error: str = ""


class Bed:
    """The nodes with a worker per rank, which takes one job after the other."""

    def __init__(self, nodes: SimulatedNodes, folder: Path) -> None:
        self.nodes, self._folder, self._numbers = nodes, folder, itertools.count()
        self._workers: list[Worker] = []

    def start(self) -> None:
        command, inherited = [sys.executable, __file__, "--worker"], environment(0, 1)
        for rank in range(self.nodes.world):
            log = self._folder / f"{next(self._numbers)}.log"
            self._workers.append(Worker(log, command, partial(self.nodes.start, rank), inherited))
        answers_of(self._workers)

    def ask(self, message: object) -> list[dict[str, Any]]:
        for worker in self._workers:
            worker.send(message)
        return answers_of(self._workers)

    def shape(self, links: Links | None) -> None:
        for node in range(self.nodes.nodes):
            slow = links is not None and node == links.slow
            self.nodes.set_rate(node, None if links is None else links.slow_rate if slow else links.rate)

    def measure(self, peer: str, result: Result, args: argparse.Namespace) -> None:
        if not self._workers:
            self.start()
        begins_slow = "tolerance" in peer  # it measures the links when it begins
        for links in args.links:
            if begins_slow or links is args.links[0]:
                self.shape(links if begins_slow else None)
                self.ask((peer, args.depth, args.width, str(self._folder / f"{next(self._numbers)}.store")))
            self.shape(links)
            answers = self.ask(max(links.steps, TOLERANT_STEPS * begins_slow))
            result.seconds.setdefault(links, []).append(max(answer["seconds"] for answer in answers))
            result.sent.append(max(answer["sent"] for answer in answers))
            result.loss = answers[0]["loss"]
            if begins_slow or links is args.links[-1]:
                self.ask(0)

    def stop(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers.clear()


def run(peers: list[str], args: argparse.Namespace) -> dict[str, Result]:
    results = {peer: Result() for peer in peers}
    with tempfile.TemporaryDirectory() as folder, SimulatedNodes(NODES, PER_NODE) as nodes:
        bed = Bed(nodes, Path(folder))
        for number, peer in itertools.product(range(args.rounds), peers):
            result, start = results[peer], time.monotonic()
            if result.error:
                continue
            try:
                bed.measure(peer, result, args)
                print(f"round {number + 1}, {peer}: {time.monotonic() - start:.0f} s", file=sys.stderr)
            except PeerFailed as failure:
                result.error = str(failure)
                print(f"{peer} failed: {result.error}", file=sys.stderr)
                bed.stop()  # its other ranks hang; the next peer starts new ones
        bed.stop()
    return results


def table(results: dict[str, Result], every: list[Links]) -> list[str]:
    """Rows of Markdown: medians over rounds, and in brackets the median ratio to the first peer that did not fail."""
    reference = next((result for result in results.values() if not result.error), None)
    header = ["peer", "MB per node and step", *(f"s per step at {links}" for links in every), "last loss"]
    rows: list[list[str]] = []
    for peer, result in results.items():
        if result.error or reference is None:
            rows.append([peer, "failed", *[""] * (len(header) - 2)])
            continue
        cells = []
        for links in every:
            times = result.seconds[links]
            cells.append(f"{median(times):.2f} ({ratio(times, reference.seconds[links]).median:.2f})")
        rows.append([peer, f"{median(result.sent) / 1e6:.1f}", *cells, f"{result.loss:.4f}"])
    return markdown(header, rows)


def report(results: dict[str, Result], args: argparse.Namespace) -> str:
    numel = sum(parameter.numel() for parameter in GPT(args.depth, args.width).parameters())
    steps = "; ".join(f"{links.steps} at {links}" for links in args.links)
    heading = f"# nodes: a GPT of {numel / 1e6:.1f}M parameters in fp32 on {NODES} nodes of {PER_NODE} ranks\n"
    setting = (
        f"{date.today()}, {versions('cpu')}, {cpu_name()}, load {os.getloadavg()[1]:.1f} at the end;"
        f" medians of {args.rounds} rounds (steps in each: {steps}), in brackets the"
        " ratio to the first row within a round; gradients are"
        f" {4 * numel / 1e6:.0f} MB\n"
    )
    failed = [f"\n{peer} failed: {result.error}" for peer, result in results.items() if result.error]
    command = f"`python benchmarks/nodes.py {' '.join(sys.argv[1:])}".rstrip() + "`\n"
    return "\n".join([heading, setting, command, *table(results, args.links), *failed]) + "\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rounds": 3, "depth": 8, "width": 512}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument(
        "--rates", default=",".join(map(str, RATES)), help="in Mbit/s, comma-separated; default %(default)s"
    )
    parser.add_argument("--slow", metavar="NODE:MBIT", help="measure also with a node that sends less, at each rate")
    parser.add_argument("--peers", help=f"separated by semicolons; default: {'; '.join(PEERS)}")
    parser.add_argument("--quick", action="store_true", help="a small model, one round, the first rate")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "nodes.md", help="default %(default)s"
    )
    args = parser.parse_args()
    args.links = [Links(int(rate)) for rate in args.rates.split(",")]
    if args.quick:
        args.rounds, args.depth, args.width, args.links = 1, 2, 64, args.links[:1]
    if args.slow:
        node, mbit = map(int, args.slow.split(":"))
        if not 0 <= node < NODES:
            parser.error(f"--slow {args.slow}: there is no node {node}; nodes are 0 to {NODES - 1}")
        args.links = [each for links in args.links for each in (links, Links(links.rate, node, mbit))]
    args.peers = [name.strip() for name in args.peers.split(";")] if args.peers else [*PEERS]
    if unknown := [name for name in args.peers if name not in PEERS]:
        parser.error(f"there is no peer {unknown[0]!r}; there are {'; '.join(PEERS)}")
    return args


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(int(sys.argv[2]))
    args = parse()
    try:
        results = run(args.peers, args)
    except NodesUnavailable as error:
        raise SystemExit(str(error)) from None
    text = report(results, args)
    print(text)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text)
    losses = [result.loss for result in results.values() if not result.error]
    raise SystemExit(any(result.error for result in results.values()) or not losses)


if __name__ == "__main__":
    main()
