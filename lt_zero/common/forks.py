"""Forks of this process: what has to end before, so that the child does not wait for threads that it does not have."""

from __future__ import annotations

import contextlib
import ctypes

_HARD = 2  # omp_pause_hard of OpenMP 5.0: threads end, and start again when they are needed


def end_openmp_threads() -> None:
    """End the threads that OpenMP keeps for the next parallel region of the calling thread.

    A forked child believes that it has them. GNU's runtime then waits for them in the child's first parallel region
    with several threads, for ever. No-op where torch's runtime does not know the call.
    """
    # Older runtimes than OpenMP 5.0 (gcc 9) lack the function.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).omp_pause_resource_all(_HARD)
