"""The part of the data that is read now, and the batches of a round that a rank reads together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lt_zero.core.division import current

_reading: list[tuple[int, int]] = []  # the part of the data that this process reads now, and the number of parts


def data_part() -> tuple[int, int]:
    """The number of the part of the data that is read now, and how many parts there are.

    An iterable data set asks it in ``__iter__``, also in workers, and gives its part. Parts are those of data ranks or,
    in a run with rounds (rounds.py), of their micro-batches, of which one process may read several.

    Raises:
        RuntimeError: there is no run that divides data, or this is a worker that was not forked in it.
    """
    if _reading:
        return _reading[-1]
    if (run := current()) is not None and run.known is not None:
        return run.data_rank, run.data_ranks
    raise RuntimeError(
        "data_part() is known while a loader is read in a run: call it in `__iter__` of the data set, and fork the "
        'workers of the loader (multiprocessing_context="fork").'
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


class Turns:
    """The batches of one round that a rank runs, in the order of its turns. One leaf of a tree of batches.

    Attributes:
        batches: one for each turn.
    """

    __slots__ = ("batches",)

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = tuple(batches)


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
