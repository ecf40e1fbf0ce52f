"""ZeRO++ (arXiv:2306.10209): fewer bytes between nodes for sharded parameters and their gradients.

``zero_quantized_weights`` (qwZ, section 3.1)    gathers send 8 bits of an element. All ranks, the owner too, compute
    with what is decoded; master weights, checkpoints and exports stay exact. At stages 1 and 2 updates are gathered so.
``zero_hpz_partition_size`` (hpZ, section 3.2)   a rank keeps a part of what a gather over all ranks has filled, the
    ranks of a node all of it. Until the weights change, gathers read these parts, and nothing crosses between nodes.
``zero_quantized_gradients`` (qgZ, section 3.3)  gradients are summed inside a node, sent there in 8 bits, then between
    nodes, in 4. Each element is quantised twice, not once per rank of a ring.

Note [Exact gathers]
    Values that user code sees in ``gathered`` may be written back, so they are gathered again, plainly, if what is in
    memory was decoded. Full parameters and checkpoints are gathered from master weights (full_params.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from lt_zero.comm.compression import Residuals
from lt_zero.comm.shard_group import ShardGroup
from lt_zero.comm.transport import SendBuffer
from lt_zero.comm.work import Work
from lt_zero.config import ZeroConfig
from lt_zero.engine.bucket import Bucket, GatherStrategy
from lt_zero.engine.exchange import PlainExchange
from lt_zero.engine.layout import gaps_between
from lt_zero.engine.partition import BucketPlan, GroupFacts
from lt_zero.ops.codecs import INT4, INT8, Codec

WEIGHTS: Codec = INT8
GRADIENTS, GRADIENTS_INSIDE = INT4, INT8  # between nodes, inside a node


class ZeroPlusPlusGather(GatherStrategy):
    """Gathers of one bucket with sharded parameters for computation.

    Args:
        quantizes: all gathers from the owners are quantised.
        frozen_only: only those of a frozen bucket are.
        secondary: ranks that share a second copy; 1: there is none.
    """

    def __init__(self, quantizes: bool, frozen_only: bool, secondary: int) -> None:
        self._quantizes, self._frozen_only, self._secondary = quantizes, frozen_only, secondary
        self._kept: Tensor | None = None  # 1D: this rank's part of the second copy
        self._valid = self._keeps = False  # the copy is of the current weights; it is made when the gather is finished
        self._kept_rounded = False  # the copy was decoded
        # Of the gather that is launched next: the codec in which owners send, None: as it is; the second copy is read.
        self._codec: Codec | None = None
        self._serves = False

    def prepare(self, bucket: Bucket, exact: bool) -> bool:
        codec = WEIGHTS if self._quantizes or (self._frozen_only and not bucket.wants_grad) else None
        # A rounded copy serves only rounded gathers: when frozen parameters were unfrozen, gathers became exact.
        serves = self._valid and not (self._kept_rounded and codec is None)
        rounds = self._kept_rounded if serves else codec is not None
        plain = rounds and exact
        self.rounded = rounds and not exact
        self._serves, self._codec = serves and not plain, None if plain else codec
        self._keeps = self._secondary > 1 and not (serves or plain)
        if self._keeps:
            self._kept_rounded = codec is not None
        return not self._serves

    def launch(self, bucket: Bucket) -> Work:
        if self._serves:
            assert self._kept is not None
            self._part(bucket).copy_(self._kept)
            return bucket.group.all_gather_in_node(bucket.flat, bucket.name)
        if self._codec is None:
            return super().launch(bucket)
        with bucket.weights.gather_source.source(bucket.shard):
            # The shard is in its place in the flat tensor, and is encoded there.
            return bucket.group.all_gather_encoded(bucket.flat, bucket.name, self._codec)

    def finish(self, bucket: Bucket) -> None:
        if not self._keeps:
            return
        part, self._keeps, self._valid = self._part(bucket), False, True
        if self._kept is None:
            # A validation in inference mode finishes a gather when it releases it unused. Training writes to this copy
            # later, so it must not be an inference tensor.
            with torch.inference_mode(False):
                self._kept = torch.empty_like(part)
        self._kept.copy_(part)

    def _part(self, bucket: Bucket) -> Tensor:
        """The elements of the flat tensor that this rank has of the second copy."""
        numel = bucket.layout.numel // self._secondary
        return bucket.flat.narrow(0, bucket.group.rank % self._secondary * numel, numel)

    def weights_changed(self) -> None:
        """Forget the second copy."""
        self._valid = False

    def decoded(self, shard: Tensor) -> Tensor:
        return WEIGHTS.decoded(shard)

    @property
    def nbytes(self) -> int:
        return self._kept.nbytes if self._kept is not None else 0


class EncodedUpdates(GatherStrategy):
    """Updates of parameters that are not sharded are gathered in 8 bits."""

    codec = WEIGHTS


def sends_less(config: ZeroConfig, plan: BucketPlan, group: GroupFacts) -> GatherStrategy | None:
    """Make the strategy of a bucket of ``group`` if the configuration asks for fewer bytes between nodes, else None."""
    zero, sharding = config.zero_optimization, plan.sharding
    secondary = group.secondary_shards if sharding.params else 1
    codes = _codes(plan.dtype, group)
    quantizes, frozen_only = codes and zero.zero_quantized_weights, codes and zero.zero_quantized_nontrainable_weights
    if sharding.params and (quantizes or frozen_only or secondary > 1):
        return ZeroPlusPlusGather(quantizes, frozen_only, secondary)
    return EncodedUpdates() if quantizes and sharding.optim and zero.stage < 3 else None


class QuantizedGradients(PlainExchange):
    """Reduces the gradients of sharded optimizers in few bits, without error feedback.

    Args:
        peers: the ranks with the same model.
        groups: those of several ranks, prepared for it.
    """

    def __init__(self, peers: ShardGroup, groups: Collection[ShardGroup]) -> None:
        super().__init__(peers)
        self._groups = groups
        self._lossy: dict[Bucket, Residuals] = {}  # without a worker's: nothing is kept

    @classmethod
    def prepare(cls, peers: ShardGroup, groups: Iterable[ShardGroup]) -> QuantizedGradients:
        """The exchange, of those ``groups`` that send gradients at all. Collective.

        Raises:
            ConfigError: a GPU has one queue for all groups.
        """
        found = list(dict.fromkeys(groups))
        return cls(peers, [group for group in found if group.use_quantized_sums(GRADIENTS, GRADIENTS_INSIDE)])

    def bind(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket.group in self._groups and bucket.sharding.optim and _codes(bucket.dtype, bucket.group):
                spans = ((piece.offset, piece.offset + piece.numel) for piece in bucket.pieces)
                gaps = gaps_between(spans, bucket.layout.shard_numel)
                self._lossy[bucket] = Residuals(torch.empty(0), None, (), gaps)

    def reduce(self, bucket: Bucket, out: Tensor, send: SendBuffer, add: bool) -> Work:
        if (residuals := self._lossy.get(bucket)) is None:
            return super().reduce(bucket, out, send, add)
        return bucket.group.reduce_compressed(out, send.flat, residuals, add, bucket.name)


def _codes(dtype: torch.dtype, group: GroupFacts) -> bool:
    """True if weights and gradients can be sent encoded: there is no codec for 64 bits."""
    return dtype != torch.float64 and not group.alone
