"""Waits in collectives of Lightning and the user: proven to be endless, they end with an error on every rank.

A rank that is only late is waited for, whatever it does.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed import _functional_collectives as functional

import lt_zero
from lt_zero import FabricZeroStrategy
from lt_zero.core.comm.work import CALL, CollectiveId, in_layer
from lt_zero.core.comm.world import World
from lt_zero.core.health import foreign_waits
from lt_zero.core.health.awaited_works import work_awaited
from lt_zero.core.health.foreign_waits import FOREIGN, Blocked, another_may_launch, progress, question_of, standstill
from lt_zero.core.health.verdict import RankState, at_standstill, close_circles
from tests.support.lightning_tools import GPT, quick, sharded_trainer, torchrun_env
from tests.support.matrix import only
from tests.support.pool import Pool

LATE_S = 0.7  # more than twice as long as a stuck rank may stay
ALIKE = "Every rank has to make the same calls in the same order"
ON_EVERY_RANK = "call it on every rank"


# ---- what is concluded from answers ----------------------------------------------------------------------------------


def _wait(channel: str, number: int, name: str = "barrier") -> CollectiveId:
    return CollectiveId(channel, number, FOREIGN, name)


def _told(
    wait: CollectiveId, members: list[int], ran: dict[CollectiveId, tuple[int, CollectiveId | None]] | None = None
) -> Blocked:
    answers = {question_of(asked): launched for asked, launched in (ran or {}).items()}
    return Blocked(wait, members, f"waits in {wait.name} of {wait.channel}", f"{wait.channel}.py:1", answers)


A = _wait("a", 3)
B = _wait("b", 5)
C = _wait("c", 7)


def test_two_ranks_that_wait_for_each_other() -> None:
    states = {0: _told(A, [0, 1], {B: (4, None)}), 1: _told(B, [0, 1], {A: (2, None)})}
    assert standstill(states) == [0, 1]
    verdict = at_standstill(states, [1, 0], lambda *_: "")
    assert verdict == at_standstill(states, [0, 1], lambda *_: "")
    assert verdict.startswith("Rank 0 waits in barrier of a for rank 1, which waits in barrier of b: none of these")
    assert ALIKE in verdict


def test_a_call_of_this_package_is_named_first() -> None:
    call = CollectiveId("collective", 4, CALL, "export")
    states = {0: _told(A, [0, 1], {call: (3, None)}), 1: _told(call, [0, 1], {A: (2, None)})}
    verdict = at_standstill(states, [0, 1], lambda *_: "")
    assert "`export` was called on rank 1 (collective.py:1) and not on rank 0, which waits in barrier of a." in verdict
    assert ON_EVERY_RANK in verdict


def test_three_ranks_in_groups_of_two() -> None:
    """Each group has a rank that waits in another one; no two ranks wait for each other."""
    states = {
        0: _told(A, [0, 1], {C: (6, None)}),
        1: _told(B, [1, 2], {A: (2, None)}),
        2: _told(C, [0, 2], {B: (4, None)}),
    }
    assert standstill(states) == [0, 1, 2]
    del states[2]  # it computes
    assert standstill(states) == []


def test_another_operation_under_the_same_number() -> None:
    theirs = _wait("a", 3, "broadcast")
    states = {0: _told(A, [0, 1], {A: (3, A)}), 1: _told(theirs, [0, 1], {A: (3, theirs)})}
    states[0].ran[question_of(theirs)] = (3, A)
    assert standstill(states) == [0, 1]


@pytest.mark.parametrize(
    "ran",
    [{}, {A: (3, A)}, {A: (9, A)}, {A: (9, None)}],
    ids=["unknown", "launched", "launched before", "launched and forgotten"],
)
def test_what_may_still_end(ran: dict[CollectiveId, Any]) -> None:
    """Rank 1 waits for rank 0, which may get what it waits for."""
    assert standstill({0: _told(A, [0, 1], {B: (4, None)}), 1: _told(B, [0, 1], ran)}) == []


def test_ranks_that_wait_in_the_same_collective_for_a_late_one() -> None:
    launched = {A: (3, A)}
    assert standstill({0: _told(A, [0, 1, 2], launched), 2: _told(A, [0, 1, 2], launched)}) == []


def test_a_wait_in_a_layer_that_may_be_over_closes_no_circle() -> None:
    """Rank 1 was late for the layer of rank 2. If it has come to the call only now, that wait may have ended."""
    call = CollectiveId("collective", 4, CALL, "export")

    def lost(lasts: bool) -> list[int]:
        states = {
            0: RankState.waiting(call, "", lasts=True),
            1: RankState.waiting(call, "", lasts),
            2: RankState(None, "", "waits in a layer", needs=(1, 2), lasts=True),
        }
        close_circles(states, call)
        return [rank for rank, state in states.items() if state.never]

    assert lost(lasts=True) == [2]
    assert lost(lasts=False) == []


# ---- ranks that wait in torch.distributed ----------------------------------------------------------------------------


def _errors(*calls: Callable[[World], Any]) -> str:
    """The error, with its cause, of a rank's call; ``calls``: of each rank."""
    with quick():
        world = World.join(torch.device("cpu"))
    with pytest.raises(RuntimeError) as caught:
        calls[dist.get_rank()](world)
    world.explain(caught.value)
    return str(caught.value)


