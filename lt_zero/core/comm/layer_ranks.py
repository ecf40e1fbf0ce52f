"""Ranks that exchange something inside of layers, in forward and backward.

Tokens, each rank as many for another as its data says: an all-to-all of unequal rows. What a rank sends in forward it
receives in backward, so that the backward is the same exchange with both sizes swapped, which can be differentiated
again. And sums over ranks that have parts of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as ProcessGroup
from typing_extensions import Self

from lt_zero.common import accelerator
from lt_zero.core.comm.ranks import LaunchOrder, Ranks, Unlogged
from lt_zero.core.comm.work import CollectiveMonitor
from lt_zero.core.comm.world import World


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


class TokenRanks(LayerRanks):
    """Ranks that send each other tokens; of a run, or of a user's process group."""

    subject = "experts"

    def exchange(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Send the next ``sends[k]`` rows to rank k of these; returns the rows that came, in order of their ranks.

        Differentiable. Collective.

        Args:
            rows: of shape [sum of sends, ...]; all but the first size, and the dtype, are the same on all ranks.
            receives: how many rows come from each rank.
        """
        out: Tensor = _exchange(self, rows, list(sends), list(receives))
        return out

    def swap(self, numbers: Tensor) -> Tensor:
        """Send row k of ``numbers`` [ranks, ...] to rank k; returns those that came, in its shape. Collective."""
        out: Tensor = self.exchanged(numbers, None, None, "numbers of tokens")
        return out

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def exchanged(
        self, rows: Tensor, sends: list[int] | None, receives: list[int] | None, name: str = "tokens of experts"
    ) -> Tensor:
        """Exchange without derivatives: see ``exchange``; None: equally many rows for all."""
        self._require_device(rows, name)
        received = rows.new_empty(len(rows) if receives is None else sum(receives), *rows.shape[1:])
        opened = self.log.open("all_to_all", name, received.nbytes)
        # Without the number of elements, which differs between ranks.
        launch = self.order.launch("all-to-all", f"{name}, {list(rows.shape[1:])}", 0)
        options: dict[str, Any] = {"group": self.process_group, "async_op": self._gloo}
        self._wait(dist.all_to_all_single(received, rows.contiguous(), receives, sends, **options), launch)
        self.log.ended(opened)
        return received


class _TokenExchange(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, group: TokenRanks, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        context.group, context.sends, context.receives = group, sends, receives
        out: Tensor = group.exchanged(rows, sends, receives)
        return out

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        return None, context.group.exchange(grad, context.receives, context.sends), None, None


# A compiler that looked into it would lose the derivative: what a collective writes depends on nothing it knows.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _exchange(*arguments: Any) -> Any:
    return _TokenExchange.apply(*arguments)  # type: ignore[no-untyped-call]


# ---- a vocabulary in parts -------------------------------------------------------------------------------------------


def maximum(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """The maximum over the ranks, in place. Collective over ``group``; None: this rank alone."""
    if group is not None:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return values


def total(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over the ranks, in place. Collective over ``group``; None: this rank alone."""
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


def rows_before(rows: int, group: ProcessGroup | None, device: torch.device) -> tuple[int, int]:
    """Count the rows that the ranks before this one have, and those that all have. Collective over ``group``."""
    if group is None:
        return 0, rows
    mine = accelerator.send(torch.tensor([rows]), device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    counts = torch.cat(parts).tolist()
    return sum(counts[: dist.get_rank(group)]), sum(counts)
