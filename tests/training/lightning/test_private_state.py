"""Private state of samplers and data is found wherever Python lets an object keep it, and is restored there."""

from __future__ import annotations

import array
import csv
import dataclasses
import io
import multiprocessing
import random
import socket
import threading
import time
import tracemalloc
import weakref
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lt_zero.training.lightning.data_position.epochs import Epochs
from lt_zero.training.lightning.data_position.inexact import inexact
from lt_zero.training.lightning.data_position.own_state import OwnState, are_states
from lt_zero.training.lightning.data_position.position import is_stateful, tracked
from tests.support.public_samplers import Consumed, GoesOn

COUNT = 40


def drawn(seed: object) -> list[int]:
    text = hex(seed) if isinstance(seed, int) else repr(seed)  # Python refuses to write so many digits
    return random.Random(text).sample(range(COUNT), COUNT)


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


class SpawnsSeeds(Passes):
    """``entropy``: None: another one for each sampler."""

    def __init__(self, entropy: Any) -> None:
        self.seeds = np.random.SeedSequence(entropy)

    def order(self) -> list[int]:
        (child,) = self.seeds.spawn(1)
        return drawn(int(child.generate_state(1)[0]))


class SpawnsSharedSeeds(SpawnsSeeds):
    """One sequence that two objects hold."""

    def __init__(self, entropy: Any) -> None:
        super().__init__(entropy)
        self.held = SimpleNamespace(seeds=self.seeds)

    def order(self) -> list[int]:
        (child,) = self.held.seeds.spawn(1)
        return super().order() if child.generate_state(1)[0] % 2 else drawn(int(child.generate_state(1)[0]))


class SpawnsGenerators(Passes):
    """``seed``: None: another one for each sampler."""

    def __init__(self, seed: int | None) -> None:
        self.generator = np.random.default_rng(seed)
        self.same = self.generator  # another name, by which it has to be the same object

    def order(self) -> list[int]:
        (child,) = self.generator.spawn(1)
        return drawn((int(child.integers(1 << 40)), int(self.same.integers(1 << 40))))


class Mixed(Passes):
    """A dictionary with a count beside something else."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {"passes": 0, "held": Held(), 7: object()}

    def order(self) -> list[int]:
        self.state["passes"] += 1
        self.state["held"].passes += 2
        return drawn((self.state["passes"], self.state["held"].passes))


def locked(value: Any) -> Any:
    value.setflags(write=False)
    return value


def one_more(value: Any) -> None:
    value.value += 1


def changed(value: Any, step: Callable[[Any], Any]) -> Callable[[], Keeps]:
    return lambda: Keeps(value(), step)


KINDS: dict[str, Callable[[], Passes]] = {
    kind.__name__: kind
    for kind in (
        Slots,
        InheritedSlots,
        PrivateSlots,
        OfTheClass,
        MadeLate,
        Replaces,
        Halves,
        InSlots,
        Closure,
        Mixed,
    )
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
    "big-endian": changed(lambda: np.arange(5, dtype=">i8"), lambda value: np.roll(value, 1)),
    "read only": changed(lambda: locked(np.arange(5)), lambda value: locked(np.roll(value, 1))),
    "reversed": changed(lambda: np.arange(5)[::-1], lambda value: value.sort()),
    "parameter": changed(lambda: torch.nn.Parameter(torch.zeros(2)), lambda value: value.data.add_(1)),
    "expanded": changed(lambda: torch.zeros(1).expand(3), lambda value: value + 1),
    "of inference": changed(lambda: torch.inference_mode()(torch.zeros)(3), lambda value: value + 1),
    "digits": changed(lambda: 10**5000, lambda value: value + 1),
    "user's dictionary": changed(lambda: UserDict(passes=0), lambda value: value.update(passes=value["passes"] + 1)),
    "shared number": changed(lambda: multiprocessing.Value("q", 1 << 40), one_more),
    "shared fraction": changed(lambda: multiprocessing.Value("d", 0.5), one_more),
    "shared number without a lock": changed(lambda: multiprocessing.Value("i", 0, lock=False), one_more),
    "seeds": lambda: SpawnsSeeds(5),
    "many seeds": lambda: SpawnsSeeds([1 << 70, 3]),
    "seeds of the system": lambda: SpawnsSeeds(None),
    "seeds under two names": lambda: SpawnsSharedSeeds(5),
    "seeds of the system under two names": lambda: SpawnsSharedSeeds(None),
    "generator that spawns": lambda: SpawnsGenerators(5),
    "generator with seeds of the system": lambda: SpawnsGenerators(None),
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


@pytest.mark.parametrize("kind", KINDS)
def test_the_begin_of_the_first_pass_is_restored(kind: str) -> None:
    """A run that was saved inside of its first pass reads that pass again, also with a sampler that was read before.

    What a pass has made stays there: it has no state before the first pass to which it could be set.
    """
    want = loader_of(kind)
    before = OwnState(want, stateful=False)
    begin = before.take()
    first = list(want.sampler)
    (taken,) = before.needed(begin, before.take())[:1]
    for passes in (0,) if kind in ("OfTheClass", "MadeLate", "made late") else (0, 1):
        other = loader_of(kind)
        own = OwnState(other, stateful=False)
        for _ in range(passes):
            list(other)
        own.set(taken)
        assert list(other.sampler) == first


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


class Stage:
    """Stands for webdataset's class of stages, of which users make their own."""

    __module__ = "webdataset.utils"


