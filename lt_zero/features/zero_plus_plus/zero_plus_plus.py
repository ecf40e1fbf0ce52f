"""ZeRO++ (arXiv:2306.10209): fewer bytes between nodes for sharded parameters and their gradients.

``zero_quantized_weights`` (qwZ, section 3.1)    gathers send 8 bits of an element. All ranks, the owner too, compute
    with what is decoded; master weights, checkpoints and exports stay exact. At stages 1 and 2 updates are gathered so.
``zero_hpz_partition_size`` (hpZ, section 3.2)   a rank keeps a part of what a gather over all ranks has filled, the
    ranks of a node all of it. Until the weights change, gathers read these parts, and nothing crosses between nodes.
``zero_quantized_gradients`` (qgZ, section 3.3)  gradients are summed inside a node, sent there in 8 bits, then between
    nodes, in 4. Each element is quantised twice, not once per rank of a ring.

Note [Exact gathers]
    Values that user code sees in ``gathered`` may be written back, so they are gathered again, plainly, if what is in
    memory was decoded. Full parameters and checkpoints are gathered from master weights (full_values.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from lt_zero.common.codec import Codec
from lt_zero.core.comm.hierarchy import Hierarchy
from lt_zero.core.comm.residuals import Residuals
from lt_zero.core.comm.shard_group import Operation, ShardGroup
from lt_zero.core.comm.transport import Backend, Gloo, Mesh, Replicas, SendBuffer, Transport
from lt_zero.core.comm.work import Work
from lt_zero.core.engine.bucket import Bucket, GatherStrategy
from lt_zero.core.engine.exchange import PlainExchange
from lt_zero.core.engine.exchange_plan import ExchangePlan
from lt_zero.core.engine.layout import gaps_between
from lt_zero.core.engine.partition import BucketPlan, GroupFacts
from lt_zero.core.engine.storage_plan import Codecs
from lt_zero.exchange.compression import CompressionPlan, gather_encoded, plan_quantized_sums
from lt_zero.exchange.encoded import all_gather_encoded, has_codec, use_quantized_sums
from lt_zero.kernels.codecs import INT4, INT8

WEIGHTS: Codec = INT8
GRADIENTS, GRADIENTS_INSIDE = INT4, INT8  # between nodes, inside a node
_KEY = "zero_optimization.zero_hpz_partition_size"
_GATHER = Operation("all-gather in the node", "all_gather")


def connect_second_copies(group: ShardGroup) -> None:
    """Connect the ranks of ``group`` that share a second copy of parameters, if there is one. Collective.

    Raises:
        ConfigError: a GPU has one queue for all groups.
    """
    if (size := group.secondary_shards) > 1:
        group.require_queues(_KEY, f"{_KEY}={size}")
        in_node(group, size)


def in_node(group: ShardGroup, size: int) -> Transport:
    """The transport of second copies that ``size`` neighbouring ranks share. Collective at first."""
    return group.once((_KEY, size), partial(_connect, group, size))


def _connect(group: ShardGroup, size: int) -> Transport:
    mesh = Mesh(group.size, group.rank, size)
    groups = group.whole
    assert groups is not None
    if group.backend == Gloo.name:
        arena = group.share_memory(mesh.shard_ranks(mesh.replica)) if group.device.type == "cpu" else None
        # One arena serves for all three: this transport only gathers, in one thread.
        arenas = [arena] * 3 if arena is not None else []
        return Hierarchy(group.connections(mesh, groups, [size], scatters=False), arenas)
    row = group.new_group([mesh.shard_ranks(replica) for replica in range(group.size // size)])
    return Backend(group.connections(mesh, replace(groups, gathers=row), scatters=False))


class ZeroPlusPlusGather(GatherStrategy):
    """Gathers of one bucket with sharded parameters for computation.

    Args:
        codecs: of the bucket; say which gathers from the owners are quantised.
        group: of the bucket; says how many ranks share a second copy.
    """

    def __init__(self, codecs: Codecs, group: ShardGroup) -> None:
        self._codecs = codecs
        self._secondary = group.secondary_shards
        self._in_node = in_node(group, self._secondary) if self._secondary > 1 else None
        self._kept: Tensor | None = None  # 1D: this rank's part of the second copy
        self._valid = self._keeps = False  # the copy is of the current weights; it is made when the gather is finished
        self._kept_rounded = False  # the copy was decoded
        # Of the gather that is launched next: the codec in which owners send, None: as it is; the second copy is read.
        self._codec: Codec | None = None
        self._serves = False

    def prepare(self, bucket: Bucket, exact: bool) -> bool:
        codec = self._codecs.sent(bucket.wants_grad)
        # A rounded copy serves only rounded gathers: when frozen parameters were unfrozen, gathers became exact.
        serves = self._valid and not (self._kept_rounded and codec is None)
        rounds = self._kept_rounded if serves else codec is not None
        plain = rounds and exact
        self.rounded = rounds and not exact
        self._serves = serves and not plain
        self._codec = None if plain else codec
        self._keeps = self._secondary > 1 and not (serves or plain)
        if self._keeps:
            self._kept_rounded = codec is not None
        return not self._serves

    def launch(self, bucket: Bucket) -> Work:
        if self._serves:
            assert self._kept is not None
            assert self._in_node is not None
            self._part(bucket).copy_(self._kept)
            gather = partial(self._in_node.all_gather, bucket.compute.flat, None)
            return bucket.group.run(_GATHER, bucket.name, bucket.compute.flat, gather)
        if self._codec is None:
            return super().launch(bucket)
        with bucket.weights.gather_source.source(bucket.compute.shard):
            # The shard is in its place in the flat tensor, and is encoded there.
            return all_gather_encoded(bucket.group, bucket.compute.flat, bucket.name, self._codec)

    def finish(self, bucket: Bucket) -> None:
        if not self._keeps:
            return
        part = self._part(bucket)
        self._keeps = False
        self._valid = True
        if self._kept is None:
            # A validation in inference mode finishes a gather when it releases it unused. Training writes to this copy
            # later, so it must not be an inference tensor.
            with torch.inference_mode(False):
                self._kept = torch.empty_like(part)
        self._kept.copy_(part)

    def _part(self, bucket: Bucket) -> Tensor:
        """The elements of the flat tensor that this rank has of the second copy."""
        numel = bucket.layout.numel // self._secondary
        return bucket.compute.flat.narrow(0, bucket.group.rank % self._secondary * numel, numel)

    def weights_changed(self) -> None:
        """Forget the second copy."""
        self._valid = False

    def decoded(self, shard: Tensor) -> Tensor:
        return WEIGHTS.decoded(shard)

    @property
    def nbytes(self) -> int:
        return self._kept.nbytes if self._kept is not None else 0


class EncodedUpdates(GatherStrategy):
    """Gathers of one bucket whose parameters are not sharded: updates are sent encoded.

    ``codec``: of the updates.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def publish(self, bucket: Bucket) -> Work:
        return all_gather_encoded(bucket.group, bucket.compute.flat, bucket.name, self._codec)

    def publish_in_background(self, bucket: Bucket) -> Work:
        return bucket.group.background_gather(
            bucket.compute.flat, partial(gather_encoded, bucket.compute.flat, bucket.group.mesh, self._codec)
        )


