"""Schedules that wait for skipped optimizer steps, compared with a training that never had those steps."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as lrs

from lt_zero.core.step.skipped_steps import SkipCounter, hold_schedule


def warm(step: int) -> float:
    return min(1.0, (step + 1) / 4)


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: lrs.LambdaLR(o, [lambda step: 1 / (1 + step), warm]),
    "step": lambda o: lrs.StepLR(o, 2, 0.5),
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 5),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2, 2),
    "cycle": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=True),
    "one cycle": lambda o: lrs.OneCycleLR(o, [0.1, 0.2], total_steps=12),
    "sequential": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, 1.0, 3), lrs.CosineAnnealingLR(o, 6)], [3]),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.5, 3), lrs.ExponentialLR(o, 0.9)]),
}
S, D = False, True  # a step that is skipped, one that is done
RUNS = {
    "all done": [D] * 8,
    "held start": [S, S, S, D, D, D, D, D, D],
    "in between": [D, D, S, D, S, S, D, D, S, D, D],
    "never": [S] * 5,
}


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def optimizer() -> SGD:
    one, two = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    one.grad, two.grad = torch.ones(3), torch.ones(3)
    return SGD([{"params": [one]}, {"params": [two], "lr": 0.2}], lr=0.1, momentum=0.9)


def rates(o: Optimizer) -> list[tuple[float, float]]:
    return [(group["lr"], group["momentum"]) for group in o.param_groups]


def attempt(o: Optimizer, counter: SkipCounter, done: bool) -> None:
    if done:
        o.step()
        counter.succeed()
    else:
        counter.skip()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_batch(name: str, run: str) -> None:
    mine, theirs, counter = optimizer(), optimizer(), SkipCounter()
    held, plain = SCHEDULES[name](mine), SCHEDULES[name](theirs)
    hold_schedule(held, counter)
    for number, done in enumerate(RUNS[run]):
        attempt(mine, counter, done)
        held.step()
        if done:
            theirs.step()
            plain.step()
        assert rates(mine) == rates(theirs), number
        assert held.get_last_lr() == plain.get_last_lr()
        assert _comparable(held) == _comparable(plain)
        assert getattr(held, "last_epoch", None) == getattr(plain, "last_epoch", None)
        if name not in ("chained",):
            assert held.last_epoch == sum(RUNS[run][: number + 1])
    for p, q in zip(mine.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_outcomes_that_are_known_late(name: str, run: str) -> None:
    """A schedule that moved after a step that was none is put back."""
    mine, theirs, counter = optimizer(), optimizer(), SkipCounter()
    held, plain = SCHEDULES[name](mine), SCHEDULES[name](theirs)
    hold_schedule(held, counter)
    expected = SkipCounter()
    for number, done in enumerate(RUNS[run]):
        grads = [p.grad for group in mine.param_groups for p in group["params"]]
        for p in (p for group in mine.param_groups for p in group["params"]):
            p.grad = p.grad if done else None
        mine.step()
        for p, grad in zip((p for group in mine.param_groups for p in group["params"]), grads, strict=True):
            p.grad = grad
        counter.assume_success(lambda outcome=not done: counter.decide(outcome))
        held.step()
        counter.find_out()
        assert not counter.assumed
        attempt(theirs, expected, done)
        if done:
            plain.step()
        assert rates(mine) == rates(theirs), number
        assert held.get_last_lr() == plain.get_last_lr()
        assert _comparable(held) == _comparable(plain)
        assert counter.state_dict() == expected.state_dict()
        assert counter.attempts == expected.attempts


def test_a_late_outcome_asks_only_what_the_window_needs() -> None:
    """With a step that was done in its window a schedule stays where it is; one that cannot be put back waits."""
    o, counter = optimizer(), SkipCounter()
    scheduler = lrs.ExponentialLR(o, 0.9)
    hold_schedule(scheduler, counter)
    attempt(o, counter, True)
    counter.assume_success(lambda: counter.decide(True))
    scheduler.step()  # of two steps
    counter.find_out()
    assert scheduler.last_epoch == 1

    class Bare:
        calls = 0

        def step(self) -> None:
            self.calls += 1

    bare = Bare()
    hold_schedule(bare, counter)
    counter.assume_success(lambda: counter.decide(True))
    bare.step()
    assert not counter.assumed
    assert bare.calls == 0


def test_a_rate_that_is_a_tensor_stays_the_same_object() -> None:
    o, counter = optimizer(), SkipCounter()
    for group in o.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    scheduler = lrs.ExponentialLR(o, 0.5)
    hold_schedule(scheduler, counter)
    rate = o.param_groups[0]["lr"]
    o.step()
    counter.assume_success(lambda: counter.decide(True))
    scheduler.step()
    assert rate.item() == pytest.approx(0.05)
    counter.find_out()
    assert rate.item() == pytest.approx(0.1)
    assert o.param_groups[0]["lr"] is rate


def _comparable(scheduler: Any) -> Any:
    state = scheduler.state_dict()
    return {key: value for key, value in state.items() if key not in ("lr_lambdas", "_scale_fn_ref", "anneal_func")}


@pytest.mark.parametrize("frequency", [2, 3])
def test_frequency(frequency: int) -> None:
    """It moves if at least one step of the window was done."""
    for code in range(2**6):
        run = [bool(code >> k & 1) for k in range(6)]
        o, counter = optimizer(), SkipCounter()
        scheduler = lrs.ExponentialLR(o, 0.9)
        hold_schedule(scheduler, counter)
        moved = 0
        for number, done in enumerate(run, start=1):
            attempt(o, counter, done)
            if number % frequency == 0:
                scheduler.step()
                moved += any(run[number - frequency : number])
                assert scheduler.last_epoch == moved


def test_without_attempts_it_moves() -> None:
    o, counter = optimizer(), SkipCounter()
    scheduler = lrs.ExponentialLR(o, 0.9)
    counter.skip()  # before it was held
    hold_schedule(scheduler, counter)
    o.step()
    scheduler.step()
    counter.skip()
    scheduler.step()
    scheduler.step()  # nothing was skipped since the last call
    assert scheduler.last_epoch == 2


def test_plateau_is_never_held() -> None:
    o, counter = optimizer(), SkipCounter()
    scheduler = lrs.ReduceLROnPlateau(o, patience=0)
    hold_schedule(scheduler, counter)
    assert type(scheduler) is lrs.ReduceLROnPlateau
    for _ in range(2):
        counter.skip()
        scheduler.step(1.0)
    assert scheduler.num_bad_epochs == 0
    assert o.param_groups[0]["lr"] == pytest.approx(0.01)


def test_twice() -> None:
    o, first, latest = optimizer(), SkipCounter(), SkipCounter()
    scheduler = lrs.ExponentialLR(o, 0.9)
    hold_schedule(scheduler, first)
    cls = type(scheduler)
    first.skip()
    hold_schedule(scheduler, first)  # goes on
    scheduler.step()
    assert scheduler.last_epoch == 0
    hold_schedule(scheduler, latest)
    assert type(scheduler) is cls
    o.step()
    first.skip()
    latest.succeed()
    scheduler.step()
    assert scheduler.last_epoch == 1
    latest.skip()
    first.succeed()
    scheduler.step()
    assert scheduler.last_epoch == 1


def test_several_schedulers_have_windows_of_their_own() -> None:
    o, counter = optimizer(), SkipCounter()
    often, rarely = lrs.ExponentialLR(o, 0.9), lrs.StepLR(o, 1)
    for scheduler in (often, rarely):
        hold_schedule(scheduler, counter)
    for done in (S, D, S):
        attempt(o, counter, done)
        often.step()
    rarely.step()
    assert (often.last_epoch, rarely.last_epoch) == (1, 1)


class Foreign:
    """Not a torch scheduler; equal to others of its kind, so not hashable."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Foreign)

    def step(self, epoch: int, metric: float = 0.0) -> str:
        self.log.append((epoch, metric))
        return "moved"


