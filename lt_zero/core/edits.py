"""In-place edits of compute copies whose master weights lie elsewhere: noticed, because the next step undoes them.

Where parameters are whole on every rank, an edit is taken over into the master weights. Where they are sharded it is
reported: the copy that was edited is gone after use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lt_zero.compat import version_of
from lt_zero.core.layout import Piece

if TYPE_CHECKING:
    from lt_zero.core.bucket import Bucket


class EditWatch:
    """Compares version counters of a bucket's parameters; where those do not tell, values."""

    def __init__(self, bucket: Bucket) -> None:
        self.lost: list[str] = []  # names of parameters that were written in vain
        self.handed_out = False  # somebody got a tensor that can be written behind our back
        self._bucket = bucket
        self._versions: list[int] = []

    def note(self) -> None:
        """What the parameters hold now is right."""
        if not self._bucket.weights.aliased:
            self._versions = [version_of(p) for p in self._bucket.params]

    def check(self) -> None:
        """Remember the parameters that were edited since ``note``."""
        bucket = self._bucket
        if not bucket.weights.separate or not bucket.resident:
            return
        pairs = zip(bucket.params, self._versions, bucket.layout.spans, strict=True)
        edited = [span.name for p, version, span in pairs if version_of(p) != version]
        if self.handed_out and not edited and bucket.sharding.params:
            edited = [bucket.layout.spans[p.index].name for p in bucket.pieces() if not self._equal(p)]
        self.handed_out = False
        if edited and not bucket.sharding.params:
            bucket.keep_edits()  # every rank has the whole copy, and edits it as it would without ZeRO
        elif edited:
            self.lost += edited
        if edited:
            self.note()

    def _equal(self, piece: Piece) -> bool:
        bucket, place = self._bucket, slice(piece.offset, piece.offset + piece.numel)
        return torch.equal(bucket.part[place], bucket.weights.home[place].to(bucket.part.device, bucket.dtype))
