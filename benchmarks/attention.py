"""Block-sparse attention beside torch's dense one on one device: time of forward and backward, and peak memory.

    python benchmarks/attention.py [--lengths 1024 4096 16384] [--dtype float32] [--threads 2] [--out results.md]

Cases take turns, a call each, in rounds; ratios are taken within a round, and their medians are shown. Dense attention
is ``scaled_dot_product_attention``, causal where the pattern is unidirectional (which halves its work). "rate" is the
rate of useful operations beside dense attention's: (elements computed / elements that dense attention computes) *
(its time / the pattern's time). Memory is the peak above that of the inputs (of a CPU in other processes): results and
gradients, and what else a case needs. "in full" computes the whole matrix of scores.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from measuring import Rounds, cpu_name, interleaved, markdown, memory, ratio, timed
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
DENSE, CAUSAL, IN_FULL = "dense", "dense, causal", "in full"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def case(name: str) -> Attend:
    if name in PATTERNS:
        return lambda q, k, v: sparse_attention(q, k, v, PATTERNS[name])
    if name == IN_FULL:
        return lambda q, k, v: ((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5).softmax(-1) @ v
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=name == CAUSAL)


def inputs(args: argparse.Namespace, length: int) -> list[Tensor]:
    torch.manual_seed(0)
    shape = (1, length, args.heads, args.dim)
    dtype = getattr(torch, args.dtype)
    return [torch.randn(shape, device=args.device).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3)]


def run(attend: Attend, tensors: list[Tensor], grad: Tensor) -> float:
    wait(grad)
    return timed(lambda: torch.autograd.grad(attend(*tensors), tensors, grad), lambda: wait(grad))()


def wait(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def times(args: argparse.Namespace, length: int, names: Sequence[str] = (DENSE, CAUSAL, *PATTERNS)) -> Rounds:
    tensors = inputs(args, length)
    grad = torch.randn_like(tensors[0])
    cases = {name: partial(run, case(name), tensors, grad) for name in names}
    return interleaved(cases, args.rounds)  # the round before them builds layouts and fills caches


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
    resident = memory()
    run(attend, tensors, grad)
    return round((memory("VmHWM") - resident) * 2**20)


def peak_apart(args: argparse.Namespace, name: str, length: int) -> int:
    """``peak`` in a process of its own on a CPU, where memory that was freed may still be resident."""
    if args.device == "cuda":
        return peak(args, name, length)
    # It is forked from one that has imported this, which takes seconds, and has computed nothing.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lt_zero.attention"])
    with context.Pool(1, torch.set_num_threads, (args.threads,)) as pool:
        return pool.apply(peak, (args, name, length))


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
    rows = []
    for name in (IN_FULL, *found):
        nbytes = peak_apart(args, name, length) if name != IN_FULL or length <= args.full else None
        shown = "" if nbytes is None else f"{nbytes / 1e6:.1f}"
        if name == IN_FULL:
            rows += [[name, "1", "", "", "", shown]] if shown else []
            continue
        dense = CAUSAL if name == CAUSAL or (name in PATTERNS and PATTERNS[name].causal) else DENSE
        faster = ratio(found[dense], found[name]).median
        part = density(name, args.heads, length)
        rate = faster * part / density(dense, args.heads, length)
        ms = statistics.median(found[name]) * 1e3
        rows.append([name, f"{part:.3f}", f"{ms:.1f}", f"{faster:.2f}", f"{rate:.2f}", shown])
    head = ["", "density", "ms", "dense / it", "rate, of dense", "memory, MB"]
    return [f"{length} tokens", "", *markdown(head, rows)]


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
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
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
