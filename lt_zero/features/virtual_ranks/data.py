"""Data of virtual ranks: each has a pass of its own over a loader, with its own samples, order and workers.

Note [Parts of the data]
    A virtual rank sees what a rank of its number would see in a run of as many ranks. So its loader is a copy of the
    user's with a sampler of its own: a ``DistributedSampler`` gets its number; any other sampler is copied, and draws
    from its random stream. The data set is shared, since it may be large. Loaders of one process are read in the order
    of virtual ranks, and in the main process each reads with random numbers of its own (Note [Streams]).
    A sampler that shares out one order among ranks, and takes it from another sampler that draws random numbers, needs
    the same numbers for all virtual ranks, so these draw from streams that begin alike.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lt_zero.common.errors import CheckpointError, ConfigError
from lt_zero.common.held import OwnGenerators
from lt_zero.common.saved_random_states import read_states
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.data_part import ReadsPart, Turns, reading
from lt_zero.features.virtual_ranks.streams import DATA, ORDER, Streams

_KEY = "reproducible.virtual_ranks"
_SAVED = "rounds"  # in the state of a loader of rounds: how many it has given


class OfAll:
    """Samplers of a round as one: told the epoch together, asked as the first one."""

    def __init__(self, samplers: Sequence[Any]) -> None:
        self._samplers = tuple(samplers)

    def set_epoch(self, epoch: int) -> None:
        """Tell all of them the epoch, if they want to know it."""
        for sampler in self._samplers:
            if callable(tell := getattr(sampler, "set_epoch", None)):
                tell(epoch)

    @property
    def sampler(self) -> OfAll:
        """The samplers that batch samplers read."""
        return OfAll([sampler.sampler for sampler in self._samplers])

    def __len__(self) -> int:
        return len(self._samplers[0])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._samplers[0], name)


class _Drawing:
    """A sampler that shares out one order, and draws it from the stream that begins alike for all virtual ranks."""

    def __init__(self, inner: Any, streams: Streams, number: int) -> None:
        self._inner = inner
        self._streams = streams
        self._number = number

    def __iter__(self) -> Iterator[Any]:
        with self._streams.of(self._number, ORDER):
            items = iter(self._inner)
        while True:
            with self._streams.of(self._number, ORDER):
                item = next(items, self)
            if item is self:
                return
            yield item

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_inner" not in vars(self):
            raise AttributeError(name)
        return getattr(self._inner, name)


class RoundLoader:
    """Gives the batches of a round: those of this process, as ``Turns``.

    Args:
        loaders: one for each turn.
        numbers: of their virtual ranks.
        streams: of these.
        ranks: all of the run.

    Attributes:
        loaders: ``loaders``. Other attributes are those of the first one.
        tells_all: its state has all that its passes follow from.
    """

    tells_all = True

    def __init__(self, loaders: Sequence[Any], numbers: Sequence[int], streams: Streams, ranks: Ranks) -> None:
        self.loaders = list(loaders)
        self.numbers = tuple(numbers)
        self._streams = streams
        self._ranks = ranks
        # Workers have copies of the data set.
        shared = loaders[0] if loaders[0].num_workers == 0 else None
        named = [("dataset", shared.dataset), ("collate_fn", shared.collate_fn)] if shared is not None else []
        self._generators = OwnGenerators((f"{type(owner).__name__} ({name})", owner) for name, owner in named)
        self._begun: dict[int, dict[str, Any]] = {}  # places when the pass began
        self._given = 0  # rounds of the pass
        self._resumed: dict[str, Any] | None = None  # the place from which the next pass goes on

    @classmethod
    def of(cls, loader: Any, streams: Streams, ranks: Ranks) -> RoundLoader:
        """The loader of rounds over copies of ``loader``.

        Raises:
            ConfigError: it is not known how its data are divided.
        """
        if not isinstance(loader, DataLoader) or callable(getattr(loader, "state_dict", None)):
            raise ConfigError.about(
                _KEY,
                f"{_KEY}={streams.count}: the data of a {type(loader).__name__} cannot be divided among virtual ranks. "
                "Use a torch.utils.data.DataLoader.",
            )
        made = [_loader_of(loader, streams, number) for number in streams.numbers]
        return cls(made, streams.numbers, streams, ranks)

    @property
    def sampler(self) -> Any:
        """The samplers of all turns."""
        return OfAll([loader.sampler for loader in self.loaders])

    @property
    def batch_sampler(self) -> Any:
        """The batch samplers of all turns; None if batches are not made of samples."""
        made = [loader.batch_sampler for loader in self.loaders]
        return OfAll(made) if made[0] is not None else None

    def __len__(self) -> int:
        lengths = {len(loader) for loader in self.loaders}
        if len(lengths) > 1:
            raise self._uneven(f"{', '.join(map(str, sorted(lengths)))} batches")
        return lengths.pop()

    def __iter__(self) -> Iterator[Turns]:
        resumed, self._resumed = self._resumed, None
        return self._pass(resumed)

    def _pass(self, resumed: dict[str, Any] | None) -> Iterator[Turns]:
        """The rounds of a pass, from its begin or from a place."""
        if resumed is None:
            self._begun, self._given = self._places(), 0
            passes = self._opened()
        else:
            passes = self._resume(resumed)
        counted = not isinstance(self.loaders[0].dataset, IterableDataset)
        while True:
            batches = []
            for number, batches_of_one in zip(self.numbers, passes, strict=True):
                with self._reads(number):
                    batches.append(next(batches_of_one, self))
            if self._ended([batch is self for batch in batches], counted):
                return
            self._given += 1
            yield Turns(batches)

    def _opened(self) -> list[Iterator[Any]]:
        """The passes of all turns, from their begin."""
        passes = []
        for number, loader in zip(self.numbers, self.loaders, strict=True):
            with self._reads(number):
                passes.append(iter(loader))
        return passes

    @contextmanager
    def _reads(self, number: int) -> Iterator[None]:
        """Context in which the data of a virtual rank are read.

        Raises:
            ConfigError: they were drawn with a generator of the data set's own.
        """
        states = self._generators.states()
        with self._streams.of(number, DATA), reading(number, self._streams.count):
            yield
        if (name := self._generators.drawn(states)) is not None:
            raise ConfigError.about(
                _KEY,
                f"{_KEY}={self._streams.count}: samples were drawn with {name}, a generator that the virtual ranks of "
                "a process share, so that its numbers depend on how many there are. Draw from the generators of torch, "
                "numpy or Python, of which each virtual rank has states of its own, or set num_workers=1.",
            )

    # ---- the place in a pass -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The place in the pass: how many rounds it has given, and by virtual rank where it began and where it is."""
        return {_SAVED: self._given, "begun": self._begun, "now": self._places() if self._begun else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on from a place.

        Raises:
            CheckpointError: it is not one of all virtual ranks of this process.
        """
        if not state["begun"]:
            return  # no pass had begun
        missing = [number for number in self.numbers if not all(number in state[name] for name in ("begun", "now"))]
        if missing:
            raise CheckpointError(
                f"The checkpoint has no place in the data of virtual ranks {', '.join(map(str, missing))}. Resume with "
                "as many virtual ranks as the run that has saved."
            )
        self._set_places(state["now"], ())
        self._resumed = state

    @staticmethod
    def has_saved(state: object) -> bool:
        """True if a loader of rounds has saved ``state``."""
        return isinstance(state, dict) and _SAVED in state

    @staticmethod
    def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The places of all virtual ranks, from the ``state_dict`` of each rank of a run."""
        made = {**states[0], "begun": {}, "now": {}}
        for state in states:
            made["begun"].update(state["begun"])
            made["now"].update(state["now"])
        return made

    def _places(self) -> dict[int, dict[str, Any]]:
        """By virtual rank: its streams, generators of the loader and its sampler, and the epoch of the sampler."""
        found = {}
        for number, loader in zip(self.numbers, self.loaders, strict=True):
            place: dict[str, Any] = {kind: self._streams.get(number, kind).state_dict() for kind in (DATA, ORDER)}
            place["generators"] = [generator.get_state() for generator in _generators_of(loader)]
            place["epoch"] = getattr(_sampler_of(loader), "epoch", None)
            found[number] = place
        return found

    def _set_places(self, places: Mapping[int, dict[str, Any]], kinds: Sequence[str]) -> None:
        for number, loader in zip(self.numbers, self.loaders, strict=True):
            place = places[number]
            states = {(kind, number): read_states(place[kind], "the place in the data") for kind in kinds}
            self._streams.set(states)
            for generator, state in zip(_generators_of(loader), place["generators"], strict=True):
                generator.set_state(state)

    def _resume(self, state: dict[str, Any]) -> list[Iterator[Any]]:
        """The passes of all turns after the rounds that a saved run has read."""
        self._begun, self._given = {number: state["begun"][number] for number in self.numbers}, state[_SAVED]
        self._set_places(self._begun, (DATA, ORDER))
        epochs = [getattr(_sampler_of(loader), "epoch", None) for loader in self.loaders]
        self._tell_epochs([self._begun[number]["epoch"] for number in self.numbers])
        passes = self._opened()
        for number, loader, batches in zip(self.numbers, self.loaders, passes, strict=True):
            plain = loader.num_workers == 0 and not isinstance(loader.dataset, IterableDataset)
            # Of a data set in this process only indices are passed by: what samples draw is in the state.
            passed_by = batches._sampler_iter if plain else batches  # type: ignore[attr-defined]
            with self._reads(number):
                for _ in range(self._given):
                    next(passed_by, None)
        self._set_places(state["now"], (DATA, ORDER))
        self._tell_epochs(epochs)
        return passes

    def _tell_epochs(self, epochs: Sequence[int | None]) -> None:
        for loader, epoch in zip(self.loaders, epochs, strict=True):
            if epoch is not None and callable(tell := getattr(_sampler_of(loader), "set_epoch", None)):
                tell(epoch)

    # ---- the end -------------------------------------------------------------------------------------------------

    def _ended(self, ends: list[bool], counted: bool) -> bool:
        """True if all virtual ranks have come to their end; ``counted``: their lengths are known to be the same.

        Collective, if they are not.

        Raises:
            ConfigError: on all ranks: some have, and others have not.
        """
        if not counted:
            flags = torch.tensor([any(ends), not all(ends)], dtype=torch.uint8)
            self._ranks.host_max(flags, "ends of the data").wait()
            some_end, some_go_on = flags.tolist()
            if some_end and some_go_on:
                raise self._uneven("data of different lengths")
            return bool(some_end)
        if any(ends) and not all(ends):
            raise self._uneven("data of different lengths")
        return all(ends)

    def _uneven(self, what: str) -> ConfigError:
        return ConfigError.about(
            _KEY,
            f"{_KEY}={self._streams.count}: virtual ranks have {what}, and rounds need a batch of each. Give all of "
            "them as many batches, for example by drop_last=True.",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loaders" not in vars(self):
            raise AttributeError(name)
        return getattr(self.loaders[0], name)


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """Find what decides the order of a loader's samples."""
    batches = loader.batch_sampler
    return loader.sampler if batches is None else getattr(batches, "sampler", batches)


def _generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The generators that a loader and its sampler have of their own."""
    found = [getattr(owner, "generator", None) for owner in (loader, _sampler_of(loader))]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


def _loader_of(loader: DataLoader[Any], streams: Streams, number: int) -> DataLoader[Any]:
    """A copy of ``loader`` that reads what virtual rank ``number`` does."""
    made = copy.copy(loader)
    own = vars(made)
    own["_iterator"] = None
    own["worker_init_fn"] = ReadsPart(number, streams.count, loader.worker_init_fn)
    shared = {id(loader.dataset): loader.dataset}
    if loader.generator is not None:
        own["generator"] = copy.deepcopy(loader.generator)
        shared[id(loader.generator)] = own["generator"]
    if isinstance(loader.dataset, IterableDataset):
        return made
    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    sampler = copy.deepcopy(getattr(loader, name), shared)
    inner = getattr(sampler, "sampler", sampler) if name == "batch_sampler" else sampler
    if isinstance(inner, DistributedSampler):
        _divide(inner, streams.count, number)
    elif any(hasattr(one, name) for one in (sampler, inner) for name in ("num_replicas", "world_size")):
        raise ConfigError.about(
            _KEY,
            f"{_KEY}={streams.count}: {type(inner).__name__} divides samples among ranks by itself. Use a "
            "torch.utils.data.DistributedSampler, or none, so that Lightning's is used.",
        )
    if name == "batch_sampler":
        own["sampler"] = getattr(sampler, "sampler", made.sampler)
    if isinstance(inner, DistributedSampler) and type(inner) is not DistributedSampler:
        sampler = _Drawing(sampler, streams, number)
    own[name] = sampler
    return made


def _divide(sampler: DistributedSampler[Any], count: int, number: int) -> None:
    """Let a copy of a sampler share out its order among virtual ranks.

    Raises:
        ConfigError: it has another constructor than torch's, so that its numbers cannot be made anew.
    """
    if sampler.num_replicas != count:
        if type(sampler) is not DistributedSampler:
            raise ConfigError.about(
                _KEY,
                f"{_KEY}={count}: {type(sampler).__name__}(num_replicas={sampler.num_replicas}) divides samples among "
                f"ranks. Make it with num_replicas={count}, or use torch's DistributedSampler.",
            )
        how = {"shuffle": sampler.shuffle, "seed": sampler.seed, "drop_last": sampler.drop_last}
        epoch = sampler.epoch
        sampler.__init__(sampler.dataset, num_replicas=count, rank=number, **how)  # type: ignore[misc]
        vars(sampler).update(epoch=epoch)
    vars(sampler).update(rank=number)
