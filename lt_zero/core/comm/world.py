"""All ranks of a run, and their agreement on objects, problems, requests, hangs, ended ranks, saving, hosts and nodes.

The collectives of buckets are those of shard_group.py.
"""

from __future__ import annotations

import gc
import logging
import socket
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from lt_zero.common import accelerator
from lt_zero.common.compat import destroy_group, name_of_split
from lt_zero.common.descriptors import raise_limit
from lt_zero.common.output import say
from lt_zero.core.comm.options import CommunicationOptions
from lt_zero.core.comm.process_groups import (
    Communicators,
    abort_if_stuck,
    await_all,
    backend_of,
    can_split,
    check_device,
    exists,
    has_room_for_group,
    new_group,
    no_room,
    split_group,
)
from lt_zero.core.comm.ranks import LaunchOrder, NewLog, Ranks, Unlogged
from lt_zero.core.comm.shared_memory import SharedArena
from lt_zero.core.comm.topology import group_by_node, node_identity
from lt_zero.core.comm.work import MEETING, CollectiveId, CollectiveMonitor
from lt_zero.core.health.agreement import Agreement
from lt_zero.core.health.ended_ranks import debugs, summary
from lt_zero.core.health.hang_detection import HangDetector
from lt_zero.core.health.launchers import refuse_alone

_P = ParamSpec("_P")
_T = TypeVar("_T")

log = logging.getLogger("lt_zero")

_CPU = torch.device("cpu")
_OF_HOST = ("gloo", "fake")  # backends without communicators on a device
_joined: weakref.WeakSet[World] = weakref.WeakSet()  # those that may be garbage
_unused: list[list[dist.ProcessGroup]] = []  # of worlds that are gone


def _end_interrupted() -> None:
    """End what earlier runs have left in the middle. A function, as its variables must not keep these runs."""
    for earlier in list(_joined):
        for used in list(earlier.interruptible):
            used.end_interrupted()


