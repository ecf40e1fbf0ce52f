"""Detection of in-place edits of compute copies outside of ``gathered``, which the next step would overwrite.

Where parameters are not sharded, an edit is copied to the master weights. Where they are, it raises: the edited copy
is lost when the bucket is released.

Most edits change a parameter's version counter, which is checked in each backward. ``p.data.copy_(...)`` does not, so
values are checked, too, before they are stepped or saved: by a digest on a CPU and where master weights are offloaded.
On a GPU a digest would have to be waited for, so edited elements are found by comparing master weights with the compute
copy. ``p.data = tensor`` takes a parameter out of its bucket, which changes its address; its values are copied back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.common.compat import version_of
from lt_zero.engine.layout import Piece

if TYPE_CHECKING:
    from lt_zero.engine.bucket import Bucket

_ROW = 1024  # words per row of a digest, which does not see permutations within a row


class InplaceEdits:
    """Detects edits of a bucket's parameters."""

    def __init__(self, bucket: Bucket) -> None:
        self.lost: list[str] = []  # names of parameters whose edits are lost
        self.handed_out = False  # user code got a tensor whose writes change no version counter
        self._bucket = bucket
        self._versions: list[int] = []
        self._addresses: list[int] = []  # of the views; where parameters are not sharded
        self._digest: Tensor | None = None  # of this rank's shard
        self._paused = False  # master weights are ahead of the compute copy

    def note(self) -> None:
        """Record the current values as unedited."""
        self._paused = False
        if not self._bucket.weights.master_is_view:
            self._versions = [version_of(p) for p in self._bucket.params]
            self._digest = _digest_of(self._bucket.shard) if self._digests else None

    def pause(self) -> None:
        """Stop checking until ``note``: the master weights are stepped before the compute copy is updated."""
        self._paused = not self._bucket.sharding.params

    @property
    def _digests(self) -> bool:
        bucket = self._bucket
        cheap = (
            bucket.weights.has_master and bucket.shard.device.type == "cpu"
        )  # a comparison takes 4 times AdamW's step
        return (bucket.offloaded or cheap) and not bucket.sharding.params

    def seen(self) -> bool:
        """Whether versions or the digest have changed since ``note``."""
        if self._paused:  # the compute copy is of another step, or is being written
            return False
        changed = self._digests and (self._digest is None or bool(self._digest != _digest_of(self._bucket.shard)))
        return changed or [version_of(p) for p in self._bucket.params] != self._versions

    def check(self, values: bool = False) -> None:
        """Keep the edits since ``note``, or add them to ``lost``; with ``values`` check values, too."""
        bucket = self._bucket
        if not bucket.resident or self._paused:
            return
        edited = self._put_back() if not bucket.sharding.params else []
        if not bucket.weights.has_master:
            return
        pairs = zip(bucket.params, self._versions, bucket.layout.spans, strict=True)
        edited += [span.name for p, version, span in pairs if version_of(p) != version]
        if bucket.sharding.params:
            if self.handed_out and not edited:
                edited = [bucket.layout.spans[p.index].name for p in bucket.pieces() if not self._equal(p)]
            self.lost += edited
        elif edited or (values and (not self._digests or self.seen())):
            # Every rank has the whole copy, and edits it as it would without ZeRO.
            bucket.keep_edits()
            self.note()
        self.handed_out = False
        if edited:
            self.note()

    def _equal(self, piece: Piece) -> bool:
        bucket, place = self._bucket, slice(piece.offset, piece.offset + piece.numel)
        return torch.equal(bucket.shard[place], bucket.weights.values()[place].to(bucket.shard.device, bucket.dtype))

    def _put_back(self) -> list[str]:
        """Copy parameters that were assigned other tensors back to their views; returns their names."""
        bucket = self._bucket
        if not self._addresses:
            self._addresses = [view.data_ptr() for view in bucket.param_views]
        pairs = enumerate(zip(bucket.params, self._addresses, strict=True))
        return [name for i, (p, address) in pairs if p.data_ptr() != address and (name := self._put(p, i))]

    @torch.no_grad()
    def _put(self, parameter: Parameter, index: int) -> str:
        bucket = self._bucket
        view, name = bucket.param_views[index], bucket.layout.spans[index].name
        if (parameter.shape, parameter.dtype, parameter.device) != (view.shape, view.dtype, view.device):
            self.lost.append(name)
            return ""
        view.copy_(parameter)
        parameter.data = view
        return name


def _digest_of(shard: Tensor) -> Tensor:
    """A checksum (0D int64) of the bits of ``shard``, which is a multiple of 16 bytes long."""
    words = shard.view(torch.int64)
    whole = words.numel() // _ROW * _ROW
    rows = words[:whole].view(-1, _ROW).sum(1)
    return (rows * torch.arange(1, rows.numel() + 1, device=shard.device)).sum() + words[whole:].sum()
