"""Memory that a disk can read and write directly, and checksums of it.

Note [Buffers and fork]
    Direct I/O into private memory while the process forks can end in the wrong copy of a page (open(2)), and a
    ``DataLoader`` forks whenever an epoch begins. Buffers are therefore not inherited (MADV_DONTFORK): the disk and
    the parent keep the only copy, and a child that touches one is killed by SIGSEGV. A child may have put something
    else at the address when it drops such a buffer, so there a buffer is never unmapped.

Note [Checksums]
    A block's sum is the weighted sum of its pages' sums, over 64-bit words with wrap-around. It runs at the speed of
    memory and without the GIL; CRC and hashes of the standard library are several times slower than the disk. Any
    change within one word is seen, since nothing that follows loses a bit of a page's sum (weights are odd); pages
    that changed places, since weights differ; blocks of other places or times, since sums are kept per block in
    memory and never read from the disk. A page's sum is folded before it is weighted: sums of round fp64 numbers
    have high bits only, which the product would push out. Not seen: words that changed places within a page, and
    changes of several words of a page that cancel out modulo 2**64.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import weakref

import torch
from torch import Tensor

log = logging.getLogger("lt_zero")

BLOCK = 4096  # alignment of memory, offsets and sizes
_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
_WORDS = BLOCK // 8  # int64 words of a page
_pin_failed: list[bool] = []  # that was told once
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_inherited: list[mmap.mmap] = []  # of a forked child
os.register_at_fork(after_in_child=lambda: _inherited.extend(_mapped))
_GOLDEN = -7046029254386353131  # 2**64 / golden ratio: its multiples are spread evenly


def rounded(nbytes: int, unit: int = BLOCK) -> int:
    """``nbytes`` rounded up to a multiple of ``unit``."""
    return -(-nbytes // unit) * unit


def aligned_buffer(nbytes: int) -> Tensor:
    """At least ``nbytes`` zeros (1D uint8), a multiple of ``BLOCK``, on whole pages: huge ones where there are some.

    The memory goes back to the system when the last tensor on it dies. See Note [Buffers and fork].
    """
    if nbytes < 0:
        raise ValueError(f"a buffer cannot hold {nbytes} bytes.")
    return torch.frombuffer(_map(nbytes), dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)  # 1D


def _map(nbytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, rounded(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if advice := getattr(mmap, name, None):
            try:
                pages.madvise(advice)
            except OSError:
                # A kernel without huge pages: slower (the disk gets a list of 4 KiB pages), and as correct.
                continue
    _mapped.add(pages)
    return pages  # a tensor's storage keeps it


def host_buffer(nbytes: int, pin: bool) -> Tensor:
    """An ``aligned_buffer`` that is page-locked if ``pin``, and there is enough of that.

    Registered, not allocated by torch: its allocator rounds up to powers of two, which is up to twice the memory.
    """
    if not pin or nbytes == 0 or _pin_failed:
        return aligned_buffer(nbytes)
    pages = _map(nbytes)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)  # 1D
    code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))
    if code == 0:
        address = buffer.data_ptr()
        weakref.finalize(buffer.untyped_storage(), _unregister, address, os.getpid(), pages).atexit = False
    else:
        _pin_failed.append(True)
        text = "%d bytes cannot be page-locked (CUDA error %d): pageable memory is used, copies wait. See ulimit -l."
        log.warning(text, nbytes, code)
    return buffer


def _unregister(address: int, pid: int, pages: mmap.mmap) -> None:
    # Holds the pages: they must be mapped until here.
    if os.getpid() == pid:
        torch.cuda.cudart().cudaHostUnregister(address)


def view_of(tensor: Tensor) -> memoryview:
    """The bytes of a 1D uint8 tensor, to be read and written in place. It does not keep the tensor alive."""
    # Not through numpy: a tensor that was exported to numpy can never give its storage back.
    return memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")


def check_buffer(tensor: Tensor, nbytes: int, what: str) -> None:
    """Refuse memory that direct I/O cannot use for ``what``, a record of ``nbytes``.

    Raises:
        ValueError: not 1D contiguous uint8 on the CPU, another size, or an address that is not aligned.
    """
    problem = None
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        layout = "contiguous" if tensor.is_contiguous() else "not contiguous"
        problem = f"the tensor is {tensor.dtype}, {tensor.dim()}D, {layout}, on {tensor.device}"
    elif tensor.numel() != nbytes:
        problem = f"the tensor has {tensor.numel()} bytes, the record {nbytes}"
    elif tensor.data_ptr() % BLOCK:
        problem = f"the tensor's address {tensor.data_ptr():#x} is not a multiple of {BLOCK}"
    if problem:
        raise ValueError(f"{what}: {problem}. Pass a slice of aligned_buffer() that begins and ends at full blocks.")


def checksum_weights(nbytes: int) -> Tensor:
    """Odd weights for the pages of a block of up to ``nbytes``."""
    return (torch.arange(nbytes // BLOCK) * 2 + 1) * _GOLDEN  # odd times odd: 1D int64


def checksum(block: Tensor, weights: Tensor) -> int:
    """The sum of a block (1D uint8, a multiple of ``BLOCK``). See Note [Checksums]."""
    pages = block.view(torch.int64).view(-1, _WORDS).sum(1)  # 1D
    folded = pages ^ ((pages >> 32) & 0xFFFFFFFF)
    return int((folded * weights[: pages.numel()]).sum())


def return_large_blocks() -> None:
    """Have malloc give every block of a megabyte or more back to the system when it is freed. A no-op without glibc.

    By default glibc raises that limit to the largest block that was ever freed, up to 32 MB, and keeps those below in
    its heap. Gradients and activations then leave holes there that are as large as what offloading saves.
    ``MALLOC_MMAP_THRESHOLD_`` in the environment has precedence.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def return_freed_memory() -> None:
    """Have malloc give the pages of all that was freed back to the system. A no-op without glibc."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return
