"""The exchange of 0/1 Adam (zero_one.py): gradients, some in 1 bit; later, at times, changes of weights.

Note [Ranks that step apart]
    While steps are local, gradients are not exchanged: an accumulator gets this rank's own. The optimizer calls
    ``_average`` at the end of an interval. Until then weights and states of the ranks differ, so whatever leaves the
    engine (checkpoints, exports, validation, the end of fit) ends the interval first: ``Engine.prepare_reading``.
    Residuals are those of gradients before, and of changes of weights afterwards, without the loss scale; they begin
    at zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lt_zero.core.comm.residuals import Residuals
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.work import Done, Work
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.exchange import OptimizerFragments
from lt_zero.core.engine.layout import Piece
from lt_zero.core.engine.storage_plan import StoragePlan
from lt_zero.exchange.error_feedback import FP32, ErrorFeedback, FeedbackExchange, FeedbackPlan, compressed
from lt_zero.features.one_bit.compressed_momentum import no_mean
from lt_zero.features.one_bit.zero_one import ZeroOneAdam


@dataclass(frozen=True)
class AveragedSteps(FeedbackPlan):
    """Plan of the exchange of 0/1 Adam.

    Attributes:
        longest: steps between two exchanges at last.
    """

    longest: int

    @property
    @override
    def interval(self) -> int:
        return self.longest

    @override
    def step_nbytes(self, rows: Sequence[StoragePlan]) -> int:
        """Bytes of a bucket's changes, of their mean, and of what is sent."""
        return 3 * max((row.numel for row in rows if row.codecs.reductions is not None), default=0) * FP32

    @override
    def make(self, peers: ShardGroup, groups: Iterable[ShardGroup]) -> LocalSteps:
        return LocalSteps(peers, self)


class LocalSteps(FeedbackExchange):
    """The exchange of 0/1 Adam. See Note [Ranks that step apart].

    Args:
        peers, plan: as for ``FeedbackExchange``.
    """

    def __init__(self, peers: ShardGroup, plan: AveragedSteps) -> None:
        super().__init__(peers, plan)
        self.of_bucket: Mapping[Bucket, LocalFeedback] = {}
        self._optimizer: ZeroOneAdam | None = None  # knows what the next step is

    def bind(self, buckets: Sequence[Bucket]) -> None:
        self.of_bucket = {bucket: LocalFeedback(self, bucket) for bucket in compressed(buckets)}

    def connect(self, optimizer: Optimizer, fragments: OptimizerFragments) -> None:
        if not isinstance(optimizer, ZeroOneAdam):
            super().connect(optimizer, fragments)
            return
        self._optimizer = optimizer
        optimizer.exchange_by(partial(self._average, fragments))

    def _average(
        self,
        fragments: OptimizerFragments,
        tensors: list[Tensor],
        value: Callable[[Tensor], Tensor],
        take: Callable[[Tensor, Tensor], None],
    ) -> None:
        """Average values of ``tensors``, which are fragments: zero_one.py, ``Average``. Collective."""
        wanted, found = set(map(id, tensors)), dict[Bucket, list[tuple[Piece, Tensor]]]()
        for bucket, index, parameter in fragments.places():
            # A frozen parameter has pieces, but no fragments.
            for piece, fragment in zip(bucket.pieces_of(index), fragments.of(parameter), strict=False):
                if id(fragment) in wanted:
                    found.setdefault(bucket, []).append((piece, fragment))
        for bucket, rows in found.items():
            flat = torch.zeros(bucket.layout.numel, dtype=torch.float32, device=bucket.group.device)
            for piece, own in rows:
                flat[piece.offset : piece.offset + piece.numel] = value(own).reshape(-1)
            mean = self.of_bucket[bucket].average(flat)
            for piece, own in rows:
                take(own, mean[piece.offset : piece.offset + piece.numel].view(own.shape))

    @property
    def ranks_step_apart(self) -> bool:
        return self._optimizer is not None and self._optimizer.local

    @property
    def compresses(self) -> bool:
        return self._optimizer is not None and self._optimizer.compresses

    def end_step(self) -> None:
        super().end_step()
        if self._optimizer is not None and self._optimizer.begins_local:
            for feedback in self.of_bucket.values():
                # What was left of gradients would be added to changes of weights.
                feedback.reset()

    def check_mean(self) -> None:
        if self.ranks_step_apart:
            raise no_mean("step with their own")

    def check_common_weights(self, what: str) -> None:
        raise ValueError(f"ZeroOneAdam steps ranks apart, which have no common weights to be averaged. Remove {what}.")


class LocalFeedback(ErrorFeedback):
    """The residuals of one bucket.

    Args:
        owner: the exchange of its engine.
        bucket: whose gradients and changes are averaged.
    """

    def __init__(self, owner: LocalSteps, bucket: Bucket) -> None:
        super().__init__(owner, bucket)
        self._steps = owner

    def begin(self) -> Residuals | None:
        return self.make() if self._steps.ranks_step_apart else super().begin()

    @torch.no_grad()
    def reduce(self, out: Tensor, send: Tensor, residuals: Residuals, add: bool) -> Work:
        if not self._steps.ranks_step_apart:
            return super().reduce(out, send, residuals, add)
        # In other steps the accumulator has the reduction of all ranks' gradients. Here it has this rank's alone, with
        # the scale of a reduction of equal ones, because norms and clipping expect that unit.
        own = send.to(out.dtype) * (self._group.factors(send.dtype)[1] * self._group.size)
        out.add_(own) if add else out.copy_(own)
        return Done()

    @torch.no_grad()
    def average(self, flat: Tensor) -> Tensor:
        """The mean of ``flat`` (1D fp32, all elements) over the ranks. Collective."""
        residuals = self.make()
        # Loaded residuals carry the loss scale of their run; changes of weights carry none.
        for rows in self._tensors() if self.scale != 1.0 else ():
            rows.div_(self.scale)
        self.scale = 1.0
        # The sum is multiplied by the factor after it. Divide by that, and by the number of ranks, to get the mean.
        flat = flat / (self._group.factors(flat.dtype)[1] * self._group.size)
        mean = torch.empty_like(flat)
        self._steps.sums.reduce(mean, flat, residuals, False, self._name).wait()
        return mean
