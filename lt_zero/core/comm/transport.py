"""Transports of flat tensors between ranks: NCCL and gloo, and the buffers from which gradients are sent.

Which transport a group has: transports.py, where a package registers one of its own.

gloo: its reduce-scatter is an all-reduce that discards most of the result, and its all-gather slows down above 16 MB.
An all-to-all followed by a local sum, and one broadcast per rank into views of the result, move half the bytes and run
2-3x faster. The local sum adds the ranks' contributions in rank order in the accumulator's dtype (fp32 by default), so
the sum of an element does not depend on its offset in a bucket: on gloo all stages agree bitwise. It also lets 16-bit
gradients be sent without rounding and without overflow of the sum. Ranks of one host use no sockets: windows.py.

Note [Shard groups]
    MiCS, arXiv:2205.00119, section 3.2: the ranks are a grid of replicas (rows of neighbouring ranks) and shards
    (columns). A replica has all shards, so gathers stay inside a row. Gradients are summed in a row, then the sums of
    a shard in its column. Both sums give all ranks of a column the same bits, so that replicas stay equal.
    Columns cross between nodes. So where several micro-batches are added up, a row's sums are added to the accumulator
    in each of them, and the accumulator is summed over the column once (section 3.4, "2-hop gradient synchronization").
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.common import accelerator
from lt_zero.common.flat_storage import flat_empty
from lt_zero.core.comm.ranks import LaunchOrder, Unlogged
from lt_zero.core.comm.send_sizes import BACKEND, GLOO
from lt_zero.core.comm.shared_memory import SharedArena
from lt_zero.core.comm.work import CollectiveId, CollectiveMonitor, Done, Work, WorkList
from lt_zero.kernels.flat import store, wide

Group = dist.ProcessGroup
_PIECE = 1 << 20  # bytes


@dataclass(frozen=True)
class Mesh:
    """The ranks of a data-parallel group as replicas of ``shards`` ranks each. See Note [Shard groups]."""

    world: int = 1
    rank: int = 0
    shards: int = 1

    @property
    def shard_rank(self) -> int:
        """Index of this rank's shard."""
        return self.rank % self.shards

    @property
    def replica(self) -> int:
        return self.rank // self.shards

    def shard_ranks(self, replica: int) -> list[int]:
        """The ranks of a replica."""
        return list(range(replica * self.shards, (replica + 1) * self.shards))

    def replica_ranks(self, shard: int) -> list[int]:
        """The ranks that have the same shard."""
        return list(range(shard, self.world, self.shards))


@dataclass
class Groups:
    """Process groups over the ranks of a mesh.

    Attributes:
        everyone: all ranks, for reductions.
        gathers, reductions: this rank's row.
        across: this rank's column; None if there is one replica.
    """

    everyone: Group
    gathers: Group
    reductions: Group
    across: Group | None = None


class Replicas(Enum):
    """Choice of what a reduce-scatter sums over replicas. See Note [Shard groups]."""

    SENT = auto()  # what is sent; the result is written, or added, afterwards
    RESULT = auto()  # the result, to which the sum of this rank's row was added
    NOTHING = auto()  # the result is that of this rank's row


@dataclass(frozen=True)
class Reduction:
    """A sum of gradients over ranks. Tensors are 1D.

    Attributes:
        out: where ``factor`` times the sum is written or, with ``add``, added.
        flat: this rank's gradients; undefined once the sum is there.
        scratch: memory for those of others, with as many elements.
        add: whether the sum is added.
        factor: of the sum.
        replicas: what is summed over them by a reduce-scatter; other than ``SENT`` if the transport ``sums_apart``.
    """

    out: Tensor
    flat: Tensor
    scratch: Tensor
    add: bool
    factor: float
    replicas: Replicas = Replicas.SENT

    def store(self, total: Tensor) -> None:
        """Write or add the result; ``total`` is the sum."""
        store(self.out, total, self.add, self.factor)


