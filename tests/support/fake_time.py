"""A clock that tests move."""

from __future__ import annotations


class Time:
    """Stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds
