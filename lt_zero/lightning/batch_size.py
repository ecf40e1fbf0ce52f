"""The number of samples of a batch of any structure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def rows_of(batch: Any) -> int | None:
    """The first dimension of the first tensor that has one; None if there is none."""
    try:
        return next(sizes_of(batch), None)
    except RecursionError:
        return None


def sizes_of(batch: Any) -> Iterator[int]:
    """The first dimension of all tensors that have one. Does not read iterators (of the data loader).

    Raises:
        RecursionError: the batch contains itself.
    """
    if isinstance(batch, Tensor):
        yield from batch.shape[:1]
    elif isinstance(batch, Mapping):
        yield from sizes_of(list(batch.values()))
    elif isinstance(batch, (list, tuple)):
        for entry in batch:
            yield from sizes_of(entry)
    elif is_dataclass(batch) and not isinstance(batch, type):
        yield from sizes_of([getattr(batch, field.name) for field in fields(batch)])
