"""Collectives of a group that send codes: gathers, and the reductions of exchange/compression.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lt_zero.common.codec import Codec
from lt_zero.common.errors import ConfigError, Problem
from lt_zero.core.comm.residuals import Residuals
from lt_zero.core.comm.shard_group import Operation, ShardGroup
from lt_zero.core.comm.topology import whole_nodes
from lt_zero.core.comm.work import CollectiveId, Done, Work
from lt_zero.core.engine.partition import BucketPlan, GroupFacts
from lt_zero.exchange.compression import (
    CompressionPlan,
    Compressor,
    gather_encoded,
    plan_compression,
    plan_quantized_sums,
)

CODED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that codecs take
_GATHER = Operation("encoded all-gather", "all_gather")
_REDUCE_SCATTER = Operation("compressed reduction", "reduce_scatter", reduces=True)
_ALL_REDUCE = Operation("compressed reduction", "all_reduce", reduces=True)


def has_codec(bucket: BucketPlan, group: GroupFacts) -> bool:
    """True if weights and gradients of a bucket can be sent encoded, and there is a rank to send them to."""
    return bucket.dtype in CODED and not group.alone


def all_gather_encoded(group: ShardGroup, flat: Tensor, name: str, codec: Codec, own: Tensor | None = None) -> Work:
    """``ShardGroup.all_gather`` of encoded shards: all ranks, the owner too, get the decoded values.

    Where ranks share memory, codes are sent between processes all the same. ``own``: this rank's shard, encoded.
    """
    if group.process_group is None and own is None:
        return Done()

    def start(launch: CollectiveId | None) -> Work:
        gather = partial(group.transport.all_gather, own=None, launch=launch)
        return gather_encoded(flat, group.mesh, codec, gather, own)

    return group.run(_GATHER, name, flat, start)


@dataclass(frozen=True)
class CompressedGroup:
    """The compressed reductions of ``group``, by a ``compressor`` of its ranks."""

    group: ShardGroup
    compressor: Compressor

    def reduce(self, out: Tensor, flat: Tensor, residuals: Residuals, add: bool, name: str) -> Work:
        """``all_reduce``, or without ``residuals.server`` ``reduce_scatter``, of compressed gradients (1D)."""
        operation = _REDUCE_SCATTER if residuals.server is None else _ALL_REDUCE
        factor = self.group.factors(flat.dtype)[1]
        start = partial(self.compressor.reduce, out, flat, residuals, add, factor)
        return self.group.run(operation, name, flat, start)

    def measure_rate(self) -> float:
        """Bytes per second of this rank to others while all ranks send. Collective."""
        return self.compressor.measure_rate(self.group.order.launch_reduction("exchange", "rate of links", 0))


def use_quantized_sums(group: ShardGroup, codec: Codec, inside: Codec) -> CompressedGroup | None:
    """Prepare sums in nodes, encoded with ``inside``, then between them, with ``codec``; None: there is one rank.

    Collective.

    Raises:
        ConfigError: a GPU has one queue for all groups.
    """
    plan = plan_quantized_sums(group.nodes, codec, inside)
    return _connect(group, plan, "zero_optimization.zero_quantized_gradients")


def use_compression(group: ShardGroup, codec: Codec, hierarchical: bool) -> CompressedGroup | None:
    """Prepare reductions that send codes; None: there is one rank, or node. Collective.

    ``hierarchical``: between nodes only.

    Raises:
        ConfigError: the ranks do not form nodes, or a GPU has one queue for all groups.
    """
    plan = plan_compression(group.nodes, codec, hierarchical)
    if plan is not None and hierarchical and whole_nodes(group.nodes) is None:
        key = "gradient_compression.hierarchical_compress"
        sizes = ", ".join(str(len(node)) for node in group.nodes)
        text = f"{key}=true needs nodes of equally many, neighbouring ranks; they have {sizes}: write false."
        raise ConfigError([Problem(key, text)])
    return _connect(group, plan, "gradient_compression.algorithm")


def _connect(group: ShardGroup, plan: CompressionPlan | None, key: str) -> CompressedGroup | None:
    if group.process_group is None or plan is None:
        return None
    group.require_queues(key, key)
    new_group = partial(group.new_group, exchanges=True)
    made = group.once(plan, lambda: Compressor(plan, group.rank, group.device, group.watch, new_group))
    return CompressedGroup(group, made)
