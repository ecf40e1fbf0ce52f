"""Bytes that a node sends to others in a step, over a link that is slower than memory.

Counted as gloo's and NCCL's algorithms send them, without the headers of packets (about 3 %) and without the small
collectives of a step (norms, flags). Of a 1-bit optimizer it is a step after the freeze.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lt_zero.common.codec import Codec
from lt_zero.config import ZeroConfig
from lt_zero.core.comm.hierarchy import axis_groups
from lt_zero.core.comm.topology import choose
from lt_zero.core.comm.transport import Mesh
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.exchange_plan import ExchangePlan
from lt_zero.core.engine.gather import Residency
from lt_zero.core.engine.partition import EnginePlan, GroupFacts
from lt_zero.core.engine.storage_plan import StoragePlan
from lt_zero.planning.forecast import planned
from lt_zero.planning.setup import Setup


@dataclass(frozen=True)
class Traffic:
    """Bytes that one node sends to others per optimizer step (mean of the nodes).

    Attributes:
        gradients: sent by reductions.
        weights: sent by gathers.
        topology: how; see ``communication.topology``.
    """

    gradients: float
    weights: float
    topology: str

    @property
    def total(self) -> float:
        return self.gradients + self.weights

    def seconds(self, mbit: float) -> float:
        """Seconds that a link of ``mbit`` Mbit/s per node takes for them."""
        return self.total * 8 / (mbit * 1e6)


def forecast_traffic(
    plan: EnginePlan, config: ZeroConfig, policy: DtypePolicy, setup: Setup, micro_batches: int = 1
) -> Traffic:
    """The traffic of a step with ``micro_batches`` backwards. ``setup.per_node`` ranks are on each node."""
    options, exchange, table = planned(plan, config, policy, setup)
    links = {
        group: _GroupLinks(group, config, setup) for group in {setup.group, *(row.group for row in table.values())}
    }
    topology = links[setup.group].topology
    if setup.world <= setup.per_node:
        return Traffic(0, 0, topology.why)
    gradients = weights = 0.0
    for bucket, row in table.items():
        if row.trains:
            each = row.sharding.grads or exchange.reduces_each_backward
            reductions = micro_batches if each else 1
            # Gradients that wait on their rank, to be added up, have the accumulator's dtype. See grad_reducer.py.
            waits = micro_batches > 1 or exchange.waits_for_step
            adds_up = bucket.is_wide or (waits and not each)
            sent = row.send_dtype(row.accumulate) if adds_up else row.send
            gradients += links[row.group].reduced(row, exchange, sent, reductions)
            if row.sharding.optim and not row.sharding.params:
                weights += links[row.group].gathered(row, row.codecs.updates)
    limits = Residency.of(options, links)
    units = [[table[b] for b in unit.buckets if b.sharding.params] for unit in plan.units[:-1]]
    stays = limits.keep_after_forward([sum(row.counted for row in rows) for rows in units])
    for rows, unit, keeps in zip(units, plan.units, stays, strict=False):
        passes = 2 if unit.needs_weights and not keeps else 1
        weights += sum(links[row.group].gathers(row, passes * micro_batches) for row in rows)
    root = [table[b] for b in (*plan.units[-1].buckets, *plan.rest) if b.sharding.params]
    weights += sum(links[row.group].gathers(row, micro_batches) for row in root)
    return Traffic(gradients, weights, topology.why)


class _GroupLinks:
    """Traffic of a bucket of ``group`` between nodes, per node. Groups with other parts of its tensors send as much.

    Their ranks are on nodes alike: tensor ranks are neighbours, as many on each node.
    """

    def __init__(self, group: GroupFacts, config: ZeroConfig, setup: Setup) -> None:
        nodes = [list(node) for node in group.nodes]
        # A group of few experts may be on some of the nodes only.
        share = min(1.0, len(nodes) / -(-setup.world // setup.per_node))
        self._alike = max(1, setup.world // group.size) * share
        backend = "gloo" if setup.device == "cpu" else "nccl"
        self.topology = choose(config.communication.topology, group.mesh, nodes, backend)
        self._links = _Links(group.mesh, nodes, backend, self.topology.sizes)
        # Of reductions that add each rank's gradients by themselves: all of them go to the rank that adds them.
        self._direct = _Links(group.mesh, nodes, "gloo", ())
        self._flat = _Links(group.mesh, nodes, backend, ())
        secondary = group.secondary_shards
        self._second = _Links(Mesh(group.size, 0, secondary), nodes, backend, ()) if secondary > 1 else None

    def reduced(self, row: StoragePlan, exchange: ExchangePlan, sent: torch.dtype | None, times: int) -> float:
        """Bytes of ``times`` reductions of a bucket's gradients in a step; ``sent``: in which dtype, None: none is."""
        plan = row.codecs.reductions
        if sent is None:
            return 0.0
        if exchange.reduces_each_backward:
            gathered = 0.0 if row.is_cut else self._flat.shared(row)
            return self._alike * times * (self._direct.scattered(row, sent) + gathered)
        if plan is None:
            sums = 1 if exchange.sums_replicas_once else times
            return self._alike * (times * self._links.reduced(row, sent) + sums * self._links.summed(row, sent))
        coded = plan.crossing_nbytes(row.numel, exchange.everywhere(row.is_cut))
        return self._alike * times * coded / exchange.interval

    def gathered(self, row: StoragePlan, codec: Codec | None) -> float:
        """Bytes of a gather of a bucket's updated weights, as they are or encoded."""
        return self._alike * self._links.gathered(row, codec)

    def gathers(self, row: StoragePlan, times: int) -> float:
        """Bytes of ``times`` gathers of a sharded bucket in a step."""
        codec = row.codecs.sent(row.trains)
        if self._second is None:
            return self._alike * times * self._links.gathered(row, codec)
        first = 1 if row.trains else 0  # those that begin at the owners
        sent = first * self._links.gathered(row, codec) + (times - first) * self._second.gathered(row)
        return self._alike * sent


