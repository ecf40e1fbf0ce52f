"""A backend of ``torch.distributed`` whose collectives run in streams, as NCCL's do: gloo moves the bytes.

Each process group has a stream. A collective begins after what its caller's current stream was given, and ends when the
group's stream has done it: ``wait`` makes the current stream wait, not the host. See happens_before.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.happens_before import Event, Order, Stream

NAME = "streams"
_order: list[Order] = []  # the running machine's


class _Ended(Work):
    """A collective that the host has launched; the device has it in the stream of its group."""

    def __init__(self, event: Event, on_host: bool) -> None:
        super().__init__()
        self._event, self._on_host = event, on_host

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._on_host:
            # Host tensors are moved to the device before, and back after it, which ``to`` does not do here.
            self._event.synchronize()
        self._event.wait()
        return True

    def is_completed(self) -> bool:
        return True


class _Group(dist.ProcessGroup):
    """The methods of a process group that the package calls, by the names that torch calls them."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._inner, self._rank, self._size = inner, rank, size
        self._stream = Stream(_order[-1], _order[-1].new_stream("collectives"))

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return str(dist.distributed_c10d._world.pg_names[self])

    def _run(self, name: str, reads: list[Tensor], writes: list[Tensor], move: Callable[[], object]) -> Work:
        order = _order[-1]
        begun, ended = Event(order), Event(order)
        begun.record()
        self._stream.wait_event(begun)
        with _disable_current_modes():
            move()
        for tensor in (*reads, *writes):
            order.meet(tensor)  # torch makes results of a layer's collectives below the operators that are seen
        number = order.launch(self._stream.name)
        for tensor in reads:
            order.access(tensor, False, self._stream.name, number, name)
        for tensor in writes:
            order.access(tensor, True, self._stream.name, number, name)
        ended.record(self._stream)
        return _Ended(ended, any(order.is_host(tensor) for tensor in writes))

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        return self._run("all_reduce", tensors, tensors, lambda: self._inner.allreduce(tensors, opts).wait())

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        return self._run("broadcast", tensors, tensors, lambda: self._inner.broadcast(tensors, opts).wait())

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        sent = [tensor for tensors in inputs for tensor in tensors]
        return self._run("scatter", sent, outputs, lambda: self._inner.scatter(outputs, inputs, opts).wait())

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        rows = list(output.chunk(self._size))
        sent = input.clone()  # it may be a part of the output
        return self._run("all_gather", [input], [output], lambda: self._inner.allgather([rows], [sent]).wait())

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        def move() -> None:
            total = input.clone()
            made = dist.AllreduceOptions()
            made.reduceOp = opts.reduceOp
            self._inner.allreduce([total], made).wait()
            output.copy_(total.chunk(self._size)[self._rank])

        return self._run("reduce_scatter", [input], [output], move)

    def all_to_all_single(self, output: Tensor, input: Tensor, out: Any, into: Any, opts: Any = None) -> Work:
        def move() -> None:
            rows = [torch.empty_like(input) for _ in range(self._size)]
            self._inner.allgather([rows], [input]).wait()
            output.copy_(torch.cat([row.chunk(self._size)[self._rank] for row in rows]).view_as(output))

        assert not out
        assert not into
        return self._run("all_to_all", [input], [output], move)

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        return self.allreduce([torch.zeros(1)], dist.AllreduceOptions())


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> _Group:
    return _Group(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


@contextmanager
def streams(order: Order) -> Iterator[dist.ProcessGroup]:
    """Context with a process group of all ranks, whose collectives run in streams of ``order``. Collective."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, devices=["cpu"])
    _order.append(order)
    try:
        yield dist.new_group(backend=NAME)
    finally:
        _order.pop()
