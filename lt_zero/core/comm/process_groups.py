"""Process groups of torch.distributed: made, connected, tried."""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import util as multiprocessing_util
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lt_zero.common import accelerator, compat
from lt_zero.common.descriptors import explain_full_table, fullness, has_room, is_full_table
from lt_zero.common.units import format_bytes
from lt_zero.core.comm.options import CommunicationOptions
from lt_zero.core.health.before_joining import after_joining
from lt_zero.core.health.ended_ranks import WHERE, last_cause, remember_cause, tells

log = logging.getLogger("lt_zero")

_DEFAULTS = CommunicationOptions()
_LATER_S = (
    25.0  # by which other connections close after those by which hang detection probes peers, and finds which it is
)
_TCP_RTO_MAX_MS = 44  # Linux 6.15
_LONGEST_IDLE_S = 60  # before the first question to a peer of whom nothing is heard
_TRIES = 8  # in the whole time, at least, once pauses no longer double; after 15 Linux gives up whatever the time
_PROBE_TAG = 0x5AB1  # of a message that is never received
_MEETING_TAG = 0x5AB2
_SILENT_TAG = 0x5AB3  # of a message that is never sent
_TIMEOUT = timedelta(minutes=30)  # torch's for new groups
_CPU = torch.device("cpu")
_IDLE_S = 5.0  # for kernels of a device to end after an error
_ABORT_S = 10.0
# In the error of the process that serves torch's store.
_SERVES, _TAKEN = "server socket has failed to listen", "EADDRINUSE"
_LINGER_S = 10.0  # that rank 0 waits for others that read why one has failed
_OF_GROUP = 3  # descriptors of a group of gloo, beside one for each rank
_SPARE = 8  # descriptors that the set-up of a run needs beside its groups, and that other threads may take meanwhile
_FAILED = 1  # in the answer of rank 0: the store tells which rank has failed
_FULL = 2  # likewise, added to the number of a rank: the table of its descriptors is full
_set_ups: list[int] = []  # numbers of the calls of ``await_all``
_inherited: list[object] = []  # groups of a process that has forked this one, which are kept for ever


