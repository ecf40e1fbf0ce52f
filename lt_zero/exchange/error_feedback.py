"""Exchanges that send codes with error feedback: what each bucket has not sent so far, from step to step.

How buckets are reduced: compression.py, Note [Compressed reductions].

Note [Units of residuals]
    A residual is in the units in which its bucket's gradients are sent: multiplied by the loss scale and the factor
    before the sum. When the loss scale changes, residuals are rescaled before they are used next; by a power of two
    that is exact.

Note [Skipped steps]
    A step whose gradients overflowed is skipped, with what all buckets sent for it. Then residuals have to be what they
    were before the step's first reduction, so where steps can be skipped each rank keeps a copy of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from typing_extensions import override

from lt_zero.common.codec import Codec
from lt_zero.core.comm.residuals import Residuals
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.transport import Replicas, SendBuffer
from lt_zero.core.comm.work import Work
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.exchange import PlainExchange
from lt_zero.core.engine.exchange_plan import ExchangePlan
from lt_zero.core.engine.layout import BucketLayout, gaps_between
from lt_zero.core.engine.partition import BucketPlan, GroupFacts
from lt_zero.core.engine.storage_plan import StoragePlan
from lt_zero.exchange.compression import CompressionPlan, plan_compression
from lt_zero.exchange.encoded import use_compression

FP32 = torch.float32.itemsize


@dataclass(frozen=True)
class FeedbackPlan(ExchangePlan):
    """Plan of an exchange that sends gradients, or what is made of them, in codes, with error feedback.

    Attributes:
        codec: encodes them.
        hierarchical: encode between nodes only.
        keeps: steps may be skipped, so residuals are copied.
    """

    codec: Codec
    hierarchical: bool
    keeps: bool

    @override
    def reduction(self, bucket: BucketPlan, group: GroupFacts) -> CompressionPlan | None:
        if not bucket.compresses:
            return None
        return plan_compression(group.nodes, self.codec, self.hierarchical)

    def residual_numels(self, layout: BucketLayout, is_cut: bool) -> tuple[int, int]:
        """Elements of a rank's residuals of a bucket: of what it sends, and of the mean that it sends on (0: none)."""
        return layout.numel, layout.shard_numel if self.everywhere(is_cut) else 0

    @override
    def kept_nbytes(self, row: StoragePlan, layout: BucketLayout) -> int:
        if not row.trains or row.group.size == 1 or row.codecs.reductions is None:
            return 0
        return sum(self.residual_numels(layout, row.is_cut)) * FP32 * (2 if self.keeps else 1)


class ErrorFeedback:
    """The residuals of one bucket.

    Args:
        owner: the exchange of its engine.
        bucket: whose gradients are sent; where all ranks need its mean, there is a server's residual.
    """

    def __init__(self, owner: FeedbackExchange, bucket: Bucket) -> None:
        self._owner = owner
        self._device = bucket.group.device
        self._group = bucket.group
        self._name = bucket.name
        self._layout, self._numels = bucket.layout, owner.plan.residual_numels(bucket.layout, bucket.storage.is_cut)
        shard = bucket.layout.shard(bucket.group.rank)
        pieces = bucket.layout.pieces(*shard)
        own = gaps_between(((p.offset, p.offset + p.numel) for p in pieces), bucket.layout.shard_numel)
        self._gaps = tuple(sorted(bucket.layout.gaps)), own
        self.residuals: Residuals | None = None  # None: nothing was compressed yet
        self.scale = 1.0  # the loss scale in them: Note [Units of residuals]
        self._kept: list[Tensor] = []  # their copies from before step number ``_kept_at``
        self._kept_scale, self._kept_at = 1.0, -1

    def make(self) -> Residuals:
        """The residuals; zeros if there were none."""
        if self.residuals is None:
            sent, averaged = self._numels
            worker = torch.zeros(sent, dtype=torch.float32, device=self._device)
            server = worker.new_zeros(averaged) if averaged else None
            self.residuals, self.scale = Residuals(worker, server, *self._gaps), self._owner.scale
        return self.residuals

    def _tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.residuals or ())[:2] if tensor is not None]

    @torch.no_grad()
    def begin(self) -> Residuals | None:
        """The residuals for a reduction that is launched next; None: it is not compressed."""
        owner = self._owner
        if not owner.compresses:
            return None
        self.make()
        # Copy before the first reduction of a step changes the residuals: a skipped step restores them.
        if owner.plan.keeps and self._kept_at != owner.steps:
            self._kept = self._kept or [torch.empty_like(tensor) for tensor in self._tensors()]
            for kept, tensor in zip(self._kept, self._tensors(), strict=True):
                kept.copy_(tensor)
            # Keep the scale of the copies, too: they are not rescaled with the residuals below.
            self._kept_scale, self._kept_at = self.scale, owner.steps
        if self.scale != owner.scale:
            for tensor in self._tensors():
                tensor.mul_(owner.scale / self.scale)
            self.scale = owner.scale
        return self.residuals

    def reduce(self, out: Tensor, send: Tensor, residuals: Residuals, add: bool) -> Work:
        """Start averaging ``send`` (1D, all elements) over the ranks, compressed, into ``out``, or add it there."""
        return self._owner.sums.reduce(out, send, residuals, add, self._name)

    @torch.no_grad()
    def restore(self, step: int) -> None:
        """Make the residuals what they were before ``step``, if they changed in it."""
        if self._kept_at == step:
            for kept, tensor in zip(self._kept, self._tensors(), strict=True):
                tensor.copy_(kept)
            self.scale = self._kept_scale

    def begin_units(self, scale: float) -> None:
        """Note that the residuals, which were loaded, carry this loss scale."""
        self.scale = scale

    def reset(self) -> None:
        """Begin at zero, without the loss scale."""
        self.residuals = None
        self.scale = 1.0
        self._kept = []
        self._kept_at = -1

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._tensors(), *self._kept))


