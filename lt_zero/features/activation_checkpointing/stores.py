"""Stores the inputs of checkpointed modules between forward and backward.

``torch.utils.checkpoint`` saves them through autograd, so a store only needs
``with store.saving(...)`` around a checkpointed call (ZeRO-R's activation checkpoints in host memory, arXiv:1910.02054
section 6.1, and ZeRO-Infinity's, arXiv:2104.07857 section 5.1.2).

Note [What is stored]
    Plain dense tensors on the store's device of at least ``least`` bytes, and such parts of DTensors. Not stored are
    parameters and views of them, sparse, nested, quantized and lazily conjugated tensors, other subclasses, tensors of
    other devices, and tensors with overlapping elements. For these the version is checked: an in-place write before
    backward raises autograd's error, as without a store. A tensor that several modules get (a mask, a rotary table) is
    stored once; it is identified by its storage, the elements it shows, and its version.

Note [Lifetime]
    A packed tensor belongs to the graph: it can be unpacked as often as backward runs (retain_graph), and its memory is
    freed with the graph. A graph can be freed in the middle of any call, so its finalizer only queues the tensor, and
    the next call frees the memory. A graph that is kept alive keeps its stored tensors. ``clear`` frees them anyway.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lt_zero.common import accelerator
from lt_zero.common.compat import version_of, view_base
from lt_zero.common.compat.of_distributed_tensors import local_of
from lt_zero.core.stores.io_options import SwapError
from lt_zero.features.activation_checkpointing.saved_activations import Storage, changed

_MIN_BYTES = 4096  # bytes; storing a smaller tensor costs more than it saves
_PREFETCH = 2  # tensors to prefetch in backward


@dataclass(frozen=True)
class Geometry:
    """Shape and strides of a tensor, and where its distinct elements lie in storage.

    Only the elements that a tensor shows are stored, not its whole storage: of an expanded tensor those before the
    expand, of a slice the slice. A restored tensor has the same strides: kernels choose the order of summation by them.

    Attributes:
        shape: of the tensor.
        strides: of the tensor, in elements.
        sides, steps: shape and strides of the distinct elements by decreasing stride, in as few dimensions as possible.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    sides: tuple[int, ...]
    steps: tuple[int, ...]

    def elements(self, tensor: Tensor) -> Tensor:
        """The distinct elements (1D) of ``tensor``; a copy if there are others between them."""
        return tensor.as_strided(self.sides, self.steps, tensor.storage_offset()).contiguous().view(-1)

    def restore(self, elements: Tensor) -> Tensor:
        """The tensor with these elements (1D); a view of them if there are no others between them."""
        span = 1 + sum((side - 1) * step for side, step in zip(self.sides, self.steps, strict=True))
        # There were other elements between them. They are not restored, but the strides are.
        if span > elements.numel():
            spread = elements.new_empty(span)  # 1D
            spread.as_strided(self.sides, self.steps).copy_(elements.view(self.sides))
            elements = spread
        return elements.as_strided(self.shape, self.strides)


def geometry_of(tensor: Tensor) -> Geometry | None:
    """The layout of ``tensor``; None if it is empty, or if elements overlap in another way than by ``expand``."""
    if tensor.numel() == 0:
        return None
    span = 1
    sides = deque[int]()
    steps = deque[int]()
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    for step, side in sorted((step, side) for step, side in pairs if side > 1 and step > 0):
        if step < span:
            return None
        span += (side - 1) * step
        if steps and step == steps[0] * sides[0]:
            sides[0] *= side
        else:
            sides.appendleft(side)
            steps.appendleft(step)
    return Geometry(tuple(tensor.shape), tuple(tensor.stride()), tuple(sides), tuple(steps))


class Shown(NamedTuple):
    """The view of stored elements that gives the saved tensor back.

    Attributes:
        dtype: of the elements.
        geometry: of this rank's part of the tensor.
        version: of the tensor.
        rebuild: makes a DTensor of this rank's part; None: the part is the tensor.
    """

    dtype: torch.dtype
    geometry: Geometry
    version: int
    rebuild: Callable[[Tensor], Tensor] | None

    def key(self, local: Tensor) -> tuple[Any, ...]:
        """The elements of its storage that ``local`` shows, and their version."""
        return local.storage_offset(), local.dtype, self.version, self.geometry.sides, self.geometry.steps

    def take(self, local: Tensor) -> Tensor:
        """The bytes (1D uint8) of the elements of ``local``; its memory unless a write there would not be seen."""
        elements = self.geometry.elements(local).view(torch.uint8)
        return elements.clone() if self.rebuild is not None else elements  # a DTensor counts versions by itself

    def give(self, elements: Tensor) -> Tensor:
        """The tensor with these bytes (1D uint8)."""
        local = self.geometry.restore(elements.view(self.dtype))
        return self.rebuild(local) if self.rebuild is not None else local


