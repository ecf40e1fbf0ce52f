"""Sums over nodes that go on without the late ones: ``communication.slow_node_tolerance``.

Note [Sums without late nodes]
    A member is a node: the sum of its ranks is one contribution. (A rank, if there is one node, or nodes differ.) Each
    sum is cut into pieces, and each piece has an owner, to whom the members send their contributions. The owner closes
    the sum when all are there; or when at most the tolerated ranks are missing, and the time has passed that a member
    of usual speed needs. It sends to every member the sum, how many contributions are in it, and whose. Members
    multiply the sum by (all contributions / those in it): divided by the number of ranks, as every sum of gradients is,
    that gives the mean of the contributions in it.

    Nothing is lost, and each contribution is in one sum only. A member whose contribution has not arrived keeps adding
    later ones up, and sends them as one once a sum shows that the owner has the last. So one message of a member is
    under way per piece, however slow its link. A contribution that arrives late is in the owner's next sum.

    Replicas stay equal to the bit: every member gets each piece's sum from one owner. Sums are added in the order of
    the members, so one without late members does not depend on time.

    Everybody waits for owners, so a late member loses its pieces to the others (``_update_stragglers``). All members
    decide by what came with the same sums, in the same order, so they agree on the owners without another exchange.

    Members may be a turn apart: a contribution, or a sum, of the next turn waits in a dict. Who is further ahead waits.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from statistics import fmean, median_low
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.common.errors import ConfigError, Problem
from lt_zero.common.worker import Worker
from lt_zero.core.comm.hierarchy import Hierarchy
from lt_zero.core.comm.point_to_point import MEASURED, link_seconds, send_all
from lt_zero.core.comm.shared_memory import SharedArena
from lt_zero.core.comm.topology import whole_nodes
from lt_zero.core.comm.transport import Connections, Group, Mesh, Reduction
from lt_zero.core.comm.work import CollectiveId, Procedure, Work
from lt_zero.kernels.flat import wide

KEY = "communication.slow_node_tolerance"
FOR_EVER = timedelta(days=3650)  # members are not late for torch: hang detection finds those that never come
_PIECE = 1 << 20  # bytes
_CONTRIBUTION, _SUM = range(2)  # kinds of messages
_PATIENCE = 10.0  # seconds for threads to end
# Whether the run ends, stream, piece, turn, weight, elements, bytes of an element; of sums each member's ``Arrival``
_HEADER = 7


class Contribution(NamedTuple):
    """``data``: the sum of ``weight`` gradients of ranks, the last of them of ``turn``."""

    turn: int
    weight: float
    data: Tensor


class Arrival(NamedTuple):
    """Arrival of a member's contribution: if it is in the sum, and its time so far as a share of the time allowed."""

    present: bool
    share: float


class _OpenSum:
    """A piece that this member owns, before it is closed."""

    def __init__(self) -> None:
        self.turn = 0
        self.parts: dict[int, Contribution] = {}
        self.absent: set[int] = set()  # members that were told to send nothing in this turn
        self.began = 0.0  # when the first contribution of this turn came; 0: there is none
        self.enough = 0.0  # when at most the tolerated members were missing; 0: more are
        self.awaited: dict[int, float] = {}  # since when members whose contributions are missing are waited for
        self.seconds: dict[int, float] = {}  # how long the others were, at last
        self.closed = 0.0  # when the last turn was
        self.lasted = 5.0  # seconds, the last turn; before the first one is known, latecomers get 0.5 seconds

    def begin(self, turn: int) -> None:
        # Another member owned the piece meanwhile: this one's notes of missing contributions are out of date.
        if turn > self.turn + 1:
            self.absent.clear()
            self.awaited.clear()
        self.turn = turn
        self.began = 0.0
        self.enough = 0.0


