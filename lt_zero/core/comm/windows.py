"""The transport of ranks that share memory: shared_memory.py, Note [Shared windows]."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.core.comm.send_sizes import WINDOWS
from lt_zero.core.comm.shared_memory import REDUCTIONS, Barrier
from lt_zero.core.comm.transport import Connections, Gloo, Group, Reduction
from lt_zero.core.comm.work import FENCE, CollectiveId, Done, Work, WorkList
from lt_zero.kernels.flat import store

_ALL_SUM_ALL = 3  # up to so many ranks, reading all of the others' gradients takes less than sharing the sums of parts


class SharedMemoryTransport(Gloo):
    """Memory that all ranks read, on one host."""

    name = "windows"
    overlaps = False
    sends = WINDOWS

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections)
        assert connections.arena is not None
        self.sums_wide = True
        # A rank reads the gradients of all ranks from their windows at once, in the order of one group. None of these
        # reads could be saved.
        self.sums_apart = False
        self._arena = connections.arena
        self._order = connections.order
        self._log = connections.log
        mesh = self._mesh
        self._ranks = list(connections.ranks)
        self._row = [self._ranks[rank] for rank in mesh.shard_ranks(mesh.replica)]
        # Windows were written, or read, since the last fence. Transports are replaced together, so none is in use then.
        self._written = False
        self._read = False

    # ---- windows -----------------------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._arena.allocate(numel, dtype)

    allocate_send = allocate

    def before_write(self) -> None:
        if self._read:
            self.fence()

    def after_write(self) -> None:
        self._written = True

    def before_gather(self, own: Tensor | None) -> None:
        # Peers are read in place, so all must have written their windows.
        if self._written and self._shares(own):
            self.fence()

    def fence(self) -> None:
        """Wait for all ranks."""
        self._written = False
        self._read = False
        opened = self._log.open("barrier", "shared memory", 0, host=True)
        self._order.launch(FENCE, "shared memory", 0, compare=True)
        self._log.ended(opened)

    def background_fence(self, group: Group | None) -> Work | None:
        return WorkList([dist.barrier(group, async_op=True)], None, self._watch)

    def _shares(self, tensor: Tensor | None) -> bool:
        return tensor is not None and self._arena.has(tensor)

    # ---- collectives -------------------------------------------------------------------------------------------

    def all_gather(
        self, flat: Tensor, own: Tensor | None, launch: CollectiveId | None, group: Group | None = None
    ) -> Work:
        if own is None or not self._shares(own):
            return super().all_gather(flat, own, launch, group)
        # From here on ``before_write`` waits for all ranks before a window is written again.
        self._read = True
        self._arena.gather(own, flat, self._row)
        return Done()

    def reduce_scatter(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        flat = reduction.flat
        if not self._shares(flat):
            return super().reduce_scatter(reduction, launch)
        first = self._mesh.shard_rank * (flat.numel() // self._mesh.shards)
        entered = Barrier(self._arena, REDUCTIONS)
        return self._all([entered], launch, lambda: self._sum(reduction, first))

    def all_reduce(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        flat = reduction.flat
        if not self._shares(flat):
            return super().all_reduce(reduction, launch)
        world = self._mesh.world
        rank = self._mesh.rank

        def finish() -> None:
            if world <= _ALL_SUM_ALL:
                self._sum(reduction, 0)
                return
            # Each rank sums one part and writes the sum over its own copy of that part. No peer reads that copy before
            # the barrier, as each reads only the part that it sums itself.
            part = flat.numel() // world
            self._arena.sum(flat, rank * part, flat.narrow(0, rank * part, part), False, reduction.factor)
            self._watch.wait(Barrier(self._arena, REDUCTIONS), launch)
            self._arena.gather(flat, flat, self._ranks)
            store(reduction.out, flat, reduction.add, 1.0)

        return self._all([Barrier(self._arena, REDUCTIONS)], launch, finish)

    def _sum(self, reduction: Reduction, first: int) -> None:
        """Write or add the sum of what all ranks send, from element ``first`` on."""
        self._arena.sum(reduction.flat, first, reduction.out, reduction.add, reduction.factor)
