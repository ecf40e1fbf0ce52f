"""Tracks and restores the position in the training loaders.

Note [Read when needed]
    A watched loader is the user's loader with one method changed: ``__iter__`` answers at once and asks the loader for
    an iterator when the first batch is wanted. Lightning calls ``iter`` at set-up, and again at other moments of a
    resumed run than of one that goes on; an iterator that is never read then draws no random number and starts no
    worker. The attributes are the user's object's own dictionary, so that what either sees, both see.

Note [The same batches again]
    A pass over a loader is repeated from the random states that it began with: the sampler draws the same order and the
    workers get the same seeds. For a map-style dataset in this process only indices are skipped; random numbers of
    the samples do not matter, as the states are set afterwards. In workers (whose random numbers go on with their
    samples) and for iterable datasets the batches are loaded and dropped. What draws from this process' generators
    between batches *and* decides the order by that (an iterable dataset that shuffles with ``torch.randperm``, in a
    model with dropout on the CPU) cannot be repeated; it is warned about. A dataset that shuffles by a generator that
    nobody else sees, with a seed from nowhere, cannot be noticed.

Note [Other batches]
    With another world size or batch size the place is counted in samples of all ranks, rounded up to whole batches:
    under ``DistributedSampler``, which orders the samples by seed and epoch only, none is seen twice in the epoch.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lt_zero.common.module_hooks import ProcessLocal
from lt_zero.lightning.data_position.random_state import RandomStates

Make = Callable[[], Iterator[Any]]


class Later(ProcessLocal):
    """An iterator that is created on first read. See Note [Read when needed]."""

    def __init__(self, make: Make, before: Callable[[], object]) -> None:
        self._make, self._before = make, before
        self._inner: Iterator[Any] | None = None

    def __iter__(self) -> Later:
        return self

    def __next__(self) -> Any:
        self._before()
        if self._inner is None:
            self._inner = self._make()
        return next(self._inner)


class _Watched:
    """Mixed into the class of a user's loader."""

    opened: ClassVar[Callable[[Make], Iterator[Any]]]
    original: ClassVar[object]

    def __iter__(self) -> Iterator[Any]:
        return type(self).opened(cast(Any, super()).__iter__)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return operator.getitem, ((self.original,), 0)


def unwatched(loader: object) -> object:
    """The user's own object."""
    return loader.original if isinstance(loader, _Watched) else loader


def watched(loader: object, opened: Callable[[Make], Iterator[Any]]) -> object | None:
    """``loader`` with ``opened`` in place of its ``__iter__``, or None if it is no object of a Python class."""
    kind: Any = type(loader)
    try:
        names = {"opened": staticmethod(opened), "original": loader}
        places = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        clone = object.__new__(type(kind)(kind.__name__, (_Watched, kind), {**names, **places}))
        object.__setattr__(clone, "__dict__", vars(loader))
    except (TypeError, AttributeError):
        return None
    return cast(object, clone)


