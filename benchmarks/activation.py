"""Recomputing activations: step time and memory of each mode, and of each place where saved inputs rest.

    python benchmarks/activation.py [--depth 24] [--width 256] [--rounds 7] [--steps 2] [--path /tmp] [--out results.md]
    python benchmarks/activation.py --device cuda

One process and one model; the cases take turns in blocks of a few steps, and ratios to "none" are taken within a round,
so a machine that is slower for a minute is slower for all of them. Bytes are counted in steps of their own: on a CPU
by live_bytes.py (what operators allocated and what is alive of it), on a GPU by torch's allocator. On a CPU
host memory counts as apart from the device's, so that "in host memory" copies as it would to a GPU and back.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measuring import cpu_name, finish, markdown, ratio
from peers import GPT, batches
from torch import Tensor, nn

CASES: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "full": {"mode": "full"},
    "full, every second block": {"mode": "full", "every": 2},
    "selective": {"mode": "selective"},
    "full, in one block of memory": {"mode": "full", "contiguous_memory_optimization": True},
    "full, in host memory": {"mode": "full", "cpu_checkpointing": True},
    "full, in files": {"mode": "full", "nvme_path": ""},
}


@dataclass
class Case:
    """What was measured of one way to train."""

    name: str
    block: dict[str, Any]
    rounds: list[list[float]] = field(default_factory=list)  # seconds of each step
    saved: int = 0  # bytes alive between forward and backward
    peak: int = 0  # bytes alive at most
    gradients: list[Tensor] = field(default_factory=list)


class Lab:
    """One model, its data, and how it is trained."""

    def __init__(self, args: argparse.Namespace, path: str) -> None:
        torch.manual_seed(0)
        self.device, self.path = torch.device(args.device), path
        self.model = GPT(args.depth, args.width).to(self.device)
        ids, targets = next(batches(0))
        self.batch = ids.to(self.device), targets.to(self.device)

    def step(self, store: Any, between: Callable[[], None] | None = None) -> float:
        """Forward and backward; how long that took, in seconds."""
        self.model.zero_grad(set_to_none=True)
        self.wait()
        start = time.perf_counter()
        loss: Tensor = self.model(*self.batch)
        if between is not None:
            between()
        loss.backward()
        if store is not None:
            store.end_backward()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run(self, case: Case, work: Callable[[Any], None]) -> None:
        """Do something with the model while it is checkpointed as the case says."""
        from lt_zero.config.blocks import ActivationCheckpointing
        from lt_zero.features.activation_checkpointing.checkpointing import Checkpointing, find_modules, open_store

        block = ActivationCheckpointing(**case.block | ({"nvme_path": self.path} if "nvme_path" in case.block else {}))
        if block.mode == "none":
            work(None)
            return
        store = open_store(block, self.device, len(find_modules(self.model, block).modules))
        handle = Checkpointing(self.model, block, store)
        try:
            work(store)
        finally:
            handle.remove()
            if store is not None:
                store.close()

    def time(self, case: Case, steps: int) -> None:
        def work(store: Any) -> None:
            self.step(store)  # memory is allocated, files are made
            case.rounds.append([self.step(store) for _ in range(steps)])

        self.run(case, work)

    def measure(self, case: Case) -> None:
        def work(store: Any) -> None:
            self.step(store)
            self.model.zero_grad(set_to_none=True)
            case.saved, case.peak = self.bytes(partial(self.step, store))
            case.gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

        self.run(case, work)

    def bytes(self, step: Callable[[Callable[[], None]], float]) -> tuple[int, int]:
        """Bytes that are alive after forward, and at most; without parameters, the batch and the block of memory."""
        from live_bytes import live_bytes

        seen: list[int] = []
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            step(lambda: seen.append(torch.cuda.memory_allocated(self.device)))
            return seen[0] - before, torch.cuda.max_memory_allocated(self.device) - before
        with live_bytes(self.device) as meter:
            step(lambda: seen.append(meter.now))
        return seen[0], meter.peak


def lines(cases: list[Case], args: argparse.Namespace, model: nn.Module) -> Iterator[str]:
    numel = sum(p.numel() for p in model.parameters())
    yield f"# Recomputing activations: GPT of depth {args.depth}, width {args.width} ({numel / 1e6:.1f}M), fp32"
    yield ""
    how = {name: getattr(args, name) for name in ("depth", "width", "rounds", "steps", "threads", "device")}
    yield f"`python benchmarks/activation.py {' '.join(f'--{name} {value}' for name, value in how.items())}`,"
    yield f"torch {torch.__version__}, {cpu_name()}; medians, cases in turns."
    yield ""
    none, rows = cases[0], []
    for case in cases:
        middle, low, high = ratio([median(steps) for steps in case.rounds], [median(steps) for steps in none.rounds])
        times = f"{1000 * median(sum(case.rounds, [])):.0f}", f"{middle:.3f}", f"{low:.3f}-{high:.3f}"
        same = all(torch.equal(a, b) for a, b in zip(case.gradients, none.gradients, strict=True))
        memory = f"{case.saved / 1e6:.1f}", f"{case.peak / 1e6:.1f}"
        rows.append([case.name, *times, *memory, "bitwise equal" if same else "DIFFERENT"])
    yield from markdown(["", "ms per step", "x none", "quartiles", "MB after forward", "MB at most", "gradients"], rows)
    yield ""
    yield "MB after forward is what backward waits for; MB at most has gradients and temporary tensors too. A block of"
    yield "memory that was allocated before the step is in neither: it is as large as what the other places save."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"depth": 24, "width": 256, "rounds": 7, "steps": 2, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--path", help="folder for files; default: a temporary one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    from lt_zero.common import accelerator

    accelerator._apart = args.device == "cpu"
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(args, args.path or folder)
        cases = [Case(name, block) for name, block in CASES.items()]
        for case in cases:
            lab.measure(case)
        for _ in range(args.rounds):
            for case in cases:
                lab.time(case, args.steps)
    finish(list(lines(cases, args, lab.model)), args.out)


if __name__ == "__main__":
    main()
