"""No thread of ours outlives a run, all come back when they are needed, and who waits for one learns of its end."""

from __future__ import annotations

import gc
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

import lt_zero
from lt_zero.common import accelerator, worker
from lt_zero.common.accelerator import with_index
from lt_zero.core.comm import world as world_module
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.stores import thread_pool as io
from lt_zero.core.stores.io_options import SwapError
from lt_zero.core.stores.thread_pool import IoPool
from lt_zero.offload import background
from lt_zero.offload.background import Background, Job
from tests.support.features import needs, skip_without, there
from tests.support.lightning_tools import GPT, sharded_trainer, weights
from tests.support.matrix import only_rows
from tests.support.models import Net
from tests.support.parity import config_of
from tests.support.pool import Pool

Threads = frozenset[threading.Thread]


def _all() -> Threads:
    return frozenset(threading.enumerate())


def _ours(before: Threads) -> list[str]:
    """Those of ours that have come since: other tests of this process may have left some.

    Without the thread that watches waits, which lives as long as its ``World``: the next wait may be after the run.
    """
    names = (thread.name for thread in _all() - before if thread.name != "lt_zero-roll-call")
    return sorted(name for name in names if name.startswith("lt_zero"))


class _Fails(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            raise ZeroDivisionError


class _Saves(Callback):
    """So that a save is under way when the run ends."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(f"{trainer.default_root_dir}/one.ckpt")


def _run(folder: str, nvme: bool, fails: bool) -> Any:
    before = _all()
    zero: dict[str, Any] = {"offload_optimizer": {"device": "nvme", "nvme_path": folder, "overlap_step": True}}
    callbacks = [_Saves(), *([_Fails()] if fails else [])]
    trainer = sharded_trainer(
        3,
        zero if nvme else {},
        {"checkpoint": {"async_save": True}},
        max_steps=3,
        default_root_dir=folder,
        callbacks=callbacks,
    )
    module = GPT(dist.get_world_size(), "adamw")
    if fails:
        with pytest.raises(ZeroDivisionError):
            trainer.fit(module)
        assert not (left := _ours(before)), left
        trainer.callbacks.pop()  # type: ignore[attr-defined]
    trainer.fit(module)
    assert not (left := _ours(before)), left
    trainer.strategy.export(f"{folder}/weights", dtype=torch.float32)  # type: ignore[attr-defined]
    values = weights(trainer)  # threads come back for what needs them
    trainer.validate(module)
    assert not (left := _ours(before)), left
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module)
    assert not (left := _ours(before)), left
    return values


@pytest.mark.parametrize(
    ("nvme", "fails"),
    only_rows([(True, True)], [(False, False), (True, True), (False, True)]),
    ids=["memory-ends", "files-fails", "memory-fails"],
)
def test_no_thread_outlives_a_run(pool: Pool, tmp_path: Path, nvme: bool, fails: bool) -> None:
    if nvme:
        skip_without("offload")
    values = pool.run(2, _run, str(tmp_path), nvme, fails)[0]
    assert all(bool((value == value).all()) for value in values.values())


# ---- the thread that steps ------------------------------------------------------------------------------------------


class _Line:
    """What is handed over, and what came of it."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.published = 0

    def job(self, step: Any = lambda: None) -> Job:
        return Job(step, list, self._publish, self.errors.append)

    def _publish(self) -> None:
        self.published += 1


def _other_strategy(folder: str) -> None:
    before = _all()
    module, zero = GPT(dist.get_world_size()), {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    first, second = sharded_trainer(3, zero, max_steps=1), sharded_trainer(2, max_steps=1)
    first.fit(module)
    second.fit(module)  # reads the weights of the first run from its files
    assert first.strategy is not None  # which somebody still has
    assert _ours(before) == []


@needs("offload")
def test_the_run_of_another_strategy_leaves_none_either(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _other_strategy, str(tmp_path))


def _ends(job: Job) -> bool:
    """Whether who waits for a job returns."""
    waiter = threading.Thread(target=job.wait, daemon=True)
    waiter.start()
    waiter.join(20)
    return not waiter.is_alive()


def test_an_error_before_the_first_job_ends_all_of_them() -> None:
    """On a machine without it, a CUDA device cannot be set; one without index cannot be set anywhere."""
    before = _all()
    line = _Line()
    thread = Background(device=torch.device("cuda"))
    jobs = [line.job() for _ in range(3)]
    for job in jobs:
        thread.hand_over(job)
    assert all(_ends(job) for job in jobs)
    assert len(line.errors) == line.published == 3  # other ranks wait in what is published
    thread.close()
    assert not (left := _ours(before)), left


def test_an_error_between_jobs_ends_all_of_them() -> None:
    before = _all()
    line = _Line()
    thread = Background()
    gate = threading.Event()

    def leaves() -> None:
        gate.wait(20)
        raise SystemExit  # as a user's optimizer could; no error that a job expects

    jobs = [line.job(leaves), line.job()]
    for job in jobs:
        thread.hand_over(job)
    gate.set()
    assert all(_ends(job) for job in jobs)
    assert line.errors
    later = line.job()
    thread.hand_over(later)
    assert _ends(later)
    thread.close()
    again = line.job()
    thread.hand_over(again)  # starts another thread
    assert _ends(again)
    thread.close()
    assert not (left := _ours(before)), left


def test_who_waits_for_a_thread_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (background, io):
        monkeypatch.setattr(module, "LOOK", 0.01)
    monkeypatch.setattr(worker, "_run", lambda items, serve, prepare, ready: ready.wait())
    line, thread = _Line(), Background()
    job = line.job()
    thread.hand_over(job)
    with pytest.raises(SwapError, match="lt_zero-step died"):
        job.wait()
    with pytest.raises(SwapError, match="lt_zero-step died"):
        thread.hand_over(line.job(), limit=0)
    transfer = IoPool(threads=1).submit(1, lambda block: None, lambda error: None, None)
    with pytest.raises(SwapError, match="lt_zero-io died"):
        transfer.wait()


def test_what_is_put_in_a_forked_child_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()
    thread = worker.Worker("test", seen.append, patience=20.0)
    thread.put(1)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        thread.stop()
        with pytest.raises(RuntimeError, match=r"forked from process \d+, to which lt_zero-test belongs"):
            thread.put(2)
    thread.put(3)
    thread.stop()
    assert seen == [1, 3]


def test_a_pool_of_threads_rests() -> None:
    before, moved = _all(), list[int]()
    files = IoPool(threads=2)
    for _ in range(2):
        files.submit(3, moved.append, lambda error: None, None).wait()
        files.rest()
        files.rest()
        assert not (left := _ours(before)), left
    assert sorted(moved) == [0, 0, 1, 1, 2, 2]
    files.close()
    with pytest.raises(SwapError, match="closed"):
        files.submit(1, moved.append, lambda error: None, None)


def test_a_block_that_raises_anything_ends_its_transfer() -> None:
    files = IoPool(threads=1)

    def leaves(block: int) -> None:
        raise SystemExit

    with pytest.raises(SwapError, match="SystemExit"):
        files.submit(1, leaves, lambda error: None, None).wait()
    files.close()


def test_a_device_has_its_number_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread has a current device of its own."""
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(accelerator, "default_kind", lambda: torch.device("cuda"))
    monkeypatch.setattr(accelerator, "default_device", lambda: torch.device("cuda", 3))
    assert World.join(torch.device("cuda")).device == torch.device("cuda", 3)
    assert World.join(torch.device("cpu")).device == torch.device("cpu")
    assert with_index(torch.device("cuda", 1)) == torch.device("cuda", 1)
    seen, single = list[Any](), ShardGroup.of_all(World.join(torch.device("cpu")))

    def note(features: Any, buckets: Any, world: Any, options: Any, device: torch.device) -> Any:
        seen.append(device)
        raise ZeroDivisionError  # there is no such device here

    monkeypatch.setattr("lt_zero.core.ask.place", note)
    with pytest.raises(ZeroDivisionError):
        lt_zero.shard(Net(), config_of(0), torch.device("cuda"), group=single)
    assert seen == [torch.device("cuda", 3)]
    with pytest.raises(ValueError, match=r"device=cuda:1 is not the current device, cuda:3, .*set_device_index\(1\)"):
        lt_zero.shard(Net(), config_of(0), torch.device("cuda", 1), group=single)


def _timeouts() -> list[float]:
    seen = []
    make = dist.new_group

    def note(ranks: Any = None, timeout: Any = None, *args: Any, **kwargs: Any) -> Any:
        seen.append(timeout.total_seconds())
        return make(ranks, timeout, *args, **kwargs)

    with mock.patch.object(dist, "new_group", note):
        group = ShardGroup.of_all(World.join(torch.device("cpu"), timeout=timedelta(seconds=77)))
        group.allow_background()
        group.world.saving_group(background=True)
    return seen


def test_all_groups_have_the_timeout_of_the_user(pool: Pool) -> None:
    assert pool.run(2, _timeouts) == [[77.0] * 4] * 2


def _unreachable() -> None:
    with (
        mock.patch.object(dist, "new_group", side_effect=RuntimeError("connectFullMesh failed")),
        pytest.raises(RuntimeError, match=r"gloo process group: connectFullMesh failed\n.*GLOO_SOCKET_IFNAME"),
    ):
        World.join(torch.device("cpu"))


def test_ranks_that_cannot_connect_are_told_how(pool: Pool) -> None:
    pool.run(2, _unreachable)


def _groups_there_are() -> list[int]:
    """After each of some worlds that are dropped, the second one by rank 1 later than by rank 0."""
    made = list[Any]()
    kept = list[ShardGroup]()
    found = list[int]()
    make = dist.new_group

    def note(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    with mock.patch.object(dist, "new_group", note):
        for number in range(5):
            group = ShardGroup.of_all(World.join(torch.device("cpu")))
            group.allow_background()
            if number == 1 and dist.get_rank() == 1:
                kept.append(group)
            if number == 3:
                kept.clear()
            del group
            gc.collect()
            found.append(sum(map(_is_there, made)))
    return found


def _is_there(group: Any) -> bool:
    try:
        dist.get_rank(group)
    except ValueError:
        return False
    return True


def test_process_groups_of_worlds_that_are_gone_are_destroyed(pool: Pool) -> None:
    assert pool.run(2, _groups_there_are) == [[3, 3, 6, 6, 3]] * 2


def _order_of_ends() -> list[str]:
    """The groups in the order in which they are destroyed; ranks drop their worlds in opposite orders."""
    groups = [ShardGroup.of_all(World.join(torch.device("cpu"))) for _ in range(3)]
    while groups:
        groups.pop(dist.get_rank() - 1)
        gc.collect()
    ended = list[str]()
    destroy = dist.destroy_process_group

    def note(group: Any) -> None:
        ended.append(group.group_name)
        destroy(group)

    with mock.patch.object(dist, "destroy_process_group", note):
        World.join(torch.device("cpu"))
    return ended


def test_all_ranks_destroy_groups_in_the_same_order(pool: Pool) -> None:
    first, second = pool.run(2, _order_of_ends)
    assert first == second
    assert len(first) == 6


def _kept_groups(algorithm: str) -> int:
    config: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    if algorithm != "none":
        config["gradient_compression"] = {"algorithm": algorithm}
    gc.collect()  # else what an earlier test left could become garbage between the agreement and the count
    with mock.patch.dict(os.environ, {"LT_ZERO_SHARED_MEMORY": "0"}):
        engine = lt_zero.shard(torch.nn.Linear(4, 4), config)
    unused = len(world_module._unused)
    del engine
    return unused


def test_groups_end_with_their_default_group(pool: Pool) -> None:
    """The default group of each task is another one; ranks have not taken part in the same ones."""
    for world, algorithm in [(3, "none"), (2, "2bit"), (3, "2bit")] if there("compression") else [(3, "none")]:
        assert pool.run(world, _kept_groups, algorithm) == [0] * world
