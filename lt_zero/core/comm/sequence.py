"""The ranks that have parts of one sequence, and what they exchange inside of layers: forward and backward.

One collective serves all methods, an all-to-all of equal rows: row k goes to the k-th of some of the ranks, and the
row that comes from there takes its place. It is its own transpose, so that its backward is the same exchange of the
gradients, which can be differentiated again. If a rank sends everybody the same row, that is an all-gather; its
backward, the exchange of the gradients and the sum of the rows that arrive, is a reduce-scatter.

Note [Windows for parts]
    Ranks of one host write what they send into shared memory, and read from each other's (shared_memory.py, Note
    [Shared windows]). Two windows take turns, with one barrier per exchange: a rank that has passed the barrier of an
    exchange knows that all others have entered it, and so have read what was sent in the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as ProcessGroup
from typing_extensions import Self, override

from lt_zero.core.comm.layer_ranks import LayerRanks
from lt_zero.core.comm.shared_memory import REDUCTIONS, Barrier, SharedArena
from lt_zero.core.comm.world import World


def place_in(group: ProcessGroup | None) -> tuple[int, int]:
    """This rank's number in the group, and the number of its ranks."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def whole_heads(x: Tensor, ranks: int) -> Tensor:
    """Repeat each head of keys or values ([batch, heads, length, dim]) as often as ``ranks`` need for whole ones."""
    repeats = ranks // gcd(x.shape[1], ranks)
    return x.repeat_interleave(repeats, 1) if repeats > 1 else x


class SequenceGroup(LayerRanks):
    """Ranks that have equal parts of a sequence, in the order of the parts; of a run, or of a user's process group.

    Attributes:
        exchanges: how many exchanges of parts this rank has begun.
    """

    subject = "sequences"
    exchanges = 0
    _windows: _Windows | None = None
    # torch renamed it in 2.13, and warns on the old name.
    _all_gather: Any = staticmethod(getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)

    @classmethod
    @override
    def joined(cls, world: World, parts: Sequence[Sequence[int]], group: ProcessGroup) -> Self:
        made = super().joined(world, parts, group)
        # Ranks of another backend send from a device.
        if made.backend == "gloo" and world.device.type == "cpu":
            made.order.arena = world.share_memory(made.ranks)
        made._windows = _Windows(made.order.arena) if made.order.arena is not None else None
        return made

    def exchange(self, rows: Tensor, members: Sequence[int] | None = None) -> Tensor:
        """Send row k to the k-th of ``members``; the row that came from there takes its place. Differentiable.

        Args:
            rows: of shape [members, ...], of one shape and dtype on all ranks.
            members: ranks of this group in ascending order, this one among them; default: all. Sets of members do not
                overlap, and all ranks of the group call this at the same time.

        Returns:
            A contiguous tensor of the shape of ``rows``. Collective.
        """
        return self._joined([rows], members)

    def to_heads(self, tensors: Sequence[Tensor], members: Sequence[int] | None = None) -> list[Tensor]:
        """Exchange tokens of all heads for all tokens of some heads. Differentiable. Collective.

        Args:
            tensors: of shape [batch, heads, length, dim]; heads are a multiple of the members. Those of one dtype and
                dim go in one collective.
            members: see ``exchange``; their parts are joined in their order.

        Returns:
            Tensors of shape [batch, heads / members, length * members, dim].
        """
        ranks = self.size if members is None else len(members)
        return self._together([x.unflatten(1, (ranks, -1)).permute(1, 3, 0, 2, 4) for x in tensors], members)

    def to_tokens(self, x: Tensor, members: Sequence[int] | None = None) -> Tensor:
        """Exchange the other way round: [batch, heads / members, length * members, dim] -> the part of all heads.

        The result is [batch, length, heads, dim] in memory. Differentiable. Collective.
        """
        ranks = self.size if members is None else len(members)
        rows = x.transpose(1, 2).unflatten(1, (ranks, -1)).movedim(1, 0)  # [ranks, batch, length, heads, dim]
        return self.exchange(rows, members).permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2)

    def gather_parts(self, tensors: Sequence[Tensor], members: Sequence[int] | None = None) -> list[Tensor]:
        """Join the parts of all members, in their order: [batch, heads, length, dim] -> [..., length * members, dim].

        In backward the gradients of all members are summed, and each gets the sum of its part. Differentiable.
        Collective.
        """
        return self._together([x.permute(2, 0, 1, 3)[None] for x in tensors], members, same=True)

    def gather_tokens(self, mask: Tensor) -> Tensor:
        """[batch, length / ranks] of each rank -> [batch, length]. Not differentiable. Collective."""
        return self._joined([mask.detach()[None]], None, same=True).movedim(0, -2).flatten(-2)

    def _together(self, rows: list[Tensor], members: Sequence[int] | None, same: bool = False) -> list[Tensor]:
        """Exchange tensors [ranks, length, batch, heads, dim]: -> [batch, heads, ranks * length, dim] of each."""
        if len({(x.dtype, x.shape[-1]) for x in rows}) > 1:
            return [part for x in rows for part in self._together([x], members, same)]
        whole = self._joined(rows, members, same).flatten(0, 1)
        return [part.permute(1, 2, 0, 3) for part in whole.split([x.shape[3] for x in rows], 2)]

    def _joined(self, rows: list[Tensor], members: Sequence[int] | None, same: bool = False) -> Tensor:
        """Exchange tensors as one that is joined along dimension 3. Differentiable.

        ``same``: they have one row, which all members get.
        """
        out: Tensor = _differentiably(self, members, same, *rows)
        return out

    def exchanged(self, rows: Sequence[Tensor], members: Sequence[int] | None, same: bool) -> Tensor:
        """Exchange without derivatives: see ``_joined``."""
        self.exchanges += 1
        name, operation = "parts of sequences", "all-gather" if same else "all-to-all"
        self._require_device(rows[0], name)
        among, row = range(self.size) if members is None else members, _shape_of(rows)[1:]
        received = rows[0].new_empty(len(among), *row)
        opened = self.log.open(operation.replace("-", "_"), name, received.nbytes)
        # The name has shape and dtype, so that ranks whose tensors differ get an error instead of wrong values.
        what = f"{name}, {list(received.shape)} {str(received.dtype).removeprefix('torch.')}"
        launch = self.order.launch(operation, what, received.numel())
        if self._windows is not None:
            sent = self._windows.write(rows)
            self.watch.wait(self._windows.barrier(), launch)
            self._windows.read(received, sent, [self.ranks[rank] for rank in among])
        elif same and len(among) == self.size:
            self._wait(self._all_gather(received, _join(rows), **self._options), launch)
        else:
            some = len(among) < self.size
            splits = [int(rank in among) for rank in range(self.size)] if some else None
            sent = _join(rows).expand(len(among), *row).contiguous()
            self._wait(dist.all_to_all_single(received, sent, splits, splits, **self._options), launch)
        self.log.ended(opened)
        return received

    @property
    def _options(self) -> dict[str, Any]:
        return {"group": self.process_group, "async_op": self._gloo}