def _barrier(world: World) -> None:
    dist.barrier()  # the line of the barrier


def _sum(world: World) -> None:
    dist.all_reduce(torch.ones(2))


def _sends_alone(world: World) -> None:
    dist.broadcast_object_list([1], 0)  # its sender does not wait
    dist.barrier()


def _receives(world: World) -> None:
    dist.all_gather_object([None, None], 1)


def _sets_up(world: World) -> None:
    World.join(torch.device("cpu"))


def _awaits_a_work(world: World) -> None:
    launched = dist.all_reduce(torch.ones(2), async_op=True)
    dist.broadcast(torch.ones(1), 1, async_op=True)  # has not ended either
    assert launched is not None
    launched.wait()


def _calls(world: World) -> None:
    world.roll_call("export")


def _in_a_layer(world: World) -> None:
    assert world.detector is not None
    world.detector.expect_in_layers([0, 1])  # as of tensor ranks
    functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD))


CALLS = {
    "layer": (_barrier, _in_a_layer),
    "operations": (_barrier, _sum),
    "numbers": (_sends_alone, _barrier),
    "objects": (_barrier, _receives),
    "set-up": (_barrier, _sets_up),
    "work": (_barrier, _awaits_a_work),
}


def _in_foreign_collectives(case: str) -> str:
    return _errors(*CALLS[case])


@pytest.mark.parametrize("case", only(["numbers", "work", "layer"], CALLS))
def test_two_foreign_collectives(pool: Pool, case: str) -> None:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(i for i, line in enumerate(lines, 1) if "the line of the barrier" in line)
    messages = pool.run(2, _in_foreign_collectives, case)
    for message in messages:
        assert "Rank 0 waits in b" in message
        assert f" waits in barrier of torch.distributed (tests/core/health/test_foreign_waits.py:{number})" in message
        assert "for rank 1, which waits in " in message
        assert ALIKE in message


def _makes_a_group(beside: str) -> str | None:
    """Rank 0 makes a group that rank 1 makes only after it has got an error."""
    with quick():
        world = World.join(torch.device("cpu"))
    assert world.detector is not None
    if dist.get_rank() == 0:
        dist.barrier(dist.new_group())  # ends when rank 1 makes it, too
        world.detector._reporter.read_verdict()
        return world.watch.verdict
    with pytest.raises(RuntimeError) as caught:
        _barrier(world) if beside == "barrier" else _calls(world)
    world.explain(caught.value)
    dist.barrier(dist.new_group())
    return str(caught.value)


@pytest.mark.parametrize("beside", only(["export"], ["barrier", "export"]))
def test_a_group_that_one_rank_makes(pool: Pool, beside: str) -> None:
    first, second = pool.run(2, _makes_a_group, beside)
    assert "waits in new_group of torch.distributed (tests/core/health/test_foreign_waits.py:" in first
    assert first in second
    assert (ALIKE if beside == "barrier" else ON_EVERY_RANK) in first


