"""Where this rank is in pipelines, known before modules are made: a pipeline makes its own layers only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lt_zero.config.blocks import PipelineParallel


@dataclass(frozen=True)
class Position:
    """This rank in pipelines.

    Attributes:
        rank: of ``ranks`` one after the other.
        block: the ``pipeline`` block of the run's configuration.
        first_rank: calls a function, and returns what it does on the first rank of the run. Collective.
    """

    rank: int = 0
    ranks: int = 1
    block: PipelineParallel = field(default_factory=PipelineParallel)
    first_rank: Callable[[Callable[[], Any]], Any] = lambda call: call()

    @property
    def stages(self) -> int:
        """Stages of a pipeline on all ranks."""
        return self.ranks * self.block.chunks if self.ranks > 1 else 1

    @property
    def own(self) -> range:
        """Those on this rank."""
        return range(self.rank, self.stages, self.ranks)

    def rank_of(self, stage: int) -> int:
        """Which rank has a stage."""
        return stage % self.ranks


_current: list[Position] = []  # of the runs of this process, the last joined


def current() -> Position:
    """That of the run that this process has joined last; a single rank without one."""
    return _current[-1] if _current else Position()


def enter(position: Position) -> None:
    """Begin a run: pipelines that are made from now on are for it."""
    _current[:] = [position]


def leave() -> None:
    """End it."""
    _current.clear()


@contextmanager
def at(position: Position) -> Iterator[None]:
    """Context in which pipelines are made for ``position``."""
    before = list(_current)
    enter(position)
    try:
        yield
    finally:
        _current[:] = before