def backend_of(device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """The backend that moves tensors of ``device`` in ``group``, by default in the default group.

    A group may have one for each kind of device ("cpu:gloo,cuda:nccl"), or not name the one that it has ("undefined").
    """
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return backends.get(device.type) or str(dist.get_backend(group))


def check_device(device: torch.device, ranks: int, backend: str | None = None) -> None:
    """Check that ranks can compute on ``device`` and exchange its tensors.

    ``backend``: of the default group that will be made; None: there is one, or there is one rank.

    Raises:
        RuntimeError: torch.accelerator has no such device; or the backend does not move its tensors.
    """
    if not accelerator.is_accelerator(device):
        return
    there = accelerator.default_kind()
    if there.type != device.type:
        found = f"{there.type!r} only" if accelerator.is_accelerator(there) else "none"
        raise RuntimeError(
            f"device={str(device)!r}: lt_zero takes streams and memory of a device from torch.accelerator, which has "
            f"{found} in this process. Import the package that brings {device.type!r} to torch, or compute on the CPU."
        )
    if ranks == 1:
        return
    backend = backend_of(device) if backend is None or dist.is_initialized() else backend
    moves = dist.Backend.backend_capability.get(backend)  # None: torch does not know
    if moves is not None and device.type not in moves:
        raise RuntimeError(
            f"device={str(device)!r} with {ranks} ranks: process groups have the backend {backend!r}, which moves "
            f"tensors of {' and '.join(moves)} only. Use one rank, or a backend for {device.type!r}: the package that "
            "brings the device to torch registers one, to be named by process_group_backend of the strategy, or by "
            "dist_backend of init_distributed."
        )


def one_queue(device: torch.device) -> bool:
    """True if all kernels of a GPU take one queue: then collectives of different groups cannot pass each other."""
    return backend_of(device) != "gloo" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def new_group(
    ranks: list[int] | None,
    timeout: timedelta | None,
    backend: str,
    device: torch.device,
    inside: bool = True,
    probed: bool = False,
    options: CommunicationOptions = _DEFAULTS,
    alone: bool = False,
    exchanges: bool = False,
    connects: bool = True,
) -> dist.ProcessGroup:
    """A connected group: connecting at its first use could deadlock with other groups' collectives. Collective.

    ``inside``: whether this rank is one of ``ranks``. ``probed``: whether hang detection probes its connections.
    ``options``: of its connections. ``alone``: only ``ranks``, and not all of the default group, make
    it; then all of them have to have made equally many groups before. ``exchanges``: whether ranks will send each other
    something of their own: an all-to-all, or messages. ``connects``: False leaves connecting to the first collective,
    which a group of one rank may never have.

    Raises:
        RuntimeError: the ranks cannot connect.
    """
    apart = backend == "gloo" or not connects
    # A rank outside opens nothing. It comes by here for each of the groups of all other ranks.
    limited = closing_if_unanswered(probed, options) if inside else nullcontext()
    try:
        with limited, _splitting_nothing_off() if apart else nullcontext():
            group: dist.ProcessGroup = dist.new_group(ranks, timeout, backend, use_local_synchronization=alone)
    except RuntimeError as error:
        if is_full_table(error):
            raise RuntimeError(f"The ranks cannot connect a {backend} process group: {error}\n{fullness()}") from error
        raise RuntimeError(
            f"The ranks cannot connect a {backend} process group: {error}\nThe interface of a "
            "host's name may lead nowhere: set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) on every node to the one "
            "that the nodes share, as `ip addr` names it."
        ) from error
    if inside and backend != "gloo" and connects:
        _connect(group, device, exchanges)
    return group


@dataclass
class Communicators:
    """A rank's communicators of NCCL, or of another backend of its device.

    Attributes:
        number: those with other ranks.
        nbytes: what they have taken of the device, as far as it tells. Other processes there count, too.
    """

    number: int = 0
    nbytes: int = 0

    @contextmanager
    def another(self, device: torch.device) -> Iterator[None]:
        """Context that makes and connects one, and measures what that takes."""
        before = accelerator.taken_beside(device)
        yield
        after = accelerator.taken_beside(device)
        self.number += 1
        if before is not None and after is not None:
            self.nbytes += max(0, after - before)

    def __str__(self) -> str:
        """The communicators and their memory, in words."""
        return f"{format_bytes(self.nbytes)} of {self.number} communicators"


@contextmanager
def _splitting_nothing_off() -> Iterator[None]:
    """Context in which ``dist.new_group`` splits no communicator off a default group of NCCL.

    If that group is bound to a device, torch lets a rank take part in a split of all ranks for every group that it is
    not in, even if the group is one of gloo: hundreds of operations of the whole cluster at the start of a run, which
    hang if ranks call them unequally (pytorch issue 145376). Groups that are made by their ranks alone
    (``use_local_synchronization``) are no remedy. Their names come again once earlier groups are destroyed, and with
    them what the store has of these.
    """
    default = dist.group.WORLD
    bound = getattr(default, "bound_device_id", None)
    if bound is None:
        yield
        return
    assert default is not None
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


def _connect(group: dist.ProcessGroup, device: torch.device, exchanges: bool) -> None:
    """Let NCCL make all connections that the group will need. gloo has connected by now.

    Since version 2.22 NCCL connects what an algorithm needs in the first collective that uses it, and blocks the host
    meanwhile: a small all-reduce takes trees, all-gather and reduce-scatter take rings, all-to-all and messages connect
    each rank with each.
    """
    size = dist.get_world_size(group)
    one, whole = torch.zeros(1, device=device), torch.zeros(size, device=device)
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    dist.all_reduce(one, group=group)
    gather(whole, one, group=group)
    scatter(one, whole, group=group)
    if exchanges:
        dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
    accelerator.synchronize(device)


def can_split(backend: str) -> bool:
    """True if groups of ``backend`` can be split off others: of NCCL, whose default group is bound to a device."""
    return backend == "nccl" and getattr(dist.group.WORLD, "bound_device_id", None) is not None


def split_group(
    parent: dist.ProcessGroup,
    parts: list[list[int]],
    timeout: timedelta | None,
    device: torch.device,
    exchanges: bool = False,
) -> dist.ProcessGroup:
    """The connected group of that of ``parts`` which has this rank, all made in one operation. Collective.

    ``new_group`` takes one for each part, of all ranks: minutes for the rows and columns of 1,000 ranks.

    Args:
        parent: numbers the ranks of ``parts``, which are disjoint; one has this rank.
        exchanges: as for ``new_group``.
    """
    group: dist.ProcessGroup | None = dist.split_group(parent, parts, timeout)
    assert group is not None
    _connect(group, device, exchanges)
    return group


def await_all(timeout: timedelta | None = None) -> None:
    """Wait for all ranks in a default group that has gloo; the end of a rank closes its connections. Collective.

    Making another group would wait for a rank that has ended meanwhile, say for want of memory, until a timeout. Ranks
    may come late (they load data, say), so the default group's own timeout, which may be short, has no say.

    Args:
        timeout: for ranks that come late, as for the groups that are made next.

    Raises:
        RuntimeError: ranks have ended; names them. Or they cannot be reached after an error that has ended the last run
            of this process; names its cause. Or ranks are not there in time.
    """
    if backend_of(_CPU) != "gloo":
        return
    _set_ups.append(len(_set_ups) + 1)
    try:
        _meet(timeout or _TIMEOUT)
    except _FailureError as failure:
        raise RuntimeError(str(failure)) from None
    except RuntimeError as error:
        # After a timeout all connections are closed, so probing them would not tell which ranks have ended.
        if "Timed out waiting" in str(error):
            late = f"within {(timeout or _TIMEOUT).total_seconds():.0f} s (the timeout of process groups)"
            raise RuntimeError(f"Other ranks did not come to set up the model {late}. ({error})") from None
        gone = [str(rank) for rank in range(dist.get_world_size()) if rank != dist.get_rank() and not _connected(rank)]
        if not gone:
            raise
        ranks = f"Rank{'s' if len(gone) > 1 else ''} {', '.join(gone)}"
        if cause := last_cause():
            # Hang detection closes connections to end a wait of other packages, so these processes may well be alive.
            raise RuntimeError(
                f"{ranks} cannot be reached: an error ended the last run in these processes, and may have closed"
                " connections that this run needs; or these ranks have ended since: killed (for want of memory, by the"
                f" scheduler), or by an error or an exit of the script. {cause} Start all processes again, and resume"
                f" from a checkpoint. ({error})"
            ) from None
        raise RuntimeError(
            f"{ranks} ended before the model was set up: killed (for want of memory, by the scheduler), or by an error"
            " or an exit of the script. See the last that was printed there, and dmesg. Or an error of an earlier run"
            f" in these processes has closed their connections: then start the processes again. ({error})"
        ) from None
    remember_cause("")


def number_of_set_ups() -> int:
    """Number of times that this process has come to ``await_all``: all ranks come equally often."""
    return len(_set_ups)


def awaits_all(frame: FrameType) -> bool:
    """True if a thread, whose innermost frame this is, waits in ``await_all``."""
    outer = frame.f_back
    return frame.f_code is _done.__code__ and outer is not None and outer.f_code is _meet.__code__


def has_room_for_group(ranks: int) -> bool:
    """True if this process can open what a group needs that connects it with each of ``ranks``.

    The others would wait until a timeout for a rank that fails while it connects, or gloo would end the process. So all
    ranks tell each other before.
    """
    return has_room(_OF_GROUP + ranks + _SPARE)


def no_room(rank: int, here: bool) -> RuntimeError:
    """The error of ranks that do not connect, because the table of descriptors of ``rank`` is full.

    ``here``: whether that of this process is.
    """
    if here:
        return RuntimeError(f"This process cannot connect a process group. {fullness()}")
    return RuntimeError(
        f"Rank {rank} cannot connect a process group: the table of its file descriptors is full (ulimit -n): see what"
        f" it printed{WHERE}. Rank {dist.get_rank()} waited for it. Correct that, and start all ranks again."
    )


class _FailureError(RuntimeError):
    """A rank has failed before its model was set up, or cannot set it up, and has told why."""


def _meet(timeout: timedelta) -> None:
    """A barrier of the default group with a timeout of its own, which gloo has for single messages only.

    Raises:
        _FailureError: a rank has failed: Note [Before the model is set up]. Or it could not connect the next group.
        RuntimeError: gloo's, without a known reason.
    """
    has_room_here, ranks = has_room_for_group(dist.get_world_size()), range(1, dist.get_world_size())
    token = torch.tensor([0.0 if has_room_here else 1.0])
    if dist.get_rank() > 0:
        here = dist.isend(token, 0, tag=_MEETING_TAG)
        answer = torch.zeros(1)
        _done(dist.irecv(answer, 0, tag=_MEETING_TAG), timeout)  # rank 0 may answer without receiving, after a failure
        if int(answer) == _FAILED:
            raise _failure(_store_of_set_up())
        _done(here, timeout)
        if int(answer) >= _FULL:
            raise _FailureError(str(no_room(int(answer) - _FULL, not has_room_here)))
        return
    full = [] if has_room_here else [0]
    for rank in ranks:
        try:
            _done(dist.irecv(token, rank, tag=_MEETING_TAG), timeout)
        except RuntimeError as error:
            store = _store_of_set_up()
            if "Timed out waiting" in str(error) or not store.check(["failed"]):
                raise
            _pass_on(store)
            raise _failure(store) from error
        full += [rank] if bool(token) else []
    answer = torch.tensor([float(_FULL + full[0]) if full else 0.0])
    for work in [dist.isend(answer, rank, tag=_MEETING_TAG) for rank in ranks]:
        _done(work, timeout)
    if full:
        raise _FailureError(str(no_room(full[0], not has_room_here)))


def _store_of_set_up() -> Store:
    return PrefixStore("lt_zero set-up", dist.group.WORLD.get_group_store())  # type: ignore[union-attr]


def _failure(store: Store) -> _FailureError:
    """The error of a rank that waits for one that has failed; counts it among those that have read why."""
    rank, text = json.loads(store.get("failed"))
    store.add("read", 1)
    return _FailureError(
        f"Rank {rank} ended before the model was set up, with {text}: see what it printed{WHERE}. Rank"
        f" {dist.get_rank()} waited for it. Correct that, and start all ranks again."
    )


def _pass_on(store: Store) -> None:
    """Let the ranks that meet rank 0, which this is, read why one has failed; waits some seconds at most."""
    others = [rank for rank in range(1, dist.get_world_size()) if _connected(rank)]
    works = [dist.isend(torch.full((1,), float(_FAILED)), rank, tag=_MEETING_TAG) for rank in others]
    until = time.monotonic() + _LINGER_S
    while store.add("read", 0) < len(works) and time.monotonic() < until:
        time.sleep(0.05)


def _tell_of_failure(text: str) -> None:
    """Tell the ranks that meet, or will meet, before a model is set up of an error that ends this process.

    No-op once a model was set up: then its detector of hangs has told them.
    """
    if dist.get_world_size() == 1 or backend_of(_CPU) != "gloo" or tells():
        return
    if dist.get_rank() > 0 and not _connected(0):
        return  # the client of a store that is gone would log pages below the error
    store = _store_of_set_up()
    if store.add("failures", 1) == 1:
        store.set("failed", json.dumps([dist.get_rank(), text]))
    if dist.get_rank() == 0:
        _pass_on(store)


after_joining.append(_tell_of_failure)


def _done(work: dist.Work | None, timeout: timedelta) -> None:
    assert work is not None
    work.wait(timeout)


def _connected(rank: int) -> bool:
    try:
        dist.isend(torch.zeros(1), rank, tag=_PROBE_TAG)
    except RuntimeError:
        return False
    return True


def abort_nccl(limit: float = _ABORT_S) -> None:
    """End all collectives of NCCL in this process, and those to come, after an error; waits at most ``limit`` seconds.

    Kernels wait on the device for a rank that is gone, and the process would wait for them at its exit, until torch's
    watchdog ends it after half an hour. Groups of gloo stay: their waits end by themselves.
    """
    groups = [group for group in compat.process_groups() if backend_of(torch.device("cuda"), group) == "nccl"]
    if groups and not _done_within(limit, partial(compat.abort_nccl, groups), "abort"):
        log.warning("NCCL did not end its collectives within %g s: this process may wait at its exit.", limit)


def abort_if_stuck(device: torch.device, patience: float = _IDLE_S, limit: float = _ABORT_S) -> None:
    """``abort_nccl`` if the kernels of ``device`` do not end within ``patience`` seconds after an error.

    If they end, no collective waits for another rank, and a script that has caught the error can go on.
    """
    if accelerator.is_accelerator(device) and not _done_within(patience, partial(_await, device), "synchronize"):
        abort_nccl(limit)


def _await(device: torch.device) -> None:
    # A kernel has failed: then none waits any more.
    with suppress(RuntimeError):
        accelerator.synchronize(device)


def _done_within(seconds: float, call: Callable[[], object], name: str) -> bool:
    """Run ``call``, which may block for ever, on a thread; returns whether it was done within ``seconds``."""
    thread = threading.Thread(target=call, name=f"lt_zero-{name}", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def rank_and_size() -> tuple[int, int]:
    """This rank of the default group, and how many it has; (0, 1) without one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def exists(group: dist.ProcessGroup) -> bool:
    """True if a process group of this rank has not been destroyed."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True


def is_chosen(group: dist.ProcessGroup | None) -> bool:
    """True if a script has named a group: Fabric passes that of all processes in place of None."""
    return group is not None and group is not dist.group.WORLD


def close_connections(group: dist.ProcessGroup) -> None:
    """Close all of this rank's connections in a gloo group, which ends all waits for them."""
    for peer in dist.get_process_group_ranks(group):
        if peer != dist.get_rank():
            # The timeout closes all connections of the rank. If this one is closed already, others may still be open.
            with suppress(RuntimeError):
                _done(dist.irecv(torch.empty(1), peer, group, tag=_SILENT_TAG), timedelta(milliseconds=1))


@contextmanager
def closing_if_unanswered(probed: bool, options: CommunicationOptions = _DEFAULTS) -> Iterator[None]:
    """Context: connections that are opened inside close if the peer's kernel does not answer for ``link_timeout``.

    A machine that loses power or its network closes no connections, and the kernel would try for 15 minutes to reach
    it. Kernels answer for processes that are busy, so these are not given up. (Except for one that is stopped while its
    buffers are full.) No-op without /proc. Inside of another such context, the outer one decides.
    """
    seconds = options.link_timeout if probed else options.link_timeout + _LATER_S
    before = _sockets()
    yield
    for inode, number in _sockets().items() - before.items():
        # The socket may have been closed since it was listed.
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as opened:
            if inode in before or opened.type != socket.SOCK_STREAM or opened.family == socket.AF_UNIX:
                continue
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, min(math.ceil(seconds / 4), _LONGEST_IDLE_S))
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            # Keep-alive is only for idle connections; this limit is also for data that is not acknowledged.
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))
            # Otherwise pauses between tries double up to two minutes. Older kernels do not know the option.
            with suppress(OSError):
                opened.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, max(1000, round(seconds * 1000 / _TRIES)))


