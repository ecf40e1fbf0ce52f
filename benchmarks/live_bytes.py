"""Measures the memory of saved activations, for tests and benchmarks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lt_zero.common.compat.of_dispatch import DispatchMode
from lt_zero.common.tensor_tree import iter_tensors


class Meter(DispatchMode):
    """Counts the bytes of live storages that operators allocated. Use ``live_bytes``.

    Attributes:
        now: live bytes; after forward, while only the loss is referenced, the bytes that autograd saved.
        peak: maximum since the start or ``reset``.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._device = device
        self._alive: dict[int, weakref.ref[Any]] = {}  # by id of the storage, which its reference outlives
        self._lock = threading.RLock()

    def reset(self) -> None:
        """Set the peak to the live bytes."""
        self.peak = self.now

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {id(tensor.untyped_storage()) for tensor in _plain((args, kwargs))}
        found = op(*args, **kwargs)
        for tensor in _plain(found):
            storage = tensor.untyped_storage()
            if id(storage) not in given and tensor.device == self._device:  # or it is a view of what was there before
                self._add(storage)
        return found

    def _add(self, storage: Any) -> None:
        with self._lock:
            key, nbytes = id(storage), storage.nbytes()
            if key in self._alive:
                return

            def gone(ref: weakref.ref[Any]) -> None:
                with self._lock:
                    if self._alive.get(key) is ref:
                        del self._alive[key]
                    self.now -= nbytes

            self._alive[key] = weakref.ref(storage, gone)
            self.now += nbytes
            self.peak = max(self.peak, self.now)


def _plain(values: Any) -> list[Tensor]:
    return [leaf for leaf in iter_tensors(values) if type(leaf) is Tensor or isinstance(leaf, torch.nn.Parameter)]


@contextmanager
def live_bytes(device: torch.device | None = None) -> Iterator[Meter]:
    """Count what operators allocate on a device inside the context: activations, gradients, temporaries.

    Tensors that existed before are not counted, nor is memory that no operator allocates, such as I/O and pinned
    buffers. Backward is counted on a CPU only; a GPU's backward runs in another thread: use
    ``torch.cuda.memory_stats`` there.
    """
    meter = Meter(device or torch.device("cpu"))
    with meter:
        yield meter
