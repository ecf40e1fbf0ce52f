"""The momenta of 1-bit optimizers, averaged over the ranks in 1 bit (arXiv:2102.02888, algorithm 1).

Note [Averages of momenta]
    While an optimizer warms up, gradients are averaged as always. Then each rank keeps its gradients to itself until
    the step. There it adds them to the last averaged momentum, and what is averaged, with the residuals of
    exchange/error_feedback.py, is the result. The accumulators get it in the place of gradients, times the loss scale
    that they carry: an overflow of one rank reaches all of them, and a step can be skipped as any other.
    Gradients are clipped before that, by one factor for all ranks: no rank knows the mean gradient, so what is limited
    is the root mean square of the norms of the ranks' own gradients, which is at least its norm.
    Momenta are needed in full by all ranks. At stage 0 they are the optimizer's states. At stage 1 those are sharded,
    so each rank has a full copy beside them (fp32), which is gathered once at the freeze and after a load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lt_zero.core.comm.residuals import Residuals
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.work import Work
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.exchange import OptimizerFragments
from lt_zero.core.engine.grad_reducer import IN_FLIGHT
from lt_zero.core.engine.layout import BucketLayout
from lt_zero.core.engine.storage_plan import StoragePlan
from lt_zero.exchange.error_feedback import FP32, ErrorFeedback, FeedbackExchange, FeedbackPlan, compressed
from lt_zero.features.one_bit.onebit import OneBitOptimizer

_NO_MEAN = "not with a 1-bit optimizer: after freeze_step no rank has the mean gradient."


class AveragedMomenta(FeedbackPlan):
    """Plan of the exchange of a 1-bit optimizer."""

    @property
    @override
    def waits_for_step(self) -> bool:
        return True

    @override
    def everywhere(self, is_cut: bool) -> bool:
        return True

    def copies_momenta(self, row: StoragePlan) -> bool:
        """True if this rank has the momenta of a bucket in full beside those of its shard."""
        return row.codecs.reductions is not None and not row.is_whole

    @override
    def kept_nbytes(self, row: StoragePlan, layout: BucketLayout) -> int:
        """Bytes of residuals, and of full momenta with the elements of them that move (``MomentumFeedback``)."""
        momenta = row.numel if row.trains and self.copies_momenta(row) else 0
        return super().kept_nbytes(row, layout) + momenta * (FP32 + torch.bool.itemsize)

    @override
    def step_nbytes(self, rows: Sequence[StoragePlan]) -> int:
        """Bytes of the next full momenta, of what is sent and of what is received."""
        copied = sum(row.numel for row in rows if self.copies_momenta(row))
        largest = sorted((row.numel for row in rows if row.codecs.reductions is not None), reverse=True)
        return (copied + 2 * sum(largest[:IN_FLIGHT])) * FP32

    @override
    def make(self, peers: ShardGroup, groups: Iterable[ShardGroup]) -> CompressedMomentum:
        return CompressedMomentum(peers, self)


class CompressedMomentum(FeedbackExchange):
    """The exchange of a 1-bit optimizer. See Note [Averages of momenta].

    Args:
        peers, plan: as for ``FeedbackExchange``.

    Attributes:
        states: of the optimizer; None until there is one.
    """

    def __init__(self, peers: ShardGroup, plan: AveragedMomenta) -> None:
        super().__init__(peers, plan)
        self._momenta = plan
        self.of_bucket: Mapping[Bucket, MomentumFeedback] = {}
        self.states: OptimizerMomenta | None = None
        self._limit = 0.0  # the norm to which the running step clips; 0: none
        # (limit, norm before clipping) of the gradients that were exchanged last; None: they were not clipped
        self._clipped: tuple[float, Tensor] | None = None

    def bind(self, buckets: Sequence[Bucket]) -> None:
        self.of_bucket = {bucket: MomentumFeedback(self, self._momenta, bucket) for bucket in compressed(buckets)}

    def connect(self, optimizer: Optimizer, fragments: OptimizerFragments) -> None:
        if not isinstance(optimizer, OneBitOptimizer):
            super().connect(optimizer, fragments)
            return
        self.states = OptimizerMomenta(self._peers, fragments, optimizer)
        self.forget_states()
        optimizer.expect_averages()

    @property
    def compresses(self) -> bool:
        return self.states is not None and self.states.frozen

    # ---- reductions --------------------------------------------------------------------------------------------

    @property
    def reduces_at_step(self) -> bool:
        return self.compresses

    @torch.no_grad()
    def begin_flush(self, buckets: Sequence[Bucket]) -> None:
        """Clip what these buckets have accumulated on this rank, which is exchanged next. Collective."""
        self._clipped = None
        if not (self._limit and self.compresses):
            return
        # In fp64, where the squares of gradients that carry a loss scale do not overflow.
        group, total = self._peers, torch.zeros((), dtype=torch.float64, device=self._peers.device)
        for bucket in buckets:
            assert bucket.grads.local is not None
            # Add gradients that came after their bucket was taken: they count in the norm.
            bucket.grads.take(bucket.grads.local, add=True)
            total += torch.linalg.vector_norm(bucket.grads.local, dtype=torch.float64).square()
        before, after = group.factors(torch.float32)
        # The root mean square over the ranks is one number for all: each rank clips by the same factor.
        norm = (group.sum_scalar(total, "gradient norm") / group.size).sqrt() * (
            before * after * group.size / self.scale
        )
        factor = torch.where(norm.isfinite(), (self._limit / (norm + 1e-6)).clamp(max=1.0), 1.0)
        for bucket in buckets:
            assert bucket.grads.local is not None
            bucket.grads.local.mul_(factor)
        self._clipped = self._limit, norm.float()

    # ---- a step ------------------------------------------------------------------------------------------------

    def note_used(self, used: Mapping[Bucket, Sequence[int]]) -> None:
        """Drop the momenta of parameters without a gradient on any rank: they are not stepped."""
        for bucket, feedback in self.of_bucket.items():
            # Also before the freeze: ``zero_grad`` does not clear them, and the first momentum would be added to zeros.
            if unused := bucket.grads.valid - set(used.get(bucket, ())):
                bucket.grads.clear(unused)
                feedback.drop(unused)

    def end_step(self) -> None:
        super().end_step()
        self._limit = 0.0
        for feedback in self.of_bucket.values():
            feedback.keep()

    def forget_states(self) -> None:
        """Gather momenta again: the optimizer's states were loaded."""
        if self.states is not None:
            self.states.forget()
        for feedback in self.of_bucket.values():
            feedback.forget()

    # ---- clipping ----------------------------------------------------------------------------------------------

    @property
    def clips_before_exchange(self) -> bool:
        return self.compresses

    def expect_clipping(self, max_norm: float) -> None:
        self._limit = max_norm

    def clipped_norm(self, max_norm: float) -> Tensor:
        if self._clipped is None or self._clipped[0] != max_norm:
            raise RuntimeError(
                f"The gradients have become averaged momenta before they were clipped to {max_norm:g}: something has "
                "read them. Clip first, or set Trainer(gradient_clip_val) to this limit."
            )
        return self._clipped[1]

    def check_clipping(self, norm_type: float | None) -> None:
        if norm_type is None:
            raise RuntimeError(f"Clipping by value: {_NO_MEAN} Clip by norm.")
        if norm_type != 2.0:
            raise RuntimeError(f"norm_type={norm_type:g}: {_NO_MEAN} Clip by the 2-norm.")

    def check_mean(self) -> None:
        if self.compresses:
            raise no_mean("exchange momenta")