class ByPass(Stage):
    """A stage of the user's: shuffles by the number of its pass. It may hold samples, which are in no checkpoint."""

    def __init__(self) -> None:
        self.epoch = -1
        self.cached: list[float] = []

    def __call__(self, samples: list[int]) -> list[int]:
        self.epoch += 1
        self.cached = [float(sample) for sample in samples]
        return random.Random(self.epoch).sample(samples, len(samples))


class BySeed(Stage):
    """Shuffles by an argument, which webdataset draws when the stage is made. Others may be functions."""

    def __init__(self, seed: int, **arguments: Any) -> None:
        self.kw = {"seed": seed, **arguments}

    def __call__(self, samples: list[int]) -> list[int]:
        return random.Random(self.kw["seed"]).sample(samples, len(samples))


class Pipeline(IterableDataset[int]):
    def __init__(self, seed: int) -> None:
        self.pipeline = [BySeed(seed), BySeed(seed + 5, handler=print), ByPass()]

    def __iter__(self) -> Iterator[int]:
        samples = list(range(COUNT))
        for stage in self.pipeline:
            samples = stage(samples)
        return iter(samples)


def test_seeds_and_counters_of_stages_of_webdataset_are_restored() -> None:
    first, second = (DataLoader(Pipeline(seed), batch_size=None) for seed in (3, 4))
    own, other = (OwnState(loader, stateful=False) for loader in (first, second))
    list(first)
    (begin,) = own.needed(own.take())
    names = {"0.kw", "1.kw.seed", "2.epoch"}
    assert begin.keys() == {f"dataset.pipeline.{name}" for name in names}
    want = list(first)
    assert list(second) != want
    other.set(begin)
    assert list(second) == want


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


def test_generators_that_share_seeds_go_on_to_spawn_the_same_ones() -> None:
    first, second = (SpawnsGenerators(None) for _ in range(2))
    for sampler in (first, second):
        sampler.other = np.random.default_rng(sampler.generator.bit_generator.seed_seq)  # type: ignore[attr-defined]
    want, got = (DataLoader(range(COUNT), sampler=one) for one in (first, second))  # type: ignore[arg-type]
    list(want)
    OwnState(got, stateful=False).set(OwnState(want, stateful=False).take())
    for _ in range(2):
        one, other = (sampler.other.spawn(1)[0] for sampler in (first, second))  # type: ignore[attr-defined]
        assert one.integers(1 << 40) == other.integers(1 << 40)
        assert list(want.sampler) == list(got.sampler)


