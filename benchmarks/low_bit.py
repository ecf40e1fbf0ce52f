"""Adapters on frozen weights in 32, 16, 8 and 4 bits: bytes that weights take on a rank, bytes sent, and CPU time.

    python benchmarks/low_bit.py [--ranks 2] [--layers 4] [--width 768] [--rounds 5] [--out results.md]

A row of blocks (attention left out: four matrices each, of which each has an adapter of rank 8) is trained at stage 3,
and released after each use. Weights are counted where they rest; the loss is that of the first step, in fp32 where the
frozen weights are not narrower.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import ROOT, cpu_name, finish, give, markdown, result_of, versions
from torch import Tensor, nn

import lt_zero
from lt_zero.planning.check import measured
from lt_zero.planning.forecast import WEIGHTS

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, 8 bits": {"bf16": {"enabled": True}, "quantize": 8},
    "bf16, 4 bits": {"bf16": {"enabled": True}, "quantize": 4},
}


class Adapted(nn.Module):
    """A frozen matrix with a low-rank adapter."""

    def __init__(self, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base_layer(x) + 2 * self.lora_B(self.lora_A(x))
        return found


class AdaptedBlock(nn.Module):
    """An MLP of width 4 w, and two square matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = Adapted(width, width), Adapted(width, width)
        self.up, self.down = Adapted(width, 4 * width), Adapted(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(torch.tanh(self.first(self.norm(x))))
        return x + self.down(nn.functional.gelu(self.up(x)))


def measure(case: str, layers: int, width: int, rounds: int) -> dict[str, float]:
    """The figures of one case on this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*(AdaptedBlock(width) for _ in range(layers)))
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    zero = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 100_000}
    if "bf16" in case:
        # A model that is loaded in fp32 keeps its frozen weights in fp32 beside the compute copy.
        for parameter in model.parameters():
            parameter.data = parameter.data if parameter.requires_grad else parameter.data.bfloat16()
    engine = lt_zero.shard(model, {"zero_optimization": zero, **CASES[case]})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    lt_zero.ShardedOptimizer(engine, optimizer)
    x = torch.randn(1, 16, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    times, losses = list[float](), list[float]()
    for _ in range(rounds + 2):
        start = time.process_time()
        loss = model(x.to(torch.bfloat16 if "bf16" in case else torch.float32)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time() - start)
        losses.append(loss.item())
    rests = [b for b in engine.buckets if not b.wants_grad and b.sharding.params]
    kept = measured(engine)[WEIGHTS]
    sent = [
        b.storage.codecs.rests.nbytes(b.layout.shard_numel) if b.storage.codecs.rests else b.compute.shard.nbytes
        for b in rests
    ]
    return {
        "frozen": frozen,
        "bytes": kept,
        "sent": 2 * sum(sent) * (dist.get_world_size() - 1),
        "seconds": statistics.median(times[2:]),
        "loss": losses[0],
    }


def in_processes(arguments: list[str], ranks: int) -> dict[str, float]:
    """What rank 0 gives."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for rank in range(ranks):
            fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
            env = {**os.environ, **fixed, "RANK": str(rank), "WORLD_SIZE": str(ranks), "PYTHONPATH": str(ROOT)}
            command = [sys.executable, __file__, "--worker", f"{folder}/store", *arguments]
            running.append(
                subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        outputs = [process.communicate() for process in running]
    try:
        return dict(result_of(outputs[0][0]))
    except ValueError:
        raise RuntimeError("\n".join(error[-3000:] for _, error in outputs)) from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the table to this file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=dist.FileStore(args.worker, world), rank=rank, world_size=world)
        give(measure(args.case, args.layers, args.width, args.rounds))
        dist.barrier()
        dist.destroy_process_group()
        return
    sizes = ["--layers", str(args.layers), "--width", str(args.width), "--rounds", str(args.rounds)]
    found = {case: in_processes([*sizes, "--case", case], args.ranks) for case in CASES}
    base = found["bf16"]
    rows = [
        [
            case,
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['bytes'] / base['bytes']:.2f}",
            f"{row['sent'] / 1e6:.2f}",
            f"{1000 * row['seconds']:.0f}",
            f"{row['loss']:.5f}",
        ]
        for case, row in found.items()
    ]
    header = [
        "frozen weights",
        "MB of weights on a rank",
        "of bf16",
        "MB received in a step",
        "CPU ms per step on a rank",
        "first loss",
    ]
    title = f"# Adapters on low-bit weights: {base['frozen'] / 1e6:.1f}M frozen parameters, {args.ranks} ranks, stage 3"
    source = f"`python benchmarks/low_bit.py --ranks {args.ranks} {' '.join(sizes)}`, {versions()}, {cpu_name()}"
    finish([title, "", source, "", *markdown(header, rows)], args.out)


if __name__ == "__main__":
    main()
