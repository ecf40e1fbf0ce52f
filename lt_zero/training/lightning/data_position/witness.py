"""The last batch that a loader has given, to find out whether a resumed run repeats the order of its samples."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lt_zero.common.random_states import RandomStates

_ELEMENTS = 1024  # of each tensor, at equal distances
_ITEMS = 256  # of each list or dictionary
_CHARACTERS = 1 << 12  # of each text


class Witness:
    """A batch that was read, and the states that it was read with.

    A resumed run reads the pass up to there again. If samples are drawn in the same order, the last of these batches
    has the same values once more, also if samples draw random numbers: it is read with the same states.

    Args:
        batch: was read. Some of its values are copied, since training may change it; their checksum is only computed
            for a checkpoint, as this is done for each batch.
        states: before it was read.
        stays: whether the batch is never changed in place. Its values are then read when they are needed, not copied.
        size: the number of samples of the data set, if ``batch`` is it and the indices of a batch; None: it is unknown.
    """

    def __init__(self, batch: Any, states: RandomStates, stays: bool = False, size: int | None = None) -> None:
        self.states = states
        self.size = size
        self._some: Iterable[Any] = _some_of(batch) if stays else list(_some_of(batch))
        self._digest: int | None = None

    @property
    def digest(self) -> int:
        """A checksum of the batch."""
        if self._digest is None:
            self._digest = _checksum(self._some)
        return self._digest

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors."""
        return {"digest": self.digest, "size": self.size, "states": self.states.state_dict()}

    @classmethod
    def of(cls, packed: Any, where: str) -> Witness:
        """Restore from ``state_dict``. Raises: CheckpointError."""
        from lt_zero.common.saved_random_states import read_states

        witness = cls(None, read_states(packed["states"], where), size=packed.get("size"))
        witness._digest = packed["digest"]
        return witness

    @staticmethod
    def can_be_read(packed: Any) -> bool:
        """True if ``of`` can restore from it, but for the random states."""
        whole = isinstance(packed, dict) and isinstance(packed.get("digest"), int)
        # Checkpoints from before sizes were saved have none.
        return whole and isinstance(packed.get("size"), (int, type(None)))

    def saw(self, batch: Any) -> bool:
        """True if a batch has the values of the one that was read."""
        return _checksum(_some_of(batch)) == self.digest


def _some_of(batch: Any) -> Iterator[Any]:
    """Values that stand for a batch: elements of its tensors and arrays, numbers, and beginnings of texts."""
    if isinstance(batch, Tensor):
        yield batch.shape, batch.dtype
        if batch.device.type == "cpu" and batch.layout == torch.strided and not batch.is_quantized and batch.numel():
            yield _elements(batch.detach())
    elif isinstance(batch, np.ndarray):
        yield batch.shape, batch.dtype
        if batch.dtype != object and batch.size:
            yield batch.flat[:: max(1, batch.size // _ELEMENTS)]
    elif isinstance(batch, Mapping):
        for key in islice(batch, _ITEMS):
            yield key
            yield from _some_of(batch[key])
    elif isinstance(batch, (list, tuple)):
        yield len(batch)
        for value in batch[:: max(1, len(batch) // _ITEMS)]:
            yield from _some_of(value)
    elif isinstance(batch, (str, bytes)):
        yield batch[:_CHARACTERS]
    elif isinstance(batch, (int, float)):
        yield batch


def _elements(tensor: Tensor) -> Tensor:
    """Copies of some elements, without a copy of all: in the order of memory where they are dense."""
    if not tensor.is_contiguous() and torch.ops.aten.is_non_overlapping_and_dense(tensor):
        tensor = tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)[:: max(1, tensor.numel() // _ELEMENTS)].clone()


def _checksum(values: Any) -> int:
    found = 0
    for value in values:
        if isinstance(value, Tensor):
            part = bytes(value.contiguous().view(torch.uint8).numpy().data)
        else:
            part = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
        found = zlib.crc32(part, found)
    return found
