"""The position of this rank in pipelines, known before modules are made: a pipeline makes its own layers only."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lt_zero.config.blocks import PipelineParallel
from lt_zero.core.comm.process_groups import exists
from lt_zero.core.comm.world import World


@dataclass(frozen=True)
class Position:
    """This rank in pipelines.

    Attributes:
        rank: of ``ranks`` one after the other.
        block: the ``pipeline`` block of the run's configuration.
        plans: there is no run: of layers that are made on the meta device only shapes count.
    """

    rank: int = 0
    ranks: int = 1
    block: PipelineParallel = field(default_factory=PipelineParallel)
    plans: bool = False

    @property
    def stages(self) -> int:
        """Stages of a pipeline on all ranks."""
        return self.ranks * self.block.chunks if self.ranks > 1 else 1

    @property
    def own(self) -> range:
        """Stages on this rank."""
        return range(self.rank, self.stages, self.ranks)

    def rank_of(self, stage: int) -> int:
        """Rank that has ``stage``."""
        return stage % self.ranks


# Of the run that this process has joined last, and its ranks; None: of ``at``.
_current: list[tuple[Position, weakref.ref[World] | None]] = []


def current() -> Position:
    """Position in the run that this process has joined last; that of a single rank without one."""
    for position, known in _current:
        world = known() if known is not None else None
        if known is None or (world is not None and (world.process_group is None or exists(world.process_group))):
            return position
    return Position()


def of_first_rank(call: Callable[[], Any]) -> Any:
    """Result of ``call`` on the first rank of the run. All ranks call it, as it may make modules together. Collective.

    Raises:
        Exception: what it raises; RuntimeError where only other ranks failed.
    """
    known = _current[-1][1] if _current else None
    world = known() if known is not None else None
    if world is None:
        return call()
    with world.agree("measuring layers of a pipeline", RuntimeError):
        found = call()
    return world.host_broadcast(found, "layers of a pipeline")


def enter(position: Position, world: World) -> None:
    """Begin a run of ``world``: until it is gone, or ``leave``, pipelines are made for it."""
    _current[:] = [(position, weakref.ref(world))]


def leave() -> None:
    """End it."""
    _current.clear()


@contextmanager
def at(position: Position) -> Iterator[None]:
    """Context in which pipelines are made for ``position``."""
    before = list(_current)
    _current[:] = [(position, None)]
    try:
        yield
    finally:
        _current[:] = before