class QuantizedSums(ExchangePlan):
    """Plan of an exchange that reduces the gradients of sharded optimizers in few bits."""

    @override
    def reduction(self, bucket: BucketPlan, group: GroupFacts) -> CompressionPlan | None:
        if not (bucket.sharding.optim and has_codec(bucket, group)):
            return None
        return plan_quantized_sums(group.nodes, GRADIENTS, GRADIENTS_INSIDE)

    @override
    def make(self, peers: ShardGroup, groups: Iterable[ShardGroup]) -> QuantizedGradients:
        return QuantizedGradients(peers, groups)


class QuantizedGradients(PlainExchange):
    """Reduces the gradients of sharded optimizers in few bits, without error feedback. Made collectively.

    Args:
        peers: the ranks with the same model.
        groups: of the buckets.

    Raises:
        ConfigError: a GPU has one queue for all groups.
    """

    def __init__(self, peers: ShardGroup, groups: Iterable[ShardGroup]) -> None:
        super().__init__(peers)
        self._lossy: dict[Bucket, Residuals] = {}  # without a worker's: nothing is kept
        of_group = {group: use_quantized_sums(group, GRADIENTS, GRADIENTS_INSIDE) for group in dict.fromkeys(groups)}
        self._sums = {group: sums for group, sums in of_group.items() if sums is not None}

    def bind(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket.storage.codecs.reductions is not None:
                spans = ((piece.offset, piece.offset + piece.numel) for piece in bucket.pieces)
                gaps = gaps_between(spans, bucket.layout.shard_numel)
                self._lossy[bucket] = Residuals(torch.empty(0), None, (), gaps)

    def sums_replicas_apart(self, bucket: Bucket) -> bool:
        return bucket not in self._lossy and super().sums_replicas_apart(bucket)

    def reduce(
        self, bucket: Bucket, out: Tensor, send: SendBuffer, add: bool, replicas: Replicas = Replicas.SENT
    ) -> Work:
        if (residuals := self._lossy.get(bucket)) is None:
            return super().reduce(bucket, out, send, add, replicas)
        return self._sums[bucket.group].reduce(out, send.flat, residuals, add, bucket.name)
