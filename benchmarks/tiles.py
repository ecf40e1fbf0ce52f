"""A loss and an MLP in tiles of tokens beside torch's whole ones on a CPU: time of a step, and peak memory.

    python benchmarks/tiles.py [--dtype float32] [--rounds 5] [--threads 2] [--clock cpu] [--out results.md]

Cases take turns, a call each, in rounds; the ratio is taken within a round, and its median is shown. Memory is the peak
above that of weights and inputs, in processes of their own: results and gradients, and what else a case needs.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from measuring import child, cpu_name, finish, give, interleaved, markdown, memory, ratio, timed
from torch import Tensor, nn
from torch.nn import functional as F

from lt_zero import tiled, tiled_cross_entropy

Step = Callable[[], object]


class MLP(nn.Module):
    """As in Llama."""

    def __init__(self, features: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        options = {"bias": False, "dtype": dtype}
        self.gate, self.up = nn.Linear(features, inner, **options), nn.Linear(features, inner, **options)
        self.down = nn.Linear(inner, features, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def loss(args: argparse.Namespace, tiles: bool, tokens: int) -> Step:
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(tokens, args.features).to(dtype).requires_grad_()
    weight = (torch.randn(args.vocabulary, args.features) / args.features**0.5).to(dtype).requires_grad_()
    labels = torch.randint(args.vocabulary, (tokens,))

    def whole() -> Tensor:
        return F.cross_entropy((hidden @ weight.T).float(), labels)

    made = partial(tiled_cross_entropy, hidden, weight, labels) if tiles else whole
    return lambda: torch.autograd.grad(made(), (hidden, weight))


def mlp(args: argparse.Namespace, tiles: bool, tokens: int) -> Step:
    module = MLP(args.mlp_features, 4 * args.mlp_features, getattr(torch, args.dtype))
    x = torch.randn(1, tokens, args.mlp_features).to(getattr(torch, args.dtype)).requires_grad_()
    module = tiled(module) if tiles else module
    return lambda: torch.autograd.grad(module(x).sum(), (x, *module.parameters()))


CASES = {"loss": loss, "mlp": mlp}


def peak(args: argparse.Namespace, case: str, tiles: bool, tokens: int) -> int:
    CASES[case](args, tiles, 16)()  # loads what torch loads at the first call
    step = CASES[case](args, tiles, tokens)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
    resident = memory()
    step()
    return round((memory("VmHWM") - resident) * 2**20)


def cpu_timed(step: Step) -> Callable[[], float]:
    """As ``timed``, in seconds of processors, which other processes on a busy machine do not add to."""

    def run() -> float:
        start = time.process_time()
        step()
        return time.process_time() - start

    return run


def row(args: argparse.Namespace, case: str, tokens: int) -> list[str]:
    options = ("dtype", "features", "vocabulary", "mlp_features", "threads")
    words = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in options]
    most = [int(child("tiles.py", *words, "--peak-of", case, str(tiles), str(tokens))) for tiles in (0, 1)]
    clock = timed if args.clock == "wall" else cpu_timed
    found = interleaved({str(tiles): clock(CASES[case](args, bool(tiles), tokens)) for tiles in (0, 1)}, args.rounds)
    seconds = [statistics.median(found[name]) for name in "01"]
    slower = ratio(found["1"], found["0"])
    shown = [f"{nbytes / 1e6:,.0f}" for nbytes in most] + [f"{most[1] / most[0]:.3f}"]
    return [
        case,
        f"{tokens:,}",
        *shown,
        *(f"{each:.2f}" for each in seconds),
        f"{slower.median:.2f}",
        f"{slower.spread:.0%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--vocabulary", type=int, default=128 * 1024)
    parser.add_argument("--features", type=int, default=256, help="of the loss")
    parser.add_argument("--loss-tokens", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--mlp-features", type=int, default=512)
    parser.add_argument("--mlp-tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--peak-of", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.peak_of:
        case, tiles, tokens = args.peak_of
        give(peak(args, case, tiles == "1", int(tokens)))
        return
    cases = [("loss", tokens) for tokens in args.loss_tokens] + [("mlp", tokens) for tokens in args.mlp_tokens]
    rows = []
    for case in cases:
        rows.append(row(args, *case))
        print(*rows[-1], flush=True)
    sizes = (
        f"loss: {args.features} features, {args.vocabulary:,} rows; gated MLP: {args.mlp_features} features, 4 times"
    )
    used = f"{args.dtype}, {cpu_name()}, {args.threads} threads, {args.clock} time"
    machine = f"{used}; torch {torch.__version__}; load {os.getloadavg()[0]:.1f}"
    head = ["", "tokens", "whole, MB", "tiles, MB", "ratio", "whole, s", "tiles, s", "ratio", "spread"]
    finish([sizes, machine, "", *markdown(head, rows)], args.out)


if __name__ == "__main__":
    main()