class _Windows:
    """Two windows of an arena, which take turns. See Note [Windows for parts]."""

    def __init__(self, arena: SharedArena) -> None:
        self._arena = arena
        self._pair: list[Tensor] = []  # of bytes
        self._turn = 0

    def write(self, rows: Sequence[Tensor]) -> Tensor:
        """Write what is sent into the next window, and return it there."""
        shape = _shape_of(rows)
        nbytes = prod(shape) * rows[0].element_size()
        if not self._pair or nbytes > self._pair[0].numel():
            # Windows are never freed: sizes that double keep the old ones smaller than the new.
            self._pair = [self._arena.allocate(1 << (nbytes - 1).bit_length(), torch.uint8) for _ in range(2)]
        self._turn += 1
        sent = self._pair[self._turn % 2][:nbytes].view(rows[0].dtype).view(shape)
        return torch.cat(list(rows), 3, out=sent) if len(rows) > 1 else sent.copy_(rows[0])

    def barrier(self) -> Barrier:
        """Enter the barrier between ``write`` and ``read``."""
        return Barrier(self._arena, REDUCTIONS)

    def read(self, received: Tensor, sent: Tensor, peers: Sequence[int]) -> None:
        """Fill the rows of ``received`` from peers, this rank among them, who wrote what this rank did to ``sent``."""
        own = peers.index(self._arena.rank)
        number = own if len(sent) > 1 else 0
        received[own].copy_(sent[number])
        for peer, row in zip(peers, received, strict=True):
            if peer != self._arena.rank and row.numel():
                self._arena.read(peer, sent, number * row.numel(), row.view(-1))


def _shape_of(rows: Sequence[Tensor]) -> list[int]:
    """Shape of the tensors, joined along dimension 3."""
    shape = list(rows[0].shape)
    if len(rows) > 1:
        shape[3] = sum(x.shape[3] for x in rows)
    return shape


def _join(rows: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(rows), 3) if len(rows) > 1 else rows[0].contiguous()


class _RowExchange(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, group: SequenceGroup, members: Sequence[int] | None, same: bool, *rows: Tensor) -> Tensor:
        context.group, context.members, context.same = group, members, same
        context.sizes = [x.shape[3] for x in rows] if len(rows) > 1 else None
        return group.exchanged(rows, members, same)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = context.group.exchange(grad, context.members)
        if context.same:
            grad = grad.sum(0, keepdim=True)
        return None, None, None, *(grad.split(context.sizes, 3) if context.sizes else [grad])


# A compiler that looked into it would lose the derivative: what a collective writes depends on nothing it knows.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _differentiably(*arguments: Any) -> Any:
    return _RowExchange.apply(*arguments)  # type: ignore[no-untyped-call]


def world_of(device: torch.device) -> SequenceGroup | None:
    """The default process group; None if this is a single process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group = dist.group.WORLD
    assert group is not None
    made: SequenceGroup = SequenceGroup.of(group, device)
    return made
