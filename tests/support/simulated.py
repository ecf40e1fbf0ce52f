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

from lt_zero.comm.ranks import Ranks
from lt_zero.comm.shard_group import ShardGroup
from lt_zero.comm.transport import Replicas, SendBuffer
from lt_zero.comm.work import Done, Work, WorkList
from lt_zero.comm.world import World
from lt_zero.common import accelerator
from lt_zero.ops.flat import store

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


class LateGroup(ShardGroup):
    """Rank 0 of two; the other one has the same weights, data and gradients.

    A result is NaN until its collective has run. What is sent is read when it runs (a write before the wait is sent),
    or with ``early`` at the launch (a write after it is not). Gathers always read at the launch.
    """

    def __init__(
        self, device: torch.device, early: bool = False, world: World | None = None, divisor: float = 2.0
    ) -> None:
        super().__init__(world or _LateWorld(device), [range(2)], divisor)
        self._early = early
        self._stream = accelerator.stream(device) if accelerator.has_streams(device) else None
        self._full: dict[str, Tensor] = {}  # what rank 1 sends of a bucket that was broadcast

    def _late(self, run: Callable[[], object]) -> Work:
        return _Late(run, self._stream)

    gathers_in_background = property(lambda self: True)  # type: ignore[assignment]
    sums_wide = property(lambda self: False)  # type: ignore[assignment]

    def broadcast(self, tensor: Tensor, name: str, src: int = 0) -> None:
        self._full.setdefault(f"{name} {tensor.numel()}", tensor.detach().clone())

    def all_gather(self, flat: Tensor, name: str, own: Tensor | None = None) -> Work:
        half = flat.numel() // 2
        other = self._full[f"{name} {flat.numel()}"][half:]
        mine = flat[:half].clone()
        if self._stream is not None:
            # It may have been made on a stream for copies, which does not wait for the collective.
            accelerator.record(mine, self._stream)
        flat.fill_(float("nan"))

        def run() -> None:
            flat[:half].copy_(mine)
            flat[half:].copy_(other)

        return WorkList([self._late(run)])

    def reduce_scatter(
        self, out: Tensor, send: SendBuffer, add: bool, name: str, replicas: Replicas = Replicas.SENT
    ) -> Work:
        after, mine = self.factors(send.flat.dtype)[1], send.flat.chunk(2)[0]
        return WorkList([self._late(self._doubled(mine))], lambda: store(out, mine, add, after))

    def all_reduce(self, out: Tensor, send: SendBuffer, add: bool, name: str) -> Work:
        after, flat = self.factors(send.flat.dtype)[1], send.flat
        return WorkList([self._late(self._doubled(flat))], lambda: store(out, flat, add, after))

    def _doubled(self, sent: Tensor) -> Callable[[], object]:
        if not self._early:
            return lambda: sent.mul_(2)
        copy = sent.clone()
        return lambda: sent.copy_(copy).mul_(2)

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
