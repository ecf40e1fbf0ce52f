"""Where this rank is in pipelines, known before modules are made: a pipeline makes its own layers only."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lt_zero.comm.process_groups import exists
from lt_zero.comm.world import World
from lt_zero.config.blocks import PipelineParallel


@dataclass(frozen=True)
class Position:
    """This rank in pipelines.

    Attributes:
        rank: of ``ranks`` one after the other.
        block: the ``pipeline`` block of the run's configuration.
    """

    rank: int = 0
    ranks: int = 1
    block: PipelineParallel = field(default_factory=PipelineParallel)

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


# Of the run that this process has joined last, and whether its ranks are still there.
_current: list[tuple[Position, Callable[[], bool]]] = []


def current() -> Position:
    """That of the run that this process has joined last; a single rank without one."""
    return next((position for position, lives in _current if lives()), Position())


def enter(position: Position, world: World) -> None:
    """Begin a run of ``world``: until it is gone, or ``leave``, pipelines are made for it."""
    known = weakref.ref(world)

    def lives() -> bool:
        ranks = known()
        return ranks is not None and ranks.process_group is not None and exists(ranks.process_group)

    _current[:] = [(position, lives)]


def leave() -> None:
    """End it."""
    _current.clear()


@contextmanager
def at(position: Position) -> Iterator[None]:
    """Context in which pipelines are made for ``position``."""
    before = list(_current)
    _current[:] = [(position, lambda: True)]
    try:
        yield
    finally:
        _current[:] = before