class _Work(dist.Work):
    """Notes whether its caller is found to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dist.Work | None = None

    def wait(self, timeout: Any = None) -> bool:
        self.found = work_awaited(sys._getframe(1))
        return True


def test_whose_work_a_frame_waits_for() -> None:
    work = _Work()
    other = _Work()
    holder = SimpleNamespace(inner=SimpleNamespace(work=work))

    def seen() -> bool:
        found, work.found = work.found, None
        return found is work

    assert other is not work
    work.wait()
    assert seen()
    holder.inner.work.wait()
    assert seen()
    assert [each.wait() for each in [work]]
    assert seen()

    def inside() -> None:
        work.wait()

    inside()
    assert seen()

    def keeps(values: bool) -> bool:
        value = torch.zeros(1)
        seen_here = weakref.ref(value)
        kept = locals() if values else {}
        own = work
        own.wait()
        assert seen()
        assert not values or kept["value"] is value
        del value, kept
        return seen_here() is not None

    assert not keeps(False)
    keeps(True)
    for each in [work]: each.wait()  # fmt: skip  # noqa: E701  # in one line, of which Python 3.13 makes one instruction
    assert seen()
    # These end by themselves, or cannot be told: nothing is executed to find out.
    (work or other).wait()
    assert work.found is None
    (holder.inner if work else SimpleNamespace(work=other)).work.wait()
    assert work.found is None
    work.wait(1.0)
    assert not seen()
    [work].pop().wait()
    assert not seen()


def _groups_of_two() -> str:
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    return _errors(*[lambda world, group=group: dist.barrier(group) for group in groups])


@pytest.mark.slow
def test_a_circle_over_groups(pool: Pool) -> None:
    for message in pool.run(3, _groups_of_two):
        assert "Rank 0 waits in barrier of torch.distributed (" in message
        assert "for rank 1, which waits in barrier" in message
        assert "for rank 2, which waits in barrier" in message


def _late() -> None:
    """Every kind of wait for a rank that does something else for long, in the default group and in a part of it."""
    part = dist.new_group([0, 1])
    with quick():
        world = World.join(torch.device("cpu"))
    rank, number = dist.get_rank(), torch.ones(1)
    if rank == 0:
        time.sleep(LATE_S)
    dist.barrier()
    if rank == 0:
        time.sleep(LATE_S)
        dist.send(number, 1)
    elif rank == 1:
        dist.recv(number, 0)
    # Ranks 1 and 2 wait in different groups, and rank 0 comes to both.
    if rank == 0:
        time.sleep(LATE_S)
    if rank < 2:
        dist.barrier(part)
    launched = dist.all_reduce(number, async_op=True)
    if rank == 0:
        time.sleep(LATE_S)
    assert launched is not None
    launched.wait()
    # All wait for the same late rank, each in another way.
    if rank == 0:
        time.sleep(LATE_S)
    launched = dist.all_reduce(number, async_op=True)
    assert launched is not None
    if rank == 1:
        launched.wait()
    dist.new_group([0, 2])
    launched.wait()
    world.roll_call("export")
    assert world.watch.verdict is None
    assert world.host_gather(rank, "a test") == [0, 1, 2]


@pytest.mark.slow
def test_late_ranks_are_waited_for(pool: Pool) -> None:
    pool.run(3, _late)


class _Slow:
    """An object that takes long to read, in code without a frame of its own."""

    def __reduce__(self) -> Any:
        return time.sleep, (LATE_S,)


def _late_in_other_code() -> None:
    """Rank 1 reads an object that it has received, and a thread of rank 0 comes late to what rank 1 waits for."""
    part = dist.new_group([0, 1])
    with quick():
        world = World.join(torch.device("cpu"))
    rank = dist.get_rank()
    dist.broadcast_object_list([_Slow() if rank == 0 else None], 0)
    world.roll_call("export")

    def write() -> None:
        time.sleep(LATE_S)
        dist.barrier(part)

    if rank == 0:
        writer = threading.Thread(target=write)
        writer.start()
        dist.barrier()
        writer.join()
    else:
        dist.barrier(part)
        dist.barrier()
    assert world.watch.verdict is None


def _waits_of_two_runs() -> None:
    """Rank 0 waits in one run and rank 1 in another, for rank 2. Both have launched what rank 0 waits for."""
    with quick():
        first = World.join(torch.device("cpu"))
        second = World.join(torch.device("cpu"))
    rank = dist.get_rank()
    if rank == 2:
        time.sleep(LATE_S)
    launch = first.order.launch_reduction("reduction", "a bucket", 1)
    reduced = dist.all_reduce(torch.ones(1), group=first.process_group, async_op=True)
    if rank == 0:
        first.watch.wait(reduced, launch)
    second.roll_call("export")
    if rank > 0:
        first.watch.wait(reduced, launch)
    _waits_in_a_layer(first)
    assert first.watch.verdict is None
    assert second.watch.verdict is None


def _waits_in_a_layer(world: World) -> None:
    """As ``_waits_of_two_runs``, in a functional collective: it is not known who has launched that."""
    rank = dist.get_rank()
    world.expect_in_layers([0, 1, 2])
    if rank == 2:
        time.sleep(LATE_S)
    reduced = functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
    if rank == 0:
        functional.wait_tensor(reduced)
    world.roll_call("export")
    assert int(functional.wait_tensor(reduced)) == 3


def _waits_in_a_part_of_the_layers() -> None:
    """Rank 0 waits in a layer for rank 1, which is late, and rank 2 for both: of another stage of a pipeline, say."""
    part = dist.new_group([0, 1])
    with quick():
        world = World.join(torch.device("cpu"))
    world.expect_in_layers([0, 1, 2])
    rank = dist.get_rank()
    if rank == 1:
        time.sleep(LATE_S)
    if rank < 2:
        functional.wait_tensor(functional.all_reduce(torch.ones(1), "sum", part))
    world.roll_call("export")
    assert world.watch.verdict is None
    # The recorder is read only if nothing was launched between two looks: a run that goes on is not held up.
    dist.barrier()
    with mock.patch.object(foreign_waits, "recorded_launches", return_value=[]) as read:
        foreign_waits._group_of_pending()
        assert not read.called
        foreign_waits._group_of_pending()
        assert read.called


def test_a_late_rank_of_one_group_of_layers_is_waited_for(pool: Pool) -> None:
    pool.run(3, _waits_in_a_part_of_the_layers)


def test_a_late_rank_of_two_runs_is_waited_for(pool: Pool) -> None:
    pool.run(3, _waits_of_two_runs)


def _in_different_runs() -> str:
    """Each rank calls an operation of another run."""
    with quick():
        worlds = [World.join(torch.device("cpu")) for _ in range(2)]
    rank = dist.get_rank()
    with pytest.raises(RuntimeError) as caught:
        worlds[rank].roll_call(["export", "save_checkpoint"][rank])
    return str(caught.value)


def test_two_runs_that_wait_for_each_other(pool: Pool) -> None:
    first, second = pool.run(2, _in_different_runs)
    assert "`export` was called on rank 0 (" in first
    assert "and not on rank 1, which waits in `save_checkpoint` of another engine (" in first
    assert "`save_checkpoint` was called on rank 1 (" in second
    assert "and not on rank 0, which waits in `export` of another engine (" in second


def test_an_operator_that_another_thread_is_about_to_make_is_no_wait() -> None:
    """It has no attributes yet: reading one has ended the thread that answers other ranks, and they waited for ever."""

    class Unmade(torch._ops.OpOverloadPacket):
        def __str__(self) -> str:
            raise AttributeError("_qualified_op_name")

    operator = object.__new__(Unmade)
    scope: dict[str, Any] = {"sys": sys}
    exec(compile("def call(self):\n    return sys._getframe()", torch._ops.__file__, "exec"), scope)
    assert not in_layer(scope["call"](operator))
    assert in_layer(scope["call"](torch.ops._c10d_functional.wait_tensor))


def test_a_group_that_counts_no_launches_ends_no_thread() -> None:
    counts_none = mock.Mock(**{"_get_sequence_number_for_group.side_effect": RuntimeError("of another backend")})
    groups = mock.patch.object(foreign_waits, "process_groups", return_value=[counts_none])
    with groups, mock.patch.object(foreign_waits, "in_layer", return_value=True):
        assert foreign_waits.call_of(sys._getframe()) is None
    assert counts_none._get_sequence_number_for_group.called


def _earlier_group() -> str:
    """Another group of the name that ``_late_in_other_code`` gives its own, and a collective in it."""
    part = dist.new_group([0, 1])
    dist.all_reduce(torch.zeros(1), group=part)
    return str(part.group_name)


def test_late_ranks_in_other_code_are_waited_for(pool: Pool) -> None:
    """Also after a group of the same name, whose collectives torch's recorder still has."""
    pool.run(2, _earlier_group)
    pool.run(2, _late_in_other_code)


