"""Bytes of tensors where they are stored. Pure data, also for forecasts."""

from __future__ import annotations

import torch

from lt_zero.ops.codecs import Codec


def record_nbytes(numel: int, dtype: torch.dtype, codec: Codec | None = None) -> int:
    """Bytes of a tensor of ``numel`` elements; ``codec``: it rests encoded. Files round them up to full blocks."""
    return numel * dtype.itemsize if codec is None else codec.nbytes(numel)
