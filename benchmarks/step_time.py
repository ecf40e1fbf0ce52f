"""Step time and peak memory of one GPT under DDP, FSDP2, DeepSpeed and lt_zero, side by side on one machine's CPUs.

Every peer has its own worker processes, so its peak memory is its own. All peers are kept alive and take turns in
blocks of a few steps, so a machine that is slower for a minute is slower for all of them, and ratios to DDP are taken
within a round. While one peer computes, the others sleep in a read on a socket.

    python benchmarks/step_time.py --deepspeed-python /path/to/venv/bin/python
    python benchmarks/step_time.py --dtype bf16 --peers ddp,fsdp2,lt_zero-2
    python benchmarks/step_time.py --profile lt_zero-3
    python benchmarks/step_time.py --compile --peers ddp,lt_zero-1,lt_zero-2,lt_zero-3  # torch.compile of the blocks
    python benchmarks/step_time.py --ranks 4 --tensor 2 --peers ddp,fsdp2,lt_zero-2,lt_zero-3  # tensor parallelism
    python benchmarks/step_time.py --ranks 4 --pipeline 2 --peers ddp,fsdp2,lt_zero-1  # 1F1B, beside torch's pipelining

Linux only (memory is read from /proc). "peak MB" is the highest resident memory of a rank, from building the model to
the last step, above what the process had after its imports. If other programs use the machine, medians say little (a
wide range between the quartiles shows it) and the fastest step is the better guide.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from statistics import mean, median
from typing import Any, Protocol

import torch
from measuring import ROOT, markdown, ratio
from peers import CONTEXT, MICRO_BATCH, OFFLOADED, ORDERED, PEERS, Job

PATIENCE = 600  # seconds without an answer after which a peer is given up: the first DeepSpeed run compiles its ops


class Process(Protocol):
    """What a rank runs in."""

    def kill(self) -> None: ...

    def wait(self) -> Any: ...


Start = Callable[..., Process]  # as subprocess.Popen: with a command and its options
LOSS_TOLERANCE = 1e-3  # fp32 only: the peers add the same numbers in another order


class PeerFailed(Exception):
    """A peer's worker raised, died or went silent."""


