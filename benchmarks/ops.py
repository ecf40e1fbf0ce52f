"""The kernels against torch's and DeepSpeed's, on one device: interleaved rounds, medians, GB/s of necessary traffic.

    python benchmarks/ops.py [--codecs | --moments | --rounding] [--numel 50e6] [--rounds 9] [--threads 1 2]
                             [--device cpu] [--cpu-time]

The roof is traffic of the same kind with next to no arithmetic: three streams read, two of them written back.
"Necessary" counts each byte that a one-pass step must move, so a sequence of several passes shows fewer GB/s.

With ``--codecs``: compression instead, with a residual, in GB/s of fp32 input (of sums: of fp32 output for each of the
four buffers), against the torch references, and ``torch.topk`` for selections.

With ``--rounding``: AdamW with weights in bf16 alone, rounded to the nearest or at random: in the kernel of the step,
and by two passes around a step in fp32 (a copy before, rounding after).

With ``--moments``: AdamW alone, with moments in fp32, bf16 and 8 bits, beside torchao's ``AdamW8bit`` where torchao is
installed. ``--cpu-time`` counts the time of the process's threads instead of the clock's, for machines that are shared.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import Rounds, cpu_name, finish, give, interleaved, markdown, timed
from torch import Tensor

from lt_zero import kernels as ops
from lt_zero.kernels import library
from lt_zero.kernels.moments import BLOCK, coded_nbytes
from lt_zero.kernels.places import ElementPlace, place_table
from lt_zero.kernels.rounding import ElementRows
from lt_zero.kernels.sparsify import pack_sparse
from lt_zero.optim import Lamb, Lion

OPTIONS: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "step": 5}
ROOF = "read-modify-write (roof)"
Cases = dict[str, tuple[Callable[[], Any], float]]  # name -> (what to time, bytes that it must move)


class State:
    """Flat fp32 weights, gradients in fp32 and bf16, moments, and a bf16 copy."""

    def __init__(self, numel: int, device: str) -> None:
        self.numel = numel
        self.p, self.g, self.m = (torch.randn(numel, device=device) for _ in range(3))
        self.v = torch.rand(numel, device=device)
        self.low, self.out = self.g.bfloat16(), torch.empty(numel, dtype=torch.bfloat16, device=device)
        self.scale = torch.full((), 0.5, device=device)

    def cut(self, size: int) -> list[list[Tensor]]:
        return [list(t.split(size)) for t in (self.p, self.g, self.m, self.v)]


def torch_optimizer(
    tensors: list[Tensor], grads: list[Tensor], make: Any = torch.optim.AdamW, **keywords: Any
) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(t) for t in tensors]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    optimizer: torch.optim.Optimizer = make(parameters, lr=1e-3, **keywords)
    optimizer.step()
    return optimizer


def deepspeed_adam(state: State) -> Any:
    """DeepSpeed's CPU Adam; None if it is not installed or does not build."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        parameter = torch.nn.Parameter(state.p)
        parameter.grad = state.g
        optimizer = DeepSpeedCPUAdam([parameter], lr=1e-3, weight_decay=0.01)
        optimizer.step()
    except Exception as error:
        print(f"DeepSpeedCPUAdam is left out: {type(error).__name__}: {str(error)[:200]}")
        return None
    return optimizer


def torchao_adam(state: State) -> Any:
    """torchao's AdamW with moments in 8 bits; None if it is not installed."""
    try:
        from torchao.optim import AdamW8bit

        # A size that is no multiple of the block gets moments in fp32, without a word.
        whole = state.numel // BLOCK * BLOCK
        parameter = torch.nn.Parameter(state.p[:whole])
        parameter.grad = state.g[:whole]
        optimizer = AdamW8bit([parameter], lr=1e-3, weight_decay=0.01, block_size=BLOCK)
        optimizer.step()
        if type(optimizer.state[parameter]["exp_avg"]) is Tensor:
            raise TypeError("it keeps its moments in fp32")
    except Exception as error:
        print(f"torchao's AdamW8bit is left out: {type(error).__name__}: {str(error)[:200]}")
        return None
    return optimizer