class SavedBytes(Protocol):
    """The bytes of one saved tensor, wherever they are (``StoredActivation``, or a part of it on each rank)."""

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""

    def prefetch(self) -> bool:
        """Start to bring them; False if there is no buffer for that."""

    def bring(self) -> Tensor:
        """All of them on the device, 1D uint8."""

    def free(self) -> None:
        """Release the memory. The last call on this object."""


class InputStore(Protocol):
    """Keeps the saved inputs of recomputed modules (``ActivationStore``)."""

    def saving(self, name: str, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Context for a call of module ``name`` that saves ``tensors``."""


class SavedElements:
    """The stored elements of a tensor; the graphs' handles of all tensors with these elements share it."""

    def __init__(self, stored: SavedBytes, before: weakref.ref[SavedElements] | None, gone: deque[SavedBytes]) -> None:
        self.stored: SavedBytes | None = stored
        self.before = before
        self.shared = False
        self.common: Tensor | None = None  # the copy on the device, if the entry is shared
        self._gone = gone

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes if self.stored is not None else 0

    def __del__(self) -> None:
        if self.stored is not None:
            self._gone.append(self.stored)  # nothing else: see Note [Lifetime]


def _unchanged(tensor: Tensor, version: int | None) -> Tensor:
    if version is not None and (found := version_of(tensor)) != version:
        raise changed(found, version)
    return tensor


class ActivationStore:
    """Stores the tensors that autograd saves: decides which, and shares, prefetches and frees them. Thread-safe.

    Args:
        storage: stores the bytes.
        device: whose tensors are stored.
        least: minimum bytes of a stored tensor; default: 4096.
    """

    def __init__(self, storage: Storage, device: torch.device, least: int | None = None) -> None:
        self.storage = storage
        self.device = accelerator.with_index(device)
        self._least = _MIN_BYTES if least is None else least
        # Tensors with the same elements share one copy on the device, if another one costs more than memory.
        self._shares_copies = not storage.is_at_hand
        self._lock = threading.RLock()
        self._gone: deque[SavedBytes] = deque()
        self._entries: weakref.WeakSet[SavedElements] = weakref.WeakSet()  # owned by the graphs
        self._last: weakref.ref[SavedElements] | None = None  # packed last
        self._known: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[Any, SavedElements]]
        # Keyed by the storage object, since addresses are reused.
        self._known = weakref.WeakKeyDictionary()  # storage -> elements shown -> entry
        self._counts = dict.fromkeys(("packed", "kept", "shared", "unpacked", "stored", "bytes", "most"), 0)

    @property
    def problem(self) -> SwapError | None:
        """The first I/O error. Tensors are NaN afterwards; the ranks agree on raising (offload/nvme_store.py)."""
        return self.storage.problem

    @contextmanager
    def saving(self, name: str, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Context for a call of module ``name`` that saves ``tensors``."""
        with saved_tensors_hooks(self.pack, self.unpack):
            yield

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Store a tensor that autograd saves; returns the graph's handle of it."""
        with self._lock, torch.no_grad():
            self._reap()
            self._counts["packed"] += 1
            if (found := self._stored_elements(tensor)) is None:
                self._counts["kept"] += 1
                # Detached: a saved output would otherwise keep its own graph alive.
                return partial(_unchanged, tensor.detach(), None if tensor.is_inference() else version_of(tensor))
            entry, is_new = self._entry_of(*found)
            if not is_new:
                self._share(entry)
            return partial(self._restore, entry, found[1])

    def unpack(self, packed: Callable[[], Tensor]) -> Tensor:
        """A tensor of the same values, dtype, shape, strides and device, detached.

        Raises:
            RuntimeError: the tensor was changed in place, or freed by ``clear``.
        """
        return packed()

    def _restore(self, entry: SavedElements, shown: Shown) -> Tensor:
        with self._lock, torch.no_grad():
            self._reap()
            self._counts["unpacked"] += 1
            found = self._bring(entry)
            self._prefetch_before(entry)
            return shown.give(found)

    def _stored_elements(self, tensor: Tensor) -> tuple[Tensor, Shown] | None:
        """The elements of ``tensor`` to store, and their view; None: it is not stored. See Note [What is stored]."""
        if tensor.is_inference():
            return None
        local, rebuild = local_of(tensor)
        if type(local) is not Tensor or local.layout != torch.strided or local.device != self.device:
            return None
        if local.is_nested or local.is_quantized or local.is_conj() or local.is_neg():
            return None
        if local.numel() * local.element_size() < self._least or isinstance(view_base(tensor), nn.Parameter):
            return None
        geometry = geometry_of(local)
        if geometry is None:
            return None
        return local.detach(), Shown(local.dtype, geometry, version_of(tensor), rebuild)

    def _entry_of(self, local: Tensor, shown: Shown) -> tuple[SavedElements, bool]:
        """The entry with the elements of ``local``, and whether there was none before."""
        known = self._known.setdefault(local.untyped_storage(), weakref.WeakValueDictionary())
        entry = known.get(key := shown.key(local))
        # ``clear`` may have emptied the entry of a graph that is still alive.
        if entry is not None and entry.stored is not None:
            return entry, False
        known[key] = entry = self._new_entry(shown.take(local))
        return entry, True

    def _new_entry(self, elements: Tensor) -> SavedElements:
        """An entry of bytes (1D uint8)."""
        entry = SavedElements(self._put(elements), self._last, self._gone)
        self._entries.add(entry)
        # Weak, as the chain to earlier entries is: an entry has to die with its graph.
        self._last = weakref.ref(entry)
        self._counts["stored"] += 1
        self._counts["bytes"] += entry.nbytes
        self._counts["most"] = max(self._counts["most"], self._counts["bytes"])
        return entry

    def _put(self, elements: Tensor) -> SavedBytes:
        return self.storage.put(elements)

    def _share(self, entry: SavedElements) -> None:
        entry.shared = True
        self._counts["shared"] += 1

    def _bring(self, entry: SavedElements) -> Tensor:
        if entry.stored is None:
            raise RuntimeError(
                "The input of a checkpointed module was freed: ActivationStore.clear() was called after this forward. "
                "Run backward before it, or run forward again."
            )
        if not (entry.shared and self._shares_copies):
            return entry.stored.bring()
        if entry.common is None:
            entry.common = entry.stored.bring()
        # Recomputation may write to what it gets, and the other users are still to come.
        return entry.common.clone()

    def _prefetch_before(self, entry: SavedElements | None) -> None:
        # Backward unpacks in reverse order. What was packed before is copied while the calling module is computed.
        for _ in range(_PREFETCH):
            entry = entry.before() if entry is not None and entry.before is not None else None
            if entry is None or (entry.stored is not None and entry.common is None and not entry.stored.prefetch()):
                return

    def _reap(self) -> None:
        while self._gone:
            # A finalizer may append meanwhile, in any thread; a deque allows that.
            stored = self._gone.popleft()
            self._counts["stored"] -= 1
            self._counts["bytes"] -= stored.nbytes
            stored.free()

    def end_backward(self) -> None:
        """Free tensors that no graph holds, after a backward has ended or failed. See Note [Lifetime]."""
        with self._lock:
            self._reap()
            # With several forwards before their backwards the pass ends with the last of them.
            if not self._counts["stored"]:
                self.storage.end_pass()

    def clear(self) -> None:
        """Free everything, also tensors that live graphs hold."""
        with self._lock:
            for entry in list(self._entries):
                if entry.stored is not None:
                    self._gone.append(entry.stored)
                    entry.stored = entry.common = None
            self._reap()
            self.storage.end_pass()

    def stats(self) -> dict[str, int]:
        """Counts and bytes so far.

        ``packed``, ``kept`` (not stored), ``shared`` (stored before), ``unpacked``: calls. ``stored``, ``bytes``:
        tensors stored now; ``most``: peak of ``bytes``. ``made``: allocations; ``memory``, ``disk``: bytes allocated,
        in use or not.
        """
        with self._lock:
            self._reap()
            return {**self._counts, **self.storage.stats()}

    def close(self) -> None:
        """Free everything and remove files. Idempotent."""
        self.clear()
        self.storage.close()