class FeedbackExchange(PlainExchange):
    """Sends the gradients of buckets whose plan says so in codes, with error feedback.

    Args:
        peers: reduce the gradients; several nodes of them, or ranks. Collective.
        plan: says which buckets are compressed, and whether steps may be skipped (Note [Skipped steps]).

    Raises:
        ConfigError: the ranks do not form nodes, or a GPU has one queue for all groups.

    Attributes:
        sums: the compressed reductions.
        of_bucket: the residuals.
        steps: optimizer steps so far.
        scale: the loss scale of the running step.
    """

    remembers = True

    def __init__(self, peers: ShardGroup, plan: FeedbackPlan) -> None:
        super().__init__(peers)
        sums = use_compression(peers, plan.codec, plan.hierarchical)
        assert sums is not None
        self.sums = sums
        self.plan = plan
        self.scale = 1.0
        self.of_bucket: Mapping[Bucket, ErrorFeedback] = {}

    @override
    def bind(self, buckets: Sequence[Bucket]) -> None:
        self.of_bucket = {bucket: ErrorFeedback(self, bucket) for bucket in compressed(buckets)}

    @property
    def compresses(self) -> bool:
        """True if the running step's gradients are compressed."""
        return True

    @override
    def sums_replicas_apart(self, bucket: Bucket) -> bool:
        return bucket not in self.of_bucket and super().sums_replicas_apart(bucket)

    @override
    def reduce(
        self, bucket: Bucket, out: Tensor, send: SendBuffer, add: bool, replicas: Replicas = Replicas.SENT
    ) -> Work:
        feedback = self.of_bucket.get(bucket)
        residuals = feedback.begin() if feedback is not None else None
        if feedback is None or residuals is None:
            return super().reduce(bucket, out, send, add, replicas)
        return feedback.reduce(out, send.flat, residuals, add)

    @override
    def set_loss_scale(self, scale: float) -> None:
        self.scale = scale

    @override
    def end_step(self) -> None:
        self.steps += 1

    @override
    def undo_step(self, counted: bool) -> None:
        # Count back first: the residuals that are restored are those kept for the step that is undone.
        self.steps -= counted
        for feedback in self.of_bucket.values():
            feedback.restore(self.steps)

    @override
    def resume(self, steps: int) -> None:
        self.steps = steps
        for feedback in self.of_bucket.values():
            feedback.reset()

    @property
    @override
    def nbytes(self) -> int:
        return sum(feedback.nbytes for feedback in self.of_bucket.values())


def compressed(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Those of ``buckets`` whose gradients are compressed."""
    return [bucket for bucket in buckets if bucket.storage.codecs.reductions is not None]


def none_sent_dense(root: nn.Module) -> set[Parameter]:
    """The parameters of ``root`` whose gradients are never compressed: none."""
    return set()