def test_a_generator_with_seeds_of_the_system_goes_on_to_spawn_the_same_ones() -> None:
    sampler = SpawnsGenerators(None)
    other = SpawnsGenerators(None)
    want, got = (DataLoader(range(COUNT), sampler=one) for one in (sampler, other))  # type: ignore[arg-type]
    list(want)
    OwnState(got, stateful=False).set(OwnState(want, stateful=False).take())
    assert other.generator.spawn(1)[0].integers(1 << 40) == sampler.generator.spawn(1)[0].integers(1 << 40)
    assert other.generator.integers(1 << 40) == sampler.generator.integers(1 << 40)


def test_a_count_in_shared_memory_of_another_object_belongs_to_the_process() -> None:
    rank, other = (DataLoader(Shared(multiprocessing.Value("i", number))) for number in (0, 1))
    OwnState(other, stateful=False).set(OwnState(rank, stateful=False).take())
    assert other.dataset.number.value == 1  # type: ignore[attr-defined]


def test_an_order_in_shared_memory_is_told() -> None:
    loader = DataLoader(range(COUNT), sampler=Keeps(multiprocessing.Array("i", 4), lambda value: None))  # type: ignore[arg-type]
    reasons = list(inexact(loader, OwnState(loader, stateful=False), stateful=False))
    assert [reason.startswith("keeps its place in sampler.value ") for reason in reasons] == [True]


# ---- objects that answer questions with errors, data or delays -------------------------------------------------------


class Asked:
    """Fails whenever its class is asked for anything."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __bool__(self) -> bool:
        raise RuntimeError

    def __str__(self) -> str:
        raise RuntimeError

    __hash__ = object.__hash__


class Unloaded:
    """Loads its data when its class is asked for, as proxies do."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("loads")


class OnDisk(list[int]):
    def __iter__(self) -> Any:
        raise RuntimeError("reads")

    def __len__(self) -> int:
        raise RuntimeError("reads")

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError("reads")


