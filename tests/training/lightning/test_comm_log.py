"""What ``comms_logger`` records: against calls of torch.distributed that are counted apart, and a clock of the test."""

from __future__ import annotations

import io
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lt_zero import ZeroConfig, ZeroStrategy
from lt_zero.common import accelerator
from lt_zero.common.errors import ConfigError
from lt_zero.core.comm import objects, ranks
from lt_zero.core.comm.options import RecordedCollectives
from lt_zero.core.comm.ranks import Unlogged
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.transport import SendBuffer
from lt_zero.core.comm.windows import SharedMemoryTransport
from lt_zero.core.comm.world import World
from lt_zero.training.lightning.monitor.comm_log import CommLog, bus_factor, comm_table
from tests.support.features import needs
from tests.support.lightning_tools import GPT, sharded_trainer
from tests.support.matrix import only
from tests.support.pool import Pool

SOCKETS = {"LT_ZERO_SHARED_MEMORY": "0"}
SENT = {"broadcast": 0, "all_to_all_single": 1, "all_reduce": 0, "barrier": -1}  # where the tensor stands
OBJECTS = ("all_gather_object", "broadcast_object_list")


class Calls:
    """Calls of torch.distributed with bytes, those of some groups."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, Any]] = []
        self._of_objects = False  # inside of a gather of objects, which is counted as one

    def __enter__(self) -> Calls:
        self._patches = ExitStack()
        for name in (*SENT, "broadcast_object_list"):
            self._patches.enter_context(mock.patch.object(dist, name, self._noting(name, getattr(dist, name))))
        self._patches.enter_context(mock.patch.object(ranks, "gather", self._gather))
        return self

    def _gather(self, mine: bytes, rank: int, size: int, group: Any) -> list[Any]:
        self.seen.append(("all_gather_object", 0, group))
        self._of_objects = True
        try:
            return objects.gather(mine, rank, size, group)
        finally:
            self._of_objects = False

    def __exit__(self, *_: Any) -> None:
        self._patches.close()

    def _noting(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            place = SENT.get(name, -1)
            group = kwargs.get("group", args[2] if name == "broadcast" and len(args) > 2 else None)
            group = args[0] if name == "barrier" and args else group
            if not self._of_objects:
                self.seen.append((name, args[place].nbytes if place >= 0 else 0, group))
            return real(*args, **kwargs)

        return call

    def totals(self, group: ShardGroup) -> dict[str, tuple[int, int]]:
        """Calls and bytes per function, on the process groups of ``group``."""
        groups = (group.process_group, group.reductions)
        calls = Counter[str]()
        nbytes = Counter[str]()
        for name, size, used in self.seen:
            if any(used is known for known in groups):
                calls[name] += 1
                nbytes[name] += size
        return {name: (calls[name], nbytes[name]) for name in (*SENT, *OBJECTS)}


def _counted(stage: int) -> Any:
    with Calls() as calls, redirect_stdout(io.StringIO()) as text:
        trainer = sharded_trainer(stage, config={"comms_logger": {"enabled": True}}, max_epochs=1)
        trainer.fit(GPT(2))
    return calls.totals(trainer.strategy.session.group), _totals(trainer.strategy.comms_summary()), text.getvalue()


def _totals(records: Any) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for r in records:
        calls, nbytes = found.get(r.operation, (0, 0))
        found[r.operation] = calls + r.calls, nbytes + r.calls * r.nbytes
    return found


@pytest.mark.parametrize("stage", only([3], [1, 3]))
def test_calls_and_bytes_are_those_of_torch(pool: Pool, stage: int) -> None:
    for rank, (calls, logged, text) in enumerate(pool.run(2, _counted, stage, env=SOCKETS)):
        gathers, broadcasts = logged["all_gather"], logged["broadcast"]
        # on gloo an all-gather is a broadcast for each rank, a reduce-scatter an all-to-all
        assert calls["broadcast"] == (2 * gathers[0] + broadcasts[0], gathers[1] + broadcasts[1])
        assert calls["all_to_all_single"] == logged["reduce_scatter"]
        assert calls["all_reduce"] == logged["all_reduce"]
        objects = [logged[name][0] for name in OBJECTS]
        assert [calls[name][0] for name in OBJECTS] == objects
        assert calls["barrier"][0] == 0, "without shared memory there is none"
        assert gathers[0] > 0
        assert ("Collectives of rank 0" in text) == (rank == 0)
        rows = re.findall(r"^│ (\w+) +│ +([\d,]+) │ +(\d+) │", text, re.M)
        shown = Counter[str]()
        for name, _, number in rows:
            shown[name] += int(number)
        assert shown == ({name: found[0] for name, found in logged.items()} if rank == 0 else {})


def _shared() -> Any:
    fenced = []
    fence = SharedMemoryTransport.fence
    with mock.patch.object(SharedMemoryTransport, "fence", lambda self: (fenced.append(1), fence(self))[1]):
        trainer = sharded_trainer(3, config={"comms_logger": {"enabled": True}}, max_epochs=1)
        trainer.fit(GPT(2))
    assert isinstance(trainer.strategy.session.group.transport, SharedMemoryTransport)
    return _totals(trainer.strategy.comms_summary()), len(fenced)


def test_shared_memory_is_recorded_as_what_it_stands_for(pool: Pool) -> None:
    sockets = pool.run(2, _counted, 3, env=SOCKETS)[0][1]
    logged, fenced = pool.run(2, _shared)[0]
    for name in ("reduce_scatter", "broadcast"):
        assert logged[name] == sockets[name]
    assert logged["all_gather"][0] > 0
    assert logged["barrier"] == (fenced, 0)


def _compressed() -> Any:
    config = {"comms_logger": {"enabled": True}, "gradient_compression": {"algorithm": "1bit", "exclude": []}}
    with redirect_stdout(io.StringIO()) as text:
        trainer = sharded_trainer(0, config=config, max_epochs=1)
        trainer.fit(GPT(2))
    return trainer.strategy.comms_summary(), text.getvalue()


@needs("compression")
def test_compressed_collectives_show_what_they_save(pool: Pool) -> None:
    records, text = pool.run(2, _compressed)[0]
    reduced = [r for r in records if r.operation == "all_reduce" and r.sent]
    assert reduced
    for record in reduced:  # half of it to the other rank, and half of the means back
        assert record.dense == record.calls * record.nbytes
        assert record.sent < record.dense / 5
        assert 0 < record.coding < record.seconds
    assert not any(r.sent or r.dense or r.coding for r in records if r not in reduced)
    assert all(column in text for column in ("plain MB", "sent MB", "ratio", "coding ms"))


def _delayed(seconds: float) -> Any:
    world = World.join(torch.device("cpu"), new_log=CommLog)
    group, log = ShardGroup.of_all(world), world.log
    assert isinstance(log, CommLog)
    log.configure(RecordedCollectives())
    log.clear()
    dist.barrier()
    late = seconds if dist.get_rank() == 1 else 0.0
    start = time.perf_counter()
    time.sleep(late)
    called = time.perf_counter()
    world.sum_all(torch.ones((), dtype=torch.float64), "late")
    outside = time.perf_counter() - called
    flat, out = torch.ones(1000), torch.zeros(500)
    pending = group.reduce_scatter(out, SendBuffer(flat, 1.0, torch.empty(1000)), False, "hidden")
    time.sleep(seconds)  # computes
    waiting = time.perf_counter()
    pending.wait()
    waited = time.perf_counter() - waiting
    pending.wait()
    return {r.name: r for r in log.records()}, outside, waited, time.perf_counter() - start


def test_times_are_from_the_launch_to_the_end_of_the_wait(pool: Pool) -> None:
    delay = 0.4  # far more than what a busy machine adds
    for rank, (found, outside, waited, all_) in enumerate(pool.run(2, _delayed, delay, env=SOCKETS)):
        late, hidden = found["late"], found["hidden"]
        assert 0 < late.seconds <= outside
        if rank == 0:
            assert late.seconds > outside / 2
            assert late.seconds > delay / 2, "it waits for the late rank"
        assert late.waited == pytest.approx(late.seconds), "the caller waits all the time"
        assert delay <= hidden.seconds <= all_
        assert hidden.waited <= waited
        assert (hidden.calls, hidden.nbytes, late.nbytes) == (1, 4000, 8), "waited for twice, recorded once"
        assert hidden.algbw == pytest.approx(4000 / hidden.seconds)
        assert hidden.busbw == pytest.approx(hidden.algbw / 2)


@pytest.mark.parametrize(
    ("operation", "factor"),
    [("all_reduce", 2 * 7 / 8), ("all_gather", 7 / 8), ("reduce_scatter", 7 / 8), ("broadcast", 1.0)],
)
def test_bandwidths_are_those_of_nccl_tests(operation: str, factor: float) -> None:
    assert bus_factor(operation, 8) == factor


def test_lines_records_and_table() -> None:
    shown: list[str] = []
    log = CommLog(torch.device("cpu"), 2, shown.append)
    with mock.patch(
        "lt_zero.training.lightning.monitor.comm_log.time.perf_counter",
        side_effect=[1.0, 1.5, 2.0, 3.0, 4.0, 4.25, 5.0, 6.0],
    ):
        for name, size in (("a", 8), ("b", 8)):
            opened = log.open("all_reduce", name, size)
            assert opened is not None
            log.close(opened, log.now(opened)) if name == "b" else log.close(opened, opened.launched)
        log.configure(RecordedCollectives(frozenset({"all_reduce", "broadcast"}), by_name=False, prints=True))
        assert log.open("all_gather", "c", 16) is None
        opened = log.open("broadcast", "d", 4)
        assert opened is not None
        log.close(opened, opened.launched)
    assert shown == ["comm: broadcast, 4 bytes, 750 ms"]
    reduced, sent = log.records()
    assert (reduced.operation, reduced.name, reduced.nbytes, reduced.calls) == ("all_reduce", "", 8, 2)
    assert (reduced.seconds, reduced.shortest, reduced.longest, reduced.waited) == (2.5, 0.5, 2.0, 1.5)
    assert (reduced.algbw, reduced.busbw) == (16 / 2.5, 16 / 2.5)
    assert (sent.nbytes, sent.seconds) == (4, 0.75)
    assert comm_table([reduced]).row_count == 1


def test_names_of_operations_are_checked() -> None:
    with pytest.raises(ConfigError, match="prof_ops has 'send', which is not a collective of lt_zero. .*all_gather_o"):
        ZeroConfig.of({"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce", "send"]}})
    with pytest.warns(UserWarning, match="comms_config"):
        config = ZeroConfig.of({"comms_config": {"enabled": True, "prof_all": False, "prof_ops": "all_gather_base"}})
    assert config.comms_logger.operations == {"all_gather"}


@pytest.mark.parametrize("block", ["comms_logger", "flops_profiler"])
def test_keys_that_are_not_enabled_are_told(block: str) -> None:
    key = {"comms_logger": {"debug": True}, "flops_profiler": {"detailed": False}}[block]
    with pytest.warns(UserWarning, match=f"{block}.enabled is false"):
        ZeroConfig.of({block: key})


def test_off_costs_nothing() -> None:
    strategy = ZeroStrategy()
    assert strategy.monitor.new_log is None
    assert type(World(None, torch.device("cpu")).log) is Unlogged
    assert not strategy.monitor.watches
    with pytest.raises(RuntimeError, match="comms_logger.enabled: true"):
        strategy.comms_summary()


class _Stream:
    """A GPU's stream with a clock of its own (ms)."""

    current: _Stream

    def __init__(self, device: object = None) -> None:
        self.time = 0.0

    def wait_event(self, event: _Event) -> None:
        self.time = max(self.time, event.time)