class Worker:
    """One rank: its process, the connection to it, and the file with what it prints.

    ``command`` is started with the connection's descriptor as its last argument.
    """

    def __init__(self, log: Path, command: list[str], start: Start, env: dict[str, str]) -> None:
        self.connection, theirs = Pipe()
        self.log = log
        with theirs, log.open("wb") as output:
            self.process: Process = start(
                [*command, str(theirs.fileno())],
                env=env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def send(self, message: object) -> None:
        with suppress(BrokenPipeError):  # it died: `answer` tells why
            self.connection.send(message)

    def answer(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self.connection.recv()
        except (EOFError, ConnectionError):
            lines = self.log.read_text(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
            raise PeerFailed(f"a worker died: {last}") from None
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


def answers_of(workers: Sequence[Worker]) -> list[dict[str, Any]]:
    """One answer per rank; the first failure ends the wait, since the other ranks hang in a collective then.

    Raises:
        PeerFailed: a rank failed, or is silent.
    """
    pending: dict[Any, int] = {worker.connection: rank for rank, worker in enumerate(workers)}
    answers: dict[int, dict[str, Any]] = {}
    while pending:
        ready = wait(list(pending), PATIENCE)
        if not ready:
            raise PeerFailed(f"no answer for {PATIENCE} s")
        for connection in ready:
            rank = pending.pop(connection)
            answers[rank] = workers[rank].answer()
    return [answers[rank] for rank in sorted(answers)]


@dataclass
class Peer:
    """The workers of one peer, and what they measured."""

    name: str
    workers: list[Worker] = field(default_factory=list)
    rounds: list[list[float]] = field(default_factory=list)  # per round, the seconds of each step on the slowest rank
    memory: float = 0.0  # MB on the largest rank
    loss: float = float("nan")  # of the last step, mean over the ranks
    idle: list[float] = field(default_factory=list)  # per round, the share of time in which ranks of a pipeline wait
    error: str = ""
    launch: Start = subprocess.Popen

    def start(self, args: argparse.Namespace, python: str, folder: Path) -> None:
        ranks, store = args.ranks, str(folder / f"{self.name}.store")
        for rank in range(ranks):
            size = args.depth, args.width, store, args.sequences, args.length, args.tensor, args.pipeline
            size = *size, args.micro_batches
            job = Job(self.name, rank, ranks, args.dtype == "bf16", *size, compiled=args.compile)
            command = [python, str(Path(__file__).with_name("peers.py"))]
            log = folder / f"{self.name}.{rank}.log"
            self.workers.append(Worker(log, command, self.launch, environment(rank, ranks)))
            self.workers[-1].send(asdict(job))
        answers_of(self.workers)

    def ask(self, command: str, count: int) -> list[dict[str, Any]]:
        for worker in self.workers:
            worker.send((command, count))
        answers = answers_of(self.workers)
        self.memory = max(a["memory"] for a in answers)
        losses = [a["loss"] for a in answers if a["loss"] == a["loss"]]  # torch's pipelining: of the last stage only
        self.loss = mean(losses) if losses else float("nan")
        return answers

    def measure(self, count: int) -> None:
        answers = self.ask("steps", count)
        self.rounds.append([max(times) for times in zip(*(a["times"] for a in answers), strict=True)])
        self.idle.append(mean(a["idle"] for a in answers))

    @property
    def seconds(self) -> list[float]:
        """Of a step, the median of each round."""
        return [median(steps) for steps in self.rounds]

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()

    def attempt(self, action: Callable[[], object]) -> bool:
        """A peer that fails is remembered as failed and stopped; the others go on."""
        if not self.error:
            try:
                action()
            except (PeerFailed, OSError) as failure:
                self.error = str(failure)
                print(f"{self.name} failed: {self.error}", file=sys.stderr)
                self.stop()
        return not self.error


def environment(rank: int, ranks: int) -> dict[str, str]:
    """One thread, loopback, no GPU, lt_zero from this checkout.

    DeepSpeed looks for the launcher's variables even when there is a process group.
    """
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    fixed["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return os.environ | fixed | {key: str(value) for key, value in launcher.items()}


def pick_peers(args: argparse.Namespace) -> list[Peer]:
    found = [args.profile] if args.profile else args.peers.split(",") if args.peers else PEERS
    unknown = set(found) - {*PEERS, *OFFLOADED, *ORDERED, "alone"}
    if unknown:
        raise SystemExit(
            f"unknown peers {sorted(unknown)}; there are alone, {', '.join([*PEERS, *OFFLOADED, *ORDERED])}"
        )
    peers = [Peer(name) for name in dict.fromkeys(found)]
    if not args.deepspeed_python and importlib.util.find_spec("deepspeed") is None:
        for peer in peers:
            peer.error = "not installed here; see --deepspeed-python" if peer.name.startswith("deepspeed") else ""
    return peers


def warm_up(peers: list[Peer], args: argparse.Namespace, folder: Path) -> None:
    for peer in peers:
        of_deepspeed = peer.name.startswith("deepspeed") and args.deepspeed_python
        python = args.deepspeed_python if of_deepspeed else sys.executable
        if peer.attempt(lambda: peer.start(args, python, folder)):  # noqa: B023 - called at once
            peer.attempt(lambda: peer.ask("steps", args.warmup))  # noqa: B023
        print(f"{peer.name}: {'ready' if not peer.error else 'left out'}", file=sys.stderr)


def row(peer: Peer, reference: Peer) -> list[str]:
    if peer.error:
        return [peer.name, "failed", *[""] * 6]
    steps = list(itertools.chain(*peer.rounds))
    times = f"{1000 * median(steps):.0f}", f"{1000 * min(steps):.0f}"
    middle, low, high = ratio(peer.seconds, reference.seconds)
    spread = f"{middle:.3f}", f"{low:.3f}-{high:.3f}"
    idle = f"{median(peer.idle):.1%}" if peer.idle and peer.idle[0] == peer.idle[0] else ""
    return [peer.name, *times, *spread, f"{peer.memory:.0f}", f"{peer.loss:.5f}", idle]


def report(peers: list[Peer], args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    done = [p for p in peers if not p.error]
    reference = next((p for p in done if p.name == "ddp"), done[0] if done else peers[0])
    header = ["peer", "ms per step", "fastest", f"x {reference.name}", "quartiles", "peak MB", "last loss", "waits"]
    rows = [row(peer, reference) for peer in peers]
    table = Table(*header, title=f"{args.dtype}, {args.ranks} ranks, depth {args.depth}, width {args.width}")
    for cells in rows:
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print("\n".join(markdown(header, rows)))
    if args.pipeline > 1:
        share = (args.pipeline - 1) / (args.micro_batches + args.pipeline - 1)
        print(f"waits: the share of a schedule in which a rank computes nothing; by the formula {share:.1%}")
    for peer in peers:
        print(f"{peer.name} failed: {peer.error}\n" if peer.error else "", end="")
    losses = [p.loss for p in done if p.name != "alone"]  # its ranks each train on their own data
    if args.dtype == "fp32" and not all(abs(loss - losses[0]) <= LOSS_TOLERANCE for loss in losses):
        print(f"WARNING: the losses differ by more than {LOSS_TOLERANCE}: not all peers train alike")


def write_json(peers: list[Peer], args: argparse.Namespace) -> None:
    keys = ("name", "rounds", "memory", "loss", "error")
    found = [{key: getattr(peer, key) for key in keys} for peer in peers]
    content = {"options": vars(args), "torch": torch.__version__, "load": os.getloadavg(), "peers": found}
    Path(args.json).write_text(json.dumps(content, indent=1, default=str))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"rounds": 7, "steps": 3, "warmup": 3, "depth": 8, "width": 512, "ranks": 2, "tensor": 1, "pipeline": 1}
    for name, default in {**numbers, "micro-batches": 4, "sequences": MICRO_BATCH, "length": CONTEXT}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--compile", action="store_true", help="compile the blocks of every peer")
    parser.add_argument("--peers", default="", help=f"comma-separated; default: {','.join(PEERS)}; there is also alone")
    parser.add_argument("--deepspeed-python", help="an interpreter that has deepspeed; default: this one if it has it")
    parser.add_argument("--profile", metavar="PEER", help="run this peer alone and print where rank 0 spends its time")
    parser.add_argument("--json", metavar="FILE", help="write every measurement here")
    args = parser.parse_args(words)
    if args.pipeline > 1 and (args.dtype != "fp32" or (args.depth + 2) % args.pipeline):
        parser.error("--pipeline is measured in fp32, with a depth whose layers and the two ends it divides")
    return args


@contextmanager
def started(args: argparse.Namespace) -> Iterator[list[Peer]]:
    """The peers that the options name, warmed up; those that failed say so."""
    peers = pick_peers(args)
    with tempfile.TemporaryDirectory() as folder:
        try:
            warm_up(peers, args, Path(folder))
            yield peers
        finally:
            for peer in peers:
                peer.stop()


def measure(args: argparse.Namespace) -> list[Peer]:
    """Let the peers take turns."""
    with started(args) as peers:
        for _, peer in itertools.product(range(args.rounds), peers):
            peer.attempt(lambda: peer.measure(args.steps))  # noqa: B023 - called at once
    return peers


def main() -> None:
    args = parse()
    if args.profile:
        with started(args) as (peer,):
            ok = peer.attempt(lambda: print(peer.ask("profile", 3)[0]["table"]))
        raise SystemExit(not ok)
    peers = measure(args)
    report(peers, args)
    if args.json:
        write_json(peers, args)


if __name__ == "__main__":
    main()
