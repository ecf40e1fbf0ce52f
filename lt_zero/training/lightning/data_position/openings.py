"""The sampler of a loader that resumes by itself: how its order is repeated, however often the loader opens it.

Note [Openings of a sampler]
    A sampler without ``state_dict`` draws its order when it is opened, from the random states of the process, its own
    generator, a count of passes, or a list that it shuffles in place. torchdata's loaders open it twice for a pass with
    workers, and up to four times for a pass that they resume; only the last opening counts. So what the order was drawn
    from is taken when the sampler is opened, and each time that a resumed run opens it for the same pass it begins from
    there. A sampler that another one reads is opened by that one, as often as in the run that was not interrupted.

    Python looks up ``__iter__`` in the class. From the moment when the loader is opened until its first batch has been
    read, the class of the sampler is therefore a subclass; before and after it is the user's.

    A loader whose ``__iter__`` is a generator function, such as litdata's, is opened as late as with its first batch,
    and then draws the seed of its workers. In a pass that is resumed it is drawn from where the pass began, and not
    from the present random states, which the run that was not interrupted leaves alone there.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Container, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from lt_zero.common.random_states import RandomStates
from lt_zero.common.saved_random_states import read_states
from lt_zero.training.lightning.data_position.own_state import OwnState, opened_sampler


class Opening(NamedTuple):
    """State that a sampler has drawn its order from: the random states of the process, and private state."""

    states: RandomStates
    own: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors."""
        return {"states": self.states.state_dict(), "own": self.own}

    def without(self, paths: Container[str]) -> Opening:
        """The same without the private state of ``paths``."""
        return self._replace(own={path: state for path, state in self.own.items() if path not in paths})

    @classmethod
    def of(cls, packed: Any, where: str) -> Opening:
        """Restore from ``state_dict``. Raises: CheckpointError."""
        return cls(read_states(packed["states"], where), packed["own"])


class Openings:
    """The openings of the sampler of one loader that resumes by itself. See Note [Openings of a sampler].

    Args:
        loader: the user's.
        own: what was found in its attributes.
    """

    def __init__(self, loader: Any, own: OwnState) -> None:
        self.last: Opening | None = None  # in the present pass
        self._loader = loader
        self._own = own
        self._from: Opening | None = None  # what openings begin from; None: as they are
        self._sampler = opened_sampler(loader) if isinstance(loader, DataLoader) and not own.covered else None
        self._kind = type(self._sampler)
        self._watched = _watched_kind(self._kind, self) if hasattr(self._kind, "__iter__") else None
        # Whether its order may not be repeated. What is built in, such as a range, has one order.
        self.unwatched = self._watched is None and self._kind.__module__ != "builtins"

    def passed(
        self, make: Callable[[], Iterator[Any]], start: RandomStates | None = None, begin: Opening | None = None
    ) -> Iterator[Any]:
        """Open a pass with ``make``, and watch how the sampler is opened for it.

        Args:
            start: the random states from which a loader that is opened late draws the seed of its workers: those that a
                pass which is resumed began with; None: the present ones.
            begin: what the order of a pass which is resumed was drawn from, if that is known.
        """
        self.last = begin
        if begin is not None:
            self._own.set(begin.own)
            # Also what had not changed when that was taken: each opening changes it.
            self.last = begin._replace(own=self._own.take())
            begin = begin._replace(own=self._own.take(long=True))
        with self._watching(begin):
            batches = make()
        return self._rest(batches, start, begin)

    def _rest(self, batches: Iterator[Any], start: RandomStates | None, begin: Opening | None) -> Iterator[Any]:
        """``batches``; loader and sampler may be opened as late as with the first."""
        with self._watching(begin), self._seeded(start):
            first = next(batches, self)
        if first is not self:
            yield first
            yield from batches

    @contextmanager
    def _watching(self, begin: Opening | None) -> Generator[None, None, None]:
        kind = self._watched
        if kind is not None:
            try:
                _set_class(self._sampler, kind)
            except TypeError:  # its class is not Python's
                kind = self._watched = None
        self._from = begin
        try:
            yield
        finally:
            self._from = None
            if kind is not None:
                _set_class(self._sampler, self._kind)

    @contextmanager
    def _seeded(self, start: RandomStates | None) -> Generator[None, None, None]:
        """Context in which a loader that is opened late draws its seed from ``start``; None: from where it does."""
        loader = self._loader
        late = isinstance(loader, DataLoader) and inspect.isgeneratorfunction(type(loader).__iter__)
        if start is None or not late or loader.generator is not None:
            yield
            return
        loader.generator = torch.Generator()
        loader.generator.set_state(start.torch)
        try:
            yield
        finally:
            loader.generator = None

    @contextmanager
    def opening(self) -> Generator[None, None, None]:
        """Context in which the sampler draws its order."""
        if self._from is None:
            self.last = Opening(RandomStates.now(), self._own.take())
            yield
            return
        before = RandomStates.now()
        self._from.states.apply()
        self._own.set(self._from.own, only="order")  # samples go on with the numbers that they draw
        try:
            yield
        finally:
            before.apply()  # the run that was not interrupted draws nothing here


def _watched_kind(kind: Any, openings: Openings) -> Any:
    """A subclass of the class of a sampler that tells ``openings`` when it is opened."""
    owner = weakref.ref(openings)  # Python keeps classes that inspect.getattr_static has seen
    late = inspect.isgeneratorfunction(kind.__iter__)

    def begin_late(sampler: Any, indices: Iterator[Any]) -> Iterator[Any]:
        with _opening(owner), as_users(sampler):
            first = next(indices, owner)
        if first is not owner:
            yield first
            yield from indices

    def __iter__(self: Any) -> Iterator[Any]:
        if late:
            return begin_late(self, kind.__iter__(self))
        with _opening(owner), as_users(self):
            return kind.__iter__(self)  # type: ignore[no-any-return]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickles, for a worker that is given the sampler, as the user's class."""
        with as_users(self):
            return self.__reduce_ex__(protocol)

    @contextmanager
    def as_users(sampler: Any) -> Generator[None, None, None]:
        """Context in which the sampler has the class that the user's code knows."""
        watched = type(sampler)
        _set_class(sampler, kind)
        try:
            yield
        finally:
            _set_class(sampler, watched)

    methods = {"__iter__": __iter__, "__reduce_ex__": __reduce_ex__}
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    try:
        return type(kind)(kind.__name__, (kind,), {"__slots__": (), **named, **methods})
    except Exception:  # the user's metaclass or `__init_subclass__`, a registry of names say, does not allow it
        return None


def _set_class(sampler: Any, kind: Any) -> None:
    """Set the class of a sampler, not by its own ``__setattr__``: it may be frozen, or pass attributes on."""
    object.__setattr__(sampler, "__class__", kind)


@contextmanager
def _opening(owner: weakref.ref[Openings]) -> Generator[None, None, None]:
    openings = owner()
    if openings is None:
        yield
        return
    with openings.opening():
        yield
