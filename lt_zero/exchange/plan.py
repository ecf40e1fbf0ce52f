"""Plans how ranks exchange gradients and gather weights. Pure data: choose.py builds from it, and forecasts read it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn import Parameter

from lt_zero.common.codec import Codec
from lt_zero.core.engine.find_units import class_matches, clean_name
from lt_zero.core.engine.layout import BucketLayout
from lt_zero.core.engine.partition import BucketPlan, EnginePlan, GroupFacts, refuse_name
from lt_zero.core.engine.storage_plan import Codecs, StoragePlan
from lt_zero.exchange.compression import CompressionPlan, plan_compression, plan_quantized_sums
from lt_zero.kernels.codecs import INT4, INT8, BlockCodec

# With a scale for each 128 signs, not 1,024, a GPT under AdamW lost 9.8 instead of 16.7 % in 300 steps; 96.1 % of the
# bytes are saved, not 96.8.
SIGNS = BlockCodec(1, 128)
MOMENTA = BlockCodec(1, 1024)  # 96.8 % fewer bytes than fp32
WEIGHTS: Codec = INT8
GRADIENTS, GRADIENTS_INSIDE = INT4, INT8  # between nodes, inside a node
_CODED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that codecs take


class ExchangeKind(Enum):
    """The exchanges of gradients; each has a class of its own."""

    PLAIN = auto()  # means in full
    TOLERANT = auto()  # sums without late ranks
    QUANTIZED = auto()  # ZeRO++
    COMPRESSED = auto()  # gradient_compression
    MOMENTA = auto()  # 1-bit optimizers
    LOCAL_STEPS = auto()  # 0/1 Adam


@dataclass(frozen=True)
class ExchangeOptions:
    """Options of the exchange of gradients, and of gathers of weights.

    Attributes:
        kind: the exchange between several ranks.
        codec: encodes gradients, or momenta, with error feedback; None: they are not encoded so.
        hierarchical: encode between nodes only.
        interval: steps between two exchanges at last.
        warmup_steps: steps whose gradients are sent as they are.
        quantizes_gathers: gather sharded weights in fewer bits.
        quantizes_frozen: gather those that are not trained in fewer bits.
        quantizes_updates: gather updated weights, which are not sharded, in fewer bits.
    """

    kind: ExchangeKind
    codec: Codec | None
    hierarchical: bool
    interval: int
    warmup_steps: int
    quantizes_gathers: bool
    quantizes_frozen: bool
    quantizes_updates: bool


@dataclass(frozen=True)
class GroupOptions:
    """Options of the groups of ranks over which buckets are sharded.

    Attributes:
        topology: dimensions of collectives over several nodes, or "auto".
        scatters: reduce-scatter gradients; False: all-reduce them, and keep the own shard.
        shards: returns the number of shards that so many ranks cut tensors into; raises ConfigError.
        secondary_shards: returns how many of so many ranks share a second copy of the parameters; raises ConfigError.
        shards_optimizer: optimizer states, at least, are sharded.
        sums_gradients: reductions return the sum over ranks, not the mean.
        prescales: divide gradients by the number of ranks before a reduction, not after.
        predivide_factor: divide gradients by it before a reduction; no effect if it ``prescales``.
        late_share: share of the ranks whose gradients a sum does not wait for.
        steps_beside_forward: background steps go on beside the next forward.
    """

    topology: str | int
    scatters: bool
    shards: Callable[[int], int]
    secondary_shards: Callable[[int], int]
    shards_optimizer: bool
    sums_gradients: bool
    prescales: bool
    predivide_factor: float
    late_share: float
    steps_beside_forward: bool

    @property
    def predivides(self) -> bool:
        """True if gradients are divided by ``predivide_factor`` before a reduction."""
        return not self.prescales and self.predivide_factor != 1.0


@dataclass(frozen=True)
class ExchangePlan:
    """Plan of the exchange of gradients between the ranks of an engine.

    Attributes:
        asked: the options by which it was planned.
        kind: of the exchange; ``PLAIN`` where there is nothing to do for the one that was asked for.
        keeps: steps may be skipped, so residuals are copied.
    """

    asked: ExchangeOptions
    kind: ExchangeKind
    keeps: bool = False

    @property
    def codec(self) -> Codec | None:
        """The codec that encodes gradients with error feedback; None: they are not encoded so."""
        return self.asked.codec if self.kind is self.asked.kind else None

    @property
    def interval(self) -> int:
        """Steps between two exchanges at last."""
        return self.asked.interval if self.kind is self.asked.kind else 1

    def compression(self, bucket: BucketPlan, group: GroupFacts) -> CompressionPlan | None:
        """Plan the compression of a bucket's gradients over ``group``, its ranks; None: they are sent in full."""
        if self.kind is ExchangeKind.QUANTIZED and bucket.sharding.optim and _has_codec(bucket, group):
            return plan_quantized_sums(group.nodes, GRADIENTS, GRADIENTS_INSIDE)
        if self.codec is None or not bucket.compresses:
            return None
        return plan_compression(group.nodes, self.codec, self.asked.hierarchical)

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
        if (
            self.kind is ExchangeKind.TOLERANT
        ):  # those that this rank adds up, and those under way (features/late_nodes/tolerance.py)
            return 2 * layout.numel
        if self.codec is None or row.codecs.reductions is None:
            return 0
        return sum(self.residual_numels(layout, row.is_cut)) * (2 if self.keeps else 1)


