"""The gradients of a bucket on one rank: taken from the parameters, and accumulated until the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from lt_zero import kernels as ops
from lt_zero.common import accelerator
from lt_zero.common.compat import without_grad
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.transport import Replicas
from lt_zero.core.engine.layout import BucketLayout, Piece
from lt_zero.core.engine.partition import BucketPlan
from lt_zero.core.engine.storage_plan import StoragePlan
from lt_zero.core.stores.store import BackgroundStep, Places, Store
from lt_zero.kernels.flat import wide

# (id of a deferred factor, device) -> that factor, and its product with another one. Buckets with equal factors keep
# sharing one tensor, and with it a call of the kernel.
Products = dict[tuple[int, torch.device], tuple[Tensor | None, Tensor]]


class GradState(Enum):
    """The content of a bucket's accumulator on this rank."""

    __hash__ = object.__hash__  # Enum's is a function in Python

    NONE = "nothing"
    PARTIAL = "sums over the ranks of one replica (transport.py, Note [Shard groups]): of all replicas, the gradients"
    COMPLETE = "the gradients"
    STEPPED = "the gradients, with which a background step beside the running backward has changed the weights"
    DROPPED = "what was cleared, and the background step may still read"


# What may follow; anything else is an error of this package.
_NEXT = {
    GradState.NONE: (GradState.PARTIAL, GradState.COMPLETE, GradState.DROPPED),
    GradState.PARTIAL: (GradState.PARTIAL, GradState.COMPLETE, GradState.DROPPED),
    GradState.COMPLETE: (
        GradState.PARTIAL,
        GradState.COMPLETE,
        GradState.STEPPED,
        GradState.DROPPED,
    ),
    GradState.STEPPED: (GradState.COMPLETE, GradState.DROPPED),
    GradState.DROPPED: (GradState.NONE, GradState.COMPLETE),
}


