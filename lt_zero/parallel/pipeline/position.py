"""The position of this rank in pipelines, known before modules are made: a pipeline makes its own layers only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lt_zero.config.blocks import PipelineParallel
from lt_zero.core import division
from lt_zero.core.comm.process_groups import exists
from lt_zero.core.division import Division


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


_planned: list[Position] = []  # of the contexts ``at`` that this process is in


def current() -> Position:
    """Position in the run that this process has joined last; that of a single rank without one."""
    if _planned:
        return _planned[-1]
    run = _run()
    if run is None:
        return Position()
    return run.find(Position) or Position(block=run.config.pipeline)


def of_first_rank(call: Callable[[], Any]) -> Any:
    """Result of ``call`` on the first rank of the run. All ranks call it, as it may make modules together. Collective.

    Raises:
        Exception: what it raises; RuntimeError where only other ranks failed.
    """
    run = _run() if not _planned else None
    if run is None:
        return call()
    with run.world.agree("measuring layers of a pipeline", RuntimeError):
        found = call()
    return run.world.host_broadcast(found, "layers of a pipeline")


def _run() -> Division | None:
    """The run that this process has joined last, if its process group is still there."""
    run = division.current()
    if run is None or run.known is None:
        return None
    group = run.world.process_group
    return run if group is None or exists(group) else None


@contextmanager
def at(position: Position) -> Iterator[None]:
    """Context in which pipelines are made for ``position``."""
    _planned.append(position)
    try:
        yield
    finally:
        _planned.pop()
