"""Private state of samplers and data is found wherever Python lets an object keep it, and is restored there."""

from __future__ import annotations

import array
import dataclasses
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lt_zero.lightning.data_position.inexact import inexact
from lt_zero.lightning.data_position.own_state import OwnState, are_states
from tests.support.public_samplers import Consumed, GoesOn

COUNT = 40


def drawn(seed: object) -> list[int]:
    return random.Random(repr(seed)).sample(range(COUNT), COUNT)


class Passes(Sampler[int]):
    """The order of a pass follows from private state, which the pass changes."""

    def __len__(self) -> int:
        return COUNT

    def order(self) -> list[int]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        return iter(self.order())


class Slots(Passes):
    __slots__ = ("passes",)

    def __init__(self) -> None:
        self.passes = 0

    def order(self) -> list[int]:
        self.passes += 1
        return drawn(self.passes)


class InheritedSlots(Slots):
    __slots__ = ()


class PrivateSlots(Passes):
    __slots__ = iter(["__passes"])  # is at its end when the class is made

    def __init__(self) -> None:
        self.__passes = 0

    def order(self) -> list[int]:
        self.__passes += 1
        return drawn(self.__passes)


@dataclasses.dataclass(slots=True)
class Held:
    passes: int = 0
    generator: Any = dataclasses.field(default_factory=lambda: np.random.default_rng(3))


@dataclasses.dataclass(frozen=True)
class Frozen:
    passes: int = 0


START = Frozen()


class Pair(NamedTuple):
    generator: Any
    passes: int


class Keeps(Passes):
    """Keeps one value, which each pass hands to ``step``: it changes the value or returns another one."""

    def __init__(self, value: Any, step: Callable[[Any], Any]) -> None:
        self.value, self.step = value, step

    def order(self) -> list[int]:
        found = self.step(self.value)
        if found is not None:
            self.value = found
        return drawn(self.value)


class OfTheClass(Passes):
    """Its count is an attribute of the class until the first pass."""

    passes = 0

    def order(self) -> list[int]:
        self.passes += 1
        return drawn(self.passes)


class MadeLate(Passes):
    """Has no attributes before the first pass."""

    def order(self) -> list[int]:
        if not hasattr(self, "rows"):
            self.rows, self.generator = list(range(COUNT)), random.Random(5)
        self.generator.shuffle(self.rows)
        return list(self.rows)


class Replaces(Passes):
    """Its frozen state is one that others have, too."""

    def __init__(self) -> None:
        self.state, self.other = START, START

    def order(self) -> list[int]:
        self.state = dataclasses.replace(self.state, passes=self.state.passes + 1)
        return drawn((self.state.passes, self.other.passes))


class Halves(Passes):
    """A tuple with a generator and a count."""

    def __init__(self) -> None:
        self.pair = Pair(np.random.default_rng(4), 0)

    def order(self) -> list[int]:
        self.pair = self.pair._replace(passes=self.pair.passes + 1)
        return drawn((int(self.pair.generator.integers(1 << 40)), self.pair.passes))


class InSlots(Passes):
    def __init__(self) -> None:
        self.held = Held()

    def order(self) -> list[int]:
        self.held.passes += 1
        return drawn((self.held.passes, int(self.held.generator.integers(1 << 40))))


class Closure(Passes):
    def __init__(self) -> None:
        passes = 0

        def step() -> int:
            nonlocal passes
            passes += 1
            return passes

        self.step = step

    def order(self) -> list[int]:
        return drawn(self.step())


