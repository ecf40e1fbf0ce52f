"""Sums that go on without late ranks (comm/tolerance.py): ``communication.slow_node_tolerance``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lt_zero.comm.shard_group import ShardGroup
from lt_zero.comm.tolerance import TolerantSum
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.exchange import PlainExchange


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

    def bind(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = list(buckets)

    def late_gradients(self) -> Iterator[tuple[Bucket, Tensor, Tensor]]:
        world, owed = self._peers.world, self._unsent_gradients()
        some = torch.tensor([any(bool(counts.any()) for _, counts in owed.values())], dtype=torch.uint8)
        world.host_max(some, "late gradients").wait()
        for bucket in self._buckets if some.item() else ():
            lo, hi = self._tolerance.part(bucket.layout.numel)
            every = torch.zeros(2, bucket.layout.numel, dtype=torch.float64)
            for row, values in zip(every, owed.get(bucket.name, ()), strict=False):
                row[lo:hi] = values
            world.sum_all(every, f"late gradients of {bucket.name}")
            yield bucket, every[0].float(), every[1]

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
        """``TolerantSum.owed``, by name of the bucket. Collective."""
        gather = self._peers.world.host_gather
        return self._tolerance.owed(lambda sent: self._tolerance.column(gather(sent, "late gradients")))
