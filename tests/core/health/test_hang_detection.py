"""An operation of all ranks that some never enter ends with an error on every rank, and lateness is no error."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing as mp
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, IterableDataset

import lt_zero
from lt_zero.common.errors import add_note
from lt_zero.core.comm.work import CollectiveId
from lt_zero.core.comm.world import World
from lt_zero.core.engine.engine import Engine
from lt_zero.core.health import hang_detection
from lt_zero.core.health.ended_ranks import remember_cause
from lt_zero.core.health.verdict import diverged
from tests.support.lightning_tools import GPT, Rows, error_of_fit, quick, sharded_trainer
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.parity import config_of
from tests.support.pool import Pool

SOCKETS = {"LT_ZERO_SHARED_MEMORY": "0"}


def sharded(stage: int = 3) -> Engine:
    with quick():
        return lt_zero.shard(Net(), config_of(stage, {"stage3_max_reuse_distance": 0}))


def world_here() -> World:
    with quick():
        return World.join(torch.device("cpu"))


class SavesAlone(Callback):
    """The usual bug."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step == 1 and trainer.is_global_zero:
            trainer.save_checkpoint(self.path)  # the line that is named


def _saves_alone(stage: int, path: str) -> str:
    return error_of_fit(stage, SavesAlone(path))


@pytest.mark.parametrize(
    ("world", "stage", "env"),
    [*only_rows([(3, 3, {})], [(2, 3, {}), (2, 3, SOCKETS), (3, 3, {}), (2, 1, {})])],
    ids=["fence", "sockets", "3", "1"],
)
def test_rank_0_saves_alone_in_training(
    pool: Pool, tmp_path: Path, world: int, stage: int, env: dict[str, str]
) -> None:
    messages = pool.run(world, _saves_alone, stage, str(tmp_path / "a.ckpt"), env=env)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(i for i, line in enumerate(lines, 1) if "the line that is named" in line)
    for message in messages:
        assert "`Trainer.save_checkpoint` was called on rank 0" in message
        assert f"test_hang_detection.py:{number}) and not on rank" in message
        assert "which waits in" in message
        assert "call it on every rank" in message
    assert not list(tmp_path.iterdir())


def _plain() -> tuple[str, str]:
    engine = sharded()

    def train() -> None:
        if dist.get_rank() == 0:
            engine.world.roll_call("export")
        for step in range(2):
            next_token_loss(engine.root, step, 0, 0).backward()

    with pytest.raises(RuntimeError) as caught:
        train()
    with pytest.raises(RuntimeError) as again:
        engine.world.roll_call("export")
    return str(caught.value), str(again.value)


@pytest.mark.parametrize("world", only([3], [2, 3]))
def test_the_plain_api(pool: Pool, world: int) -> None:
    messages = pool.run(world, _plain, env=SOCKETS)
    assert len({text for pair in messages for text in pair}) == 1
    assert "`export` was called on rank 0 (" in messages[0][0]
    assert "which waits in the all-gather of " in messages[0][0]
    assert ("nor on rank 2" in messages[0][0]) == (world == 3)


def _only_rank_2_is_missing() -> str:
    engine = sharded()
    with pytest.raises(RuntimeError) as caught:
        engine.world.roll_call("export") if dist.get_rank() < 2 else next_token_loss(engine.root, 0, 0, 0)
    return str(caught.value)


def test_one_of_three_is_missing(pool: Pool) -> None:
    messages = pool.run(3, _only_rank_2_is_missing)
    assert len(set(messages)) == 1
    assert "`export` was called on ranks 0, 1 (" in messages[0]
    assert "and not on rank 2, which waits in" in messages[0]


def _late(rank: int) -> None:
    world = world_here()
    if dist.get_rank() == rank:
        time.sleep(1.0)  # three times as long as a stuck rank may stay
    world.roll_call("export")
    world.roll_call("export")
    assert world.host_gather(dist.get_rank(), "a test") == list(range(dist.get_world_size()))


@pytest.mark.parametrize("rank", only([1], [0, 1]))
def test_a_late_rank_is_waited_for(pool: Pool, rank: int) -> None:
    pool.run(2, _late, rank)


class Uneven(GPT):
    """Rank 0 has more batches than the others."""

    def train_dataloader(self) -> Any:
        return DataLoader(Batches(3 if dist.get_rank() == 0 else 2), batch_size=None)

    predict_dataloader = train_dataloader


