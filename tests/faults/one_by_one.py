"""Many small trials, each in a process of its own: a trial may hang, crash or take all memory, and the next goes on."""

from __future__ import annotations

import functools
import os
import pickle
import resource
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.faults.case import Outcome

MEMORY = 3 << 30  # bytes that a trial may take beyond what it begins with
_SHOWN = 5  # failures in an outcome


class Wrong(Exception):
    """What a trial has come to is against what the package promises."""


def each(numbers: Iterable[int], trial: Callable[[int, Path], str], seconds: float = 40.0) -> Outcome:
    """Run ``trial(number, folder)`` for each number; the outcome counts what they return.

    A trial fails by an exception, by its end, or by taking longer than ``seconds``, which is long for a machine with
    other work. What it writes to ``what`` in its folder is told then.
    """
    counts, failures = Counter[str](), list[str]()
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder:
            told, good = _apart(functools.partial(trial, number, Path(folder)), seconds)
            what = Path(folder, "what")
            told = told if good or not what.exists() else f"{what.read_text()}: {told}"
        counts[told if good else "failed"] += 1
        if not good:
            failures.append(f"mutation {number}: {told}")
    what = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    kinds = Counter(_kind(text) for text in failures)
    summary = [f"{count} x {kind}" for kind, count in kinds.most_common()]
    return Outcome(not failures, what, "\n".join([*summary, *failures[: _SHOWN * 2]]))


def _kind(text: str) -> str:
    """The last line of a failure without what differs from one to the next."""
    last = text.strip().splitlines()[-1].split(": ", 1)
    return " ".join(last[-1].split()[:8])[:100]


def _apart(run: Callable[[], str], seconds: float) -> tuple[str, bool]:
    """What ``run`` returns, in a process of its own, and whether it does."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.setsid()
            result = _answer(run)
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(result, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    end, parts = time.monotonic() + seconds, list[bytes]()
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
            if not (part := pipe.read(1 << 16)):
                status = os.waitpid(child, 0)[1]
                answer = b"".join(parts)
                return pickle.loads(answer) if answer else (f"its process ended with {status}", False)
            parts.append(part)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"hang: not over after {seconds:.0f} s", False


def _answer(run: Callable[[], str]) -> tuple[str, bool]:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.RLIM_INFINITY))
    try:
        return run(), True
    except Wrong as error:
        return str(error), False
    except BaseException:
        return traceback.format_exc()[-1500:], False


def copied(source: Path, folder: Path) -> Path:
    """A copy of a file or a folder that a trial may damage."""
    target = folder / source.name
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
    return target
