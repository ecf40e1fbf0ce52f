"""Private state of a loader's samplers and data: generators, counters of passes, orders that are shuffled in place.

Note [Private state]
    The order of samples may depend on more than the random states of the process: a sampler's own generator, a count of
    passes that seeds one, a list that each pass shuffles in place. Such state is found by one walk over the attributes
    of the loader, through wrappers (Lightning puts one around each sampler of the user), containers, closures, and
    generators that are global variables of the sampler's methods. It is saved twice: as it was at the begin of the
    pass, from which the order of the pass follows, and as it is now, from which that of the next pass follows.
    The same walk finds the parts of a loader: samplers and datasets, also those that others wrap.

    Counters and orders are numbers, texts, tensors, arrays, and containers of these, in attributes, ``__slots__``,
    closures and memory that processes share (``multiprocessing.Value``); what cannot be changed (a tuple, a frozen
    dataclass) is replaced. They are saved where they have changed since their object was first seen in this process:
    others, such as the number of a rank, belong to the process, and earlier fits may have read a sampler. They are
    looked for in samplers, in iterable data sets, and in loaders that are no DataLoader; the integers of other objects
    may be file descriptors or numbers of processes. What the first pass makes is made at its path.

    A loader that resumes by itself also restores a sampler or a data set that has ``state_dict``, and its own
    attributes. Generators, and the counters and orders of samplers and iterable data sets that have none, are left.

    Iterators, generator functions and shared arrays that an object keeps cannot be saved. A warning at the start of the
    run names them.
"""

from __future__ import annotations

import functools
import io
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.distributed import _DatasetSamplerWrapper
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lt_zero.training.lightning.data_position.attributes import (
    MISSING,
    asked,
    attributes_of,
    held_by,
    is_a,
    is_replaced,
    is_shared_array,
    is_shared_number,
    items_of,
    read,
    replaced,
    write,
)
from lt_zero.training.lightning.data_position.generators import GENERATORS, is_global, is_known
from lt_zero.training.lightning.data_position.plain_values import LONGEST, digest, is_plain, length

DEEPEST, MOST = 7, 2000  # attributes of attributes, and objects, that are looked at
_FIRST = ("generator", "sampler", "batch_sampler")
_OPEN = ("torch.utils.data", "lightning.fabric.utilities.distributed", "lightning.pytorch.overrides.distributed")
_CLOSED = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "logging"}
# What processes and threads share, and what the system has opened: its numbers are of this process.
_CLOSED |= {"threading", "_thread", "queue", "multiprocessing", "concurrent", "asyncio", "subprocess", "contextvars"}
_CLOSED |= {"socket", "ssl", "selectors", "_io", "io", "tempfile", "mmap", "sqlite3", "ctypes"}
_PARTS = (DataLoader, Dataset, Sampler, _DatasetSamplerWrapper)
_LEAVES = (type(None), complex, bytes, ModuleType, type, nn.Module)


class StatePlace(NamedTuple):
    """A piece of state: where it is, the object that holds it under a key, that object's path, and its value.

    ``orders``: whether it can only decide on the order of samples, not on what is drawn for a sample. ``drawn``:
    whether its object draws it when it is made, so that another process has another one.
    """

    path: str
    parent: str
    owner: Any
    key: Any
    value: Any
    orders: bool
    drawn: bool = False


class Walk(NamedTuple):
    """Findings of a walk over the attributes of a loader.

    ``hidden``: paths of state that cannot be saved. ``parts``: samplers, datasets, and what can be told the epoch, by
    path; the loader itself has the empty path. ``seen``: all objects whose attributes were looked at, by path.
    """

    places: list[StatePlace]
    hidden: list[str]
    parts: dict[str, Any]
    seen: dict[str, Any]


