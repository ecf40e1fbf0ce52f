"""Plans how ranks exchange gradients and gather weights. Pure data: choose.py builds from it, and forecasts read it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch

from lt_zero.comm.compression import CompressionPlan, plan_compression, plan_quantized_sums
from lt_zero.common.codec import Codec
from lt_zero.config import ZeroConfig
from lt_zero.config.precision import DtypePolicy
from lt_zero.config.rules import one_bit
from lt_zero.engine.layout import BucketLayout
from lt_zero.engine.partition import BucketPlan, EnginePlan, GroupFacts, KeptForms
from lt_zero.engine.storage_plan import Codecs, StoragePlan
from lt_zero.ops.codecs import INT4, INT8, TWO_BITS, BlockCodec, TopK
from lt_zero.ops.moments import moments_in
from lt_zero.ops.nf4 import RESTING

# With a scale for each 128 signs, not 1,024, a GPT under AdamW lost 9.8 instead of 16.7 % in 300 steps; 96.1 % of the
# bytes are saved, not 96.8.
SIGNS = BlockCodec(1, 128)
MOMENTA = BlockCodec(1, 1024)  # 96.8 % fewer bytes than fp32
WEIGHTS: Codec = INT8
GRADIENTS, GRADIENTS_INSIDE = INT4, INT8  # between nodes, inside a node
_CODED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that codecs take
_INTERVAL = 16  # steps; default of ZeroOneAdam's local_step_clipper


class ExchangeKind(Enum):
    """The exchanges of gradients; each has a class of its own."""

    PLAIN = auto()  # means in full
    TOLERANT = auto()  # sums without late ranks
    QUANTIZED = auto()  # ZeRO++
    COMPRESSED = auto()  # gradient_compression
    MOMENTA = auto()  # 1-bit optimizers
    LOCAL_STEPS = auto()  # 0/1 Adam


@dataclass(frozen=True)
class ExchangePlan:
    """Plan of the exchange of gradients between the ranks of an engine.

    Attributes:
        kind: which exchange.
        codec: encodes gradients with error feedback; None: it does not.
        hierarchical: between nodes only.
        keeps: steps may be skipped, so residuals are copied.
        interval: steps between two exchanges at last.
    """

    kind: ExchangeKind
    codec: Codec | None = None
    hierarchical: bool = False
    keeps: bool = False
    interval: int = 1

    def compression(self, bucket: BucketPlan, group: GroupFacts) -> CompressionPlan | None:
        """Plan the compression of a bucket's gradients over ``group``, its ranks; None: they are sent in full."""
        if self.kind is ExchangeKind.QUANTIZED and bucket.sharding.optim and _has_codec(bucket, group):
            return plan_quantized_sums(group.nodes, GRADIENTS, GRADIENTS_INSIDE)
        if self.codec is None or not bucket.compresses:
            return None
        return plan_compression(group.nodes, self.codec, self.hierarchical)

    def everywhere(self, is_cut: bool) -> bool:
        """True if all ranks need all elements of the mean of a bucket; ``is_cut``: each has a shard of it."""
        return self.kind is ExchangeKind.MOMENTA or not is_cut

    @property
    def waits_for_step(self) -> bool:
        """True if gradients that are not sharded are sent by the step, not by backward."""
        return self.kind is ExchangeKind.MOMENTA

    @property
    def sums_replicas_once(self) -> bool:
        """True if the sum over the replicas of a shard waits for the last micro-batch of a step."""
        return self.kind is not ExchangeKind.TOLERANT

    def residual_numels(self, layout: BucketLayout, is_cut: bool) -> tuple[int, int]:
        """Elements of a rank's residuals of a bucket: of what it sends, and of the mean that it sends on (0: none)."""
        return layout.numel, layout.shard_numel if self.everywhere(is_cut) else 0

    def copies_momenta(self, row: StoragePlan) -> bool:
        """True if this rank has the momenta of a bucket in full beside those of its shard."""
        return self.kind is ExchangeKind.MOMENTA and row.codecs.reductions is not None and not row.is_whole

    def kept_numel(self, row: StoragePlan, layout: BucketLayout) -> int:
        """Elements (fp32) of a bucket's gradients that are kept from step to step, with copies for skipped steps."""
        if not row.trains or row.group.size == 1:
            return 0
        if self.kind is ExchangeKind.TOLERANT:  # those that this rank adds up, and those under way (comm/tolerance.py)
            return 2 * layout.numel
        if self.codec is None or row.codecs.reductions is None:
            return 0
        return sum(self.residual_numels(layout, row.is_cut)) * (2 if self.keeps else 1)


