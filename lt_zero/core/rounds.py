"""Rounds: which micro-batches ranks run at the same time, and with which random numbers and buffers each begins.

A ``Rounds`` is plain: each rank runs one micro-batch after the other, with whatever its process has. A feature by which
ranks run several micro-batches as one round brings another one (``Feature.rounds``). The faces ask it in all runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from lt_zero.core.division import current

if TYPE_CHECKING:
    from lt_zero.core.comm.ranks import Ranks


class Turns:
    """The batches of one round that a rank runs, in the order of its turns. One leaf of a tree of batches.

    Attributes:
        batches: one for each turn.
    """

    __slots__ = ("batches",)

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = tuple(batches)


class Rounds:
    """A run in which each micro-batch is one of a rank.

    Attributes:
        count: the number of micro-batches of a round; None: there are no rounds.
        turns: micro-batches of a round that this rank runs, one after the other.
    """

    count: int | None = None
    turns = 1

    # ---- numbers -----------------------------------------------------------------------------------------------

    def parts(self, data_ranks: int) -> int:
        """The number of parts that data are divided into; ``data_ranks``: of the run."""
        return data_ranks

    def number(self, turn: int) -> int:
        """The number of the micro-batch that this rank runs in a turn, among those of a round."""
        raise NotImplementedError

    # ---- random numbers ----------------------------------------------------------------------------------------

    def begin(self, anew: bool) -> None:
        """Give all ranks the random states of rank 0, which they share outside of turns. Collective.

        ``anew``: a run begins, and those of each micro-batch are derived from them.
        """

    def turn(self, turn: int) -> AbstractContextManager[None]:
        """Context of what is run of the micro-batch of a turn: with random numbers of its own."""
        return nullcontext()

    def now(self) -> Any:
        """The present random states of this rank's micro-batches, which later draws do not change."""
        return None

    def set(self, states: Any) -> None:
        """Let micro-batches go on with random states of ``now``, or of ``unpacked``."""

    # ---- data --------------------------------------------------------------------------------------------------

    def loader(self, loader: Any) -> Any:
        """The loader of rounds, whose items are ``Turns``, over a loader of the first turn's batches.

        Raises:
            ConfigError: it is not known how its data are divided.
        """
        return loader

    # ---- buffers -----------------------------------------------------------------------------------------------

    def follow(self, root: nn.Module, peers: Ranks) -> None:
        """Look after the buffers of a model, which ``peers`` have, from now on."""

    def begin_turn(self, turn: int) -> None:
        """Let the buffers be what they were when the round began. Called for each turn, in order."""

    def end_round(self) -> None:
        """Let the buffers be what the first micro-batch of the round has made of them. Collective."""

    # ---- values ------------------------------------------------------------------------------------------------

    def in_order(self, mine: Sequence[Any], name: str) -> list[Any]:
        """The values of all micro-batches, in the order of their numbers; tensors are on the host. Collective.

        Args:
            mine: of this rank, one for each turn: picklable, with tensors of any shapes.
            name: of what they are, for errors.
        """
        raise NotImplementedError

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def packed(self, states: Any) -> dict[str, Any] | None:
        """Random states of ``now`` as plain containers and tensors, by the numbers of micro-batches."""
        return None

    def unpacked(self, saved: Sequence[Any], where: str) -> Any:
        """Random states for this rank, of those that all ranks of the saved run have ``packed``.

        That run may have had other ranks.

        Raises:
            CheckpointError: some are missing, or damaged; begins with ``where``.
        """
        return None

    def merged(self, saved: Sequence[Any], own: Any) -> Any:
        """The state of a loader for this rank, of those that all ranks of the saved run had; ``own``: this rank's."""
        return own


_reading: list[tuple[int, int]] = []  # the part of the data that this process reads now, and the number of parts


def data_part() -> tuple[int, int]:
    """The number of the part of the data that is read now, and how many parts there are.

    An iterable data set asks it in ``__iter__``, also in workers, and gives its part. Parts are those of data ranks.
    With ``reproducible.virtual_ranks`` they are those of virtual ranks, of which one process may read several.

    Raises:
        RuntimeError: there is no run that divides data, or this is a worker that was not forked in it.
    """
    if _reading:
        return _reading[-1]
    if (run := current()) is not None and run.known is not None:
        return run.data_rank, run.data_ranks
    raise RuntimeError(
        "data_part() is known while a loader is read in a run: call it in `__iter__` of the data set. In workers that "
        'are not forked (multiprocessing_context="spawn") it is known with reproducible.virtual_ranks only.'
    )


@contextmanager
def reading(part: int, parts: int) -> Iterator[None]:
    """Context in which this process reads a part of the data."""
    _reading.append((part, parts))
    try:
        yield
    finally:
        _reading.pop()


class ReadsPart:
    """A ``worker_init_fn`` of workers that read a part of the data. ``then``: the user's."""

    def __init__(self, part: int, parts: int, then: Callable[[int], object] | None) -> None:
        self._part = part
        self._parts = parts
        self._then = then

    def __call__(self, worker: int) -> None:
        _reading[:] = [(self._part, self._parts)]
        if self._then is not None:
            self._then(worker)


def split(tree: Any, turns: int) -> list[Any] | None:
    """The trees of each turn, of a tree with ``Turns`` among its leaves; None if it has none."""
    if not any(isinstance(leaf, Turns) for leaf in _leaves(tree)):
        return None
    return [_of_turn(tree, turn) for turn in range(turns)]


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        for child in tree.values():
            yield from _leaves(child)
    elif isinstance(tree, (list, tuple)):
        for child in tree:
            yield from _leaves(child)
    else:
        yield tree


def _of_turn(tree: Any, turn: int) -> Any:
    if isinstance(tree, Turns):
        return tree.batches[turn]
    if isinstance(tree, dict):
        return {key: _of_turn(child, turn) for key, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_of_turn(child, turn) for child in tree)
    return tree
