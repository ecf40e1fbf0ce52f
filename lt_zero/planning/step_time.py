"""The time of a step on GPUs that waits for the network: a model of NCCL's rings, and of the computing that hides them.

Note [Model of a step]
    A ring over n ranks sends n - 1 pieces one after the other. Each adds a latency, that of NVLink or of the network,
    and there is one for the launch. Latencies, and the shares of the bandwidth that NCCL's protocols leave, are those
    by which NCCL 2.28 chooses a protocol (src/graph/tuning.cc); the quickest counts. A ring through several nodes
    enters each over the network cards of its ranks on a node.
    Computing takes 2 operations for each parameter and token in a forward, and twice that in a backward. A unit has the
    attention of a transformer's block with as many parameters, 12 times its width squared, over one sequence. The host,
    the optimizer, and traffic of tensor and pipeline ranks are left out.
    While a unit computes, the gather of another runs, and in a backward also a reduction, over the same links. What
    takes longer than the computing waits; so do the first gather and the last reduction. Sums between replicas run with
    the reductions of the last micro-batch. Below stage 3 updated weights are gathered beside the next forward.
    Nothing of it is measured on a cluster: compare settings by it, and measure the chosen one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lt_zero.config import ZeroConfig
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.gather import Residency
from lt_zero.core.engine.partition import EnginePlan, GroupFacts
from lt_zero.core.engine.storage_plan import StoragePlan
from lt_zero.features import is_installed
from lt_zero.planning.forecast import planned
from lt_zero.planning.setup import MANY_SHARDS, Setup

_US = 1e-6


class _Protocol(NamedTuple):
    """A protocol of NCCL's rings: microseconds of a launch and of a step, and the share of the bandwidth."""

    launch: float
    inside: float  # of a node
    between: float  # nodes
    share: float


_PROTOCOLS = (_Protocol(6.6, 0.6, 2.7, 0.25), _Protocol(14.0, 1.9, 4.0, 0.92), _Protocol(8.4, 3.4, 14.0, 1.0))


@dataclass(frozen=True)
class Cluster:
    """Rates of a GPU, per second. The defaults are those of an H100 with NVLink and 400 Gbit/s of network.

    Attributes:
        inside: bytes of a ring inside a node.
        between: bytes of its share of the network.
        flops: floating-point operations, as far as training reaches them without a network.
        name: for messages.
    """

    inside: float = 320e9
    between: float = 46e9
    flops: float = 0.55 * 989e12
    name: str = "H100, NVLink, 400 Gbit/s each"


class StepTime(NamedTuple):
    """Seconds of a step: of computing, and of waits for the network beside it."""

    computes: float
    waits: float

    @property
    def total(self) -> float:
        return self.computes + self.waits


