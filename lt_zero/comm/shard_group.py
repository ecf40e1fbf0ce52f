"""The ranks over which the parameters of a bucket are the same, and sharded. How tensors are moved: transport.py."""

from __future__ import annotations

import logging
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.comm.compression import (
    CompressionPlan,
    Compressor,
    gather_encoded,
    plan_compression,
    plan_quantized_sums,
)
from lt_zero.comm.hierarchy import Hierarchy
from lt_zero.comm.process_groups import one_queue
from lt_zero.comm.ranks import Ranks
from lt_zero.comm.residuals import Residuals
from lt_zero.comm.send_sizes import BACKEND, SendSizes
from lt_zero.comm.shared_memory import SharedArena
from lt_zero.comm.tolerance import FOR_EVER, TolerantHierarchy, TolerantSum, tolerance_of
from lt_zero.comm.topology import Topology, choose, whole_nodes
from lt_zero.comm.transport import (
    Gloo,
    Groups,
    Mesh,
    Reduction,
    Replicas,
    SendBuffer,
    SendBuffers,
    SharedMemoryTransport,
    Transport,
)
from lt_zero.comm.work import FENCE, Done, Work, WorkList
from lt_zero.comm.world import World
from lt_zero.common import accelerator
from lt_zero.common.codec import Codec
from lt_zero.common.errors import ConfigError, Problem
from lt_zero.common.flat_storage import flat_empty
from lt_zero.config import ZeroConfig
from lt_zero.ops.flat import store

log = logging.getLogger("lt_zero")

_SHOWN = 4  # groups that a message lists
_QUEUE = "needs process groups beside the others, which CUDA_DEVICE_MAX_CONNECTIONS=1 does not allow: unset it"


