"""Edits of compute copies by user code: which are kept, and which are lost."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero import ops
from lt_zero.common import accelerator
from lt_zero.common.compat import are_unchanged, in_running_backward, versions_of, without_torch_function
from lt_zero.engine.bucket_weights import MasterWeights
from lt_zero.engine.layout import BucketLayout, Piece, Sharding

_ROW = 1024  # words per row of a digest, which does not see permutations within a row


class Edited(Protocol):
    """A bucket, as far as its edits need it (bucket.py)."""

    params: list[Parameter]
    flat: Tensor
    param_views: list[Tensor]
    layout: BucketLayout
    pieces: tuple[Piece, ...]
    shard: Tensor
    weights: MasterWeights
    sharding: Sharding
    edits: InplaceEdits

    @property
    def offloaded(self) -> bool: ...

    @property
    def resident(self) -> bool: ...

    @property
    def readable(self) -> bool: ...

    def expected_shard(self) -> Tensor: ...

    def shown(self, view: Tensor) -> Tensor: ...


class InplaceEdits:
    """Detects edits of compute copies outside of ``gathered``, which the next step would overwrite.

    Where parameters are not sharded, an edit is copied to the master weights. Where they are, the edited copy is lost
    when the bucket is released: so edits that a unit's forward makes are kept when it ends (engine.py, Note [Edits in a
    forward]), and all others raise.

    Most edits change a parameter's version counter, which is checked in each backward. ``p.data.copy_(...)`` does not,
    so values are checked, too, before they are stepped or saved: by a digest on a CPU and where master weights are
    offloaded. On a GPU a digest would have to be waited for, so one kernel compares all master weights with the compute
    copy (``check_all``): parameters that are not guarded do not tell when user code reads ``p.data``. ``p.data =
    tensor`` takes a parameter out of its bucket, which changes its address; its values are copied back. Values of
    sharded parameters are compared after the first two forwards of their unit with gradients, and the first two
    without, and where user code was given a tensor whose writes no version shows.

    Attributes:
        lost: names of parameters whose edits are lost.
        handed_out: user code outside of the unit got a tensor whose writes change no version counter.
    """

    def __init__(self, bucket: Edited) -> None:
        self._bucket = bucket
        self._weights = bucket.weights
        self._sharded = bucket.sharding.params
        self._edits_master = bucket.weights.plan.master_is_view  # an edit of the compute copy is one of the master
        self.lost: list[str] = []
        self.handed_out = False
        self._in_forward = False  # the unit's forward runs
        self._read: dict[int, Tensor] = {}  # in which code has read ``p.data``: parameter -> its value before
        self._versions: list[int] = []
        self._base = -1  # the address of the flat tensor with which ``_addresses`` were computed
        self._addresses: list[int] = []
        self._digest: Tensor | None = None  # the digest of this rank's shard
        self._paused = False  # master weights are ahead of the compute copy
        # Forwards with and without gradients whose values are still to be compared.
        self._watches = {True: 2, False: 2}
        self._watched = True  # whether the forward that was noted last has gradients
        self._sums: Tensor | None = None  # sums of the pieces when they were gathered for such a forward

    def note(self, released: bool = False) -> None:
        """Record the current values as unedited; ``released``: they were, and views of them may have been edited."""
        self._paused, self._sums = False, None
        if not self._edits_master:
            before, self._versions = self._versions, versions_of(self._bucket.params)
            if released and before != self._versions and self._weights.has_master:
                edited = zip(self._bucket.layout.spans, self._versions, before, strict=True)
                self.lost += [span.name for span, version, old in edited if version != old]
            self._watched = torch.is_grad_enabled()
            if released and self._watches[self._watched] and self._weights.has_master and not in_running_backward():
                self._sums = self._sum_pieces()
            self._digest = digest_of(self._bucket.shard) if self._has_digest else None

    def pause(self) -> None:
        """Stop checking until ``note``: the master weights are stepped before the compute copy is updated."""
        self._paused = not self._sharded

    @property
    def _has_digest(self) -> bool:
        if self._sharded:
            return False
        # On a CPU a digest is cheap: comparing values takes 4 times as long as AdamW's step.
        return self._bucket.offloaded or (not accelerator.holds(self._bucket.shard) and self._weights.has_master)

    def seen(self) -> bool:
        """True if versions or the digest have changed since ``note``; waits for the device of a digest."""
        differs = self.differs()
        return (differs is not None and bool(differs)) or self.versions_changed()

    def versions_changed(self) -> bool:
        """True if versions have changed since ``note``, for which no device is waited for."""
        return not self._paused and versions_of(self._bucket.params) != self._versions

    def differs(self) -> Tensor | None:
        """Compare the digest with that of ``note``: a 0D bool on the device; None if it is not looked at."""
        # While paused, the compute copy is from another step than the noted values, or is being written.
        if self._paused or not self._has_digest:
            return None
        shard = self._bucket.shard
        return self._digest != digest_of(shard) if self._digest is not None else shard.new_ones((), dtype=torch.bool)

    def check(
        self,
        values: bool = False,
        released: bool = False,
        pairs: list[tuple[Tensor, Tensor]] | None = None,
        searched: bool = False,
    ) -> None:
        """Keep the edits since ``note``, or add them to ``lost``.

        Args:
            values: check values, too.
            released: the compute copy is about to be released.
            pairs: gets what the caller gives to ``ops.take_edits`` next, to keep edits of this bucket.
            searched: ``end_forward`` has found no edit of the sharded parameters just before.
        """
        bucket, weights = self._bucket, self._weights
        if not bucket.resident or self._paused:
            return
        if released:
            self._read = {}
            self._in_forward = False
        if searched and not self.handed_out and self._sums is None:
            return
        if self._sharded:
            edited = [bucket.layout.spans[i].name for i in (() if searched else self._changed_by_assignment())]
        else:
            edited = self.put_back()
        if not weights.has_master:
            return
        versions = self._versions if searched else versions_of(bucket.params)
        if versions != self._versions:
            changed = zip(bucket.layout.spans, versions, self._versions, strict=True)
            edited += [span.name for span, version, before in changed if version != before]
        if self._sharded:
            if self.handed_out and not edited:
                expected = bucket.expected_shard()
                for piece in bucket.pieces:
                    rows = slice(piece.offset, piece.offset + piece.numel)
                    if not torch.equal(bucket.shard[rows], expected[rows]):
                        edited.append(bucket.layout.spans[piece.index].name)
            if released and not edited:
                edited = self._unseen(())
            self.lost += edited
        elif edited or (values and (not self._has_digest or self.seen())):
            # Every rank has the whole copy, and edits it as it would without ZeRO.
            pair = weights.edit_pair() if pairs is not None else None
            if pairs is None or pair is None:
                weights.keep_edits()
            else:
                pairs.append(pair)
            self.note()
        self.handed_out = False
        if edited:
            self.note()

    def begin_forward(self) -> None:
        """Note that a forward of the unit, whose parameters are sharded, begins; the bucket is gathered."""
        self._in_forward = True

    def data_is_read(self, index: int) -> None:
        """Note that code is about to get ``p.data`` of parameter ``index``, and may write to it."""
        if self._in_forward and index not in self._read and self._bucket.readable:
            with torch.inference_mode(False), torch.no_grad():
                self._read[index] = self._bucket.param_views[index].clone()

    def end_forward(self) -> list[int]:
        """Note that a forward of the unit ends; returns the numbers of the parameters that were edited.

        Ranks that make the same edits find the same numbers: all of them look at whole parameters.
        """
        read = self._read
        self._read = {}
        self._in_forward = False
        bucket = self._bucket
        # It comes first, since it is all that most forwards need: parameters that cannot be read are sentinels.
        if not read and are_unchanged(bucket.params, self._versions, self._own_addresses()):
            return []
        if not bucket.readable:
            return []
        with torch.no_grad():
            return self._find(read, versions_of(bucket.params))

    def _find(self, read: dict[int, Tensor], versions: list[int]) -> list[int]:
        """The numbers of parameters that a forward has edited; keeps what it has assigned.

        Args:
            read: values before code has read ``p.data``, by number.
            versions: of the parameters.
        """
        bucket = self._bucket
        # A constraint that holds already is assigned again: the same values.
        changed = set(self._changed_by_assignment())
        self._put_back(sorted(changed))
        self.drop_assigned()
        changed |= {i for i, (one, other) in enumerate(zip(versions, self._versions, strict=True)) if one != other}
        changed |= {i for i, value in read.items() if not torch.equal(value, bucket.param_views[i])}
        if changed:
            # The sums are taken anew when these edits are kept.
            self.lost += self._unseen(changed)
        return sorted(changed)

    def lose(self, indices: Iterable[int]) -> None:
        """Note that edits of these parameters are lost."""
        self.lost += [self._bucket.layout.spans[index].name for index in indices]
        self.note()

    def _unseen(self, known: Collection[int]) -> list[str]:
        """Names of the parameters whose sums of bits have changed, apart from ``known`` ones. Ends the watch."""
        if self._sums is None:
            return []
        same = (self._sums == self._sum_pieces()).tolist()
        self._sums = None
        self._watches[self._watched] -= 1
        pairs = zip(self._bucket.pieces, same, strict=True)
        changed = [piece.index for piece, one in pairs if not one and piece.index not in known]
        return [self._bucket.layout.spans[index].name for index in changed]

    def forget(self) -> None:
        """Forget the noted sums of bits: the engine writes to the compute copy."""
        self._sums = None

    def _sum_pieces(self) -> Tensor:
        """The sum (1D int64) of the bits of each of this rank's pieces."""
        shard = self._bucket.shard
        words = shard.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[shard.itemsize])
        rows = [words[piece.offset : piece.offset + piece.numel] for piece in self._bucket.pieces]
        sums = [row.sum(dtype=torch.int64) for row in rows]
        return torch.stack(sums) if sums else words.new_empty(0, dtype=torch.int64)

    def assigned(self) -> list[int]:
        """Numbers of parameters that were assigned other tensors (``p.data = tensor``), of a resident bucket."""
        if not self._bucket.resident:
            return []
        with without_torch_function():
            held = [parameter.data_ptr() for parameter in self._bucket.params]
        own = self._own_addresses()
        return [i for i, (one, other) in enumerate(zip(held, own, strict=True)) if one != other] if held != own else []

    def _own_addresses(self) -> list[int]:
        """The addresses of the parameters' views. A gather may put the flat tensor somewhere else."""
        base = self._bucket.flat.data_ptr()
        if base != self._base:
            self._base = base
            self._addresses = [view.data_ptr() for view in self._bucket.param_views]
        return self._addresses

    def _changed_by_assignment(self) -> list[int]:
        """Numbers of parameters that were assigned other values; a recomputed forward assigns the same ones again."""

        def differs(index: int) -> bool:
            value = self._bucket.params[index].data
            view = self._bucket.param_views[index]
            same = (value.shape, value.dtype, value.device) == (view.shape, view.dtype, view.device)
            return not (same and torch.equal(value, view))

        return [index for index in self.assigned() if differs(index)]

    def put_back(self) -> list[str]:
        """Copy parameters that were assigned other tensors back to their views; returns their names.

        Those of another shape, dtype or device are ``lost``.
        """
        assigned = self.assigned()
        return self._put_back(assigned) if assigned else []

    def drop_assigned(self) -> None:
        """Give parameters that were assigned other tensors their views back, whose values stay."""
        for index in self.assigned():
            self._bucket.params[index].data = self._bucket.shown(self._bucket.param_views[index])

    @torch.no_grad()
    def _put_back(self, assigned: list[int]) -> list[str]:
        found, bucket = [], self._bucket
        for index in assigned:
            parameter = bucket.params[index]
            view = bucket.param_views[index]
            name = bucket.layout.spans[index].name
            value = parameter.data
            if (value.shape, value.dtype, value.device) != (view.shape, view.dtype, view.device):
                self.lost.append(name)
                continue
            view.copy_(value)
            parameter.data = bucket.shown(view)
            found.append(name)
        return found


@torch.no_grad()
def check_all(buckets: Iterable[Edited]) -> None:
    """Check the values of all ``buckets`` before they are stepped: on a GPU in one launch, which reads each once."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for bucket in buckets:
        bucket.edits.check(values=True, pairs=pairs)
    # One call for each dtype of compute copies.
    for dtype in dict.fromkeys(shown.dtype for _, shown in pairs):
        some = [pair for pair in pairs if pair[1].dtype == dtype]
        ops.take_edits([master for master, _ in some], [shown for _, shown in some])


def digest_of(shard: Tensor) -> Tensor:
    """A checksum (0D int64) of the bits of ``shard``, which is a multiple of 16 bytes long."""
    words = shard.view(torch.int64)
    whole = words.numel() // _ROW * _ROW
    rows = words[:whole].view(-1, _ROW).sum(1)
    return (rows * torch.arange(1, rows.numel() + 1, device=shard.device)).sum() + words[whole:].sum()
