"""Where the inputs of checkpointed modules rest between forward and backward.

``torch.utils.checkpoint`` saves them through autograd, so ``saved_tensors_hooks(store.pack, store.unpack)`` around a
checkpointed call is all that a store needs (ZeRO-R's activation checkpoints in host memory, arXiv:1910.02054 section
6.1, and ZeRO-Infinity's, arXiv:2104.07857 section 5.1.2).

Note [What is stored]
    Dense tensors of ordinary type on the store's device, from ``least`` bytes on. Parameters and views of them stay
    where they are, and so do sparse, nested, quantized and lazily conjugated tensors, subclasses, tensors of other
    devices, tensors with overlapping elements and small ones. Those are watched: who writes to one in place before
    backward gets autograd's error, as without a store.
    What several modules get (a mask, a rotary table) is stored once: a tensor is known by its storage, the elements of
    it that it shows, and its version.

Note [How long]
    What was packed belongs to the graph: it can be asked for as often as the graph is walked (retain_graph, several
    forwards before their backwards), and its place is free when the graph is, walked or not. The end of a graph can
    come anywhere, in the middle of any call; it is only noted there, and the next call frees the place. A graph that
    somebody holds keeps its places, as it would keep its tensors. ``clear`` takes them back by force.

Note [Order of backward]
    Backward asks in the reverse order of forward. With each tensor the ``_AHEAD`` that were packed before it are
    started on their way, so they come while the module that asked is computed.
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
from lt_zero.config.blocks.activation import ActivationCheckpointing
from lt_zero.config.blocks.offload import Aio
from lt_zero.engine.bucket_store import is_apart
from lt_zero.io.pinned import host_buffer
from lt_zero.io.thread_pool import SwapError
from lt_zero.offload.reuse import Arena, Memory, Stock
from lt_zero.offload.saved_activations import InHost, OnDevice, Place, Rest, changed
from lt_zero.offload.saved_activations_nvme import InFiles

_LEAST = 4096  # bytes: below that a tensor costs less than what moves it
_AHEAD = 2  # tensors that are brought before they are asked for
_SPARE = 2  # slots for tensors that were brought, while others rest


class Store(Protocol):
    """Keeps what autograd saves. Any thread may call it."""

    @property
    def problem(self) -> SwapError | None:
        """The first thing that went wrong with files; NaN is handed out then. To be raised where ranks meet."""

    def pack(self, tensor: Tensor) -> object:
        """Take a tensor that autograd saves."""

    def unpack(self, packed: Any) -> Tensor:
        """A tensor of the same values, dtype, shape, strides and device, detached.

        Raises:
            RuntimeError: the tensor was written to in place, or ``clear`` took it back.
        """

    def end_backward(self) -> None:
        """A backward is over, or was given up: free what no graph holds any more. See Note [How long]."""

    def clear(self) -> None:
        """Free everything, also what graphs hold that nobody will walk."""

    def stats(self) -> dict[str, int]:
        """Counts and bytes so far.

        ``packed``, ``kept`` (not stored), ``shared`` (stored before), ``unpacked``: calls. ``stored``, ``bytes``:
        tensors at rest now; ``most``: bytes at most. ``made``: allocations; ``memory``, ``disk``: bytes taken, in use
        or not.
        """

    def close(self) -> None:
        """Free everything, and remove files. Again a no-op."""


class _Entry:
    """One tensor's elements at rest; all that was packed of them shares it."""

    def __init__(self, place: Place, nbytes: int, before: weakref.ref[_Entry] | None) -> None:
        self.place: Place | None = place
        self.nbytes, self.before = nbytes, before
        self.users, self.shared = 0, False
        self.common: Tensor | None = None  # what was brought, for all that share it


class _Kept:
    """A tensor that is not stored."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()  # or an output that is saved would keep its own graph
        self._version = None if tensor.is_inference() else version_of(tensor)

    def get(self) -> Tensor:
        if self._version is not None and (found := version_of(self._tensor)) != self._version:
            raise changed(found, self._version)
        return self._tensor


class _Packed:
    """What a graph holds of a stored tensor."""

    def __init__(self, entry: _Entry, dtype: torch.dtype, geometry: Geometry, gone: deque[_Entry]) -> None:
        self.entry, self.dtype, self.geometry, self._gone = entry, dtype, geometry, gone

    def __del__(self) -> None:
        self._gone.append(self.entry)  # no more than that: see Note [How long]


class Saved:
    """A store over something that keeps bytes.

    Args:
        rest: keeps them.
        device: whose tensors are stored.
        least: bytes of the smallest tensor that is stored.
    """

    def __init__(self, rest: Rest, device: torch.device, least: int = _LEAST) -> None:
        which = device.index if device.type != "cuda" or device.index is not None else torch.cuda.current_device()
        self.rest, self.device, self._least = rest, torch.device(device.type, which), least
        self._lock = threading.RLock()
        self._gone: deque[_Entry] = deque()
        self._entries: dict[int, _Entry] = {}  # by id, all that have a place
        self._last: weakref.ref[_Entry] | None = None  # that was packed
        self._known: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[Any, _Entry]]
        self._known = weakref.WeakKeyDictionary()  # by storage: a dead one's address may be another's
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
                "An input of a checkpointed module is asked for that is not stored any more: Store.clear() was called "
                "after this forward. Run backward before it, or forward again."
            )
        if not entry.shared or isinstance(self.rest, OnDevice):
            return entry.place.bring()
        if entry.common is None:
            entry.common = entry.place.bring()
        return entry.common.clone()

    def _look_ahead(self, entry: _Entry | None) -> None:
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
    """Where the block says that saved inputs rest; None: where they are.

    Args:
        block: says where.
        device: of the model.
        count: checkpointed modules.
        aio: how files are read and written; None: the defaults.
        rank: of this process, for files.

    Raises:
        SwapError: there can be no files in ``nvme_path``. Other ranks may have opened theirs.
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