def test_threads_that_may_launch() -> None:
    """Those that run code of a script; a pool that has nothing to do launches nothing."""
    main = threading.get_ident()
    begun = threading.Event()
    end = threading.Event()

    def work() -> None:
        begun.set()
        end.wait()

    with ThreadPoolExecutor(1) as executor:
        ident = executor.submit(threading.get_ident).result()
        executor.submit(work)
        begun.wait()
        frames = {main: sys._getframe(), ident: sys._current_frames()[ident]}
        with mock.patch.object(sys, "_current_frames", return_value=frames):
            assert another_may_launch(main)
            idle = frames[ident]
            while idle.f_back is not None and not idle.f_code.co_filename.endswith("thread.py"):
                idle = idle.f_back
            frames[ident] = idle
            assert not another_may_launch(main)
        end.set()


def _looks() -> None:
    """A thread looks at the frame of a function that has a tensor, and no garbage is collected."""
    with quick():
        world = World.join(torch.device("cpu"))
    assert world.detector is not None
    reporter = world.detector._reporter
    kept = list[weakref.ref[torch.Tensor]]()

    def look() -> None:
        assert reporter._frame() is not None

    def compute() -> None:
        value = torch.zeros(3)
        kept.append(weakref.ref(value))
        looking = threading.Thread(target=look)
        looking.start()
        looking.join()

    world.detector.stop()
    gc.collect()
    gc.disable()
    try:
        compute()
        assert kept[0]() is None
    finally:
        gc.enable()


