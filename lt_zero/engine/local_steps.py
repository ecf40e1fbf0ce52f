"""What ranks exchange for 0/1 Adam (optim/zero_one.py): gradients, some in 1 bit; later changes of weights, at times.

Note [Ranks that step apart]
    While steps are local, gradients are not exchanged: an accumulator gets this rank's own. The optimizer calls
    ``average`` at the end of an interval. Until then weights and states of the ranks differ, so whatever leaves the
    engine (checkpoints, exports, validation, the end of fit) ends the interval first: ``Engine.prepare_reading``.
    Residuals are those of gradients before, and of changes of weights afterwards, without the loss scale; they begin
    at zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lt_zero.comm.compression import Residuals
from lt_zero.comm.shard_group import ShardGroup
from lt_zero.comm.work import Done, Work
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.gradient_compression import ErrorFeedback, GradientCompression


class StepKind(Protocol):
    """What the optimizer knows of its next step; the same on all ranks."""

    @property
    def local(self) -> bool:
        """Whether each rank steps with its own gradients."""

    @property
    def begins_local(self) -> bool:
        """Whether it is the first of these."""

    @property
    def compresses(self) -> bool:
        """Whether gradients are averaged in 1 bit."""


class LocalSteps(GradientCompression):
    """The exchanges of one engine's ranks. See Note [Ranks that step apart].

    Args:
        group, buckets, keeps: as for ``GradientCompression``.

    Attributes:
        kind: of the next step; None until there is an optimizer.
    """

    def __init__(self, group: ShardGroup, buckets: Sequence[Bucket], keeps: bool) -> None:
        super().__init__(group, buckets, 0, keeps)
        self.kind: StepKind | None = None

    def _feedback(self, bucket: Bucket) -> ErrorFeedback:
        return _LocalFeedback(self, bucket)

    @property
    def local(self) -> bool:
        """Whether ranks keep their gradients to themselves."""
        return self.kind is not None and self.kind.local

    @property
    def compresses(self) -> bool:
        return self.kind is not None and self.kind.compresses

    def end_step(self) -> None:
        self.steps += 1
        if self.kind is not None and self.kind.begins_local:
            for feedback in self.of_bucket.values():
                feedback.reset()

    def average(self, bucket: Bucket, flat: Tensor) -> Tensor:
        """The mean of ``flat`` (1D fp32, all elements) over the ranks, averaged in 1 bit. Collective."""
        feedback = self.of_bucket[bucket]
        assert isinstance(feedback, _LocalFeedback)
        return feedback.average(flat)


class _LocalFeedback(ErrorFeedback):
    """The residuals of one bucket.

    Args:
        clock: of its engine.
        bucket: whose gradients and changes are averaged.
    """

    def __init__(self, clock: LocalSteps, bucket: Bucket) -> None:
        super().__init__(clock, bucket)
        self._steps = clock

    def begin(self) -> Residuals | None:
        return self.make() if self._steps.local else super().begin()

    @torch.no_grad()
    def reduce(self, out: Tensor, send: Tensor, residuals: Residuals, add: bool) -> Work:
        if not self._steps.local:
            return super().reduce(out, send, residuals, add)
        own = send.to(out.dtype) * (self._group.factors(send.dtype)[1] * self._group.size)
        out.add_(own) if add else out.copy_(own)
        return Done()

    @torch.no_grad()
    def average(self, flat: Tensor) -> Tensor:
        """The mean of ``flat`` (1D fp32, all elements) over the ranks. Collective."""
        residuals = self.make()
        for rows in self._tensors() if self.scale != 1.0 else ():  # they were loaded
            rows.div_(self.scale)
        self.scale = 1.0
        flat = flat / (self._group.factors(flat.dtype)[1] * self._group.size)
        mean = torch.empty_like(flat)
        self._group.reduce_compressed(mean, flat, residuals, False, self._name).wait()
        return mean
