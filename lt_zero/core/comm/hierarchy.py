"""Collectives in several dimensions: inside a node first, so that each byte crosses the network between nodes once.

Note [Dimensions]
    The ranks of a shard group are a grid, the last coordinate first in memory: rank = (outer * middle + m) * inner + i.
    A reduce-scatter sums along the innermost dimension, then along the next one what is left: with nodes of L ranks, an
    L-th of the bytes between nodes. An all-gather goes the other way. Ranks of a node use windows if they can
    (shared_memory.py). Along a dimension contributions are added in rank order, in the dtype of the result (fp32 by
    default), so results differ from one ring's by the rounding of the sums.

    Which dimensions: topology.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.core.comm.send_sizes import GLOO, NODE_WINDOWS
from lt_zero.core.comm.shared_memory import SharedArena
from lt_zero.core.comm.topology import whole_nodes
from lt_zero.core.comm.transport import (
    Connections,
    Gloo,
    Group,
    Mesh,
    Reduction,
    Transport,
    exchange,
    sum_in_rank_order,
)
from lt_zero.core.comm.work import CollectiveId, CollectiveWorker, Work
from lt_zero.kernels.flat import store, wide


def axis_groups(mesh: Mesh, sizes: Sequence[int], dimension: int) -> list[list[int]]:
    """The groups of ranks of all replicas that differ in one coordinate only; ``sizes``: innermost first."""
    stride = math.prod(sizes[:dimension])
    size = sizes[dimension]
    firsts = [rank for rank in range(mesh.world) if rank % mesh.shards // stride % size == 0]
    return [list(range(first, first + stride * size, stride)) for first in firsts]


class Hierarchy(Gloo):
    """gloo in several dimensions: ``sizes`` of the connections.

    Args:
        connections: of the ranks.
        arenas: three of the ranks of the innermost dimension, a node; []: they share no memory.
    """

    name = "hierarchy"
    overlaps = True

    def __init__(self, connections: Connections, arenas: Sequence[SharedArena] = ()) -> None:
        super().__init__(connections)
        sizes = connections.sizes
        used = [number for number, size in enumerate(sizes) if size > 1]
        axes = [axis_groups(self._mesh, sizes, number) for number in used]
        self._sizes = [sizes[number] for number in used]
        # Two threads, each with its own groups: a gather does not wait for a reduction.
        self._gathers, self._sums = ([connections.new_group(axis) for axis in axes] for _ in range(2))
        self._gathering = CollectiveWorker("gather")
        self._reducing = CollectiveWorker("reduce")
        # Windows of each thread, as all ranks have to allocate them in the same order.
        self._sends = arenas[0] if arenas else None
        self.sends = NODE_WINDOWS if arenas else GLOO
        self._staging: list[_Staging | None] = [_Staging(arena) for arena in arenas[1:]] if arenas else [None, None]

    @classmethod
    def connect(cls, connections: Connections) -> Transport:
        nodes = connections.nodes
        # The same on all ranks, so that all share memory or none do: sharing is collective.
        nested = whole_nodes(nodes) == connections.sizes[0]
        node = next(node for node in nodes if connections.mesh.rank in node)
        arenas = [connections.share_memory(node) for _ in range(3)] if nested else []
        return cls(connections, [arena for arena in arenas if arena is not None])

    def allocate_send(self, numel: int, dtype: torch.dtype) -> Tensor:
        if self._sends is None:
            return super().allocate_send(numel, dtype)
        return self._sends.allocate(numel, dtype)

    def all_gather(
        self, flat: Tensor, own: Tensor | None, launch: CollectiveId | None, group: Group | None = None
    ) -> Work:
        # A group is given by the background thread, whose gathers have a group of their own.
        if group is not None:
            return super().all_gather(flat, own, launch, group)
        return self._all([self._gathering.submit(lambda: self._gather(flat, self._gathers, self._staging[0]))], launch)

    def _gather(self, flat: Tensor, groups: Sequence[Group], staging: _Staging | None) -> None:
        """Fill the rows of ``flat``, one for each shard, dimension by dimension from the outermost."""
        shards = self._mesh.shards
        rows = flat.view(shards, -1)
        stride = shards
        for size, group in reversed(list(zip(self._sizes, groups, strict=True))):
            block, stride = stride, stride // size
            mine = self._mesh.shard_rank % stride
            peers = dist.get_process_group_ranks(group)
            if stride == 1 and staging is not None:
                staging.gather(rows.view(-1, size, rows.shape[1]), peers, group)
                continue
            ends = [
                (peer, rows[first + number * stride + mine])
                for first in range(0, shards, block)
                for number, peer in enumerate(peers)
            ]
            own = [row for peer, row in ends if peer == dist.get_rank()]
            sends = [(peer, row) for row in own for peer in peers]
            exchange(sends, ends, group)

    def reduce_scatter(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        if not self._scatters:
            return super().reduce_scatter(reduction, launch)

        def run() -> None:
            self._store(reduction, self._sum(reduction), _wait)

        return self._all([self._reducing.submit(run)], launch)

    def sum_replicas(self, out: Tensor, dtype: torch.dtype, launch: CollectiveId | None) -> Work:
        return self._all([self._reducing.submit(lambda: self._sum_result(out, _wait))], launch)

    def all_reduce(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        if self._mesh.shards != self._mesh.world:
            return super().all_reduce(reduction, launch)
        return self._all([self._reducing.submit(lambda: self._store_all(reduction, self._sum(reduction)))], launch)

    def _store_all(self, reduction: Reduction, total: Tensor) -> None:
        """Gather the sums of all shards, of which ``total`` is this rank's, and store them."""
        self._own(reduction.flat).copy_(total.mul_(reduction.factor))
        self._gather(reduction.flat, self._sums, self._staging[1])
        store(reduction.out, reduction.flat, reduction.add, 1.0)

    def _sum(self, reduction: Reduction) -> Tensor:
        """The sum of this rank's shards (1D, as wide as sums are), dimension by dimension from the innermost."""
        flat = reduction.flat
        dtype = wide(reduction.out.dtype)
        rows = flat.view(self._mesh.shards, -1)
        received = reduction.scratch
        for number, (size, group) in enumerate(zip(self._sizes, self._sums, strict=True)):
            arena = self._sends
            width = rows.shape[1]
            if number == 0 and arena is not None and arena.has(flat):
                rows = torch.empty(len(rows) // size, width, dtype=dtype)
                # Peers' windows are read in place: the first barrier says that all have written theirs. The second one
                # keeps this rank from writing the next gradients before all have read.
                dist.barrier(group)
                for block, row in enumerate(rows):
                    arena.sum(flat, (block * size + self._mesh.shard_rank % size) * width, row, False, 1.0)
                dist.barrier(group)
                continue
            if received.numel() != rows.numel():
                received = torch.empty_like(rows)
            blocks, parts = (t.view(-1, size * width) for t in (rows, received))
            peers = dist.get_process_group_ranks(group)
            mine = dist.get_rank(group)
            sends = [end for block in blocks for end in zip(peers, block.chunk(size), strict=True)]
            exchange(sends, [end for part in parts for end in zip(peers, part.chunk(size), strict=True)], group)
            for part, block in zip(parts, blocks, strict=True):
                part.chunk(size)[mine].copy_(block.chunk(size)[mine])
            rows = torch.stack([sum_in_rank_order(part.chunk(size), dtype) for part in parts])
            received = rows.new_empty(0)
        return rows.view(-1)


def _wait(work: Any) -> None:
    """Wait in a worker's thread; the thread that waits for the worker looks after hangs."""
    work.wait()


class _Staging:
    """A window through which the ranks of a node exchange shards."""

    def __init__(self, arena: SharedArena) -> None:
        self._arena = arena
        self._window = torch.empty(0, dtype=torch.uint8)

    def gather(self, blocks: Tensor, ranks: Sequence[int], group: Group) -> None:
        """Fill ``blocks`` ([blocks, ranks, elements]): row i of each block comes from rank i of ``ranks``."""
        nbytes = blocks[:, 0].numel() * blocks.itemsize
        # A smaller window stays allocated after a larger one replaces it. Buckets have few sizes, so that is little.
        if self._window.numel() < nbytes:
            self._window = self._arena.allocate(nbytes, torch.uint8)
        mine = self._window[:nbytes].view(blocks.dtype).view(blocks.shape[0], -1)
        own = list(ranks).index(self._arena.rank)
        mine.copy_(blocks[:, own])
        # The window is reused by the next gather: no rank may read before all have written, nor write again before all
        # have read.
        dist.barrier(group)
        for number, peer in enumerate(ranks):
            for block, row in enumerate(blocks[:, number] if number != own else ()):
                self._arena.read(peer, self._window, block * row.nbytes, row.view(torch.uint8))
        dist.barrier(group)