def test_the_thread_that_looks_keeps_no_tensors(pool: Pool) -> None:
    pool.run(2, _looks)


def _unread_verdict() -> str:
    """Rank 0's connections are closed by a verdict before the thread of rank 1 has read it."""
    with quick():
        world = World.join(torch.device("cpu"))
    assert world.detector is not None
    group = world.process_group
    if dist.get_rank() == 1:
        world.detector.stop()
    dist.barrier()
    if dist.get_rank() == 0:
        world.detector.stop()
        world.detector._reporter.post_verdict("the verdict")
        world.detector._reporter.close_connections(0)
        return "the verdict"
    with pytest.raises(RuntimeError) as caught:
        dist.barrier(group)
    world.explain(caught.value)
    return str(caught.value)


def test_a_verdict_that_comes_after_its_closed_connections(pool: Pool) -> None:
    assert all("the verdict" in message for message in pool.run(2, _unread_verdict))


def _messages() -> None:
    """The thread writes no messages while no rank waits, whatever is launched."""
    with quick(poll=0.02):
        world = World.join(torch.device("cpu"))
    assert world.detector is not None
    world.roll_call("export")
    store = world.detector._reporter._store
    time.sleep(0.3)
    before, asked = store.check([f"doing/{dist.get_rank()}"]), store.add("asks", 0)
    with mock.patch.object(type(store), "set", side_effect=AssertionError("a message")):
        for _ in range(300):
            dist.all_reduce(torch.ones(2))
    assert (store.check([f"doing/{dist.get_rank()}"]), store.add("asks", 0)) == (before, asked)


def test_collectives_cost_no_messages(pool: Pool) -> None:
    pool.run(2, _messages)


def _numbers() -> None:
    """Sends and receives have no numbers; another group of the same name begins anew."""
    number, channel = torch.ones(1), "group of torch.distributed: gloo 0"
    world = dist.get_world_size()
    before, _ = progress(channel, 0) or (0, None)
    if dist.get_rank() == 0:
        dist.send(number, 1)
    else:
        dist.recv(number, 0)
    dist.all_reduce(number)
    told = progress(channel, before + 1)
    assert told is not None
    last, found = told
    assert last == before + 1 == 2  # the first is the pool's barrier
    assert found is not None
    assert found.name == "allreduce"
    assert world == 2


@pytest.mark.slow
def test_numbers_are_those_of_all_ranks(pool: Pool) -> None:
    for _ in range(2):
        pool.run(2, _numbers)


# ---- calls on one rank only, on all interfaces -----------------------------------------------------------------------


