"""Start of a further run in the same processes: after an error the ranks go on only if they are still in step.

Note [After an error]
    An error may end a run on one rank, and the others because of it: they have launched collectives that the first has
    not, and wait for it, or have closed their connections. The scripts of all ranks may catch that and fit again. Then
    the ranks would be one collective apart: they would swap data, or wait for each other. So each rank tells the store
    how its last run has ended before it takes that back, and which collectives it has launched. All go on if no rank
    failed because of another, and all have launched the same; else all raise. (Whether the weights are those of one
    step is compared where the model is set up.) Without an error this costs a meeting in the store. It has a number, as
    a collective has, so hang detection finds ranks that wait in other operations meanwhile, and never come.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lt_zero.core.comm.work import START, CollectiveId, CollectiveMonitor

_CLOSES_S = 10.0  # from the end of the store until that of the process that serves it
_REFUSED = (
    "This run cannot begin: an error has ended the last one, and the ranks are no longer in step. {} Make a new Trainer"
    " and a new module on every rank (start the processes again if these cannot reach each other any more), and resume"
    " from a checkpoint."
)
_GONE = "This run cannot begin: it needs all ranks. {} Start the processes again, and resume from a checkpoint."


class Peers(Protocol):
    """The other ranks, as ``EndedRanks`` knows them."""

    def ended(self) -> list[int]:
        """The ranks to which the connection is closed."""

    def first_cause(self, ended: list[int]) -> str:
        """Reason why these have ended."""


class RunStart:
    """Meeting of all ranks before each run but the first.

    Args:
        store: of the group; ``rank``, ``world``: this rank and how many there are.
        watch: the collectives that this rank has launched.
        examine: raises on all ranks if one will never come to a launch, for which this one has waited some seconds.
        poll, limit: seconds between looks for such ranks, and to wait for ranks that do not come.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        watch: CollectiveMonitor,
        peers: Peers,
        examine: Callable[[CollectiveId, float], None],
        poll: float,
        limit: float,
    ) -> None:
        self._store, self._rank, self._world = PrefixStore("runs", store), rank, world
        self._watch, self._peers, self._examine = watch, peers, examine
        self._channel = watch.open("runs", range(world))
        self._poll, self._limit = poll, limit
        self._number = -1  # of the run
        self._refusal = ""

    def meet(self, error: str, own: bool) -> None:
        """Meet the other ranks, unless this is the first run. Collective.

        ``error``: what has ended the last run on this rank, "" without; ``own``: it was not another rank's.

        Raises:
            RuntimeError: on all ranks: an error has ended the last run, and they are not in step. Or ranks do not come.
        """
        if self._refusal:
            raise RuntimeError(self._refusal)
        self._number += 1
        if self._number == 0:
            return
        try:
            self._meet(error, own)
            return
        except dist.DistError:
            # The store has ended with the process that serves it, of which its client knows a closed connection only.
            # The connections to that rank close later, when the process ends.
            until = time.monotonic() + _CLOSES_S
            while not (ended := self._peers.ended()) and time.monotonic() < until:
                time.sleep(0.05)
            if not ended:
                raise
        self._refuse(self._peers.first_cause(ended), _GONE)

    def _meet(self, error: str, own: bool) -> None:
        self._post(error, own)
        if error and not own:
            self._refuse(error)
        launch, _ = self._channel.launch(START, "the start of a run", 0)
        with self._watch.waiting_for(launch):
            self._await("came", launch)
            if self._count("failed") > 0 and not self._in_step(launch):
                self._refuse()

    def _post(self, error: str, own: bool) -> None:
        for name, channel in self._watch.channels.items():
            self._add(f"ran/{name}/{channel.checksum}")
        if error:
            # Written before this rank has come: who has met all ranks finds the errors.
            self._store.set(self._key(f"error/{self._add('failed')}"), json.dumps([self._rank, own, error]))
            if not own:
                self._add("followed")
        self._came("came")

    def _in_step(self, launch: CollectiveId) -> bool:
        """True if all ranks can go on after an error. Collective."""
        channels = [(name, c) for name, c in self._watch.channels.items() if c is not self._channel]
        same = all(self._count(f"ran/{name}/{c.checksum}") == len(c.ranks) for name, c in channels)
        if not same:
            self._add("apart")
        self._came("judged")
        self._await("judged", launch)
        return self._count("apart") == 0

    def _refuse(self, cause: str = "", text: str = _REFUSED) -> None:
        """Raise ``text``, that ranks are not in step; ``cause``: by default an error that a rank has told."""
        if not cause:
            self._store.wait([self._key("error/1")])
            rank, own, error = json.loads(self._store.get(self._key("error/1")))
            cause = f"Rank {rank} ended with {error}." if own else error
        self._refusal = text.format(cause)
        raise RuntimeError(self._refusal)

    def _await(self, point: str, launch: CollectiveId) -> None:
        """Wait until all ranks have come to ``point`` of the meeting ``launch``.

        Raises:
            RuntimeError: a rank cannot come, or does not within the limit.
        """
        started = looked = time.monotonic()
        while self._count(point) < self._world:
            now = time.monotonic()
            if self._count("followed"):
                self._refuse()
            if now - looked > self._poll:
                looked = now
                if ended := self._peers.ended():
                    failed = self._count("failed")
                    self._refuse(self._peers.first_cause(ended), _REFUSED if failed else _GONE)
                self._examine(launch, now - started)
            if now - started > self._limit:
                keys = {rank: self._key(f"{point}/{rank}") for rank in range(self._world)}
                late = ", ".join(str(rank) for rank, key in keys.items() if not self._store.check([key]))
                self._refusal = (
                    f"All ranks have to begin this run, and rank {late} did not within {self._limit:.0f} s. See what it"
                    " does, and whether its last run has ended by an error."
                )
                raise RuntimeError(self._refusal)
            time.sleep(min(max((now - started) / 10, 1e-3), 0.1))

    def _came(self, point: str) -> None:
        self._store.set(self._key(f"{point}/{self._rank}"), "")
        self._add(point)

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"

    def _add(self, name: str) -> int:
        return self._store.add(self._key(name), 1)

    def _count(self, name: str) -> int:
        return self._store.add(self._key(name), 0)
