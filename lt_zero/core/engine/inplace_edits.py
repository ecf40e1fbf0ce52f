"""Edits of compute copies by user code: which are kept, and which are lost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from lt_zero import kernels as ops
from lt_zero.common import accelerator
from lt_zero.common.compat import are_unchanged, in_running_backward, versions_of, without_torch_function
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.engine.bucket_weights import MasterWeights
from lt_zero.core.engine.compute_copy import RESIDENT, ComputeCopy, State
from lt_zero.core.engine.layout import BucketLayout, Piece
from lt_zero.core.engine.step_flags import Section

_ROW = 1024  # words per row of a digest, which does not see permutations within a row


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

    Args:
        compute: of a bucket.
        weights: of the bucket.
        layout: of the bucket.
        pieces: of the parameters, in this rank's shard.
        unedited: returns the value of this rank's shard of the compute copy without edits.

    Attributes:
        lost: names of parameters whose edits are lost.
        are_adopted: the values of rank 0 are about to become those of all ranks: ``Bucket.adopt_edits``.
    """

    def __init__(
        self,
        compute: ComputeCopy,
        weights: MasterWeights,
        layout: BucketLayout,
        pieces: Sequence[Piece],
        unedited: Callable[[], Tensor],
    ) -> None:
        self._compute = compute
        self._weights = weights
        self._layout = layout
        self._pieces = pieces
        self._unedited = unedited
        self._sharded = weights.sharded
        self._edits_master = weights.plan.master_is_view  # an edit of the compute copy is one of the master
        self.lost: list[str] = []
        self.are_adopted = False
        self._handed_out = False  # user code outside of the unit got a tensor whose writes change no version counter
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
        self._paused = False
        self._sums = None
        if not self._edits_master:
            before = self._versions
            self._versions = versions_of(self._compute.params)
            if released and before != self._versions and self._weights.has_master:
                edited = zip(self._layout.spans, self._versions, before, strict=True)
                self.lost += [span.name for span, version, old in edited if version != old]
            self._watched = torch.is_grad_enabled()
            if released and self._watches[self._watched] and self._weights.has_master and not in_running_backward():
                self._sums = self._sum_pieces()
            self._digest = digest_of(self._compute.shard) if self._has_digest else None

    def expect_adoption(self, expected: bool) -> None:
        """Note whether ``Bucket.adopt_edits`` follows."""
        self.are_adopted = expected

    def note_read(self, hands_out: bool) -> None:
        """Note a read outside of the unit's forward; ``hands_out``: of a tensor whose writes no version shows."""
        self._handed_out |= hands_out

    def pause(self) -> None:
        """Stop checking until ``note``: the master weights are stepped before the compute copy is updated."""
        self._paused = not self._sharded

    @property
    def _has_digest(self) -> bool:
        if self._sharded:
            return False
        # On a CPU a digest is cheap: comparing values takes 4 times as long as AdamW's step.
        return self._weights.places.step.offloads or (not self.on_accelerator and self._weights.has_master)

    @property
    def on_accelerator(self) -> bool:
        """True if to ask for a digest is to wait for the device."""
        return accelerator.holds(self._compute.shard)

    @property
    def name(self) -> str:
        """The name of the first parameter."""
        return self._layout.spans[0].name

    def seen(self, digests: ComparedDigests | None = None) -> bool:
        """True if versions or the digest have changed since ``note``; waits for the device of a digest.

        ``digests``: of buckets on accelerators, compared before; None: compare the digest now.
        """
        if digests is not None and self.on_accelerator:
            return self.versions_changed() or self in digests.edited
        differs = self.differs()
        return (differs is not None and bool(differs)) or self.versions_changed()

    def versions_changed(self) -> bool:
        """True if versions have changed since ``note``, for which no device is waited for."""
        return not self._paused and versions_of(self._compute.params) != self._versions

    def differs(self) -> Tensor | None:
        """Compare the digest with that of ``note``: a 0D bool on the device; None if it is not looked at."""
        # While paused, the compute copy is from another step than the noted values, or is being written.
        if self._paused or not self._has_digest:
            return None
        shard = self._compute.shard
        return self._digest != digest_of(shard) if self._digest is not None else shard.new_ones((), dtype=torch.bool)

    def check(
        self,
        values: bool = False,
        pairs: list[tuple[Tensor, Tensor]] | None = None,
        digests: ComparedDigests | None = None,
    ) -> None:
        """Keep the edits since ``note``; those of sharded parameters are ``lost``.

        Args:
            values: check values, too, where parameters are not sharded.
            pairs: gets what the caller gives to ``ops.take_edits`` next, to keep edits of this bucket.
            digests: as for ``seen``.
        """
        if self._compute.state not in RESIDENT or self._paused:
            return
        if self._sharded:
            self._find_lost()
            return
        weights = self._weights
        edited = bool(self.put_back())
        if not weights.has_master:
            return
        edited = edited or self.versions_changed()
        if edited or (values and (not self._has_digest or self.seen(digests))):
            # Every rank has the whole copy, and edits it as it would without ZeRO.
            pair = weights.edit_pair() if pairs is not None else None
            if pairs is None or pair is None:
                weights.keep_edits()
            else:
                pairs.append(pair)
            self.note()

    def check_released(self, searched: bool) -> None:
        """Add edits of sharded parameters, whose compute copy is about to be released, to ``lost``.

        ``searched``: ``end_forward`` has found none just before.
        """
        self._read = {}
        self._in_forward = False
        if not searched or self._handed_out or self._sums is not None:
            self._find_lost(searched, released=True)

    def _find_lost(self, searched: bool = False, released: bool = False) -> None:
        if not self._weights.has_master:
            return
        edited: list[str] = []
        if not searched:
            edited = [self._layout.spans[index].name for index in self._changed_by_assignment()]
            versions = zip(self._layout.spans, versions_of(self._compute.params), self._versions, strict=True)
            edited += [span.name for span, version, before in versions if version != before]
        if self._handed_out and not edited:
            expected = self._unedited()
            for piece in self._pieces:
                rows = slice(piece.offset, piece.offset + piece.numel)
                if not torch.equal(self._compute.shard[rows], expected[rows]):
                    edited.append(self._layout.spans[piece.index].name)
        if released and not edited:
            edited = self._unseen(())
        self.lost += edited
        self._handed_out = False
        if edited:
            self.note()

    def begin_forward(self) -> None:
        """Note that a forward of the unit, whose parameters are sharded, begins; the bucket is gathered."""
        self._in_forward = True

    def data_is_read(self, index: int) -> None:
        """Note that code is about to get ``p.data`` of parameter ``index``, and may write to it."""
        if self._in_forward and index not in self._read and self._compute.state is State.READABLE:
            with torch.inference_mode(False), torch.no_grad():
                self._read[index] = self._compute.views[index].clone()

    def end_forward(self) -> list[int]:
        """Note that a forward of the unit ends; returns the numbers of the parameters that were edited.

        Ranks that make the same edits find the same numbers: all of them look at whole parameters.
        """
        read = self._read
        self._read = {}
        self._in_forward = False
        # It comes first, since it is all that most forwards need: parameters that cannot be read are sentinels.
        if not read and are_unchanged(self._compute.params, self._versions, self._own_addresses()):
            return []
        if self._compute.state is not State.READABLE:
            return []
        with torch.no_grad():
            return self._find(read, versions_of(self._compute.params))

    def _find(self, read: dict[int, Tensor], versions: list[int]) -> list[int]:
        """The numbers of parameters that a forward has edited; keeps what it has assigned.

        Args:
            read: values before code has read ``p.data``, by number.
            versions: of the parameters.
        """
        # A constraint that holds already is assigned again: the same values.
        changed = set(self._changed_by_assignment())
        self._put_back(sorted(changed))
        self.drop_assigned()
        changed |= {i for i, (one, other) in enumerate(zip(versions, self._versions, strict=True)) if one != other}
        changed |= {i for i, value in read.items() if not torch.equal(value, self._compute.views[i])}
        if changed:
            # The sums are taken anew when these edits are kept.
            self.lost += self._unseen(changed)
        return sorted(changed)

    def lose(self, indices: Iterable[int]) -> None:
        """Note that edits of these parameters are lost."""
        self.lost += [self._layout.spans[index].name for index in indices]
        self.note()

    def _unseen(self, known: Collection[int]) -> list[str]:
        """Names of the parameters whose sums of bits have changed, apart from ``known`` ones. Ends the watch."""
        if self._sums is None:
            return []
        same = (self._sums == self._sum_pieces()).tolist()
        self._sums = None
        self._watches[self._watched] -= 1
        pairs = zip(self._pieces, same, strict=True)
        changed = [piece.index for piece, one in pairs if not one and piece.index not in known]
        return [self._layout.spans[index].name for index in changed]

    def forget(self) -> None:
        """Forget the noted sums of bits: the engine writes to the compute copy."""
        self._sums = None

    def _sum_pieces(self) -> Tensor:
        """The sum (1D int64) of the bits of each of this rank's pieces."""
        shard = self._compute.shard
        words = shard.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[shard.itemsize])
        rows = [words[piece.offset : piece.offset + piece.numel] for piece in self._pieces]
        sums = [row.sum(dtype=torch.int64) for row in rows]
        return torch.stack(sums) if sums else words.new_empty(0, dtype=torch.int64)

    def assigned(self) -> list[int]:
        """Numbers of parameters that were assigned other tensors (``p.data = tensor``), of a resident bucket."""
        if self._compute.state not in RESIDENT:
            return []
        with without_torch_function():
            held = [parameter.data_ptr() for parameter in self._compute.params]
        own = self._own_addresses()
        return [i for i, (one, other) in enumerate(zip(held, own, strict=True)) if one != other] if held != own else []

    def _own_addresses(self) -> list[int]:
        """The addresses of the parameters' views. A gather may put the flat tensor somewhere else."""
        base = self._compute.flat.data_ptr()
        if base != self._base:
            self._base = base
            self._addresses = [view.data_ptr() for view in self._compute.views]
        return self._addresses

    def _changed_by_assignment(self) -> list[int]:
        """Numbers of parameters that were assigned other values; a recomputed forward assigns the same ones again."""

        def differs(index: int) -> bool:
            value = self._compute.params[index].data
            view = self._compute.views[index]
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
            self._compute.params[index].data = self._compute.shown(self._compute.views[index])

    @torch.no_grad()
    def _put_back(self, assigned: list[int]) -> list[str]:
        found = []
        for index in assigned:
            parameter = self._compute.params[index]
            view = self._compute.views[index]
            name = self._layout.spans[index].name
            value = parameter.data
            if (value.shape, value.dtype, value.device) != (view.shape, view.dtype, view.device):
                self.lost.append(name)
                continue
            view.copy_(value)
            parameter.data = self._compute.shown(view)
            found.append(name)
        return found


