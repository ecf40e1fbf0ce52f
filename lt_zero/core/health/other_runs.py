"""Collectives of the other runs of this package in a process: those of two engines of one script, say.

Note [Several runs in a process]
    Each run has its own numbers of launches and its own detector. To the detector of one run, a wait in another run is
    a wait in foreign code: it could not tell whether this rank has launched what the other rank waits for, and would
    give up ranks that only wait for a late one. So the runs of a process know each other. A wait in another run has
    the channel of that run, under a name that is the same on all ranks, and every rank can tell how far it is in it.
    The thread that waits counts: a script may train one engine on each of two threads.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from lt_zero.core.comm.work import CollectiveId, CollectiveMonitor

_PREFIX = "run "


class _KnownRun(NamedTuple):
    """``name``: the same on all ranks. ``ranks``: the global ranks, by their numbers in the run."""

    name: str
    monitor: weakref.ref[CollectiveMonitor]
    ranks: list[int]


class WaitElsewhere(NamedTuple):
    """A wait in another run; ``launch`` has a channel of this process, and ``ranks`` are the global ones it needs."""

    launch: CollectiveId
    ranks: list[int]

    def __str__(self) -> str:
        return f"{self.launch} of another engine"


_runs: list[_KnownRun] = []


def register(name: str, monitor: CollectiveMonitor, ranks: Sequence[int]) -> None:
    """Let the detectors of the other runs of this process know a run, as long as its ``monitor`` lives.

    Args:
        name: the same on all ranks. An earlier run of that name is forgotten: its process group is gone.
        ranks: the global ranks, by their numbers in the run.
    """
    others = [run for run in _runs if run.name != name and run.monitor() is not None]
    _runs[:] = [*others, _KnownRun(name, weakref.ref(monitor), list(ranks))]


def wait_elsewhere(thread: int, own: CollectiveMonitor) -> WaitElsewhere | None:
    """The wait of ``thread`` in another run than that of ``own``; None if it waits in none."""
    for run in tuple(_runs):
        monitor = run.monitor()
        launch = monitor.waiting_of(thread) if monitor is not None and monitor is not own else None
        if monitor is not None and launch is not None:
            ranks = [run.ranks[rank] for rank in monitor.channels[launch.channel].ranks]
            return WaitElsewhere(launch._replace(channel=f"{_PREFIX}{run.name}: {launch.channel}"), ranks)
    return None


def is_elsewhere(channel: str) -> bool:
    """True for a channel of ``wait_elsewhere``."""
    return channel.startswith(_PREFIX)


def progress_elsewhere(channel: str, number: int) -> tuple[int, CollectiveId | None]:
    """The number of this process's last launch in a channel of ``wait_elsewhere``, and its launch of ``number``.

    A run that is gone here may have launched it: then the number is ``number``.
    """
    name, _, own_name = channel.removeprefix(_PREFIX).partition(": ")
    monitor = next((run.monitor() for run in tuple(_runs) if run.name == name), None)
    if monitor is None:
        return number, None
    own = monitor.channels.get(own_name)
    if own is None:
        return 0, None
    launched = own.launched
    found = own.find(number)
    return launched, found._replace(channel=channel) if found is not None else None
