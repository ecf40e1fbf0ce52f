"""Gradients that a compressed reduction has not sent yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Residuals(NamedTuple):
    """Compression errors of one bucket that were not sent yet, in the units in which its gradients are sent.

    Attributes:
        worker: 1D fp32, all elements: of this rank's gradients; empty: what codes do not represent is lost.
        server: 1D fp32, this rank's shard: of the sums that it owns; None if they are not sent on.
        gaps: elements [lo, hi) that belong to no parameter; codes of few bits would make them other than zero.
        shard_gaps: those of this rank's shard, counted from its first element.
    """

    worker: Tensor
    server: Tensor | None = None
    gaps: Sequence[tuple[int, int]] = ()
    shard_gaps: Sequence[tuple[int, int]] = ()