class ComparedDigests:
    """Digests of several buckets, compared on an accelerator while the host goes on; the first question waits.

    Args:
        flags: what ``InplaceEdits.differs`` said of each bucket.
    """

    def __init__(self, flags: Mapping[InplaceEdits, Tensor | None]) -> None:
        known = {edits: flag for edits, flag in flags.items() if flag is not None}
        self._buckets = list(known)
        self._fetched = accelerator.fetch(torch.stack(list(known.values()))) if known else None

    @cached_property
    def edited(self) -> list[InplaceEdits]:
        """Those of buckets whose digests have changed."""
        if self._fetched is None:
            return []
        copy, copied = self._fetched
        copied.synchronize()
        return [edits for edits, differs in zip(self._buckets, copy.tolist(), strict=True) if differs]


@torch.no_grad()
def check_all(buckets: Iterable[InplaceEdits]) -> None:
    """Check the values of all ``buckets`` before they are stepped.

    On an accelerator in one launch, which reads each once; where master weights are offloaded, the host waits once for
    the digests of all.
    """
    some = list(buckets)
    digests = ComparedDigests({edits: edits.differs() for edits in some if edits.on_accelerator})
    pairs: list[tuple[Tensor, Tensor]] = []
    for edits in some:
        edits.check(values=True, pairs=pairs, digests=digests)
    # One call for each dtype of compute copies.
    for dtype in dict.fromkeys(shown.dtype for _, shown in pairs):
        alike = [pair for pair in pairs if pair[1].dtype == dtype]
        ops.take_edits([master for master, _ in alike], [shown for _, shown in alike])


def lost_edits(peers: Ranks, edits: Sequence[InplaceEdits]) -> Section:
    """The flag of a step that says whether edits of a rank are lost; raises RuntimeError on all ``peers`` then."""

    def raise_lost(flags: Sequence[int]) -> None:
        if not any(flags):
            return
        names = [name for each in edits for name in each.lost]
        for each in edits:
            each.lost = []
        every = sorted({name for some in peers.host_gather(names, "lost edits") for name in some})
        raise RuntimeError(
            f"Parameter {', '.join(map(repr, every[:5]))} was modified in place, but its master weights are stored "
            "elsewhere and would overwrite the edit. Wrap the edit in "
            "`with lt_zero.gathered(parameters, write=True): ...`."
        )

    return Section("lost_edits", lambda: [any(each.lost for each in edits)], raise_lost)


def digest_of(shard: Tensor) -> Tensor:
    """A checksum (0D int64) of the bits of ``shard``, which is a multiple of 16 bytes long."""
    words = shard.view(torch.int64)
    whole = words.numel() // _ROW * _ROW
    rows = words[:whole].view(-1, _ROW).sum(1)
    return (rows * torch.arange(1, rows.numel() + 1, device=shard.device)).sum() + words[whole:].sum()