@contextmanager
def joining(options: CommunicationOptions = _DEFAULTS) -> Iterator[None]:
    """Context in which the default group is made: its connections have the limits of others, its errors name rank 0.

    Raises:
        RuntimeError: the store, which rank 0 serves, is gone or cannot be reached.
    """
    try:
        with closing_if_unanswered(False, options):
            yield
    except OSError as error:
        explain_full_table(error)
        raise
    except dist.DistNetworkError as error:
        if is_full_table(error):
            raise RuntimeError(f"This process cannot join the run: {error}\n{fullness()}") from error
        place = _master_place()
        reason = str(error).partition("\n")[0]
        if _SERVES in reason:
            taken = "the port is taken, by a run that has not ended or by another program"
            why = taken if _TAKEN in reason else reason
            raise RuntimeError(
                f"Rank 0 cannot serve the store of all ranks at {place} (MASTER_ADDR:MASTER_PORT): {why}. Set "
                "MASTER_PORT to a free port on all ranks (`ss -ltnp` names the program that has one), and start them "
                "again."
            ) from error
        raise RuntimeError(
            f"This process cannot join the run: rank 0, which serves the store of all ranks (MASTER_ADDR:MASTER_PORT "
            f"is {place}), has ended, or cannot be reached. See the last that rank 0 printed, and whether the address "
            f"is right and open. ({reason})"
        ) from error