class _Stream:
    """Sums of one name, turn after turn, and the contributions that are carried from one to the next."""

    def __init__(self, name: str, number: int, total: Tensor, members: int) -> None:
        self.name = name
        self.number = number
        self.turn = 0
        self.numel, self.dtype = total.numel(), total.dtype
        per = max(1, min(_PIECE // total.itemsize, -(-self.numel // members)))
        self.spans = [(lo, min(lo + per, self.numel)) for lo in range(0, self.numel, per)]
        self.carried: dict[int, Contribution] = {}  # by piece: what its owner has not been sent
        self.owners: list[int] = []  # of each piece, in the last turn
        self.arrived = [True] * len(self.spans)  # whether those have all that was sent to them

    def add(self, piece: int, more: Contribution) -> None:
        """Keep a contribution for the next one that is sent."""
        self.carried[piece] = _both(self.carried.get(piece), more)


def _both(one: Contribution | None, other: Contribution) -> Contribution:
    if one is None:
        return other
    return Contribution(max(one.turn, other.turn), one.weight + other.weight, one.data.add(other.data))


class TolerantSum:
    """Sums over the members of a gloo group. See Note [Sums without late nodes].

    Args:
        groups: two of one rank of each member, with a timeout longer than any pause: for contributions and for sums.
            (While gloo sends on a connection it does not receive there, and a late member sends all the time.)
        mesh: of the ranks; a row is a member, and each of its ranks sums its part of the elements.
        tolerated: how many members may be missing.
        told: gets a line when a member is late, or is no longer.
    """

    def __init__(
        self, groups: Sequence[Group], mesh: Mesh, tolerated: int, told: Callable[[int, bool], object]
    ) -> None:
        self._groups = groups
        self._mesh = mesh
        self._tolerated = tolerated
        self._told = told
        self._ranks = mesh.shards
        self._peers = dist.get_process_group_ranks(groups[0])
        self._members, self._me = len(self._peers), dist.get_rank(groups[0])
        seconds = link_seconds(groups[0])
        self._rate = MEASURED / median_low(seconds)  # bytes per second
        self._changed = threading.Condition()
        self._streams: list[_Stream] = []
        self._open: dict[tuple[int, int], _OpenSum] = defaultdict(_OpenSum)  # by stream and piece
        self._turns: dict[int, int] = defaultdict(int)  # of each stream, on this member
        self._sums: dict[tuple[int, int, int], tuple[Contribution, list[Arrival]]] = {}  # by stream, turn and piece
        self._restored: dict[str, tuple[Tensor, Tensor]] = {}
        slow = [member for member in range(self._members) if seconds[member] > 2 * median_low(seconds)]
        slow = sorted(slow, key=seconds.__getitem__, reverse=True)[:tolerated]
        # Who owns nothing, and is not waited for: since how many sums it has been on time.
        self._late: dict[int, int] = dict.fromkeys(slow, 0)
        self._sent, self._received = [0] * self._members, [0] * self._members  # contributions
        # By kind and peer. A thread drops a message when it has left: point_to_point.py, Note [Waits for one rank].
        self._senders: dict[tuple[int, int], Worker[Procedure]] = {}
        self._published: dict[tuple[int, int, int], Procedure] = {}  # the last sum, by peer, stream and piece
        self._threads: dict[tuple[int, int], threading.Thread] = {}  # by kind and peer; this member's close sums
        self._started: list[threading.Thread] = []  # those, and those that have said that they end
        self._running, self._runs = False, 0
        self._ends: dict[tuple[int, int], int] = defaultdict(int)  # how many runs a peer has ended, by kind
        self._error: BaseException | None = None
        self._missing = list[float]()  # for each sum, the share of contributions that were missing

    # ---- the member ------------------------------------------------------------------------------------------------

    def sum(self, name: str, total: Tensor) -> list[tuple[int, int, float]]:
        """Replace ``total`` (1D) by the sum of the gradients that arrived, scaled by all / arrived.

        In the same order on all members; in one thread at a time. Returns how many gradients of ranks are in the sums:
        (first element, last element + 1, number).

        Raises:
            RuntimeError: a member has ended.
        """
        with self._changed:
            self._begin()
            stream = self._stream(name, total)
            turn, owners = stream.turn, self._owners(stream)
            # Contributions are clones: they may still be kept, or on their way, when ``total`` is overwritten below.
            for piece, (lo, hi) in enumerate(stream.spans):
                self._contribute(stream, piece, owners[piece], Contribution(turn, self._ranks, total[lo:hi].clone()))
            stream.owners = owners
            self._changed.notify_all()
            keys = [(stream.number, turn, piece) for piece in range(len(stream.spans))]
            while not all(key in self._sums for key in keys):
                self._changed.wait(1.0)
                if self._error is not None or not self._running:
                    raise RuntimeError(f"A sum of gradients of {name!r} has ended early: {self._error}")
            sums = [self._sums.pop(key) for key in keys]
            stream.arrived = [arrivals[self._me].present for _, arrivals in sums]
            stream.turn = self._turns[stream.number] = turn + 1
            self._update_stragglers(owners, [arrivals for _, arrivals in sums])
            self._changed.notify_all()
        everyone = self._ranks * self._members
        for (lo, hi), (found, _) in zip(stream.spans, sums, strict=True):
            total[lo:hi] = found.data
            if found.weight != everyone:
                total[lo:hi].mul_(everyone / found.weight)
        return [(*span, found.weight) for span, (found, _) in zip(stream.spans, sums, strict=True)]

    def _stream(self, name: str, total: Tensor) -> _Stream:
        found = next(
            (stream for stream in self._streams if stream.name == name and stream.numel == total.numel()), None
        )
        if found is None:
            found = _Stream(name, len(self._streams), total, self._members)
            self._streams.append(found)
            self._take_over(found)
        return found

    def _owners(self, stream: _Stream) -> list[int]:
        able = [member for member in range(self._members) if member not in self._late]
        return [able[(stream.number + piece) % len(able)] for piece in range(len(stream.spans))]

    def _contribute(self, stream: _Stream, piece: int, owner: int, mine: Contribution) -> None:
        """Send a contribution to the owner of ``piece``, or keep it until the last one has arrived there."""
        opened = self._open[stream.number, piece]
        if owner == self._me and opened.turn < stream.turn:
            # Another member owned the piece until now, and its earlier sums are closed.
            opened.begin(stream.turn)
        elif owner != self._me:
            # These came when the piece was no longer this member's. They go to the new owner, or would be lost.
            for part in opened.parts.values():
                stream.add(piece, part)
            opened.parts.clear()
        moved = not stream.owners or stream.owners[piece] != owner
        if not (moved or stream.arrived[piece]):
            stream.add(piece, mine)
            return
        mine = _both(stream.carried.pop(piece, None), mine)
        if owner == self._me:
            self._take(self._me, stream.number, piece, mine)
        else:
            self._sent[owner] += 1
            self._send(owner, _CONTRIBUTION, stream.number, piece, mine)

    def _update_stragglers(self, owners: Sequence[int], pieces: Sequence[Sequence[Arrival]]) -> None:
        """Decide who owns pieces from now on, and count.

        A late member is not waited for, but its contributions still arrive and are timed. It counts as on time again
        after more than two turns of each stream in which most of them did not take too long.
        """
        late = dict[int, float]()  # by member: by how much
        for member in range(self._members):
            shares = [row[member].share for row, owner in zip(pieces, owners, strict=True) if owner != member]
            fine = 2 * sum(share > 1 for share in shares) <= len(shares)
            if member in self._late:
                self._late[member] = self._late[member] + 1 if fine else 0
                fine = self._late[member] > 2 * len(self._streams)  # each stream has two turns to show it
            if not fine:
                late[member] = max(shares, default=0.0)
        latest = sorted(late, key=late.__getitem__, reverse=True)[: self._tolerated]
        for member in {*latest} ^ self._late.keys():
            self._told(member, member in latest)
        self._late = {member: self._late.get(member, 0) for member in latest}
        self._missing.append(sum(not a.present for row in pieces for a in row) / len(pieces) / self._members)

    def missing_share(self) -> float:
        """The share of gradients that were missing in sums since the last call."""
        missing, self._missing = self._missing, []
        return fmean(missing) if missing else 0.0

    # ---- the owner -------------------------------------------------------------------------------------------------

    def _take(self, member: int, stream: int, piece: int, part: Contribution) -> None:
        opened, now = self._open[stream, piece], time.monotonic()
        # Another member owned the sums of the turns between, which are closed.
        if part.turn > opened.turn:
            opened.begin(part.turn)
        opened.parts[member] = _both(opened.parts.get(member), part)
        if not opened.began and part.turn == opened.turn:
            opened.began = now
        opened.seconds[member] = now - opened.awaited.pop(member, opened.began or now)

    def _close_sums(self) -> None:
        """Close the sums that this member owns, as long as there is a run. Runs in a thread."""
        while True:
            with self._changed:
                if not self._running:
                    del self._threads[_SUM, self._me]
                    return
                now = time.monotonic()
                due = {key: self._due(key, opened, now) for key, opened in self._open.items() if opened.parts}
                ready = [key for key, when in due.items() if when <= now]
                if not ready:
                    self._changed.wait(max(min(due.values(), default=now + 1.0) - now, 1e-3))
                    continue
                closed = [(key, *self._closed(key[0], self._open[key], now)) for key in ready]
            try:
                for (stream, piece), turn, parts, arrivals in closed:
                    self._publish(stream, piece, turn, parts, arrivals)
            except BaseException as error:
                self._fail(error)

    def _due(self, key: tuple[int, int], opened: _OpenSum, now: float) -> float:
        """Time at which the sum may be closed, as far as is known now."""
        missing = set(range(self._members)) - opened.parts.keys()
        if (
            key[0] >= len(self._streams)
            or all(part.turn < opened.turn for part in opened.parts.values())
            or len(missing) > self._tolerated
        ):
            # Contributions of late members alone do not begin a turn.
            return now + 1.0
        if missing <= opened.absent | self._late.keys():
            return now
        opened.enough = opened.enough or now
        return opened.enough + self._limit(key[0], opened)

    def _limit(self, stream: int, opened: _OpenSum) -> float:
        """Seconds that a contribution may take: twice its time on a usual link, and the usual lag of a rank."""
        nbytes = self._streams[stream].numel * self._streams[stream].dtype.itemsize
        return 2 * nbytes / self._rate + max(0.05, opened.lasted / 10)

    def _closed(self, stream: int, opened: _OpenSum, now: float) -> tuple[int, dict[int, Contribution], list[Arrival]]:
        turn = opened.turn
        parts = opened.parts
        arrivals = list[Arrival]()
        for member in range(self._members):
            present = member in parts
            seconds = opened.seconds[member] if present else now - opened.awaited.setdefault(member, opened.began)
            arrivals.append(Arrival(present, seconds / self._limit(stream, opened)))
        opened.absent = set(range(self._members)) - parts.keys()
        if opened.closed:
            opened.lasted = now - opened.closed
        opened.closed, opened.parts = now, {}
        opened.begin(turn + 1)
        return turn, parts, arrivals

    def _publish(
        self, stream: int, piece: int, turn: int, parts: dict[int, Contribution], arrivals: list[Arrival]
    ) -> None:
        """Sum the contributions in the order of the members, and send the sum to all."""
        rows = [parts[member] for member in sorted(parts)]
        total = rows[0].data
        for row in rows[1:]:
            total = total.add_(row.data)
        found = Contribution(turn, sum(row.weight for row in rows), total)
        others = [peer for peer in range(self._members) if peer != self._me]
        # One sum of a piece at a time: otherwise sums would pile up here for a peer that receives slowly.
        for peer in others:
            if (work := self._published.get((peer, stream, piece))) is not None:
                work.wait()
        with self._changed:
            for peer in others:
                self._published[peer, stream, piece] = self._send(peer, _SUM, stream, piece, found, arrivals)
            self._sums[stream, turn, piece] = found, arrivals
            self._changed.notify_all()

    # ---- messages --------------------------------------------------------------------------------------------------

    def _send(
        self,
        peer: int,
        kind: int,
        stream: int = 0,
        piece: int = 0,
        what: Contribution | None = None,
        arrivals: Sequence[Arrival] = (),
    ) -> Procedure:
        """Send a message after those before it; returns the work to wait for. With the lock."""
        values: list[float] = [what is None, stream, piece]
        if what is not None:
            values += [what.turn, what.weight, what.data.numel(), what.data.itemsize, *itertools.chain(*arrivals)]
        header = torch.zeros(_HEADER + 2 * self._members, dtype=torch.float64)
        header[: len(values)] = torch.tensor(values, dtype=torch.float64)
        parts = [header] if what is None else [header, what.data]
        if (kind, peer) not in self._senders:
            self._senders[kind, peer] = Worker(f"sums-to-{kind}-{peer}", Procedure.run)
        message = Procedure(partial(send_all, parts, self._peers[peer], self._groups[kind]))
        self._senders[kind, peer].put(message)
        return message

    def _receive(self, kind: int, peer: int) -> None:
        """Receive messages of a kind from ``peer`` until it ends its run. Runs in a thread."""
        header = torch.empty(_HEADER + 2 * self._members, dtype=torch.float64)
        try:
            while True:
                dist.recv(header, self._peers[peer], self._groups[kind])
                ends, stream, piece, turn, _, numel, size = map(int, header[:_HEADER])
                if ends:
                    with self._changed:
                        self._ends[kind, peer] += 1
                        # With fewer ends than runs, this member is in its next run, which the thread serves as well.
                        if self._ends[kind, peer] >= self._runs:
                            del self._threads[kind, peer]
                            return
                    continue
                data = torch.empty(numel, dtype=torch.float64 if size == 8 else torch.float32)
                dist.recv(data, self._peers[peer], self._groups[kind])
                self._store(peer, kind, stream, piece, Contribution(turn, float(header[4]), data), header)
        except BaseException as error:
            self._fail(error)

    def _store(self, peer: int, kind: int, stream: int, piece: int, what: Contribution, header: Tensor) -> None:
        with self._changed:
            if kind == _CONTRIBUTION:
                self._received[peer] += 1
                self._take(peer, stream, piece, what)
            else:
                # A peer that is ahead waits, as nothing more of it is received meanwhile.
                while what.turn > self._turns[stream] + 1 and self._running:
                    self._changed.wait(1.0)
                arrivals = [Arrival(bool(present), share) for present, share in header[_HEADER:].view(-1, 2).tolist()]
                self._sums[stream, what.turn, piece] = what, arrivals
            self._changed.notify_all()

    # ---- the run ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start the threads, unless they run."""
        if not self._running:
            self._running, self._error = True, None
            self._runs += 1
        for kind, member in itertools.product((_CONTRIBUTION, _SUM), range(self._members)):
            mine = member == self._me
            if (kind, member) in self._threads or (mine and kind != _SUM):
                continue
            target, given = (self._close_sums, ()) if mine else (self._receive, (kind, member))
            thread = threading.Thread(target=target, args=given, name=f"lt_zero-sums-{kind}-{member}", daemon=True)
            self._threads[kind, member] = thread
            self._started.append(thread)
            thread.start()

    def end(self) -> None:
        """End the run, on all members: messages that are under way arrive, and the threads end."""
        with self._changed:
            if not self._running:
                return
            self._running = False
            for kind, peer in itertools.product((_CONTRIBUTION, _SUM), range(self._members)):
                if peer != self._me:
                    with suppress(RuntimeError):  # this one has ended; the others wait for the message
                        self._send(peer, kind)
            self._changed.notify_all()
            sending = [thread for sender in self._senders.values() for thread in sender.threads]
            for sender in self._senders.values():
                sender.stop()
        until = time.monotonic() + _PATIENCE
        for thread in [*self._started, *sending]:
            thread.join(max(0.0, until - time.monotonic()))
        self._started = [thread for thread in self._started if thread.is_alive()]

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        """True if this is a rank of the first member."""
        return self._me == 0

    def part(self, numel: int) -> tuple[int, int]:
        """The range of elements, of ``numel``, that this rank of its member sums."""
        each = numel // self._ranks
        return self._mesh.shard_rank * each, (self._mesh.shard_rank + 1) * each

    def my_part(self, of_ranks: list[Any]) -> list[Any]:
        """Select the entries of this rank's shard column from a list over all ranks."""
        return [of_ranks[rank] for rank in self._mesh.replica_ranks(self._mesh.shard_rank)]

    def unsent(self, gather: Callable[[list[int]], list[list[int]]]) -> dict[str, tuple[Tensor, Tensor]]:
        """Contributions of this member that are in no sum yet, by name: their sum, and counts of each element.

        Collective: between steps, and no message is under way afterwards.

        Args:
            gather: collects a list of each member; returns them by member.
        """
        sent = gather(list(self._sent))
        with self._changed:
            while any(row[self._me] > self._received[member] for member, row in enumerate(sent)):
                self._changed.wait(1.0)
                if self._error is not None:
                    raise RuntimeError(f"Contributions to sums of gradients do not arrive: {self._error}")
            found = {}
            for stream in self._streams:
                rows = torch.zeros(stream.numel, dtype=stream.dtype)
                counts = torch.zeros(stream.numel)
                for piece, (lo, hi) in enumerate(stream.spans):
                    parts = list(self._open[stream.number, piece].parts.values())
                    for part in [*parts, *filter(None, [stream.carried.get(piece)])]:
                        rows[lo:hi] += part.data
                        counts[lo:hi] += part.weight
                found[stream.name] = rows, counts
            return found | self._restored

    def restore(self, owed: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Drop all that is in no sum yet, and let this member owe ``owed``: sums, and counts of each element.

        On all members, right after ``unsent``.
        """
        with self._changed:
            self._restored = dict(owed)
            for stream in self._streams:
                stream.carried.clear()
                stream.arrived = [True] * len(stream.spans)
                self._take_over(stream)
            for opened in self._open.values():
                for members in (opened.parts, opened.absent, opened.awaited):
                    members.clear()
                opened.begin(opened.turn)

    def _take_over(self, stream: _Stream) -> None:
        """Let a stream carry what was restored of it. A piece has one weight, its largest count: padding has none."""
        rows, counts = self._restored.pop(stream.name, (None, None))
        if rows is None or counts is None:
            return
        for piece, (lo, hi) in enumerate(stream.spans):
            if counts[lo:hi].any() or rows[lo:hi].any():
                stream.add(piece, Contribution(stream.turn, float(counts[lo:hi].max()), rows[lo:hi].to(stream.dtype)))


class TolerantHierarchy(Hierarchy):
    """Sums of gradients inside nodes, then between them, without late ones; ``tolerant``: takes the latter."""

    name = "tolerant"

    def __init__(self, connections: Connections, arenas: Sequence[SharedArena], tolerant: TolerantSum) -> None:
        super().__init__(connections, arenas)
        # While sums are apart, one member stands for what all have summed before (grad_reducer.py, Note [Sums over
        # replicas]), and it may be late.
        self.sums_apart = False
        self.tolerant = tolerant

    def close(self) -> None:
        self.tolerant.end()

    def reduce_scatter(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        return self._all([self._reducing.submit(lambda: reduction.store(self._mean(reduction, launch)))], launch)

    def all_reduce(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        def run() -> None:
            self._store_all(reduction, self._mean(reduction, launch))

        return self._all([self._reducing.submit(run)], launch)

    def _mean(self, reduction: Reduction, launch: CollectiveId | None) -> Tensor:
        assert launch is not None
        total = self._sum(reduction).to(wide(reduction.out.dtype))
        self.tolerant.sum(launch.name, total)
        return total


def tolerance_of(
    share: float, sharded: bool, mesh: Mesh, nodes: list[list[int]], backend: str, device: torch.device
) -> tuple[int, int]:
    """The ranks of a member, and how many members may be late, for ``communication.slow_node_tolerance=share``.

    Args:
        share: of the ranks, above 0.
        sharded: whether anything is sharded, over the ``shards`` of ``mesh``.
        mesh: of all ranks.
        nodes: the ranks of each node.
        backend: of the groups.
        device: of the gradients.

    Raises:
        ConfigError: it cannot be had.
    """
    ranks = (whole_nodes(nodes) or 1) if len(nodes) > 1 else 1
    problem = ""
    if backend != "gloo" or device.type != "cpu":
        problem = (
            f"a collective of {backend} is one operation of all ranks, which none can join later. Remove the key, or "
            "train with gloo on CPUs"
        )
    elif sharded and mesh.shards != ranks:
        problem = (
            f"at this stage every rank needs updated shards of {mesh.shards} ranks, a late one's, too. Set "
            "zero_optimization.stage=0" + f", or zero_optimization.mics_shard_size={ranks}" * (ranks > 1)
        )
    elif int(share * mesh.world + 1e-9) < ranks:
        what = f"a node has {ranks} ranks" if ranks > 1 else "that is none"
        problem = (
            f"{int(share * mesh.world + 1e-9)} of {mesh.world} ranks may be late, and {what}. Write at least "
            f"{math.ceil(1000 * ranks / mesh.world) / 1000:g}"
        )
    if problem:
        raise ConfigError([Problem(KEY, f"{KEY}={share}: {problem}.")])
    return ranks, int(share * mesh.world + 1e-9) // ranks
