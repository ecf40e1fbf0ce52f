"""The last batch that a loader has given, to find out whether a resumed run repeats the order of its samples."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lt_zero.lightning.data_position.random_state import RandomStates

_BYTES = 1 << 16  # of each tensor


@dataclass(frozen=True)
class Witness:
    """A batch that was read, and the states that it was read with.

    A resumed run reads the pass up to there again. If samples are drawn in the same order, the last of these batches
    has the same values once more, also if samples draw random numbers: it is read with the same states.
    """

    digest: int
    states: RandomStates  # before it was read

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors."""
        return {"digest": self.digest, "states": self.states.state_dict()}

    @classmethod
    def of(cls, packed: Any, where: str) -> Witness:
        """Restore from ``state_dict``. Raises: CheckpointError."""
        return cls(packed["digest"], RandomStates.of(packed["states"], where))


def digest(batch: Any) -> int:
    """A checksum of a batch: of the beginnings of its tensors and arrays, of its numbers and texts."""
    found = 0
    for part in _bytes_of(batch):
        found = zlib.crc32(part, found)
    return found


def _bytes_of(batch: Any) -> Iterator[bytes]:
    if isinstance(batch, Tensor):
        yield repr((tuple(batch.shape), batch.dtype)).encode()
        if batch.device.type == "cpu" and batch.layout == torch.strided and not batch.is_quantized:
            count = max(1, _BYTES // batch.element_size())
            some = batch.detach().reshape(-1)[:count].contiguous().clone()
            yield bytes(some.view(torch.uint8).numpy().data) if some.numel() else b""
    elif isinstance(batch, np.ndarray):
        yield repr((batch.shape, batch.dtype)).encode()
        yield batch.reshape(-1)[:_BYTES].tobytes() if batch.dtype != object else b""
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield repr(key).encode()
            yield from _bytes_of(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _bytes_of(value)
    elif isinstance(batch, bytes):
        yield batch[:_BYTES]
    elif isinstance(batch, str | int | float | bool):
        yield repr(batch).encode()[:_BYTES]