class GradAccumulator:
    """The gradients of one bucket on this rank.

    The reduced ones, of the same elements as the master weights, are in a store of the place of optimizer states. They
    are valid for the parameters in ``valid``, and zero in the gaps. What is stored may have yet to be multiplied by a
    deferred factor (fused_step.py, Note [Deferred factor]): ``stored`` returns both, everything else the products.
    ``shown`` lends the products to user code; what that leaves as it is gets its factor back, so that reading on one
    rank rounds nothing that other ranks do not round.
    Those of an accumulation window that were not reduced yet are in ``local`` (all elements).

    Attributes:
        sums: what is stored.
        values: the store, or what replaces it in this step; an empty one: nothing is accumulated.
        changes: counts changes of the gradients.
        valid: parameters that were reduced since their gradient was cleared.
        used: parameters that had a gradient on this rank.
        local: gradients that are not reduced yet (1D, all elements), at stages 0 and 1.
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
        places: Places,
    ) -> None:
        self._name = plan.name
        self._params = [p for _, p in plan.parameters]
        self._layout = layout
        self._group = group
        self._gradient_of = plan.gradient_of
        self._numel, self._pieces = shard_range[1] - shard_range[0], pieces
        self._plan = storage
        self.dtype = storage.accumulate
        self._background = background
        self._places = places
        self._sends = storage.send_dtype(storage.dtype)
        self._store = self._none = Store(self.dtype, partial(torch.empty, 0))  # from the place, kept from step to step
        self.values = self._none
        self.sums = GradState.NONE
        self.changes = 0
        self._factor: Tensor | None = None  # deferred; 0D
        # While ``values`` are the products that ``shown`` has lent: what was stored, and its factor.
        self._lent: tuple[Tensor, Tensor] | None = None
        self.valid: set[int] = set()
        self.used: set[int] = set()
        self.local: Tensor | None = None

    def _enter(self, sums: GradState) -> None:
        assert sums in _NEXT[self.sums], (self._name, self.sums, sums)
        self.sums = sums

    def send_dtype(self, have: torch.dtype) -> torch.dtype:
        """Dtype in which gradients of dtype ``have`` are sent: as configured, else ``have`` if that is as precise."""
        return self._sends if have == self._plan.dtype else self._plan.send_dtype(have)

    @without_grad
    def take(self, out: Tensor, add: bool, factor: float = 1.0) -> None:
        """Move the parameters' gradients times ``factor``, or zeros, into ``out`` (1D, all elements), or add them."""
        # Collected for the kernel, which casts and scales in one pass; torch would need two.
        targets = []
        grads = []
        # On a GPU one launch for all of them; on a CPU the kernel is no faster than torch without a cast.
        collects = factor != 1.0 or accelerator.holds(out)
        for index, (parameter, span) in enumerate(zip(self._params, self._layout.spans, strict=True)):
            grad = self._gradient_of(parameter)
            target = out[span.lo : span.hi].view(span.shape)
            if grad is None:
                if not add:
                    target.zero_()
                continue
            grad = grad.to_dense() if grad.layout is not torch.strided else grad
            if (collects or grad.dtype != out.dtype) and ops.fits(out, grad, add):
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

    def begin_early_step(self) -> None:
        """COMPLETE -> STEPPED: no gather may follow in the running backward. core/step/background_steps.py."""
        self._enter(GradState.STEPPED)

    def end_early_step(self) -> None:
        """STEPPED -> COMPLETE: this backward is over. No-op elsewhere."""
        if self.sums is GradState.STEPPED:
            self._enter(GradState.COMPLETE)

    def note_used(self, index: int) -> None:
        """Note that a parameter has a gradient on this rank: user code has assigned one."""
        self.used.add(index)

    def drop_local(self) -> None:
        """Forget ``local``, which was copied to a buffer that is sent."""
        self.local = None

    def drop_stored(self) -> None:
        """Free the stored values, which a step has read, until they are cleared: a file need not be written."""
        self.values.discard()

    def accumulate_local(self) -> None:
        """Move the parameters' gradients into ``local``, or add them there."""
        add = self.local is not None
        if self.local is None:
            self.local = torch.empty(self._layout.numel, dtype=self.dtype, device=self._group.device)
        self.take(self.local, add)

    @property
    def skips_collective(self) -> bool:
        """True if gradients go to the accumulator as they are: one rank, and no other dtype on the wire."""
        return self._plan.skips_collective

    def target(self, replicas: Replicas = Replicas.SENT, whole: bool = False) -> tuple[Tensor, bool]:
        """The tensor (1D, elements [shard_range)) for the result of a reduction that is launched next.

        Returns it, and whether the reduction has to add to it. Call ``arrived`` once the result is there.

        Args:
            replicas: what is summed over them: ``RESULT`` exactly if it is PARTIAL, unless it stays so.
            whole: what there is has to be in the tensor, one by one is added to it: no sum is added afterwards.
        """
        self.apply_deferred_scale()
        if self._store is self._none:
            self._store = self._places.step.store("grad", self._numel, self.dtype)
        if not self.accumulated:
            self.values = self._store
        if (
            replicas is Replicas.NOTHING
            and self.valid
            and self.sums is not GradState.PARTIAL
            and not self.stands_for_all
        ):
            # What is here is summed over the replicas already: one of them keeps it for the sum of all.
            self.values.overwrite().zero_()
        add = bool(self.valid)
        target = self.values.target(add, whole=replicas is Replicas.RESULT or (whole and add))
        self._enter(GradState.PARTIAL if replicas is Replicas.NOTHING else GradState.COMPLETE)
        self.changes += 1
        self.valid.update([index for index, parameter in enumerate(self._params) if parameter.requires_grad])
        return target

    def partial_target(self) -> Tensor:
        """The PARTIAL values (1D, elements [shard_range)) on the device, to be summed over the replicas in place.

        Call ``arrived`` once the sums are there.
        """
        self.apply_deferred_scale()
        target, _ = self.values.target(add=True, whole=True)
        self._enter(GradState.COMPLETE)
        self.changes += 1
        return target

    @property
    def stands_for_all(self) -> bool:
        """True if this rank's replica has, while all are PARTIAL, what is the same for all of them."""
        return self._group.mesh.replica == 0

    def arrived(self) -> None:
        """Take the result of a reduction, which is in ``target`` now."""
        self.values.arrived()

    @property
    def accumulated(self) -> bool:
        return self.values is not self._none

    def stored(self) -> tuple[Tensor, Tensor | None]:
        """The stored values (1D, elements [shard_range)), read-only, and the factor (0D) that they lack; None: 1."""
        self._background.wait()
        self._end_lending()
        return self.values.read(), self._factor

    @property
    def lacks_factor(self) -> bool:
        """True if a factor is deferred, so that the stored values are not the gradients."""
        return self._factor is not None or self._lent is not None

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

    @without_grad
    def shown(self, piece: Piece) -> Tensor:
        """The gradient (1D) of one of this rank's pieces, which user code may change, or only read."""
        self._background.wait()
        if self._lent is None and self._factor is not None:
            lent = self.values.read().clone(), self._factor
            self.apply_deferred_scale()
            self._lent = lent
        self.changes += 1
        return self.values.write()[piece.offset : piece.offset + piece.numel]

    def _end_lending(self) -> None:
        """Take back the products that ``shown`` has lent, if there are any."""
        if (lent := self._lent) is not None:
            self._lent = None
            if self.accumulated:
                self._take_back(*lent)

    @without_grad
    def _take_back(self, before: Tensor, factor: Tensor) -> None:
        """Defer the factor again if the products are as they were lent; ``before``: what was stored."""
        values = self.values.read()
        if torch.equal(values, before.to(values.dtype) * factor.to(values.device)):
            self.values.write().copy_(before)
            self._factor = factor

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
            if self.sums is not GradState.DROPPED:
                self._enter(GradState.DROPPED)
                # The next reduction starts from zero.
                self._background.then(self._drop)
            return
        if self.sums is GradState.PARTIAL and not self.valid:
            self._enter(GradState.COMPLETE)
        self._background.wait()
        if self.local is not None:
            for span in map(self._layout.spans.__getitem__, indices):
                self.local[span.lo : span.hi].zero_()
        for piece in self._pieces if self.accumulated else ():
            if piece.index in indices:
                self.of(piece).zero_()
        self.put_away()

    def _drop(self) -> None:
        if self.valid or self.used:  # there are gradients again
            self._enter(GradState.COMPLETE)
            return
        self.local = self._factor = self._lent = None
        self.values.discard()
        self.values = self._none
        self._enter(GradState.NONE)

    def stores(self) -> list[Store]:
        return [store for store in dict.fromkeys((self._store, self.values)) if store is not self._none]

    @property
    def streamed(self) -> bool:
        """True if there is an accumulator that takes memory only while it is used."""
        return self.values.streamed

    def end_use(self) -> None:
        """Start writing a streamed accumulator; ``put_away`` completes it."""
        self._background.wait()
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
        self._background.wait()
        self._end_lending()
        self.changes += 1
        # On the host where the background step reads it: it would wait for all work queued on the device by then.
        place, before = torch.device("cpu") if self._places.step.offloads else self._group.device, self._factor
        if (key := (id(before), place)) not in products:
            factor = factor_on(device=place)
            products[key] = before, factor if before is None else before * factor
        self._factor = products[key][1]

    def apply_deferred_scale(self) -> None:
        """Multiply by the deferred factor."""
        self._background.wait()
        self._end_lending()
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
            self._background.wait()
            self.changes += 1
            self.values = self.values.widened()
