"""An attention block whose sequence is cut over ranks: time, memory and traffic of each method, beside DeepSpeed's.

    python benchmarks/sequence.py --exchange
    python benchmarks/sequence.py [--ranks 1 2 4] [--length 4096] [--kv 8] [--rounds 8] [--out results.md]

The block has two linear layers around causal attention. All cases of a number of ranks live in the same processes on
gloo, of a thread each, and take turns; ratios are medians of those within rounds. "saved" is what forward keeps for
backward, "peak" the most that is alive in forward and backward, both of one rank, without parameters (live_bytes.py).
"sent" is what a rank sends to others in forward and backward together, in "collectives". Outputs and gradients of every
case are compared with one process's first. ``--exchange`` times exchanges alone, through shared memory and gloo.

DeepSpeed's rows need its package (and transformers, for ``UlyssesSPAttentionHF``).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from live_bytes import live_bytes
from measuring import cpu_name, finish, interleaved, markdown, ratio, versions
from torch import Tensor, nn
from torch.nn import functional as F

from lt_zero.core.comm.sequence import SequenceGroup
from lt_zero.core.comm.world import World
from lt_zero.core.division import Division
from lt_zero.parallel import SequenceRanks, sequence_attention, to_zigzag
from lt_zero.parallel.sequence.ranks import in_use

CPU = torch.device("cpu")


class Cut(Division):
    """A run in which sequences are cut over ``ranks``; None: they are not cut. It lasts as long as this object."""

    def __init__(self, ranks: SequenceRanks | None) -> None:
        super().__init__()
        self._ranks = ranks
        self.begin(new=True)

    @property
    def row_ranks(self) -> SequenceRanks | None:
        return in_use(self._ranks)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
OURS = {
    "ulysses": ("ulysses", 1, False),
    "gather": ("gather", 1, False),
    "gather, zigzag": ("gather", 1, True),
    "ulysses 2 x gather, zigzag": ("ulysses", 2, True),
}
GLOO, DISTRIBUTED, HF = "ulysses, through gloo", "DeepSpeed DistributedAttention", "DeepSpeed UlyssesSPAttentionHF"


class Block(nn.Module):
    """Attention between its two linear layers; [batch, length, width] -> the same."""

    def __init__(self, heads: int, kv: int, dim: int) -> None:
        super().__init__()
        self.sizes, self.dim = [heads, kv, kv], dim
        self.qkv = nn.Linear(heads * dim, sum(self.sizes) * dim, bias=False)
        self.out = nn.Linear(heads * dim, heads * dim, bias=False)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        joined = self.qkv(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        return self.out(attend(*joined.split(self.sizes, 1)).transpose(1, 2).flatten(2))


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def deepspeed_cases(args: argparse.Namespace) -> dict[str, Attend]:
    """DeepSpeed's, as far as they are installed."""
    cases: dict[str, Attend] = {}
    try:
        import deepspeed  # type: ignore[import-not-found, unused-ignore]
        from deepspeed.sequence.layer import DistributedAttention  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return cases
    deepspeed.init_distributed("gloo", verbose=False)

    def local(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # [batch, length, heads, dim]
        return causal(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)

    whole = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    cases[DISTRIBUTED] = lambda *qkv: whole(*(x.transpose(1, 2) for x in qkv), 0).transpose(1, 2)
    try:
        from deepspeed.runtime.sequence_parallel import ulysses_sp  # type: ignore[import-not-found, unused-ignore]

        def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
            return causal(query, key, value).transpose(1, 2), None

        of_model = ulysses_sp.UlyssesSPAttentionHF(
            attention, 1, args.heads, args.dim, args.kv, 1, dist.group.WORLD, seq_length_is_variable=True
        )
    except ImportError:
        return cases
    length = args.length // dist.get_world_size()
    at = torch.arange(length)[None] + length * dist.get_rank()
    block = nn.Module()
    cases[HF] = lambda *qkv: (
        of_model(block, *qkv, None, position_ids=at)[0].unflatten(-1, (-1, args.dim)).transpose(1, 2)
    )
    return cases


class Traffic:
    """What this rank sends to others: bytes, and in how many collectives."""

    def __init__(self) -> None:
        self.nbytes = self.count = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context in which collectives are counted."""
        with ExitStack() as stack:
            replace = lambda owner, name: stack.enter_context(  # noqa: E731
                mock.patch.object(owner, name, self._counted(getattr(owner, name)))
            )
            replace(SequenceGroup, "exchanged")
            if "deepspeed" in sys.modules:
                replace(sys.modules["deepspeed.comm"], "all_to_all_single")
                replace(sys.modules["deepspeed.comm"], "all_gather")
            yield

    def _counted(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **options: Any) -> Any:
            found = collective(first, *rest, **options)
            self.count += 1
            if isinstance(found, Tensor):  # rows that came, one of them from this rank
                self.nbytes += found[1:].nbytes
            else:
                ranks = dist.get_world_size()
                whole = first.nbytes if isinstance(first, Tensor) else sum(part.nbytes for part in first)
                self.nbytes += whole // ranks * (ranks - 1)
            return found

        return call


class Run:
    """All cases on one rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.block = Block(args.heads, args.kv, args.dim)
        self.x, self.grad = (torch.randn(1, args.length, args.heads * args.dim) for _ in range(2))
        world = World.join(CPU)
        assert self.ranks == 1 or world.process_group is not None
        self.cases: dict[str, tuple[Attend, int, SequenceRanks | None]] = {}  # with the parts of a zigzag order, or 0
        if self.ranks == 1:
            self.cases["one process"] = (causal, 0, None)
            return
        group = SequenceGroup.joined(world, [range(world.size)], world.process_group)
        ours = sequence_attention()
        for name, how in OURS.items():
            if how[1] == 1 or (self.ranks > 2 and how[1] == 2):
                ranks = SequenceRanks(group, group, *how)
                self.cases[name] = (masked(ours), ranks.parts if how[2] else 0, ranks)
        self.cases[GLOO] = (masked(sequence_attention(group=dist.group.WORLD)), 0, None)
        self.cases |= {name: (attend, 0, None) for name, attend in deepspeed_cases(args).items()}

    def part(self, x: Tensor, zigzag: int) -> Tensor:
        """This rank's part of [batch, length, width]."""
        return (to_zigzag(x, 1, zigzag) if zigzag else x).chunk(self.ranks, 1)[self.rank].contiguous()

    def step(self, name: str) -> float:
        """Seconds of forward and backward, of the slowest rank."""
        attend, zigzag, ranks = self.cases[name]
        self.run = Cut(ranks)
        x, grad = (self.part(each, zigzag) for each in (self.x, self.grad))
        x.requires_grad_()
        self.meet()
        start = time.perf_counter()
        self.block(x, attend).backward(grad)
        seconds = time.perf_counter() - start
        self.found = x.grad
        return seconds

    def meet(self) -> None:
        """Wait for all ranks."""
        if self.ranks > 1:
            dist.barrier()

    def check(self, name: str) -> None:
        """Compare a case with one process: gradients of the input's part, and of the weights as a sum over ranks."""
        whole = self.x.clone().requires_grad_()
        self.block.zero_grad()
        self.block(whole, causal).backward(self.grad)
        wanted = [p.grad.clone() for p in self.block.parameters() if p.grad is not None]
        self.block.zero_grad()
        self.step(name)
        torch.testing.assert_close(self.found, self.part(whole.grad, self.cases[name][1]), rtol=1e-3, atol=1e-4)
        for parameter, exact in zip(self.block.parameters(), wanted, strict=True):
            if self.ranks > 1:
                dist.all_reduce(parameter.grad)
            torch.testing.assert_close(parameter.grad, exact, rtol=1e-3, atol=1e-2)

    def memory(self, name: str) -> tuple[int, int, int, int]:
        """Bytes that are saved, the peak, bytes that are sent, and collectives."""
        attend, zigzag, ranks = self.cases[name]
        self.run = Cut(ranks)
        x, grad = (self.part(each, zigzag) for each in (self.x, self.grad))
        x.requires_grad_()
        traffic = Traffic()
        with traffic.counting(), live_bytes() as meter:
            out = self.block(x, attend)
            saved = meter.now
            out.backward(grad)
        return saved, meter.peak, traffic.nbytes, traffic.count


def masked(attend: Callable[..., Tensor]) -> Attend:
    return lambda query, key, value: attend(query, key, value, is_causal=True, enable_gqa=True)


def work(rank: int, ranks: int, store: str, args: argparse.Namespace, results: Any) -> None:
    """Run all cases on one rank; rank 0 puts what it found."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
    run = Run(args)
    for name in run.cases:
        run.check(name)
    memory = {name: run.memory(name) for name in run.cases}
    times = interleaved({name: partial(run.step, name) for name in run.cases}, args.rounds)
    if rank == 0:
        results.send((times, memory))
    run.meet()
    os._exit(0)


def exchange(rank: int, ranks: int, store: str, args: argparse.Namespace, results: Any) -> None:
    """Time an exchange of rows through shared memory and through gloo: rounds of each, by MB that a rank has."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
    world = World.join(CPU)
    assert world.process_group is not None
    shared = SequenceGroup.joined(world, [range(ranks)], world.process_group)
    groups = {"shared": shared, "gloo": SequenceGroup.of(world.process_group, CPU)}
    found = {}
    for megabytes in (0.25, 1, 4, 16, 64):
        rows = torch.randn(ranks, round(megabytes * 2**18) // ranks)

        def seconds(group: SequenceGroup, rows: Tensor = rows) -> float:
            dist.barrier()
            start = time.perf_counter()
            group.exchange(rows)
            return time.perf_counter() - start

        found[megabytes] = interleaved(
            {name: partial(seconds, group) for name, group in groups.items()}, 5 * args.rounds
        )
    if rank == 0:
        results.send(found)
    dist.barrier()
    os._exit(0)


def exchange_rows(args: argparse.Namespace, ranks: int) -> list[list[str]]:
    rows = []
    for megabytes, seconds in measure(args, ranks, exchange).items():
        best = {name: min(each) * 1e3 for name, each in seconds.items()}
        relative = ratio(seconds["gloo"], seconds["shared"]).median
        times = [f"{best[name]:.2f}" for name in ("shared", "gloo")]
        rows.append([str(ranks), str(megabytes), *times, f"{best['gloo'] / best['shared']:.1f}", f"{relative:.1f}"])
    return rows


def measure(args: argparse.Namespace, ranks: int, work: Callable[..., None] = work) -> Any:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=work, args=(rank, ranks, f"{folder}/store", args, theirs)) for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        theirs.close()
        found = ours.recv()  # EOFError: all have failed
        for worker in workers:
            worker.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv", type=int, default=8, help="heads of keys and values")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--exchange", action="store_true", help="time exchanges alone, with and without shared memory")
    args = parser.parse_args()
    machine = f"{cpu_name()}, a thread for each rank; {versions()}; load {os.getloadavg()[0]:.1f}"
    if args.exchange:
        head = ["ranks", "MB", "shared memory, ms", "gloo, ms", "ratio of the best", "median ratio"]
        found = [row for ranks in args.ranks if ranks > 1 for row in exchange_rows(args, ranks)]
        finish([machine, "", *markdown(head, found)], args.out)
        return
    rows = []
    for ranks in args.ranks:
        times, memory = measure(args, ranks)
        for name, seconds in times.items():
            median = statistics.median(seconds)
            saved, peak, sent, count = memory[name]
            relative = ratio(seconds, times["ulysses"]) if ranks > 1 else None
            rows.append(
                [
                    str(ranks),
                    name,
                    f"{median * 1e3:.0f}",
                    f"{relative.median:.2f}" if relative else "",
                    *(f"{nbytes / 1e6:.1f}" for nbytes in (saved, peak, sent)),
                    str(count),
                ]
            )
    head = ["ranks", "", "ms", "it / ulysses", "saved, MB", "peak, MB", "sent, MB", "collectives"]
    shape = f"{args.length} tokens, {args.heads} heads of {args.dim}, {args.kv} of keys and values, float32"
    lines = [f"{shape}; {machine}", "", *markdown(head, rows)]
    finish(lines, args.out)


if __name__ == "__main__":
    main()