class OwnState:
    """The private state of one loader, and its parts. See Note [Private state].

    Args:
        loader: the user's.
        stateful: whether it saves and restores itself: then what it restores is not looked for.
    """

    def __init__(self, loader: Any, stateful: bool) -> None:
        self._loader = loader
        self._stateful = stateful
        self.covered = stateful and _has_state_dict(opened_sampler(loader))  # whether it restores its sampler
        walk = self._look()
        self.hidden = walk.hidden
        self.parts = walk.parts
        self._inside: list[StatePlace] | None = None  # what is taken inside of the present pass
        self._known: list[StatePlace] | None = None  # what was found since the pass has ended
        self._first = _first_values(walk)
        # Held, so that no other object gets its ID.
        self._same = {place.path: place.value for place in walk.places if is_plain(place.value)}
        self.too_long: list[str] = []  # orders that have changed, but are too long to be saved
        self.untold: dict[str, str] = {}  # errors of ``state_dict`` of samplers, when state was taken last

    def take(self, inside: bool = False, known: bool = False, long: bool = False) -> dict[str, Any]:
        """The state now, as plain containers and tensors; what a checkpoint needs of it tells ``needed``.

        Args:
            inside: of a pass that has begun. Counters and orders are left out, as the repeated pass sets them; the
                attributes are looked at once in a pass, as this is done before each step.
            known: of a pass that has ended, while other loaders go on: the attributes are looked at once.
            long: also orders that are too long for a checkpoint.
        """
        taken: dict[str, Any] = {}
        self.untold = {}
        for place in self._places(inside, known):
            if is_a(place.value, GENERATORS):
                from lt_zero.training.lightning.data_position import packed_generators

                taken[place.path] = packed_generators.packed(place.value)
            elif not is_plain(place.value):
                try:
                    taken[place.path] = {"kind": "state_dict", "state": place.value.state_dict()}
                except Exception as error:  # some have a state only once they were read
                    self.untold[place.path] = repr(error)
            elif long or self._is_short(place):
                from lt_zero.training.lightning.data_position import packed_values

                with suppress(TypeError):  # a list, say, whose last element is of another kind
                    state = packed_values.packed(place.value)
                    taken[place.path] = {"kind": "value", "state": state, "new": self._is_new(place)}
        return taken

    def needed(self, *moments: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what a checkpoint needs of the states of ``take`` at several moments of a pass.

        Counters and orders are left out that are now, and were at all of these moments, as they were first seen.
        """
        needed = {place.path for place in self._look().places if is_plain(place.value) and self._is_new(place)}
        for taken in moments:
            needed |= {path for path, state in taken.items() if state.get("new", True)}
        return [
            {
                path: {key: state[key] for key in state if key != "new"}
                for path, state in taken.items()
                if path in needed
            }
            for taken in moments
        ]

    def _places(self, inside: bool, known: bool) -> list[StatePlace]:
        if inside and self._inside is not None:
            return [place._replace(value=_present(place)) for place in self._inside]
        if inside:
            self._inside = [place for place in self._look().places if not is_plain(place.value)]
            return self._inside
        self._inside = None
        if known and self._known is not None:
            return [place._replace(value=_present(place)) for place in self._known]
        places = self._look().places
        self._known = places if known else None
        return places

    def _is_new(self, place: StatePlace) -> bool:
        """True if a counter or an order is another one than when it was first seen, or in another process."""
        return place.drawn or self._first.get(place.path) != digest(place.value)

    def _is_short(self, place: StatePlace) -> bool:
        """True if an order is not too long for a checkpoint."""
        if length(place.value) <= LONGEST:
            return True
        if self._is_new(place) and self._same.get(place.path) is place.value:  # else each pass computes it, most likely
            self.too_long.append(place.path)
        return False

    def set(
        self, taken: dict[str, Any], only: Literal["samples", "order"] | None = None, state_dicts: bool = False
    ) -> None:
        """Restore what ``take`` has returned.

        Args:
            only: generators that draw for samples, or what the order of samples may follow from; None: all.
            state_dicts: also by ``load_state_dict`` of samplers.
        """
        from lt_zero.training.lightning.data_position import packed_generators, packed_values

        walk = self._look()
        places = {place.path: place for place in walk.places}
        for path, state in taken.items():
            place = places.get(path) or self._to_be_made(path, walk)
            if place is None or (only is not None and (only == "order") != (place.orders or state["kind"] == "value")):
                continue
            if state["kind"] == "state_dict":
                if state_dicts and place.value is not None:
                    place.value.load_state_dict(state["state"])
            elif state["kind"] == "value":
                value = packed_values.restored(state["state"], place.value)
                if value is not place.value:
                    _let_hold(walk, place.parent, place.key, value)
            else:
                made = place.value is None
                found = packed_generators.unpacked(state) if made else packed_generators.unpack(place.value, state)
                if found is not place.value:
                    _let_hold(walk, place.parent, place.key, found)

    def _to_be_made(self, path: str, walk: Walk) -> StatePlace | None:
        """The place of state that is made with the first pass: so far there is no attribute, or it is None."""
        parent, _, name = path.rpartition(".")
        owner = walk.seen.get(parent)
        if owner is None or isinstance(owner, (list, tuple, deque)) or read(owner, name) not in (None, MISSING):
            return None
        return StatePlace(path, parent, owner, name, None, self._orders(path))

    def agrees(self, taken: dict[str, Any]) -> bool:
        """True if ``state_dict`` of samplers returns what it had returned in ``take``."""
        now = self.take()
        kept = [path for path, state in taken.items() if state["kind"] == "state_dict"]
        return all(path in now and same_states(now[path]["state"], taken[path]["state"]) for path in kept)

    # ---- the walk ------------------------------------------------------------------------------------------------

    def _look(self) -> Walk:
        """Walk over the attributes of the loader, the nearest first."""
        walk = Walk([], [], {"": self._loader}, {"": self._loader})
        seen = {id(self._loader)}
        waiting = [(name, "", name, value, self._loader, 1) for name, value in self._roots()]
        loads = isinstance(self._loader, DataLoader)
        if not self._stateful:
            own = _values("", self._loader)
            walk.places.extend(place for place in own if not loads or place.key not in _attributes())
        for path, parent, key, value, owner, depth in _breadth_first(waiting):
            place = StatePlace(path, parent, owner, key, value, self._orders(path))
            if is_a(value, GENERATORS):
                if not is_global(value) and id(value) not in seen:
                    if is_known(value):
                        walk.places.append(place)
                    else:
                        walk.hidden.append(path)
                seen.add(id(value))
                continue
            if _is_read_on(value) or (place.orders and (_is_read_from(value) or is_shared_array(value))):
                walk.hidden.append(path)
                continue
            if id(value) in seen or not _is_open(value) or len(seen) > MOST:
                continue
            seen.add(id(value))
            walk.seen[path] = value
            if is_a(value, _PARTS) or callable(getattr(type(value), "set_epoch", None)):
                walk.parts[path] = value
            sampler = path.startswith(_FIRST[1:]) or not (loads or self._stateful or path.startswith("dataset"))
            if sampler and not self._stateful and _has_state_dict(value):
                walk.places.append(place)
            else:
                walk.places.extend(self._counters(place, sampler))
            if depth < DEEPEST:
                waiting += [(f"{path}.{key!s}", path, key, child, value, depth + 1) for key, child in _inner(value)]
        return walk

    def _orders(self, path: str) -> bool:
        """True if state there can only decide on the order of samples."""
        streams = isinstance(getattr(self._loader, "dataset", None), IterableDataset)
        return streams or not path.startswith(("dataset", "collate_fn"))

    def _counters(self, place: StatePlace, sampler: bool) -> list[StatePlace]:
        """Counters and orders that the object at a place holds.

        Of a stage of webdataset, which may hold samples, only integers and the seed that it draws when it is made.
        """
        counted = self._is_counted(place.path, place.value, sampler)
        stage = _is_stage(place.owner if is_a(place.value, dict) else place.value)
        if not counted and not (stage and self._is_streamed(place.path)):
            return []
        found = [held._replace(drawn=stage and _has_seed(held)) for held in _values(place.path, place.value)]
        return [held for held in found if counted or held.drawn or type(held.value) is int]

    def _is_counted(self, path: str, value: Any, sampler: bool) -> bool:
        """True if counters and orders are looked for in an object."""
        if type(value).__module__.startswith(_OPEN):
            return False
        if sampler:
            return not self.covered
        stream = path == "dataset" or isinstance(value, IterableDataset)  # also one that another one reads
        return stream and self._is_streamed(path)

    def _is_streamed(self, path: str) -> bool:
        """True for what an iterable data set holds, unless it restores that by itself."""
        dataset = getattr(self._loader, "dataset", None)
        own = self._stateful and _has_state_dict(dataset)
        return isinstance(dataset, IterableDataset) and path.startswith("dataset") and not own

    def _roots(self) -> list[tuple[str, Any]]:
        if getattr(type(self._loader), "tells_all", False):  # a loader of rounds, by the numbers of micro-batches
            return []
        names = [name for name in _FIRST if asked(self._loader, name) is not None]
        hidden = "_" if self._stateful else ("__", "_DataLoader", "_iterator")  # else its present pass would be found
        others = [name for name, _ in attributes_of(self._loader)]
        names += [name for name in others if name not in _FIRST and not name.startswith(hidden)]
        return [(name, asked(self._loader, name)) for name in names]


def opened_sampler(loader: Any) -> Any:
    """The sampler that a loader opens for a pass, below those that only put batches together; None if it has none."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    if sampler is None:  # not `or`: bool() calls len(), which some samplers lack
        sampler = getattr(loader, "sampler", None)
    while type(sampler).__module__.startswith(("torch.utils.data", "torchdata")) and hasattr(sampler, "sampler"):
        if _has_state_dict(sampler):
            break
        sampler = sampler.sampler
    return sampler


def reader_of(loader: Any) -> Any:
    """The DataLoader that reads for a loader: itself, or the first stage of webdataset's; None if there is none."""
    pipeline = asked(loader, "pipeline")
    first = [loader, *(items_of(pipeline, 1) if is_a(pipeline, (list, tuple)) else ())]
    return next((one for one in first if is_a(one, DataLoader)), None)


@functools.cache
def _attributes() -> frozenset[str]:
    """Names of the attributes that every DataLoader has."""
    return frozenset({*vars(DataLoader(torch.utils.data.TensorDataset(torch.zeros(1)))), "_IterableDataset_len_called"})


def _breadth_first(waiting: list[Any]) -> Iterator[Any]:
    """The elements of a list that grows meanwhile."""
    position = 0
    while position < len(waiting):
        yield waiting[position]
        position += 1


def _inner(value: Any) -> Iterator[tuple[Any, Any]]:
    """The values that an object holds, and generators that its code knows as global variables, as ``held_by``."""
    yield from held_by(value)
    if is_a(value, FunctionType):
        yield from _globals(value)
    elif not (is_a(value, (dict, list, tuple, deque, functools.partial, MethodType)) or is_shared_number(value)):
        for kind in type(value).__mro__:
            if kind.__module__.split(".")[0] not in _CLOSED | {"builtins", "abc", "typing", "collections"}:
                for method in list(kind.__dict__.values()):
                    if is_a(method, FunctionType):
                        yield from _globals(method)


def _globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Generators among the global variables that a function names."""
    for name in function.__code__.co_names:
        if is_a(value := function.__globals__.get(name), GENERATORS):
            yield name, value


def _is_read_on(value: Any) -> bool:
    """True for an iterator of a built-in class: each pass goes on in it."""
    return is_a(value, (GeneratorType, Iterator)) and type(value).__module__ in ("builtins", "itertools", "_csv")


def _is_read_from(value: Any) -> bool:
    """True for a file that is open for reading, which has a place."""
    try:
        return is_a(value, io.IOBase) and not value.closed and value.readable() and not value.writable()
    except Exception:  # of a class of the user's
        return False


def _is_stage(value: Any) -> bool:
    """True for a stage of webdataset's pipelines, also one of the user's, and for a pipeline itself."""
    return any(kind.__module__.split(".")[0] == "webdataset" for kind in type(value).__mro__)


def _has_seed(place: StatePlace) -> bool:
    """True for the seed of a stage of webdataset, or the arguments that it is among."""
    return place.key == "seed" or (place.key == "kw" and is_a(place.value, dict) and "seed" in place.value)


def _values(path: str, owner: Any) -> list[StatePlace]:
    """The values of an object that may count passes or be an order."""
    prefix = f"{path}." if path else ""
    return [
        StatePlace(f"{prefix}{key!s}", path, owner, key, value, True)
        for key, value in held_by(owner)
        if not str(key).startswith("__") and is_plain(value)
    ]


def _present(place: StatePlace) -> Any:
    """The value that an object holds now, where that can be read again and is of the same kind."""
    value = read(place.owner, place.key)
    return value if type(value) is type(place.value) else place.value


def _let_hold(walk: Walk, path: str, key: Any, value: Any) -> None:
    """Let the object at a path hold a value; in place of one that cannot be changed, another one is put."""
    owner = walk.seen[path]
    if not path or not is_replaced(owner):
        write(owner, key, value)
        return
    parent, _, name = path.rpartition(".")
    walk.seen[path] = replaced(owner, key, value)
    above = walk.seen.get(parent)
    if above is not None:
        _let_hold(walk, parent, int(name) if isinstance(above, (list, tuple, deque)) else name, walk.seen[path])


_first_seen: dict[int, tuple[weakref.ref[Any], dict[str, bytes]]] = {}  # by the ID of an object


def _first_values(walk: Walk) -> dict[str, bytes]:
    """Digests of counters and orders as they were when the objects that hold them were first seen in this process.

    A sampler that was read in an earlier fit, or by another loader, has counted that. A resumed run makes it anew.
    """
    groups: dict[str, dict[str, bytes]] = {}
    for place in walk.places:
        if is_plain(place.value):
            path = place.parent
            while path and (path not in walk.seen or _weakly(walk.seen[path]) is None):
                path = path.rpartition(".")[0]
            groups.setdefault(path, {})[place.path[len(path) :]] = digest(place.value)
    found: dict[str, bytes] = {}
    for path, values in groups.items():
        owner = walk.seen[path]
        number = id(owner)
        known, first = _first_seen.get(number, (lambda: None, values))
        if known() is not owner:
            first = values
            if (reference := _weakly(owner, lambda gone, number=number: _forget(gone, number))) is not None:
                _first_seen[number] = (reference, first)
        found.update((f"{path}{name}", value) for name, value in first.items())
    return found


def _weakly(value: Any, callback: Any = None) -> weakref.ref[Any] | None:
    """A weak reference; None to an object that allows none."""
    try:
        return weakref.ref(value, callback)
    except TypeError:
        return None


def _forget(gone: weakref.ref[Any], number: int) -> None:
    if number in _first_seen and _first_seen[number][0] is gone:  # else another object has got its ID
        del _first_seen[number]


def _is_open(value: Any) -> bool:
    """True if the attributes of an object are looked at."""
    if is_a(value, _LEAVES) or is_plain(value):
        return False
    if is_shared_number(value):
        return True
    module = type(value).__module__
    return module.startswith(_OPEN) or module.split(".")[0] not in _CLOSED


def _has_state_dict(value: Any) -> bool:
    methods = [getattr(type(value), name, None) for name in ("state_dict", "load_state_dict")]
    return all(callable(method) for method in methods)


def are_states(taken: object) -> bool:
    """True if this is what ``OwnState.take`` returns; new generators check their states."""
    from lt_zero.training.lightning.data_position import packed_generators, packed_values

    if not isinstance(taken, dict):
        return False
    try:
        for saved in taken.values():
            if saved["kind"] == "value":
                packed_values.restored(saved["state"], None)
            elif saved["kind"] != "state_dict":
                packed_generators.check(saved)
            saved["state"]
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError):
        return False
    return True


def same_states(one: Any, other: Any) -> bool:
    """True if two states, as ``OwnState.take`` or samplers return them, are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_states(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_states, one, other))
    if isinstance(one, (Tensor, np.ndarray)) and isinstance(other, (Tensor, np.ndarray)):
        return np.array_equal(np.asarray(one), np.asarray(other))
    return bool(one == other)