def moment_cases(state: State, device: str) -> Cases:
    """A step of AdamW alone, by the form in which its moments are kept."""
    n, fused = state.numel, torch_optimizer([state.p], [state.g], fused=True)
    lists = [[state.p], [state.g], [state.m], [state.v]]
    short = [[state.p], [state.g], [state.m.bfloat16()], [state.v.bfloat16()]]
    rows = [[torch.zeros(coded_nbytes(n), dtype=torch.uint8, device=device)] for _ in range(2)]
    codes = [[state.p], [state.g], *rows]
    cases: Cases = {
        "step: torch fused": (fused.step, 28 * n),
        "step: lt_zero": (lambda: ops.adam_step(*lists, **OPTIONS), 28 * n),
        "moments in bf16: lt_zero": (lambda: ops.adam_step(*short, **OPTIONS), 20 * n),
        "moments in 8 bits: lt_zero": (lambda: ops.adam_step(*codes, **OPTIONS), 16 * n),
    }
    if (peer := torchao_adam(state)) is not None:
        cases["moments in 8 bits: torchao"] = (peer.step, 16 * n)
    return cases


def rounding_cases(state: State) -> Cases:
    """AdamW with weights in bf16, from bf16 gradients."""
    n = state.numel
    weights = state.out.copy_(state.p)
    device = state.p.device
    places = place_table([ElementPlace(0, 0, 0, n, 0, 7, 5)], device)
    rows = ElementRows(n, 0, n)
    others = [[state.low], [state.m], [state.v]]

    def two_passes() -> None:
        state.p.copy_(weights)
        ops.adam_step([state.p], *others, **OPTIONS)

    def to_nearest() -> None:
        two_passes()
        weights.copy_(state.p)

    def at_random() -> None:
        two_passes()
        ops.round_stochastic(state.p, weights, rows, seed=7, step=5)

    return {
        "bf16 weights to the nearest: lt_zero": (lambda: ops.adam_step([weights], *others, **OPTIONS), 22 * n),
        "bf16 weights to the nearest: two passes": (to_nearest, 22 * n),
        "bf16 weights at random: lt_zero": (
            lambda: ops.adam_step([weights], *others, **OPTIONS, places=places),
            22 * n,
        ),
        "bf16 weights at random: two passes": (at_random, 22 * n),
    }


def sequence(state: State, step: Callable[[], Any]) -> Callable[[], None]:
    """From bf16 gradients to bf16 weights, as torch and DeepSpeed do it: cast, norm, scale, step, copy."""

    def run() -> None:
        state.g.copy_(state.low)
        torch.linalg.vector_norm(state.g)
        state.g.mul_(state.scale)
        step()
        state.out.copy_(state.p)

    return run


