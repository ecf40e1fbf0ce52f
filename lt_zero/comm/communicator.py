"""Every collective of the engine, as launch/wait pairs. How tensors are moved: transport.py.

Note [Order of launches]
    Ranks must launch the same collectives in the same order. Nothing in this file reorders; the callers launch in an
    order that depends only on the module and the recorded schedule, not on data (grad_bucket.py, gather.py).
    When a bucket's gradients are complete, relative to the gathers around it, does depend on data: a rank whose router
    skipped an expert reduces later. So reductions have their own process group and their own numbers. (One group with
    ``CUDA_DEVICE_MAX_CONNECTIONS=1``, where a second one could only deadlock with the first.) A user's module
    may break the rule, so it is checked: work.py, Note [Unforeseen collectives].
"""

from __future__ import annotations

import io
import logging
import pickle
import socket
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.comm.agreement import Agreement
from lt_zero.comm.compression import Compressor, Residuals, gather_encoded
from lt_zero.comm.ended_ranks import debugs, summary, user_line
from lt_zero.comm.hang_detection import HangDetector
from lt_zero.comm.hierarchy import Hierarchy
from lt_zero.comm.launchers import refuse_alone
from lt_zero.comm.process_groups import LINK_TIMEOUT_S, await_all, exists, new_group, one_queue, with_index
from lt_zero.comm.shared_memory import FENCES, Barrier, SharedArena, store, supported
from lt_zero.comm.tolerance import FOR_EVER, TolerantHierarchy, TolerantSum, tolerance_of
from lt_zero.comm.topology import choose, group_by_node, node_identity, whole_nodes
from lt_zero.comm.transport import Gloo, Groups, Mesh, Transport, Windows
from lt_zero.comm.work import CALL, FENCE, MEETING, All, Done, Launch, Watch, Work
from lt_zero.common.errors import ConfigError, Problem
from lt_zero.common.flat_storage import flat_empty
from lt_zero.common.module_hooks import ProcessLocal
from lt_zero.config import ZeroConfig
from lt_zero.ops.codecs import Codec

log = logging.getLogger("lt_zero")
_P = ParamSpec("_P")
_T = TypeVar("_T")

_QUEUE = "needs process groups beside the others, which CUDA_DEVICE_MAX_CONNECTIONS=1 does not allow: unset it"
_unused: list[list[dist.ProcessGroup]] = []  # of communicators that are gone


