"""Options of the ranks: how they connect, and which collectives are recorded."""

from __future__ import annotations

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
