"""Options of the ranks: how they connect, and which collectives are recorded, how groups of ranks move tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Operations that are recorded, by their names in torch.distributed, with other names that users write.
OPERATIONS: dict[str, tuple[str, ...]] = {
    "all_gather": ("all_gather_into_tensor", "all_gather_single", "all_gather_base"),
    "reduce_scatter": ("reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter_base"),
    "all_reduce": (),
    "all_to_all": ("all_to_all_single",),
    "broadcast": (),
    "barrier": (),
    "all_gather_object": (),
    "broadcast_object_list": (),
}


@dataclass(frozen=True)
class RecordedCollectives:
    """The collectives that a ``CommLog`` records.

    Attributes:
        operations: of ``OPERATIONS``.
        by_name: break down by unit, bucket or purpose.
        prints: print each collective when it completes, which synchronizes a GPU.
    """

    operations: frozenset[str] = frozenset(OPERATIONS)
    by_name: bool = True
    prints: bool = False


@dataclass(frozen=True)
class CommunicationOptions:
    """Options of the connections between ranks.

    Attributes:
        link_timeout: seconds for which a link may be cut, or a host not answer, before ranks give each other up.
        compares_collectives: compare each collective across ranks before its launch.
    """

    link_timeout: float = 120.0
    compares_collectives: bool = False


@dataclass(frozen=True)
class GroupOptions:
    """Options of the groups of ranks over which buckets are sharded.

    Attributes:
        topology: dimensions of collectives over several nodes, or "auto".
        scatters: reduce-scatter gradients; False: all-reduce them, and keep the own shard.
        shards: returns the number of shards that so many ranks cut tensors into; raises ConfigError.
        sums_gradients: reductions return the sum over ranks, not the mean.
        prescales: divide gradients by the number of ranks before a reduction, not after.
        predivide_factor: divide gradients by it before a reduction; no effect if it ``prescales``.
    """

    topology: str | int
    scatters: bool
    shards: Callable[[int], int]
    sums_gradients: bool
    prescales: bool
    predivide_factor: float

    @property
    def predivides(self) -> bool:
        """True if gradients are divided by ``predivide_factor`` before a reduction."""
        return not self.prescales and self.predivide_factor != 1.0