def plan_exchange(asked: ExchangeOptions, plan: EnginePlan, skips_steps: bool, group: GroupFacts) -> ExchangePlan:
    """Plan the exchange of an engine.

    Args:
        asked: the options.
        plan: of its buckets.
        skips_steps: steps may be skipped.
        group: the ranks with the same model.
    """
    plain = ExchangePlan(asked, ExchangeKind.PLAIN)
    if asked.kind is ExchangeKind.TOLERANT and group.alone:
        return plain
    if asked.kind is ExchangeKind.COMPRESSED and not any(bucket.compresses for bucket in plan.buckets):
        return plain
    if asked.codec is None:
        return ExchangePlan(asked, asked.kind)
    if plan_compression(group.nodes, asked.codec, asked.hierarchical) is None:
        return plain  # there is one rank, or one node
    return ExchangePlan(asked, asked.kind, keeps=skips_steps)


def plan_codecs(
    exchange: ExchangePlan, resting: Codec | None, training: bool, bucket: BucketPlan, group: GroupFacts
) -> Codecs:
    """Plan what is encoded of a bucket, which is in ``group``.

    Args:
        exchange: of its gradients.
        resting: ``EngineOptions.resting``.
        training: trainable weights have master weights.
    """
    asked = exchange.asked
    sharding = bucket.sharding
    reductions = exchange.compression(bucket, group)
    trains = training and bucket.trains
    if resting is not None and sharding.params and bucket.dtype in _CODED and not trains:
        return Codecs(rests=resting, reductions=reductions)
    coded = WEIGHTS if _has_codec(bucket, group) else None
    if sharding.params:
        return Codecs(
            gathers=coded if asked.quantizes_gathers else None,
            gathers_frozen=coded if asked.quantizes_frozen else None,
            reductions=reductions,
        )
    updates = coded if asked.quantizes_updates and sharding.optim else None
    return Codecs(updates=updates, reductions=reductions)


def _has_codec(bucket: BucketPlan, group: GroupFacts) -> bool:
    """True if weights and gradients can be sent encoded."""
    return bucket.dtype in _CODED and not group.alone


# ---- what is sent as it is -------------------------------------------------------------------------------------------


def none_sent_dense(root: nn.Module) -> set[Parameter]:
    """The parameters of ``root`` whose gradients are never compressed: none."""
    return set()


def tables_and_vectors(root: nn.Module) -> set[Parameter]:
    """The parameters of embeddings, and those with one dimension."""
    tables = [m for m in root.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    return {p for p in root.parameters() if p.dim() <= 1} | {p for m in tables for p in m.parameters()}


def matching_parameters(root: nn.Module, patterns: Collection[str]) -> set[Parameter]:
    """The parameters that a pattern of ``gradient_compression.exclude`` matches, or whose module it does.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    found: set[Parameter] = set()
    modules = [(clean_name(f"{name}.").removesuffix("."), module) for name, module in root.named_modules()]
    named = [(clean_name(name), p) for name, p in root.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        hit = [m for name, m in modules if fnmatchcase(name, pattern) or class_matches(m, (pattern,))]
        parameters = {p for name, p in named if fnmatchcase(name, pattern)}
        if not hit and not parameters:
            known = [name for name, _ in named]
            refuse_name("gradient_compression.exclude", pattern, "no class, module or parameter matches it", known)
        found |= parameters | {p for module in hit for p in module.parameters()}
    return found
