"""Which units are gathered ahead of their use, without ranks and tensors."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

from torch import nn

from lt_zero.core.engine.bucket import Live
from lt_zero.core.engine.compute_copy import State
from lt_zero.core.engine.gather import Gatherer, Residency, Unit


class Row:
    """A bucket of 10 elements."""

    def __init__(self) -> None:
        self.sharding, self.storage = SimpleNamespace(params=True), SimpleNamespace(counted=10)
        self.state, self.live = State.RELEASED, Live()

    @property
    def released(self) -> bool:
        return self.state is State.RELEASED

    def count_in(self, live: Live) -> None:
        self.live = live

    def _add(self, elements: int, flying: int) -> None:
        self.live.numel += elements
        self.live.in_flight.add(flying, flying // 10)

    def launch_gather(self) -> None:
        assert self.state is State.RELEASED
        self.state = State.GATHERING
        self._add(10, 10)

    def gather(self) -> None:
        if self.state is State.GATHERING:
            self._add(0, -10)
        self.state = State.READABLE

    def release(self, searched: bool = False) -> None:
        if self.state is not State.RELEASED:
            self._add(-10, -10 if self.state is State.GATHERING else 0)
        self.state = State.RELEASED


def _gatherer(count: int, **limits: Any) -> tuple[Gatherer, list[Unit]]:
    units = [Unit(str(i), nn.Identity(), [cast(Any, Row())], True) for i in range(count)]
    groups = cast(Any, [SimpleNamespace(gathers_in_background=True)])
    return Gatherer(units, Unit("", nn.Identity(), [], True), groups, Residency(**limits)), units


def _use(gatherer: Gatherer, unit: Unit) -> None:
    gatherer.gather(unit)
    gatherer.visit(unit)


def _flying(units: list[Unit]) -> list[str]:
    return [unit.name for unit in units if unit.sharded[0].state is State.GATHERING]


def test_prefetch_follows_the_last_pass() -> None:
    gatherer, units = _gatherer(4, prefetch=20)
    gatherer.begin_order(None)
    for unit in units:
        _use(gatherer, unit)
        assert not _flying(units), "nothing is known"
        gatherer.release(unit)
    gatherer.begin_order(None)
    _use(gatherer, units[0])
    assert _flying(units) == ["1", "2"], "20 elements"
    gatherer.release(units[0])
    _use(gatherer, units[2])  # the sequence has changed
    assert _flying(units) == ["1", "3"]


def test_a_unit_that_is_used_again_is_gathered_ahead_again() -> None:
    gatherer, units = _gatherer(3, prefetch=10)
    for _ in range(2):
        gatherer.begin_order(None)
        for number in (0, 1, 0, 2):
            _use(gatherer, units[number])
            if number == 1:
                again = _flying(units)
            gatherer.release(units[number])
        gatherer.release_all()
    assert again == ["0"]


def test_a_large_unit_is_gathered_ahead_alone_and_from_as_many_files_as_there_are_buffers() -> None:
    for buffers, expected in ((float("inf"), ["1"]), (2, ["1"]), (0, [])):
        gatherer, units = _gatherer(4, prefetch=9, most_buckets=buffers)
        for _ in range(2):
            gatherer.begin_order(None)
            _use(gatherer, units[0])
            ahead = _flying(units)
            for unit in units[1:]:
                _use(gatherer, unit)
            gatherer.release_all()
        assert ahead == expected


def test_many_units_take_no_time() -> None:
    gatherer, units = _gatherer(10_000, prefetch=10**9)
    start = time.process_time()
    for _ in range(2):
        gatherer.begin_order(None)
        for unit in units:
            _use(gatherer, unit)
        gatherer.release_all()
    assert time.process_time() - start < 5, "a scan of all units in each visit takes minutes"
