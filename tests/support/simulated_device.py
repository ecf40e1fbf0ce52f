"""A CPU as a device with streams and memory of its own, for the code that only runs on a GPU. See happens_before.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lt_zero.common import accelerator
from lt_zero.common.flat_storage import FlatStorage
from lt_zero.core.engine.grad_accumulator import GradAccumulator, Products
from lt_zero.core.stores import pinned
from lt_zero.offload import host_store
from lt_zero.offload.swap_file import SwapFile
from tests.support.happens_before import DEFAULT, Event, Order, Recorder, Stream


@contextmanager
def machine() -> Iterator[Order]:
    """Context in which the CPU has streams, and the order of all work is checked: of this thread, and of new ones."""
    order = Order()
    with ExitStack() as stack:
        for name, value in _answers(order).items():
            stack.enter_context(mock.patch.object(accelerator, name, value))
        for owner, name, made in _replaced(order):
            stack.enter_context(mock.patch.object(owner, name, made))
        stack.enter_context(mock.patch.object(accelerator, "_apart", True))
        stack.enter_context(Recorder(order))
        yield order


def _answers(order: Order) -> dict[str, Any]:
    """The functions of ``accelerator``, for a CPU with streams."""
    compute = Stream(order, DEFAULT)

    def current(device: torch.device) -> Stream:
        return compute if order.current == DEFAULT else Stream(order, order.current)

    def register(buffer: Tensor) -> int:
        order.on_host(buffer)
        return 0

    def synchronize(device: torch.device | None = None) -> None:
        for name in order.clocks.keys() - order.hosts:
            Stream(order, name).synchronize()

    return {
        "is_accelerator": lambda device: True,
        "holds": lambda tensor: not order.is_host(tensor),
        "is_current": lambda device: True,
        "make_current": lambda device: None,
        "with_index": lambda device: device,
        "on": lambda device: nullcontext(),
        "has_streams": lambda device: True,
        "stream": lambda device: Stream(order, order.new_stream()),
        "current_stream": current,
        "use": lambda stream: order.on(stream.name),
        "event": lambda device, timing=False, blocking=False: Event(order),
        "record": lambda tensor, stream: order.record(tensor, stream.name),
        "synchronize": synchronize,
        "in_use": lambda: False,
        "send": lambda tensor, device: torch.empty_like(order.on_host(tensor)).copy_(tensor, non_blocking=True),
        "register": register,
        "unregister": lambda address: None,
        "_pinned": lambda tensor: order.on_host(tensor.clone()),
        "generators": lambda device: [],
    }


def _replaced(order: Order) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Methods that are replaced: those that allocate and free memory, and the start of threads."""
    allocate, free, run = FlatStorage.allocate, FlatStorage.free, threading.Thread.run
    defer = GradAccumulator.defer
    buffer, host_empty = pinned.aligned_buffer, host_store.host_empty

    def allocates(self: FlatStorage) -> None:
        allocate(self)
        order.allocated(self.tensor.untyped_storage())

    def frees(self: FlatStorage) -> None:
        order.freed(self.tensor.untyped_storage().data_ptr())
        free(self)

    def moves(of: Callable[..., Any], writes: bool) -> Callable[..., Any]:
        def move(self: SwapFile, record: int, buffer: Tensor) -> Any:
            what = "read of a file" if writes else "write to a file"
            order.access(buffer, writes, order.host, order.launch(order.host), what)
            return of(self, record, buffer)

        return move

    def runs(self: threading.Thread) -> None:
        with Recorder(order):
            run(self)

    def defers(self: GradAccumulator, factor_on: Callable[..., Tensor], products: Products) -> None:
        factor = getattr(factor_on, "__self__", None)

        def on_host(device: torch.device) -> Tensor:
            # ``to`` copies nothing here, where both kinds of memory are of one device.
            assert isinstance(factor, Tensor)
            order.read_back(order.current, "to")
            return order.on_host(factor.clone())

        copies = isinstance(factor, Tensor) and not order.is_host(factor) and self._places.step.offloads
        defer(self, on_host if copies else factor_on, products)

    return [
        (GradAccumulator, "defer", defers),
        (FlatStorage, "allocate", allocates),
        (FlatStorage, "free", frees),
        (threading.Thread, "run", runs),
        (SwapFile, "read", moves(SwapFile.read, True)),
        (SwapFile, "write", moves(SwapFile.write, False)),
        (pinned, "aligned_buffer", lambda nbytes: order.on_host(buffer(nbytes))),
        (host_store, "host_empty", lambda numel, dtype, pin: order.on_host(host_empty(numel, dtype, pin))),
    ]