@dataclass(frozen=True, eq=False)
class Connections:
    """The connections of a group's ranks: what a transport is chosen by, and made of.

    Attributes:
        mesh: the ranks as replicas and shards.
        groups: their process groups; None: a single process without any.
        backend: of these for ``device``; "" without them.
        device: of the tensors.
        ranks: their numbers in the run.
        nodes: the ranks of each node.
        sizes: dimensions in which the shards are crossed (topology.py), innermost first; (): directly.
        scatters: each rank gets its shard of a sum; else all get all of it.
        arena: memory that all of the ranks share; None: they share none.
        order, log, watch: number, record and watch the collectives of the ranks.
        new_group: makes a process group over that of the given parts of the ranks which has this rank. Collective.
        share_memory: makes memory of the given ranks, this one among them; None if some cannot share it. Collective.
    """

    mesh: Mesh
    groups: Groups | None
    backend: str
    device: torch.device
    ranks: Sequence[int]
    nodes: Sequence[Sequence[int]]
    sizes: tuple[int, ...]
    scatters: bool
    arena: SharedArena | None
    order: LaunchOrder
    log: Unlogged
    watch: CollectiveMonitor
    new_group: Callable[[Sequence[Sequence[int]]], Group]
    share_memory: Callable[[Sequence[int]], SharedArena | None]


