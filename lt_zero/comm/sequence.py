"""The ranks that have parts of one sequence, and what they exchange inside of layers: forward and backward.

One collective serves all methods, an all-to-all of equal rows: row k goes to the k-th of some of the ranks, and the
row that comes from there takes its place. It is its own transpose, so that its backward is the same exchange of the
gradients, which can be differentiated again. Rows that are expanded (stride 0) are one tensor for everybody: that is
an all-gather, and autograd's sum of the rows that come back in backward makes it a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as ProcessGroup

from lt_zero.comm.ranks import LaunchOrder, Ranks, Unlogged
from lt_zero.comm.work import CollectiveMonitor
from lt_zero.comm.world import World


def place_in(group: ProcessGroup | None) -> tuple[int, int]:
    """This rank's number in the group, and the number of its ranks."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def whole_heads(x: Tensor, ranks: int) -> Tensor:
    """Repeat each head of keys or values ([batch, heads, length, dim]) as often as ``ranks`` need for whole ones."""
    repeats = ranks // gcd(x.shape[1], ranks)
    return x.repeat_interleave(repeats, 1) if repeats > 1 else x


class SequenceGroup(Ranks):
    """Ranks that have equal parts of a sequence, in the order of the parts; of a run, or of a user's process group.

    Attributes:
        exchanges: how many collectives this rank has launched in it.
    """

    exchanges = 0

    @classmethod
    def joined(cls, world: World, parts: Sequence[Sequence[int]], group: ProcessGroup) -> SequenceGroup:
        """Make the group of a run. Collective.

        Args:
            world: all ranks of the run.
            parts: the ranks of each such set, in order; the same on all ranks.
            group: over that of ``parts`` which has this rank.
        """
        ranks = next(list(part) for part in parts if world.rank in part)
        # Numbers of its own: in backward its order relative to the run's other collectives may differ between ranks.
        order = LaunchOrder(world.watch, ranks, f"of sequences {min(ranks)}")
        order.compares_all, order.detector = world.check, world.detector
        made = cls(group, ranks, ranks.index(world.rank), world.device, world.watch, order, world.log)
        order.host = group if made.backend in ("gloo", "fake") else world.new_group("gloo", parts)
        return made

    @classmethod
    def of(cls, group: ProcessGroup, device: torch.device) -> SequenceGroup:
        """Use a user's process group, for tensors on ``device``. No hang detection watches it."""
        watch, ranks = CollectiveMonitor(), range(dist.get_world_size(group))
        return cls(group, ranks, dist.get_rank(group), device, watch, LaunchOrder(watch, ranks), Unlogged())

    def exchange(self, rows: Tensor, members: Sequence[int] | None = None) -> Tensor:
        """Send row k to the k-th of ``members``; the row that came from there takes its place. Differentiable.

        Args:
            rows: of shape [members, ...], of one shape and dtype on all of them.
            members: ranks of this group in ascending order, this one among them, which all call this; default: all.

        Returns:
            A contiguous tensor of the shape of ``rows``. Collective over ``members``.
        """
        out: Tensor = _RowExchange.apply(rows, self, members)  # type: ignore[no-untyped-call]
        return out

    def to_heads(self, tensors: Sequence[Tensor], members: Sequence[int] | None = None) -> list[Tensor]:
        """Exchange tokens of all heads for all tokens of some heads. Differentiable. Collective over ``members``.

        Args:
            tensors: of shape [batch, heads, length, dim]; heads are a multiple of the members. Those of one dtype and
                dim go in one collective.
            members: see ``exchange``; their parts are joined in their order.

        Returns:
            Tensors of shape [batch, heads / members, length * members, dim].
        """
        ranks = self.size if members is None else len(members)
        rows = [
            x.unflatten(1, (ranks, -1)).permute(1, 3, 0, 2, 4) for x in tensors
        ]  # [ranks, length, batch, heads, dim]
        return self._together(rows, members)

    def to_tokens(self, x: Tensor, members: Sequence[int] | None = None) -> Tensor:
        """Exchange the other way round: [batch, heads / members, length * members, dim] -> the part of all heads.

        The result is [batch, length, heads, dim] in memory. Differentiable. Collective over ``members``.
        """
        ranks = self.size if members is None else len(members)
        rows = x.transpose(1, 2).unflatten(1, (ranks, -1)).movedim(1, 0)  # [ranks, batch, length, heads, dim]
        return self.exchange(rows, members).permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2)

    def gather_parts(self, tensors: Sequence[Tensor], members: Sequence[int] | None = None) -> list[Tensor]:
        """Join the parts of all members, in their order: [batch, heads, length, dim] -> [..., length * members, dim].

        In backward the gradients of all members are summed, and each gets those of its part. Differentiable. Collective
        over ``members``.
        """
        ranks = self.size if members is None else len(members)
        rows = [x.permute(2, 0, 1, 3).expand(ranks, -1, -1, -1, -1) for x in tensors]
        return self._together(rows, members)

    def gather_tokens(self, mask: Tensor) -> Tensor:
        """[batch, length / ranks] of each rank -> [batch, length]. Not differentiable. Collective."""
        return self.exchange(mask.detach().expand(self.size, *mask.shape)).movedim(0, -2).flatten(-2)

    def _together(self, rows: list[Tensor], members: Sequence[int] | None) -> list[Tensor]:
        """Exchange tensors [ranks, length, batch, heads, dim]: -> [batch, heads, ranks * length, dim] of each."""
        alike = {(x.dtype, x.shape[-1]) for x in rows}
        if len(alike) > 1:
            return [part for x in rows for part in self._together([x], members)]
        expanded = all(x.stride(0) == 0 for x in rows)
        joined = torch.cat([x[0] for x in rows], 2).expand(len(rows[0]), *4 * [-1]) if expanded else torch.cat(rows, 3)
        whole = self.exchange(joined, members).flatten(0, 1)
        return [part.permute(1, 2, 0, 3) for part in whole.split([x.shape[3] for x in rows], 2)]

    def _exchanged(self, rows: Tensor, members: Sequence[int] | None) -> Tensor:
        name = "parts of sequences"
        self._require_device(rows, name)
        sent, received = rows.contiguous(), torch.empty_like(rows, memory_format=torch.contiguous_format)
        splits = None
        if members is not None and len(members) < self.size:
            splits = [int(rank in members) for rank in range(self.size)]
        opened = self.log.open("all_to_all", name, sent.nbytes)
        launch = self.order.launch("all-to-all", name, sent.numel())
        self.exchanges += 1
        work = dist.all_to_all_single(received, sent, splits, splits, group=self.process_group, async_op=self._gloo)
        self._wait(work, launch)
        self.log.ended(opened)
        return received


class _RowExchange(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, group: SequenceGroup, members: Sequence[int] | None) -> Tensor:
        context.group, context.members = group, members
        return group._exchanged(rows, members)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return context.group.exchange(grad, context.members), None, None


def world_of(device: torch.device) -> SequenceGroup | None:
    """The default process group; None if this is a single process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group = dist.group.WORLD
    assert group is not None
    return SequenceGroup.of(group, device)
