"""Process groups on devices with a backend of their own, and the end of its collectives after an error."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lt_zero
from lt_zero.comm import process_groups
from lt_zero.comm import world as world_module
from lt_zero.comm.hang_detection import HangDetector
from lt_zero.comm.shard_group import ShardGroup
from lt_zero.comm.world import World
from lt_zero.common import accelerator, compat
from tests.support.pool import Pool

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@contextmanager
def default_group(backend: str | None) -> Iterator[None]:
    """Context with a default group of one rank."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", None])
def test_a_group_is_known_by_its_backend_for_the_device(backend: str | None) -> None:
    with default_group(backend):
        group = ShardGroup.of_all(World(dist.new_group(), CPU))
        assert group.gathers_in_threads
        assert group.backend == "gloo"
        assert group.world.order.host is group.process_group
        assert dist.get_backend(group.reductions) == "gloo"


def test_a_backend_for_each_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    assert [process_groups.backend_of(device) for device in (CPU, GPU)] == ["gloo", "nccl"]


def test_gloo_for_a_gpu_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with default_group("gloo"), caplog.at_level(logging.WARNING, "lt_zero"):
        World(dist.new_group(), CPU)
        assert not caplog.records
        World(dist.new_group(), GPU)
        (record,) = caplog.records
    assert "gloo for tensors on cuda" in record.getMessage()
    assert "'nccl'" in record.getMessage()


@pytest.mark.parametrize(("backend", "bound"), [(None, True), ("cpu:gloo,cuda:nccl", True), ("gloo", False)])
def test_the_default_group_is_bound_to_the_gpu(
    backend: str | None, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then NCCL splits groups off it, where it would connect each anew."""
    made = list[Any]()
    for name, value in {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("is_available", "make_current"):
        monkeypatch.setattr(accelerator, name, lambda device=None: True)
    monkeypatch.setattr(accelerator, "default_kind", lambda: torch.device("cuda"))
    monkeypatch.setattr(accelerator, "count", lambda: 2)
    monkeypatch.setattr(accelerator, "default_device", lambda index: torch.device("cuda", index))
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: made.append((args, kwargs)))
    monkeypatch.setattr(process_groups, "refuse_alone", lambda size: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    lt_zero.init_distributed(backend)
    (((first, *_), kwargs),) = made
    assert first == (backend or "nccl")
    assert kwargs["device_id"] == (torch.device("cuda", 1) if bound else None)


class _Communicators:
    """NCCL's communicators of some groups, of which ``stuck`` say whether their abort blocks."""

    def __init__(self, count: int, stuck: bool = False) -> None:
        self.calls, self.ended = list[str](), threading.Event()
        self._stuck = stuck
        self.groups = [_Group(self, f"group {number}") for number in range(count)]

    def call(self, what: str) -> None:
        self.calls.append(what)
        if self._stuck and what.startswith("abort"):
            self.ended.wait(60.0)


class _Group:
    def __init__(self, of: _Communicators, name: str) -> None:
        self._of, self._name = of, name

    def _get_backend(self, device: torch.device) -> _Group:
        assert device.type == "cuda"
        return self

    def _group_start(self) -> None:
        self._of.call("start")

    def _group_end(self) -> None:
        self._of.call("end")

    def abort(self) -> None:
        self._of.call(f"abort {self._name}")


@contextmanager
def there_are(found: _Communicators) -> Iterator[None]:
    """Context in which a process has these groups of NCCL, beside those of gloo that it has."""
    known, backend_of = compat.process_groups, process_groups.backend_of

    def backend(device: torch.device, group: Any = None) -> str:
        return "nccl" if isinstance(group, _Group) and device.type == "cuda" else backend_of(device, group)

    with (
        mock.patch.object(compat, "process_groups", return_value=[*known(), *found.groups]),
        mock.patch.object(process_groups, "backend_of", backend),
    ):
        yield


AT_ONCE = ["start", "abort group 2", "abort group 1", "abort group 0", "end"]


def test_all_groups_are_aborted_at_once() -> None:
    found = _Communicators(3)
    with default_group("gloo"), there_are(found):
        process_groups.abort_nccl()
        assert found.calls == AT_ONCE
        dist.barrier()  # gloo's stay


def test_an_abort_that_blocks_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    found = _Communicators(2, stuck=True)
    with there_are(found), caplog.at_level(logging.WARNING, "lt_zero"):
        process_groups.abort_nccl(limit=0.1)
    found.ended.set()
    assert "may wait at its exit" in caplog.text


@pytest.mark.parametrize("stuck", [False, True])
def test_a_device_that_comes_to_rest_keeps_its_groups(stuck: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found, ended = _Communicators(3), threading.Event()
    monkeypatch.setattr(accelerator, "synchronize", lambda device: ended.wait(60.0) if stuck else None)
    with there_are(found):
        process_groups.abort_if_stuck(GPU, patience=0.1 if stuck else 60.0)
    ended.set()
    assert found.calls == (AT_ONCE if stuck else [])


def _ends(how: str) -> list[str]:
    """The calls of NCCL on a rank after an error, or after none."""
    world, found = World.join(CPU), _Communicators(3)
    detector = world.detector
    assert isinstance(detector, HangDetector)
    error = RuntimeError("fails on all ranks")
    with there_are(found):
        if how == "stuck":
            # A device whose kernels do not end.
            ended, soon = threading.Event(), partial(process_groups.abort_if_stuck, patience=0.1)
            with (
                mock.patch.object(accelerator, "is_accelerator", return_value=True),
                mock.patch.object(accelerator, "synchronize", side_effect=lambda device: ended.wait(60.0)),
                mock.patch.object(world_module, "abort_if_stuck", soon),
            ):
                world.give_up(error)
            ended.set()
        elif how == "error":
            world.post_error(error)
            detector.abort()
        elif how == "verdict":
            detector._reporter.close_connections(0)
        else:
            detector.abort()
    return found.calls


@pytest.mark.parametrize("how", ["none", "error", "verdict", "stuck"])
def test_a_rank_with_an_error_does_not_wait_for_the_others(how: str, pool: Pool) -> None:
    assert pool.run(2, _ends, how) == [[] if how == "none" else AT_ONCE] * 2
