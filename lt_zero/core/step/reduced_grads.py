"""The reduced gradients of one optimizer between backward and step: their norm, clipping and unscaling.

Note [Unused parameters]
    A zero gradient is not "no gradient": AdamW would decay and move a parameter that no rank used. The ranks agree
    on the used parameters, and fragments of the others have ``grad=None`` in this step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lt_zero import kernels as ops
from lt_zero.common import accelerator
from lt_zero.common.compat import without_grad
from lt_zero.common.phases import phased
from lt_zero.core.comm.shard_group import ShardGroup, combine_rows
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.grad_accumulator import Products
from lt_zero.core.engine.visible_grads import is_view
from lt_zero.core.step.param_groups import ShardedParamGroups, StepPlan, edges_of

if TYPE_CHECKING:
    from lt_zero.common.norms import VectorNorm


class ReducedGrads:
    """The accumulated gradients of one optimizer's parameters, including parameters in no bucket.

    Attributes:
        loss_scale: that the gradients carry; see loss_scale.py.
    """

    def __init__(self, fragments: ShardedParamGroups) -> None:
        self._fragments, self._engine = fragments, fragments.engine
        self.loss_scale = 1.0

    # ---- which there are ---------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """The plan of a step with the gradients that there are. Collective."""
        plan = self._fragments.plan(self._engine.finish_reductions())
        self._engine.exchange.note_used(plan.used)
        return plan

    def exist(self) -> bool:
        """True if any rank has a gradient for this optimizer. Collective."""
        used = self._engine.finish_reductions()
        return bool(self._foreign()) or bool(self._fragments.plan(used).used)

    def _foreign(self) -> list[Tensor]:
        """The gradients of parameters that the engine does not own."""
        return [p.grad for p in self._fragments.parameters() if id(p) not in self._engine.owner and p.grad is not None]

    # ---- their values ------------------------------------------------------------------------------------------

    def _by_factor(self) -> Iterator[tuple[list[Tensor], Tensor | None, ShardGroup]]:
        """This rank's gradients (1D rows), read-only, the deferred factor (0D) that these lack, and their group.

        First those in files, bucket by bucket: each accumulator is in memory until the next is asked for. Then all
        others. Neighbours in a bucket share a row, with the zeros between them. Collective.
        """
        first = self._engine.groups[0]
        together: dict[tuple[int, ShardGroup], tuple[list[Tensor], Tensor | None]] = {}
        plan = self.plan()
        for bucket in plan.used:
            stored, factor = bucket.grads.stored()
            rows = [stored[lo:hi] for lo, hi in plan.steps[bucket].edges]
            if bucket.grads.streamed:
                yield rows, factor, bucket.group
                bucket.grads.put_away()
            else:
                together.setdefault((id(factor), bucket.group), ([], factor))[0].extend(rows)
        together.setdefault((id(None), first), ([], None))[0].extend(self._foreign())
        for (_, group), (rows, factor) in together.items():
            yield rows, factor, group

    @without_grad
    def multiply(self, factor: Tensor) -> None:
        """Multiply the gradients by ``factor`` (0D, not negative), now or later in the kernel. Collective."""
        self.plan()
        self._multiply(factor.to)

    @without_grad
    def carry(self, scale: float) -> None:
        """Let all gradients, reduced or not, carry this loss scale. Not collective."""
        self._engine.exchange.set_loss_scale(scale)
        self._engine.grad_views.expect_factor(rounds=_rounds(scale))
        if scale != self.loss_scale:
            factor, self.loss_scale = scale / self.loss_scale, scale
            # A factor that rounds is multiplied together with that of clipping, so that the bits are the same at all
            # stages.
            self._multiply(partial(torch.full, (), factor, dtype=self._dtype), rounds=_rounds(factor))

    def _multiply(self, factor_on: Callable[..., Tensor], rounds: bool = False) -> None:
        """Multiply by ``factor_on(device=...)`` (0D). If it ``rounds``, views in ``p.grad`` become stand-ins."""
        views, places = self._engine.grad_views, self._fragments.places()
        views.scaled(places, factor_on(device=self._engine.device))
        for grad in [*views.unreduced(places), *self._foreign()]:
            grad.mul_(factor_on(device=grad.device))
        products: Products = {}
        for bucket, mine in self._fragments.indices().items():
            grads = bucket.grads
            # fused_step.py, Note [Deferred factor]; not those with views in ``p.grad``
            if grads.valid and grads.valid <= mine and (rounds or not is_view(bucket)):
                views.show_products(bucket)
                grads.defer(factor_on, products)
            elif found := grads.valid & mine:
                grads.widen_fp16()
                for grad in _rows(bucket, found):
                    grad.mul_(factor_on(device=grad.device))
                grads.put_away()
            if (local := grads.local) is not None:
                for span in (bucket.layout.spans[index] for index in mine):
                    local[span.lo : span.hi].mul_(factor_on(device=local.device))

    # ---- norm, clipping, unscaling -----------------------------------------------------------------------------

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype of norms and factors: the kernels take fp32 factors, and step no fp64 bucket."""
        accumulators = {bucket.grads.dtype for bucket in self._engine.buckets if bucket.wants_grad}
        return torch.float64 if accumulators == {torch.float64} else torch.float32

    @phased("clip")
    @without_grad
    def norm(self, norm_type: float = 2.0) -> Tensor:
        """The global norm (0D, fp32; fp64 if all accumulators are) of the accumulated gradients. Collective.

        As ``torch.nn.utils.get_total_norm`` it is the norm of the norms of all gradients, which for order 0 counts the
        gradients that are not all zeros. The 2-norm is finite unless a gradient of some rank is not, or is too large to
        be squared. While ranks step with their own gradients it is the power mean of their norms, so that they agree.

        Args:
            norm_type: any order that ``torch.linalg.vector_norm`` takes.

        Raises:
            RuntimeError: the order is 0, and ranks step with their own gradients.
        """
        options = self._engine.options
        if norm_type != 2.0 or options.norms is not None:
            return self._norm_of_order(options.norm_of(norm_type))
        engine, device = self._engine, self._engine.device
        # In fp64: squares of finite fp32 gradients may overflow fp32, and the norm is the test for overflow.
        total = torch.zeros((), dtype=torch.float64, device=device)
        for rows, factor, group in self._by_factor():
            squares = _squares(rows, device)
            squares = squares if factor is None else squares * factor.to(device, torch.float64) ** 2
            share = self._share(group)
            total = total + squares * share if share else total
        if self._sums_over_ranks:
            total = engine.world.sum_all(total, "gradient norm")
        if engine.exchange.ranks_step_apart:
            total = total / engine.world.size
        return total.sqrt().to(self._dtype)

    def unscaled_norm(self, norm_type: float = 2.0) -> Tensor:
        """``norm`` of the gradients without the loss scale that they carry. Collective."""
        norm = self.norm(norm_type)
        return norm if norm_type == 0.0 else norm / self.loss_scale

    @property
    def _sums_over_ranks(self) -> bool:
        """True if this rank's gradients are not all that there are."""
        engine = self._engine
        return engine.exchange.ranks_step_apart or engine.sharded_optim or engine.has_groups

    def _norm_of_order(self, kind: VectorNorm) -> Tensor:
        """``norm`` of any order."""
        engine = self._engine
        apart = engine.exchange.ranks_step_apart
        device = engine.device
        if kind.order == 0.0:
            return self._count_nonzero_gradients(kind)
        total = kind.nothing(1, device)[0]
        # The zeros between parameters would count in a minimum, and in sums of negative powers.
        for rows, factor, group in self._by_factor() if kind.order > 0.0 else self._each():
            if share := self._share(group):
                total = kind.combine(total, kind.part(rows, device, share, factor))
        if self._sums_over_ranks:
            combine = engine.world.max_all if kind.takes_maximum else engine.world.sum_all
            total = combine(total, "gradient norm")
        return kind.finish(total[None], among=engine.world.size if apart else 1)[0].to(self._dtype)

    def _count_nonzero_gradients(self, kind: VectorNorm) -> Tensor:
        """The norm of order 0, which torch takes of the norms of all gradients: how many of them are not all zeros.

        Raises:
            RuntimeError: the ranks step with their own gradients.
        """
        engine = self._engine
        if engine.exchange.ranks_step_apart:
            raise RuntimeError(
                "norm_type=0: the ranks step with their own gradients, whose norms of order 0 have no mean. Use "
                "another order, such as 2."
            )
        device = engine.device
        sums = self._sums_over_ranks
        places = [(bucket, index) for bucket, indices in self.plan().used.items() for index in indices]
        table = kind.nothing(len(places), device)
        for number, (bucket, index) in enumerate(places):
            if not (sums and bucket.repeats(index)):
                table[number] = kind.part(
                    (bucket.grads.of(piece, write=False) for piece in bucket.pieces_of(index)), device
                )
            if number + 1 == len(places) or places[number + 1][0] is not bucket:
                bucket.grads.put_away()
        shares = [1.0] * len(places)
        if sums and places:
            table = combine_rows(table, [bucket.holders(index) for bucket, index in places], "gradient norms")
            shares = [bucket.group.norm_share * (bucket.holders(index).rank == 0) for bucket, index in places]
        total = ((table[:, 0] > 0) * torch.tensor(shares, dtype=torch.float64, device=device)).sum()
        for grad in self._foreign():
            total = total + (kind.part([grad], device)[0] > 0) * self._share(engine.groups[0])
        total = engine.world.sum_all(total, "gradient norm") if sums else total
        return total.to(self._dtype)

    def _each(self) -> Iterator[tuple[list[Tensor], None, ShardGroup]]:
        """This rank's elements (1D rows) of each gradient, as ``_by_factor``, but without those between. Collective."""
        for bucket, indices in self.plan().used.items():
            for index in indices:
                yield [bucket.grads.of(piece, write=False) for piece in bucket.pieces_of(index)], None, bucket.group
            bucket.grads.put_away()
        for grad in self._foreign():
            yield [grad], None, self._engine.groups[0]

    def _share(self, group: ShardGroup) -> float:
        """The factor of this rank's sums over the gradients of ``group`` in a sum over the world.

        So each element counts once: replicas, and other ranks that have all of it, contribute nothing.
        """
        engine = self._engine
        if not self._sums_over_ranks:
            return 1.0
        apart = engine.exchange.ranks_step_apart
        repeats = group.mesh.replica > 0 if engine.sharded_optim else group.rank > 0 and not apart
        return 0.0 if repeats else group.norm_share

    def expect_clipping(self, max_norm: float) -> None:
        """Tell that ``clip_norm(max_norm)`` follows: some exchanges clip before anything reads the gradients."""
        self._engine.exchange.expect_clipping(max_norm)

    @phased("clip")
    @without_grad
    def clip_norm(self, max_norm: float, norm: Tensor | None = None, norm_type: float = 2.0) -> Tensor:
        """Unscale the gradients and scale them down to a global norm of ``max_norm``, in one pass.

        The same formula as ``torch.nn.utils.clip_grad_norm_``. Collective.

        Args:
            max_norm: the limit.
            norm: the norm of the unscaled gradients; None: it is computed.
            norm_type: of the norm.

        Returns:
            The norm (0D) of the unscaled gradients before clipping.

        Raises:
            RuntimeError: the ranks have exchanged something else already, or cannot clip by this norm.
        """
        self._engine.same_on_ranks.note_value(f"the {norm_type:g}-norm to which gradients are clipped", max_norm)
        self._engine.exchange.check_clipping(norm_type)
        if self._engine.exchange.clips_before_exchange:
            return self._clip_exchanged(max_norm)
        norm = self.unscaled_norm(norm_type) if norm is None else norm
        self.multiply(torch.clamp(max_norm / (norm + 1e-6), max=1.0) / self.loss_scale)
        self.loss_scale = 1.0
        return norm

    @phased("clip")
    @without_grad
    def clip_value(self, limit: float) -> None:
        """Clamp each element of the averaged gradients to [-limit, limit]. Collective."""
        self._engine.exchange.check_clipping(None)
        self._engine.same_on_ranks.note_value("the value to which gradients are clipped", limit)
        for bucket, indices in self.plan().used.items():
            for grad in _rows(bucket, indices):
                grad.clamp_(-limit, limit)
            bucket.grads.put_away()
        for grad in self._foreign():
            grad.clamp_(-limit, limit)
        self._engine.grad_views.changed()

    def _clip_exchanged(self, max_norm: float) -> Tensor:
        """Let the exchange clip, if it has not yet been launched, and unscale; returns the norm."""
        self.expect_clipping(max_norm)
        used = self.plan().used
        self.unscale()
        return self._engine.exchange.clipped_norm(max_norm) if used else torch.zeros((), device=self._engine.device)

    @phased("clip")
    @without_grad
    def unscale(self) -> None:
        """Divide the accumulated gradients by the loss scale that they carry. Collective."""
        if self.loss_scale != 1.0:
            self.plan()
            self.carry(1.0)


