"""Ranks that exchange something inside of layers, in forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from typing_extensions import Self

from lt_zero.comm.ranks import LaunchOrder, Ranks, Unlogged
from lt_zero.comm.work import CollectiveMonitor
from lt_zero.comm.world import World


class LayerRanks(Ranks):
    """Ranks whose layers exchange something; of a run, or of a user's process group.

    Attributes:
        subject: what they share, in names of their collectives.
    """

    subject: ClassVar[str]

    @classmethod
    def joined(cls, world: World, parts: Sequence[Sequence[int]], group: ProcessGroup) -> Self:
        """Make the ranks of a run. Collective.

        Args:
            world: all ranks of the run.
            parts: the ranks of each such set, in order; the same on all ranks.
            group: over that of ``parts`` which has this rank.
        """
        ranks = next(list(part) for part in parts if world.rank in part)
        # Numbers of its own: in backward its order relative to the run's other collectives may differ between ranks.
        order = LaunchOrder(world.watch, ranks, f"of {cls.subject} {min(ranks)}")
        order.compares_all, order.detector = world.check, world.detector
        made = cls(group, ranks, ranks.index(world.rank), world.device, world.watch, order, world.log)
        order.host = group if made.backend in ("gloo", "fake") else world.new_group("gloo", parts)
        return made

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of(cls, group: ProcessGroup, device: torch.device) -> Self:
        """Use a user's process group, for tensors on ``device``. No hang detection watches it."""
        watch, ranks = CollectiveMonitor(), range(dist.get_world_size(group))
        return cls(group, ranks, dist.get_rank(group), device, watch, LaunchOrder(watch, ranks), Unlogged())
