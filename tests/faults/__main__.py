"""The fault campaign: ``python -m tests.faults --seed 1 --out FILE``; see docs/internals/faults.md."""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults import tree
from tests.faults.case import Case
from tests.faults.disks import SHIM
from tests.faults.runner import LIMIT_S, Result, Runner, table
from tests.faults.runs import FOLDER
from tests.support.paths import ROOT

# Modules of this folder that have ``cases(seed)``.
KINDS = ["processes", "meshes", "again", "alone", "memory", "disks", "powercut", "network", "mutations", "readers"]


def main(arguments: Sequence[str] | None = None) -> int:
    sys.path.append(str(ROOT / "benchmarks"))  # as pytest has it: nodes are simulated there, too
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Give faults to real runs.")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of cases")
    parser.add_argument("--out", type=Path, help="the file to write the table to; it is printed in any case")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="cases whose `group: name` has this regular expression"
    )
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument("--beside", type=int, default=2, help="cases at a time")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a case")
    parser.add_argument("--keep", action="store_true", help="keep the folders of failed cases")
    chosen = parser.parse_args(arguments)
    cases = [case for kind in KINDS for case in importlib.import_module(f"tests.faults.{kind}").cases(chosen.seed)]
    cases = [case for case in cases if re.search(chosen.only, f"{case.group}: {case.name}")]
    if chosen.list:
        print("\n".join(f"{case.group}: {case.name}" for case in cases))
        return 0
    _preloaded()
    return _campaign(cases, chosen)


def _preloaded() -> None:
    """Compile the library that makes calls of the system fail, and start this program anew with it, once."""
    if SHIM in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="lt-zero-faults-")
    library, env = f"{folder}/shim.so", {**os.environ, FOLDER: folder}
    compiler = shutil.which(os.environ.get("CC", "cc"))
    env[SHIM] = "there is no C compiler" if compiler is None else library
    if compiler is not None:
        source = str(Path(__file__).with_name("shim.c"))
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
        env["LD_PRELOAD"] = library
    os.execve(sys.executable, [sys.executable, "-m", "tests.faults", *sys.argv[1:]], env)


def _campaign(cases: list[Case], chosen: argparse.Namespace) -> int:
    began, shared, mounts = time.monotonic(), set(os.listdir("/dev/shm")), _mounts()
    folder = Path(os.environ[FOLDER])
    temporary = folder / "tmp"
    temporary.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    tree.adopt()
    _preload()
    results = Runner(folder, chosen.beside, chosen.limit, lambda line: print(line, flush=True), chosen.keep).run(cases)
    left = _left(temporary, shared, mounts)
    gone = sorted(float(line) for line in (folder / "gone").read_text().split()) if (folder / "gone").exists() else []
    if not chosen.keep:
        shutil.rmtree(folder, ignore_errors=True)
    text = _report(results, len(cases), left, gone, chosen, time.monotonic() - began)
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(text, encoding="utf-8")
    return int(bool(left) or len(results) < len(cases) or not all(result.outcome.ok for result in results))


def _preload() -> None:
    """Import once what the processes of cases need, which are forked from this one."""
    importlib.import_module("tests.support.preload")
    for name in (
        "lt_zero.training.loop.initialize",
        "lt_zero.training.lightning.strategy",
        "lt_zero.training.lightning.fabric",
        "lt_zero.cli",
    ):
        importlib.import_module(name)
    importlib.import_module("torch.distributed.run")
    gc.collect()
    gc.freeze()


def _mounts() -> set[str]:
    return {line.split()[1] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()}


def _left(temporary: Path, shared: set[str], mounts: set[str]) -> list[str]:
    """What the cases have left on the machine."""
    left = [f"process {pid}: {tree.command_of(pid)}" for pid in tree.descendants(os.getpid())]
    kept = "torchinductor_root", f"lt_zero-{os.geteuid()}"  # caches of kernels, which outlive processes
    left += [f"temporary file {path}" for path in temporary.iterdir() if path.name not in kept]
    left += [f"mount {path}" for path in sorted(_mounts() - mounts)]
    left += [f"/dev/shm/{name}" for name in sorted(set(os.listdir("/dev/shm")) - shared)]
    tree.end_all(os.getpid())
    return left


def _report(
    results: list[Result], count: int, left: list[str], gone: list[float], chosen: argparse.Namespace, seconds: float
) -> str:
    import lightning
    import torch

    failed = sum(not result.outcome.ok for result in results)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    only = f" --only {chosen.only!r}" if chosen.only else ""
    facts = [
        f"- command: `python -m tests.faults --seed {chosen.seed}{only}`, {seconds / 60:.1f} minutes",
        f"- machine: {_cpu()}, {os.cpu_count()} cores, {platform.release()}",
        f"- versions: commit {commit.stdout.strip() or '?'}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, lightning {lightning.__version__}",
        f"- seconds from a fault until no process was left: {_spread(gone)}",
        f"- left over: {'; '.join(left) or 'nothing'}",
    ]
    verdict = f"{len(results)} faults, {failed} broke a promise."
    if len(results) < count:
        verdict = f"Broken off: {verdict[:-1]}, of {count}."
    return "\n".join(["# Fault campaign", "", verdict, "", *facts, "", table(results)])


def _spread(values: list[float]) -> str:
    return f"median {values[len(values) // 2]:.1f}, at most {values[-1]:.1f}" if values else "-"


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