def _master_place() -> str:
    return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"


def _sockets() -> dict[int, int]:
    """The sockets of this process: their inodes, and a descriptor of each."""
    found = {}
    with suppress(OSError):
        for number in map(int, os.listdir("/proc/self/fd")):
            try:
                about = os.fstat(number)
            except OSError:  # closed since
                continue
            if stat.S_ISSOCK(about.st_mode):
                found[about.st_ino] = number
    return found


def try_gloo() -> None:
    """Open and close a gloo group of this process alone, which fails as most groups do: at the network interface.

    Raises:
        RuntimeError: torch is built without gloo, or gloo cannot use the network interface.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        raise RuntimeError("torch is built without gloo.")
    dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))  # type: ignore[attr-defined]


def nccl_version() -> str:
    """The version of torch's NCCL; "" if it is built without."""
    return accelerator.nccl_version() if dist.is_available() and dist.is_nccl_available() else ""


def leave_inherited_groups() -> None:
    """Forget the process groups that this process has from the one that forked it; no-op if there are none.

    Their threads are not here. The groups stay in memory, as their ends would wait for these threads.
    """
    if dist.is_initialized():
        _inherited.append(compat.process_groups_with_stores())
        dist.destroy_process_group()


def begin_restarted(backend: str, timeout: timedelta | None, device: torch.device | None) -> None:
    """Make the default process group if torchrun has restarted this process; else a no-op.

    torchrun serves one store to all restarts, and torch would read the addresses in it of processes that have ended.
    So each restart (``--max-restarts``) has a part of the store to itself.

    Args:
        device: to which the group is bound, so that NCCL splits groups off it instead of connecting each anew; None:
            to none.
    """
    number = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # else rank 0 serves a store of its own
    if number == "0" or not shared or dist.is_initialized():
        return
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    whole, _, _ = next(dist.rendezvous("env://", rank, world))  # type: ignore[attr-defined]
    store = PrefixStore(f"restart {number}", whole)
    if timeout is not None:
        store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=device)
    if "nccl" in backend:
        # As Lightning does, because torch warns of a group that is not destroyed.
        atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def own_gpu(local_rank: int) -> int:
    """The index of the GPU of a rank. A launcher that gives each task one GPU makes it the only one that is seen."""
    return 0 if accelerator.count() == 1 else local_rank


