"""The ranks over which the parameters of a bucket are the same, and sharded. How tensors are moved: transport.py."""

from __future__ import annotations

import gc
import logging
import weakref
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.common import accelerator
from lt_zero.common.errors import ConfigError, Problem
from lt_zero.core.comm import transports
from lt_zero.core.comm.process_groups import one_queue
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.comm.send_sizes import SendSizes
from lt_zero.core.comm.shared_memory import SharedArena
from lt_zero.core.comm.topology import Topology, choose
from lt_zero.core.comm.transport import (
    Connections,
    Groups,
    Mesh,
    Reduction,
    Replicas,
    SendBuffer,
    SendBuffers,
    Sums,
    Transport,
)
from lt_zero.core.comm.work import CollectiveId, Done, Work
from lt_zero.core.comm.world import World

_T = TypeVar("_T")

log = logging.getLogger("lt_zero")

_SHOWN = 4  # groups that a message lists


class Operation(NamedTuple):
    """A collective of a group.

    Attributes:
        name: in errors, and where ranks compare what they launch.
        logged: the operation as ``CommLog`` records it.
        reduces: it has the order of reductions (ranks.py, Note [Order of launches]).
    """

    name: str
    logged: str
    reduces: bool = False


ALL_GATHER = Operation("all-gather", "all_gather")
REDUCE_SCATTER = Operation("reduce-scatter", "reduce_scatter", reduces=True)
ALL_REDUCE = Operation("all-reduce", "all_reduce", reduces=True)
SUM_REPLICAS = Operation("sum over replicas", "all_reduce", reduces=True)


class Configured(NamedTuple):
    """The arguments of ``ShardGroup.configure`` that all engines of a group share."""

    shards: int
    topology: str | int
    scatters: bool
    sums_gradients: bool
    predivide: float | None


# The keys of the configuration from which these come.
_KEYS = (
    "zero_optimization.mics_shard_size",
    "communication.topology",
    "zero_optimization.reduce_scatter",
    "gradient_allreduce_op",
    "gradient_predivide_factor",
)


