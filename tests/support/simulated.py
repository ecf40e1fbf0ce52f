"""Groups that one process simulates: collectives as late as they may be, a group of one rank, one of many ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lt_zero.common import accelerator
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.comm.shard_group import Operation, ShardGroup
from lt_zero.core.comm.transport import Connections, Group, Reduction, Transport
from lt_zero.core.comm.work import CollectiveId, Done, Work, WorkList
from lt_zero.core.comm.world import World

_SLEEP = 5_000_000  # cycles that a GPU waits before a late collective: some milliseconds


class _Late:
    """A collective that runs when it is waited for (CPU), or late on a stream of its own (GPU)."""

    def __init__(self, run: Callable[[], object], stream: Any) -> None:
        self._run: Callable[[], object] | None = run  # until the wait: what it reads may not be allocated anew before
        self._event: Any = None
        if stream is None:
            return
        device = stream.device
        stream.wait_stream(accelerator.current_stream(device))
        with accelerator.use(stream):
            if device.type == "cuda":
                torch.cuda._sleep(_SLEEP)
            run()
            self._event = accelerator.event(device)
            self._event.record()

    def wait(self) -> None:
        run, self._run = self._run, None
        if self._event is not None:
            # ``run`` keeps what it reads: memory of the computation's stream, which comes after it from here on.
            self._event.wait()
        elif run is not None:
            run()


class _LateWorld(World):
    """Rank 0 of two, which have the same objects."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(None, device)
        self.size = 2

    def _reduce_small(self, value: Tensor, op: Any, name: str) -> Tensor:
        return value.mul_(2) if op == dist.ReduceOp.SUM else value

    def host_max(self, flags: Tensor, name: str) -> Work:
        return Done()

    def host_broadcast(self, value: Any, name: str) -> Any:
        return value

    def host_gather(self, value: Any, name: str) -> list[Any]:
        return [value, value]


class LateTransport(Transport):
    """Moves tensors between rank 0 and a rank 1 that has the same ones: see ``LateGroup``."""

    name = "late"

    def __init__(self, connections: Connections, early: bool, full: dict[str, Tensor]) -> None:
        super().__init__(connections)
        self._early = early
        self._full = full
        on_streams = accelerator.has_streams(connections.device)
        self._stream = accelerator.stream(connections.device) if on_streams else None

    def all_gather(
        self, flat: Tensor, own: Tensor | None, launch: CollectiveId | None, group: Group | None = None
    ) -> Work:
        assert launch is not None
        half = flat.numel() // 2
        other = self._full[f"{launch.name} {flat.numel()}"][half:]
        mine = flat[:half].clone()
        if self._stream is not None:
            # It may have been made on a stream for copies, which does not wait for the collective.
            accelerator.record(mine, self._stream)
        flat.fill_(float("nan"))

        def run() -> None:
            flat[:half].copy_(mine)
            flat[half:].copy_(other)

        return WorkList([_Late(run, self._stream)])

    def reduce_scatter(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        return self._summed(reduction, reduction.flat.chunk(2)[0])

    def all_reduce(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        return self._summed(reduction, reduction.flat)

    def _summed(self, reduction: Reduction, sent: Tensor) -> Work:
        """Store the sum of ``sent`` and the same of rank 1."""
        copy = sent.clone() if self._early else sent
        return WorkList([_Late(lambda: sent.copy_(copy).mul_(2), self._stream)], lambda: reduction.store(sent))


class LateGroup(ShardGroup):
    """Rank 0 of two; the other one has the same weights, data and gradients.

    A result is NaN until its collective has run. What is sent is read when it runs (a write before the wait is sent),
    or with ``early`` at the launch (a write after it is not). Gathers always read at the launch.
    """

    def __init__(
        self, device: torch.device, early: bool = False, world: World | None = None, divisor: float = 2.0
    ) -> None:
        self._early = early
        self._full: dict[str, Tensor] = {}  # what rank 1 sends of a bucket that was broadcast
        super().__init__(world or _LateWorld(device), [range(2)], divisor)

    def _choose(self, division: int, topology: str | int, scatters: bool) -> None:
        self.transport = LateTransport(self.connections(self.mesh, None), self._early, self._full)
        self.sum_by(None)

    def run(self, operation: Operation, name: str, flat: Tensor, start: Callable[[CollectiveId | None], Work]) -> Work:
        return start(CollectiveId("late", 0, operation.name, name, flat.numel()))

    def broadcast(self, tensor: Tensor, name: str, src: int = 0) -> None:
        self._full.setdefault(f"{name} {tensor.numel()}", tensor.detach().clone())

    _reduce_small = _LateWorld._reduce_small


@contextmanager
def group_of_one(device: torch.device) -> Iterator[ShardGroup]:
    """One rank that takes no shortcut: NCCL on a GPU, else gloo."""
    backend, bound = ("nccl", {"device_id": device}) if device.type == "cuda" else ("gloo", {})
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **bound)
    try:
        yield ShardGroup.of_all(World(dist.new_group(), device))
    finally:
        dist.destroy_process_group()


@contextmanager
def one_of(world: int, device: torch.device, rank: int = 0) -> Iterator[ShardGroup]:
    """A rank of ``world`` over torch's fake backend: its collectives return at once, with this rank's values."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        # The fake backend broadcasts nothing.
        with mock.patch.object(Ranks, "host_broadcast", lambda self, value, name: value):
            yield ShardGroup.of_all(World.join(device))
    finally:
        dist.destroy_process_group()
