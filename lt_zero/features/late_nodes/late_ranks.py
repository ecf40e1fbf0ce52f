"""Sums that go on without late ranks (features/late_nodes/tolerance.py): ``communication.slow_node_tolerance``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.transport import Mesh
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.exchange import PlainExchange
from lt_zero.core.engine.exchange_plan import ExchangePlan
from lt_zero.core.engine.layout import BucketLayout
from lt_zero.core.engine.storage_plan import StoragePlan
from lt_zero.features.late_nodes.tolerance import FOR_EVER, TolerantHierarchy, TolerantSum, tolerance_of

log = logging.getLogger("lt_zero")


def tolerate(group: ShardGroup, share: float, sharded: bool) -> None:
    """Let sums of gradients go on without late nodes, at most ``share`` of the ranks. Collective.

    ``sharded``: whether anything is.

    Raises:
        ConfigError: that cannot be had.
    """
    if group.whole is None:
        return
    ranks, late = tolerance_of(share, sharded, group.mesh, group.nodes, group.backend, group.device)
    mesh = Mesh(group.size, group.rank, ranks)
    columns = [mesh.replica_ranks(number) for number in range(ranks)]
    groups = [group.new_group(columns, FOR_EVER) for _ in range(2)]
    tolerant = TolerantSum(groups, mesh, late, partial(_tell_late, mesh, group.world.hosts))
    group.world.ends_with_run.add(tolerant)
    node = next(node for node in group.nodes if group.rank in node)
    arenas = [arena for _ in range(3 if ranks > 1 else 0) if (arena := group.share_memory(node)) is not None]
    group.sum_by(TolerantHierarchy(group.connections(mesh, group.whole, [ranks]), arenas, tolerant))


def tolerant_sum(group: ShardGroup) -> TolerantSum | None:
    """The sums of ``group`` that go on without late ranks; None: they wait for all."""
    return group.sums.tolerant if isinstance(group.sums, TolerantHierarchy) else None


def _tell_late(mesh: Mesh, hosts: Sequence[str], member: int, late: bool) -> None:
    """Log that a member is late, or on time again."""
    # One rank logs, of another member than the late one, which may not come to this for long.
    if mesh.rank == (0 if member else mesh.world - 1) // mesh.shards * mesh.shards:
        ranks = mesh.shard_ranks(member)
        text = "is late: sums of gradients go on without it, and get its contributions later" if late else "is on time"
        log.warning("Node %s (rank %s) %s.", hosts[ranks[0]], ", ".join(map(str, ranks)), text)


class TolerantPlan(ExchangePlan):
    """Plan of an exchange whose sums go on without late ranks. ``tolerate`` was called for the groups."""

    @property
    @override
    def sums_replicas_once(self) -> bool:
        return False

    @override
    def kept_nbytes(self, row: StoragePlan, layout: BucketLayout) -> int:
        """Bytes of gradients that this rank adds up, and of those under way (tolerance.py)."""
        if not row.trains or row.group.size == 1:
            return 0
        return 2 * layout.numel * torch.float32.itemsize

    @override
    def make(self, peers: ShardGroup, groups: Iterable[ShardGroup]) -> TolerantExchange:
        tolerance = tolerant_sum(peers)
        assert tolerance is not None
        return TolerantExchange(peers, tolerance)


class TolerantExchange(PlainExchange):
    """Sums the gradients that are there in time; late ones are in the sums of a later step.

    Args:
        peers: all ranks.
        tolerance: sums their gradients.
    """

    sums_late = True
    remembers = True

    def __init__(self, peers: ShardGroup, tolerance: TolerantSum) -> None:
        super().__init__(peers)
        self._tolerance, self._buckets = tolerance, list[Bucket]()

    @override
    def bind(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = list(buckets)

    @override
    def refuse_second_reduction(self, names: str) -> NoReturn:
        raise RuntimeError(
            f"Gradients of {names} were set after backward. To reduce them all ranks would have to agree, and with "
            "communication.slow_node_tolerance they do not wait for each other: remove the key, or set p.grad in a "
            "backward hook."
        )

    @override
    def missing_share(self) -> float:
        return self._tolerance.missing_share()

    @override
    def late_gradients(self) -> Iterator[tuple[Bucket, Tensor, Tensor]]:
        world, owed = self._peers.world, self._unsent_gradients()
        # All ranks yield the same buckets, also those that owe nothing: the sums below are collective.
        some = torch.tensor([any(bool(counts.any()) for _, counts in owed.values())], dtype=torch.uint8)
        world.host_max(some, "late gradients").wait()
        for bucket in self._buckets if some.item() else ():
            lo, hi = self._tolerance.part(bucket.layout.numel)
            # Each rank knows its own part of the elements, so the sum puts the parts together.
            every = torch.zeros(2, bucket.layout.numel, dtype=torch.float64)
            for row, values in zip(every, owed.get(bucket.name, ()), strict=False):
                row[lo:hi] = values
            world.sum_all(every, f"late gradients of {bucket.name}")
            yield bucket, every[0].float(), every[1]

    @override
    def replace_late_gradients(self, read: Callable[[Bucket], tuple[Tensor, Tensor]]) -> None:
        self._unsent_gradients()
        owed = dict[str, tuple[Tensor, Tensor]]()
        # The ranks of the first member owe all that is loaded, so that it counts once.
        for bucket in self._buckets if self._tolerance.is_first else ():
            lo, hi = self._tolerance.part(bucket.layout.numel)
            rows, counts = read(bucket)
            owed[bucket.name] = rows[lo:hi], counts[lo:hi]
        self._tolerance.restore(owed)

    def _unsent_gradients(self) -> dict[str, tuple[Tensor, Tensor]]:
        """``TolerantSum.unsent``, by name of the bucket. Collective."""
        gather = self._peers.world.host_gather
        return self._tolerance.unsent(lambda sent: self._tolerance.my_part(gather(sent, "late gradients")))