class ShardGroup(Ranks):
    """Ranks over which the parameters of some buckets are the same, with the collectives of these buckets.

    Numbers of ranks are those in the group. (``ranks``: in the world.) Other collectives than those below are launched
    by ``run``.

    Args:
        world: all ranks of the run.
        parts: which ranks form groups: this one has the ranks, in ascending order, of the part with this rank; every
            rank is in one. The same on all ranks. Collective.
        divisor: of the mean of gradients: how many ranks see different data, which may be more or fewer than there are
            in the group.
        norm_share: by what squares of this group's gradients are multiplied in sums over the world, of which each
            element has to be one summand; 1/2, say, if two groups have the same tensors.
        holders: the ranks that together have all of the tensors of which those of a group have a part; default: all.

    Attributes:
        parts: as given.
        mesh: the ranks as replicas and shards.
        nodes: the ranks of each node.
        topology: in which dimensions tensors cross the nodes.
        transport: moves tensors between the ranks.
        secondary_shards: ranks that share a second copy of parameters, for plans; 1: there is none.
    """

    def __init__(
        self,
        world: World,
        parts: Sequence[Sequence[int]],
        divisor: float,
        norm_share: float = 1.0,
        holders: Ranks | None = None,
    ) -> None:
        self.world = world
        self.parts = [list(part) for part in parts]
        self.holders = holders or world
        self._largest = self._division = max(map(len, self.parts))  # ranks of a part; and of a replica in it
        _check_parts(self.parts, world.size)
        ranks = next(part for part in self.parts if world.rank in part)
        everyone = len(ranks) == world.size
        order = world.order_of(ranks)
        gathers = world.process_group
        if gathers is not None and not everyone:
            gathers = world.new_group(None, self.parts, closes=True)
        super().__init__(gathers, ranks, ranks.index(world.rank), world.device, world.watch, order, world.log)
        self.divisor, self.norm_share = float(divisor), norm_share
        self.sums_gradients = False  # gradient_allreduce_op: sum
        self.predivide: float | None = None  # gradient_predivide_factor, or the divisor for prescale_gradients
        self.reductions: dist.ProcessGroup | None = None  # see ranks.py, Note [Order of launches]
        self._background: dist.ProcessGroup | None = None  # see ``allow_background``
        self._arena: SharedArena | None = None
        self.mesh = Mesh(self.size, self.rank, self.size)
        numbers = {rank: number for number, rank in enumerate(ranks)}
        members = [[numbers[rank] for rank in node if rank in numbers] for node in world.nodes]
        self.nodes = [node for node in members if node]
        self._row: Groups | None = None  # groups over parts of the ranks
        self._configured: Configured | None = None
        self._serves: weakref.WeakSet[SendBuffers] = weakref.WeakSet()  # of the engines that have buckets here
        self._made: dict[Hashable, Any] = {}  # see ``once``
        self.secondary_shards = 1
        self.topology = Topology((), "there is one rank")
        self.transport: Transport
        self._sums: Sums
        if gathers is not None:
            self._connect(gathers, everyone)
        self._choose(self._largest, "auto", True)

    @classmethod
    def of_all(cls, world: World) -> ShardGroup:
        """All ranks of the run, each with data of its own. Collective."""
        return cls(world, [range(world.size)], world.size)

    def ask_all(self, value: Any, name: str) -> list[Any]:
        """The (small, picklable) values of all ranks of the world, if it has others than these. Collective then."""
        return [value] if self.size == self.world.size else self.world.host_gather(value, name)

    @cached_property
    def described(self) -> str:
        """The groups, as all ranks make them."""
        more = f", ... ({zlib.crc32(repr(self.parts).encode()):08x})" if len(self.parts) > _SHOWN else ""
        parts = ", ".join(str(part if len(part) < 9 else [part[0], "...", part[-1]]) for part in self.parts[:_SHOWN])
        return f"ranks {parts}{more}, divisor {self.divisor:g}, norm_share {self.norm_share:g}"

    def _connect(self, gathers: dist.ProcessGroup, everyone: bool) -> None:
        """Make the process groups and shared memory of this group, besides the process group for gathers."""
        world, order = self.world, self.order
        self.reductions = gathers if one_queue(self.device) else world.new_group(None, self.parts, closes=True)
        if not everyone:
            order.host = gathers if self.backend in ("gloo", "fake") else world.new_group("gloo", self.parts)
        apart = world.check and order.host is not gathers
        order.of_reductions = world.new_group("gloo", self.parts) if apart else self.reductions
        if self._gloo and self.device.type == "cpu" and world.detector is not None:
            self._arena = world.share_memory(self.ranks)
            order.arena = order.arena or self._arena

    def new_group(
        self,
        parts: Sequence[Sequence[int]] | None = None,
        timeout: timedelta | None = None,
        exchanges: bool = False,
    ) -> dist.ProcessGroup:
        """Another process group over these ranks, or over that of ``parts`` which has this rank. Collective.

        See ``World.new_group``.
        """
        inside = [range(self._largest)] if parts is None else parts
        wanted = [[ranks[n] for n in part if n < len(ranks)] for ranks in self.parts for part in inside]
        return self.world.new_group(self.backend, [ranks for ranks in wanted if ranks], timeout, exchanges=exchanges)

    def share_memory(self, ranks: Sequence[int]) -> SharedArena | None:
        """Windows for ``ranks`` of the group, this one among them; None if some cannot share memory. Collective."""
        return self.world.share_memory([self.ranks[rank] for rank in ranks])

    def once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return what ``make`` has made for ``key``: connections that live as long as the group. Collective at first.

        ``make`` must not keep the group alive.
        """
        if key not in self._made:
            self._made[key] = make()
        made: _T = self._made[key]
        return made

    def require_queues(self, key: str, asked: str) -> None:
        """Check that collectives of several process groups can run beside each other.

        Raises:
            ConfigError: a GPU has one queue for all groups; ``asked``: what ``key`` asks for.
        """
        if one_queue(self.device):
            text = "needs process groups beside the others, which CUDA_DEVICE_MAX_CONNECTIONS=1 does not allow"
            raise ConfigError([Problem(key, f"{asked} {text}: unset it, or remove the key.")])

    # ---- transports ------------------------------------------------------------------------------------------------

    def configure(
        self,
        shards: int,
        topology: str | int,
        scatters: bool,
        sums_gradients: bool,
        predivide: float | None,
    ) -> None:
        """Choose replicas, topology and reductions. Before anything is sharded. Collective.

        Args:
            shards: ranks of a replica, in parts that have more.
            topology: ``communication.topology``.
            scatters: gradients are reduced by a reduce-scatter; else by an all-reduce of all of them.
            sums_gradients: gradients are summed, not averaged.
            predivide: divisor of gradients before they are sent; None: as the dtype needs.

        Raises:
            ConfigError: they do not fit the ranks. Or an engine uses the group, which was configured otherwise for it.
        """
        wanted = Configured(shards, topology, scatters, sums_gradients, predivide)
        known = self._configured
        if known is not None and wanted != known:
            self._require_unused(known, wanted)
        self.sums_gradients = sums_gradients
        self.predivide = predivide
        self._configured = wanted
        # What features have added may be of an earlier configuration: they add it again.
        self.secondary_shards = 1
        self.sum_by(None)
        if known is None or wanted[:3] != known[:3]:
            self._choose(shards, topology, scatters)
            if self.rank == 0 and self.process_group is not None and len(self.nodes) > 1:
                log.info("Collectives over %d nodes: %s.", len(self.nodes), self.topology.why)

    def share_second_copies(self, ranks: int) -> None:
        """Let so many neighbouring ranks share a second copy of parameters. After ``configure``, which ends that."""
        self.secondary_shards = ranks if self.process_group is not None else 1

    @property
    def whole(self) -> Groups | None:
        """The process groups over all of these ranks."""
        if self.process_group is None or self.reductions is None:
            return None
        return Groups(self.reductions, self.process_group, self.reductions)

    def connections(
        self, mesh: Mesh, groups: Groups | None, sizes: Sequence[int] = (), scatters: bool = True
    ) -> Connections:
        """The connections of these ranks, of which a transport can be made. They keep the group alive."""
        return Connections(
            mesh=mesh,
            groups=groups,
            backend=self.backend,
            device=self.device,
            ranks=self.ranks,
            nodes=self.nodes,
            sizes=tuple(sizes),
            scatters=scatters,
            arena=self._arena,
            order=self.order,
            log=self.log,
            watch=self.watch,
            new_group=self.new_group,
            share_memory=self.share_memory,
        )

    def _require_unused(self, known: Configured, wanted: Configured) -> None:
        """Raise ConfigError, on all ranks, if an engine uses this group as it is ``known``. Collective."""
        gc.collect()  # engines that the user has dropped are in cycles
        used = torch.tensor([len(self._serves)])
        self.world.host_max(used, "engines of a group").wait()
        if not used:
            return
        pairs = zip(_KEYS, known, wanted, strict=True)
        changed = {key: f"{key} ({was} until now, now {new})" for key, was, new in pairs if was != new}
        text = (
            f"{', '.join(changed.values())}: another model is sharded over this group (group=...), and all models of "
            "one group are exchanged alike. Give this model a group of its own, ShardGroup(group.world, group.parts, "
            "group.divisor), or the same configuration."
        )
        raise ConfigError([Problem(next(iter(changed)), text)])

    @property
    def sums(self) -> Transport:
        """The transport that sums the gradients of engines that are built from now on."""
        return self._sums.transport

    def sum_by(self, transport: Transport | None) -> None:
        """Let ``transport`` sum the gradients of engines that are built from now on; None: the one that gathers.

        Earlier engines keep theirs, which is closed when neither they nor the group need it any more.
        """
        self._sums = Sums(transport or self.transport, closes=transport is not None)

    def _choose(self, division: int, topology: str | int, scatters: bool) -> None:
        """Make the groups and the transport. ``division``: ranks of a replica, in parts that have more."""
        whole = self.whole
        if whole is not None:
            self._divide(division, whole)
            kind = "windows" if self._arena is not None else self.backend
            self.topology = choose(topology, self.mesh, self.nodes, kind)
            form = (self.size, self.topology.sizes)
            if len(self.parts) > 1 and len(set(self.world.host_gather(form, "topologies"))) > 1:
                self.topology = Topology((), "groups are not on nodes in the same way")
        found = self.connections(self.mesh, self._row or whole, self.topology.sizes, scatters)
        self.transport = transports.connect(found, self.world)
        self.sum_by(None)

    def _divide(self, division: int, whole: Groups) -> None:
        """Make the process groups of the replicas, and over them. Collective."""
        if division == self._division:
            return
        self._division = division
        self._background = None  # it was made for other replicas; ``allow_background`` makes the next
        mesh = Mesh(self._largest, 0, division)
        self.mesh = Mesh(self.size, self.rank, min(division, self.size))
        rows = [mesh.shard_ranks(replica) for replica in range(self._largest // division)]
        columns = [mesh.replica_ranks(shard) for shard in range(division)] if division < self._largest else []
        gathers = self.new_group(rows)
        reductions = gathers if one_queue(self.device) else self.new_group(rows)
        across = self.new_group(columns) if columns else None
        self._row = Groups(whole.everyone, gathers, reductions, across)

    # ---- in the background ---------------------------------------------------------------------------------------

    def allow_background(self) -> None:
        """Make a process group for the background thread (background.py). Collective.

        Raises:
            ConfigError: a GPU has one queue for all groups, where ranks that launch in different orders deadlock.
        """
        if self.process_group is not None and self._background is None:
            if one_queue(self.device):
                key = "zero_optimization.offload_optimizer.overlap_step"
                text = "needs collectives beside each other, which CUDA_DEVICE_MAX_CONNECTIONS=1 does not allow"
                raise ConfigError([Problem(key, f"{key}=true {text}: unset it, or set overlap_step='auto'.")])
            mesh = Mesh(self._largest, 0, self._division)
            rows = [mesh.shard_ranks(replica) for replica in range(self._largest // self._division)]
            opened = self.log.open("barrier", "background", 0)
            self._background = self.new_group(rows)
            self.log.ended(opened)

    @property
    def gathers_in_threads(self) -> bool:
        """True if ``background_gather`` may run in the background thread.

        A GPU runs the collectives of several groups in the order of their launches. If a thread launched some, the
        order would differ from rank to rank, and they could wait for each other for ever.
        """
        return self.transport.gathers_in_threads

    def background_gather(self, flat: Tensor, start: Callable[[Callable[[Tensor], Work]], Work] | None = None) -> Work:
        """Fill ``flat`` after a background step, as ``all_gather`` does. In the same order on all ranks.

        Not compared in debug mode, as the order does not depend on the model.

        ``start``: starts it by an all-gather of other tensors, which it is given; None: of ``flat``.
        """
        if self.process_group is None:
            return Done()

        def gather(sent: Tensor) -> Work:
            return self.transport.all_gather(sent, None, None, self._background)

        opened = self.log.open("all_gather", "background", flat.nbytes)
        return self.log.follow(opened, gather(flat) if start is None else start(gather))

    def background_fence(self) -> Work:
        """Wait, in the background thread, until all ranks have written what peers read in place."""
        opened = self.log.open("barrier", "background", 0)
        work = self.transport.background_fence(self._background)
        return self.log.follow(opened, work) if work is not None else Done()

    # ---- properties of the transport -------------------------------------------------------------------------------

    @property
    def gathers_in_background(self) -> bool:
        """True if all-gathers overlap with computation; reading a peer's memory does not."""
        return self.transport.overlaps

    @property
    def sums_wide(self) -> bool:
        """True if ``reduce_scatter`` adds in the dtype of ``out``, whatever the dtype in which gradients are sent."""
        return self.sums.sums_wide

    @property
    def sums_replicas_apart(self) -> bool:
        """True if ``reduce_scatter`` may leave the sums over replicas to ``sum_replicas``."""
        return self.sums.sums_apart

    def factors(self, wire: torch.dtype) -> tuple[float, float]:
        """Factors of gradients sent as ``wire``, before and after the sum.

        A sum in fp16 can exceed 65504 although the mean does not, so it is divided before; bf16 has fp32's range.
        """
        divisor = 1.0 if self.sums_gradients else self.divisor
        before = self.predivide
        if before is None:
            before = divisor if wire == torch.float16 and not self.sums_wide else 1.0
        return 1.0 / before, before / divisor

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1D tensor for the life of a run, which peers may read; in the same order on all ranks."""
        return self.transport.allocate(numel, dtype)

    def allocate_written(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor as from ``allocate``, which the caller writes before the next gather."""
        self.after_write()
        return self.allocate(numel, dtype)

    def send_buffers(self, largest: Mapping[torch.dtype, int]) -> SendBuffers:
        """Buffers for reductions, reusable up to the ``largest`` elements of each dtype."""
        made = SendBuffers(self._sums, self.device, lambda dtype: self.factors(dtype)[0], largest)
        self._serves.add(made)
        return made

    @property
    def sends(self) -> SendSizes:
        """The buffers that reductions need."""
        return self.sums.sends

    def before_write(self) -> None:
        """Wait until no rank reads a tensor from ``allocate``. Call it before writing to one."""
        self.transport.before_write()

    def after_write(self) -> None:
        """Let the next reader wait until all have written. Call it after writing to a tensor from ``allocate``."""
        self.transport.after_write()

    # ---- collectives -----------------------------------------------------------------------------------------------

    def run(self, operation: Operation, name: str, flat: Tensor, start: Callable[[CollectiveId | None], Work]) -> Work:
        """Launch a collective of these ranks: number, compare and record it; returns the work to wait for.

        Args:
            operation: which.
            name: of what it is for, the same on all ranks.
            flat: what it moves, of the same size on all ranks.
            start: starts it, given its number; None in a single process, where nothing is numbered or recorded.
        """
        self._require_device(flat, name)
        if self.process_group is None:
            return start(None)
        opened = self.log.open(operation.logged, name, flat.nbytes)
        number = self.order.launch_reduction if operation.reduces else self.order.launch
        return self.log.follow(opened, start(number(operation.name, name, flat.numel())))

    def all_gather(self, flat: Tensor, name: str, own: Tensor | None = None) -> Work:
        """Fill ``flat`` (1D, ``mesh.shards`` equal shards) from the ranks' shards, which are in place already.

        ``own``: this rank's shard; if it is from ``allocate``, peers may read it there.
        """
        self.transport.before_gather(own)
        return self.run(ALL_GATHER, name, flat, partial(self.transport.all_gather, flat, own))

    def reduce_scatter(
        self, out: Tensor, send: SendBuffer, add: bool, name: str, replicas: Replicas = Replicas.SENT
    ) -> Work:
        """Average ``send`` (``mesh.shards`` shards) over all ranks; write this rank's shard to ``out``, or add it.

        ``send`` must not be used until the wait, after which it is undefined. If ``sums_wide``, it may have a narrower
        dtype than ``out``: the sum is as exact as if it had been cast before. ``replicas``: what is summed over them;
        other than ``SENT`` where ``sums_replicas_apart``.
        """
        mean = self._mean(out, send, add, replicas)
        transport = send.transport or self.sums
        return self.run(REDUCE_SCATTER, name, send.flat, partial(transport.reduce_scatter, mean))

    def sum_replicas(self, out: Tensor, dtype: torch.dtype, name: str, transport: Transport) -> Work:
        """Sum ``out`` (1D, a shard) over the replicas, in place, after reductions that summed ``NOTHING`` over them.

        ``dtype``: in which ``transport`` sends it, unless it ``sums_wide``.
        """
        return self.run(SUM_REPLICAS, name, out, partial(transport.sum_replicas, out, dtype))

    def all_reduce(self, out: Tensor, send: SendBuffer, add: bool, name: str) -> Work:
        """Average ``send`` (one equal part per rank) over the ranks, and write all of it to ``out``, or add it."""
        mean = self._mean(out, send, add)
        return self.run(ALL_REDUCE, name, send.flat, partial((send.transport or self.sums).all_reduce, mean))

    def _mean(self, out: Tensor, send: SendBuffer, add: bool, replicas: Replicas = Replicas.SENT) -> Reduction:
        return Reduction(out, send.flat, send.scratch, add, self.factors(send.flat.dtype)[1], replicas)

    def sum_scalar(self, value: Tensor, name: str) -> Tensor:
        """The sum over the ranks of one replica, on all, of an fp64 tensor, which may be overwritten."""
        if self.mesh.replica > 0:
            # All ranks sum the values of one replica. A sum over each replica by itself could differ in its last bits.
            value.zero_()
        return self.sum_all(value, name)


