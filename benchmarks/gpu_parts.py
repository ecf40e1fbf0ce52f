"""`make gpu`: tests and measurements on a GPU, in parts of at most 6 minutes, and one table of claims.

    python benchmarks/gpu_parts.py [--device cuda] [--limit 360] [kernels engine nccl states offload trainer bench]

Parts go on when one before them fails, and steps of a part, too. A step that the limit cuts off leaves what it has
measured until then; later ones are not begun. A part writes its output to benchmarks/results/gpu_PART.md and its rows
of claims to build/gpu/cuda/PART.json; the table of all rows (gpu_claims.py) is printed and written after each part.
With ``--device cpu`` (the CPU in the GPU's place) all of it goes to build/gpu/cpu.

The exit status is 1 if a step failed or, on a GPU, if a claim does not hold.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from gpu_claims import CLAIMS, FAIL, PARTS, Left, Row, folder_of, measurements, rows_of_tests, write_table
from measuring import ROOT, results_of, versions

LIMIT_S, LINES = 360.0, 60
PATIENCE_S = 10.0  # for what a step does when it is interrupted: pytest writes its report, measurements remove files
ENDED = "ended by the limit"


@dataclass(frozen=True)
class Step:
    """One command of a part.

    Attributes:
        words: the arguments of Python.
        tests: it runs tests, whose report of pytest is read.
    """

    name: str
    words: tuple[str, ...]
    tests: bool = False


def tests(paths: Sequence[str], most: int, limit: float) -> Step:
    """Tests marked ``gpu``, in several processes where there are cores for them: importing and compiling takes long.

    Args:
        most: processes. One of xdist's is started again if a test that hangs has ended it.
        limit: seconds of the part, of which a test may take a sixth: one that hangs ends all that run in its process.
    """
    timeout = f"{limit / 6:.0f}"
    options = ("-q", "-p", "no:cacheprovider", "-m", "gpu", "--timeout", timeout, "--timeout-method", "thread")
    if (processes := min(most, len(os.sched_getaffinity(0)) // 2)) > 1 or most == 1:
        options = (*options, "-n", str(processes), "--dist", "worksteal")
    return Step("tests", ("-m", "pytest", *options, *paths), tests=True)


def parts_of(device: str, limit: float = LIMIT_S) -> dict[str, list[Step]]:
    """The steps of each part, which takes ``limit`` seconds at most: tests first, then claims, then tables."""
    gpu, on = device == "cuda", ("--device", device)
    build = [Step("build", ("-m", "lt_zero.cli", "ops", "build", "--cuda"))] if gpu else []
    ops, host = (), ()
    attention: tuple[str, ...] = ("--heads", "16", "--lengths", "4096", "16384", "--rounds", "3", "--full", "0")
    activation: tuple[str, ...] = ("--rounds", "3")
    if not gpu:
        ops = ("--numel", "1e6", "--rounds", "3", "--threads", "1")
        host = ("--rounds", "5")
        # bf16 on a CPU takes minutes for longer ones.
        attention = ("--heads", "1", "--lengths", "256", "--rounds", "1", "--full", "256")
        activation = ("--depth", "4", "--rounds", "1")
    paths = {
        "kernels": ("tests/kernels", "tests/gpu/test_attention.py"),
        "engine": (
            "tests/gpu/test_accelerator.py",
            "tests/gpu/test_engine.py",
            "tests/gpu/test_parallel.py",
            "tests/test_inference.py",
        ),
        "nccl": ("tests/gpu/test_nccl.py",),
        "states": ("tests/gpu/test_fewer_bits.py", "tests/gpu/test_moved_states.py"),
        "offload": ("tests/offload", "tests/features/offload", "tests/features/activation_checkpointing"),
        "trainer": ("tests/gpu/test_trainer.py",),
    }
    found = {}
    for part in PARTS:
        # Ranks of several tests would take turns on the GPU, which makes each collective slower.
        found[part] = [tests(paths[part], 1 if part == "nccl" else 8, limit)] if part in paths else []
        found[part] += [Step(name, ("benchmarks/gpu_measures.py", name, *on)) for name in measurements(part)]
    found["kernels"][:0] = build
    found["bench"] += [
        Step("table of kernels", ("benchmarks/ops.py", *on, *ops)),
        Step("table of host time", ("benchmarks/host_cost.py", *on, "--ranks", "8", *host)),
        Step("table of activations", ("benchmarks/activation.py", *on, *activation)),
        Step("table of attention", ("benchmarks/attention.py", *on, "--dtype", "bfloat16", *attention)),
    ]
    return found


# ---- running -------------------------------------------------------------------------------------------------------


def run(words: Sequence[str], device: str, limit: float) -> tuple[int | None, str]:
    """Exit status and output of Python with these arguments; status None if it was ended after ``limit`` seconds.

    The output is shown meanwhile. Its children end with it.
    """
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "ZERO_TEST_DEVICE": device, "PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=env,
        start_new_session=True,  # a group of processes that is ended as a whole
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    printed: list[str] = []

    def read() -> None:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            printed.append(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    code: int | None = None
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reader.join(5)  # a process that left the group may hold the pipe
    return code, "".join(printed)


def run_part(part: str, steps: Sequence[Step], device: str, limit: float, folder: Path) -> tuple[Left, str]:
    """Run the steps, and return what they leave and the report.

    A claim that no step left a row for gets one that says why.
    """
    begun = time.monotonic()
    left = Left(f"{date.today()}, {versions(device)}")
    report = list[str]()
    for step in steps:
        room, words = limit - (time.monotonic() - begun), step.words
        if room <= 0:
            left.steps[step.name] = "not begun, the limit was over"
            continue
        junit = folder / f"{part}.xml"
        if step.tests:
            junit.unlink(missing_ok=True)
            words = (*words, f"--junitxml={junit}")
        print(f"---- {part}: {step.name}", flush=True)
        started = time.monotonic()
        code, printed = run(words, device, room)
        ended = {0: "passed", None: ENDED}.get(code, f"failed ({code})")
        left.steps[step.name] = f"{ended}, {time.monotonic() - started:.0f} s"
        left.rows += (
            rows_of_tests(part, junit, code is not None) if step.tests else [Row(**row) for row in results_of(printed)]
        )
        shown = "\n".join(printed.splitlines()[-LINES:])
        report += ["", f"## {step.name}: {left.steps[step.name]}", "", f"`python {' '.join(step.words)}`", ""]
        report += ["```", shown, "```"]
    have = {row.key for row in left.rows}
    for claim in CLAIMS:
        if claim.part == part and claim.key not in have:
            step = "tests" if claim.of_tests else claim.shown_by
            left.rows.append(Row(claim.key, None, f"{step} {left.steps.get(step, 'did not run')}"))
    seconds = time.monotonic() - begun
    return left, "\n".join([f"# {part}: {seconds:.0f} s", "", left.about, *report]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a part; default 360")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown parts {sorted(unknown)}; there are {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # `run` ends what it has started
    folder = folder_of(args.device)
    steps = parts_of(args.device, args.limit)
    bad = 0
    folder.mkdir(parents=True, exist_ok=True)
    reports = ROOT / "benchmarks" / "results" if args.device == "cuda" else folder
    verdicts: dict[str, int] = {}
    for part in args.parts or PARTS:
        left, report = run_part(part, steps[part], args.device, args.limit, folder)
        left.write(folder / f"{part}.json")
        (reports / f"gpu_{part}.md").write_text(report)
        bad += sum("failed" in ended for ended in left.steps.values())
        verdicts = write_table(args.device)
    sys.exit(bool(bad or (args.device == "cuda" and verdicts.get(FAIL))))


if __name__ == "__main__":
    main()
