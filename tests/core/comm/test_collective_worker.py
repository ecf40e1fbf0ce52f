"""Procedures of a worker: run one after the other beside their caller, and their errors come back in ``wait``."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import pytest

from lt_zero.core.comm.work import CollectiveMonitor, CollectiveWorker, WorkList


def test_procedures_run_in_the_order_of_their_launches_beside_the_caller() -> None:
    worker = CollectiveWorker("test")
    may_start = threading.Event()
    seen = list[int]()
    first = worker.submit(may_start.wait)
    rest = [worker.submit(lambda number=number: seen.append(number)) for number in range(20)]  # type: ignore[misc]
    assert not first.is_completed()
    assert not seen
    may_start.set()
    WorkList(rest, lambda: seen.append(20), CollectiveMonitor()).wait()
    assert seen == list(range(21))


def test_an_error_is_raised_by_the_wait_and_stops_nothing_else() -> None:
    worker = CollectiveWorker("test")
    failing = worker.submit(lambda: 1 // 0)
    after = worker.submit(lambda: None)
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    after.wait(timedelta(seconds=60))


def test_a_wait_that_is_too_short_says_so_and_can_be_repeated() -> None:
    worker, may_end = CollectiveWorker("test"), threading.Event()
    work = worker.submit(may_end.wait)
    with pytest.raises(RuntimeError, match="not complete"):
        work.wait(timedelta(milliseconds=1))
    may_end.set()
    work.wait(timedelta(seconds=60))


def test_the_thread_ends_with_its_owner() -> None:
    worker = CollectiveWorker("short-lived")
    worker.submit(lambda: None).wait()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "lt_zero-short-lived"]
    del worker
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
