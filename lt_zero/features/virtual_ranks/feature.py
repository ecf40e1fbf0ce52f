"""``reproducible``: a run has the same bits at any number of data ranks that divides the number of virtual ranks."""

from __future__ import annotations

from lt_zero.core.feature import Feature


class VirtualRanks(Feature):
    """Micro-batches of virtual ranks, whose gradients are added in one order, whichever ranks run them."""

    needs_one_model = "reproducible.virtual_ranks"
