"""How fast the disk is, measured at start, and what a step will spend on it."""

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

_SECONDS = 0.45  # for each direction
_LEAST = 16 << 20  # bytes of a record: enough for the start of a request not to count


class Speed(NamedTuple):
    """Bytes per second, of one process while nobody else uses the disk."""

    read: float
    write: float


def probe(folder: SwapFolder, pool: IoPool, nbytes: int = 256 << 20) -> Speed:
    """Write and read a file of ``nbytes``, or as much of it as can be done in about a second.

    Raises:
        SwapError: too little space, or the disk fails.
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
    """Seconds that the disk is busy with that: reads and writes share it."""
    return bytes_read / speed.read + bytes_written / speed.write


class _Run(NamedTuple):
    records: int
    speed: float  # bytes per second


def _run(transfer: Callable[[int, Tensor], Transfer], count: int, buffers: list[Tensor]) -> _Run:
    """Move records one after the other, two at a time, until all are or the time is over."""
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
    """Bytes that a disk or a file system cannot compress, without touching the global generators."""
    buffer = aligned_buffer(nbytes)  # 1D
    piece = buffer[: min(nbytes, 4 << 20)]
    piece.random_(0, 256, generator=torch.Generator().manual_seed(nbytes))
    for first in range(0, nbytes, piece.numel()):
        part = buffer[first : first + piece.numel()]
        part.copy_(piece[: part.numel()])
    return buffer
