"""Sums of gradients in one order, the same for every number of ranks.

Note [The fold]
    A step has the gradients g0, g1, ... of its micro-batches, in the order of rounds and, in them, of virtual ranks. An
    element of the accumulator becomes (((g0 * f + g1 * f) + g2 * f) + ...), with f = 1 / virtual ranks. In each turn
    the rank that keeps the element gets the contribution of every rank by itself, and adds them to the accumulator in
    the order of ranks. N ranks run micro-batches j * N ... j * N + N - 1 in turn j, in the order of ranks, so all N
    that divide the number of virtual ranks add the same numbers in the same order. A sum of a turn by itself, which is
    added afterwards, would be other bits.

    Where several ranks have parts of one model, or of one sequence, N counts data ranks, and each rank of a data rank
    has a contribution of its own, added in the order of data ranks and, in one, of ranks. So the fold of a step is one
    over virtual ranks and, in them, over these parts, of which there are as many for every N.

    Each contribution is multiplied, and the product rounded, before it is added: a fused multiplication and addition
    would round once in the vector loop of an operation and twice at its end, or the other way round, and where an
    element is in a shard depends on the number of ranks.

    Contributions travel in the dtype of gradients (``communication_data_type``), to which they are rounded one by one,
    also on a single rank, and are added in the dtype of the accumulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lt_zero.common import accelerator
from lt_zero.core.comm.send_sizes import GLOO
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.shared_memory import REDUCTIONS, Barrier
from lt_zero.core.comm.transport import Alone, Backend, Connections, Gloo, Reduction, Transport
from lt_zero.core.comm.windows import SharedMemoryTransport
from lt_zero.core.comm.work import CollectiveId, Work, WorkList
from lt_zero.kernels.flat import store

_CHUNK = 1 << 16  # elements that are added at a time, to stay in the cache
_ALL_FOLD_ALL = 3  # up to so many ranks, reading all of the others' gradients takes less than sharing folded parts


def fold(out: Tensor, contributions: Sequence[Tensor], add: bool, factor: float) -> None:
    """Add each of ``contributions`` times ``factor`` to ``out``, one after the other. See Note [The fold].

    Args:
        out: 1D, of at least 32 bits.
        contributions: of the same length, in order; may be overwritten.
        add: False: ``out`` is undefined before, and the first product is written.
        factor: of each contribution.
    """
    numel = out.numel()
    length = numel if accelerator.holds(out) else _CHUNK
    for lo in range(0, numel, max(1, length)):
        rows = out[lo : lo + length]
        for number, contribution in enumerate(contributions):
            store(rows, contribution[lo : lo + length], add or number > 0, factor)


class FoldAlone(Alone):
    """One rank: each backward is a contribution."""

    name = "fold of one rank"

    def __init__(self, connections: Connections, factor: float) -> None:
        super().__init__(connections)
        self._factor = factor

    @override
    def reduce_scatter(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        return WorkList([], lambda: fold(reduction.out, [reduction.flat], reduction.add, self._factor))

    all_reduce = reduce_scatter


class _Folding(Transport):
    """Sends each rank the pieces of all contributions that it adds; where all need all sums, these are gathered."""

    _factor: float
    _fold_order: tuple[int, ...]  # of the ranks, in which their contributions are added
    _groups: Any
    sums_wide = True
    sums_apart = False

    @override
    def reduce_scatter(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        return self._folded(reduction, reduction.out, launch, lambda: None)

    @override
    def all_reduce(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        return self._folded(reduction, self._part(reduction.out), launch, lambda: self._gather(reduction.out, launch))

    def _folded(
        self, reduction: Reduction, out: Tensor, launch: CollectiveId | None, finish: Callable[[], object]
    ) -> Work:
        """Fold the contributions to this rank's part, ``out``, and ``finish``."""
        received = reduction.scratch
        work = dist.all_to_all_single(received, reduction.flat, group=self._groups.everyone, async_op=True)

        def complete() -> None:
            pieces = received.chunk(self._mesh.world)
            fold(out, [pieces[number] for number in self._fold_order], reduction.add, self._factor)
            finish()

        return self._work(work, complete, launch)

    def _part(self, flat: Tensor) -> Tensor:
        """The part of all elements that this rank folds."""
        numel = flat.numel() // self._mesh.world
        return flat.narrow(0, self._mesh.rank * numel, numel)

    def _work(self, work: Any, finish: Callable[[], object], launch: CollectiveId | None) -> Work:
        """``work``, and what follows it."""
        raise NotImplementedError

    def _gather(self, out: Tensor, launch: CollectiveId | None) -> None:
        """Fill ``out`` from the parts that the ranks have folded, and wait for it."""
        raise NotImplementedError