def test_objects_with_a_step_method() -> None:
    counter, one, two = SkipCounter(), Foreign([]), Foreign([])
    hold_schedule(one, counter)
    counter.skip()
    assert one.step(1, metric=2.0) is None
    assert two.step(1) == "moved"
    counter.succeed()
    assert one.step(2, metric=3.0) == "moved"
    assert one.log == [(2, 3.0)]


def test_the_object_looks_the_same() -> None:
    for make in SCHEDULES.values():
        held, plain = make(optimizer()), make(optimizer())
        keys = list(vars(held))
        hold_schedule(held, SkipCounter())
        assert isinstance(held, type(plain))
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(type(held), name) == getattr(type(plain), name)
        assert list(vars(held)) == keys
        assert list(held.state_dict()) == list(plain.state_dict())
        held.load_state_dict(plain.state_dict())


class Slim(lrs.ExponentialLR):
    """Pickled by a way of its own."""

    def __reduce__(self) -> Any:
        return self.__class__, (self.optimizer, self.gamma)


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("cls", [lrs.ExponentialLR, Slim])
def test_copies_and_pickles_are_plain(cls: Any, protocol: int) -> None:
    o = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    scheduler, counter = cls(o, 0.5), SkipCounter()
    hold_schedule(scheduler, counter)
    file = io.BytesIO()
    del o.step  # torch's wrapper, which cannot be pickled
    torch.save(scheduler, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert cls is Slim or b"lt_zero" not in pickle.dumps(scheduler, protocol)  # readable without this library
    others = [loaded, pickle.loads(pickle.dumps(scheduler, protocol)), copy.copy(scheduler), copy.deepcopy(scheduler)]
    counter.skip()
    for other in others:
        assert type(other) is cls
        before = other.last_epoch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no optimizer step came before
            other.step()
        assert other.last_epoch == before + 1
    assert type(scheduler) is not cls
    before = scheduler.last_epoch
    scheduler.step()
    assert scheduler.last_epoch == before


def test_held_schedulers_are_collected() -> None:
    scheduler = lrs.ExponentialLR(optimizer(), 0.9)
    hold_schedule(scheduler, SkipCounter())
    gone = weakref.ref(scheduler)
    del scheduler
    gc.collect()
    assert gone() is None


def test_counter() -> None:
    counter = SkipCounter()
    for done in (S, D, D, S, S):
        counter.succeed() if done else counter.skip()
    assert counter.state_dict() == {"skipped": 3, "consecutive": 2, "succeeded": 0}
    counter.succeed()
    assert counter.state_dict() == {"skipped": 3, "consecutive": 0, "succeeded": 1}
    other = SkipCounter()
    other.load_state_dict(counter.state_dict())
    other.succeed()
    assert other.state_dict() == {"skipped": 3, "consecutive": 0, "succeeded": 2}


def test_loading_a_counter_does_not_move_the_window() -> None:
    o, counter = optimizer(), SkipCounter()
    scheduler = lrs.ExponentialLR(o, 0.9)
    hold_schedule(scheduler, counter)
    counter.load_state_dict({"skipped": 5, "consecutive": 0, "succeeded": 70})
    counter.skip()
    scheduler.step()
    assert scheduler.last_epoch == 0
    counter.load_state_dict({"skipped": 0, "consecutive": 0, "succeeded": 0})
    o.step()
    counter.succeed()
    scheduler.step()
    assert scheduler.last_epoch == 1