class Comm(ProcessLocal):
    """The collectives of one data-parallel group.

    Args:
        group: the engine's process group; None: a single process without one.
        reductions: a second group over the same ranks, for gradients. See Note [Order of launches].
        device: device of the buckets.
        check: compare each collective before its launch, including reductions (debug mode).
        timeout: of the groups that are made later; None: torch's default for the backend.
        link_timeout: ``communication.link_timeout``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        reductions: dist.ProcessGroup | None,
        device: torch.device,
        check: bool = False,
        timeout: timedelta | None = None,
        link_timeout: float = LINK_TIMEOUT_S,
    ) -> None:
        self.device = with_index(device)
        self.sum_gradients = False  # gradient_allreduce_op: sum
        self.predivide: float | None = None  # gradient_predivide_factor, or the world size for prescale_gradients
        self._group, self._reductions = group, reductions
        self._timeout, self.link_timeout = timeout, link_timeout
        self._groups = [made for made in (group, reductions) if made is not None]
        self.world = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self._gloo = group is not None and dist.get_backend(group) == "gloo"
        # Exchanges of host data (used parameters, orders) must not synchronise the GPU.
        self._host = group
        # A simulated group (torch's "fake" backend) has no other processes; results are this process's values.
        if group is not None and dist.get_backend(group) not in ("gloo", "fake"):
            self._host = self._new_group("gloo")
        self._checked = self._new_group("gloo") if check and self._host is not group else reductions
        self._check = check
        self._comparisons = 0
        self._watch = Watch()
        self._hang_detector: HangDetector | None = None
        self.agreement = Agreement()  # of a single rank; ``for_world`` sets that of the group
        self._background: dist.ProcessGroup | None = None  # see ``allow_background``
        self.unpublished: deque[Any] = deque()  # buckets of a background step, in the order of their gathers
        self._saving: dist.ProcessGroup | None = None  # see ``saving_group``
        self._arena: SharedArena | None = None
        self._written = self._read = False  # windows were written, or read, since the last fence
        self.mesh = Mesh(self.world, self.rank, self.world)
        self.nodes = [list(range(self.world))]  # the ranks of each node
        self.hosts = [socket.gethostname()] * self.world  # the name of each rank's host
        self._row: Groups | None = None  # groups over parts of the ranks
        self._configured: tuple[Any, ...] | None = None
        self.compressor: Compressor | None = None
        self._compresses: tuple[Any, ...] | None = None  # what ``compressor`` was made for
        self.secondary_shards = 1  # ranks that share the second copy of parameters; 1: there is none
        self._in_node: Transport | None = None  # between them
        self._transport: Transport
        self._sums: Transport  # for gradients
        self.tolerance: TolerantSum | None = None  # communication.slow_node_tolerance
        self._choose(self.world, "auto", True)

    @classmethod
    def for_world(
        cls,
        device: torch.device,
        config: ZeroConfig | None = None,
        timeout: timedelta | None = None,
        node: int | None = None,
    ) -> Comm:
        """A communicator over all ranks of the default process group, with a process group of its own.

        ``config``: says how its connections are made and whether collectives are compared, which ``LT_ZERO_DEBUG=1``
        says, too. ``timeout``: as for the class. ``node``: the number of this rank's node, as the launcher knows it;
        ``LT_ZERO_NODE_RANK`` takes precedence.

        Raises:
            RuntimeError: the launcher has started more tasks than the group has ranks, see launchers.py.

        Lightning issues collectives on the default group between batches and swallows their errors; this package's
        collectives on the same group could then be matched with them.
        """
        grouped = dist.is_available() and dist.is_initialized()
        refuse_alone(dist.get_world_size() if grouped else 1)
        if not grouped or dist.get_world_size() == 1:
            return cls(None, None, device)
        check = debugs() or (config is not None and config.zero_optimization.enable_sanity_checks)
        patience = config.communication.link_timeout if config is not None else LINK_TIMEOUT_S
        await_all(timeout)
        make = partial(new_group, None, timeout, None, device, link_timeout=patience)
        groups = [make(probed=index == 0) for index in range(1 if one_queue() else 2)]
        groups = [groups[0], groups[-1]]
        comm = cls(groups[0], groups[1], device, check, timeout, patience)
        assert comm._host is not None
        if dist.get_backend(comm._host) == "gloo":  # not a simulated group
            comm._hang_detector = HangDetector(groups, comm._host, comm._watch, patience)
            comm.agreement = comm._hang_detector.agreement
            places = comm.host_gather((node_identity(node), socket.gethostname()), "nodes")
            comm.nodes = group_by_node([identity for identity, _ in places])
            comm.hosts = comm._hang_detector.ends.hosts = [host for _, host in places]
        if comm._gloo and device.type == "cpu":
            comm._arena = comm._share_memory(range(comm.world))
            comm._choose(comm.world, "auto", True)
        comm._destroy_unused()
        return comm

    def _destroy_unused(self) -> None:
        """Destroy the groups of communicators that are gone on all ranks: those of NCCL hold 100s of MB. Collective."""
        weakref.finalize(self, _unused.append, self._groups).atexit = False
        _unused[:] = [groups for groups in _unused if exists(groups[0])]  # others ended with their default group
        named = {tuple(group.group_name for group in groups): groups for groups in list(_unused)}
        everywhere = self.host_gather(list(named), "unused groups")
        for names in everywhere[0]:  # in the same order on all ranks, as NCCL may wait for the others
            if all(names in of_rank for of_rank in everywhere):
                _unused.remove(named[names])
                for group in reversed(named[names]):
                    with suppress(ValueError):  # the default group, and all with it, was destroyed since
                        dist.destroy_process_group(group)

    def _new_group(
        self, backend: str, parts: Sequence[Sequence[int]] | None = None, timeout: timedelta | None = None
    ) -> dist.ProcessGroup:
        """Another process group over the same ranks, or over that of ``parts`` which has this rank. Collective."""
        assert self._group is not None
        mine: list[dist.ProcessGroup] = []
        ranks = dist.get_process_group_ranks(self._group)
        for part in parts or [range(self.world)]:
            members = [ranks[rank] for rank in part]
            inside, patience = self.rank in part, self.link_timeout
            group = new_group(members, timeout or self._timeout, backend, self.device, inside, link_timeout=patience)
            mine += [group] if self.rank in part else []
        self._groups += mine
        return mine[0]

    def configure(self, config: ZeroConfig) -> None:
        """Use the configuration's shard groups, topology and reductions. Before anything is sharded. Collective.

        Raises:
            ConfigError: they do not fit the ranks.
        """
        zero = config.zero_optimization
        self.sum_gradients = config.gradient_allreduce_op == "sum"
        self.predivide = None
        if config.prescale_gradients:  # many files set gradient_predivide_factor=1 beside it
            self.predivide = float(self.world)
        elif config.gradient_predivide_factor != 1.0:
            self.predivide = config.gradient_predivide_factor
        wanted = (zero.shards(self.world), config.communication.topology, zero.reduce_scatter)
        if wanted != self._configured:
            self._choose(*wanted)
            self._configured = wanted
            if self.rank == 0 and self._group is not None and len(self.nodes) > 1:
                log.info("Collectives over %d nodes: %s.", len(self.nodes), self.topology.why)
        self._share_parameters(zero.secondary_shards(self.world))
        self._tolerate(config.communication.slow_node_tolerance, zero.stage > 0)

    def _choose(self, shards: int, topology: str | int, scatters: bool) -> None:
        """Make the groups and the transport."""
        if self._group is None or self._reductions is None:
            return
        backend = dist.get_backend(self._group)
        if shards != self.mesh.shards:
            self.mesh = mesh = Mesh(self.world, self.rank, shards)
            rows = [mesh.row(replica) for replica in range(self.world // shards)]
            columns = [mesh.column(shard) for shard in range(shards)] if shards < self.world else []
            gathers = self._new_group(backend, rows)
            reductions = gathers if one_queue() else self._new_group(backend, rows)
            across = self._new_group(backend, columns) if columns else None
            self._row = Groups(self._reductions, gathers, reductions, across)
        kind = "windows" if self._arena is not None else backend
        self.topology = choose(topology, self.mesh, self.nodes, kind)
        common = (
            self.mesh,
            self._row or Groups(self._reductions, self._group, self._reductions),
            self.device,
            scatters,
        )
        if self.topology.sizes:
            make, node = partial(self._new_group, backend), next(n for n in self.nodes if self.rank in n)
            nested = whole_nodes(self.nodes) == self.topology.sizes[0]  # the same on all ranks
            arenas = [self._share_memory(node) for _ in range(3)] if nested else []
            shared = [arena for arena in arenas if arena is not None]
            self._transport = Hierarchy(*common, self._watch, self.topology.sizes, make, shared)
        elif self._arena is not None:
            self._transport = Windows(*common, self._watch, self._arena)
        else:
            self._transport = Gloo(*common, self._watch) if self._gloo else Transport(*common)
        self._sums = self._transport

    def _share_parameters(self, size: int) -> None:
        """Prepare ``all_gather_in_node`` over groups of ``size`` neighbouring ranks. Collective.

        Raises:
            ConfigError: a GPU has one queue for all groups.
        """
        if self._group is None or self._reductions is None or size == self.secondary_shards:
            return
        self.secondary_shards, self._in_node = size, None
        if size == 1:
            return
        if one_queue():
            key = "zero_optimization.zero_hpz_partition_size"
            raise ConfigError([Problem(key, f"{key}={size} {_QUEUE}, or remove the key.")])
        mesh, new_group = Mesh(self.world, self.rank, size), partial(self._new_group, dist.get_backend(self._group))
        groups = Groups(self._reductions, self._group, self._reductions)
        if self._gloo:
            arena = self._share_memory(mesh.row(mesh.replica)) if self.device.type == "cpu" else None
            arenas = [arena] * 3 if arena is not None else []  # it gathers only, in one thread
            self._in_node = Hierarchy(mesh, groups, self.device, False, self._watch, [size], new_group, arenas)
        else:
            row = new_group([mesh.row(replica) for replica in range(self.world // size)])
            self._in_node = Transport(mesh, replace(groups, gathers=row), self.device, False)

    def _tolerate(self, share: float, sharded: bool) -> None:
        """Let sums of gradients go on without late nodes, at most ``share`` of the ranks. Collective.

        Raises:
            ConfigError: that cannot be had.
        """
        if self._group is None or self._reductions is None:
            return
        if self.tolerance is not None:
            self.tolerance.end()
        self.tolerance, self._sums = None, self._transport
        if not share:
            return
        backend = dist.get_backend(self._group)
        ranks, late = tolerance_of(share, sharded, self.mesh, self.nodes, backend, self.device)
        mesh, new_group = Mesh(self.world, self.rank, ranks), partial(self._new_group, "gloo")
        node = next(n for n in self.nodes if self.rank in n)
        columns = [mesh.column(number) for number in range(ranks)]
        groups = [new_group(columns, FOR_EVER) for _ in range(2)]
        self.tolerance = TolerantSum(groups, mesh, late, partial(_tell_late, mesh, self.hosts))
        weakref.finalize(self, self.tolerance.end).atexit = False
        arenas = [arena for _ in range(3 if ranks > 1 else 0) if (arena := self._share_memory(node)) is not None]
        own = Groups(self._reductions, self._group, self._reductions)
        given = mesh, own, self.device, True, self._watch, [ranks], new_group, arenas
        self._sums = TolerantHierarchy(*given, tolerant=self.tolerance)

    def use_quantized_sums(self, codec: Codec, inside: Codec) -> bool:
        """Prepare ``reduce_compressed`` for sums in nodes, encoded with ``inside``, then between them, with ``codec``.

        Returns whether gradients are sent at all. Collective.

        Raises:
            ConfigError: a GPU has one queue for all groups.
        """
        nested = len(self.nodes) > 1 and (whole_nodes(self.nodes) or 1) > 1
        if nested:
            return self._use_compressor(codec, True, inside, "zero_optimization.zero_quantized_gradients")
        one = inside if len(self.nodes) == 1 else codec
        return self._use_compressor(one, False, None, "zero_optimization.zero_quantized_gradients")

    def use_compression(self, codec: Codec, hierarchical: bool) -> bool:
        """Prepare ``reduce_compressed``; returns whether gradients are compressed at all. Collective.

        ``hierarchical``: between nodes only, of which there may be one.

        Raises:
            ConfigError: the ranks do not form nodes, or a GPU has one queue for all groups.
        """
        nodes, key = self.nodes, "gradient_compression.hierarchical_compress"
        if hierarchical and len(nodes) == 1:
            return False
        if hierarchical and whole_nodes(nodes) is None:
            sizes = ", ".join(str(len(node)) for node in nodes)
            text = f"{key}=true needs nodes of equally many, neighbouring ranks; they have {sizes}: write false."
            raise ConfigError([Problem(key, text)])
        return self._use_compressor(codec, hierarchical, None, "gradient_compression.algorithm")

    def _use_compressor(self, codec: Codec, hierarchical: bool, inside: Codec | None, key: str) -> bool:
        if self._group is None or self.world == 1:
            return False
        if one_queue():
            raise ConfigError([Problem(key, f"{key} {_QUEUE}, or remove the key.")])
        wanted = (codec, hierarchical, inside)
        if self._compresses != wanted:
            new_group = partial(self._new_group, dist.get_backend(self._group))
            inner = (whole_nodes(self.nodes) or 1) if len(self.nodes) > 1 else 1
            given = (self.world, self.rank, self.device, self._watch)
            self.compressor = Compressor(*given, codec, inner, hierarchical, new_group, inside)
            self._compresses = wanted
        return True

    # ---- operations of all ranks -----------------------------------------------------------------------------------

    def roll_call(self, what: str) -> None:
        """Wait until every rank has called this for ``what``, an operation of all ranks. Collective.

        Raises:
            RuntimeError: a rank never will, or called it for another operation. No collective works afterwards.
        """
        if self._hang_detector is None:
            return
        self._hang_detector.refuse_fork(what)
        try:
            self._announce(CALL, what, 0, compare=True)
        except RuntimeError as error:
            if self._watch.verdict is not None or not (ended := self._hang_detector.ends.ended()):
                raise
            raise RuntimeError(
                f"`{what}` was called on rank {self.rank} ({user_line(sys._getframe())}) and not on"
                f" {', '.join(f'rank {rank}' for rank in ended)}, which has ended or left the process group."
            ) from error

    def meet(self, where: str) -> None:
        """Wait until every rank has come to this point of the run: "the end of training". Collective.

        Raises:
            RuntimeError: a rank never will, as it has another number of batches.
        """
        if self._hang_detector is not None:
            self._announce(MEETING, where, 0, compare=True)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Context for an operation of all ranks: an error that ends it on one rank ends it on all, and is named there.

        For errors that a rank cannot tell at a point where all meet: of a file, or of a user's function.
        """
        ends = self._hang_detector.ends if self._hang_detector is not None else None
        if ends is None:
            yield
            return
        ends.begin(what)
        depth = len(ends.scopes)
        try:
            yield
        except BaseException as error:
            self.post_error(error)
            raise
        finally:
            del ends.scopes[depth - 1 :]

    def begin_run(self) -> None:
        """Begin a run: answer other ranks' questions, and take part in ``agreement``. On all ranks."""
        if self._hang_detector is not None:
            self._hang_detector.begin_run()
        self.agreement.begin()

    def end_run(self) -> None:
        """End the run on this rank, and its thread; the next operation of all ranks starts it again."""
        with suppress(RuntimeError):  # the process that serves the store has ended
            self.agreement.end()
            if self._hang_detector is not None:
                self._hang_detector.ends.end_run()
        if self.tolerance is not None:
            self.tolerance.end()
        if self._hang_detector is not None:
            self._hang_detector.stop()

    def explain(self, error: BaseException) -> bool:
        """Add the cause (a hang, or the end of another rank) to an error's text; returns whether it is known."""
        return self._hang_detector is not None and self._hang_detector.explain(error)

    def post_error(self, error: BaseException) -> None:
        """Before an error ends the run on this rank: explain it, or tell the ranks that fail because of it."""
        if self._hang_detector is not None and not self._hang_detector.explain(error):
            self._hang_detector.ends.tell(True, summary(error))

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Context for torch's blocking collectives: explains their errors."""
        try:
            yield
        except RuntimeError as error:
            self.explain(error)
            raise

    # ---- in the background ---------------------------------------------------------------------------------------

    def allow_background(self) -> None:
        """Make a process group for the background thread (background.py). Collective.

        Raises:
            ConfigError: a GPU has one queue for all groups, where ranks that launch in different orders deadlock.
        """
        if self._group is not None and self._background is None:
            if one_queue():
                key = "zero_optimization.offload_optimizer.overlap_step"
                text = "needs collectives beside each other, which CUDA_DEVICE_MAX_CONNECTIONS=1 does not allow"
                raise ConfigError([Problem(key, f"{key}=true {text}: unset it, or set overlap_step='auto'.")])
            rows = [self.mesh.row(replica) for replica in range(self.world // self.mesh.shards)]
            self._background = self._new_group(dist.get_backend(self._group), rows)

    def saving_group(self, background: bool) -> dist.ProcessGroup | None:
        """The process group for saving; None in a single process. Collective.

        ``background``: a group of its own, for a thread that saves during training.
        """
        if self._group is not None and background and self._saving is None:
            self._saving = self._new_group("gloo")
        return self._saving if background else self._host

    def leave_saving_group(self) -> None:
        """Let the next background save make a new group."""
        self._saving = None

    @property
    def gathers_in_threads(self) -> bool:
        """Whether ``background_gather`` may run in the background thread.

        A GPU runs the collectives of several groups in the order of their launches. If a thread launched some, the
        order would differ from rank to rank, and they could wait for each other for ever.
        """
        return self._gloo or self._group is None

    def background_gather(self, flat: Tensor, codec: Codec | None = None) -> Work:
        """After a background step: fill ``flat`` as ``all_gather`` does, or with ``codec`` as ``all_gather_encoded``.

        In the same order on all ranks.

        Not compared in debug mode, as the order does not depend on the model.
        """
        if self._group is None:
            return Done()
        gather = partial(self._transport.all_gather, own=None, launch=None, group=self._background)
        return gather(flat) if codec is None else gather_encoded(flat, self.mesh, codec, gather)

    def background_fence(self) -> Work:
        """In the background thread: wait until all ranks have written their windows."""
        if self._arena is None:
            return Done()
        return All([dist.barrier(self._background, async_op=True)], None, self._watch if self._gloo else None)

    # ---- windows: see shared_memory.py, Note [Shared windows] -------------------------------------------------------

    def _share_memory(self, ranks: Sequence[int]) -> SharedArena | None:
        """Windows that ``ranks``, of which this is one, read; None if some cannot, on any host. Collective."""
        arena = SharedArena(self._timeout) if supported() else None
        addresses = self.host_gather(arena.address() if arena else None, "shared memory")
        connects = arena is not None and arena.connect(self.rank, addresses, ranks)
        return arena if all(self.host_gather(connects, "shared memory")) else None

    @property
    def shares_memory(self) -> bool:
        return self._arena is not None

    @property
    def gathers_in_background(self) -> bool:
        """Whether all-gathers overlap with computation; reading a peer's memory does not."""
        return self._group is not None and self._transport.overlaps

    @property
    def alone(self) -> bool:
        """Whether there is one rank, and no group."""
        return self._group is None and self.world == 1

    @property
    def sums_wide(self) -> bool:
        """Whether ``reduce_scatter`` adds in the dtype of ``out``, in whatever dtype gradients are sent."""
        return self._group is None or self._sums.sums_wide

    def factors(self, wire: torch.dtype) -> tuple[float, float]:
        """Factors of gradients sent as ``wire``, before and after the sum.

        A sum in fp16 can exceed 65504 although the mean does not, so it is divided before; bf16 has fp32's range.
        """
        divisor = 1.0 if self.sum_gradients else float(self.world)
        before = self.predivide
        if before is None:
            before = divisor if wire == torch.float16 and not self.sums_wide else 1.0
        return 1.0 / before, before / divisor

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1D tensor for the life of a run, in shared memory if possible; in the same order on all ranks."""
        if self._arena is not None:
            return self._arena.allocate(numel, dtype)
        return flat_empty(numel, dtype, self.device)

    @property
    def shares_sends(self) -> bool:
        """Whether peers read buffers for reductions where they are, so that no scratch memory is needed."""
        return self._group is not None and self._sums.sends_from() is not None

    @property
    def send_buffers(self) -> int:
        """How many buffers for reductions take turns; two reductions are in flight."""
        return self._sums.send_buffers if self._group is not None else 2

    def allocate_send(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer (1D) for reductions, for the life of a run; in the same order on all ranks."""
        arena = self._sums.sends_from() if self._group is not None else None
        return arena.allocate(numel, dtype) if arena is not None else flat_empty(numel, dtype, self.device)

    def before_write(self) -> None:
        """Before writing to a tensor from ``allocate``: wait until no rank reads it."""
        if self._read:
            self.fence()

    def after_write(self) -> None:
        """After writing to a tensor from ``allocate``: the next reader waits until all ranks have written."""
        self._written = self._arena is not None

    def fence(self) -> None:
        """A barrier of the engine's group."""
        self._written = self._read = False
        if self._arena is not None:
            self._announce(FENCE, "shared memory", 0, compare=True)

    def _announce(
        self, operation: str, name: str, numel: int, channel: str = "collective", compare: bool = False
    ) -> Launch:
        """Number the collective that is launched next, and compare it over the ranks if it was not predicted.

        Raises:
            RuntimeError: ranks diverge, see Note [Unforeseen collectives].
        """
        self._watch.raise_verdict()
        if self._hang_detector is not None:
            self._hang_detector.go_on()
        launch, predicted = self._watch.channels[channel].launch(operation, name, numel)
        if self._check or compare or not (predicted or channel == "reduction"):
            self._compare(launch)
        return launch

    def _compare(self, launch: Launch) -> None:
        """Compare the ranks' collectives up to ``launch``; a barrier."""
        mine, group = self._watch.channels[launch.channel].checksum, self._host
        if self._hang_detector is None or group is None:
            return
        if launch.channel == "reduction":
            group = self._checked
        if self._arena is not None and launch.channel == "collective":
            self._comparisons += 1
            self._arena.post(self._comparisons % 2, mine)
            self._watch.wait(Barrier(self._arena, FENCES), launch)
            checksums = self._arena.posted(self._comparisons % 2)
        else:
            rows = [torch.empty(1, dtype=torch.int64) for _ in range(self.world)]
            self._watch.wait(dist.all_gather(rows, torch.tensor([mine]), group=group, async_op=True), launch)
            checksums = [int(row) for row in rows]
        if any(checksum != mine for checksum in checksums):
            self._hang_detector.raise_divergence(launch)

    def foresee_broadcasts(self, tensors: Iterable[tuple[str, int]]) -> None:
        """Compare the broadcasts that follow, (name, elements), at once, not each before its launch. Collective.

        If ranks expect different ones, or launch other collectives in between, these are compared as always.
        """
        if self._group is None:
            return
        labels = [("broadcast", name, numel) for name, numel in tensors]
        mine = zlib.crc32(repr(labels).encode())
        extremes = torch.tensor([mine, -mine])
        self.host_max(extremes, "broadcasts to come").wait()  # the maximum, and the negative minimum
        if not extremes.sum():
            self._watch.channels["collective"].foresee(labels)

    def _require_device(self, tensor: Tensor, name: str) -> None:
        """Raise for a tensor on another device. A GPU's backend would raise, too, but tests on the CPU have none."""
        if tensor.device.type != self.device.type:
            raise RuntimeError(
                f"A collective for {name!r} got a tensor on {tensor.device}, its group is of {self.device}."
            )

    def _wait(self, work: Any, launch: Launch) -> None:
        if work is not None:  # None: the backend has waited
            self._watch.wait(work, launch)

    def _peer(self, rank: int) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, rank)

    def all_gather(self, flat: Tensor, name: str, own: Tensor | None = None) -> Work:
        """Fill ``flat`` (1D, ``mesh.shards`` equal shards) from the ranks' shards, which are in place already.

        ``own``: this rank's shard; if it is from ``allocate``, peers read it there.
        """
        self._require_device(flat, name)
        if self._group is None:
            return Done()
        shared = self._transport.shares(own)
        if shared and self._written:
            self.fence()
        launch = self._announce("all-gather", name, flat.numel())
        self._read |= shared
        return self._transport.all_gather(flat, own, launch)

    def all_gather_encoded(self, flat: Tensor, name: str, codec: Codec, own: Tensor | None = None) -> Work:
        """``all_gather`` of encoded shards: all ranks, the owner too, get what is decoded.

        Where ranks share memory, codes are sent between processes all the same. ``own``: this rank's shard, encoded.
        """
        self._require_device(flat, name)
        if self._group is None:
            return Done() if own is None else gather_encoded(flat, self.mesh, codec, lambda codes: Done(), own)
        launch = self._announce("encoded all-gather", name, flat.numel())
        gather = partial(self._transport.all_gather, own=None, launch=launch)
        return gather_encoded(flat, self.mesh, codec, gather, own)

    def all_gather_in_node(self, flat: Tensor, name: str) -> Work:
        """Fill ``flat`` (1D) from the parts of the ranks with a second copy together, which are in place already."""
        self._require_device(flat, name)
        assert self._in_node is not None
        launch = self._announce("all-gather in the node", name, flat.numel())
        return self._in_node.all_gather(flat, None, launch)

    def scratch_numel(self, numel: int) -> int:
        """Elements of scratch that ``reduce_scatter`` and ``all_reduce`` need for a flat tensor of ``numel``."""
        return self._sums.scratch_numel(numel) if self._group is not None else 0

    def reduce_scatter(self, out: Tensor, flat: Tensor, scratch: Tensor, add: bool, name: str) -> Work:
        """Average ``flat`` (1D, ``mesh.shards`` shards) over all ranks; write this rank's shard to ``out``, or add it.

        The caller has multiplied by the first of ``factors``. ``flat`` and ``scratch`` (``scratch_numel`` elements)
        must not be used until the wait, after which both are undefined. If ``sums_wide``, ``flat`` may have a narrower
        dtype than ``out``: the sum is as exact as if it had been cast before.
        """
        after = self.factors(flat.dtype)[1]
        self._require_device(flat, name)
        if self._group is None:
            return All([], lambda: store(out, flat, add, after))
        launch = self._announce("reduce-scatter", name, flat.numel(), "reduction")
        return self._sums.reduce_scatter(out, flat, scratch, add, after, launch)

    def all_reduce(self, out: Tensor, flat: Tensor, scratch: Tensor, add: bool, name: str) -> Work:
        """Average ``flat`` (1D, one equal part per rank) over the ranks, and write all of it to ``out``, or add it."""
        after = self.factors(flat.dtype)[1]
        self._require_device(flat, name)
        if self._group is None:
            return All([], lambda: store(out, flat, add, after))
        launch = self._announce("all-reduce", name, flat.numel(), "reduction")
        return self._sums.all_reduce(out, flat, scratch, add, after, launch)

    def reduce_compressed(self, out: Tensor, flat: Tensor, residuals: Residuals, add: bool, name: str) -> Work:
        """``all_reduce``, or without ``residuals.server`` ``reduce_scatter``, of compressed gradients."""
        after = self.factors(flat.dtype)[1]
        self._require_device(flat, name)
        assert self.compressor is not None
        launch = self._announce("compressed reduction", name, flat.numel(), "reduction")
        return self.compressor.reduce(out, flat, residuals, add, after, launch)

    def measure_rate(self) -> float:
        """Bytes per second of this rank to others while all ranks send. Collective."""
        assert self.compressor is not None
        return self.compressor.measure_rate(self._announce("exchange", "rate of links", 0, "reduction"))

    def broadcast(self, tensor: Tensor, name: str, src: int = 0) -> None:
        """Give every rank the values that ``tensor`` has on rank ``src``."""
        self._require_device(tensor, name)
        if self._group is not None:
            launch = self._announce("broadcast", name, tensor.numel())
            self._wait(dist.broadcast(tensor, self._peer(src), group=self._group, async_op=self._gloo), launch)

    def sum_scalar(self, value: Tensor, name: str) -> Tensor:
        """The sum over the ranks of one replica, on all, of an fp64 tensor, which may be overwritten."""
        if self.mesh.replica > 0:
            value.zero_()  # so that all get the same bits
        return self._reduce_small(value, dist.ReduceOp.SUM, name)

    def sum_all(self, value: Tensor, name: str) -> Tensor:
        """The sum over all ranks of a tensor, in place."""
        return self._reduce_small(value, dist.ReduceOp.SUM, name)

    def max_scalar(self, value: Tensor, name: str) -> Tensor:
        """The maximum over all ranks of a tensor."""
        return self._reduce_small(value, dist.ReduceOp.MAX, name)

    def _reduce_small(self, value: Tensor, op: Any, name: str) -> Tensor:
        self._require_device(value, name)
        if self._group is not None:
            launch = self._announce("all-reduce", name, value.numel())
            self._wait(dist.all_reduce(value, op=op, group=self._group, async_op=self._gloo), launch)
        return value

    def host_max(self, flags: Tensor, name: str) -> Work:
        """Element-wise maximum over the ranks of a CPU tensor, in place, over the gloo group."""
        if self._group is None:
            return Done()
        launch = self._announce("flags", name, flags.numel())
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._host, async_op=True)
        return All([work], None, self._watch if self._hang_detector is not None else None, launch)

    def problems(self, problem: str | None, name: str) -> list[str]:
        """The problems of all ranks ("rank 1: ..."), on every rank; [] if there are none. Collective."""
        flag = torch.tensor([problem is not None], dtype=torch.uint8)
        self.host_max(flag, name).wait()
        if not flag.item():
            return []
        return [f"rank {rank}: {text}" for rank, text in enumerate(self.host_gather(problem, name)) if text is not None]

    @contextmanager
    def agree(self, what: str, error: type[Exception]) -> Iterator[None]:
        """Context for work that each rank does for itself: if it fails on one rank, all ranks raise. Collective.

        Raises:
            Exception: what this rank's work raised; ``error`` with the problems of the others if only they failed.
        """
        problem: Exception | None = None
        try:
            yield
        except Exception as caught:
            problem = caught
        found = self.problems(None if problem is None else str(problem) or repr(problem), what)
        if problem is not None:
            raise problem
        if found:
            raise error(f"{what[0].upper()}{what[1:]} failed on another rank: {' '.join(found)}")

    def host_broadcast(self, value: Any, name: str) -> Any:
        """Rank 0's (small, picklable) Python value on every rank."""
        if self._group is None:
            return value
        self._announce("object", name, 0, compare=True)  # torch's collective blocks: make sure that all ranks enter it
        box = [_packed(value) if self.rank == 0 else None]
        with self.explaining():
            dist.broadcast_object_list(box, src=self._peer(0), group=self._host)
        assert box[0] is not None
        return pickle.loads(box[0])

    def host_gather(self, value: Any, name: str) -> list[Any]:
        """The (small, picklable) Python values of all ranks, on every rank."""
        if self._group is None:
            return [value]
        self._announce("objects", name, 0, compare=True)
        box: list[Any] = [None] * self.world
        with self.explaining():
            dist.all_gather_object(box, _packed(value), group=self._host)
        return [pickle.loads(packed) for packed in box]


