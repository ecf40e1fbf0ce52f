"""The options of threads for disk I/O (thread_pool.py), and the error of what they cannot read or write."""

from __future__ import annotations

from dataclasses import dataclass


class SwapError(RuntimeError):
    """Data cannot be written to or read from the disk, or is corrupt. The message names the remedy."""


@dataclass(frozen=True)
class IoOptions:
    """Options of an ``IoPool``; the attributes are its arguments of the same names."""

    threads: int
    block_size: int
    queue_depth: int
    checksum: bool