def is_part(group: dist.ProcessGroup) -> bool:
    """True if a process group does not have all ranks."""
    return dist.get_world_size(group) != dist.get_world_size()


def init_alone(
    backend: str | None = None, timeout: timedelta | None = None, device: torch.device | None = None
) -> None:
    """Make the default process group of this process alone, if there is none.

    It needs no network, and so no port that another program could have taken since it was found free.

    Args:
        backend, timeout: as for ``init_distributed`` (launched_group.py).
        device: to which the group is bound, as for ``begin_restarted``.
    """
    if dist.is_initialized():
        return
    name = backend or dist.get_default_backend_for_device(accelerator.default_kind())
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(name, store=store, rank=0, world_size=1, timeout=timeout, device_id=device)
    # Ranks that other launchers fork, such as Lightning's for ddp_notebook, would take it for the group of all.
    multiprocessing_util.register_after_fork(init_alone, _leave_group_of_one)
    if "nccl" in name:
        # As Lightning does, because torch warns of a group that is not destroyed.
        atexit.register(_leave)


def _leave_group_of_one(_: object) -> None:
    """Leave the parent's group of one rank in a process that has just been forked, if it is a rank of another run.

    A worker of a DataLoader keeps it: code for datasets asks the group for rank and size.
    """
    if compat.is_started_rank() and dist.is_initialized() and dist.get_world_size() == 1:
        leave_inherited_groups()