def together(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a method that all ranks call, of an object with a ``comm``: see ``Comm.together``."""

    @wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        owner: Any = args[0]
        with owner.comm.together(f"{type(owner).__name__}.{method.__name__}"):
            return method(*args, **kwargs)

    return call


class _Pickler(pickle.Pickler):
    """Pickles tensors as bytes; by default pickle calls ``torch.save`` for the full storage of each."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout is not torch.strided or value.device.type not in ("cpu", "cuda"):
            return NotImplemented
        # A CUDA tensor arrives on the CPU: by default it would arrive on the sender's device.
        flat = value.detach().resolve_conj().resolve_neg().reshape(-1).cpu()
        return _unpacked, (flat.view(torch.uint8).numpy().tobytes(), value.dtype, value.shape)


def _packed(value: Any) -> bytes:
    data = io.BytesIO()
    _Pickler(data, pickle.HIGHEST_PROTOCOL).dump(value)
    return data.getvalue()


def _unpacked(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def _tell_late(mesh: Mesh, hosts: Sequence[str], member: int, late: bool) -> None:
    """Not a method: an object that ends when a ``Comm`` is dropped keeps it."""
    if mesh.rank == (0 if member else mesh.world - 1) // mesh.shards * mesh.shards:  # one that is not that member
        ranks = mesh.row(member)
        text = "is late: sums of gradients go on without it, and get its contributions later" if late else "is on time"
        log.warning("Node %s (rank %s) %s.", hosts[ranks[0]], ", ".join(map(str, ranks)), text)
