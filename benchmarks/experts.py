"""A mixture of experts with its experts on 1, 2 and 4 of four ranks, beside FSDP2: traffic, memory and time of a step.

    python benchmarks/experts.py [--experts 8] [--width 256] [--hidden 512] [--depth 3] [--tokens 512] [--rounds 4]

The four ranks are two on each of two simulated nodes (as root, with iproute2); else they are processes without nodes,
and "between nodes" is left out. Every token goes to two experts, and every expert gets equally many tokens, so that
traffic can be computed: "formula" is what has to leave a node if each byte leaves it once. "between nodes" was counted
by the kernel, with the headers of packets, for the node that sent more. "peak" is how much the resident memory of a
rank grows, from before the model is built to the most in its third and fourth step, in a process of its own. Stage 3
releases weights after each forward. For times all cases live in the same processes and take turns; they are ratios to
the first case, medians of those within rounds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measuring import ROOT, Sampler, cpu_name, interleaved, markdown, memory, ratio, versions
from peers import adamw
from simulated_nodes import NodesUnavailable, SimulatedNodes, sent_by
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import lt_zero
from lt_zero.parallel import Experts

NODES, RANKS, CHOSEN, VOCABULARY, HEADS, LENGTH = 2, 4, 2, 512, 4, 64
FSDP2 = "FSDP2"
CASES = {f"stage {stage}, experts on {size}": (stage, size) for stage in (2, 3) for size in (1, 2, 4)}


class FeedForwards(Experts):
    """Gated MLPs."""

    def __init__(self, number: int, width: int, hidden: int) -> None:
        super().__init__(number)
        self.gate_up = nn.Parameter(torch.randn(number, width, 2 * hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(number, hidden, width) / hidden**0.5)

    def forward(self, tokens: Tensor, expert_ids: Tensor, scores: Tensor) -> Tensor:
        mine, made = self.dispatch(tokens, expert_ids), []
        for rows, gate_up, down in zip(mine.split(), self.local(self.gate_up), self.local(self.down), strict=True):
            gate, up = (rows @ gate_up).chunk(2, -1)
            made.append((F.silu(gate) * up) @ down)
        return self.combine(torch.cat(made), mine, scores)


class Block(nn.Module):
    """Attention, and a mixture whose experts get equally many tokens."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.router, self.experts = nn.Linear(width, experts, bias=False), FeedForwards(experts, width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        tokens = self.norm2(x).flatten(0, 1)
        numbers = torch.arange(len(tokens)).unsqueeze(1) + torch.arange(CHOSEN)
        expert_ids = numbers % self.experts.number
        scores = self.router(tokens).gather(1, expert_ids).softmax(-1)
        return x + self.experts(tokens, expert_ids, scores).view_as(x)


class Mixture(nn.Module):
    """Blocks between an embedding and a head; returns the loss."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, args.width)
        self.layers = nn.ModuleList(Block(args.experts, args.width, args.hidden) for _ in range(args.depth))
        self.norm, self.head = nn.RMSNorm(args.width), nn.Linear(args.width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.roll(-1, 1).flatten())


# ---- what a rank does ----------------------------------------------------------------------------------------------


def case(name: str, args: argparse.Namespace) -> Callable[[], Tensor]:
    """A step of a model of its own. Collective."""
    model = Mixture(args)
    ids = torch.randint(VOCABULARY, (args.tokens // LENGTH, LENGTH), generator=torch.Generator().manual_seed(args.rank))
    if name == FSDP2:
        for module in [*model.layers, model]:
            fully_shard(module)
        optimizer = adamw(model)

        def step() -> Tensor:
            loss: Tensor = model(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step
    stage, size = CASES[name]
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": len(ids), "zero_optimization": {"stage": stage}}
    if stage == 3:
        config["zero_optimization"] |= {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
    config["expert_parallel"] = {"enabled": size > 1, "autoep_size": size}
    engine, *_ = lt_zero.initialize(model=model, optimizer=adamw(model), config=config)

    def of_lt_zero() -> Tensor:
        loss: Tensor = engine(ids)
        engine.backward(loss)
        engine.step()
        engine.engine.finish_steps()  # else updated weights are still gathered, which the next forward waits for
        return loss.detach()

    return of_lt_zero


def measured(step: Callable[[], Tensor], nodes: bool) -> dict[str, float]:
    """Seconds, bytes that left this rank's node, and the loss."""
    dist.barrier()
    sent = sent_by() if nodes else 0
    dist.barrier()  # a rank that goes on first sends before the other has read
    start = time.perf_counter()
    loss = step()
    dist.barrier()
    seconds, sent = time.perf_counter() - start, (sent_by() if nodes else 0) - sent
    dist.barrier()
    return {"seconds": seconds, "sent": sent, "loss": loss.item()}


def begin(store: str, args: argparse.Namespace) -> None:
    where = f"file://{args.folder}/{store.replace(' ', '_')}"
    dist.init_process_group("gloo", init_method=where, rank=args.rank, world_size=RANKS)