def others(state: State) -> Cases:
    """The other optimizers that kernels step, from bf16 gradients to bf16 weights, against torch's best step."""
    n, cases = state.numel, Cases()
    lists, decay = [[state.p], [state.low], [state.m], [state.out]], {"weight_decay": 0.01}
    sgd = {"lr": 1e-3, "dampening": 0.0, "nesterov": False, "first": False, **decay}
    betas = {"beta1": 0.9, "beta2": 0.99, **decay}
    rate = torch.full((1,), 1e-3, device=state.p.device)

    def lamb() -> None:
        ops.lamb_update([state.p], [state.low], [state.m], [state.v], eps=1e-6, scale=state.scale, **betas)
        ops.lamb_apply([state.p], [state.m], [state.v], rate, [state.out], eps=1e-6, **decay)

    steps: dict[str, tuple[Any, dict[str, Any], Callable[[], Any], int]] = {
        "SGD": (
            torch.optim.SGD,
            {"fused": True},
            lambda: ops.sgd_step(lists[0], lists[1], [], lists[3], momentum=0.0, scale=state.scale, **sgd),
            14,
        ),
        "SGD with momentum": (
            torch.optim.SGD,
            {"fused": True, "momentum": 0.9},
            lambda: ops.sgd_step(*lists, momentum=0.9, scale=state.scale, **sgd),
            22,
        ),
        "Adagrad": (
            torch.optim.Adagrad,
            {"fused": True} if state.p.device.type == "cpu" else {"foreach": True},  # torch fuses it on CPUs only
            lambda: ops.adagrad_step(
                lists[0], lists[1], [state.v], lists[3], lr=1e-3, eps=1e-10, scale=state.scale, **decay
            ),
            22,
        ),
        "Lion": (Lion, {}, lambda: ops.lion_step(*lists, lr=1e-3, scale=state.scale, **betas), 22),
        "Lamb": (Lamb, {}, lamb, 44),
    }
    for name, (make, keywords, kernel, nbytes) in steps.items():
        kind = "torch fused" if keywords.get("fused") else "torch"
        other = torch_optimizer([state.p], [state.g], make, **decay, **keywords)

        def whole(kernel: Callable[[], Any] = kernel) -> None:
            ops.norm_squared([state.low])
            kernel()

        cases[f"{name}, bf16 to bf16: {kind}"] = (sequence(state, other.step), (nbytes + 2) * n)
        cases[f"{name}, bf16 to bf16: lt_zero"] = (whole, (nbytes + 2) * n)
    return cases


def adam_cases(state: State, device: str) -> Cases:
    """A step of AdamW alone, and one from bf16 gradients to bf16 weights with norm, unscale and clip."""
    n, fused = state.numel, torch_optimizer([state.p], [state.g], fused=True)
    low = [[state.p], [state.low], [state.m], [state.v], [state.out]]

    def whole() -> None:
        ops.norm_squared([state.low])
        ops.adam_step(*low, scale=state.scale, **OPTIONS)

    # The roof moves the step's streams through the cheapest arithmetic that the library has: one multiply-add.
    roof = {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "first": False}
    cases: Cases = {
        ROOF: (lambda: ops.sgd_step([state.p], [state.g], [state.m], lr=1e-3, **roof), 20 * n),
        **moment_cases(state, device),
        "bf16 to bf16: torch fused": (sequence(state, fused.step), 30 * n),
        "bf16 to bf16: lt_zero": (whole, 30 * n),
    }
    if device == "cpu" and (peer := deepspeed_adam(state)) is not None:
        cases["step: DeepSpeedCPUAdam"] = (peer.step, 28 * n)
        cases["bf16 to bf16: DeepSpeedCPUAdam"] = (sequence(state, peer.step), 30 * n)
    return cases


