"""What bench_all.py measures: groups of cases that take turns, and the rows of the table that compare them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import checkpoint
import export
import host_cost
import low_bit
import memory_budget
import offload
import predict_memory
import small_model
import step_time
from bench_report import STEP, STEP_BESIDE_DEEPSPEED
from measuring import Rounds, child, interleaved, scratch, timed

from lt_zero.kernels import library


class LeftOut(Exception):
    """A group that cannot be measured here; says why."""


@dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
        quick: sizes and rounds that only show that everything runs.
        deepspeed_python: an interpreter that has deepspeed; "" without one.
        path: a folder on the disk that is measured.
    """

    quick: bool
    deepspeed_python: str
    path: Path

    @cached_property
    def deepspeed(self) -> dict[str, Any]:
        """Versions of that interpreter and its packages, and where they are; nothing without one."""
        if not self.deepspeed_python:
            return {}
        code = "import json, sys, sysconfig, torch; from importlib.metadata import version as v; print(json.dumps({"
        code += "'version': v('deepspeed'), 'torch': torch.__version__, 'python': list(sys.version_info[:2]), "
        code += "'site': sysconfig.get_path('purelib')}))"
        done = subprocess.run([self.deepspeed_python, "-c", code], check=True, capture_output=True, text=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def size(self, usual: int, quick: int) -> int:
        return quick if self.quick else usual


@dataclass(frozen=True)
class Row:
    """One line of the table: cases of a group, divided by one of them.

    Attributes:
        what: is compared, with sizes.
        references: the case that counts as 1.00: the first of these that was measured.
        cases: are shown beside lt_zero's; None: all of the group.
        limit: a case that is no peer but what the machine can do.
    """

    what: str
    references: tuple[str, ...]
    cases: tuple[str, ...] | None = None
    limit: str = ""


@dataclass(frozen=True)
class Group:
    """Cases that take turns in one measurement.

    Attributes:
        name: for ``--only``.
        measure: seconds (or ``unit``) of each case in each round.
        timed: whether other programs and steal disturb it; memory is the same on a busy machine.
    """

    name: str
    measure: Callable[[Options], Rounds]
    rows: tuple[Row, ...]
    unit: str = "s"
    timed: bool = field(default=True)


# ---- steps ---------------------------------------------------------------------------------------------------------

STEP_PEERS = {
    "ddp": "DDP",
    "alone": "without communication",
    "zero_redundancy": "ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    **{f"lt_zero-{stage}": f"lt_zero stage {stage}" for stage in (0, 1, 2, 3)},
    "lt_zero-3-release": "lt_zero stage 3 releasing",
}
DEEPSPEED_PEERS = {"ddp": "DDP"} | {  # apart: with all the others, their processes would need more than 20 GB
    f"{library}-{stage}": f"{name} stage {stage}"
    for stage in (1, 2, 3)
    for library, name in (("deepspeed", "DeepSpeed"), ("lt_zero", "lt_zero"))
}
ORDERED_PEERS = {
    f"lt_zero-{stage}{variant}": f"lt_zero stage {stage}{name}"
    for stage in (0, 1, 2, 3)
    for variant, name in (("", ""), ("-bits", ", virtual ranks"))
}
FUSED, NARROW = "step", "moments in"  # beginnings of the names of cases of AdamW
OFFLOAD_PEERS = {"ddp": "DDP"} | {
    f"{library}-{stage}-cpu": f"{name} stage {stage}"
    for stage in (2, 3)
    for library, name in (("deepspeed", "DeepSpeed"), ("lt_zero", "lt_zero"))
}


def steps_deepspeed(options: Options) -> Rounds:
    if not options.deepspeed_python:
        raise LeftOut("DeepSpeed is not installed; see --deepspeed-python")
    return steps(DEEPSPEED_PEERS, options)


def steps(peers: dict[str, str], options: Options) -> Rounds:
    """Of each peer the median step on the slowest rank, in each round."""
    names = [name for name in peers if options.deepspeed_python or not name.startswith("deepspeed")]
    words = ["--peers", ",".join(names), "--rounds", str(options.size(6, 2)), "--steps", str(options.size(3, 1))]
    words += ["--warmup", str(options.size(2, 1))]
    words += ["--deepspeed-python", options.deepspeed_python] if options.deepspeed_python else []
    words += ["--depth", "1", "--width", "64"] if options.quick else []
    return {peers[peer.name]: peer.seconds for peer in step_time.measure(step_time.parse(words)) if not peer.error}


def small_steps(options: Options) -> Rounds:
    """Of each peer the step on rank 0, in each round."""
    found = small_model.in_processes("--rounds", str(options.size(40, 2)))
    return {name: [seconds for seconds, _ in pairs] for name, pairs in found.items()}


def nvme(options: Options) -> Rounds:
    """The step of an optimizer whose states rest in files, and its bytes at the speed of plain reads and writes."""
    found: Rounds = {"lt_zero": [], "plain reads and writes": []}
    for _ in range(options.size(3, 1)):
        sizes = options.size(12, 2), options.size(1024, 128), options.size(3, 2)
        case = offload.measure("no clipping: optimizer and parameters in files", *sizes, str(options.path))
        found["lt_zero"] += case["steps"]
        found["plain reads and writes"] += [case["limit"]] * len(case["steps"])
    return found


# ---- kernels, files, Python ----------------------------------------------------------------------------------------


def adam(isa: str, threads: int, options: Options) -> Rounds:
    """Steps of AdamW alone, in a process in which torch and lt_zero have this instruction set."""
    if isa == "avx512" and best_isa() not in ("avx512", "amx"):
        raise LeftOut("this CPU has no AVX-512")
    env = {"LT_ZERO_ISA": isa, "OMP_NUM_THREADS": str(threads)}
    env |= {"ATEN_CPU_CAPABILITY": isa} if isa in ("avx2", "avx512") else {}
    words = ["--adam", "--threads", str(threads)]
    words += ["--numel", str(options.size(50_000_000, 100_000)), "--rounds", str(options.size(15, 3))]
    theirs = options.deepspeed
    same = theirs and theirs["python"] == list(sys.version_info[:2]) and isa == isas()[0]
    if same:  # its kernel is compiled for the best instruction set, and is loaded into this Python
        words += ["--packages", theirs["site"]]
        env["PATH"] = f"{Path(options.deepspeed_python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = child("ops.py", *words, environment=env)
    if found["isa"] != isa:
        raise RuntimeError(f"the kernels are {found['isa'] or 'not native'}, not {isa}: see `lt-zero ops report`")
    rounds: Rounds = found["rounds"]
    return rounds


def moments(isa: str, threads: int, options: Options) -> Rounds:
    """Of ``adam`` the cases with moments in fewer bits, and those that they are compared with."""
    return {name: found for name, found in adam(isa, threads, options).items() if name.startswith((FUSED, NARROW))}


def best_isa() -> str:
    """Of the kernels in this process: LT_ZERO_ISA, or the best of the machine."""
    return library.status("cpu").isa or "none"


def save(options: Options) -> Rounds:
    with scratch(options.path) as folder:
        return checkpoint.measure_saves(checkpoint.make_state(options.size(100, 4) / 100), options.size(5, 2), folder)


def small_saves(options: Options) -> Rounds:
    with scratch(options.path) as folder:
        return checkpoint.measure_small_saves(options.size(5000, 20), options.size(3, 1), folder)


def load(options: Options) -> Rounds:
    with scratch(options.path) as folder:
        return checkpoint.measure_loads(checkpoint.make_state(options.size(100, 4) / 100), options.size(5, 2), folder)


def exports(options: Options) -> Rounds:
    if not options.deepspeed_python:
        raise LeftOut("its checkpoint is made by DeepSpeed; see --deepspeed-python")
    with scratch(options.path) as folder:
        found = export.measure(options.deepspeed_python, options.size(200, 8), options.size(3, 1), folder)
    return {name: [run.seconds for run in runs] for name, runs in found.items()}


def host(options: Options) -> Rounds:
    """Microseconds."""
    return host_cost.in_process(8, "cpu", options.size(40, 3))


def startup(options: Options) -> Rounds:
    command = shutil.which("lt-zero", path=str(Path(sys.executable).parent)) or shutil.which("lt-zero")
    lt_zero = [command] if command else [sys.executable, "-m", "lt_zero.cli"]
    clock = "import time; import lightning.pytorch; start = time.perf_counter(); {}; print(time.perf_counter() - start)"

    def imported(code: str) -> float:
        python = [sys.executable, "-W", "ignore", "-c", clock.format(code)]
        return float(subprocess.run(python, check=True, capture_output=True, text=True).stdout.split()[-1])

    def ended(words: list[str]) -> float:
        return timed(partial(subprocess.run, words, check=True, stdout=subprocess.DEVNULL))()

    cases = {
        "lightning.pytorch": partial(ended, [sys.executable, "-c", "import lightning.pytorch"]),
        "lt_zero": partial(imported, "import lt_zero"),
        "lt_zero.ZeroStrategy": partial(imported, "from lt_zero import ZeroStrategy"),
        "bare Python": partial(ended, [sys.executable, "-c", "pass"]),
        "Python that imports typer and rich": partial(ended, [sys.executable, "-c", "import typer, rich"]),
        "lt-zero --help": partial(ended, [*lt_zero, "--help"]),
    }
    return interleaved(cases, options.size(3, 1))


def predict(options: Options) -> Rounds:
    """MB at the peak."""
    width, depth = options.size(1024, 64), options.size(12, 2)
    ways = {"ddp": "DDP", "stage 3": "lt_zero stage 3", "stage 3, reuse keys 0": "lt_zero stage 3 releasing"}
    ways["nvme"] = "lt_zero stage 3, weights in files"

    def peak(way: str) -> float:
        return predict_memory.measure(way, False, width, depth, str(options.path)).peak

    return interleaved({name: partial(peak, way) for way, name in ways.items()}, 1, warm_up=0)


def frozen(options: Options) -> Rounds:
    """MB of weights on a rank, and MB that it receives in a step, with adapters on frozen weights."""
    words = ["--layers", str(options.size(4, 1)), "--width", str(options.size(768, 320)), "--rounds", "1"]
    names = {"bf16": "bf16", "bf16, 8 bits": "lt_zero, 8 bits", "bf16, 4 bits": "lt_zero, 4 bits"}
    found: Rounds = {}
    for case, name in names.items():
        figures = low_bit.in_processes([*words, "--case", case], 2)
        found |= {f"weights: {name}": [figures["bytes"] / 1e6], f"received: {name}": [figures["sent"] / 1e6]}
    return found


def budget(options: Options) -> Rounds:
    """MB at most in a step, without weights and states."""
    sizes = {"--depth": options.size(12, 2), "--width": options.size(256, 64), "--rounds": 1}
    found = child("memory_budget.py", *(str(word) for pair in sizes.items() for word in pair))
    return {name: [figures["peak"]] for name, figures in found.items()}


# ---- the groups ----------------------------------------------------------------------------------------------------


def adam_group(isa: str, threads: int) -> Group:
    where = where_of(isa, threads)

    def row(kind: str, what: str) -> Row:
        names = tuple(f"{kind}: {name}" for name in ("torch fused", "DeepSpeedCPUAdam", "lt_zero"))
        return Row(f"{what}, 50M, {where}", names[:1], names, f"{kind}: memory bandwidth")

    rows = (
        row("step", "AdamW alone, fp32"),
        row("bf16 to bf16", "AdamW from bf16 to bf16 with norm, unscale, clip"),
    )
    return Group(f"adam-{isa}-{threads}", partial(adam, isa, threads), rows)


def moments_group(isa: str, threads: int) -> Group:
    where, fused, wide = where_of(isa, threads), f"{FUSED}: torch fused", f"{FUSED}: lt_zero"
    peer, coded = f"{NARROW} 8 bits: torchao", f"{NARROW} 8 bits: lt_zero"
    rows = (
        Row(f"AdamW, moments in bf16, 50M, {where}", (fused,), (fused, f"{NARROW} bf16: lt_zero")),
        Row(f"AdamW, moments in 8 bits, 50M, {where}", (peer, wide), (peer, coded)),
    )
    return Group(f"moments-{isa}-{threads}", partial(moments, isa, threads), rows)


def where_of(isa: str, threads: int) -> str:
    return f"{isa}, {threads} thread{'s' * (threads > 1)}"


def isas() -> list[str]:
    """The instruction sets to measure, the best first: that of LT_ZERO_ISA, both of x86, or the one that there is."""
    best = best_isa()
    alone = os.environ.get("LT_ZERO_ISA") or best not in ("avx2", "avx512", "amx")  # AMX is for matrix products only
    return [best] if alone else ["avx512", "avx2"]


def groups() -> list[Group]:
    """In the order of the table."""
    step = Row(STEP, ("DDP",), limit="without communication")
    offloaded = [
        Row(
            f"step with the optimizer in host memory, stage {stage}",
            (f"DeepSpeed stage {stage}", "DDP"),
            ("DDP", f"DeepSpeed stage {stage}", f"lt_zero stage {stage}"),
        )
        for stage in (2, 3)
    ]
    ordered = [
        Row(
            f"step with as many virtual ranks as ranks, stage {stage}",
            (f"lt_zero stage {stage}",),
            (f"lt_zero stage {stage}", f"lt_zero stage {stage}, virtual ranks"),
        )
        for stage in (0, 1, 2, 3)
    ]
    loads = Row("load of 1.0 GB", ("torch.load",), ("torch.load", "DCP", "lt_zero (checked)"), "plain read")
    python = "Python per step and unit, 8 ranks"
    imports = ("lightning.pytorch", "lt_zero", "lt_zero.ZeroStrategy")
    small = "step of a ConvNet of 57,000 parameters in Fabric, 2 ranks"
    adapted = "adapters, stage 3, 2 ranks"
    helps = ("Python that imports typer and rich", "lt-zero --help")
    return [
        Group("step", partial(steps, STEP_PEERS), (step,)),
        Group("step-deepspeed", steps_deepspeed, (Row(STEP_BESIDE_DEEPSPEED, ("DDP",)),)),
        Group("step-small", small_steps, (Row(small, (small_model.FABRIC,)),)),
        Group("step-bits", partial(steps, ORDERED_PEERS), tuple(ordered)),
        Group("offload", partial(steps, OFFLOAD_PEERS), tuple(offloaded)),
        *(adam_group(isa, threads) for isa in isas() for threads in (1, 2)),
        *(moments_group(isas()[0], threads) for threads in (1, 2)),
        Group("load", load, (loads,)),
        Group("save", save, (Row("durable save of 1.0 GB", ("torch.save",), None, "plain write, fsync"),)),
        Group("save-small", small_saves, (Row("save of 5,000 small parameters, 2 ranks", ("DCP, FSDP2",)),)),
        Group("export", exports, (Row("export of 200M parameters", (export.THEIRS,), None, export.COPY),)),
        Group("nvme", nvme, (Row("step of 160M parameters in files", ("plain reads and writes",)),)),
        Group(
            "host",
            host,
            (
                Row(f"{python}, weights sharded", ("FSDP2",), ("FSDP2", "lt_zero, stage 3")),
                Row(f"{python}, weights kept", ("FSDP2, weights kept",), ("FSDP2, weights kept", "lt_zero, stage 2")),
            ),
            "us",
        ),
        Group(
            "startup",
            startup,
            (
                Row("import after lightning.pytorch", imports[:1], imports),
                Row("a command's help", helps[:1], helps, "bare Python"),
            ),
        ),
        Group(
            "predict",
            predict,
            (Row("peak memory of predict above the bare process, 2 ranks, 403 MB of weights", ("DDP",)),),
            "MB",
            timed=False,
        ),
        Group(
            "frozen",
            frozen,
            (
                Row(f"frozen weights of 23.6M parameters, {adapted}: memory", *few_bits("weights")),
                Row(f"the same: received by a rank in a step, {adapted}", *few_bits("received")),
            ),
            "MB",
            timed=False,
        ),
        Group(
            "memory-budget",
            budget,
            (Row("peak of activations and gradients of a 11.6M GPT", (memory_budget.NONE,)),),
            "MB",
            timed=False,
        ),
    ]


def few_bits(what: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The reference and the cases of frozen weights."""
    names = tuple(f"{what}: {name}" for name in ("bf16", "lt_zero, 8 bits", "lt_zero, 4 bits"))
    return names[:1], names