class _Links:
    """Bytes between nodes, per node, in one collective of a bucket.

    They are proportional to the bucket's, so that pairs of ranks are counted once, however many buckets there are.
    """

    def __init__(self, mesh: Mesh, nodes: list[list[int]], backend: str, sizes: Sequence[int]) -> None:
        self._mesh = mesh
        self._count = len(nodes)
        self._gloo = backend == "gloo"
        self._dimensions = [axis_groups(mesh, sizes, number) for number in range(len(sizes))]
        self._node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
        self._rows = self._paths([mesh.shard_ranks(replica) for replica in range(mesh.world // mesh.shards)])
        self._everyone = self._paths([list(range(mesh.world))])
        columns = [mesh.replica_ranks(shard) for shard in range(mesh.shards)] if mesh.shards < mesh.world else []
        self._columns = self._ring(columns)

    def reduced(self, row: StoragePlan, sent: torch.dtype) -> float:
        """Bytes of a reduction of a bucket's gradients in dtype ``sent``, without ``summed``."""
        if row.is_cut:
            return _scattered(row.numel, self._rows, sent, _wide(row))
        shared = self._everyone.share * row.numel * sent.itemsize
        return _scattered(row.numel, self._everyone, sent, _wide(row)) + shared

    def scattered(self, row: StoragePlan, sent: torch.dtype) -> float:
        """Bytes in which each rank gets its part of every rank's gradients."""
        return _scattered(row.numel, self._everyone, sent, _wide(row))

    def shared(self, row: StoragePlan) -> float:
        """Bytes in which all ranks get all sums of a bucket, as wide as its accumulator."""
        return self._everyone.share * row.numel * row.accumulate.itemsize

    def summed(self, row: StoragePlan, sent: torch.dtype) -> float:
        """Bytes of a sum of a bucket's gradients over the replicas of its shards."""
        if not row.is_cut:
            return 0.0
        return self._columns * 2 * row.shard_numel * (_wide(row) if self._gloo else sent.itemsize)

    def gathered(self, row: StoragePlan, codec: Codec | None = None) -> float:
        """Bytes of a gather of a bucket's weights, as they are or encoded."""
        shards = self._mesh.shards
        nbytes = shards * codec.nbytes(row.numel // shards) if codec is not None else row.numel * row.dtype.itemsize
        return self._rows.share * nbytes

    def _ring(self, groups: Sequence[Sequence[int]]) -> float:
        """Bytes in rings through each of the ``groups``, per byte: every edge carries all but one rank's part."""
        sent = 0.0
        for ranks in groups:
            pairs = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
            crossed = sum(self._node_of[one] != self._node_of[other] for one, other in pairs)
            sent += (len(ranks) - 1) / len(ranks) * crossed
        return sent / self._count

    def _paths(self, groups: list[list[int]]) -> _Paths:
        """The paths of collectives in each of the ``groups``."""
        if not self._gloo:
            ring = self._ring(groups)
            return _Paths([ring], ring)
        scatter = list[float]()
        share = 0.0
        part = 1.0 / self._count
        for lines_of in self._dimensions or [groups]:
            part /= len(lines_of[0])  # what a rank has after this dimension; in gathers, before it
            nodes = [[self._node_of[rank] for rank in ranks] for ranks in lines_of]
            pairs = sum(map(_apart, nodes))
            scatter.append(part * pairs)
            share += part * (pairs if self._dimensions else sum(map(_broadcasts, nodes)))
        return _Paths(scatter, share)


class _Paths(NamedTuple):
    """Bytes that a node sends to others, per byte of a bucket.

    Attributes:
        scatter: in each dimension of a reduce-scatter.
        share: while all ranks get all shards.
    """

    scatter: list[float]
    share: float


def _wide(row: StoragePlan) -> int:
    """Bytes of an element of a sum that is not rounded."""
    return max(row.accumulate.itemsize, torch.float32.itemsize)


def _scattered(numel: int, paths: _Paths, sent: torch.dtype, wide: int) -> float:
    """Bytes of a reduce-scatter; ``wide``: bytes of an element of a partial sum, after the first dimension."""
    first, *others = paths.scatter
    return numel * (first * sent.itemsize + sum(others) * wide)


def _apart(nodes: Sequence[int]) -> int:
    """Count the ordered pairs of ranks on different nodes; ``nodes``: of each rank."""
    return len(nodes) ** 2 - sum(count**2 for count in Counter(nodes).values())


def _broadcasts(nodes: Sequence[int]) -> int:
    """Count how often gloo's broadcasts, one from each rank, cross between ``nodes`` (of each rank).

    A broadcast is a binomial tree: ranks that have the data, counted from the root, double in each round.
    """
    count = len(nodes)
    crossed = 0
    bit = 1
    while bit < count:
        # Over all roots, each of the round's senders is every rank once.
        senders = min(bit, count - bit)
        crossed += senders * sum(nodes[rank] != nodes[(rank + bit) % count] for rank in range(count))
        bit *= 2
    return crossed
