"""Private state of a loader's samplers and data: generators, counters of passes, orders that are shuffled in place.

Note [Private state]
    The order of samples may depend on more than the random states of the process: a sampler's own generator, a count of
    passes that seeds one, a list that each pass shuffles in place. Such state is found by one walk over the attributes
    of the loader, through wrappers (Lightning puts one around each sampler of the user), containers, closures, and
    generators that are global variables of the sampler's methods. It is saved twice: as it was at the begin of the
    pass, from which the order of the pass follows, and as it is now, from which that of the next pass follows.
    The same walk finds the parts of a loader: samplers and datasets, also those that others wrap.

    Counters and orders are saved where they have changed in the run: others, such as the number of a rank, belong to
    the process. They are looked for in samplers, in iterable data sets, and in loaders that are no DataLoader; the
    integers of other objects may be file descriptors or numbers of processes.

    A loader that resumes by itself also restores a sampler or a data set that has ``state_dict``, and its own
    attributes. Generators, and the counters and orders of samplers and iterable data sets that have none, are left.

    Iterators and generator functions that an object keeps cannot be saved. A warning at the start of the run names
    them.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterator
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.distributed import _DatasetSamplerWrapper
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

DEEPEST, MOST = 7, 2000  # attributes of attributes, and objects, that are looked at
LONGEST = 1 << 18  # elements of an order that is saved
_FIRST = ("generator", "sampler", "batch_sampler")
_OPEN = ("torch.utils.data", "lightning.fabric.utilities.distributed", "lightning.pytorch.overrides.distributed")
_CLOSED = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "threading", "logging"}
_NUMPY = {"MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"}  # generators of bits
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_PARTS = (DataLoader, Dataset, Sampler, _DatasetSamplerWrapper)
_PLAIN = (type(None), bool, float, complex, str, bytes, Tensor, np.ndarray, np.generic, ModuleType, type, nn.Module)


class StatePlace(NamedTuple):
    """A piece of state: where it is, the object and the key of its attribute, and its value.

    ``orders``: whether it can only decide on the order of samples, not on what is drawn for a sample.
    """

    path: str
    owner: Any
    key: Any
    value: Any
    orders: bool


class Walk(NamedTuple):
    """Findings of a walk over the attributes of a loader.

    ``hidden``: paths of state that cannot be saved. ``parts``: samplers, datasets, and what can be told the epoch, by
    path; the loader itself has the empty path.
    """

    places: list[StatePlace]
    hidden: list[str]
    parts: dict[str, Any]


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
        found, self.hidden, self.parts = self._look()
        self._inside: list[StatePlace] | None = None  # what is taken inside of the present pass
        self._known: list[StatePlace] | None = None  # what was found last
        changing = [place for place in found if _changes(place.value)]
        self._first = {place.path: _digest(place.value) for place in changing}
        self._same = {place.path: place.value for place in changing}  # held, so that no other object gets its ID
        self.too_long: list[str] = []  # orders that have changed, but are too long to be saved

    def take(self, inside: bool = False, everything: bool = False, known: bool = False) -> dict[str, Any]:
        """The state now, as plain containers and tensors.

        Args:
            inside: of a pass that has begun. Counters and orders are left out, as the repeated pass sets them; the
                attributes are looked at once in a pass, as this is done before each step.
            everything: also counters and orders that have not changed in the run, and long ones. Not for checkpoints.
            known: of what was found last, without looking at the attributes again.
        """
        taken: dict[str, Any] = {}
        if known and not inside and self._known is not None:
            places = [place._replace(value=_present(place)) for place in self._known]
        elif not inside:
            self._inside = None
            places = self._known = self._look().places
        elif self._inside is None:
            places = self._inside = [place for place in self._look().places if not _changes(place.value)]
        else:
            places = [place._replace(value=_present(place)) for place in self._inside]
        for place in places:
            if isinstance(place.value, _GENERATORS):
                taken[place.path] = _packed(place.value)
            elif _changes(place.value):
                if not everything and self._first.get(place.path) == _digest(place.value):
                    continue
                if not everything and _length(place.value) > LONGEST:
                    if self._same.get(place.path) is place.value:  # else each pass computes it, most likely
                        self.too_long.append(place.path)
                    continue
                taken[place.path] = {"kind": "value", "state": _copied(place.value)}
            else:
                taken[place.path] = {"kind": "state_dict", "state": place.value.state_dict()}
        return taken

    def set(self, taken: dict[str, Any], samples_only: bool = False, state_dicts: bool = False) -> None:
        """Restore what ``take`` has returned.

        Args:
            samples_only: only generators that draw for samples.
            state_dicts: also by ``load_state_dict`` of samplers.
        """
        places = {place.path: place for place in self._look(taken).places}
        for path, state in taken.items():
            place = places.get(path)
            if place is None or (samples_only and (place.orders or state["kind"] == "value")):
                continue
            if state["kind"] == "state_dict":
                if state_dicts and place.value is not None:
                    place.value.load_state_dict(state["state"])
            elif state["kind"] == "value":
                _assign(place, state["state"])
            else:
                _unpack(place, state)

    def agrees(self, taken: dict[str, Any]) -> bool:
        """True if ``state_dict`` of samplers returns what it had returned in ``take``."""
        now = self.take()
        kept = [path for path, state in taken.items() if state["kind"] == "state_dict"]
        return all(path in now and same_states(now[path]["state"], taken[path]["state"]) for path in kept)

    # ---- the walk ------------------------------------------------------------------------------------------------

    def _look(self, expected: Any = ()) -> Walk:
        """Walk over the attributes of the loader, the nearest first.

        Args:
            expected: paths of generators that may be None so far: they are made with the first pass.
        """
        found: list[StatePlace] = []
        hidden: list[str] = []
        parts: dict[str, Any] = {"": self._loader}
        seen = {id(self._loader)}
        waiting = [(path, key, value, self._loader, 1) for path, key, value in self._roots()]
        loads = isinstance(self._loader, DataLoader)
        if not self._stateful:
            found += [place for place in _values("", self._loader) if not loads or place.key not in _attributes()]
        for path, key, value, owner, depth in _breadth_first(waiting):
            orders = not path.startswith(("dataset", "collate_fn")) or isinstance(
                getattr(self._loader, "dataset", None), IterableDataset
            )
            if isinstance(value, _GENERATORS) or (value is None and path in expected):
                if not _is_global(value) and (value is None or id(value) not in seen):
                    found.append(StatePlace(path, owner, key, value, orders))
                seen.add(id(value))
                continue
            if isinstance(value, (GeneratorType, Iterator)) and type(value).__module__ in ("builtins", "itertools"):
                hidden.append(path)
                continue
            if id(value) in seen or not _is_open(value) or len(seen) > MOST:
                continue
            seen.add(id(value))
            if isinstance(value, _PARTS) or callable(getattr(type(value), "set_epoch", None)):
                parts[path] = value
            sampler = path.startswith(_FIRST[1:]) or not (loads or self._stateful or path.startswith("dataset"))
            if sampler and not self._stateful and _has_state_dict(value):
                found.append(StatePlace(path, owner, key, value, orders))
            elif self._is_counted(path, value, sampler):
                found += _values(path, value)
            if depth < DEEPEST:
                waiting += [
                    (f"{path}.{name}", name, child, value, depth + 1) for name, child in _children(value, sampler)
                ]
        return Walk(found, hidden, parts)

    def _is_counted(self, path: str, value: Any, sampler: bool) -> bool:
        """True if counters and orders are looked for in an object."""
        if type(value).__module__.startswith(_OPEN):
            return False
        if sampler:
            return not self.covered
        streams = isinstance(getattr(self._loader, "dataset", None), IterableDataset)
        return path == "dataset" and streams and not (self._stateful and _has_state_dict(value))

    def _roots(self) -> list[tuple[str, str, Any]]:
        attributes = getattr(self._loader, "__dict__", {})
        names = [name for name in _FIRST if getattr(self._loader, name, None) is not None]
        hidden = "_" if self._stateful else ("__", "_DataLoader", "_iterator")  # else its present pass would be found
        names += [name for name in attributes if name not in _FIRST and not name.startswith(hidden)]
        return [(name, name, getattr(self._loader, name, None)) for name in names]


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


def _children(value: Any, sampler: bool) -> Iterator[tuple[str, Any]]:
    """The values that an object holds, with names."""
    if isinstance(value, dict):
        yield from ((str(key), child) for key, child in list(value.items())[:64])
    elif isinstance(value, (list, tuple)):
        yield from ((str(number), child) for number, child in enumerate(value[:64]))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, MethodType):
        yield "__self__", value.__self__
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        yield from ((name, cell.cell_contents) for name, cell in cells if not _is_empty(cell))
        yield from _globals(value)
    else:
        yield from list(getattr(value, "__dict__", {}).items())
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    yield name, getattr(value, name)
            if kind.__module__.split(".")[0] not in _CLOSED | {"builtins", "abc", "typing", "collections"}:
                for method in kind.__dict__.values():
                    if isinstance(method, FunctionType):
                        yield from _globals(method)


def _globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Generators among the global variables that a function names."""
    for name in function.__code__.co_names:
        if isinstance(value := function.__globals__.get(name), _GENERATORS):
            yield name, value