class ShardGroup(Ranks):
    """Ranks over which the parameters of some buckets are the same, with the collectives of these buckets.

    Numbers of ranks are those in the group. (``ranks``: in the world.)

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
        mesh: the ranks as replicas and shards.
        nodes: the ranks of each node.
        compressor: of gradients; None: they are sent as they are.
        secondary_shards: ranks that share the second copy of parameters; 1: there is none.
        tolerance: ``communication.slow_node_tolerance``; None: sums wait for all ranks.
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
        self._parts = [list(part) for part in parts]
        self.holders = holders or world
        self._largest = self._division = max(map(len, self._parts))  # ranks of a part; and of a replica in it
        _check_parts(self._parts, world.size)
        ranks = next(part for part in self._parts if world.rank in part)
        everyone = len(ranks) == world.size
        order = world.order_of(ranks)
        gathers = world.process_group
        if gathers is not None and not everyone:
            gathers = world.new_group(None, self._parts, closes=True)
        super().__init__(gathers, ranks, ranks.index(world.rank), world.device, world.watch, order, world.log)
        self.divisor, self.norm_share = float(divisor), norm_share
        self.sums_gradients = False  # gradient_allreduce_op: sum
        self.predivide: float | None = None  # gradient_predivide_factor, or the divisor for prescale_gradients
        self.reductions: dist.ProcessGroup | None = None  # see ranks.py, Note [Order of launches]
        self._background: dist.ProcessGroup | None = None  # see ``allow_background``
        self._arena: SharedArena | None = None
        self._written = self._read = False  # windows were written, or read, since the last fence
        self.mesh = Mesh(self.size, self.rank, self.size)
        numbers = {rank: number for number, rank in enumerate(ranks)}
        members = [[numbers[rank] for rank in node if rank in numbers] for node in world.nodes]
        self.nodes = [node for node in members if node]
        self._row: Groups | None = None  # groups over parts of the ranks
        self._configured: tuple[Any, ...] | None = None
        self.compressor: Compressor | None = None
        self.secondary_shards = 1
        self._in_node: Transport | None = None  # between them
        self._transport: Transport
        self._sums: Transport  # for gradients
        self.tolerance: TolerantSum | None = None
        if gathers is not None:
            self._connect(gathers, everyone)

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
        more = f", ... ({zlib.crc32(repr(self._parts).encode()):08x})" if len(self._parts) > _SHOWN else ""
        parts = ", ".join(str(part if len(part) < 9 else [part[0], "...", part[-1]]) for part in self._parts[:_SHOWN])
        return f"ranks {parts}{more}, divisor {self.divisor:g}, norm_share {self.norm_share:g}"

    def _connect(self, gathers: dist.ProcessGroup, everyone: bool) -> None:
        """Make the process groups and shared memory of this group, besides the process group for gathers."""
        world, order = self.world, self.order
        self.reductions = gathers if one_queue(self.device) else world.new_group(None, self._parts, closes=True)
        if not everyone:
            order.host = gathers if self.backend in ("gloo", "fake") else world.new_group("gloo", self._parts)
        apart = world.check and order.host is not gathers
        order.of_reductions = world.new_group("gloo", self._parts) if apart else self.reductions
        if self._gloo and self.device.type == "cpu" and world.detector is not None:
            self._arena = world.share_memory(self.ranks)
            order.arena = order.arena or self._arena
        self._choose(self._largest, "auto", True)

    def _new_group(
        self,
        backend: str,
        parts: Sequence[Sequence[int]] | None = None,
        timeout: timedelta | None = None,
        exchanges: bool = False,
    ) -> dist.ProcessGroup:
        """Another process group over these ranks, or over that of ``parts`` which has this rank. Collective."""
        inside = [range(self._largest)] if parts is None else parts
        wanted = [[ranks[n] for n in part if n < len(ranks)] for ranks in self._parts for part in inside]
        return self.world.new_group(backend, [ranks for ranks in wanted if ranks], timeout, exchanges=exchanges)

    def _share_memory(self, ranks: Sequence[int]) -> SharedArena | None:
        """Windows for ``ranks`` of the group, this one among them; None if some cannot share memory. Collective."""
        return self.world.share_memory([self.ranks[rank] for rank in ranks])

    def configure(self, config: ZeroConfig) -> None:
        """Use the configuration's shard groups, topology and reductions. Before anything is sharded. Collective.

        Raises:
            ConfigError: they do not fit the ranks.
        """
        zero = config.zero_optimization
        self.sums_gradients = config.gradient_allreduce_op == "sum"
        self.predivide = None
        # ``prescale_gradients`` comes first: many files set gradient_predivide_factor=1 beside it.
        if config.prescale_gradients:
            self.predivide = self.divisor
        elif config.gradient_predivide_factor != 1.0:
            self.predivide = config.gradient_predivide_factor
        wanted = (zero.shards(self._largest), config.communication.topology, zero.reduce_scatter)
        if wanted != self._configured:
            self._choose(*wanted)
            self._configured = wanted
            if self.rank == 0 and self.process_group is not None and len(self.nodes) > 1:
                log.info("Collectives over %d nodes: %s.", len(self.nodes), self.topology.why)
        # With parts of different sizes, some ranks have a model beside this group's, and are not sharded.
        if len(set(map(len, self._parts))) == 1:
            self._share_parameters(zero.secondary_shards(self.size))
        self._tolerate(config.communication.slow_node_tolerance, zero.stage > 0)
        optim = zero.offload_optimizer
        # This makes process groups. It is done here, where all ranks configure their groups in one order.
        if optim.device != "none" and optim.overlap_step is True:
            self.allow_background()

    def _choose(self, division: int, topology: str | int, scatters: bool) -> None:
        """Make the groups and the transport. ``division``: ranks of a replica, in parts that have more."""
        if self.process_group is None or self.reductions is None:
            return
        if division != self._division:
            self._division, mesh = division, Mesh(self._largest, 0, division)
            self.mesh = Mesh(self.size, self.rank, min(division, self.size))
            rows = [mesh.shard_ranks(replica) for replica in range(self._largest // division)]
            columns = [mesh.replica_ranks(shard) for shard in range(division)] if division < self._largest else []
            gathers = self._new_group(self.backend, rows)
            reductions = gathers if one_queue(self.device) else self._new_group(self.backend, rows)
            across = self._new_group(self.backend, columns) if columns else None
            self._row = Groups(self.reductions, gathers, reductions, across)
        kind = "windows" if self._arena is not None else self.backend
        self.topology = choose(topology, self.mesh, self.nodes, kind)
        form = (self.size, self.topology.sizes)
        if len(self._parts) > 1 and len(set(self.world.host_gather(form, "topologies"))) > 1:
            self.topology = Topology((), "groups are not on nodes in the same way")
        common = (
            self.mesh,
            self._row or Groups(self.reductions, self.process_group, self.reductions),
            self.device,
            scatters,
        )
        if self.topology.sizes:
            make, node = partial(self._new_group, self.backend), next(n for n in self.nodes if self.rank in n)
            # The same on all ranks, so that all share memory or none do: sharing is collective.
            nested = whole_nodes(self.nodes) == self.topology.sizes[0]
            arenas = [self._share_memory(node) for _ in range(3)] if nested else []
            shared = [arena for arena in arenas if arena is not None]
            self._transport = Hierarchy(*common, self.watch, self.topology.sizes, make, shared)
        elif self._arena is not None:
            self._transport = SharedMemoryTransport(*common, self.watch, self._arena, self.ranks)
        else:
            self._transport = Gloo(*common, self.watch) if self._gloo else Transport(*common)
        self._sums = self._transport

    def _share_parameters(self, size: int) -> None:
        """Prepare ``all_gather_in_node`` over groups of ``size`` neighbouring ranks. Collective.

        Raises:
            ConfigError: a GPU has one queue for all groups.
        """
        if self.process_group is None or self.reductions is None or size == self.secondary_shards:
            return
        self.secondary_shards, self._in_node = size, None
        if size == 1:
            return
        if one_queue(self.device):
            key = "zero_optimization.zero_hpz_partition_size"
            raise ConfigError([Problem(key, f"{key}={size} {_QUEUE}, or remove the key.")])
        mesh, new_group = Mesh(self.size, self.rank, size), partial(self._new_group, self.backend)
        groups = Groups(self.reductions, self.process_group, self.reductions)
        if self._gloo:
            arena = self._share_memory(mesh.shard_ranks(mesh.replica)) if self.device.type == "cpu" else None
            # One arena serves for all three: this transport only gathers, in one thread.
            arenas = [arena] * 3 if arena is not None else []
            self._in_node = Hierarchy(mesh, groups, self.device, False, self.watch, [size], new_group, arenas)
        else:
            row = new_group([mesh.shard_ranks(replica) for replica in range(self.size // size)])
            self._in_node = Transport(mesh, replace(groups, gathers=row), self.device, False)

    def _tolerate(self, share: float, sharded: bool) -> None:
        """Let sums of gradients go on without late nodes, at most ``share`` of the ranks. Collective.

        Raises:
            ConfigError: that cannot be had.
        """
        if self.process_group is None or self.reductions is None:
            return
        if self.tolerance is not None:
            self.tolerance.end()
        self.tolerance, self._sums = None, self._transport
        if not share:
            return
        ranks, late = tolerance_of(share, sharded, self.mesh, self.nodes, self.backend, self.device)
        mesh, new_group = Mesh(self.size, self.rank, ranks), partial(self._new_group, "gloo")
        node = next(n for n in self.nodes if self.rank in n)
        columns = [mesh.replica_ranks(number) for number in range(ranks)]
        groups = [new_group(columns, FOR_EVER) for _ in range(2)]
        self.tolerance = TolerantSum(groups, mesh, late, partial(_tell_late, mesh, self.world.hosts))
        weakref.finalize(self, self.tolerance.end).atexit = False
        self.world.ends_with_run.add(self.tolerance)
        arenas = [arena for _ in range(3 if ranks > 1 else 0) if (arena := self._share_memory(node)) is not None]
        own = Groups(self.reductions, self.process_group, self.reductions)
        given = mesh, own, self.device, True, self.watch, [ranks], new_group, arenas
        self._sums = TolerantHierarchy(*given, tolerant=self.tolerance)

    def use_quantized_sums(self, codec: Codec, inside: Codec) -> bool:
        """Prepare ``reduce_compressed`` for sums in nodes, encoded with ``inside``, then between them, with ``codec``.

        Returns whether gradients are sent at all. Collective.

        Raises:
            ConfigError: a GPU has one queue for all groups.
        """
        plan = plan_quantized_sums(self.nodes, codec, inside)
        return self._use_compressor(plan, "zero_optimization.zero_quantized_gradients")

    def use_compression(self, codec: Codec, hierarchical: bool) -> bool:
        """Prepare ``reduce_compressed``; returns whether gradients are compressed at all. Collective.

        ``hierarchical``: between nodes only, of which there may be one.

        Raises:
            ConfigError: the ranks do not form nodes, or a GPU has one queue for all groups.
        """
        key, plan = "gradient_compression.hierarchical_compress", plan_compression(self.nodes, codec, hierarchical)
        if plan is not None and hierarchical and whole_nodes(self.nodes) is None:
            sizes = ", ".join(str(len(node)) for node in self.nodes)
            text = f"{key}=true needs nodes of equally many, neighbouring ranks; they have {sizes}: write false."
            raise ConfigError([Problem(key, text)])
        return self._use_compressor(plan, "gradient_compression.algorithm")

    def _use_compressor(self, plan: CompressionPlan | None, key: str) -> bool:
        if self.process_group is None or plan is None:
            return False
        if one_queue(self.device):
            raise ConfigError([Problem(key, f"{key} {_QUEUE}, or remove the key.")])
        if self.compressor is None or self.compressor.plan != plan:
            new_group = partial(self._new_group, self.backend, exchanges=True)
            self.compressor = Compressor(plan, self.rank, self.device, self.watch, new_group)
        return True

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
            self._background = self._new_group(self.backend, rows)
            self.log.ended(opened)

    @property
    def gathers_in_threads(self) -> bool:
        """True if ``background_gather`` may run in the background thread.

        A GPU runs the collectives of several groups in the order of their launches. If a thread launched some, the
        order would differ from rank to rank, and they could wait for each other for ever.
        """
        return self._gloo or self.process_group is None

    def background_gather(self, flat: Tensor, codec: Codec | None = None) -> Work:
        """Fill ``flat`` after a background step, as ``all_gather``, or with ``codec`` as ``all_gather_encoded``, does.

        In the same order on all ranks.

        Not compared in debug mode, as the order does not depend on the model.
        """
        if self.process_group is None:
            return Done()
        opened = self.log.open("all_gather", "background", flat.nbytes)
        gather = partial(self._transport.all_gather, own=None, launch=None, group=self._background)
        work = gather(flat) if codec is None else gather_encoded(flat, self.mesh, codec, gather)
        return self.log.follow(opened, work)

    def background_fence(self) -> Work:
        """Wait, in the background thread, until all ranks have written their windows."""
        if self._arena is None:
            return Done()
        opened = self.log.open("barrier", "background", 0)
        work = WorkList([dist.barrier(self._background, async_op=True)], None, self.watch if self._gloo else None)
        return self.log.follow(opened, work)

    # ---- windows: see shared_memory.py, Note [Shared windows] -------------------------------------------------------

    @property
    def shares_memory(self) -> bool:
        return self._arena is not None

    @property
    def gathers_in_background(self) -> bool:
        """True if all-gathers overlap with computation; reading a peer's memory does not."""
        return self.process_group is not None and self._transport.overlaps

    @property
    def sums_wide(self) -> bool:
        """True if ``reduce_scatter`` adds in the dtype of ``out``, whatever the dtype in which gradients are sent."""
        return self.process_group is None or self._sums.sums_wide

    @property
    def sums_replicas_apart(self) -> bool:
        """True if ``reduce_scatter`` may leave the sums over replicas to ``sum_replicas``."""
        return self.process_group is not None and self._sums.sums_apart

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
        """A 1D tensor for the life of a run, in shared memory if possible; in the same order on all ranks."""
        if self._arena is not None:
            return self._arena.allocate(numel, dtype)
        return flat_empty(numel, dtype, self.device)

    def allocate_written(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor as from ``allocate``, which the caller writes before the next gather."""
        self.after_write()
        return self.allocate(numel, dtype)

    def send_buffers(self, largest: Mapping[torch.dtype, int]) -> SendBuffers:
        """Buffers for reductions, reusable up to the ``largest`` elements of each dtype."""
        transport = self._sums if self.process_group is not None else None
        return SendBuffers(transport, self.device, lambda dtype: self.factors(dtype)[0], largest)

    @property
    def sends(self) -> SendSizes:
        """The buffers that reductions need."""
        return self._sums.sends if self.process_group is not None else BACKEND

    def before_write(self) -> None:
        """Wait until no rank reads a tensor from ``allocate``. Call it before writing to one."""
        if self._read:
            self.fence()

    def after_write(self) -> None:
        """Let the next reader wait until all have written. Call it after writing to a tensor from ``allocate``."""
        self._written = self._arena is not None

    def fence(self) -> None:
        """A barrier of the group."""
        self._written = self._read = False
        if self._arena is not None:
            opened = self.log.open("barrier", "shared memory", 0, host=True)
            self.order.launch(FENCE, "shared memory", 0, compare=True)
            self.log.ended(opened)

    def all_gather(self, flat: Tensor, name: str, own: Tensor | None = None) -> Work:
        """Fill ``flat`` (1D, ``mesh.shards`` equal shards) from the ranks' shards, which are in place already.

        ``own``: this rank's shard; if it is from ``allocate``, peers read it there.
        """
        self._require_device(flat, name)
        if self.process_group is None:
            return Done()
        shared = self._transport.shares(own)
        opened = self.log.open("all_gather", name, flat.nbytes)
        # Peers are read in place, so all must have written their windows.
        if shared and self._written:
            self.fence()
        launch = self.order.launch("all-gather", name, flat.numel())
        # From here on ``before_write`` waits for all ranks before a window is written again.
        self._read |= shared
        return self.log.follow(opened, self._transport.all_gather(flat, own, launch))

    def all_gather_encoded(self, flat: Tensor, name: str, codec: Codec, own: Tensor | None = None) -> Work:
        """``all_gather`` of encoded shards: all ranks, the owner too, get the decoded values.

        Where ranks share memory, codes are sent between processes all the same. ``own``: this rank's shard, encoded.
        """
        self._require_device(flat, name)
        if self.process_group is None:
            return Done() if own is None else gather_encoded(flat, self.mesh, codec, lambda codes: Done(), own)
        opened = self.log.open("all_gather", name, flat.nbytes)
        launch = self.order.launch("encoded all-gather", name, flat.numel())
        gather = partial(self._transport.all_gather, own=None, launch=launch)
        return self.log.follow(opened, gather_encoded(flat, self.mesh, codec, gather, own))

    def all_gather_in_node(self, flat: Tensor, name: str) -> Work:
        """Fill ``flat`` (1D) from the parts of the ranks with a second copy together, which are in place already."""
        self._require_device(flat, name)
        assert self._in_node is not None
        opened = self.log.open("all_gather", name, flat.nbytes)
        launch = self.order.launch("all-gather in the node", name, flat.numel())
        return self.log.follow(opened, self._in_node.all_gather(flat, None, launch))

    def reduce_scatter(
        self, out: Tensor, send: SendBuffer, add: bool, name: str, replicas: Replicas = Replicas.SENT
    ) -> Work:
        """Average ``send`` (``mesh.shards`` shards) over all ranks; write this rank's shard to ``out``, or add it.

        ``send`` must not be used until the wait, after which it is undefined. If ``sums_wide``, it may have a narrower
        dtype than ``out``: the sum is as exact as if it had been cast before. ``replicas``: what is summed over them;
        other than ``SENT`` where ``sums_replicas_apart``.
        """
        flat, after = send.flat, self.factors(send.flat.dtype)[1]
        self._require_device(flat, name)
        if self.process_group is None:
            return WorkList([], lambda: store(out, flat, add, after))
        opened = self.log.open("reduce_scatter", name, flat.nbytes)
        launch = self.order.launch_reduction("reduce-scatter", name, flat.numel())
        reduction = Reduction(out, flat, send.scratch, add, after, replicas)
        return self.log.follow(opened, self._sums.reduce_scatter(reduction, launch))

    def sum_replicas(self, out: Tensor, dtype: torch.dtype, name: str) -> Work:
        """Sum ``out`` (1D, a shard) over the replicas, in place, after reductions that summed ``NOTHING`` over them.

        ``dtype``: in which it is sent, unless the transport ``sums_wide``.
        """
        self._require_device(out, name)
        opened = self.log.open("all_reduce", name, out.nbytes)
        launch = self.order.launch_reduction("sum over replicas", name, out.numel())
        return self.log.follow(opened, self._sums.sum_replicas(out, dtype, launch))

    def all_reduce(self, out: Tensor, send: SendBuffer, add: bool, name: str) -> Work:
        """Average ``send`` (one equal part per rank) over the ranks, and write all of it to ``out``, or add it."""
        flat, after = send.flat, self.factors(send.flat.dtype)[1]
        self._require_device(flat, name)
        if self.process_group is None:
            return WorkList([], lambda: store(out, flat, add, after))
        opened = self.log.open("all_reduce", name, flat.nbytes)
        launch = self.order.launch_reduction("all-reduce", name, flat.numel())
        reduction = Reduction(out, flat, send.scratch, add, after)
        return self.log.follow(opened, self._sums.all_reduce(reduction, launch))

    def reduce_compressed(self, out: Tensor, flat: Tensor, residuals: Residuals, add: bool, name: str) -> Work:
        """``all_reduce``, or without ``residuals.server`` ``reduce_scatter``, of compressed gradients."""
        after = self.factors(flat.dtype)[1]
        self._require_device(flat, name)
        assert self.compressor is not None
        opened = self.log.open("reduce_scatter" if residuals.server is None else "all_reduce", name, flat.nbytes)
        launch = self.order.launch_reduction("compressed reduction", name, flat.numel())
        return self.log.follow(opened, self.compressor.reduce(out, flat, residuals, add, after, launch))

    def measure_rate(self) -> float:
        """Bytes per second of this rank to others while all ranks send. Collective."""
        assert self.compressor is not None
        return self.compressor.measure_rate(self.order.launch_reduction("exchange", "rate of links", 0))

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


def _tell_late(mesh: Mesh, hosts: Sequence[str], member: int, late: bool) -> None:
    """Log that a member is late, or on time again. No method: ``TolerantSum`` keeps this, not the group."""
    # One rank logs, of another member than the late one, which may not come to this for long.
    if mesh.rank == (0 if member else mesh.world - 1) // mesh.shards * mesh.shards:
        ranks = mesh.shard_ranks(member)
        text = "is late: sums of gradients go on without it, and get its contributions later" if late else "is on time"
        log.warning("Node %s (rank %s) %s.", hosts[ranks[0]], ", ".join(map(str, ranks)), text)