class Batches(IterableDataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(Rows(4 * self.count).rows.split(4))


def _uneven(stage: int, validates: bool) -> str:
    validation = {"num_sanity_val_steps": 0, "limit_val_batches": 1.0 if validates else 0}
    with quick():
        trainer = sharded_trainer(stage, max_epochs=2, **validation)
        with pytest.raises(RuntimeError) as caught:
            trainer.fit(Uneven(dist.get_world_size()))
    return str(caught.value)


@pytest.mark.parametrize(
    ("world", "stage", "validates"),
    only_rows([(2, 2, True)], [(w, s, v) for w in (2, 3) for s in range(4) for v in (True, False)]),
)
def test_ranks_with_different_numbers_of_batches(pool: Pool, world: int, stage: int, validates: bool) -> None:
    """Validation and Lightning's own collectives wait where no rank can be seen to wait for another."""
    reached = "The start of validation" if validates else "The start of epoch 1"
    others = "rank 1" if world == 2 else "ranks 1, 2"
    for message in pool.run(world, _uneven, stage, validates):
        assert f"{reached} was reached on {others} (" in message
        assert "and not on rank 0, which waits in" in message
        assert "same number of batches" in message


def _uneven_predictions() -> str:
    with quick():
        trainer = sharded_trainer(3)
        if dist.get_rank() == 1:
            trainer.predict(Uneven(2), return_predictions=False)
            reporter = trainer.strategy.world.detector._reporter  # type: ignore[attr-defined]
            until = time.monotonic() + 60
            while not reporter.read_verdict() and time.monotonic() < until:
                time.sleep(0.05)
            return ""
        with pytest.raises(RuntimeError) as caught:
            trainer.predict(Uneven(2), return_predictions=False)
    return str(caught.value)


def test_a_rank_whose_run_is_over_is_not_waited_for(pool: Pool) -> None:
    message, _ = pool.run(2, _uneven_predictions, env=SOCKETS)
    assert "not on rank 1, which has come to its end without an error" in message
    assert "same number of batches" in message


class Slow:
    """A collective that all have launched and that takes a second."""

    def __init__(self) -> None:
        self._end = time.monotonic() + 1.0

    def is_completed(self) -> bool:
        return time.monotonic() >= self._end

    def wait(self, limit: timedelta = timedelta(seconds=1.0)) -> None:
        time.sleep(min(limit.total_seconds(), max(0.0, self._end - time.monotonic())))


def _launched_before() -> None:
    """Rank 0 launched what rank 1 waits for, whatever time it takes."""
    world = world_here()
    launch = world.order.launch("all-gather", "slow", 4)
    if dist.get_rank() == 1:
        world.watch.wait(Slow(), launch)
    world.roll_call("export")
    assert world.host_gather(dist.get_rank(), "a test") == [0, 1]


def test_a_slow_collective_is_waited_for(pool: Pool) -> None:
    pool.run(2, _launched_before, env=SOCKETS)


def _others_among_themselves() -> None:
    world, others = world_here(), dist.new_group([1, 2])
    if dist.get_rank() == 2:
        time.sleep(1.0)
    if dist.get_rank() > 0:
        dist.barrier(others)
    world.roll_call("export")
    assert world.host_gather(dist.get_rank(), "a test") == [0, 1, 2]


def test_a_collective_without_this_rank_is_waited_for(pool: Pool) -> None:
    pool.run(3, _others_among_themselves)


def _in_torchs_barrier() -> tuple[str, str, list[str], str]:
    """The error of each rank, the last line that is printed of it, what is logged, and the error of its next run."""
    world, logged = world_here(), []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    hang_detection.log.addHandler(handler)
    try:
        with pytest.raises(RuntimeError) as caught:
            world.roll_call("export") if dist.get_rank() == 0 else dist.barrier()
    finally:
        hang_detection.log.removeHandler(handler)
    add_note(caught.value, "In layer 7.")
    remember_cause("")  # as an operation does that begins before the error is explained
    world.explain(caught.value)
    last = traceback.format_exception_only(caught.value)[-1]
    with pytest.raises(RuntimeError) as again:  # the connections of torch's barrier had to be closed
        world_here()
    return str(caught.value), last, logged, str(again.value)


def test_a_collective_of_somebody_else(pool: Pool) -> None:
    (first, _, quiet, again), (second, last, logged, after) = pool.run(2, _in_torchs_barrier)
    verdict, _, note = first.partition(" (In layer 7.")
    assert "and not on rank 1, which waits in barrier of torch.distributed (" in verdict
    assert note == ")"
    assert second.startswith(verdict)
    assert verdict in last
    assert (quiet, logged) == ([], [verdict])
    for error, other in ((again, 1), (after, 0)):
        assert error.startswith(f"Rank {other} cannot be reached: an error ended the last run in these processes")
        assert verdict in error


def _two_operations() -> str:
    world = world_here()
    with pytest.raises(RuntimeError) as caught:
        world.roll_call("save_checkpoint" if dist.get_rank() == 0 else "export")
    return str(caught.value)


@pytest.mark.parametrize("world", only([2], [2, 3]))
def test_two_operations_at_a_time(pool: Pool, world: int) -> None:
    messages = pool.run(world, _two_operations)
    assert len(set(messages)) == 1
    assert "`save_checkpoint` was called on" in messages[0]
    assert "`export` was called on" in messages[0]
    assert "the same order" in messages[0]


def _out_of_time() -> str:
    with quick(limit=2.0):
        world = World.join(torch.device("cpu"))
    until = time.monotonic() + 60
    while dist.get_rank() == 1 and world.watch.verdict is None and time.monotonic() < until:
        time.sleep(0.05)  # could still come, as far as the other rank knows
    with pytest.raises(RuntimeError) as caught:
        world.roll_call("export")
    return str(caught.value)


def test_patience_ends(pool: Pool) -> None:
    first, second = pool.run(2, _out_of_time)
    assert first == second
    assert "not on rank 1, which is at " in first


def _ends(rank: int, store: str, how: str, answer: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    world = world_here()
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "ends":  # what a process tells at its exit, which those of multiprocessing do not
            assert world.detector is not None
            world.detector.end_process(None)
        return
    if rank == 2 and how != "ends":
        while 0 not in world.detector.ends.ended():  # type: ignore[union-attr]
            time.sleep(0.02)
    try:
        world.roll_call("export")
    except RuntimeError as error:
        answer.send((rank, str(error)))
        world.post_error(error)
    os._exit(0)


@pytest.mark.parametrize("how", only(["killed", "ends"], ["returns", "killed", "ends"]))
def test_a_rank_that_is_gone(how: str, tmp_path: Path) -> None:
    """It is named on all ranks, also on one that finds only later that another has ended because of it."""
    context = mp.get_context("forkserver")  # that of the pool
    ours, theirs = context.Pipe()
    store = str(tmp_path / "store")
    processes = [context.Process(target=_ends, args=(rank, store, how, theirs)) for rank in range(3)]
    for process in processes:
        process.start()
    told = "Rank 1 ended without an error message"
    if how == "ends":
        told = "and not on rank 1, which has come to its end without an error"
    try:
        for _ in range(2):
            assert ours.poll(100), "no answer"
            rank, error = ours.recv()
            assert told in error
            assert "`export`" in error
            assert how == "ends" or f"ank {2 - rank} ended" not in error
    finally:
        for process in processes:
            process.join(30)
            process.kill()


def _leaves(rank: int, store: str, answer: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    with quick(poll=3600.0):
        world = World.join(torch.device("cpu"))
    assert world.detector is not None
    while world.detector._store.add("listening", 0) < 2:
        time.sleep(0.01)
    dist.barrier()
    if rank == 0:
        world.detector.leave()
        answer.send("left")
    os._exit(0)


@pytest.mark.slow
def test_rank_0_does_not_wait_for_threads_of_processes_that_have_ended(tmp_path: Path) -> None:
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe()
    processes = [context.Process(target=_leaves, args=(rank, str(tmp_path / "store"), theirs)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        assert ours.poll(230), "no answer"
        assert ours.recv() == "left"
    finally:
        for process in processes:
            process.kill()
            process.join(30)


def _threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "lt_zero-roll-call"]


def _life() -> None:
    gc.collect()
    earlier = set(_threads())  # what other tests of this process have left

    def count() -> int:
        return len(set(_threads()) - earlier)

    world = world_here()
    other = World.join(torch.device("cpu"))
    assert count() == 2
    assert other.detector is not None
    other.detector.stop()
    other.detector.stop()
    assert count() == 1
    world.roll_call("export")
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                world.roll_call("export")
            except RuntimeError as error:
                code = 0 if "forked" in str(error) else 2
            del world, other
            gc.collect()  # ends the parent's thread no more than the parent's connection
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    world.roll_call("export")
    del world
    gc.collect()
    assert count() == 0


def test_the_thread_lives_as_long_as_its_comm(pool: Pool) -> None:
    pool.run(2, _life)


def _ends_with(what: str) -> None:
    gc.collect()
    earlier = set(_threads())
    world = world_here()
    assert world.detector is not None
    (thread,) = set(_threads()) - earlier
    if what == "group":
        for group in world.process_groups:
            dist.destroy_process_group(group)
    elif dist.get_rank() == 0:  # as at its exit
        world.detector.leave()
    else:
        thread.join(60)
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("what", ["rank 0", "group"])
def test_the_thread_ends_before_the_store_and_with_its_group(pool: Pool, what: str) -> None:
    """A script without a Trainer never says that its run is over, and ranks end apart."""
    pool.run(2, _ends_with, what)


def test_one_process_has_nobody_to_call() -> None:
    before = _threads()
    World.join(torch.device("cpu")).roll_call("export")
    assert _threads() == before


def test_who_never_came_is_not_among_those_who_did() -> None:
    """Its next collective may be the one that it left out, under another number."""
    wanted, other = (CollectiveId("collective", 3, "all-gather", name, 8) for name in ("blocks.0", "blocks.1"))
    late = wanted._replace(number=4)
    verdict = diverged({0: ([wanted], "a.py:1"), 1: ([other, late], "b.py:2"), 2: ([wanted], "c.py:3")}, lambda *_: "")
    assert "'blocks.0' was begun on ranks 0, 2 (a.py:1) and not on rank 1, which waits in" in verdict
    assert "ran the all-gather of 'blocks.1' (8 elements) in its place" in verdict
