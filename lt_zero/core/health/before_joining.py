"""Ranks that fail before a model is set up: the others learn why, and do not wait for them.

Note [Before the process group]
    torch waits for all ranks in C++, for as long as the group's timeout. A rank whose start fails (a bad variable on
    its node, a warning that is an error there) would keep the others waiting for half an hour, if its launcher does not
    end them as torchrun does. So ranks meet here first, in slices: rank 0 serves torch's store at the address of the
    run, each rank counts itself there, and looks whether another one has failed. A process that an error ends before it
    has met the others tells the store; rank 0 serves it for that, and lets the others read for some seconds.
    A rank that ends otherwise (killed, by an exit, or before this package is imported) tells nothing: then the others
    wait for the timeout of process groups, and name it.

Note [Before the model is set up]
    A script may fail between joining and the set-up of its model, where ranks meet a second time
    (``process_groups.await_all``). It tells the store of the default group, and rank 0 lets the others read it. Rank 0
    meets each of them there: it passes on to all that one has failed, because they would see a closed connection to
    rank 0, too, and could not tell which of the two was first.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from types import TracebackType

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lt_zero.common.descriptors import explain_full_table
from lt_zero.core.health.ended_ranks import WHERE, summary
from lt_zero.core.health.launchers import Tasks, launched_tasks

_LINGER_S = 10.0  # that a process waits which has failed, for rank 0 or (rank 0) for the others
_TIMEOUT = timedelta(minutes=30)  # torch's for new groups
_LONGEST_PAUSE_S = 0.1
_ANSWER_S, _SILENT = 30.0, 2  # seconds between two looks whether anybody listens; so often without an answer

_met: list[Tasks] = []  # the ranks that this process has met: later errors concern their process group
_place: list[Callable[[], Tasks | None]] = []
# Called with the text of an error that ends this process after it has joined the run.
after_joining: list[Callable[[str], None]] = []


def watch_start(place: Callable[[], Tasks | None] = launched_tasks) -> None:
    """Tell the other ranks of an error that ends this process before it has met them.

    Args:
        place: this rank, and where the store of all ranks will be, as far as that is known then.
    """
    if not _place:
        sys.excepthook = _telling(sys.excepthook)
    _place[:] = [place]


def _telling(hook: Callable[..., object]) -> Callable[..., object]:
    """Hook for uncaught errors: what ``hook`` does, and ``_failed``.

    torch and ended_ranks.py put theirs over it once the process has joined.
    """

    @wraps(hook)
    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        explain_full_table(error)
        hook(kind, error, trace)
        _failed(error)

    return tell


@contextmanager
def met(tasks: Tasks, timeout: timedelta | None) -> Iterator[None]:
    """Context in which the default group is made, after all ranks have come. Collective.

    No-op under torchrun, which ends all ranks if one fails.

    Args:
        tasks: this rank; the address and port at which rank 0 serves the store.
        timeout: for ranks that come late, as for the group.

    Raises:
        RuntimeError: a rank has failed before it came; names it and its error. Or ranks have not come in time; names
            them.
    """
    if tasks.world == 1 or tasks.address is None or _is_served_elsewhere() or dist.is_initialized():
        yield
        return
    limit = timeout or _TIMEOUT
    store = _store(tasks, limit)  # kept until torch has made its own, which shares the server
    _meet(store, tasks, limit.total_seconds())
    _met.append(tasks)
    yield
    del store


def _meet(store: Store, tasks: Tasks, limit: float) -> None:
    started = time.monotonic()
    store.set(f"here/{tasks.rank}", "")
    store.add("here", 1)
    while store.add("here", 0) < tasks.world:
        if store.check(["failed/1"]):
            rank, text = json.loads(store.get("failed/1"))
            store.add("told", 1)
            if tasks.rank == 0:
                _linger(store, tasks.world)
            _met.append(tasks)  # this rank's error tells nothing new
            raise RuntimeError(
                f"Rank {rank} ended before it joined the run, with {text}: see what it printed{WHERE}. Rank"
                f" {tasks.rank} waited for it. Correct that, and start all ranks again."
            )
        waited = time.monotonic() - started
        if waited > limit:
            late = [str(rank) for rank in range(tasks.world) if not store.check([f"here/{rank}"])]
            raise RuntimeError(
                f"Rank{'s' if len(late) > 1 else ''} {', '.join(late)} did not join the run within {limit:.0f} s (the"
                " timeout of process groups): the script came to its end there without joining (an exit, or a branch"
                " without a fit), was killed, was never started, or is late. See the last that was printed there, and"
                f" start all ranks again. Rank {tasks.rank} waited."
            )
        time.sleep(min(max(waited / 10, 1e-3), _LONGEST_PAUSE_S))


def _linger(store: Store, world: int) -> None:
    """Serve the store until all other ranks have read why they end, or have failed, too."""
    until = time.monotonic() + _LINGER_S
    while store.add("told", 0) + store.add("failures", 0) < world and time.monotonic() < until:
        time.sleep(_LONGEST_PAUSE_S)


def _failed(error: BaseException) -> None:
    """Tell the others of an error that ends this process; waits some seconds at most."""
    if _is_served_elsewhere() or isinstance(error, KeyboardInterrupt):
        return
    if dist.is_initialized():
        for tell in after_joining:
            with suppress(Exception):  # the error itself was printed
                tell(summary(error))
        return
    if _met:
        return
    # A variable may be the problem, or the store cannot be reached: the error itself was printed.
    with suppress(Exception):
        tasks = _place[0]()
        if tasks is None or tasks.world == 1 or tasks.address is None:
            return
        store = _store(tasks, timedelta(seconds=_LINGER_S))
        number = store.add("failures", 1)
        store.set(f"failed/{number}", json.dumps([tasks.rank, summary(error)]))
        if tasks.rank == 0:
            _linger(store, tasks.world)


def _store(tasks: Tasks, timeout: timedelta) -> Store:
    store = _connect(tasks, timeout, serves=True) if tasks.rank == 0 else _client(tasks, timeout)
    return PrefixStore("lt_zero before joining", store)


def _client(tasks: Tasks, timeout: timedelta) -> Store:
    """The store that rank 0 serves, for which this waits.

    Raises:
        DistError: rank 0 does not serve it in time.
        RuntimeError: another program has the port, which takes connections and does not answer.
    """
    made: list[Store | Exception] = []

    def connect() -> None:
        try:
            made.append(_connect(tasks, timeout, serves=False))
        except Exception as error:
            made.append(error)

    # On a thread: torch's client waits for the first answer without a limit.
    thread = threading.Thread(target=connect, name="lt_zero-joining", daemon=True)
    thread.start()
    silent = 0
    while True:
        thread.join(_ANSWER_S)
        if made:
            break
        silent = silent + 1 if _is_taken(tasks) else 0
        if silent == _SILENT:
            raise RuntimeError(
                f"Rank {tasks.rank} cannot join the run: what listens at {tasks.address}:{tasks.port} "
                f"(MASTER_ADDR:MASTER_PORT) has not answered for {silent * _ANSWER_S:.0f} s: it is not the store of "
                "rank 0, but another program (or rank 0 is stopped). Set MASTER_PORT to a free port on all ranks, and "
                "start them again."
            )
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def _connect(tasks: Tasks, timeout: timedelta, serves: bool) -> Store:
    assert tasks.address is not None
    return dist.TCPStore(  # type: ignore[attr-defined]
        tasks.address, tasks.port, None, serves, timeout, wait_for_workers=False, multi_tenant=True
    )


def _is_taken(tasks: Tasks) -> bool:
    """True if a program listens at the address of the store."""
    try:
        socket.create_connection((str(tasks.address), tasks.port), timeout=_LINGER_S).close()
    except OSError:
        return False
    return True


def _is_served_elsewhere() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