def plan_forms(config: ZeroConfig, policy: DtypePolicy) -> KeptForms:
    """Plan the forms in which moments and frozen weights are kept."""
    moments = moments_in(policy.moments) if policy.moments is not None else None
    return KeptForms(moments, RESTING[config.quantize].block if config.quantize is not None else None)


def plan_exchange(config: ZeroConfig, plan: EnginePlan, policy: DtypePolicy, group: GroupFacts) -> ExchangePlan:
    """Plan the exchange of an engine; the configuration asks for one at most.

    Args:
        plan: of its buckets.
        policy: says whether steps may be skipped.
        group: the ranks with the same model.
    """
    block = config.gradient_compression
    zero = config.zero_optimization
    codec = codec_of(config)
    if config.communication.slow_node_tolerance and not group.alone:
        return ExchangePlan(ExchangeKind.TOLERANT)
    if zero.zero_quantized_gradients and zero.stage > 0:
        return ExchangePlan(ExchangeKind.QUANTIZED)
    made = ExchangePlan(ExchangeKind.PLAIN)
    if optimizer := one_bit(config):
        made = ExchangePlan(ExchangeKind.MOMENTA, MOMENTA, keeps=policy.check_overflow)
        if optimizer == "zerooneadam":
            given = config.optimizer.params if config.optimizer is not None else {}
            interval = int(given.get("local_step_clipper", _INTERVAL))
            made = ExchangePlan(ExchangeKind.LOCAL_STEPS, MOMENTA, keeps=policy.check_overflow, interval=interval)
    elif codec is not None and any(bucket.compresses for bucket in plan.buckets):
        hierarchical = block.hierarchical_compress
        made = ExchangePlan(ExchangeKind.COMPRESSED, codec, hierarchical, policy.check_overflow)
    if made.codec is not None and plan_compression(group.nodes, made.codec, made.hierarchical) is None:
        return ExchangePlan(ExchangeKind.PLAIN)  # there is one rank, or one node
    return made


def codec_of(config: ZeroConfig) -> Codec | None:
    """The codec of ``gradient_compression``; None: gradients are not compressed."""
    block = config.gradient_compression
    if block.algorithm == "topk":
        return TopK(block.topk_ratio, torch.bfloat16, block.huffman_coding)
    return {"1bit": SIGNS, "2bit": TWO_BITS}.get(block.algorithm)


def plan_codecs(
    config: ZeroConfig, exchange: ExchangePlan, training: bool, bucket: BucketPlan, group: GroupFacts
) -> Codecs:
    """Plan what is encoded of a bucket, which is in ``group``; ``training``: trainable weights have master weights."""
    zero = config.zero_optimization
    sharding = bucket.sharding
    reductions = exchange.compression(bucket, group)
    trains = training and bucket.trains
    if config.quantize is not None and sharding.params and bucket.dtype in _CODED and not trains:
        return Codecs(rests=RESTING[config.quantize], reductions=reductions)
    coded = WEIGHTS if _has_codec(bucket, group) else None
    always, frozen = zero.zero_quantized_weights, zero.zero_quantized_nontrainable_weights
    if sharding.params:
        return Codecs(
            gathers=coded if always else None, gathers_frozen=coded if always or frozen else None, reductions=reductions
        )
    updates = coded if always and sharding.optim and zero.stage < 3 else None
    return Codecs(updates=updates, reductions=reductions)


def _has_codec(bucket: BucketPlan, group: GroupFacts) -> bool:
    """True if weights and gradients can be sent encoded."""
    return bucket.dtype in _CODED and not group.alone
