"""What the benchmarks share: the machine and its versions, rounds in turn, ratios of pairs, tables, child processes.

Only the standard library is imported here, since workers of peers import this, too, and their memory is measured.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parent.parent
Rounds = dict[str, list[float]]  # of each case, what it measured in each round
T = TypeVar("T")

# ---- the machine ---------------------------------------------------------------------------------------------------


def cpu_name() -> str:
    """As /proc/cpuinfo has it, with family and model, which tell processors of one name apart; "" if it has none."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            found[key.strip()] = value.strip()
    parts = [found.get("model name", ""), *[f"{key} {found[key]}" for key in ("cpu family", "model") if key in found]]
    return ", ".join(part for part in parts if part)


def versions(device: str = "cpu", packages: Sequence[str] = ("lightning", "deepspeed")) -> str:
    """Python, torch, those of the packages that are installed, the GPU's software, and the number of cores."""
    import torch

    found = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for package in packages:
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    if device == "cuda":
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout.strip()
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        found += [f"GPU and driver {driver}", f"CUDA {torch.version.cuda}", f"NCCL {nccl}"]
    return ", ".join([*found, f"{os.cpu_count()} CPU cores, {platform.machine()}"])


def memory(key: str = "VmRSS") -> float:
    """``VmRSS`` (now) or ``VmHWM`` (highest so far) of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


def resident() -> float:
    """Pages of this process that are in memory, in MiB; quicker than ``memory``."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def proportional() -> float:
    """Memory of this process in MiB, where a page that n processes share counts as the n-th of one (PSS)."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


class Sampler:
    """A thread that reads this process's memory each millisecond while the context lasts.

    Args:
        read: returns MiB.

    Attributes:
        points: seconds since the start, MiB.
    """

    def __init__(self, read: Callable[[], float] = resident) -> None:
        self.points: list[tuple[float, float]] = []
        self._read, self._ended = read, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._start = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(1e-3):
            self.points.append((time.perf_counter() - self._start, self._read()))


# ---- rounds --------------------------------------------------------------------------------------------------------


def timed(
    action: Callable[[], object],
    wait: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[], float]:
    """A function that does it, and returns the seconds of ``clock`` until ``wait`` has returned."""

    def run() -> float:
        start = clock()
        action()
        if wait is not None:
            wait()
        return clock() - start

    return run


def interleaved(cases: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 1) -> dict[str, list[T]]:
    """What each case returned in each round, after rounds to warm up. Each round begins with another case."""
    found: dict[str, list[T]] = {name: [] for name in cases}
    names = list(cases)
    for number in range(warm_up + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            value = cases[name]()
            if number >= warm_up:
                found[name].append(value)
    return found


class Ratio(NamedTuple):
    """The median of ratios that were taken within rounds, and the quartiles."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """From quartile to quartile, relative to the median."""
        return (self.high - self.low) / self.median


def ratio(values: Sequence[float], reference: Sequence[float]) -> Ratio:
    """Of pairs, one per round."""
    pairs = [value / base for value, base in zip(values, reference, strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4, method="inclusive") if len(pairs) > 1 else pairs * 3
    return Ratio(middle, low, high)


# ---- files and what is printed -------------------------------------------------------------------------------------


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def sync(path: Path) -> None:
    """Wait until a file, or the files in a folder, are on the disk."""
    for file in [path] if path.is_file() else path.rglob("*"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A folder on the disk to measure."""
    folder = parent / f"lt_zero-bench-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def finish(lines: Sequence[str], out: Path | None) -> None:
    """Print a report, and write it to a file if there is one."""
    text = "\n".join(lines)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


# ---- child processes -----------------------------------------------------------------------------------------------

_MARK = "RESULT "


def give(result: object) -> None:
    """In a child: hand numbers to the parent, as JSON on a line of its own."""
    print(_MARK + json.dumps(result), flush=True)


def result_of(output: str) -> Any:
    """What a child gave.

    Raises:
        ValueError: nothing.
    """
    found = results_of(output)
    if not found:
        raise ValueError("there is no result")
    return found[-1]


def results_of(output: str) -> list[Any]:
    """All that a child gave; a line that its end cut short is left out."""
    found = []
    for line in output.splitlines():
        if line.startswith(_MARK):
            with suppress(ValueError):
                found.append(json.loads(line.removeprefix(_MARK)))
    return found


def child(
    script: str,
    *arguments: str,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    limit: float | None = None,
) -> Any:
    """What a script of this folder gives, in a process of its own, with lt_zero from this checkout.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
        subprocess.TimeoutExpired: it took more than ``limit`` seconds.
    """
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(environment or {})}
    command = [python, "-W", "ignore", str(ROOT / "benchmarks" / script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=limit)
    try:
        return result_of(done.stdout)
    except ValueError:
        raise RuntimeError(f"{' '.join(command[3:])} failed ({done.returncode}):\n{done.stderr[-3000:]}") from None
