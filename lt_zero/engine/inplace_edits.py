"""Edits of compute copies by hand, outside of any context: noticed, because the next step would undo them.

Where parameters are whole on every rank, an edit is taken over into the master weights. Where they are sharded it is
reported: the copy that was edited is gone after use.

Note [How edits are noticed]
    A version counter per parameter tells most of them, in each backward. ``p.data.copy_(...)`` moves no counter, so
    values are looked at, too, before they are stepped or saved: on a CPU, and where master weights are elsewhere, by a
    digest of what was there. On a GPU, whose answer would be waited for, masters are compared with the compute copy.
    ``p.data = tensor`` takes a parameter out of its bucket, which its address tells; it is put back with the values.
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

_ROW = 1024  # words of a digest that may change places unseen


class InplaceEdits:
    """Looks for edits of a bucket's parameters. See Note [How edits are noticed]."""

    def __init__(self, bucket: Bucket) -> None:
        self.lost: list[str] = []  # names of parameters that were written in vain
        self.handed_out = False  # somebody got a tensor that can be written behind our back
        self._bucket = bucket
        self._versions: list[int] = []
        self._addresses: list[int] = []  # of the views; where parameters are not sharded
        self._digest: Tensor | None = None  # of this rank's part, where its master weights are elsewhere
        self._paused = False  # master weights are ahead of the compute copy

    def note(self) -> None:
        """What the parameters hold now is right."""
        self._paused = False
        if not self._bucket.weights.master_is_view:
            self._versions = [version_of(p) for p in self._bucket.params]
            self._digest = _digest_of(self._bucket.shard) if self._digests else None

    def pause(self) -> None:
        """The master weights are stepped while the compute copy stays behind, until ``note``."""
        self._paused = not self._bucket.sharding.params

    @property
    def _digests(self) -> bool:
        bucket = self._bucket
        cheap = (
            bucket.weights.has_master and bucket.shard.device.type == "cpu"
        )  # a comparison takes 4 times AdamW's step
        return (bucket.store.moves_optim or cheap) and not bucket.sharding.params

    def seen(self) -> bool:
        """Whether values are not those of ``note``, as far as the versions or a digest tell."""
        if self._paused:  # the compute copy is that of another step, or is being written
            return False
        changed = self._digests and (self._digest is None or bool(self._digest != _digest_of(self._bucket.shard)))
        return changed or [version_of(p) for p in self._bucket.params] != self._versions

    def check(self, values: bool = False) -> None:
        """Take over the edits since ``note``, or remember what was edited; ``values``: look at them, too."""
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
        return torch.equal(
            bucket.shard[place], bucket.weights.master_or_frozen[place].to(bucket.shard.device, bucket.dtype)
        )

    def _put_back(self) -> list[str]:
        """Parameters that were given other tensors are views again, of the same values; returns their names."""
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


def _digest_of(part: Tensor) -> Tensor:
    """A number (0D int64) that changes when bits of ``part`` do. Shards are multiples of 16 elements."""
    words = part.view(torch.int64)
    whole = words.numel() // _ROW * _ROW
    rows = words[:whole].view(-1, _ROW).sum(1)
    return (rows * torch.arange(1, rows.numel() + 1, device=part.device)).sum() + words[whole:].sum()