def cases_of(state: State, device: str) -> Cases:
    n, cases = state.numel, adam_cases(state, device)
    lists = [[state.p], [state.g], [state.m], [state.v]]
    cases["norm fp32: torch"] = (lambda: torch.linalg.vector_norm(state.g), 4 * n)
    cases["norm fp32: lt_zero"] = (lambda: ops.norm_squared([state.g]), 4 * n)
    small = state.cut(max(1, n // 5000))
    many = torch_optimizer(small[0], small[1], fused=True)
    cases |= others(state) | rounding_cases(state)
    cases["5,000 tensors: torch fused"] = (many.step, 28 * n)
    cases["5,000 tensors: lt_zero, list"] = (lambda: ops.adam_step(*small, **OPTIONS), 28 * n)
    cases["5,000 tensors: lt_zero, one bucket"] = (lambda: ops.adam_step(*lists, **OPTIONS), 28 * n)
    return cases


def codec_cases(state: State) -> Cases:
    """Encoding with error feedback, sums of four buffers, and the parts of top-k."""
    n = state.numel
    x = state.g
    residual = torch.zeros_like(state.g)
    cases = Cases()
    for name, codec in {"int8": ops.INT8, "int4": ops.INT4, "2 bits": ops.TWO_BITS, "1 bit": ops.ONE_BIT}.items():
        bits = codec.bits
        block = codec.block
        out = codec.encode(x)
        for kind, encode, add in (
            ("lt_zero", ops.quantize, ops.dequantize_sum),
            ("torch", ops.quantize_reference, ops.dequantize_sum_reference),
        ):
            # Arguments are bound now: the loop goes on before anything is measured.
            cases[f"{name}, encode: {kind}"] = (partial(encode, x, bits, block, residual, out), 4 * n)
            cases[f"{name}, sum of 4: {kind}"] = (partial(add, [out] * 4, state.p, bits, block, 0.25), 16 * n)
    k = n // 100
    indices = ops.select_topk(x, k)
    values = x[indices.long()]
    sparse = pack_sparse(indices, values, n).to(x.device)
    cases["top 1 %, select: lt_zero"] = (partial(ops.select_topk, x, k), 4 * n)
    cases["top 1 %, select: torch"] = (lambda: x.abs().topk(k, sorted=False), 4 * n)
    cases["top 1 %, encode: lt_zero"] = (partial(ops.encode_topk, x, k, residual), 4 * n)
    cases["top 1 %, pack and code: lt_zero"] = (partial(pack_sparse, indices, values, n), 4 * n)
    cases["top 1 %, decode and add: lt_zero"] = (partial(ops.decode_topk_add, sparse, state.p), 4 * n)
    return cases


def traffic_cases(state: State) -> Cases:
    """Kernels of lt_zero alone, with all bytes that one pass over their tensors reads and writes."""
    suffix, found = ": lt_zero", cases_of(state, state.p.device.type)
    cases: Cases = {name.removesuffix(suffix): found[name] for name in found if name.endswith(suffix)}
    cases["AdamW, fp32"] = cases.pop("step")
    cases["AdamW, bf16 to bf16"] = cases.pop("bf16 to bf16")
    cases["norm, fp32"] = cases.pop("norm fp32")
    n = state.numel
    x = state.g
    residual = torch.zeros_like(state.g)
    for name, codec in {"int8": ops.INT8, "int4": ops.INT4, "1 bit": ops.ONE_BIT}.items():
        bits = codec.bits
        block = codec.block
        out = codec.encode(x)
        encode, add = partial(ops.quantize, x, bits, block, residual, out), partial(ops.dequantize_sum, [out] * 4)
        cases[f"quantise to {name}"] = (encode, 12 * n + out.numel())  # x, and the residual before and after
        cases[f"dequantise and sum 4 of {name}"] = (partial(add, state.p, bits, block, 0.25), 4 * (n + out.numel()))
    k = max(1, n // 100)
    # It reads all elements five times: see csrc/cuda/topk.cu.
    cases["select top 1 %, five reads"] = (partial(ops.select_topk, x, k), 4 * (5 * n + k))
    return cases


def codec_sizes(state: State) -> list[str]:
    """The bytes of normally distributed numbers, as a share of fp32's."""
    codecs: dict[str, ops.Codec] = {"int8": ops.INT8, "int4": ops.INT4, "2 bits": ops.TWO_BITS, "1 bit": ops.ONE_BIT}
    for share in (0.1, 0.01, 0.001):
        codecs[f"top {share:.1%}"] = ops.TopK(share)
        codecs[f"top {share:.1%}, values in bf16"] = ops.TopK(share, torch.bfloat16)
    shares = {name: codec.encode(state.g).numel() / (4 * state.numel) for name, codec in codecs.items()}
    return ["| codec | bytes / fp32 |", "|---|---|", *[f"| {name} | {share:.3%} |" for name, share in shares.items()]]


def measure(cases: Cases, rounds: int, device: str, clock: Callable[[], float] = time.perf_counter) -> Rounds:
    """Seconds of each case in each round."""
    wait = torch.cuda.synchronize if device == "cuda" else None
    return interleaved({name: timed(run, wait, clock) for name, (run, _) in cases.items()}, rounds)


def measure_adam(numel: int, threads: int, rounds: int) -> Rounds:
    """Seconds of ``adam_cases`` on the CPU, and those for the bytes of each kind at the speed of the roof."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    cases = adam_cases(State(numel, "cpu"), "cpu")
    found = measure(cases, rounds, "cpu")
    roof = found.pop(ROOF)
    for kind in ("step", "bf16 to bf16"):
        share = cases[f"{kind}: lt_zero"][1] / cases[ROOF][1]
        found[f"{kind}: memory bandwidth"] = [seconds * share for seconds in roof]
    return found


def table(cases: Cases, rounds: Rounds, what: str = "necessary traffic") -> list[str]:
    rows, seconds = [], {name: statistics.median(values) for name, values in rounds.items()}
    for name, value in sorted(seconds.items(), key=lambda item: item[0]):
        kind = "step" if name.startswith("moments") else name.split(":")[0]
        base = seconds.get(f"{kind}: torch fused", seconds.get(f"{kind}: torch"))
        of_torch = f"{value / base:.2f}" if base else "-"
        rows.append([name, f"{value * 1e3:.1f}", f"{cases[name][1] / value / 1e9:.1f}", of_torch])
    return markdown(["", "ms", f"GB/s of {what}", "time / torch"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", action="store_true", help="compression instead of optimizer steps")
    parser.add_argument("--moments", action="store_true", help="steps of AdamW by the form of its moments")
    parser.add_argument("--rounding", action="store_true", help="steps of AdamW with weights in bf16")
    parser.add_argument("--cpu-time", action="store_true", help="of all threads, instead of the time that passes")
    parser.add_argument("--numel", type=float, default=50e6)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--adam", action="store_true", help=argparse.SUPPRESS)  # one number of threads, for bench_all
    parser.add_argument("--packages", help=argparse.SUPPRESS)  # a folder that has deepspeed for this Python and torch
    args = parser.parse_args()
    if args.adam:
        sys.path += [args.packages] if args.packages else []
        rounds = measure_adam(int(args.numel), args.threads[0], args.rounds)
        give({"isa": library.status("cpu").isa, "torch": torch.__version__, "rounds": rounds})
        return
    status = library.status(args.device)
    kinds = {"Codecs": args.codecs, "Moments of AdamW": args.moments, "Weights in bf16": args.rounding}
    title = next((kind for kind, wanted in kinds.items() if wanted), "Kernels")
    processor, clock = (
        cpu_name() if args.device == "cpu" else "",
        time.process_time if args.cpu_time else time.perf_counter,
    )
    lines = [f"# {title} on {args.device}", "", f"{processor or platform.machine()}, torch {torch.__version__}, "]
    lines[-1] += f"{status.isa or status.why}, {int(args.numel):,} parameters, medians of {args.rounds} rounds"
    lines[-1] += ", time of the CPU" if args.cpu_time else ""
    for threads in args.threads if args.device == "cpu" else [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        state = State(int(args.numel), args.device)
        if args.codecs:
            cases = codec_cases(state)
        elif args.rounding:
            cases = rounding_cases(state)
        else:
            cases = moment_cases(state, args.device) if args.moments else cases_of(state, args.device)
        head = f"{threads} thread{'s' * (threads > 1)}" if args.device == "cpu" else torch.cuda.get_device_name()
        what = "fp32" if args.codecs else "necessary traffic"
        lines += ["", f"## {head}", "", *table(cases, measure(cases, args.rounds, args.device, clock), what)]
    if args.codecs:
        lines += ["", "## Bytes of Gaussian numbers", "", *codec_sizes(state)]
    finish(lines, args.out)


if __name__ == "__main__":
    main()
