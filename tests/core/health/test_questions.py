"""How often ranks ask what others do, and how many requests of the store that takes."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lt_zero.core.comm.world import World
from lt_zero.core.health import questions
from lt_zero.core.health.hang_detection import HangDetector
from lt_zero.core.health.questions import pause, read_all
from tests.support.lightning_tools import quick
from tests.support.pool import Pool

SEVERAL = 4


def test_only_the_first_asks_in_each_round_of_a_large_run() -> None:
    """Each question takes an answer of each rank, and all ranks may wait for one that is late."""
    assert [pause(ranks, 2.0, first=False) for ranks in (2, 64, 256)] == [2.0] * 3
    assert pause(1024, 2.0, first=True) == 2.0
    for ranks in (1024, 4096):
        assert ranks * ranks * 400 / pause(ranks, 2.0, first=False) == pytest.approx(50e6)


class _Counting:
    """A store that counts requests."""

    def __init__(self, store: Any) -> None:
        self._store, self.requests = store, 0

    def has_extended_api(self) -> bool:
        return bool(self._store.has_extended_api())

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self._store, name)


@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_answers_are_read_in_two_requests_where_a_store_can(kind: str, tmp_path: Path) -> None:
    made: Any = {
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=20)),  # type: ignore[attr-defined]
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),  # type: ignore[attr-defined]
        "hash": dist.HashStore,  # type: ignore[attr-defined]
    }[kind]()
    store: Any = _Counting(dist.PrefixStore("a", made))  # type: ignore[attr-defined]
    keys = [f"doing/{rank}" for rank in range(40)]
    for number, key in enumerate(keys[:-1]):
        store.set(key, str(number))
    assert read_all(store, keys) == [*(str(number).encode() for number in range(39)), None]
    store.set(keys[-1], "39")
    store.requests = 0
    assert read_all(store, keys) == [str(number).encode() for number in range(40)]
    if store.has_extended_api():
        assert store.requests == 2
    assert read_all(store, []) == []


def _late() -> int:
    """Ranks 0 and 1 wait for the last one, until one of them has looked several times; returns how often this has."""
    with quick():
        world = World.join(torch.device("cpu"))
    assert world.process_group is not None
    store = dist.PrefixStore("late", world.process_group.get_group_store())  # type: ignore[attr-defined]
    looks = list[int]()
    conclude = HangDetector._conclude

    def counted(detector: HangDetector, *args: Any) -> None:
        looks.append(1)
        if len(looks) == SEVERAL:
            store.set("several", "")
        conclude(detector, *args)

    # The others would look again in an hour.
    with mock.patch.object(questions, "_RATE", 1e-3), mock.patch.object(HangDetector, "_conclude", counted):
        until = time.monotonic() + 30.0
        while world.rank == 2 and not store.check(["several"]) and time.monotonic() < until:
            time.sleep(0.05)
        world.meet("the last one is here")
    return len(looks)


def test_the_first_that_waits_asks_for_all(pool: Pool) -> None:
    fewer, more = sorted(pool.run(3, _late)[:2])
    assert fewer <= 1
    assert more >= SEVERAL
