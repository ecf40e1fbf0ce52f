"""The reduced gradients of one optimizer between backward and step, read and scaled in the accumulators.

Note [Unused parameters]
    A zero gradient is not "no gradient": AdamW would decay and move a parameter that no rank used. The ranks agree
    on the used parameters, and fragments of the others have ``grad=None`` in this step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lt_zero.engine.bucket import Bucket
from lt_zero.engine.layout import ALIGN
from lt_zero.engine.visible_grads import is_view

if TYPE_CHECKING:
    from lt_zero.step.sharded_optimizer import ShardedOptimizer


class ReducedGrads:
    """The accumulated gradients of one optimizer's parameters, including parameters in no bucket."""

    def __init__(self, sharded: ShardedOptimizer) -> None:
        self._sharded, self._engine = sharded, sharded.engine

    # ---- which there are ---------------------------------------------------------------------------------------

    def used(self) -> dict[Bucket, list[int]]:
        """The parameters that have a gradient on any rank, in order. Collective."""
        used = self._engine.finish_reductions()
        found: dict[Bucket, list[int]] = {}
        for bucket, index, _ in self._sharded.places():
            if used(bucket, index):
                found.setdefault(bucket, []).append(index)
        return {bucket: sorted(indices) for bucket, indices in found.items()}

    def exist(self) -> bool:
        """Whether any rank has a gradient for this optimizer; the same answer on all ranks. Collective."""
        used = self._engine.finish_reductions()
        return bool(self._foreign()) or any(used(b, i) for b, i, _ in self._sharded.places())

    def _foreign(self) -> list[Tensor]:
        """The gradients of parameters that the engine does not own."""
        return [p.grad for p in self._sharded.parameters() if id(p) not in self._engine.owner and p.grad is not None]

    # ---- their values ------------------------------------------------------------------------------------------

    def by_bucket(self, write: bool = False) -> Iterator[list[Tensor]]:
        """This rank's gradients (1D rows) of the parameters that any rank used, bucket by bucket. Collective.

        Neighbours in a bucket share a row, with the zeros between them. An accumulator in a file is in memory until the
        next bucket is asked for, and written back with ``write``.
        """
        for bucket, indices in self.used().items():
            yield _rows(bucket, indices, write)
            bucket.grads.put_away()
        yield self._foreign()

    @torch.no_grad()
    def multiply(self, factor: Tensor) -> None:
        """Multiply the reduced gradients by ``factor`` (0D fp32), now or later in the kernel. Collective."""
        used, places = self.used(), self._sharded.places()
        self._engine.used_parameters.scaled(places, factor)
        deferring = self._deferring(used)
        for bucket, indices in used.items():
            if bucket in deferring:
                bucket.grads.defer(factor)
                continue
            bucket.grads.widen_fp16()
            for row in _rows(bucket, indices):
                row.mul_(factor.to(row.device))
            bucket.grads.put_away()
        for grad in self._foreign():
            grad.mul_(factor)

    def _deferring(self, used: Iterable[Bucket]) -> set[Bucket]:
        """The buckets that defer (fused_step.py, Note [Deferred factor]): not those with views in ``p.grad``."""
        mine = self._sharded.indices()
        return {b for b in self._sharded.taken(used) if b.grads.valid <= mine[b] and not is_view(b)}

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiply all accumulated gradients, reduced or not. Not collective."""
        places = self._sharded.places()
        self._engine.used_parameters.scaled(places, factor)
        for bucket, index, _ in places:
            span, grads = bucket.layout.spans[index], bucket.grads
            if grads.local is not None:
                grads.local[span.lo : span.hi].mul_(factor)
            for piece in bucket.pieces_of(index) if index in grads.valid else ():
                grads.of(piece).mul_(factor)
            grads.put_away()


def _rows(bucket: Bucket, indices: list[int], write: bool = True) -> list[Tensor]:
    """The accumulated gradients of these parameters; pieces with only alignment between them share a row.

    Read-only without ``write``.
    """
    edges: list[list[int]] = []
    wanted = set(indices)
    for piece in bucket.pieces():
        if piece.index not in wanted:
            continue
        if edges and piece.offset - edges[-1][1] < ALIGN:  # a parameter in between would take at least ALIGN
            edges[-1][1] = piece.offset + piece.numel
        else:
            edges.append([piece.offset, piece.offset + piece.numel])
    bucket.grads.apply_deferred_scale()
    if not edges:
        return []
    grad = bucket.grads.write() if write else bucket.grads.read()
    return [grad[lo:hi] for lo, hi in edges]