class FoldBackend(_Folding, Backend):
    """The collectives of a device's backend, which only move bytes: their order does not matter."""

    name = "fold"
    sends = GLOO

    def __init__(self, connections: Connections, factor: float, order: Sequence[int]) -> None:
        super().__init__(connections)
        self.sums_apart = False
        self._factor = factor
        self._fold_order = tuple(order)

    @override
    def _work(self, work: Any, finish: Callable[[], object], launch: CollectiveId | None) -> Work:
        return WorkList([work], finish)

    @override
    def _gather(self, out: Tensor, launch: CollectiveId | None) -> None:
        self._all_gather(out, self._part(out), group=self._groups.everyone, async_op=True).wait()


class FoldGloo(_Folding, Gloo):
    """gloo by sockets."""

    name = "fold over gloo"

    def __init__(self, connections: Connections, factor: float, order: Sequence[int]) -> None:
        super().__init__(connections)
        self.sums_apart = False
        self.sums_wide = True
        self._factor = factor
        self._fold_order = tuple(order)

    @override
    def _work(self, work: Any, finish: Callable[[], object], launch: CollectiveId | None) -> Work:
        return self._all([work], launch, finish)

    @override
    def _gather(self, out: Tensor, launch: CollectiveId | None) -> None:
        Gloo.all_gather(self, out, None, launch, self._groups.everyone).wait()


class FoldWindows(FoldGloo, SharedMemoryTransport):
    """Ranks of one host, which read the others' contributions in place."""

    name = "fold over windows"

    @override
    def reduce_scatter(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        if not self._shares(reduction.flat):
            return super().reduce_scatter(reduction, launch)
        first = self._mesh.rank * reduction.out.numel()
        entered = Barrier(self._arena, REDUCTIONS)
        return self._all([entered], launch, lambda: self._fold(reduction, reduction.out, first))

    @override
    def all_reduce(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        flat, out = reduction.flat, reduction.out
        if not self._shares(flat):
            return super().all_reduce(reduction, launch)

        def finish() -> None:
            # Parts of a narrower dtype cannot be shared in the buffer that was sent: the sum would be rounded.
            if self._mesh.world <= _ALL_FOLD_ALL or flat.dtype != out.dtype:
                self._fold(reduction, out, 0)
                return
            # As in the plain transport: each rank writes what it has folded over its own copy of that part, which no
            # peer reads before the barrier.
            part = self._part(out)
            self._fold(reduction, part, self._mesh.rank * part.numel())
            self._part(flat).copy_(part)
            self._watch.wait(Barrier(self._arena, REDUCTIONS), launch)
            self._arena.gather(flat, out, self._ranks)

        return self._all([Barrier(self._arena, REDUCTIONS)], launch, finish)

    def _fold(self, reduction: Reduction, out: Tensor, first: int) -> None:
        """Fold what all ranks send, from element ``first`` on, into ``out``."""
        flat = reduction.flat
        received = torch.empty(min(_CHUNK, out.numel()), dtype=flat.dtype)
        for lo in range(0, out.numel(), _CHUNK):
            rows = out[lo : lo + _CHUNK]
            chunk = received[: rows.numel()]
            for place, number in enumerate(self._fold_order):
                add = reduction.add or place > 0
                own = flat[first + lo : first + lo + rows.numel()]
                if number != self._mesh.rank:
                    self._arena.read(self._ranks[number], flat, first + lo, chunk)
                    store(rows, chunk, add, self._factor)
                elif flat.dtype != out.dtype:
                    store(rows, chunk.copy_(own), add, self._factor)
                elif add:
                    # As ``store``, which would overwrite what it is given: peers may read these elements.
                    rows.add_(torch.mul(own, self._factor, out=chunk))
                else:
                    torch.mul(own, self._factor, out=rows)


def folding(group: ShardGroup, turns: int, order: Sequence[int]) -> Transport:
    """Make the transport that adds the gradients of a configured group's ranks in one order.

    Args:
        turns: micro-batches of a round that each rank runs.
        order: of the ranks of the group, by their numbers in it.
    """
    factor = 1.0 if group.sums_gradients else 1.0 / (group.divisor * turns)
    found = group.connections(group.mesh, group.whole)
    if found.groups is None:
        return FoldAlone(found, factor)
    if found.backend != "gloo":
        return FoldBackend(found, factor, order)
    return FoldGloo(found, factor, order) if found.arena is None else FoldWindows(found, factor, order)