class _Event:
    def __init__(self, device: object, timing: bool) -> None:
        self.time = float("nan")

    def record(self, stream: _Stream) -> None:
        self.time = stream.time

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return end.time - self.time


class _Collective:
    def __init__(self, end: float) -> None:
        self._end = end

    def wait(self) -> None:
        _Stream.current.time = max(_Stream.current.time, self._end)


@contextmanager
def _on(stream: _Stream) -> Iterator[None]:
    before, _Stream.current = _Stream.current, stream
    yield
    _Stream.current = before


def test_a_gpu_records_the_collective_and_not_the_layer_that_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"stream": _Stream, "event": _Event, "use": _on}.items():
        monkeypatch.setattr(accelerator, name, value)
    monkeypatch.setattr(accelerator, "current_stream", lambda device: _Stream.current)
    monkeypatch.setattr(_Stream, "current", _Stream(), raising=False)
    compute, log = _Stream.current, CommLog(torch.device("cuda", 0), 2)
    for name, ends, layer in (("hidden", 3.0, 10.0), ("exposed", 17.0, 2.0)):
        opened = log.open("all_gather", name, 1000)
        assert opened is not None
        opened = log.launched(opened, [_Collective(ends)])
        reduction = log.open("reduce_scatter", "slow", 1000)
        assert reduction is not None
        log.launched(reduction, [_Collective(1000.0)])  # of another group: what follows does not wait for it
        compute.time += layer
        waiting = log.now(opened)
        _Collective(ends).wait()
        log.close(opened, waiting)
    found = {record.name: (record.seconds, record.waited) for record in log.records()}
    assert found == {"hidden": (0.003, 0.0), "exposed": (pytest.approx(0.007), pytest.approx(0.005))}
