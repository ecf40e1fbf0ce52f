"""The clock by itself: stages, parts, threads, events of a GPU. Time is what the test says it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lt_zero.common import accelerator
from lt_zero.common.phases import NOTHING, phase, phased, unit_range
from lt_zero.training.lightning.monitor import timing as clocks
from lt_zero.training.lightning.monitor.timing import Clock
from tests.support.fake_time import Time

CPU = torch.device("cpu")


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(clocks, "time", time)
    return time


@pytest.fixture
def clock(time: Time) -> Iterator[Clock]:
    clock = Clock(CPU)
    clock.start()
    yield clock
    clock.stop()


def milliseconds(clock: Clock) -> dict[str, int]:
    rounded = {kind: round(1e3 * seconds) for kind, seconds in clock.times.seconds.items()}
    return {kind: value for kind, value in rounded.items() if value}


def test_stages_add_up_and_parts_count_in_them(clock: Clock, time: Time) -> None:
    with phase("forward"):
        time.passes(0.010)
        with phase("gather", "a"):
            time.passes(0.003)
            with phase("offload", "file"):
                time.passes(0.002)
            time.passes(0.001)
    time.passes(0.007)  # between the stages
    with phase("backward"):
        time.passes(0.020)
        with phase("gather", "a"), phase("gather", "b"):
            time.passes(0.005)
    with phase("step"), phase("clip"):
        time.passes(0.011)
    clock.end_step()
    assert milliseconds(clock) == {
        **{"forward": 16, "backward": 25, "step": 11, "rest": 7},
        **{"gather": 3 + 1 + 5, "offload": 2, "clip": 11},
    }
    assert clock.times.steps == 1


def test_a_step_may_end_inside_of_a_stage(clock: Clock, time: Time) -> None:
    with phase("forward"):
        time.passes(0.001)
        with phase("backward"):
            time.passes(0.002)
        with phase("step"):
            time.passes(0.003)
        clock.end_step()
        assert milliseconds(clock) == {"forward": 1, "backward": 2, "step": 3}
        clock.reset()
        time.passes(0.004)
    time.passes(0.005)
    with phase("forward"):
        time.passes(0.006)
    clock.end_step()
    assert milliseconds(clock) == {"forward": 10, "rest": 5}


def test_it_begins_with_a_stage_and_validation_is_not_counted(clock: Clock, time: Time) -> None:
    with clock.paused(), phase("gather", "in the sanity check"):
        time.passes(1)
    clock.end_step()
    assert clock.times == (0, {}), "no step was begun"
    with phase("forward"):
        time.passes(0.002)
    paused = clock.paused().open()
    with phase("gather", "in validation"):
        time.passes(1)
    paused.close()
    paused.close()
    time.passes(0.001)
    clock.end_step()
    assert milliseconds(clock) == {"forward": 2, "rest": 1}


def test_an_exception_ends_what_it_leaves(clock: Clock, time: Time) -> None:
    @phased("clip")
    def fail() -> None:
        time.passes(0.002)
        phase("backward").open()  # nobody closes it
        raise KeyError

    with pytest.raises(KeyError), phase("step"):
        fail()
    time.passes(0.004)
    late = phase("gather", "x").open()
    clock.end_step()
    assert milliseconds(clock) == {"step": 2, "clip": 2, "rest": 4}
    clock.stop()
    late.close()


def test_other_threads_do_not_count(clock: Clock, time: Time) -> None:
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with phase("step"), phase("offload", "file"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=work)
    with phase("forward"):
        thread.start()
        inside.wait(10)
        time.passes(0.003)
        with phase("gather", "x"):
            time.passes(0.001)
            leave.set()
            thread.join()
            time.passes(0.001)
    clock.end_step()
    assert milliseconds(clock) == {"forward": 5, "gather": 2}


def test_hooks_of_a_backward_in_another_thread_count(clock: Clock, time: Time) -> None:
    """On a GPU autograd runs them in a thread of the device."""

    def hook(grad: Any) -> None:
        with phase("gather", "x"):
            time.passes(0.005)

    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(hook)
    with phase("backward"):
        thread = threading.Thread(target=weight.sum().backward)
        thread.start()
        thread.join()
    clock.end_step()
    assert milliseconds(clock) == {"backward": 5, "gather": 5}


def test_clocks_in_each_other(time: Time) -> None:
    outer, inner = Clock(CPU), Clock(CPU)
    outer.start()
    inner.start()
    with phase("forward"):
        time.passes(0.001)
    inner.end_step()
    inner.stop()
    with phase("forward"):
        time.passes(0.002)
    outer.end_step()
    outer.stop()
    assert (milliseconds(inner), milliseconds(outer)) == ({"forward": 1}, {"forward": 2})
    assert phase("forward") is NOTHING


def test_nothing_is_made_while_nobody_looks() -> None:
    assert phase("gather", "x") is phase("step") is unit_range("forward", "x") is NOTHING
    with NOTHING:
        pass
    NOTHING.open().close()


class Gpu:
    """A device that is behind the host: ``reached`` is how far it is. An event may be read when it has passed it."""

    def __init__(self, time: Time) -> None:
        self.time = time
        self.reached = 0.0
        self.made = 0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                gpu.made += 1

            def record(self, stream: Any) -> None:
                assert stream == "the stream that computes"
                self.at = gpu.time.now

            def query(self) -> bool:
                return self.at <= gpu.reached

            def elapsed_time(self, end: Event) -> float:
                assert self.query()
                assert end.query(), "it would raise"
                return (end.at - self.at) * 1e3

        self.event = Event


def test_a_gpu_is_read_when_it_is_done_and_never_waited_for(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(time)
    monkeypatch.setattr(accelerator, "event", lambda device, timing: gpu.event(timing))
    monkeypatch.setattr(accelerator, "current_stream", lambda device: "the stream that computes")
    monkeypatch.setattr(accelerator, "synchronize", None)
    clock = Clock(torch.device("cuda", 0))
    clock.start()
    for number in range(1, 7):
        with phase("forward"):
            time.passes(0.004)
            with phase("gather", "x"):
                time.passes(0.001)
        if number > 2:
            gpu.reached = time.now - 0.012  # it has ended the step before the last, and not the last
        time.passes(0.002)
        clock.end_step()
        assert clock.times.steps == max(0, number - 2)
    clock.stop()
    assert milliseconds(clock) == {"forward": 20, "gather": 4, "rest": 8}
    assert gpu.made <= 4 * 4, "events are used again"