class Watch:
    """One training loader: where it is read, and what the current pass over it began with."""

    def __init__(self, feed: Feed, loader: Any, world: int) -> None:
        self._feed, self.loader = feed, loader
        self.stateful = callable(getattr(loader, "state_dict", None)) and hasattr(loader, "load_state_dict")
        self.unit = world * _batch_size(loader)  # samples of all ranks in a batch
        self.make: Make | None = None
        self.start: RandomStates | None = None  # before the pass began
        self.generators: list[Tensor] = []  # states of the user's generators then
        self.fetched = 0  # batches of the pass
        self.served = 0  # batches of the epoch, over several passes
        self.cycled = False  # the epoch has come to this loader's end
        self.exhausted = False  # the pass has
        self.openings = 0  # passes with the same workers
        self._resumed: list[Iterator[Any]] = []

    def opened(self, make: Make) -> Iterator[Any]:
        if not self._feed.live:
            return make()
        self.make = make
        self._feed.opening(self)
        return _Pass(self)

    def begin(self) -> Iterator[Any]:
        """The iterator of a new pass, or that of the restored one."""
        self.exhausted = False
        if self._resumed:
            return self._resumed.pop(0)
        assert self.make is not None
        self.start, self.generators, self.fetched = RandomStates.now(), [g.get_state() for g in self._own()], 0
        self.openings += 1
        return self.make()

    def _own(self) -> list[torch.Generator]:
        """The user's generators that determine the order."""
        holders = [self.loader, getattr(self.loader, "sampler", None), getattr(self.loader, "batch_sampler", None)]
        holders.append(getattr(holders[-1], "sampler", None))
        found = [getattr(holder, "generator", None) for holder in holders]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    # ---- saved and restored --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": self.start.state_dict() if self.start is not None else None,
            "generators": self.generators,
            "generators_now": [g.get_state() for g in self._own()],
            "epoch": getattr(getattr(self.loader, "sampler", None), "epoch", None),
            "fetched": self.fetched,
            "served": self.served,
            "cycled": self.cycled,
            "exhausted": self.exhausted,
            "openings": self.openings,
            "unit": self.unit,
        }

    def resume(self, place: dict[str, Any], back: int | None, want: RandomStates) -> None:
        """Make the next pass begin where the saved one was, ``back`` batches earlier; None: at a new epoch.

        The random states are other ones afterwards.

        Args:
            place: from ``state_dict``; ``start`` is a RandomStates.
            back: batches to be read again.
            want: what the random states will be set to, to know what cannot be repeated.
        """
        assert self.make is not None
        count = max(0, int(place["fetched"]) - back) if back is not None else 0
        if place["unit"] != self.unit:
            count = -(-count * int(place["unit"]) // self.unit)
        workers = bool(getattr(self.loader, "persistent_workers", False))
        if workers and int(place["openings"]) > min(count, 1):
            self._warn("keeps its workers (persistent_workers=True), whose random numbers begin anew")
            self.make()  # starts them: the pass then finds them there, and draws no seed for them
        if back is None and self.stateful and place["fetched"]:
            self.make()  # its state is that of the pass that has ended: leave that behind
        if back is not None and place["cycled"]:
            self._resumed.append(iter(()))  # tells Lightning's CombinedLoader what it had been told
            self.cycled = True
        self.openings = min(int(place["openings"]), 1)
        self.served = max(0, int(place["served"]) - (back or 0)) if back is not None else 0
        start = place["start"]
        if back is not None and place["exhausted"]:
            return
        again = back is not None and (count > 0 or back > 0)
        self._set_generators(place["generators" if again else "generators_now"])
        if count > 0 and start is not None:
            self.start, self.generators, self.fetched = start, list(place["generators"]), count
            self._set_epoch(place["epoch"])
            start.apply()
            self._resumed.append(self._skipped(count, want))
            if back == 0:
                self._set_generators(place["generators_now"])

    def _set_generators(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._own(), states, strict=False):
            generator.set_state(state)

    def _set_epoch(self, epoch: Any) -> None:
        """Lightning sets it too late for what it reads ahead, and counts an epoch that ``max_steps`` broke off."""
        sampler = getattr(self.loader, "sampler", None)
        if isinstance(epoch, int) and callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)

    def _skipped(self, count: int, want: RandomStates) -> Iterator[Any]:
        """A pass of which ``count`` batches were read. See Note [The same batches again]."""
        assert self.make is not None
        if self.stateful:
            return self.make()  # it knows its place
        if _skips_indices(self.loader):
            rest = copy.copy(self.loader)
            name = "batch_sampler" if rest.batch_sampler is not None else "sampler"
            indices = iter(getattr(rest, name))
            vars(rest)[name] = _Rest(indices)
            batches: Iterator[Any] = iter(rest)
            self._drop(indices, count, want)
            return batches
        batches = self.make()
        self._drop(batches, count, want)
        return batches

    def _drop(self, items: Iterator[Any], count: int, want: RandomStates) -> None:
        begun: RandomStates | None = None
        for _ in range(count):
            if next(items, self) is self:
                return  # the dataset has become smaller: the epoch ends here
            begun = begun or RandomStates.now()  # the order may be drawn with the first batch
        if begun is None:
            return
        end = RandomStates.now()
        names = sorted(begun.differing(end) & end.differing(want))
        if names:
            self._warn(
                f"draws from this process' random numbers ({', '.join(names)}) with every batch, between what the "
                "model draws: if that decides the order of its samples, it is not repeated, and samples may be seen "
                "twice or not at all in this epoch"
            )

    def _warn(self, text: str) -> None:
        warnings.warn(f"The training loader {_name(self.loader)} {text}.", UserWarning, stacklevel=2)