def _rounds(factor: float) -> bool:
    """True if products with ``factor`` may be rounded: it is no power of two."""
    return math.frexp(factor)[0] != 0.5


def _rows(bucket: Bucket, indices: Collection[int]) -> list[Tensor]:
    """The accumulated gradients of these parameters, for writing."""
    wanted = set(indices)
    if not (edges := edges_of(piece for piece in bucket.pieces if piece.index in wanted)):
        return []
    grad = bucket.grads.write()
    return [grad[lo:hi] for lo, hi in edges]


def _squares(grads: list[Tensor], device: torch.device) -> Tensor:
    """The sum of squares (0D fp64)."""
    simple: dict[torch.device, list[Tensor]] = {}
    others: list[Tensor] = []
    for grad in grads:
        fits = grad.dtype in ops.DTYPES and grad.is_contiguous()
        (simple.setdefault(grad.device, []) if fits else others).append(grad)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for rows in simple.values():
        found = ops.norm_squared(rows)
        # That of gradients in host memory goes to the device without a wait.
        total = total + (found.to(device) if accelerator.holds(found) else accelerator.send(found, device))
    # These are of parameters that the engine does not own, or that the kernel does not take.
    for grad in others:
        dense = grad.to_dense() if grad.layout is not torch.strided else grad
        dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        total = total + dense.double().square().sum().to(device)
    return total