class InDatabase(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("reads")

    get = __getitem__ = items  # type: ignore[assignment]


class Endless(Mapping[int, int]):
    """Has more keys than can be read."""

    def __len__(self) -> int:
        return 1 << 60

    def __iter__(self) -> Iterator[int]:
        yield from range(1 << 60)

    def __getitem__(self, key: int) -> int:
        return key


class Odd(random.Random):
    """A generator whose state is not what Python's have."""

    def getstate(self) -> Any:
        raise NotImplementedError


def gone() -> Any:
    """A reference to an object that is no more."""
    held = Slots()
    return weakref.proxy(held)


def circle() -> Any:
    first: list[Any] = [Held()]
    first.append({"first": first})
    return first


def told(loader: Any) -> list[str]:
    return list(inexact(loader, OwnState(loader, stateful=False), stateful=False))


HOLDS: dict[str, Callable[[], Any]] = {
    "asked": Asked,
    "asked, as a key": lambda: {Asked(): Held()},
    "asked, in a list": lambda: [Asked(), Asked()],
    "unloaded": Unloaded,
    "gone": gone,
    "on disk": lambda: OnDisk([1, 2]),
    "in a database": lambda: InDatabase(a=1),
    "endless": Endless,
    "circle": circle,
    "locks": lambda: [threading.Lock(), threading.Condition(), threading.Event(), threading.local()],
    "thread": lambda: threading.Thread(target=int),
    "socket": socket.socket,
    "meta": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "masked": lambda: np.ma.array([1, 2], mask=[0, 1]),  # type: ignore[no-untyped-call]
    "long": lambda: np.zeros(3, np.longdouble),
    "letters": lambda: array.array("u", "abc"),
    "time": time.localtime,
    "text in memory": lambda: io.StringIO("abc"),
}
READ_ON: dict[str, Callable[[], Any]] = {
    "odd generator": Odd,
    "old generator": lambda: np.random.RandomState(np.random.PCG64(1)),
    "generator function": lambda: (number for number in range(3)),
    "rows of a table": lambda: csv.reader(["1,2"]),
    "file": lambda: io.BufferedReader(io.FileIO(__file__)),
}


class Beside(Slots):
    """Counts passes beside something else."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", [*HOLDS, *READ_ON])
def test_whatever_is_beside_a_count_it_is_restored(name: str) -> None:
    make = (HOLDS | READ_ON)[name]
    loader, other = (DataLoader(range(COUNT), sampler=Beside(make())) for _ in range(2))  # type: ignore[arg-type]
    own = OwnState(loader, is_stateful(loader))
    begin = own.take()
    list(loader)
    taken = own.needed(begin, own.take())[1]
    assert are_states(taken)
    assert Epochs(own.parts).state_dict() == {}
    OwnState(other, stateful=False).set(taken)
    assert list(other) == list(loader)
    assert ["sampler.value" in reason for reason in told(loader)] == ([True] if name in READ_ON else [])


class Busy(Beside):
    """Has a thread that adds to its containers all the time."""

    def __init__(self) -> None:
        super().__init__((deque[int](maxlen=50), dict[int, int](), set[int]()))
        self.ends = threading.Event()
        threading.Thread(target=self.fill, daemon=True).start()

    def fill(self) -> None:
        queue, table, found = self.value
        number = 0
        while not self.ends.is_set():
            number += 1
            queue.append(number)
            table[number % 997] = number
            table.pop(number * 7 % 997, None)
            found ^= {number % 991}


def test_a_thread_may_change_what_is_looked_at() -> None:
    sampler = Busy()
    own = OwnState(DataLoader(range(COUNT), sampler=sampler), stateful=False)  # type: ignore[arg-type]
    try:
        for _ in range(100):
            assert "sampler.passes" in own.take()
    finally:
        sampler.ends.set()


class Shared(Dataset[int]):
    def __init__(self, number: Any) -> None:
        self.number = number

    def __len__(self) -> int:
        return COUNT


class Answers(Dataset[int]):
    """Passes attributes on to a table, and has its own meaning of names that others know."""

    def __init__(self) -> None:
        self.table = {"pipeline": len}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["table"][name]

    def __len__(self) -> int:
        return COUNT

    @property
    def epoch(self) -> int:
        raise ValueError("not set")

    def set_epoch(self, epoch: int) -> None:
        pass


class Registered(DataLoader[int]):
    def __init_subclass__(cls, **options: Any) -> None:
        raise ValueError("registered twice")


def test_questions_that_fail_end_no_run() -> None:
    loader = DataLoader(Answers())
    own = OwnState(loader, is_stateful(loader))
    assert "dataset" in own.parts
    assert Epochs(own.parts).state_dict() == {}
    assert told(loader) == []
    assert tracked(Registered(range(3)), lambda make: make()) is None  # type: ignore[arg-type]


class Early(Slots):
    """Can tell its state once it was read."""

    def state_dict(self) -> dict[str, int]:
        if self.passes == 0:
            raise LookupError("not read")
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


def test_a_state_that_cannot_be_told_is_remembered() -> None:
    loader = DataLoader(range(COUNT), sampler=Early())  # type: ignore[arg-type]
    own = OwnState(loader, stateful=False)
    assert "sampler" not in own.take()
    assert own.untold == {"sampler": "LookupError('not read')"}
    list(loader)
    assert own.take()["sampler"]["state"] == {"passes": 1}
    assert own.untold == {}


LARGE: dict[str, Callable[[], Any]] = {
    "array": lambda: np.zeros(1 << 24, np.int64),
    "strided": lambda: np.zeros((1 << 12, 1 << 13), np.int64)[:, ::2],
    "list": lambda: [7] * (1 << 20),
    "nested": lambda: [[1, 2]] * (1 << 19),
    "arrays": lambda: [np.zeros(1 << 20, np.int64)] * 64,
    "text": lambda: "ab" * (1 << 24),
}


@pytest.mark.parametrize("kind", LARGE)
def test_what_is_large_is_not_copied(kind: str) -> None:
    """Nor looked at as a whole: that is done at each save."""
    value = LARGE[kind]()
    own = OwnState(DataLoader(range(COUNT), sampler=Beside(value)), stateful=False)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        taken = own.needed(own.take())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken == [{}]
    assert peak < 1 << 22