def ring(nbytes: float, ranks: int, on_node: int, cluster: Cluster) -> float:
    """Seconds of an all-gather or a reduce-scatter of ``nbytes`` in all; an all-reduce takes two.

    ``on_node``: of its ranks, on each node. See Note [Model of a step].
    """
    if ranks == 1:
        return 0.0
    nodes = max(1, ranks // on_node)
    between = nodes - 1
    rate = cluster.inside if nodes == 1 else min(cluster.inside, cluster.between * on_node)
    steps = ranks - 1
    return min(
        (launch + (steps - between) * inside + between * hop) * _US + nbytes * steps / ranks / (rate * share)
        for launch, inside, hop, share in _PROTOCOLS
    )


class _Times(NamedTuple):
    """Seconds of a unit, in each forward or backward.

    Attributes:
        forward: computing; a backward takes twice that.
        gather, again: the gathers before its forward and its backward.
        reduction: of its gradients inside of a replica.
        across: of the sum between replicas.
        update: the gather of updated weights, once per step.
    """

    forward: float
    gather: float
    again: float
    reduction: float
    across: float
    update: float


def step_time(
    plan: EnginePlan,
    config: ZeroConfig,
    policy: DtypePolicy,
    setup: Setup,
    tokens: int,
    micro_batches: int = 1,
    cluster: Cluster | None = None,
) -> StepTime:
    """The time of a step with so many ``tokens`` in each of a rank's ``micro_batches``. See Note [Model of a step]."""
    cluster = cluster or Cluster()
    units = _units(plan, config, policy, setup, tokens, cluster)
    accumulates = not plan.buckets[0].sharding.grads
    computes = 3 * micro_batches * sum(unit.forward for unit in units)
    waits = _longer((unit.update for unit in units), (unit.forward for unit in units))
    for number in range(micro_batches):
        last = number == micro_batches - 1
        waits += _longer((unit.gather for unit in units), (unit.forward for unit in units))
        reduces = [unit.reduction if last or not accumulates else 0.0 for unit in units]
        sends = [one + (unit.across if last else 0.0) for one, unit in zip(reduces, units, strict=True)]
        both = (one + unit.again for one, unit in zip(sends, units, strict=True))
        waits += _longer(both, (2 * unit.forward for unit in units), edge=max(sends, default=0.0))
    return StepTime(computes, waits)


def _units(
    plan: EnginePlan, config: ZeroConfig, policy: DtypePolicy, setup: Setup, tokens: int, cluster: Cluster
) -> list[_Times]:
    """The times of the units of a plan, and of the rest of it."""
    options, _, table = planned(plan, config, policy, setup)
    limits = Residency.of(options, {row.group for row in table.values()})
    rows = [[table[bucket] for bucket in unit.buckets] for unit in plan.units]
    # The root has the rest, and is in use from its forward to its backward.
    rows[-1] += [table[bucket] for bucket in plan.rest]
    sharded = [sum(row.counted for row in of_unit if row.sharding.params) for of_unit in rows[:-1]]
    stays = [*limits.keep_after_forward(sharded), True]
    twice = [unit.needs_weights and not keeps for unit, keeps in zip(plan.units, stays, strict=True)]
    every = zip(rows, twice, strict=True)
    return [_times(of_unit, tokens, cluster, again) for of_unit, again in every if of_unit]


def _longer(sends: Iterable[float], computes: Iterable[float], edge: float | None = None) -> float:
    """Seconds of what is sent beyond the computing beside it, and of the part with nothing beside it.

    ``edge``: that part; default: the longest of what is sent, which is about the first where units are alike.
    """
    sends = list(sends)
    beyond = sum(max(0.0, sent - time) for sent, time in zip(sends, computes, strict=True))
    return beyond + (max(sends, default=0.0) if edge is None else edge)


def _times(rows: list[StoragePlan], tokens: int, cluster: Cluster, twice: bool) -> _Times:
    """The times of a unit with these buckets. ``twice``: its weights are gathered for the backward, too."""
    gather = again = reduction = across = update = 0.0
    for row in rows:
        codec = row.codecs.sent(row.trains) if row.sharding.params else row.codecs.updates
        shards = row.group.mesh.shards
        nbytes = shards * codec.nbytes(row.numel // shards) if codec is not None else row.numel * row.dtype.itemsize
        on_node = _on_node(row.group)
        gathers = ring(nbytes, shards, min(shards, on_node), cluster)
        if row.sharding.params:
            gather += gathers
            second = row.group.secondary_shards
            if second > 1:
                gathers = ring(row.numel * row.dtype.itemsize, second, min(second, on_node), cluster)
            again += gathers if twice else 0.0
        elif row.sharding.optim and row.trains:
            update += gathers
        if row.trains:
            one, other = _reduced(row, on_node, cluster)
            reduction += one
            across += other
    elements = sum(row.elements for row in rows)
    forward = 2 * tokens * (elements + tokens * math.sqrt(elements / 12)) / cluster.flops
    return _Times(forward, gather, again, reduction, across, update)


def _reduced(row: StoragePlan, on_node: int, cluster: Cluster) -> tuple[float, float]:
    """Seconds of a reduction of a bucket inside of a replica, and between replicas."""
    mesh = row.group.mesh
    sent = row.send
    if sent is None:
        return 0.0, 0.0
    nbytes = row.numel * sent.itemsize
    size = row.group.size
    if not row.is_cut:
        return 2 * ring(nbytes, size, min(size, on_node), cluster), 0.0
    inside = ring(nbytes, mesh.shards, min(mesh.shards, on_node), cluster)
    replicas = mesh.world // mesh.shards
    of_column = min(replicas, max(1, on_node // mesh.shards))
    return inside, 2 * ring(nbytes / mesh.shards, replicas, of_column, cluster)


def _on_node(group: GroupFacts) -> int:
    """Ranks of a group on each node."""
    return max(1, len(group.nodes[0])) if group.nodes else group.size


# ---- what many shards cost -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Keys that send less, or over shorter rings, than many shards do.

    Attributes:
        keys: of the configuration, for overrides.
        exact: results differ by the rounding of sums at most.
    """

    keys: tuple[str, ...]
    exact: bool = True

    def __str__(self) -> str:
        return ", ".join(self.keys) or "as configured"

    def of(self, config: ZeroConfig) -> ZeroConfig:
        return ZeroConfig.of(config, overrides=list(self.keys)) if self.keys else config


def choices(config: ZeroConfig, shards: int, per_node: int) -> list[Choice]:
    """The settings for so many shards, the configured one first; that alone for fewer than ``MANY_SHARDS``.

    ``shards``, ``per_node``: data ranks.
    """
    zero = config.zero_optimization
    found = [Choice(())]
    if shards < MANY_SHARDS or zero.stage == 0 or zero.shards(shards) < shards or zero.secondary_shards(shards) > 1:
        return found
    if shards > MANY_SHARDS and shards % MANY_SHARDS == 0 and MANY_SHARDS % per_node == 0:
        found.append(Choice((f"zero_optimization.mics_shard_size={MANY_SHARDS}",)))
    copies = zero.stage == 3 and is_installed("zero_plus_plus")
    if copies and 1 < per_node < shards and shards % per_node == 0:
        found.append(Choice((f"zero_optimization.zero_hpz_partition_size={per_node}",)))
    if config.communication_data_type is None:
        found.append(Choice(("communication_data_type=bf16",), exact=False))
    return found


def cost_of_shards(
    plan: EnginePlan, config: ZeroConfig, policy: DtypePolicy, group: GroupFacts, tokens: int = 4096
) -> str:
    """A line that says what so many shards as ``group`` has cost a micro-batch."""
    setup = Setup(group, _on_node(group))
    cluster = Cluster()
    found = step_time(plan, config, policy, setup, tokens, 1, cluster)
    times = f"waits {milliseconds(found.waits)} for the network beside {milliseconds(found.computes)} of computing"
    return (
        f"{group.mesh.shards:,} shards: a micro-batch of {tokens:,} tokens {times}, by a model of {cluster.name}. "
        "lt-zero estimate --fit compares mics_shard_size, zero_hpz_partition_size and communication_data_type."
    )


def milliseconds(seconds: float) -> str:
    """Seconds as text."""
    return f"{seconds * 1e3:,.3g} ms"
