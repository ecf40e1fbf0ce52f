"""Flat storage that can be freed and reallocated while views of it stay valid.

Note [Pages on the CPU]
    Freeing and allocating megabytes through malloc once per unit and step fragments the heap: resident memory creeps
    up to that of an unsharded model. On Linux the storage is therefore its own anonymous mapping. ``free`` returns its
    pages to the system at once, the next write faults fresh ones in, in huge pages where the system grants them. A
    stale view reads zeros instead of crashing.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import time

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lt_zero.common.compat import storage_references

_SMALL = 1 << 18  # bytes
_PAGES = sys.platform == "linux" and hasattr(mmap, "MADV_DONTNEED")


class FlatStorage:
    """One 1D tensor of ``numel`` zeros whose memory can be freed and allocated."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        nbytes = numel * dtype.itemsize
        self._pages: mmap.mmap | None = None
        if _PAGES and device.type == "cpu" and nbytes > 0:
            self._pages = anonymous_pages(nbytes, "MADV_HUGEPAGE")
            self.tensor: Tensor = torch.frombuffer(self._pages, dtype=dtype, count=numel)
        else:
            self.tensor = torch.zeros(numel, dtype=dtype, device=device)
        self._nbytes = nbytes
        self._storage = self.tensor.untyped_storage()
        self._own = 0  # references of its owner

    @property
    def references(self) -> int:
        """The number of tensors that lie in this storage (``tensor`` and views of it), and of references to itself."""
        return storage_references(self._storage) + sys.getrefcount(self._storage)

    def note_own(self) -> None:
        """Note that all references are the owner's now."""
        self._own = self.references

    @property
    def held(self) -> bool:
        """True if there are more references to the memory than at ``note_own``; False before it was called."""
        return 0 < self._own < self.references

    def await_readers(self, tries: int = 20) -> None:
        """Wait for I/O threads to let go of the memory: they do so a moment after their transfer was waited for."""
        while tries > 0 and self.held:
            time.sleep(0.0005)
            tries -= 1

    def allocate(self) -> None:
        """Make the memory usable again; its content is undefined."""
        if self._pages is None and self._storage.nbytes() < self._nbytes:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        """Free the memory; only ``allocate`` may follow."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)
        elif self._storage.resizable():  # fails if a numpy array shares the storage
            self._storage.resize_(0)


def anonymous_pages(nbytes: int, *advice: str) -> mmap.mmap:
    """A private mapping of zeros with ``advice`` for madvise, as far as the kernel knows it."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for name in advice:
        with contextlib.suppress(OSError, AttributeError):
            pages.madvise(getattr(mmap, name))
    return pages


def with_own_storage(view: Tensor) -> Tensor:
    """The memory of a contiguous ``view`` as a tensor whose storage is these elements alone.

    What looks at storages takes a view for all of its storage: ``torch.save`` writes all of it, and safetensors refuses
    it. The memory is freed with the last tensor in it, as for views. A view of a device or dtype for which torch has no
    DLPack is returned as it is.
    """
    if view.numel() == 0:
        return torch.empty_like(view)
    try:
        return from_dlpack(view)
    except (BufferError, RuntimeError, TypeError, ValueError):
        return view


def brief_empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized 1D tensor for a part of a step: a small one is from the heap, whose pages stay mapped."""
    small = numel * dtype.itemsize <= _SMALL
    return torch.empty(numel, dtype=dtype, device=device) if small else flat_empty(numel, dtype, device)


def flat_empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized 1D tensor for the whole run, on huge pages where available."""
    if device.type != "cpu":
        return torch.empty(numel, dtype=dtype, device=device)
    return FlatStorage(numel, dtype, device).tensor