class Transport:
    """The collectives of a group's ranks. Tensors are 1D; a method starts a collective and returns its work.

    Args:
        connections: of the ranks; the transport keeps no reference to it.

    Attributes:
        name: of the transport, which no other has.
        overlaps: gathers overlap with computation.
        gathers_in_threads: a second thread may launch gathers, in another order than the first one launches its own.
        sends: the buffers that reductions need.
        sums_wide: see ``ShardGroup.sums_wide``.
        sums_apart: sums over replicas may be left out of ``reduce_scatter``, to be taken by ``sum_replicas``.
    """

    name: ClassVar[str]
    overlaps = True
    gathers_in_threads = False
    sends = BACKEND
    sums_wide = False
    sums_apart = False

    def __init__(self, connections: Connections) -> None:
        self._mesh = connections.mesh
        self._device = connections.device

    @classmethod
    def fits(cls, connections: Connections) -> bool:
        """True if these ranks can use the transport. The same on all ranks of the run."""
        raise NotImplementedError

    @classmethod
    def connect(cls, connections: Connections) -> Transport:
        """Make the transport of ranks that it fits. Collective."""
        return cls(connections)

    def close(self) -> None:
        """Stop its threads and free its memory. Neither the group nor an engine uses it any more."""

    # ---- memory that peers read in place -----------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor for the life of a run, which gathers may read; in the same order on all ranks."""
        return flat_empty(numel, dtype, self._device)

    def allocate_send(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer for the life of a run, from which gradients are sent; in the same order on all ranks."""
        return flat_empty(numel, dtype, self._device)

    def before_write(self) -> None:
        """Wait until no rank reads what ``allocate`` has given; called before a write to it. Collective."""

    def after_write(self) -> None:
        """Note that tensors from ``allocate`` are written, which a gather may read next."""

    def before_gather(self, own: Tensor | None) -> None:
        """Wait until all ranks have written what an ``all_gather`` of ``own`` reads. Collective."""

    def background_fence(self, group: Group | None) -> Work | None:
        """Start to wait until all ranks have written what peers read in place; None: they read nothing in place.

        For the background thread, whose collectives run over ``group``.
        """
        return None

    # ---- collectives -------------------------------------------------------------------------------------------

    def all_gather(
        self, flat: Tensor, own: Tensor | None, launch: CollectiveId | None, group: Group | None = None
    ) -> Work:
        """Fill ``flat`` from the shards of a row (``group``: another one over it), which are in place already.

        ``own``: this rank's shard; if it is from ``allocate``, peers may read it there.
        """
        raise NotImplementedError

    def reduce_scatter(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        """Sum the ranks' shards; ``reduction.out`` is that of this rank."""
        raise NotImplementedError

    def sum_replicas(self, out: Tensor, dtype: torch.dtype, launch: CollectiveId | None) -> Work:
        """Sum ``out``, a shard, over the replicas, sent in ``dtype``; only if it ``sums_apart``."""
        raise NotImplementedError

    def all_reduce(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        """Sum the ranks' gradients; ``reduction.out`` gets all of them."""
        raise NotImplementedError

    def _own(self, flat: Tensor) -> Tensor:
        """This rank's shard. (``chunk`` makes all of them: 4 ms at 2,048 ranks.)"""
        numel = flat.numel() // self._mesh.shards
        return flat.narrow(0, self._mesh.shard_rank * numel, numel)


class Alone(Transport):
    """A single process, which has all shards: sums are of one summand."""

    name = "none"
    overlaps = False
    gathers_in_threads = True
    sums_wide = True

    @classmethod
    def fits(cls, connections: Connections) -> bool:
        return connections.groups is None

    def all_gather(
        self, flat: Tensor, own: Tensor | None, launch: CollectiveId | None, group: Group | None = None
    ) -> Work:
        return Done()

    def reduce_scatter(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        return WorkList([], lambda: reduction.store(reduction.flat))

    all_reduce = reduce_scatter


class Backend(Transport):
    """The collectives of a device's backend, such as NCCL."""

    name = "backend"

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections)
        assert connections.groups is not None
        self._groups = connections.groups
        self._scatters = connections.scatters
        self.sums_apart = self._scatters and self._groups.across is not None
        on_streams = accelerator.has_streams(self._device) and self._groups.across is not None
        self._side = accelerator.stream(self._device) if on_streams else None
        # torch renamed these in 2.13, and warns on the old names.
        self._all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    @classmethod
    def fits(cls, connections: Connections) -> bool:
        return connections.groups is not None

    def all_gather(
        self, flat: Tensor, own: Tensor | None, launch: CollectiveId | None, group: Group | None = None
    ) -> Work:
        return WorkList([self._all_gather(flat, self._own(flat), group=group or self._groups.gathers, async_op=True)])

    def reduce_scatter(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        flat = reduction.flat
        groups = self._groups
        mine = self._own(flat)
        if not self._scatters:
            work = dist.all_reduce(flat, group=groups.everyone, async_op=True)
            return WorkList([work], lambda: reduction.store(mine))
        # In place: the output is this rank's shard of the input.
        work = self._reduce_scatter(mine, flat, group=groups.reductions, async_op=True)
        if groups.across is None or reduction.replicas is Replicas.NOTHING:
            return WorkList([work], lambda: reduction.store(mine))
        # The sum over replicas needs the result of the first. Waiting on a stream of its own orders the two without
        # stopping the computation, as a wait on the current stream would.
        with accelerator.use(self._side):
            work.wait()
            if reduction.replicas is Replicas.SENT:
                work = dist.all_reduce(mine, group=groups.across, async_op=True)
                return WorkList([work], lambda: reduction.store(mine))
            reduction.store(mine)
            return self._sum_replicas(reduction.out, mine)

    def sum_replicas(self, out: Tensor, dtype: torch.dtype, launch: CollectiveId | None) -> Work:
        return self._sum_replicas(out, out if out.dtype == dtype else torch.empty_like(out, dtype=dtype))

    def _sum_replicas(self, out: Tensor, sent: Tensor) -> Work:
        """Sum ``out`` over the replicas; ``sent``, of as many elements, is used if it has another dtype."""
        if sent.dtype == out.dtype:
            return WorkList([dist.all_reduce(out, group=self._groups.across, async_op=True)])
        sent.copy_(out)
        work = dist.all_reduce(sent, group=self._groups.across, async_op=True)
        return WorkList([work], lambda: store(out, sent, False, 1.0))

    def all_reduce(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        work = dist.all_reduce(reduction.flat, group=self._groups.everyone, async_op=True)
        return WorkList([work], lambda: reduction.store(reduction.flat))


class Gloo(Backend):
    """gloo between hosts."""

    name = "gloo"
    gathers_in_threads = True
    sends = GLOO

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections)
        self._watch = connections.watch
        self.sums_wide = self._scatters

    @classmethod
    def fits(cls, connections: Connections) -> bool:
        return connections.backend == "gloo"

    def _all(self, works: list[Any], launch: CollectiveId | None, finish: Any = None) -> WorkList:
        return WorkList(works, finish, self._watch, launch)

    def _store(self, reduction: Reduction, total: Tensor, wait: Callable[[Any], object]) -> None:
        """Store ``total``, the sum of this rank's row, after or before a sum over replicas."""
        if reduction.replicas is Replicas.SENT and self._groups.across is not None:
            wait(dist.all_reduce(total, group=self._groups.across, async_op=True))
        reduction.store(total)
        if reduction.replicas is Replicas.RESULT:
            self._sum_result(reduction.out, wait)

    def _sum_result(self, out: Tensor, wait: Callable[[Any], object]) -> None:
        """Sum ``out`` over the replicas; it is rounded once."""
        total = out.to(wide(out.dtype))
        wait(dist.all_reduce(total, group=self._groups.across, async_op=True))
        if total is not out:
            out.copy_(total)

    def sum_replicas(self, out: Tensor, dtype: torch.dtype, launch: CollectiveId | None) -> Work:
        return self._all([], launch, lambda: self._sum_result(out, partial(self._watch.wait, launch=launch)))

    def all_gather(
        self, flat: Tensor, own: Tensor | None, launch: CollectiveId | None, group: Group | None = None
    ) -> Work:
        group = group or self._groups.gathers
        ranks = dist.get_process_group_ranks(group)
        shards = zip(flat.chunk(len(ranks)), ranks, strict=True)
        return self._all([dist.broadcast(s, peer, group, async_op=True) for s, peer in shards], launch)

    def reduce_scatter(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        flat = reduction.flat
        scratch = reduction.scratch
        if not self._scatters:
            summed = self._own(flat)
            work = dist.all_reduce(flat, group=self._groups.everyone, async_op=True)
            return self._all([work], launch, lambda: reduction.store(summed))
        work = dist.all_to_all_single(scratch, flat, group=self._groups.reductions, async_op=True)
        parts = scratch.chunk(self._mesh.shards)
        wait = partial(self._watch.wait, launch=launch)

        def finish() -> None:
            self._store(reduction, sum_in_rank_order(parts, reduction.out.dtype), wait)

        return self._all([work], launch, finish)

    def all_reduce(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        world, rank = self._mesh.world, self._mesh.rank
        flat = reduction.flat
        scratch = reduction.scratch
        work = dist.all_to_all_single(scratch, flat, group=self._groups.everyone, async_op=True)

        def finish() -> None:
            # One rank sums each part and sends the result, so all ranks get the same bits.
            total = sum_in_rank_order(scratch.chunk(world), reduction.out.dtype).mul_(reduction.factor)
            flat.chunk(world)[rank].copy_(total)
            Gloo.all_gather(self, flat, None, launch, self._groups.everyone).wait()
            store(reduction.out, flat, reduction.add, 1.0)

        return self._all([work], launch, finish)


def exchange(sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], group: Group) -> None:
    """Send tensors to ranks of a gloo ``group``, and fill others from them. A rank's tensors for itself are left out.

    Args:
        sends, receives: (global rank, contiguous tensor); those of two ranks are matched in their order.

    In small pieces: a message of gloo occupies its connection until it is complete, so that two ranks which send each
    other large ones get little more than half of a link's rate (measured: 0.58 with 10 MB, 0.92 with 1 MB).
    """
    me, works = dist.get_rank(), []
    for mover, ends in ((dist.irecv, receives), (dist.isend, sends)):
        pieces = [[(peer, piece) for piece in tensor.view(-1).view(torch.uint8).split(_PIECE)] for peer, tensor in ends]
        works += [
            mover(piece, peer, group)
            for column in itertools.zip_longest(*pieces)
            for peer, piece in filter(None, column)
            if peer != me
        ]
    for work in works:
        assert work is not None
        work.wait()


def sum_in_rank_order(shards: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """The sum of the ranks' contributions for a result in ``dtype``; may overwrite the first."""
    total = shards[0].to(wide(dtype))
    for shard in shards[1:]:
        total.add_(shard)
    return total


# ---- memory from which gradients are sent ---------------------------------------------------------------------------


class Sums:
    """The transport that sums gradients, for engines of one group.

    ``closes``: it does nothing else, and is closed when neither the group nor an engine keeps this object.
    """

    def __init__(self, transport: Transport, closes: bool) -> None:
        self.transport = transport
        if closes:
            weakref.finalize(self, transport.close).atexit = False


@dataclass(eq=False)
class SendBuffer:
    """Input of one reduction.

    Attributes:
        flat: 1D; the sender fills it with gradients times ``factor``.
        factor: see ``ShardGroup.factors``.
        scratch: 1D, for what the reduction receives.
        whole: of a reusable buffer: all of it, of which ``flat`` and ``scratch`` are parts.
        transport: sends it; None: the one that sums now.
    """

    flat: Tensor
    factor: float
    scratch: Tensor
    whole: tuple[Tensor, Tensor] | None = None
    transport: Transport | None = None


class SendBuffers:
    """Send buffers for the buckets of one engine in one group. Reusable ones take turns.

    ``transport``: sends them.

    Args:
        sums: sends, whatever sums the gradients of other engines.
        device: of the gradients.
        factor: of gradients that are sent in a dtype.
        largest: by dtype, the most elements of a reusable buffer. Others are freed after their reduction.
    """

    def __init__(
        self,
        sums: Sums,
        device: torch.device,
        factor: Callable[[torch.dtype], float],
        largest: Mapping[torch.dtype, int],
    ) -> None:
        self._sums = sums
        self.transport = sums.transport
        self._device = device
        self._factor = factor
        self._largest = largest
        self._sizes = self.transport.sends
        self._free: dict[torch.dtype, deque[tuple[Tensor, Tensor]]] = {}
        self._made: dict[torch.dtype, int] = {}  # number of reusable ones, free or not

    def take(self, numel: int, dtype: torch.dtype) -> SendBuffer:
        """A buffer for ``numel`` elements; in the same order on all ranks. At most two are in use at a time."""
        largest, factor = self._largest.get(dtype, 0), self._factor(dtype)
        if numel > largest:
            flat = flat_empty(numel, dtype, self._device)
            return SendBuffer(flat, factor, self._scratch(numel, dtype, False), None, self.transport)
        free = self._free.setdefault(dtype, deque())
        made = self._made.get(dtype, 0)
        if made < self._sizes.turns:
            self._made[dtype] = made + 1
            whole = self._allocate(largest, dtype)
        else:
            whole = free.popleft()
        return SendBuffer(whole[0][:numel], factor, whole[1][:numel], whole, self.transport)

    def filled(self, values: Tensor, dtype: torch.dtype) -> SendBuffer:
        """A buffer with gradients (1D) that are complete, in ``dtype``; ``values`` may be overwritten."""
        # Allocate before anything changes: without memory the caller still has the gradients as they were.
        scratch = self._scratch(values.numel(), dtype, False)
        flat, factor = values if values.dtype == dtype else torch.empty_like(values, dtype=dtype), self._factor(dtype)
        values.mul_(factor)
        return SendBuffer(flat if flat is values else flat.copy_(values), factor, scratch, None, self.transport)

    def give_back(self, buffer: SendBuffer, unused: bool = False) -> None:
        """Let a buffer from ``take`` be reused after its reduction; ``unused``: there was none."""
        if buffer.whole is not None:
            free = self._free[buffer.flat.dtype]
            # An unused buffer comes next again. At the end of the queue it would change how many launches lie between
            # two uses of a buffer, see shared_memory.py, Note [Shared windows].
            free.insert(0 if unused else len(free), buffer.whole)

    def free(self) -> None:
        """Give the reusable buffers that are not in use back to the allocator of an accelerator; ``take`` makes others.

        On a host they stay: new pages would have to be filled with zeros, and peers may read them in place.
        """
        for dtype, free in self._free.items() if accelerator.is_accelerator(self._device) else ():
            self._made[dtype] -= len(free)
            free.clear()

    def _allocate(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A reusable buffer for the life of a run, and its scratch."""
        return self.transport.allocate_send(numel, dtype), self._scratch(numel, dtype, True)

    def _scratch(self, numel: int, dtype: torch.dtype, reusable: bool) -> Tensor:
        return flat_empty(self._sizes.scratch_numel(numel, reusable), dtype, self._device)

    @property
    def nbytes(self) -> int:
        """Bytes of the reusable buffers that are free."""
        return sum(tensor.nbytes for free in self._free.values() for pair in free for tensor in pair)