class Feed:
    """The training loaders of a run, in Lightning's order.

    Args:
        before: called before each batch of all loaders together.
        after: called after each batch of one loader.
    """

    def __init__(self, before: Callable[[], object], after: Callable[[], object]) -> None:
        self.watches: list[Watch] = []
        self.unknown: list[str] = []  # loaders that cannot be watched
        self.live = True
        self.recent: deque[RandomStates] = deque(maxlen=2)  # before each of the last batches
        self._before, self._after = before, after
        self._read = False  # since the loaders were given
        self._last = ("", -1)

    @property
    def served(self) -> int:
        """Batches of this epoch."""
        return max([watch.served for watch in self.watches], default=0)

    def add(self, loader: object, world: int) -> object:
        if self._read:
            self._read, self.watches, self.unknown = False, [], []
        watch = Watch(self, unwatched(loader), world)
        clone = watched(watch.loader, watch.opened)
        if clone is None:
            self.unknown.append(_name(watch.loader))
            return loader
        self.watches.append(watch)
        return clone

    def opening(self, watch: Watch) -> None:
        """A CombinedLoader opens all its loaders for an epoch, and one that has ended again ("max_size_cycle")."""
        if watch not in self.watches:
            return
        self._read = True
        if self._last != ("stop", id(watch)) or len(self.watches) == 1:
            for other in self.watches:
                other.cycled, other.served = False, 0
            self.recent.clear()
            self._last = ("open", id(watch))
        else:
            self._last = ("cycle", id(watch))

    def fetching(self, watch: Watch) -> None:
        if watch is self.watches[0] and self._last != ("cycle", id(watch)):
            self._before()
        self._last = ("fetch", id(watch))

    def served_by(self, watch: Watch) -> None:
        watch.fetched += 1
        watch.served += 1
        self._after()

    def stopped(self, watch: Watch) -> None:
        watch.cycled = watch.exhausted = True
        self._last = ("stop", id(watch))


class _Pass(ProcessLocal):
    """An iterator over a watched loader."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._inner: Iterator[Any] | None = None

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        watch = self._watch
        watch._feed.fetching(watch)
        if self._inner is None:
            self._inner = watch.begin()
        try:
            batch = next(self._inner)
        except StopIteration:
            watch._feed.stopped(watch)
            raise
        watch._feed.served_by(watch)
        return batch


class _Rest:
    """What is left of a sampler."""

    def __init__(self, indices: Iterator[Any]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[Any]:
        return self._indices


def _skips_indices(loader: Any) -> bool:
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return plain and loader.num_workers == 0 and not isinstance(loader.dataset, IterableDataset)


def _batch_size(loader: Any) -> int:
    sizes = [getattr(x, "batch_size", None) for x in (loader, getattr(loader, "batch_sampler", None))]
    return next((size for size in sizes if isinstance(size, int) and size > 0), 1)


def _name(loader: Any) -> str:
    dataset = getattr(loader, "dataset", None)
    return type(loader).__name__ + (f"({type(dataset).__name__})" if dataset is not None else "")