def _alone(case: str, stage: int, path: str) -> str:
    """The error of a rank of which another calls something alone."""
    first = dist.get_rank() == 0
    run = _fabric if case.startswith("fabric") else _loop if case.startswith("loop") else _trainer
    with quick(), pytest.raises(RuntimeError) as caught:
        run(case, stage, path, first)
    return str(caught.value)


def _trainer(case: str, stage: int, path: str, first: bool) -> None:
    size = dist.get_world_size()
    interval = {"callback": 2 if first else None, "interval": 2 if first else 3}.get(case)
    saves = [ModelCheckpoint(path, every_n_train_steps=interval)] if interval else []
    trainer = sharded_trainer(stage, max_steps=6, callbacks=saves, enable_checkpointing=bool(saves))
    if case == "hook" and not first:
        with mock.patch.object(GPT, "on_save_checkpoint", side_effect=ValueError("broken on purpose"), create=True):
            _fit_and_save(trainer, path)
        return
    trainer.fit(GPT(size, rows=96))
    strategy: Any = trainer.strategy
    if case == "hook":
        with contextlib.suppress(ValueError):
            trainer.save_checkpoint(path)
    elif case.startswith("save") and first:
        trainer.save_checkpoint(path)
    elif case == "export" and first:
        strategy.export(path)
    try:
        dist.barrier() if case == "save, then dist.barrier" else strategy.barrier()
    except RuntimeError as error:
        strategy.world.explain(error)  # as where an error ends the process
        raise


def _fit_and_save(trainer: L.Trainer, path: str) -> None:
    trainer.fit(GPT(dist.get_world_size(), rows=96))
    with contextlib.suppress(ValueError):
        trainer.save_checkpoint(path)
    trainer.strategy.barrier()


def _fabric(case: str, stage: int, path: str, first: bool) -> None:
    with mock.patch.dict("os.environ", torchrun_env()):
        strategy = FabricZeroStrategy(stage=stage)
        fabric = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
        fabric.launch()
        net = nn.Linear(3, 5)
        module, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        fabric.backward(module(torch.ones(2, 3)).sum())
        optimizer.step()
        if first:
            {
                "fabric.save": lambda: fabric.save(path, {"module": module, "optimizer": optimizer}),
                "fabric.load": lambda: fabric.load(path, {"module": module}),
                "fabric export": lambda: strategy.export(module, path),
                "fabric broadcast": lambda: fabric.broadcast(1) and fabric.barrier(),
            }[case]()
        fabric.barrier()


def _loop(case: str, stage: int, path: str, first: bool) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
    engine, *_ = lt_zero.initialize(model=nn.Linear(3, 5), config=config)
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    if first:
        engine.save_checkpoint(path) if case == "loop save" else engine.load_checkpoint(path)
    try:
        dist.barrier()
    except RuntimeError as error:
        engine.world.explain(error)
        raise


NAMES = {
    "save": "`Trainer.save_checkpoint` was called on rank 0 (",
    "save, then dist.barrier": "`Trainer.save_checkpoint` was called on rank 0 (",
    "export": "`export` was called on rank 0 (",
    "hook": "`Strategy.save_checkpoint` was called on rank 0 (",
    "callback": "Rank 0 waits in broadcast_object_list of torch.distributed, called by ",
    "interval": "Rank 0 waits in ",
    "fabric.save": "`Fabric.save` was called on rank 0 (",
    "fabric.load": "`Fabric.load` was called on rank 0 (",
    "fabric export": "`export` was called on rank 0 (",
    "fabric broadcast": "Rank 0 waits in b",
    "loop save": "`engine.save_checkpoint` was called on rank 0 (",
    "loop load": "`engine.load_checkpoint` was called on rank 0 (",
}


@pytest.mark.parametrize("stage", only([1], [1, 3]))
@pytest.mark.parametrize("case", only(["save", "callback", "fabric.save"], NAMES))
def test_what_one_rank_calls_alone(pool: Pool, tmp_path: Path, case: str, stage: int) -> None:
    for message in pool.run(2, _alone, case, stage, str(tmp_path / "a")):
        assert NAMES[case] in message
        assert "rank 1, which waits in " in message
        assert (ALIKE if NAMES[case].startswith("Rank 0") else ON_EVERY_RANK) in message
