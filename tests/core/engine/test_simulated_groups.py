"""The engine over simulated groups: late collectives, a group of one rank, one of many ranks."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lt_zero
from lt_zero.common import flat_storage
from lt_zero.common.errors import ConfigError
from lt_zero.core.comm import transport
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.transport import SendBuffer, SendBuffers, Transport
from lt_zero.core.comm.work import Done, Work, WorkList
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.gather import Gatherer, Unit
from lt_zero.core.engine.grad_reducer import GradReducer
from lt_zero.core.engine.guard import is_guarded
from lt_zero.core.stores.store import Store
from tests.support.features import needs
from tests.support.parity import STAGES, CountedStorage, config_of, counted_storages, full_grads, full_values
from tests.support.simulated import LateGroup, group_of_one, one_of

CPU = torch.device("cpu")


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def net(depth: int = 4, width: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Feed(width) for _ in range(depth)))


def batch(step: int) -> Tensor:
    return torch.randn(3, 12, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def expected(steps: int = 3) -> dict[str, Tensor]:
    model = net()
    train(model, sgd(model), steps)
    return {name: p.detach() for name, p in model.named_parameters()}


def trained(stage: int, group: ShardGroup, **zero: Any) -> Engine:
    engine = lt_zero.shard(net(), config_of(stage, zero), CPU, group=group)
    optimizer = sgd(engine.root)
    lt_zero.ShardedOptimizer(engine, optimizer)
    train(engine.root, optimizer)
    return engine


def late_gradients(stage: int, prefetch: int, early: bool) -> float:
    """The largest error of three accumulated gradients; inf if one is NaN."""
    reference = net()
    for step in range(3):
        reference(batch(step)).square().mean().backward()
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    zero = {"stage3_prefetch_bucket_size": prefetch, "stage3_max_reuse_distance": 0}
    engine = lt_zero.shard(net(), config_of(stage, zero), CPU, group=LateGroup(CPU, early))
    for step in range(3):
        engine.root(batch(step)).square().mean().backward()
    engine.finish_reductions()
    worst = 0.0
    for bucket in engine.buckets:
        own, (first, last) = bucket.grads.read(), bucket.shard_range
        for span in bucket.layout.spans:
            want = wanted[span.name]
            assert want is not None
            lo, hi = max(span.lo, first), min(span.hi, last)
            if lo < hi:
                got = own[lo - first : hi - first]
                error = float((got - want.reshape(-1)[lo - span.lo : hi - span.lo]).abs().max())
                worst = max(worst, error if error == error else float("inf"))
    return worst


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("stage", "prefetch"), [(1, 0), (2, 0), (3, 0), (3, 10**9)])
def test_collectives_may_read_and_write_at_any_time(stage: int, prefetch: int, early: bool) -> None:
    assert late_gradients(stage, prefetch, early) < 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_a_group_of_one_rank_trains_like_a_single_process(stage: int) -> None:
    with group_of_one(CPU) as group:
        got = full_values(trained(stage, group))
    for name, value in expected().items():
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-7)


def guarded_units(engine: Engine) -> list[int]:
    """The units of ``net()`` with parameters whose updates have yet to arrive."""
    return [i for i, unit in enumerate(engine.root.children()) if any(map(is_guarded, unit.parameters()))]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_unit_waits_for_its_own_updates_only(stage: int) -> None:
    """The gathers after a step overlap with the next forward, and with anything that reads no parameter."""
    with group_of_one(CPU) as group:
        engine = trained(stage, group)
        assert guarded_units(engine) == [0, 1, 2, 3]
        seen = []
        for unit in engine.root.children():
            unit.register_forward_hook(lambda *_: seen.append(guarded_units(engine)))
        engine.root(batch(3)).square().mean().backward()
        assert seen == [[1, 2, 3], [2, 3], [3], []]

        engine = trained(stage, group)
        weight = next(engine.root.parameters())
        torch.testing.assert_close(weight.detach(), next(iter(expected().values())), rtol=1e-6, atol=1e-7)
        assert guarded_units(engine) == []

        engine = trained(stage, group, overlap_comm=False)
        assert guarded_units(engine) == []


@needs("offload")
@pytest.mark.parametrize("stage", [1, 2])
def test_a_gpu_gathers_background_steps_from_the_thread_that_waits(stage: int, tmp_path: Path) -> None:
    """In the order of the steps, whichever is needed first: GPU queues would deadlock if it differed between ranks."""
    gathered: list[tuple[bool, Tensor]] = []

    def note(self: ShardGroup, flat: Tensor) -> Work:
        gathered.append((threading.current_thread() is threading.main_thread(), flat))
        return Done()

    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), "overlap_step": True}}
    with one_of(2, CPU) as group, mock.patch.object(ShardGroup, "background_gather", note):
        engine = trained(stage, group, **zero)
        gathered.clear()
        assert guarded_units(engine) == [0, 1, 2, 3]
        engine.root[2].up.weight.sum()  # type: ignore[index, union-attr]
        engine.finish_steps()
        assert guarded_units(engine) == []
        assert not engine.buckets[0].unpublished
        assert [flat is bucket.compute.flat for (_, flat), bucket in zip(gathered, engine.buckets, strict=True)] == [
            True
        ] * 4
        assert all(main for main, _ in gathered)
        engine.offload_manager.close()


def exposed(prefetch: int) -> int:
    """Gathers of a step that begin when their unit is needed, after a step that recorded the order of units."""
    zero = {"stage3_prefetch_bucket_size": prefetch, "stage3_max_reuse_distance": 0}
    engine = lt_zero.shard(net(), config_of(3, zero), CPU, group=LateGroup(CPU))
    gather, late = Gatherer.gather, list[str]()

    def note(self: Gatherer, unit: Unit) -> None:
        if any(bucket.released for bucket in unit.sharded):
            late.append(unit.name)
        gather(self, unit)

    for step in range(2):
        late.clear()
        with mock.patch.object(Gatherer, "gather", note):
            engine.root(batch(step)).square().mean().backward()
    return len(late)


@pytest.mark.parametrize("prefetch", [1, 10**9])
def test_a_unit_that_is_larger_than_the_limit_is_prefetched(prefetch: int) -> None:
    """The first unit of each pass cannot be; the last of forward is the first of backward."""
    assert exposed(0) == 2 * len(net())
    assert exposed(prefetch) <= 2


def _sends_before_it_writes(self: GradReducer, bucket: Bucket, again: bool = False) -> None:
    while len(self._in_flight) >= 2:
        self._finish_oldest()
    send = self._buffers[bucket.group].take(bucket.layout.numel, bucket.dtype)
    out, add = bucket.grads.target()
    self._in_flight.append((bucket, self._exchange.reduce(bucket, out, send, add), send))
    bucket.grads.take(send.flat, add=False)


_take, _target = SendBuffers.take, Store.target
_taken: dict[SendBuffers, SendBuffer] = {}


def _take_one_buffer(self: SendBuffers, numel: int, dtype: torch.dtype) -> SendBuffer:
    if self not in _taken:
        _taken[self] = _take(self, numel, dtype)
    return _taken[self]


BUGS: dict[str, tuple[Any, str, Any]] = {
    "no wait for a gather": (Bucket, "finish_gather", lambda self: None),
    "no wait for a reduction": (WorkList, "wait", lambda self: None),
    "one send buffer": (SendBuffers, "take", _take_one_buffer),
    "a gather without the own shard": (Store, "source", lambda self, shard: nullcontext(self.tensor)),
    "reductions in flight are dropped": (GradReducer, "drain", lambda self: self._in_flight.clear()),
    "a sum instead of the mean": (ShardGroup, "factors", lambda self, wire: (1.0, 1.0)),
    "an accumulator that forgets": (Store, "target", lambda self, add, whole=False: _target(self, False, whole)),
    "sent before it is written": (GradReducer, "_launch", _sends_before_it_writes),
}


@pytest.mark.parametrize("bug", BUGS)
def test_late_collectives_find_a_planted_bug(bug: str) -> None:
    with mock.patch.object(*BUGS[bug]):
        try:
            errors = [late_gradients(3, 10**9, early) for early in (False, True)]
        except (RuntimeError, IndexError):
            return
    assert not max(errors) < 1e-3


class Made(TorchDispatchMode):
    """Counts the tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.count += len(result) if isinstance(result, (list, tuple)) else 1
        return result


