"""Measured speed of the disk, and the time that a step spends on I/O."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lt_zero.io.direct_file import SwapFile
from lt_zero.io.pinned import aligned_buffer, rounded
from lt_zero.io.private_folder import SwapFolder
from lt_zero.io.thread_pool import IoPool, Transfer

_SECONDS = 0.45  # per direction
_LEAST = 16 << 20  # bytes of a record: large enough that the latency of a request does not matter


class Speed(NamedTuple):
    """Bytes per second of one process on an otherwise idle disk."""

    read: float
    write: float


def probe(folder: SwapFolder, pool: IoPool, nbytes: int = 256 << 20) -> Speed:
    """Write and read a file of ``nbytes``, or as much of it as takes about a second.

    Raises:
        SwapError: the disk has too little space or fails.
    """
    size = rounded(max(1, min(nbytes, max(_LEAST, pool.threads * pool.block_size))))
    count = max(1, nbytes // size)
    folder.require(size * count)
    file = SwapFile(folder.path / f"probe-{secrets.token_hex(4)}", [size] * count, pool)
    try:
        buffers = [_noise(file.size_of(0)) for _ in range(2)]
        write = _run(file.write, count, buffers)
        return Speed(read=_run(file.read, write.records, buffers).speed, write=write.speed)
    finally:
        file.close()


def forecast(bytes_read: int, bytes_written: int, speed: Speed) -> float:
    """Seconds of disk time for these bytes; reads and writes share the disk."""
    return bytes_read / speed.read + bytes_written / speed.write


class _Run(NamedTuple):
    records: int
    speed: float  # bytes per second


def _run(transfer: Callable[[int, Tensor], Transfer], count: int, buffers: list[Tensor]) -> _Run:
    """Transfer records with two in flight, until all are done or ``_SECONDS`` have passed."""
    start, records = time.perf_counter(), 0
    moving: list[Transfer] = []
    while records < count and (records == 0 or time.perf_counter() - start < _SECONDS):
        if len(moving) == len(buffers):
            moving.pop(0).wait()
        moving.append(transfer(records, buffers[records % len(buffers)]))
        records += 1
    for last in moving:
        last.wait()
    seconds = max(time.perf_counter() - start, 1e-9)
    return _Run(records, records * buffers[0].numel() / seconds)


def _noise(nbytes: int) -> Tensor:
    """Incompressible bytes; leaves the global random generators alone."""
    buffer = aligned_buffer(nbytes)  # 1D
    piece = buffer[: min(nbytes, 4 << 20)]
    piece.random_(0, 256, generator=torch.Generator().manual_seed(nbytes))
    for first in range(0, nbytes, piece.numel()):
        part = buffer[first : first + piece.numel()]
        part.copy_(piece[: part.numel()])
    return buffer
