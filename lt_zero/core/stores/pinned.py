"""Page-aligned and pinned host memory for direct I/O, buffers of it for reuse, and checksums of it.

Note [Buffers and fork]
    Direct I/O into private memory while the process forks can reach the wrong copy of a page (open(2)), and a
    ``DataLoader`` forks at the start of every epoch. Buffers are therefore not inherited (MADV_DONTFORK): only the
    parent has them, and a child that touches one is killed by SIGSEGV. A child never unmaps a buffer, because it may
    have mapped something else at that address.

Note [Checksums]
    A block's checksum is the weighted sum of its pages' sums, over 64-bit words with wrap-around. It runs at memory
    speed and without the GIL; the CRC and hashes of the standard library are several times slower than the disk.
    Detected: any change within one word, since odd weights lose no bit of a page's sum; swapped pages, since weights
    differ; blocks from another offset or an earlier write, since checksums are kept per block in memory and never read
    from the disk. A page's sum is folded before it is weighted: sums of round fp64 numbers have high bits only, which
    the product would shift out. Not detected: swapped words within a page, and changes of several words of a page that
    cancel modulo 2**64.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lt_zero.common import accelerator
from lt_zero.common.flat_storage import anonymous_pages

log = logging.getLogger("lt_zero")

BLOCK = 4096  # alignment of memory, offsets and sizes
_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
_WORDS = BLOCK // 8  # int64 words of a page
_pin_failed: list[bool] = []  # not empty: pinning failed once, which was logged
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_inherited: list[mmap.mmap] = []  # in a forked child: keeps the parent's buffers from being unmapped
os.register_at_fork(after_in_child=lambda: _inherited.extend(_mapped))
_GOLDEN = -7046029254386353131  # 2**64 / golden ratio: its multiples are evenly distributed


def rounded(nbytes: int, unit: int = BLOCK) -> int:
    """``nbytes`` rounded up to a multiple of ``unit``."""
    return -(-nbytes // unit) * unit


def aligned_buffer(nbytes: int) -> Tensor:
    """At least ``nbytes`` zeros (1D uint8, a multiple of ``BLOCK``), page-aligned, on huge pages where possible.

    The memory is unmapped when the last tensor on it dies. See Note [Buffers and fork].
    """
    if nbytes < 0:
        raise ValueError(f"a buffer cannot hold {nbytes} bytes.")
    return torch.frombuffer(_map(nbytes), dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)  # 1D


def _map(nbytes: int) -> mmap.mmap:
    # Without huge pages I/O is slower (requests are lists of 4 KiB pages), but correct.
    pages = anonymous_pages(rounded(nbytes), "MADV_HUGEPAGE", "MADV_DONTFORK")
    _mapped.add(pages)
    return pages  # the tensor's storage keeps it alive


def host_buffer(nbytes: int, pin: bool) -> Tensor:
    """An ``aligned_buffer``, pinned if ``pin`` and if the system allows it.

    The memory is registered with the driver instead of allocated by torch, whose allocator rounds up to powers of two.
    """
    if not pin or nbytes == 0 or _pin_failed:
        return aligned_buffer(nbytes)
    pages = _map(nbytes)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)  # 1D
    code = accelerator.register(buffer)
    if code == 0:
        address = buffer.data_ptr()
        weakref.finalize(buffer.untyped_storage(), _unregister, address, os.getpid(), pages).atexit = False
    else:
        _pin_failed.append(True)
        text = "Cannot pin %d bytes (error %d): using pageable memory, so copies block the host. See ulimit -l."
        log.warning(text, nbytes, code)
    return buffer


def _unregister(address: int, pid: int, pages: mmap.mmap) -> None:
    # ``pages`` keeps the memory mapped until here.
    if os.getpid() == pid:
        accelerator.unregister(address)


class BufferPool:
    """Buffers of stored tensors; a freed buffer is reused without faulting in new pages. Thread-safe.

    Args:
        spare: number of free buffers that are kept.
        make: allocates a 1D uint8 tensor of at least the given number of bytes.
    """

    def __init__(self, spare: int = 2, make: Callable[[int], Tensor] = aligned_buffer) -> None:
        self._make = make
        self._usual, self._spare, self._free = spare, spare, list[Tensor]()
        self._reservations = 0  # that are open
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """An uninitialized buffer (1D uint8) of at least ``nbytes``."""
        with self._lock:
            fitting = [b for b in self._free if nbytes <= b.numel() <= nbytes + nbytes // 4]
            if fitting:
                best = min(fitting, key=lambda b: b.numel())
                self._free = [b for b in self._free if b is not best]
                return best
        return self._make(nbytes)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer, which the caller must not use again."""
        with self._lock:
            self._free = [*self._free, buffer][-self._spare :]

    @property
    def nbytes(self) -> int:
        """Bytes of free buffers."""
        return sum(buffer.numel() for buffer in self._free)

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Keep ``count`` free buffers while buckets are streamed through memory."""
        with self._lock:
            self._reservations, self._spare = self._reservations + 1, max(self._spare, count)
        try:
            yield
        finally:
            with self._lock:
                self._reservations -= 1
                if not self._reservations:
                    self._spare, self._free = self._usual, self._free[-self._usual :]


def view_of(tensor: Tensor) -> memoryview:
    """A writable view of the bytes of a 1D uint8 tensor. It does not keep the tensor alive."""
    # Not through numpy: a tensor that was exported to numpy can never free its storage.
    return memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")


def check_buffer(tensor: Tensor, nbytes: int, what: str) -> None:
    """Check that direct I/O can use ``tensor`` for a record of ``nbytes``; ``what`` begins the error message.

    Raises:
        ValueError: ``tensor`` is not 1D contiguous uint8 on the CPU, has another size, or is not aligned.
    """
    problem = ""
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        layout = "contiguous" if tensor.is_contiguous() else "not contiguous"
        problem = f"the tensor is {tensor.dtype}, {tensor.dim()}D, {layout}, on {tensor.device}"
    elif tensor.numel() != nbytes:
        problem = f"the tensor has {tensor.numel()} bytes, the record {nbytes}"
    elif tensor.data_ptr() % BLOCK:
        problem = f"the tensor's address {tensor.data_ptr():#x} is not a multiple of {BLOCK}"
    if problem:
        raise ValueError(f"{what}: {problem}. Pass a slice of aligned_buffer() that consists of full blocks.")


@functools.cache
def _weights(pages: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Odd weights for the pages of a block (1D)."""
    return (np.arange(pages) * 2 + 1) * _GOLDEN  # odd times odd is odd


def checksum(block: Tensor) -> int:
    """The checksum of a block (1D uint8, a multiple of ``BLOCK``). See Note [Checksums].

    By numpy, which has no threads of its own: torch would start a team of them for each thread that calls this.
    """
    pages = np.frombuffer(view_of(block), dtype=np.int64).reshape(-1, _WORDS).sum(1)  # 1D
    folded = pages ^ ((pages >> 32) & 0xFFFFFFFF)
    return int((folded * _weights(len(pages))).sum())


def return_large_blocks() -> None:
    """Make malloc return freed blocks of a megabyte or more to the system. A no-op without glibc.

    By default glibc raises this threshold to the largest block that was ever freed, up to 32 MB, and keeps smaller
    blocks in its heap. Fragmentation by gradients and activations then costs as much memory as offloading saves.
    ``MALLOC_MMAP_THRESHOLD_`` in the environment takes precedence.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def return_freed_memory() -> None:
    """Make malloc return all freed pages to the system. A no-op without glibc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
