"""The shard of a bucket that one rank holds besides the flat tensor: its weights and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lt_zero import ops
from lt_zero.comm.shard_group import ShardGroup
from lt_zero.comm.work import Done
from lt_zero.common import accelerator
from lt_zero.common.compat import without_grad
from lt_zero.engine.layout import BucketLayout, Piece
from lt_zero.engine.partition import BucketPlan
from lt_zero.engine.storage_plan import StoragePlan
from lt_zero.offload.background import BackgroundStep
from lt_zero.offload.store import Gap, Place, Reduce, Store, Waits, put_away
from lt_zero.ops.codecs import Codec
from lt_zero.ops.flat import wide


class _NoCopy(Store):
    """Stands for the compute copy where master weights serve."""

    def kernel_target(self, master: torch.dtype, covers: Callable[[], bool]) -> Tensor | None:
        return None

    def refresh(self, master: Store, written: bool, gaps: Sequence[Gap]) -> None:
        pass


NO_COPY = _NoCopy(torch.float32, partial(torch.empty, 0))


@dataclass(eq=False)
class Weights:
    """The weights of one bucket on this rank: what the optimizer updates, and what gathers read."""

    shard: Tensor  # this rank's elements (1D) of the flat tensor
    plan: StoragePlan  # says what is kept, and where; after ``enable_training`` that it trains
    gaps: Sequence[Gap]  # elements [lo, hi) of ``shard`` that belong to no parameter
    background: BackgroundStep  # of the bucket
    # This rank's shard, or all elements if the optimizer is not sharded: a slice of the compute copy where that stays
    # in memory and has the master's dtype.
    master: Store | None = None
    frozen: Store | None = None  # the shard of a frozen bucket, or its values in a wider dtype
    # The compute copy that a step or an edit has to update: this rank's elements of the flat tensor, or what gathers
    # read while the master weights, or frozen weights in a wider dtype, are offloaded.
    copy: Store = NO_COPY
    written: bool = False  # the running step has written the compute copy already
    # With a codec, after edits: ``shard`` then. An edit changes its block's scale, and with it what is decoded of the
    # other elements, so these would be taken for edited, too. None: ``shard`` is what is decoded of the weights.
    shown: Tensor | None = None

    def use(self, optim: Place, params: Place) -> None:
        """Keep master weights in ``optim``, and what gathers read in ``params``."""
        self._optim, self._params, self._compute = optim, params, Store.of(self.shard)

    def keep(self, values: Tensor) -> None:
        """Store this rank's ``values`` (1D, as ``shard``): as master weights if it trains, else as frozen weights."""
        plan = self.plan

        def stored(place: Place, kind: str, dtype: torch.dtype) -> Store:
            store = place.store(kind, values.numel(), dtype)
            store.overwrite().copy_(values)
            return store

        if not plan.trains:
            self.frozen = stored(self._params, "weights", plan.precision)
        else:
            self.master = stored(self._optim, "master", plan.precision)
        if plan.copies_weights:
            self.copy = stored(self._params, "weights", plan.dtype)
        elif plan.trains and not self.sharded:
            self.copy = Store.of(self.shard)
        if plan.trains and self.copy is not NO_COPY:
            self.copy = self._optim.fed(self.copy)

    @without_grad
    def enable_training(self) -> None:
        """Make the master weights if there are none; called late when frozen parameters are unfrozen."""
        if self.master is not None:
            return
        frozen, self.frozen, self.plan = self.frozen, None, replace(self.plan, trains=True)
        if self.copy is not NO_COPY:
            self.copy.discard()
            self.copy = NO_COPY
        if self.plan.master_is_view:
            self.master = self._compute
        elif frozen is None:
            self.keep(self.shard)
        elif frozen.dtype == self.plan.master and not self._optim.offloads and not frozen.streamed:
            self.master = frozen
            self.copy = NO_COPY if self.sharded else Store.of(self.shard)
        else:
            self.keep(frozen.read())
            frozen.discard()
        # Do not leave it to a step: the bucket may never be stepped.
        put_away(self.stores())

    @property
    def sharded(self) -> bool:
        """True if parameters are sharded, so that the flat tensor is released at times."""
        return self.plan.sharding.params

    @property
    def codec(self) -> Codec | None:
        """The codec with which updates of unsharded weights are gathered."""
        return self.plan.codec

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
        return [store for store in (self.master, self.frozen, self.copy) if store is not None and store is not NO_COPY]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that weights apart from the flat tensor take now."""
        copy = self.copy.nbytes if self.sharded else 0
        return copy + (self._kept.nbytes if self.has_master else 0)

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
        _own(self.background)
        return self._kept.read()

    def writable_values(self) -> Tensor:
        """``values()``, for writing."""
        _own(self.background)
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
        _own(self.background)
        self.copy.refresh(self._kept, self.written, self.gaps)
        self.written, self.shown = True, None

    def follow_edit(self) -> None:
        """Update what gathers read after an edit of ``writable_values()``, and write streamed stores."""
        if self.sharded:
            self.written = False
            self.refresh()
            self.written = False
            self.copy.wait_copied()
        put_away(self.stores())

    @torch.no_grad()
    def keep_edits(self) -> None:
        """Copy edits of the (gathered) flat tensor to the master weights."""
        if not self.has_master:
            return
        # Only edited elements: the others are more precise in the master weights.
        kept = self.values()
        shown = self.shard.to(kept.device)
        edited = kept.to(shown.dtype) != shown
        if self.codec is not None:
            before = self.codec.decoded(kept.to(shown.dtype)) if self.shown is None else self.shown.to(shown.device)
            edited &= before != shown
            self.note_shown()
        if not self._optim.offloads:
            # Select with ``where``: indexing by a mask would wait for the GPU.
            self.writable_values().copy_(torch.where(edited, shown.to(kept.dtype), kept))
            self.follow_edit()
        elif bool(edited.any()):
            master = self.writable_values()
            master[edited] = shown[edited].to(master.dtype)
            self.follow_edit()
        else:
            put_away(self.stores())

    def note_shown(self, rows: slice = slice(None)) -> None:
        """Remember the compute copy of these elements, which were edited, until the next step."""
        if self.codec is None:
            return
        if self.shown is None:
            self.shown = self.shard.clone()
        else:
            self.shown[rows].copy_(self.shard[rows])


def _own(background: BackgroundStep) -> None:
    """Wait until this thread may use the bucket."""
    if background.job is not None:
        background.wait()


# (id of a deferred factor, device) -> that factor, and its product with another one. Buckets with equal factors keep
# sharing one tensor, and with it a call of the kernel.
Products = dict[tuple[int, torch.device], tuple[Tensor | None, Tensor]]


class Accumulator:
    """The gradients of one bucket on this rank.

    The reduced ones, of the same elements as the master weights, are in a store of the place of optimizer states. They
    are valid for the parameters in ``valid``, and zero in the gaps. What is stored may have yet to be multiplied by a
    deferred factor (fused_step.py, Note [Deferred factor]): ``stored`` returns both, everything else the products.
    Those of an accumulation window that were not reduced yet are in ``local`` (all elements).
    """

    def __init__(
        self,
        plan: BucketPlan,
        storage: StoragePlan,
        layout: BucketLayout,
        pieces: Sequence[Piece],  # of the layout, in ``shard_range``
        shard_range: tuple[int, int],  # the elements that this rank accumulates
        group: ShardGroup,
        background: BackgroundStep,
    ) -> None:
        self._name, self._params, self._layout, self._group = plan.name, [p for _, p in plan.parameters], layout, group
        self._gradient_of = plan.gradient_of
        self._numel, self._pieces = shard_range[1] - shard_range[0], pieces
        self._plan, self.dtype, self._background = storage, storage.accumulate, background
        self._store = self._none = Store(self.dtype, partial(torch.empty, 0))  # from the place, kept from step to step
        self.values = self._none  # ``_store``, or what replaces it in this step; ``_none``: nothing is accumulated
        self.changes = 0  # counts changes of the gradients
        self._dropping = False  # ``_drop`` is queued
        self._factor: Tensor | None = None  # deferred; 0D
        self.valid: set[int] = set()  # parameters that were reduced since their gradient was cleared
        self.used: set[int] = set()  # parameters that had a gradient on this rank
        self.local: Tensor | None = None  # 1D, all elements: gradients not reduced yet (stages 0 and 1)

    def use(self, place: Place) -> None:
        """Keep the accumulator in ``place``."""
        self._place, self._store = place, self._none

    def send_dtype(self, have: torch.dtype) -> torch.dtype:
        """Dtype in which gradients of dtype ``have`` are sent: as configured, else ``have`` if that is as precise."""
        return self._plan.send_dtype(have)

    @without_grad
    def take(self, out: Tensor, add: bool, factor: float = 1.0) -> None:
        """Move the parameters' gradients times ``factor``, or zeros, into ``out`` (1D, all elements), or add them."""
        # Collected for the kernel, which casts and scales in one pass; torch would need two.
        targets, grads = [], []
        for index, (parameter, span) in enumerate(zip(self._params, self._layout.spans, strict=True)):
            grad, target = self._gradient_of(parameter), out[span.lo : span.hi].view(span.shape)
            if grad is None:
                if not add:
                    target.zero_()
                continue
            grad = grad.to_dense() if grad.layout is not torch.strided else grad
            # On a GPU one launch for all of them; on a CPU the kernel is no faster than torch without a cast.
            if (grad.dtype != out.dtype or factor != 1.0 or accelerator.holds(grad)) and ops.fits(out, grad, add):
                targets.append(target)
                grads.append(grad)
            elif add:
                target.add_(grad)
            elif factor == 1.0 or target.dtype.itemsize > grad.dtype.itemsize:
                target.copy_(grad)
                target.mul_(factor) if factor != 1.0 else None
            else:
                # Multiply before the product is rounded to the narrower dtype.
                torch.mul(grad, factor, out=target)
            self.used.add(index)
            parameter.grad = None
        if targets and add:
            ops.accumulate(targets, grads)
        elif targets:
            ops.cast_scale(targets, grads, factor=factor)
        for lo, hi in self._layout.gaps if not add else ():
            out[lo:hi].zero_()

    @property
    def direct(self) -> bool:
        """True if ``launch_take`` does the work of ``launch_reduce``: one rank, and no other dtype on the wire."""
        return self._plan.direct

    def launch_take(self) -> Waits:
        """Move the parameters' gradients into the accumulator of a single rank, without a send buffer."""

        def take(out: Tensor, add: bool) -> Waits:
            self.take(out, add)
            return Done()

        return self.launch_reduce(take)

    def launch_reduce(self, reduce: Reduce) -> Waits:
        """Start ``reduce``, which has the gradients of all elements, into the accumulator."""
        add = self._begin()
        return self.values.launch_reduce(reduce, add)

    def _begin(self) -> bool:
        """Prepare the accumulator for a reduction that is launched next; returns whether that adds to what is there."""
        self.apply_deferred_scale()
        if self._store is self._none:
            self._store = self._place.store("grad", self._numel, self.dtype)
        if not self.accumulated:
            self.values = self._store
        add = bool(self.valid)
        self.changes += 1
        self.valid.update(i for i, p in enumerate(self._params) if p.requires_grad)
        return add

    @property
    def accumulated(self) -> bool:
        return self.values is not self._none

    def stored(self) -> tuple[Tensor, Tensor | None]:
        """The stored values (1D, elements [shard_range)), read-only, and the factor (0D) that they lack; None: 1."""
        _own(self._background)
        return self.values.read(), self._factor

    def read(self) -> Tensor:
        """The gradients (1D, elements [shard_range)), read-only; a copy if a factor is deferred."""
        return self._product(slice(None))

    def write(self) -> Tensor:
        """The gradients (1D, elements [shard_range)), for writing."""
        self.apply_deferred_scale()
        self.changes += 1
        return self.values.write()

    def of(self, piece: Piece, write: bool = True) -> Tensor:
        """The gradient (1D) of one of this rank's pieces; without ``write`` as in ``read``."""
        rows = slice(piece.offset, piece.offset + piece.numel)
        return self.write()[rows] if write else self._product(rows)

    def _product(self, rows: slice) -> Tensor:
        # The stored values are left alone: reading on one rank must not round what the step multiplies unrounded.
        values, factor = self.stored()
        if factor is None:
            return values[rows]
        return values[rows].to(wide(values.dtype)) * factor.to(values.device)

    @property
    def held(self) -> set[int]:
        """Parameters with gradients in the accumulator or ``local``."""
        return self.valid | self.used

    @without_grad
    def clear(self, indices: set[int]) -> None:
        """Drop the accumulated gradients of the given parameters."""
        self.changes += 1
        self.valid -= indices
        self.used -= indices
        if not self.valid and not self.used:
            if not self._dropping:
                self._dropping = True
                # The next reduction starts from zero.
                self._drop() if self._background.job is None else self._background.then(self._drop)
            return
        _own(self._background)
        if self.local is not None:
            for span in map(self._layout.spans.__getitem__, indices):
                self.local[span.lo : span.hi].zero_()
        for piece in self._pieces if self.accumulated else ():
            if piece.index in indices:
                self.of(piece).zero_()
        self.put_away()

    def _drop(self) -> None:
        self._dropping = False
        if not self.valid and not self.used:
            self.local = self._factor = None
            self.values.discard()
            self.values = self._none

    def stores(self) -> list[Store]:
        return [store for store in dict.fromkeys((self._store, self.values)) if store is not self._none]

    @property
    def streamed(self) -> bool:
        """True if there is an accumulator that takes memory only while it is used."""
        return self.values.streamed

    def end_use(self) -> None:
        """Start writing a streamed accumulator; ``put_away`` completes it."""
        _own(self._background)
        self.values.end_use()

    def put_away(self) -> None:
        """Write a streamed accumulator and free its memory."""
        self.end_use()
        self.values.wait_written()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the accumulator takes now."""
        return sum(store.nbytes for store in self.stores())

    def defer(self, factor_on: Callable[..., Tensor], products: Products) -> None:
        """Multiply the gradients by a number later.

        Args:
            factor_on: ``factor_on(device=...)`` is the number (0D) there.
            products: the same object for all buckets, {} at first.
        """
        _own(self._background)
        self.changes += 1
        # On the host where the background step reads it: it would wait for all work queued on the device by then.
        place, before = torch.device("cpu") if self._place.offloads else self._group.device, self._factor
        if (key := (id(before), place)) not in products:
            factor = factor_on(device=place)
            products[key] = before, factor if before is None else before * factor
        self._factor = products[key][1]

    def apply_deferred_scale(self) -> None:
        """Multiply by the deferred factor."""
        _own(self._background)
        factor, self._factor = self._factor, None
        if factor is not None and self.accumulated:
            self.widen_fp16()
            with torch.no_grad():
                self.changes += 1
                grad = self.values.write()
                grad.mul_(factor.to(grad.device))

    def widen_fp16(self) -> None:
        """Convert an fp16 accumulator to fp32 before unscaling, where small gradients would underflow."""
        if self.accumulated and self.values.dtype == torch.float16:
            _own(self._background)
            self.changes += 1
            self.values = self.values.widened()
