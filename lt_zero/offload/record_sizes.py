"""Bytes of tensors where they are stored. Pure data, also for forecasts."""

from __future__ import annotations

from typing import Protocol

import torch


class Sized(Protocol):
    """A code with a fixed number of bytes."""

    def nbytes(self, numel: int) -> int: ...


def record_nbytes(numel: int, dtype: torch.dtype, codec: Sized | None = None) -> int:
    """Bytes of a tensor of ``numel`` elements; ``codec``: it rests encoded. Files round them up to full blocks."""
    return numel * dtype.itemsize if codec is None else codec.nbytes(numel)
