"""Stores the inputs of checkpointed modules between forward and backward.

``torch.utils.checkpoint`` saves them through autograd, so a store only needs
``saved_tensors_hooks(store.pack, store.unpack)`` around a checkpointed call (ZeRO-R's activation checkpoints in host
memory, arXiv:1910.02054 section 6.1, and ZeRO-Infinity's, arXiv:2104.07857 section 5.1.2).

Note [What is stored]
    Plain dense tensors on the store's device of at least ``least`` bytes. Not stored are parameters and views of them,
    sparse, nested, quantized and lazily conjugated tensors, subclasses, tensors of other devices, and tensors with
    overlapping elements. For these the version is checked: an in-place write before backward raises autograd's error,
    as without a store. A tensor that several modules get (a mask, a rotary table) is stored once; it is identified by
    its storage, the elements it shows, and its version.

Note [How long]
    A packed tensor belongs to the graph: it can be unpacked as often as backward runs (retain_graph), and its memory is
    freed with the graph. A graph can be freed in the middle of any call, so its finalizer only queues the tensor, and
    the next call frees the memory. A graph that is kept alive keeps its stored tensors. ``clear`` frees them anyway.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lt_zero.activation.geometry import Geometry, geometry_of
from lt_zero.common.compat import version_of, view_base
from lt_zero.config.blocks import ActivationCheckpointing, Aio
from lt_zero.io.pinned import host_buffer
from lt_zero.io.thread_pool import SwapError
from lt_zero.offload.host_store import is_apart
from lt_zero.offload.reuse import Arena, Memory, Stock
from lt_zero.offload.saved_activations import InFiles, InHost, OnDevice, Place, Rest, changed

_LEAST = 4096  # bytes; storing a smaller tensor costs more than it saves
_AHEAD = 2  # tensors to prefetch in backward
_SPARE = 2  # slots for prefetched tensors, in addition to the stored ones


class Store(Protocol):
    """Stores the tensors that autograd saves. Thread-safe."""

    @property
    def problem(self) -> SwapError | None:
        """The first I/O error. Tensors are NaN afterwards; the ranks agree on raising (offload/nvme_store.py)."""

    def pack(self, tensor: Tensor) -> object:
        """Store a tensor that autograd saves."""

    def unpack(self, packed: Any) -> Tensor:
        """A tensor of the same values, dtype, shape, strides and device, detached.

        Raises:
            RuntimeError: the tensor was changed in place, or freed by ``clear``.
        """

    def end_backward(self) -> None:
        """Free what no graph holds, after a backward that has ended or failed. See Note [How long]."""

    def clear(self) -> None:
        """Free everything, also what live graphs hold."""

    def stats(self) -> dict[str, int]:
        """Counts and bytes so far.

        ``packed``, ``kept`` (not stored), ``shared`` (stored before), ``unpacked``: calls. ``stored``, ``bytes``:
        tensors stored now; ``most``: peak of ``bytes``. ``made``: allocations; ``memory``, ``disk``: bytes allocated,
        in use or not.
        """

    def close(self) -> None:
        """Free everything and remove files. Idempotent."""


class _Entry:
    """The stored elements of a tensor; all packed tensors with these elements share it."""

    def __init__(self, place: Place, nbytes: int, before: weakref.ref[_Entry] | None) -> None:
        self.place: Place | None = place
        self.nbytes, self.before = nbytes, before
        self.users, self.shared = 0, False
        self.common: Tensor | None = None  # the copy on the device, if the entry is shared


class _Kept:
    """A tensor that is not stored."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()  # a saved output would otherwise keep its own graph alive
        self._version = None if tensor.is_inference() else version_of(tensor)

    def get(self) -> Tensor:
        if self._version is not None and (found := version_of(self._tensor)) != self._version:
            raise changed(found, self._version)
        return self._tensor


class _Packed:
    """The graph's handle of a stored tensor."""

    def __init__(self, entry: _Entry, dtype: torch.dtype, geometry: Geometry, gone: deque[_Entry]) -> None:
        self.entry, self.dtype, self.geometry, self._gone = entry, dtype, geometry, gone

    def __del__(self) -> None:
        self._gone.append(self.entry)  # nothing else: see Note [How long]