def of_many(world: int, stage: int) -> tuple[int, int, int]:
    """Tensors that a step of one of ``world`` ranks makes; most bytes of buckets while it is built, and after it."""
    width = 64  # a bucket has some elements for each of 512 ranks
    with one_of(world, CPU) as group, counted_storages() as storages:
        engine = lt_zero.shard(net(6, width), config_of(stage), CPU, group=group)
        built, kept = storages.most, storages.live
        optimizer = sgd(engine.root)
        lt_zero.ShardedOptimizer(engine, optimizer)
        for step in range(3):
            with Made() as made:
                optimizer.zero_grad()
                engine.root(torch.ones(2, width) * step).square().mean().backward()
                optimizer.step()
    return made.count, built, kept


def grows(stage: int) -> bool:
    return of_many(512, stage)[0] > 1.3 * of_many(8, stage)[0]


def holds_the_model_while_it_is_built() -> bool:
    largest = max(sum(p.nbytes for p in unit.parameters()) for unit in net(6, 64))
    _, built, kept = of_many(8, 3)
    return kept > 0 or built > 1.1 * largest


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_work_of_a_step_does_not_grow_with_the_number_of_ranks(stage: int) -> None:
    assert not grows(stage)


def test_one_unit_at_a_time_is_in_memory_while_it_is_built() -> None:
    assert not holds_the_model_while_it_is_built()


