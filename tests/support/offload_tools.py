"""What the tests of NVMe offload share."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lt_zero.core.stores.pinned import aligned_buffer
from lt_zero.offload.swap_file import SwapFile


def noise(nbytes: int, seed: int = 0) -> Tensor:
    buffer = aligned_buffer(nbytes)
    return buffer.random_(0, 256, generator=torch.Generator().manual_seed(seed))


def write(file: SwapFile, record: int, seed: int = 0) -> Tensor:
    source = noise(file.size_of(record), seed)
    file.write(record, source).wait()
    return source


def read(file: SwapFile, record: int) -> Tensor:
    target = aligned_buffer(file.size_of(record))
    file.read(record, target).wait()
    return target


def change(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as raw:
        raw.seek(offset)
        raw.write(content)
        os.fsync(raw.fileno())


def in_child(work: Callable[[], None]) -> int:
    """Run in a forked process, without its exit handlers; its status."""
    if (pid := os.fork()) == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def fail_with(code: int) -> Callable[[int, memoryview, int], int]:
    def call(fd: int, view: memoryview, offset: int) -> int:
        raise OSError(code, os.strerror(code))

    return call