class MomentumFeedback(ErrorFeedback):
    """The residuals, and at stage 1 the full momentum, of one bucket.

    Args:
        owner: the exchange of its engine.
        plan: of the exchange.
        bucket: whose momentum is averaged.
    """

    def __init__(self, owner: CompressedMomentum, plan: AveragedMomenta, bucket: Bucket) -> None:
        super().__init__(owner, bucket)
        self._exchange, self._bucket = owner, bucket
        self._sharded = plan.copies_momenta(bucket.storage)
        self._momentum: Tensor | None = None  # stage 1: that of the last step (1D fp32, all elements)
        self._moves: Tensor | None = None  # and which of its elements the optimizer updates
        self._next: Tensor | None = None  # the momentum of the running step

    def forget(self) -> None:
        self._momentum = self._moves = self._next = None

    def drop(self, indices: Iterable[int]) -> None:
        """Let the momenta of these parameters be those of the last step."""
        for span in map(self._layout.spans.__getitem__, indices):
            if self._next is not None and self._momentum is not None:
                self._next[span.lo : span.hi] = self._momentum[span.lo : span.hi]

    def keep(self) -> None:
        """Note that the running step was taken."""
        if self._next is not None:
            self._momentum, self._next = self._next, None

    def restore(self, step: int) -> None:
        super().restore(step)
        self._next = None

    def _last(self) -> Tensor:
        """The averaged momentum of the last step (1D fp32, all elements). Collective at first."""
        states = self._exchange.states
        assert states is not None
        if not self._sharded:
            return states.state(self._bucket, "exp_avg")
        if self._momentum is None:
            # Gather once, at the freeze or after a load: from then on each exchange leaves the full momentum here.
            self._momentum = self._gathered(states.state(self._bucket, "exp_avg"))
            self._moves = self._gathered(states.state(self._bucket, "exp_avg_sq")) > 0
        return self._momentum

    def _gathered(self, shard: Tensor) -> Tensor:
        full, (lo, hi) = shard.new_zeros(self._layout.numel), self._bucket.shard_range
        full[lo:hi] = shard
        self._group.all_gather(full, f"momentum of {self._name}").wait()
        return full

    @torch.no_grad()
    def reduce(self, out: Tensor, send: Tensor, residuals: Residuals, add: bool) -> Work:
        """Average the momentum that ``send``, this rank's gradients, leads to; times the loss scale, into ``out``.

        Raises:
            RuntimeError: gradients of an earlier step are still there.
        """
        if add:
            raise RuntimeError(
                f"The gradients of {self._name!r} were not cleared after they became the averaged momentum of a 1-bit "
                "optimizer. Call optimizer.zero_grad() before each step's first backward."
            )
        states = self._exchange.states
        last = self._last()
        group = self._group
        assert states is not None
        mine, after = send.to(torch.float32, copy=True), group.factors(torch.float32)[1]
        # Gradients in 16 bits may carry other factors than the fp32 sum below.
        mine.mul_(group.factors(send.dtype)[1] / after)
        # All ranks add the same old momentum. The sum multiplies it by their number and by the factor after it, so a
        # rank adds that much less, and the loss scale is left over.
        share = self._exchange.scale / (after * group.size)
        rules = states.rules(self._bucket)
        for span, (beta, factor) in zip(self._layout.spans, rules, strict=True):
            old = last[span.lo : span.hi]
            mine[span.lo : span.hi].mul_((1 - beta) * factor).add_(old, alpha=beta * share * factor)
        full = torch.empty_like(mine) if self._sharded else out
        work = self._exchange.sums.reduce(full, mine, residuals, False, self._name)
        return _Averaged(work, mine, partial(self._take, full, out, [factor for _, factor in rules]))

    @torch.no_grad()
    def _take(self, full: Tensor, out: Tensor, factors: list[float]) -> None:
        """Take over the momentum that has arrived, times the loss scale; ``out`` gets this rank's elements."""
        for span, factor in zip(self._layout.spans, factors, strict=True):
            if factor != 1.0:
                full[span.lo : span.hi].mul_(1 / factor)
        if not self._sharded:
            return
        lo, hi = self._bucket.shard_range
        out.copy_(full[lo:hi])
        assert self._moves is not None
        # A code of one bit has no zero: elements that no optimizer updates (padding, parameters without a gradient)
        # would get a momentum from it.
        self._next = torch.where(self._moves, full, 0).div_(self._exchange.scale)

    @property
    def nbytes(self) -> int:
        held = (self._momentum, self._moves, self._next)
        return super().nbytes + sum(tensor.nbytes for tensor in held if tensor is not None)