class Saved:
    """The store: decides which tensors to store, and shares, prefetches and frees them.

    Args:
        rest: stores the bytes.
        device: whose tensors are stored.
        least: minimum bytes of a stored tensor.
    """

    def __init__(self, rest: Rest, device: torch.device, least: int = _LEAST) -> None:
        which = device.index if device.type != "cuda" or device.index is not None else torch.cuda.current_device()
        self.rest, self.device, self._least = rest, torch.device(device.type, which), least
        self._lock = threading.RLock()
        self._gone: deque[_Entry] = deque()
        self._entries: dict[int, _Entry] = {}  # by id, all that are stored
        self._last: weakref.ref[_Entry] | None = None  # packed last
        self._known: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[Any, _Entry]]
        self._known = weakref.WeakKeyDictionary()  # by storage object, since addresses are reused
        self._counts = dict.fromkeys(("packed", "kept", "shared", "unpacked", "bytes", "most"), 0)

    @property
    def problem(self) -> SwapError | None:
        return self.rest.problem

    def pack(self, tensor: Tensor) -> object:
        with self._lock, torch.no_grad():
            self._reap()
            self._counts["packed"] += 1
            geometry = geometry_of(tensor) if self._takes(tensor) else None
            if geometry is None:
                self._counts["kept"] += 1
                return _Kept(tensor)
            entry = self._entry_of(tensor.detach(), geometry)
            entry.users += 1
            return _Packed(entry, tensor.dtype, geometry, self._gone)

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Kept):
            return packed.get()
        with self._lock, torch.no_grad():
            self._reap()
            self._counts["unpacked"] += 1
            found = self._bring(packed.entry)
            self._look_ahead(packed.entry)
            geometry: Geometry = packed.geometry
            return geometry.restore(found.view(packed.dtype))

    def _takes(self, tensor: Tensor) -> bool:
        """See Note [What is stored]."""
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device != self.device:
            return False
        if tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
            return False
        large = tensor.numel() * tensor.element_size() >= self._least
        return large and not isinstance(view_base(tensor), nn.Parameter)

    def _entry_of(self, tensor: Tensor, geometry: Geometry) -> _Entry:
        same = self._known.setdefault(tensor.untyped_storage(), weakref.WeakValueDictionary())
        lies = geometry.numel if geometry.dense else (geometry.sides, geometry.steps)
        key = (tensor.storage_offset(), tensor.dtype, version_of(tensor), lies)
        entry = same.get(key)
        if entry is not None and entry.place is not None:
            entry.shared = True
            self._counts["shared"] += 1
            return entry
        elements = geometry.elements(tensor).view(torch.uint8)  # 1D
        entry = same[key] = _Entry(self.rest.put(elements), elements.numel(), self._last)
        self._entries[id(entry)], self._last = entry, weakref.ref(entry)
        self._counts["bytes"] += entry.nbytes
        self._counts["most"] = max(self._counts["most"], self._counts["bytes"])
        return entry

    def _bring(self, entry: _Entry) -> Tensor:
        if entry.place is None:
            raise RuntimeError(
                "The input of a checkpointed module was freed: Store.clear() was called after this forward. Run "
                "backward before it, or run forward again."
            )
        if not entry.shared or isinstance(self.rest, OnDevice):
            return entry.place.bring()
        if entry.common is None:
            entry.common = entry.place.bring()
        return entry.common.clone()

    def _look_ahead(self, entry: _Entry | None) -> None:
        # Backward unpacks in reverse order. What was packed before is copied while the calling module is computed.
        for _ in range(_AHEAD):
            entry = entry.before() if entry is not None and entry.before is not None else None
            if entry is None or (entry.place is not None and entry.common is None and not entry.place.prefetch()):
                return

    def _reap(self) -> None:
        while self._gone:
            entry = self._gone.popleft()
            entry.users -= 1
            if not entry.users:
                self._free(entry)

    def _free(self, entry: _Entry) -> None:
        if entry.place is not None:
            place, entry.place, entry.common = entry.place, None, None
            del self._entries[id(entry)]
            self._counts["bytes"] -= entry.nbytes
            place.free()

    def end_backward(self) -> None:
        with self._lock:
            self._reap()
            if not self._entries:
                self.rest.end_pass()

    def clear(self) -> None:
        with self._lock:
            self._reap()
            for entry in list(self._entries.values()):
                self._free(entry)
            self.rest.end_pass()

    def stats(self) -> dict[str, int]:
        with self._lock:
            self._reap()
            return {**self._counts, "stored": len(self._entries), **self.rest.stats()}

    def close(self) -> None:
        self.clear()
        self.rest.close()


def open_store(
    block: ActivationCheckpointing, device: torch.device, count: int, aio: Aio | None = None, rank: int = 0
) -> Store | None:
    """The store that the configuration asks for; None if saved inputs stay where they are.

    Args:
        block: the configuration.
        device: of the model.
        count: number of checkpointed modules.
        aio: block size, threads and queue depth of file I/O; None: the defaults.
        rank: of this process, for files.

    Raises:
        SwapError: files cannot be created in ``nvme_path`` on this rank; other ranks may have succeeded.
    """
    if block.nvme_path is not None:
        return Saved(InFiles(block.nvme_path, rank, aio or Aio(), device, is_apart(device)), device)
    if block.cpu_checkpointing and is_apart(device):
        pinned = functools.partial(host_buffer, pin=device.type == "cuda")
        return Saved(InHost(_arena(pinned, block, count) or Stock(pinned), device), device)
    arena = _arena(functools.partial(torch.empty, dtype=torch.uint8, device=device), block, count, _SPARE)
    return Saved(OnDevice(arena), device) if arena is not None else None


def _arena(make: Callable[[int], Tensor], block: ActivationCheckpointing, count: int, spare: int = 0) -> Memory | None:
    if not block.contiguous_memory_optimization:
        return None
    return Arena(make, block.number_checkpoints or max(1, count), block.number_checkpoints is None, spare)
