"""Forks of this process: what has to end before, so that the child does not wait for threads that it does not have."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

_HARD = 2  # omp_pause_hard of OpenMP 5.0: threads end, and start again when they are needed
_RUNTIMES = "libgomp", "libiomp", "libomp"


def end_openmp_threads() -> None:
    """End the threads that OpenMP keeps for the next parallel region of the calling thread.

    A forked child believes that it has them. GNU's runtime then waits for them in the child's first parallel region
    with several threads, for ever. No-op where the runtime does not know the call, or none is loaded.
    """
    for path in _loaded_runtimes():
        # Older runtimes than OpenMP 5.0 (gcc 9) lack the function.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_pause_resource_all(_HARD)


def _loaded_runtimes() -> set[str]:
    """The libraries of OpenMP that this process has loaded; none without /proc."""
    with contextlib.suppress(OSError):
        mapped = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        paths = {line.split(maxsplit=5)[5] for line in mapped if line.count("/")}
        return {path for path in paths if path.rpartition("/")[2].startswith(_RUNTIMES)}
    return set()
