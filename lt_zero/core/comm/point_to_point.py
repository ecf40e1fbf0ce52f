"""Sends and receives between two ranks, whose waits hang detection examines like those for collectives.

Note [Waits for one rank]
    gloo does not tell whether a send or a receive is complete, and one that is waited for with a timeout closes all
    connections of its group. So a thread waits in gloo, and the caller waits for the thread in slices, in between of
    which hang detection looks at the other rank (work.py).
    The transfers from one rank to another are a channel of their own: both number them in the order in which gloo
    matches them. So a rank that waits for one knows whether the other has begun it, or waits elsewhere for this rank.
    After an error some transfers have been begun on one side only, and would meet later ones. So ``close`` ends the
    connections, which also ends the waits of the other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.core.comm.process_groups import backend_of, close_connections
from lt_zero.core.comm.work import CollectiveId, CollectiveMonitor, CollectiveWorker, Procedure
from lt_zero.core.comm.world import World

_PROBE, _PROBES = 1 << 20, 4  # bytes of the messages that measure a link, and their number
MEASURED = _PROBES // 2 * _PROBE  # bytes that ``link_seconds`` measures


class PointToPoint:
    """Sends and receives between the ranks of a gloo group.

    Args:
        group: some of the ranks of ``world``. Nothing else is sent over it.
        world: the process group of all ranks of the run.
        watch: the state of this rank's collectives.

    Attributes:
        closed: whether an error has ended the connections.
    """

    def __init__(self, group: dist.ProcessGroup, world: dist.ProcessGroup, watch: CollectiveMonitor) -> None:
        self._group = group
        self._world = world
        self._watch = watch
        self._waits = CollectiveWorker("transfers")
        self.closed = False

    def isend(self, tensor: Tensor, peer: int, name: str) -> PendingTransfer:
        """Begin to send ``tensor`` to the global rank ``peer``, which receives it under the same name."""
        return self._begin(dist.isend, tensor, dist.get_rank(), peer, name)

    def irecv(self, tensor: Tensor, peer: int, name: str) -> PendingTransfer:
        """Begin to receive ``tensor`` from the global rank ``peer``."""
        return self._begin(dist.irecv, tensor, peer, dist.get_rank(), name)

    def _begin(
        self, begin: Callable[..., dist.Work | None], tensor: Tensor, source: int, target: int, name: str
    ) -> PendingTransfer:
        """A started transfer.

        Raises:
            RuntimeError: the connections are closed; says why, and names the transfer.
        """
        if self.closed:
            raise RuntimeError(
                f"The connections for {name!r} were closed after an error in an earlier one. End the run on all ranks, "
                "and begin another."
            )
        ranks = [dist.get_group_rank(self._world, rank) for rank in (source, target)]
        channel = self._watch.open(f"{source}>{target} {self._group.group_name}", ranks)
        launch, _ = channel.launch("transfer", name, tensor.numel())
        with _naming(launch), self._watch.explaining():
            work = begin(tensor, target if source == dist.get_rank() else source, self._group)
        assert work is not None
        return PendingTransfer(work, launch, self._watch, self._waits)

    def close(self) -> None:
        """End all transfers on this rank, and those with it on others. No-op if they have been."""
        if not self.closed:
            self.closed = True
            close_connections(self._group)


def transfers_over(group: dist.ProcessGroup, world: World) -> PointToPoint | None:
    """Transfers over a ``group`` of ``world`` that hang detection examines; None: torch's own are as good.

    Nothing else may be sent over the group.
    """
    if world.detector is None or world.process_group is None or backend_of(world.device, group) != "gloo":
        return None
    return PointToPoint(group, world.process_group, world.watch)


class PendingTransfer:
    """A started send or receive."""

    def __init__(
        self, work: dist.Work, launch: CollectiveId, watch: CollectiveMonitor, waits: CollectiveWorker
    ) -> None:
        self._work = work
        self._launch = launch
        self._watch = watch
        self._waits = waits
        self._procedure: Procedure | None = None

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            RuntimeError: it cannot end; says why, and names the transfer.
        """
        if self._work.is_completed():
            return
        # A thread waits in gloo, see Note [Waits for one rank]. A second wait uses the same thread.
        if self._procedure is None:
            self._procedure = self._waits.submit(self._work.wait)
        with _naming(self._launch):
            self._watch.wait(self._procedure, self._launch)


@contextmanager
def _naming(launch: CollectiveId) -> Iterator[None]:
    """Context that adds the name of ``launch`` to errors."""
    try:
        yield
    except RuntimeError as error:
        if launch.name not in str(error):
            error.args = (f"{error} It happened in {launch}.",)
        raise


def watched(op: Any, transfers: PointToPoint, name: str) -> Any:
    """Let torch start ``op`` (of ``dist.P2POp``) by ``transfers``; returns it."""
    start, peer = transfers.isend if op.op is dist.isend else transfers.irecv, op.peer

    def begin(tensor: Tensor, *_: Any, **__: Any) -> PendingTransfer:
        return start(tensor, peer, name)

    op.op = begin
    return op


def send_all(parts: Sequence[Tensor], peer: int, group: dist.ProcessGroup) -> None:
    """Send tensors to a rank of gloo, in order; returns when they have left."""
    for part in parts:
        dist.send(part, peer, group)


def link_seconds(group: dist.ProcessGroup) -> list[float]:
    """Seconds in which each rank of ``group`` sends ``MEASURED`` bytes to the next. Collective."""
    members = dist.get_world_size(group)
    me = dist.get_rank(group)
    peers = dist.get_process_group_ranks(group)
    following, before = (me + 1) % members, (me - 1) % members
    received, times = torch.empty(_PROBE, dtype=torch.uint8), [0.0]
    sent = torch.zeros_like(received)
    # Neighbours send one after the other: what one sends would delay the acknowledgements for the other.
    for senders in range(2):
        dist.barrier(group)
        works = [dist.isend(sent, peers[following], group) for _ in range(_PROBES if me % 2 == senders else 0)]
        for _ in range(_PROBES if before % 2 == senders else 0):
            dist.recv(received, peers[before], group)
            times.append(time.perf_counter())
        for work in filter(None, works):
            work.wait()
    took = torch.tensor([times[-1] - times[_PROBES // 2]], dtype=torch.float64)  # TCP begins slowly
    every = [torch.empty_like(took) for _ in peers]
    dist.all_gather(every, took, group)
    of_sender = [float(seconds) for seconds in every]
    return of_sender[1:] + of_sender[:1]  # who receives has measured
