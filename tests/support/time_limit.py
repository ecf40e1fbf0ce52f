"""A limit of time for code that must not wait, such as a reader of a pipe to which nobody writes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Context for the main thread that raises AssertionError after ``seconds``."""

    def late(*_: object) -> None:
        # TimeoutError is an OSError, which the code may handle as one of a file.
        raise AssertionError(f"not over after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
