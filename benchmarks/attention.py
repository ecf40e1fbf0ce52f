"""Block-sparse attention beside torch's dense one on one device: time of forward and backward, and peak memory.

    python benchmarks/attention.py [--lengths 1024 4096 16384] [--dtype float32] [--threads 2] [--out results.md]

Cases take turns, a call each, in rounds; ratios are taken within a round, and their medians are shown. Dense attention
is ``scaled_dot_product_attention``, causal where the pattern is unidirectional (which halves its work). "rate" is the
rate of useful operations beside dense attention's: (elements computed / elements that dense attention computes) *
(its time / the pattern's time). Memory is the peak above that of the inputs, in processes of their own: results and
gradients, and what else a case needs. "in full" computes the whole matrix of scores.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from lt_zero.attention import BigBird, BSLongformer, Fixed, LocalSlidingWindow, Pattern, Variable, sparse_attention

PATTERNS: dict[str, Pattern] = {
    "Fixed, blocks of 16": Fixed(block=16, num_local_blocks=32, attention="unidirectional"),
    "Fixed, blocks of 64": Fixed(block=64, num_local_blocks=16, attention="unidirectional"),
    "Fixed, both directions": Fixed(block=64, num_local_blocks=32),
    "Variable": Variable(block=32, local_window_blocks=(8, 16), num_random_blocks=2, global_block_indices=(0, 1)),
    "BigBird": BigBird(block=64, num_sliding_window_blocks=5, num_random_blocks=3, num_global_blocks=2),
    "BSLongformer": BSLongformer(block=64, num_sliding_window_blocks=9),
    "LocalSlidingWindow": LocalSlidingWindow(block=32, num_sliding_window_blocks=33),
}
DENSE, CAUSAL = "dense", "dense, causal"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def case(name: str) -> Attend:
    if name in PATTERNS:
        return lambda q, k, v: sparse_attention(q, k, v, PATTERNS[name])
    if name == "in full":
        return lambda q, k, v: ((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5).softmax(-1) @ v
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=name == CAUSAL)


def inputs(args: argparse.Namespace, length: int) -> list[Tensor]:
    torch.manual_seed(0)
    shape = (1, length, args.heads, args.dim)
    dtype = getattr(torch, args.dtype)
    return [torch.randn(shape, device=args.device).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3)]


def run(attend: Attend, tensors: list[Tensor], grad: Tensor) -> float:
    wait(grad)
    start = time.perf_counter()
    torch.autograd.grad(attend(*tensors), tensors, grad)
    wait(grad)
    return time.perf_counter() - start


def wait(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def times(args: argparse.Namespace, length: int) -> dict[str, list[float]]:
    tensors = inputs(args, length)
    grad = torch.randn_like(tensors[0])
    names = [DENSE, CAUSAL, *PATTERNS]
    found: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(args.rounds + 1):
        for name in names:
            seconds = run(case(name), tensors, grad)
            if round_:  # the first one builds layouts and fills caches
                found[name].append(seconds)
    return found


def peak(args: argparse.Namespace, name: str, length: int) -> int:
    """Bytes beyond the inputs while a case runs once: its results, which are four times an input, and what it needs."""
    tensors = inputs(args, length)
    grad = torch.randn_like(tensors[0])
    attend = case(name)
    small = inputs(args, 256)
    run(attend, small, torch.randn_like(small[0]))
    gc.collect()
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(attend, tensors, grad)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
    before = resident("VmRSS")
    run(attend, tensors, grad)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def peak_apart(args: argparse.Namespace, name: str, length: int) -> int:
    command = [sys.executable, __file__, "--peak-of", name, "--lengths", str(length), "--dtype", args.dtype]
    command += [
        "--heads",
        str(args.heads),
        "--dim",
        str(args.dim),
        "--device",
        args.device,
        "--threads",
        str(args.threads),
    ]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def density(name: str, heads: int, length: int) -> float:
    if name not in PATTERNS:
        return (1 + 1 / length) / 2 if name == CAUSAL else 1.0
    pattern = PATTERNS[name]
    blocks = -(-length // pattern.block)
    found = pattern.density(heads, blocks)
    if pattern.causal:  # halves of the blocks on the diagonal
        found -= (pattern.block - 1) / (2 * pattern.block * blocks)
    return found


def table(args: argparse.Namespace, length: int) -> list[str]:
    found = times(args, length)
    lines = [
        f"{length} tokens\n",
        "| | density | ms | dense / it | rate, of dense | memory, MB |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("in full", *found):
        memory = peak_apart(args, name, length) if name != "in full" or length <= args.full else None
        shown = "" if memory is None else f"{memory / 1e6:.1f}"
        if name == "in full":
            lines += [f"| {name} | 1 | | | | {shown} |"] if shown else []
            continue
        dense = CAUSAL if name == CAUSAL or (name in PATTERNS and PATTERNS[name].causal) else DENSE
        ratio = statistics.median(a / b for a, b in zip(found[dense], found[name], strict=True))
        part = density(name, args.heads, length)
        rate = ratio * part / density(dense, args.heads, length)
        ms = statistics.median(found[name]) * 1e3
        lines.append(f"| {name} | {part:.3f} | {ms:.1f} | {ratio:.2f} | {rate:.2f} | {shown} |")
    return lines


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--full", type=int, default=8192, help="longest sequence whose whole matrix is computed")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak_of:
        print(peak(args, args.peak_of, args.lengths[0]))
        return
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"{cpu_name()}, {args.threads} threads"
    load = f"load {os.getloadavg()[0]:.1f}"
    head = f"{args.heads} heads of {args.dim}, {args.dtype}, {device}; torch {torch.__version__}; {load}"
    lines = [head, ""]
    print(head, flush=True)
    for length in args.lengths:
        made = [*table(args, length), ""]
        print("\n".join(made), flush=True)
        lines += made
    if args.out:
        args.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