def test_one_of_many_ranks_finds_planted_bugs() -> None:
    with mock.patch.object(Transport, "_own", lambda self, flat: flat.chunk(self._mesh.shards)[self._mesh.shard_rank]):
        assert grows(3)
    with mock.patch.object(CountedStorage, "free"):
        assert holds_the_model_while_it_is_built()


def test_groups_connect_when_they_are_made() -> None:
    connected = []

    def note(tensor: Tensor, group: Any, op: Any = None, async_op: bool = False) -> Work:
        if op is None:  # else it compares the ranks' transports
            connected.append((group, tensor.numel()))
        return Done()

    with mock.patch.object(dist, "all_reduce", note), one_of(4, CPU) as group:
        assert connected == [(group.process_group, 1), (group.reductions, 1)]
        group.allow_background()
        assert connected[2:] == [(group._background, 1)]


def test_the_background_has_the_replicas_that_are_configured_last() -> None:
    """A group is configured again if no engine uses it, as ``zero.Init`` and ``initialize`` do one after the other."""
    with one_of(4, CPU) as group:
        for shards in (2, 4):
            group.configure(shards=shards, topology=1, scatters=True, sums_gradients=False, predivide=None)
            group.allow_background()
            assert dist.get_world_size(group._background) == shards


def test_a_gpu_with_one_queue_has_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_of(4, CPU) as group:
        assert group.reductions is not group.process_group
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with one_of(4, CPU) as group:
        assert group.reductions is group.process_group
        with pytest.raises(ConfigError, match="overlap_step=true .*CUDA_DEVICE_MAX_CONNECTIONS=1.* unset it"):
            group.allow_background()


@pytest.mark.parametrize("stage", STAGES)
def test_memory_of_weights_is_resized_as_on_a_gpu(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There freed memory has no elements, so that slices of it are errors; pages of a CPU keep their address."""
    monkeypatch.setattr(flat_storage, "_PAGES", False)
    with group_of_one(CPU) as group:
        got = full_values(trained(stage, group))
    for name, want in expected().items():
        torch.testing.assert_close(got[name], want, msg=name)


def accumulated(stage: int, group: ShardGroup | None, dtype: torch.dtype | None) -> tuple[dict[str, Tensor], int]:
    """Gradients of three micro-batches, and the bytes of send buffers."""
    engine = lt_zero.shard(net().to(dtype or torch.float32), config_of(stage, {}, dtype), CPU, group=group)
    for step in range(3):
        engine.root(batch(step).to(dtype or torch.float32)).float().square().mean().backward()
    return full_grads(engine), engine.reducer.buffer_bytes


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", STAGES)
def test_a_single_rank_adds_gradients_up_without_a_send_buffer(stage: int, dtype: torch.dtype | None) -> None:
    alone, buffers = accumulated(stage, None, dtype)
    assert buffers == 0
    with group_of_one(CPU) as group:
        grouped, buffers = accumulated(stage, group, dtype)
    assert buffers > 0
    assert all(torch.equal(grad, grouped[name]) for name, grad in alone.items())


def test_send_buffers_of_an_accelerator_are_freed_where_memory_is_short() -> None:
    kept: dict[str, Tensor] = {}
    for freed in (False, True):
        engine = lt_zero.shard(net(), config_of(2), CPU, group=LateGroup(CPU))
        with mock.patch.object(transport.accelerator, "is_accelerator", return_value=freed):
            for step in range(2):
                engine.root(batch(step)).square().mean().backward()
                assert engine.reducer.buffer_bytes > 0
                engine.reducer.free_buffers()
                assert (engine.reducer.buffer_bytes == 0) is freed, "those of a host stay"
            engine.root(batch(2)).square().mean().backward()
            grads = full_grads(engine)
            engine.abort_backward()
            assert (engine.reducer.buffer_bytes == 0) is freed
        if freed:
            assert all(torch.equal(grad, kept[name]) for name, grad in grads.items())
        kept = grads