def no_mean(instead: str) -> RuntimeError:
    """The error of reading the gradients of a step in which ranks do something ``instead`` of averaging them."""
    return RuntimeError(
        f"The ranks do not average the gradients of this step, they {instead}: a 1-bit optimizer does so after its "
        'freeze. Read lt_zero.full_state(parameter, "exp_avg") after the step.'
    )


class _Averaged:
    """An exchange, with what it sends; ``take`` is called once, when the result is there."""

    def __init__(self, work: Work, sent: Tensor, take: Callable[[], None]) -> None:
        self._work = work
        self._sent = sent
        self._take = take

    def wait(self) -> None:
        self._work.wait()
        self._take()


class OptimizerMomenta:
    """The momenta of one optimizer, as the exchange asks for them between steps.

    Args:
        peers: the ranks with the same model.
        fragments: of the optimizer.
        optimizer: the same.
    """

    def __init__(self, peers: ShardGroup, fragments: OptimizerFragments, optimizer: OneBitOptimizer) -> None:
        self._peers = peers
        self._fragments = fragments
        self._optimizer = optimizer
        self._factors: dict[Bucket, dict[int, float]] | None = None  # of the exchange, by index of the parameter

    @property
    def frozen(self) -> bool:
        """True if the running step averages momenta; the same on all ranks."""
        return self._optimizer.frozen

    def rules(self, bucket: Bucket) -> list[tuple[float, float]]:
        """The decay rate of each parameter's momentum, and its factor in the exchange. May be collective.

        The factors stay the same from the freeze on.
        """
        groups = zip(self._optimizer.param_groups, self._fragments.groups(), strict=True)
        betas = {id(p): float(group["betas"][0]) for group, params in groups for p in params}
        if self._factors is None:
            self._factors = self._read_factors() if self._optimizer.scales_momenta else {}
        factors = self._factors.get(bucket, {})
        return [(betas.get(id(p), 0.0), factors.get(index, 1.0)) for index, p in enumerate(bucket.params)]

    def forget(self) -> None:
        """Read the factors of the exchange again: states were loaded."""
        self._factors = None

    def _read_factors(self) -> dict[Bucket, dict[int, float]]:
        """The factors by which 1-bit LAMB scales momenta to one magnitude; computed at the freeze. Collective."""
        places, group = self._fragments.places(), self._peers
        table = torch.zeros(2, len(places), dtype=torch.float64)  # the factors; squared norms of momenta
        for number, (_, _, parameter) in enumerate(places):
            state = self._optimizer.state.get(parameter, {})
            if "exp_avg" in state:
                table[0, number] = float(state.get("scaling_coeff", 0.0))
                table[1, number] = torch.linalg.vector_norm(state["exp_avg"], dtype=torch.float64).square()
        # Where states are sharded, a rank has parts of some parameters. All that have one know the same factor, so the
        # largest is that of ranks without it (0) and with it; squared norms of the parts add up.
        if any(not bucket.storage.is_whole for bucket, _, _ in places):
            table[0] = group.max_all(table[0].to(group.device), "factors of momenta")
            table[1] = group.sum_scalar(table[1].to(group.device), "norms of momenta")
        factors = table[0]
        if not factors.any():
            spans = [bucket.layout.spans[index] for bucket, index, _ in places]
            numels = torch.tensor([span.hi - span.lo for span in spans])
            # A momentum that is still zero has no magnitude: its factor is 1.
            magnitudes = (table[1] / numels.clamp(min=1)).sqrt()
            factors = torch.where(magnitudes > 0, magnitudes.mean() / magnitudes, 1.0)
            for (_, _, parameter), factor in zip(places, factors, strict=True):
                if (state := self._optimizer.state.get(parameter)) is not None:
                    state["scaling_coeff"] = factor.to(parameter.device, torch.float32)
        found: dict[Bucket, dict[int, float]] = {}
        for (bucket, index, _), factor in zip(places, factors.float().tolist(), strict=True):
            found.setdefault(bucket, {})[index] = factor or 1.0
        return found

    def state(self, bucket: Bucket, key: str) -> Tensor:
        """The state ``key`` (1D fp32, this rank's shard) of a bucket, zero where there is none yet; a copy."""
        lo, hi = bucket.shard_range
        flat = torch.zeros(hi - lo, dtype=torch.float32, device=bucket.group.device)
        for index, parameter in enumerate(bucket.params):
            value = self._optimizer.state.get(parameter, {}).get(key)
            for piece in bucket.pieces_of(index) if value is not None else ():
                flat[piece.offset : piece.offset + piece.numel] = value.reshape(-1)
        return flat