def _check_parts(parts: Sequence[Sequence[int]], world: int) -> None:
    """Raise ValueError for parts that are no division of the ranks."""
    each_once = sorted(rank for part in parts for rank in part) == list(range(world))
    if not each_once or any(part != sorted(part) for part in parts):
        shown = ", ".join(map(str, parts[:4])) + (", ..." if len(parts) > 4 else "")
        raise ValueError(
            f"ShardGroup(parts=[{shown}]): each of the {world} ranks has to be in one part, in ascending order."
        )


def combine_rows(rows: Tensor, groups: Sequence[Ranks], name: str, maximum: bool = False) -> Tensor:
    """Sums, or maxima, of fp64 ``rows`` over the ranks of each one's group: ``groups`` has that of each row.

    Of a row whose ranks have parts, ranks that have the same elements as another have zero.
    """
    distinct = list(dict.fromkeys(groups))
    for group in distinct:
        combine = group.max_all if maximum else group.sum_scalar
        if len(distinct) == 1:
            return combine(rows, name)
        # Indices, as a mask would let the host wait for the device, and sent without a wait.
        mine = accelerator.send(torch.tensor([n for n, each in enumerate(groups) if each is group]), rows.device)
        rows.index_copy_(0, mine, combine(rows.index_select(0, mine), name))
    return rows