def peak_of(name: str, args: argparse.Namespace) -> float:
    """Growth of a rank's resident memory, in MiB, in a fork that runs one case only."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        _, status = os.waitpid(child, 0)
        with open(reader) as told:
            if status:
                raise RuntimeError(f"{name} failed, see above")
            return float(told.read())
    try:
        begin(name, args)
        case(name, argparse.Namespace(**{**vars(args), "width": 32, "hidden": 32, "depth": 1}))()  # imports, buffers
        before, step = memory(), case(name, args)
        for _ in range(2):
            step()
        with Sampler() as sampler:
            for _ in range(2):
                step()
        os.write(writer, str(max(now for _, now in sampler.points) - before).encode())
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def rank_of(args: argparse.Namespace) -> None:
    """Measure all cases; rank 0 writes the table."""
    torch.set_num_threads(1)
    peaks = {name: peak_of(name, args) for name in args.cases}
    begin("times", args)
    steps = {name: case(name, args) for name in args.cases}
    runs = {name: lambda step=step: measured(step, args.nodes) for name, step in steps.items()}  # type: ignore[misc]
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, (interleaved(runs, args.rounds, 2), peaks))
    if args.rank == 0:
        args.out.write_text(report(args, found))
    dist.barrier()
    os._exit(0)  # threads of engines


# ---- the table -------------------------------------------------------------------------------------------------------


def bytes_between_nodes(stage: int, size: int, args: argparse.Namespace) -> float:
    """Bytes that have to leave a node in a step: half of what both nodes share, and the tokens of the other's experts.

    A stage-3 step gathers weights twice and reduces gradients once; a stage-2 step gathers once.
    """
    with torch.device("meta"):
        model = Mixture(args)
    of_experts = sum(p.numel() for m in model.modules() if isinstance(m, Experts) for p in m.parameters())
    shared = sum(p.numel() for p in model.parameters()) - (of_experts if size == RANKS else 0)
    exchanged = 0.0
    if size == RANKS:  # else expert ranks are on one node
        there_and_back = 4 * args.depth  # dispatch and combine, in forward and backward
        exchanged = there_and_back * args.tokens * CHOSEN * args.width * (RANKS // NODES) / NODES
    return 4 * ({2: 2, 3: 3}[stage] * shared / NODES + exchanged)


def report(args: argparse.Namespace, found: list[tuple[dict[str, list[dict[str, float]]], dict[str, float]]]) -> str:
    with torch.device("meta"):
        numel = sum(p.numel() for p in Mixture(args).parameters())
    first, rows = args.cases[0], []
    for name in args.cases:
        seconds = {
            each: [max(r[0][each][n]["seconds"] for r in found) for n in range(args.rounds)] for each in (first, name)
        }
        sent = median(max(r[0][name][n]["sent"] for r in found) for n in range(args.rounds))
        loss = sum(r[0][name][-1]["loss"] for r in found) / RANKS
        peak = max(r[1][name] for r in found)
        speed = 1 / ratio(seconds[name], seconds[first]).median
        formula = f"{bytes_between_nodes(*CASES.get(name, (3, 1)), args) / 1e6:.1f}"
        between = f"{sent / 1e6:.1f}" if args.nodes else ""
        rows.append([name, f"{peak:.0f}", formula, between, f"{speed:.2f}", f"{loss:.6f}"])
    sizes = f"{args.depth} layers of {args.experts} experts, {args.width} wide, {args.hidden} inside, fp32"
    heading = f"# experts: a mixture of {numel / 1e6:.1f}M parameters on {NODES} nodes of {RANKS // NODES} ranks\n"
    setting = f"{date.today()}; {sizes}; {args.tokens} tokens on each rank; {cpu_name()}, {versions('cpu')}; load "
    setting += f"{os.getloadavg()[1]:.0f}; medians of {args.rounds} rounds\n"
    header = ["", "peak, MiB", "formula, MB", "between nodes, MB", f"tokens/s / {first}", "last loss"]
    command = f"`python benchmarks/experts.py {' '.join(args.given)}".rstrip() + "`\n"
    return "\n".join([heading, command, setting, *markdown(header, rows)]) + "\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"experts": 8, "width": 256, "hidden": 512, "depth": 3, "tokens": 512, "rounds": 4}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--cases", type=lambda text: text.split(";"), default=[*CASES, FSDP2], help="by semicolons")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "experts.md")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--nodes", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.given = sys.argv[1 : sys.argv.index("--worker") if args.worker else None]
    args.rank = int(os.environ.get("RANK", 0))
    return args


def main() -> None:
    args = parse()
    if args.worker:
        rank_of(args)
    os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory goes back to the system
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *args.given, "--worker", "--folder", folder]
        try:
            with SimulatedNodes(NODES, RANKS // NODES) as nodes:
                failed = nodes.run([*command, "--nodes"])
        except NodesUnavailable as error:
            print(f"{error}; without nodes", file=sys.stderr)
            ranks = [subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}) for rank in range(RANKS)]
            failed = max(process.wait() for process in ranks)
    if not failed:
        print(args.out.read_text())
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