class Mixed(Passes):
    """A dictionary with a count beside something else."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {"passes": 0, "held": Held(), 7: object()}

    def order(self) -> list[int]:
        self.state["passes"] += 1
        self.state["held"].passes += 2
        return drawn((self.state["passes"], self.state["held"].passes))


def changed(value: Any, step: Callable[[Any], Any]) -> Callable[[], Keeps]:
    return lambda: Keeps(value(), step)


KINDS: dict[str, Callable[[], Passes]] = {
    kind.__name__: kind
    for kind in (Slots, InheritedSlots, PrivateSlots, OfTheClass, MadeLate, Replaces, Halves, InSlots, Closure, Mixed)
} | {
    "float": changed(lambda: 1.0, lambda value: value * 0.9),
    "text": changed(lambda: "a", lambda value: value + "b"),
    "tuple": changed(lambda: (0, 1), lambda value: (value[0] + 1, value[1])),
    "named tuple": changed(lambda: Pair(None, 0), lambda value: value._replace(passes=value.passes + 1)),
    "frozen": changed(Frozen, lambda value: dataclasses.replace(value, passes=value.passes + 1)),
    "dictionary": changed(lambda: {"passes": 0, 3: 1}, lambda value: value.update(passes=value["passes"] + 1)),
    "ordered": changed(lambda: OrderedDict(a=1, b=2), lambda value: value.move_to_end(next(iter(value)))),
    "counter": changed(Counter, lambda value: value.update([len(value)])),
    "queue": changed(lambda: deque(range(5), 5), lambda value: value.rotate(2)),
    "set": changed(set, lambda value: value.add(len(value))),
    "array": changed(lambda: array.array("q", range(4)), lambda value: value.append(9)),
    "buckets": lambda: Keeps([torch.arange(n) for n in range(9)], random.Random(3).shuffle),
    "numpy": changed(lambda: [np.arange(3), np.arange(4)], lambda value: value.reverse()),
    "number of numpy": changed(lambda: np.int32(1), lambda value: np.int32(value + 1)),
    "made late": changed(lambda: None, lambda value: (value or 0) + 1),
}


def loader_of(kind: str) -> DataLoader[int]:
    return DataLoader(range(COUNT), sampler=KINDS[kind]())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_restored(kind: str) -> None:
    """A new sampler goes on like the one whose state was taken, also if it was read before."""
    want = loader_of(kind)
    before = OwnState(want, stateful=False)
    for passes in (1, 2):
        list(want)
        taken = before.needed(before.take())[0]
        assert are_states(taken)
        other = loader_of(kind)
        own = OwnState(other, stateful=False)
        for _ in range(passes - 1):
            list(other)
        own.set(taken)
        assert list(other.sampler) == list(want.sampler)
    assert START.passes == 0


class Inner(IterableDataset[int]):
    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(drawn(self.passes))


class Outer(IterableDataset[int]):
    def __init__(self) -> None:
        self.inner = Inner()

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)


def test_a_stream_that_another_one_reads_is_restored() -> None:
    want, other = DataLoader(Outer()), DataLoader(Outer())
    list(want)
    OwnState(other, stateful=False).set(OwnState(want, stateful=False).take())
    assert list(other) == list(want)


def test_what_was_counted_in_an_earlier_run_is_saved() -> None:
    """In this process nothing has changed since the second run began, but a resumed run begins with a new sampler."""
    sampler = Slots()
    same = Replaces()
    new = Slots()
    first = [DataLoader(range(COUNT), sampler=one) for one in (sampler, same)]  # type: ignore[arg-type]
    for loader in first:
        OwnState(loader, stateful=False)
        list(loader)
    second = [OwnState(DataLoader(range(COUNT), sampler=one), stateful=False) for one in (sampler, same, new)]  # type: ignore[arg-type]
    assert [bool(own.needed(own.take())[0]) for own in second] == [True, True, False]


def test_a_count_that_the_program_restores_itself_is_put_back_to_the_begin_of_the_pass() -> None:
    """NeMo makes a sampler with the count of samples of its own checkpoint; the pass up to there is read again."""
    first, second = (DataLoader(range(COUNT), batch_sampler=Consumed(COUNT, 4, 0, 1, count)) for count in (0, 12))
    own = OwnState(first, stateful=False)
    begin = own.take()
    batches = iter(first)
    read = [next(batches).tolist() for _ in range(3)]
    OwnState(second, stateful=False).set(own.needed(begin)[0])
    assert [batch.tolist() for batch in second][:3] == read


def test_a_stream_that_is_kept_in_a_generator_function_is_told() -> None:
    loader = DataLoader(range(COUNT), sampler=GoesOn(COUNT, 0, 1))
    reasons = list(inexact(loader, OwnState(loader, stateful=False), stateful=False))
    assert [reason.startswith("keeps its place in sampler.indices") for reason in reasons] == [True]