class World(Ranks):
    """All ranks of a run.

    Args:
        process_group: over all ranks, which may be some of the default group; None: a single process without one.
        device: of tensors in collectives.
        check: compare each collective before its launch, including reductions (debug mode).
        timeout: of the groups that are made later; None: torch's default for the backend.
        options: of the connections between ranks.
        new_log: makes the log of the collectives; None: they are not recorded.

    Attributes:
        detector: finds hangs; None: there are no other ranks, or they are simulated.
        agreement: on requests, see agreement.py.
        nodes: the ranks of each node.
        hosts: the name of each rank's host.
        communicators: of this rank; those of gloo do not count.
        ends_with_run: objects whose ``end`` is called at the end of a run.
        interruptible: objects whose ``end_interrupted`` is called before another run of this process begins: what
            KeyboardInterrupt has left of their calls may keep them, and this world, for ever.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        device: torch.device,
        check: bool = False,
        timeout: timedelta | None = None,
        options: CommunicationOptions | None = None,
        new_log: NewLog | None = None,
    ) -> None:
        size = dist.get_world_size(process_group) if process_group is not None else 1
        rank = dist.get_rank(process_group) if process_group is not None else 0
        device, watch = accelerator.with_index(device), CollectiveMonitor()
        own_log = new_log(device, size, say if rank == 0 else None) if new_log is not None else Unlogged()
        super().__init__(process_group, range(size), rank, device, watch, LaunchOrder(watch, range(size)), own_log)
        self.check = check
        self.timeout = timeout
        self.options = options or CommunicationOptions()
        self.process_groups = [process_group] if process_group is not None else []  # all that were made
        self._closed = list(self.process_groups)  # whose connections hang detection closes
        self.communicators = Communicators()
        self._of_one: dict[str, dist.ProcessGroup] = {}  # groups that have this rank only, by their backend
        self.detector: HangDetector | None = None
        # Exchanges of host data (used parameters, orders) must not synchronise the GPU.
        self.order.host = process_group
        # A simulated group (torch's "fake" backend) has no other processes; results are this process's values.
        if process_group is not None and self.backend not in ("gloo", "fake"):
            self.order.host = self.new_group("gloo")
        if self._gloo and accelerator.is_accelerator(device) and rank == 0:
            log.warning(
                "The process group has gloo for tensors on %s, which copies them to the host for each collective. Make "
                "it with %r (Trainer: process_group_backend of the strategy; init_distributed: dist_backend).",
                device.type,
                dist.get_default_backend_for_device(device),
            )
        self.order.compares_all = check
        self.agreement = Agreement()  # of a single rank; ``join`` sets that of all
        self.nodes = [list(range(size))]
        self.hosts = [socket.gethostname()] * size
        self.ends_with_run: weakref.WeakSet[Any] = weakref.WeakSet()
        self.interruptible: weakref.WeakSet[Any] = weakref.WeakSet()
        self._saving: dist.ProcessGroup | None = None  # see ``saving_group``

    @classmethod
    def join(
        cls,
        device: torch.device,
        options: CommunicationOptions | None = None,
        timeout: timedelta | None = None,
        node: int | None = None,
        new_log: NewLog | None = None,
    ) -> World:
        """All ranks of the default process group, with a process group of their own. Collective.

        ``options``: default: those of the class; ``LT_ZERO_DEBUG=1`` lets collectives be compared, too. ``timeout``,
        ``new_log``: as for the class. ``node``: the number of this rank's node, as the launcher knows it;
        ``LT_ZERO_NODE_RANK`` takes precedence.

        Raises:
            RuntimeError: the launcher has started more tasks than the group has ranks, see launchers.py. Or the ranks
                cannot compute on ``device``, or cannot exchange its tensors.

        Lightning issues collectives on the default group between batches and swallows their errors; this package's
        collectives on the same group could then be matched with them.
        """
        grouped = dist.is_available() and dist.is_initialized()
        refuse_alone(dist.get_world_size() if grouped else 1)
        check_device(device, dist.get_world_size() if grouped else 1)
        _end_interrupted()
        if _joined:
            # Trainers of earlier runs are garbage in cycles, which Python may leave for long, with the dozens of
            # descriptors and threads of each run, and its weights.
            gc.collect()
        if not grouped or dist.get_world_size() == 1:
            world = cls(None, device, new_log=new_log)
            _joined.add(world)
            return world
        options = options or CommunicationOptions()
        check = debugs() or options.compares_collectives
        raise_limit()
        await_all(timeout)
        backend = backend_of(device)
        communicators = Communicators()
        with communicators.another(device) if backend not in _OF_HOST else nullcontext():
            group = new_group(None, timeout, backend, device, probed=True, options=options)
        simulated = backend_of(device, group) == "fake"
        world = cls(group, device, check and simulated, timeout, options, new_log)
        world.communicators = communicators
        host = world.order.host
        assert host is not None
        # The ranks of a simulated group have no processes that could hang or end.
        if backend_of(_CPU, host) == "gloo":
            world.detector = world.order.detector = HangDetector(world._closed, host, world.watch, options, timeout)
            world.agreement = world.detector.agreement
            places = world.host_gather((node_identity(node), socket.gethostname(), check), "nodes")
            world.nodes = group_by_node([identity for identity, _, _ in places])
            world.hosts = world.detector.ends.hosts = [name for _, name, _ in places]
            # Each comparison is a barrier: if one rank's environment asks for them, all ranks take part.
            world.check = world.order.compares_all = any(asked for _, _, asked in places)
        world._destroy_unused()
        _joined.add(world)
        return world

    def _destroy_unused(self) -> None:
        """Destroy the groups of worlds that are gone on all ranks: those of NCCL hold 100s of MB. Collective."""
        weakref.finalize(self, _unused.append, self.process_groups).atexit = False
        # Groups that no longer exist ended with their default group.
        _unused[:] = [groups for groups in _unused if exists(groups[0])]
        # A world's first group has all of its ranks, which know it by one name. The others are named after their parts.
        named = {groups[0].group_name: groups for groups in _unused}
        everywhere = self.host_gather(list(named), "unused groups")
        # All ranks destroy in rank 0's order: NCCL may wait for the others in each, so different orders could deadlock.
        for name in everywhere[0]:
            if all(name in of_rank for of_rank in everywhere):
                _unused.remove(named[name])
                for group in reversed(named[name]):
                    # The default group, and all groups with it, may have been destroyed since.
                    with suppress(ValueError):
                        destroy_group(group)

    def reaches_all_of(self, later: World) -> bool:
        """True if the ranks of a ``later`` run are those of this one, and its process groups still exist.

        They may be others where a process was forked, or has made its default process group anew.
        """
        return self.size == later.size and (self.process_group is None or exists(self.process_group))

    # ---- sets of ranks -------------------------------------------------------------------------------------------

    def new_group(
        self,
        backend: str | None,
        parts: Sequence[Sequence[int]] | None = None,
        timeout: timedelta | None = None,
        closes: bool = False,
        exchanges: bool = False,
    ) -> dist.ProcessGroup:
        """Another process group over all ranks, or over that of ``parts`` which has this rank. Collective.

        ``backend``: None: that of this world. ``parts``: the same on all ranks. ``closes``: hang detection
        closes its connections after a verdict. ``exchanges``: its ranks send each other something of their own (an
        all-to-all, or messages). Groups of one rank are all the same one.

        Raises:
            RuntimeError: on all ranks: the table of descriptors of one is full. Or the ranks cannot connect.
        """
        wanted = [list(part) for part in parts or [range(self.size)]]
        # A simulated group has no other processes, with which gloo could connect.
        made = backend if backend and self.backend != "fake" else self.backend
        alone = all(len(part) == 1 for part in wanted)
        if alone and made in self._of_one:
            return self._of_one[made]
        # NCCL opens a few connections, whatever the number of ranks.
        self._check_room(len(next(part for part in wanted if self.rank in part)) if made == "gloo" else 0)
        # Ranks wait for each other in the store. If one has ended, and the store with it, the error names that rank.
        measured = nullcontext() if alone or made in _OF_HOST else self.communicators.another(self.device)
        with self.watch.explaining(), measured:
            group = self._split_group(wanted, timeout, exchanges) if can_split(made) and not alone else None
            group = group or self._one_by_one(wanted, made, timeout, exchanges, connects=not alone)
        self.process_groups.append(group)
        if alone:
            self._of_one[made] = group
        elif closes:
            self._closed.append(group)
        return group

    def _check_room(self, ranks: int) -> None:
        """Check that every rank can open what a group needs that connects it with each of ``ranks``. Collective."""
        if self.detector is None:  # there are no other processes, or they are about to get the group for such checks
            return
        has_room = has_room_for_group(ranks)
        full = torch.tensor([0 if has_room else 1 + self.rank])
        self.host_max(full, "room for process groups").wait()
        if full:
            raise no_room(int(full) - 1, not has_room)

    def _split_group(
        self, parts: list[list[int]], timeout: timedelta | None, exchanges: bool
    ) -> dist.ProcessGroup | None:
        """``new_group`` in one operation; None if torch would give two groups one name. Collective."""
        assert self.process_group is not None
        taken, number = name_of_split(next(part for part in parts if self.rank in part))
        found = torch.tensor([taken, number, -number])
        self.host_max(found, "names of process groups").wait()
        if found[0] or found[1] != -found[2]:
            return None
        return split_group(self.process_group, parts, timeout or self.timeout, self.device, exchanges)

    def _one_by_one(
        self, parts: list[list[int]], backend: str, timeout: timedelta | None, exchanges: bool, connects: bool
    ) -> dist.ProcessGroup:
        """``new_group`` with an operation for each part. Collective."""
        assert self.process_group is not None
        mine: list[dist.ProcessGroup] = []
        ranks = dist.get_process_group_ranks(self.process_group)
        alone = len(ranks) < dist.get_world_size()  # the others do not call this
        for part in parts:
            members, inside = [ranks[rank] for rank in part], self.rank in part
            if alone and not inside:
                continue
            group = new_group(
                members,
                timeout or self.timeout,
                backend,
                self.device,
                inside,
                options=self.options,
                alone=alone,
                exchanges=exchanges,
                connects=connects,
            )
            mine += [group] if inside else []
        return mine[0]

    def expect_in_layers(self, ranks: Sequence[int]) -> None:
        """Let hang detection know that this rank waits for ``ranks`` inside of layers."""
        if self.detector is not None and self.process_group is not None:
            known = dist.get_process_group_ranks(self.process_group)
            self.detector.expect_in_layers([known[rank] for rank in ranks])

    def order_of(self, ranks: Sequence[int]) -> LaunchOrder:
        """Order of launches for ``ranks``, this one among them: the run's own for all ranks, else a new one."""
        if len(ranks) == self.size:
            return self.order
        order = LaunchOrder(self.watch, ranks, f"{zlib.crc32(repr(list(ranks)).encode()):08x}")
        order.compares_all, order.detector = self.order.compares_all, self.detector
        return order

    def share_memory(self, ranks: Sequence[int]) -> SharedArena | None:
        """Windows for ``ranks``, this one among them; None if ranks on any host cannot share memory. Collective."""
        arena = SharedArena.made(self.timeout)
        addresses = self.host_gather(arena.address() if arena else None, "shared memory")
        connects = arena is not None and arena.connect(self.rank, addresses, ranks)
        return arena if all(self.host_gather(connects, "shared memory")) else None

    def saving_group(self, background: bool) -> dist.ProcessGroup | None:
        """The process group for saving; None in a single process. Collective.

        ``background``: a group of its own, for a thread that saves during training.
        """
        if self.process_group is not None and background and self._saving is None:
            opened = self.log.open("barrier", "saving", 0)
            self._saving = self.new_group("gloo")
            self.log.ended(opened)
        return self._saving if background else self.order.host

    def leave_saving_group(self) -> None:
        """Let the next background save make a new group."""
        self._saving = None

    # ---- operations of all ranks -----------------------------------------------------------------------------------

    def advise(self, remedy: Callable[[CollectiveId, CollectiveId | None], str]) -> None:
        """Let errors of ranks that diverge end with ``remedy``: of two collectives that met, or of one."""
        if self.detector is not None:
            self.detector.remedy = remedy

    def meet(self, where: str) -> None:
        """Wait until every rank has come to this point of the run: "the end of training". Collective.

        Raises:
            RuntimeError: a rank never will, as it has another number of batches.
        """
        if self.detector is not None:
            self.order.launch(MEETING, where, 0, compare=True)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Context for an operation of all ranks: an error that ends it on one rank ends it on all, and is named there.

        For errors that a rank cannot tell at a point where all meet: of a file, or of a user's function.
        """
        ends = self.detector.ends if self.detector is not None else None
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
        else:
            ends.pass_by()
        finally:
            del ends.scopes[depth - 1 :]

    def begin_run(self) -> None:
        """Begin a run: answer other ranks' questions, and take part in ``agreement``. Collective.

        Raises:
            RuntimeError: on all ranks: an error has ended the last run, and they are not in step any more.
        """
        if self.detector is not None:
            self.detector.begin_run()
        self.agreement.begin()

    def end_run(self, leaves: bool = False) -> None:
        """End the run on this rank.

        Its thread goes on to answer, and to watch waits of the user's script. ``leaves``: this process ends with the
        run, and so does the thread.
        """
        with suppress(RuntimeError):  # the process that serves the store has ended
            self.agreement.end()
            if self.detector is not None:
                self.detector.ends.end_run()
        for used in list(self.ends_with_run):
            used.end()
        self.order.rest()
        if self.detector is not None:
            # Joins the thread: it may be about to close the connections of a wait that an error has ended, and must not
            # take a wait of the next run for it.
            self.detector.stop()
            if not leaves:
                self.detector.start()

    def explain(self, error: BaseException) -> bool:
        """Add the cause (a hang, or the end of another rank) to an error's text; returns whether it is known."""
        return self.detector is not None and self.detector.explain(error)

    def post_error(self, error: BaseException) -> None:
        """Explain an error that ends the run on this rank, or tell the ranks that fail because of it."""
        if self.detector is not None and not self.detector.explain(error):
            self.detector.ends.tell(True, summary(error))

    def give_up(self, error: BaseException) -> None:
        """``post_error`` for an error after which the run is torn down, which would wait for a device that is stuck."""
        self.post_error(error)
        if self.process_group is not None:
            abort_if_stuck(self.device)

    @property
    def progress(self) -> dict[str, int]:
        """Number of collectives that this rank has launched, by channel."""
        return {name: channel.launched for name, channel in self.watch.channels.items()}


def together(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a method that all ranks call, of an object with a ``world``: see ``World.together``."""

    @wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        owner: Any = args[0]
        with owner.world.together(f"{type(owner).__name__}.{method.__name__}"):
            return method(*args, **kwargs)

    return call
