"""The weights of a bucket on one rank: master weights, or frozen weights, and what gathers read.

Note [Replaced weights]
    Scripts swap weights for a validation: they copy what the module shows, load an average, and load the copy back. The
    copy has the precision of the compute copy, so the master weights would come back rounded. Whatever replaces master
    weights that the compute copy does not show in full (a load, an edit) therefore keeps them first, until the next
    step. An element that comes back with the value that the compute copy had shown gets its master weight back. This
    is elementwise and local to the rank, and a run without such writes pays nothing. Frozen weights in a wider dtype
    than the compute copy are treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lt_zero.common.codec import Codec
from lt_zero.common.compat import outside_inference, without_grad
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.storage_plan import StoragePlan
from lt_zero.core.stores.store import WEIGHTS, BackgroundStep, Gap, Place, Places, Store, put_away


class _NoCopy(Store):
    """Stands for the compute copy where master weights serve."""

    def kernel_target(self, master: torch.dtype, covers: Callable[[], bool]) -> Tensor | None:
        return None

    def refresh(self, master: Store, written: bool, gaps: Sequence[Gap]) -> None:
        pass


class AllReplaced:
    """The weights with ``MasterWeights.replaced``, of all buckets of an engine.

    Attributes:
        weights: these.
        keeps: whether what is replaced is kept from now on.
        keeps_codes: also of weights that rest encoded: where nothing is trained, there is no next step.
    """

    def __init__(self) -> None:
        self.weights: set[MasterWeights] = set()
        self.keeps = True
        self.keeps_codes = False


NO_COPY = _NoCopy(torch.float32, partial(torch.empty, 0))


@dataclass(eq=False)
class MasterWeights:
    """The weights of one bucket on this rank: what the optimizer updates, and what gathers read."""

    shard: Tensor  # this rank's elements (1D) of the flat tensor
    plan: StoragePlan  # says what is kept, and where; after ``enable_training`` that it trains
    gaps: Sequence[Gap]  # elements [lo, hi) of ``shard`` that belong to no parameter
    background: BackgroundStep  # of the bucket
    places: Places  # of the bucket
    check_training: Callable[[str], None]  # raises ConfigError if they cannot be trained; takes the bucket's name
    # This rank's shard, or all elements if the optimizer is not sharded: a slice of the compute copy where that stays
    # in memory and has the master's dtype.
    master: Store | None = None
    frozen: Store | None = None  # the shard of a frozen bucket, or its values in a wider dtype
    # The compute copy that a step or an edit has to update: this rank's elements of the flat tensor, or what gathers
    # read while the master weights, or frozen weights in a wider dtype, are offloaded.
    copy: Store = NO_COPY
    _on_unfrozen: Callable[[], None] | None = None
    written: bool = False  # the running step has written the compute copy already
    replaced: Store | None = None  # what loads and edits have replaced since the last step, see Note [Replaced weights]
    loads_rounded: bool = False  # a load since the last step had values without more precision than the compute copy
    # With a codec, after edits: ``shard`` then. An edit changes its block's scale, and with it what is decoded of the
    # other elements, so these would be taken for edited, too. None: ``shard`` is what is decoded of the weights.
    decoded_reference: Tensor | None = None

    def __post_init__(self) -> None:
        self._compute = Store.of(self.shard)
        self.all_replaced = AllReplaced()  # an engine's buckets share one

    def keep(self, values: Tensor) -> None:
        """Store this rank's ``values`` (1D, as ``shard``): as master weights if it trains, else as frozen weights."""
        plan = self.plan

        def stored(place: Place, kind: str, dtype: torch.dtype) -> Store:
            store = place.store(kind, values.numel(), dtype)
            store.overwrite().copy_(values)
            return store

        if not plan.trains:
            self.frozen = stored(self.places.gather, WEIGHTS, plan.precision)
        else:
            self.master = stored(self.places.step, "master", plan.precision)
        if plan.copies_weights:
            self.copy = stored(self.places.gather, WEIGHTS, plan.dtype)
        elif plan.trains and not self.sharded:
            self.copy = Store.of(self.shard)
        if plan.trains and self.copy is not NO_COPY:
            self.copy = self.places.step.fed(self.copy)

    @without_grad
    def enable_training(self, name: str) -> None:
        """Make the master weights if there are none; called late when frozen parameters are unfrozen.

        Args:
            name: of the bucket.

        Raises:
            ConfigError: they cannot be trained.
        """
        if self.master is not None:
            return
        self.check_training(name)
        frozen = self.frozen
        self.frozen = None
        self.plan = replace(self.plan, trains=True)
        if self.copy is not NO_COPY:
            self.copy.discard()
            self.copy = NO_COPY
        if self.plan.master_is_view:
            self.master = self._compute
        elif frozen is None:
            self.keep(self.shard)
        elif frozen.dtype == self.plan.master and not self.places.step.offloads and not frozen.streamed:
            self.master = frozen
            self.copy = NO_COPY if self.sharded else Store.of(self.shard)
        else:
            self.keep(frozen.read())
            frozen.discard()
        if self._on_unfrozen is not None:
            self._on_unfrozen()
        # Do not leave it to a step: the bucket may never be stepped.
        put_away(self.stores())

    @property
    def sharded(self) -> bool:
        """True if parameters are sharded, so that the flat tensor is released at times."""
        return self.plan.sharding.params

    @property
    def codec(self) -> Codec | None:
        """The codec with which updates of unsharded weights are gathered."""
        return self.plan.codecs.updates

    @property
    def master_dtype(self) -> torch.dtype:
        return self.plan.master

    @property
    def trains(self) -> bool:
        return self.master is not None

    @property
    def _kept(self) -> Store:
        return self.master or self.frozen or self._compute

    @property
    def has_master(self) -> bool:
        """True if master or frozen weights are stored apart from the flat tensor."""
        return self._kept is not self._compute

    def stores(self) -> list[Store]:
        every = self.master, self.frozen, self.copy, self.replaced
        return [store for store in every if store is not None and store is not NO_COPY]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that weights apart from the flat tensor take now."""
        copy = self.copy.nbytes if self.sharded else 0
        replaced = self.replaced.nbytes if self.replaced is not None else 0
        return copy + replaced + (self._kept.nbytes if self.has_master else 0)

    @property
    def master_rows(self) -> Tensor:
        """The master weights (1D, as ``shard``), whether or not their values are in memory."""
        assert self.master is not None
        return self.master.tensor

    @property
    def precision(self) -> torch.dtype:
        """Dtype of ``values()``, without reading them."""
        return self._kept.dtype

    def values(self) -> Tensor:
        """Master or frozen weights, or the flat tensor's elements if there are none (1D, as ``shard``), read-only."""
        self.background.wait()
        return self._kept.read()

    def writable_values(self) -> Tensor:
        """``values()``, for writing."""
        self.background.wait()
        # A gather, or a copy to the device, may not have read them yet: work is queued there.
        self.gather_source.wait_sent()
        return self._kept.write()

    @property
    def gather_source(self) -> Store:
        """The store that a gather of sharded parameters reads (1D, as ``shard``)."""
        return self._kept if self.copy is NO_COPY else self.copy

    def kernel_target(self, covers: Callable[[], bool]) -> Tensor | None:
        """The tensor where the kernel writes the compute copy as it updates master weights; None: ``refresh`` copies.

        ``covers``: whether the kernel writes all elements but the gaps.
        """
        self.gather_source.wait_sent()
        return self.copy.kernel_target(self.plan.master, covers)

    def cancel_kernel(self) -> None:
        """Forget ``kernel_target`` after the kernel failed."""
        self.copy.cancel()
        self.written = False

    def refresh(self) -> None:
        """Copy the master or frozen weights, which are in memory, to the compute copy."""
        self.background.wait()
        self.copy.refresh(self._kept, self.written, self.gaps)
        self.written, self.decoded_reference = True, None

    def forget_decoded(self) -> None:
        """Note that the compute copy is what is decoded of the weights."""
        self.decoded_reference = None

    def keep_replaced_in(self, all_replaced: AllReplaced) -> None:
        """Share ``all_replaced`` with the other buckets of an engine."""
        self.all_replaced = all_replaced

    def call_when_unfrozen(self, call: Callable[[], None] | None) -> None:
        """Call ``call`` when weights that were frozen have got master weights; None: nothing."""
        self._on_unfrozen = call

    def refresh_anew(self) -> None:
        """``refresh``, whether or not the running step has written the compute copy."""
        self.written = False
        self.refresh()

    def note_kernel(self, writes_copy: bool) -> None:
        """Note whether the kernel that takes the running step writes the compute copy."""
        self.written = writes_copy

    @outside_inference
    def follow_edit(self) -> None:
        """Update what gathers read after an edit of ``writable_values()``, and write streamed stores."""
        if self.sharded:
            self.refresh_anew()
            self.written = False
            self.copy.wait_copied()
        put_away(self.stores())

    # ---- loads and edits ---------------------------------------------------------------------------------------

    @property
    def is_rounded_in_copy(self) -> bool:
        """True if the compute copy does not show all of the precision of the master or frozen weights."""
        return self.has_master and self.plan.shows_less

    def _are_shown(self, values: Tensor, shown: Tensor, rows: slice = slice(None)) -> Tensor:
        """Tell which elements of the compute copy, ``shown``, are those of ``values`` (1D bool).

        ``values``: master or frozen weights, of the whole shard; ``rows``: of ``shown``.
        """
        same = values[rows].to(self.plan.dtype) == shown
        if self.codec is not None:
            # What is decoded depends on the other elements of a block. Before the first step nothing was encoded.
            same |= self.codec.decoded(values.to(self.plan.dtype))[rows] == shown
        return same

    def keep_replaced(self) -> None:
        """Keep the master or frozen weights, which are about to be replaced. See Note [Replaced weights]."""
        if self.replaced is not None or not (self.all_replaced.keeps and self.is_rounded_in_copy):
            return
        if self.plan.codecs.rests is not None and not self.all_replaced.keeps_codes:
            return
        place = self.places.step if self.trains else self.places.gather
        values = self.values()
        # The name is of a kind of its own: an optimizer's state may have the same key.
        self.replaced = place.store("beside replaced", values.numel(), values.dtype)
        self.replaced.overwrite().copy_(values)
        self.all_replaced.weights.add(self)

    def forget_replaced(self) -> None:
        """Drop what ``keep_replaced`` has kept: training goes on from the weights that there are."""
        if self.replaced is not None:
            self.replaced.discard()
            self.replaced = None
            self.loads_rounded = False
            self.all_replaced.weights.discard(self)

    @outside_inference
    def is_as_replaced(self) -> bool:
        """True if the weights are those that were replaced, bit for bit."""
        assert self.replaced is not None
        return torch.equal(self.values(), self.replaced.read())

    @outside_inference
    def has_rounded(self) -> bool:
        """True if a load has left rounded values in the place of others."""
        if self.replaced is None or not self.loads_rounded:
            return False
        values = self.values()
        changed = values != self.replaced.read()
        return bool((changed & (values.to(self.plan.dtype) == values)).any())

    @outside_inference
    def load(self, rows: slice, given: Tensor, rounded: bool, arrived: Tensor | None = None) -> None:
        """Replace elements by loaded values. Call ``follow_edit``, or ``put_away``, after the last one.

        Args:
            rows: of the elements.
            given: the values (1D), in any dtype.
            rounded: they have no more precision than the compute copy, from which they may have been taken.
            arrived: what the load has left in the compute copy (1D); default: ``given``, rounded. Where it differs, the
                module has loaded something else, or nothing.
        """
        if not self.is_rounded_in_copy:
            self.writable_values()[rows].copy_(given if arrived is None else arrived)
            return
        values = self.values()
        given = given.to(values.device)
        shown = given.to(self.plan.dtype) if rounded or arrived is not None else None
        if arrived is not None:
            arrived = arrived.to(values.device)
        # Ask the device once: most loads are of these kinds.
        as_given = arrived is None or (shown is not None and torch.equal(shown, arrived))
        if as_given and not rounded:
            if self.all_replaced.keeps and self.replaced is None and torch.equal(given, values[rows]):
                return
            self.keep_replaced()
            self.writable_values()[rows].copy_(given)
            return
        assert shown is not None
        there = shown if arrived is None else arrived
        same = self._are_shown(values, there, rows)
        if self.replaced is None and rounded and bool(same.all()):
            return  # loads often repeat frozen weights, of which nothing has to be kept
        self.keep_replaced()
        values = self.writable_values()
        mine = values[rows]
        wide = there.to(values.dtype)
        back, before = same, mine
        if self.replaced is not None:
            before = self.replaced.read()[rows]
            back = self._are_shown(self.replaced.read(), there, rows)
        if rounded:
            self.loads_rounded = True
            loaded = torch.where(back, before, torch.where(same, mine, wide))
        else:
            loaded = given.to(values.dtype)
        if not as_given:
            # Where something else arrived, it is an edit. What looks unchanged may not have been written at all.
            edited = torch.where(same, mine, torch.where(back, before, wide))
            loaded = torch.where(shown == there, loaded, edited)
        mine.copy_(loaded)

    @outside_inference
    def repeat_first(self, group: ShardGroup, name: str) -> None:
        """Give all ranks of ``group`` the first one's weights, of which each has all elements. Collective.

        ``name``: of the bucket.
        """
        values = self.writable_values()
        first = values.to(group.device)
        group.broadcast(first, name)
        if first is not values:
            values.copy_(first)
        self.follow_edit()

    def edit_pair(self) -> tuple[Tensor, Tensor] | None:
        """The master weights, for writing, and ``shard``, if ``ops.take_edits`` can do all that a step needs.

        It does not keep what it replaces, as the step would drop that.
        """
        plain = self.codec is None and not self.sharded and not self.places.step.offloads and self.replaced is None
        if not (plain and self.trains and self.has_master and self.shard.dtype in (torch.bfloat16, torch.float16)):
            return None
        master = self.writable_values()
        return (master, self.shard) if master.dtype == torch.float32 else None

    @outside_inference
    def keep_edits(self, unedited: Tensor | None = None) -> None:
        """Copy edits of the (gathered) flat tensor to the master weights.

        ``unedited``: what ``shard`` would be without edits; default: the master weights, rounded.
        """
        if not self.has_master:
            return
        # Only edited elements: the others are more precise in the master weights.
        kept = self.values()
        compute = self.shard.to(kept.device)
        edited = (kept.to(compute.dtype) if unedited is None else unedited.to(kept.device)) != compute
        if self.codec is not None:
            known = self.decoded_reference
            before = self.codec.decoded(kept.to(compute.dtype)) if known is None else known.to(compute.device)
            edited &= before != compute
            self.note_decoded()
        if not bool(edited.any()):
            put_away(self.stores())
            return
        self.keep_replaced()
        master = self.writable_values()
        values = compute.to(master.dtype)
        if self.replaced is not None:
            replaced = self.replaced.read()
            values = torch.where(self._are_shown(replaced, compute), replaced, values)
        torch.where(edited, values, master, out=master)
        self.follow_edit()

    @outside_inference
    def note_decoded(self, rows: slice = slice(None)) -> None:
        """Remember the compute copy of these elements, which were edited, until the next step."""
        if self.codec is None:
            return
        if self.decoded_reference is None:
            self.decoded_reference = self.shard.clone()
        else:
            self.decoded_reference[rows].copy_(self.shard[rows])