def _present(place: StatePlace) -> Any:
    """The value of an attribute now, where that can be read again and is of the same kind."""
    attributes = place.owner if isinstance(place.owner, dict) else getattr(place.owner, "__dict__", {})
    value = attributes.get(place.key)
    return value if type(value) is type(place.value) else place.value


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def _is_open(value: Any) -> bool:
    """True if the attributes of an object are looked at."""
    if isinstance(value, (*_PLAIN, int)):
        return False
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (*_PLAIN, int)):
        return False
    module = type(value).__module__
    return module.startswith(_OPEN) or module.split(".")[0] not in _CLOSED


def _is_global(generator: Any) -> bool:
    """True if it is one of the generators of the process, or has no state."""
    known = [torch.default_generator, random._inst, np.random.mtrand._rand]
    return isinstance(generator, random.SystemRandom) or any(generator is one for one in known)


def _has_state_dict(value: Any) -> bool:
    methods = [getattr(type(value), name, None) for name in ("state_dict", "load_state_dict")]
    return all(callable(method) for method in methods)


# ---- counters and orders ---------------------------------------------------------------------------------------------


def _values(path: str, owner: Any) -> list[StatePlace]:
    """Attributes that may count passes or keep an order."""
    prefix = f"{path}." if path else ""
    return [
        StatePlace(f"{prefix}{name}", owner, name, value, True)
        for name, value in getattr(owner, "__dict__", {}).items()
        if not name.startswith("__") and _changes(value)
    ]


def _changes(value: Any) -> bool:
    if isinstance(value, list):
        first = value[0] if value else 0
        first = first[0] if isinstance(first, (list, tuple)) and first else first
        return isinstance(first, (int, list, tuple, np.integer))
    return isinstance(value, (int, Tensor, np.ndarray))


def _length(value: Any) -> int:
    if isinstance(value, list):
        return sum(len(item) if isinstance(item, (list, tuple)) else 1 for item in value)
    return int(value.numel()) if isinstance(value, Tensor) else int(np.size(value))


def _digest(value: Any) -> bytes:
    """Tells whether a value has changed; of long ones some elements are looked at."""
    if isinstance(value, (Tensor, np.ndarray)):
        flat = value.reshape(-1)
        sample = flat[:: max(1, len(flat) // 4096)].tolist()
    else:
        sample = value[:: max(1, len(value) // 4096)] if isinstance(value, list) else value
    size = (type(value).__name__, _length(value))
    return hashlib.sha256(repr((size, sample)).encode()).digest()


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, list) and all(isinstance(item, (int, np.integer)) for item in value):
        return {"list": torch.tensor(value, dtype=torch.int64)}  # a tenth of the bytes
    if isinstance(value, list):
        return [list(x) if isinstance(x, list) else tuple(x) if isinstance(x, tuple) else x for x in value]
    return value


def _assign(place: StatePlace, state: Any) -> None:
    """Set a counter or an order, in place where others may hold it."""
    value, state = place.value, state["list"].tolist() if isinstance(state, dict) else state
    if isinstance(value, list) and isinstance(state, list):
        value[:] = state
    elif isinstance(value, Tensor) and isinstance(state, Tensor) and value.shape == state.shape:
        value.copy_(state)
    elif isinstance(value, np.ndarray) and isinstance(state, Tensor) and value.shape == tuple(state.shape):
        value[...] = state.numpy()
    elif isinstance(state, Tensor):  # it is made, or takes another form, with the first pass
        setattr(place.owner, place.key, state.numpy() if not isinstance(value, Tensor) else state)
    elif type(value) is not type(state) or value != state:  # objects that allow no changes have none
        setattr(place.owner, place.key, state)


# ---- generators ------------------------------------------------------------------------------------------------------


def _packed(generator: Any) -> dict[str, Any]:
    """A generator's state as plain containers and tensors."""
    if isinstance(generator, torch.Generator):
        return {"kind": "torch", "state": generator.get_state()}
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"kind": "random", "state": torch.tensor(words, dtype=torch.int64), "more": [version, gauss]}
    if isinstance(generator, np.random.RandomState):
        return {"kind": "RandomState", "state": _plain(generator.get_state(legacy=False))}
    return {"kind": "numpy", "state": _plain(generator.bit_generator.state)}


def _unpack(place: StatePlace, saved: dict[str, Any]) -> None:
    """Set a generator's state; one that is None so far is made."""
    generator = place.value
    kind = saved["kind"]
    state = saved["state"]
    if generator is None:
        generator = _new_generator(kind, state)
        if isinstance(place.owner, dict):
            place.owner[place.key] = generator
        else:
            setattr(place.owner, place.key, generator)
    if kind == "torch" and isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif kind == "random" and isinstance(generator, random.Random):
        version, gauss = saved["more"]
        generator.setstate((version, tuple(state.tolist()), gauss))
    elif kind == "RandomState" and isinstance(generator, np.random.RandomState):
        generator.set_state(_arrays(state))
    elif kind == "numpy" and isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _arrays(state)


def are_states(taken: object) -> bool:
    """True if this is what ``OwnState.take`` returns; new generators check their states."""
    if not isinstance(taken, dict):
        return False
    try:
        for saved in taken.values():
            if saved["kind"] not in ("value", "state_dict"):
                owner: dict[str, Any] = {}
                _unpack(StatePlace("", owner, "", None, orders=True), saved)
            saved["state"]
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError):
        return False
    return True


def _new_generator(kind: str, state: Any) -> Any:
    if kind == "numpy":
        if state["bit_generator"] not in _NUMPY:
            raise ValueError(state["bit_generator"])
        return np.random.Generator(getattr(np.random, state["bit_generator"])())
    return {"torch": torch.Generator, "random": random.Random, "RandomState": np.random.RandomState}[kind]()


def _plain(state: Any) -> Any:
    """numpy's arrays and numbers in a state as tensors and Python's; numbers of more than 64 bits as text."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return torch.tensor(state.tolist(), dtype=torch.int64) if state.dtype != np.uint64 else [str(x) for x in state]
    if isinstance(state, (int, np.integer)) and not isinstance(state, bool):
        return int(state) if abs(int(state)) < 1 << 62 else str(int(state))
    return state


def _arrays(state: Any) -> Any:
    """The inverse of ``_plain``."""
    if isinstance(state, dict):
        return {key: _arrays(value) if key != "bit_generator" else value for key, value in state.items()}
    if isinstance(state, Tensor):
        return np.array(state.tolist(), dtype=np.uint32)
    if isinstance(state, list):
        return np.array([int(x) for x in state], dtype=np.uint64)
    return int(state) if isinstance(state, str) else state


def same_states(one: Any, other: Any) -> bool:
    """True if two states, as ``OwnState.take`` or samplers return them, are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_states(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_states, one, other))
    if isinstance(one, (Tensor, np.ndarray)) and isinstance(other, (Tensor, np.ndarray)):
        return np.array_equal(np.asarray(one), np.asarray(other))
    return bool(one == other)
