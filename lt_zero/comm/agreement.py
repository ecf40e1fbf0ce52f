"""What one rank wants, all ranks do, at the same point of their programs: how a signal to one of them stops all.

Note [The same point]
    Ranks pass the same points (batches) in the same order, and count them. A wish is told through the store. Each rank
    that hears of it tells how many points it has passed, and the first point that is beyond all of these numbers is the
    one: nobody has passed it, and everybody comes to it. Threads tell, because a main thread may wait in a collective
    for a rank that has stopped to hear the numbers. Nothing is sent as long as nobody wishes anything; a thread looks
    at the store every few seconds.

    What a rank wishes travels with its number, so all ranks know the same wishes when they know all numbers. What is
    wished later belongs to the next round. Who has no more points ahead (its run is over) has infinitely many behind.

Note [Two threads, one count]
    A main thread counts and then looks whether its number was told; another thread marks it as told and then reads the
    count. Whatever comes between, the number that is told is at least that of each point that was passed without
    waiting. Signal handlers only append to a list: what they interrupt may hold any lock.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_LONG = 5.0  # seconds of waiting for numbers after which ranks may have ended


class Agreement:
    """Agrees on wishes.

    Args:
        store: of the group, or None: this rank is alone.
        rank: this one.
        world: how many there are.
        check: raises if a rank of those given is gone, or nothing can complete any more.
    """

    def __init__(
        self,
        store: Store | None = None,
        rank: int = 0,
        world: int = 1,
        check: Callable[[list[int]], object] = lambda ranks: None,
    ) -> None:
        self._store, self._rank, self._world, self._check = store, rank, world, check
        self._wishes: list[str] = []  # of this rank, not told yet
        self._at = (0.0, 0.0)  # points of training that were passed, and other points since the last of them
        self._told = False  # the number of this round
        self._posting = threading.Lock()
        self._run, self._round = -1, 0
        self._open = False

    def begin(self) -> None:
        """A run begins. On all ranks, with a collective between this and the first point."""
        self.end()
        self._run, self._round = self._run + 1, 0
        self._at, self._told, self._open = (0.0, 0.0), False, True

    def end(self) -> None:
        """The run is over: this rank comes to no more points."""
        if not self._open:
            return
        self._at = (math.inf, math.inf)
        self._wishes.clear()
        try:
            self._post()
        finally:
            self._open = False

    def wish(self, what: str) -> None:
        """Have all ranks do something. For signal handlers, too."""
        if what not in self._wishes:
            self._wishes.append(what)

    def look(self) -> None:
        """Hear and tell what there is. Another thread calls this from time to time."""
        if self._open and not self._told and (self._wishes or self._heard()):
            self._post()

    def passed(self, trains: bool) -> list[str]:
        """The main thread is at its next point; returns what all ranks do here. In the same order on all ranks.

        Args:
            trains: other points (of a validation, say) may be different in number if a point of training follows.

        Raises:
            RuntimeError: a rank that wished something is gone.
        """
        if self._wishes and self._open:
            self._post()  # before counting: this may be the point
        points, others = self._at
        self._at = (points + 1, 0.0) if trains else (points, others + 1)
        if not self._told:
            return []
        numbers = self._numbers()
        if self._at <= max(tuple(at) for at, _ in numbers):
            return []
        self._round += 1
        self._told = False
        return sorted({wish for _, wishes in numbers for wish in wishes})

    # ---- the store -----------------------------------------------------------------------------------------------

    def _key(self, name: object) -> str:
        return f"{self._run}/{self._round}/{name}"

    def _heard(self) -> bool:
        return self._store is not None and bool(self._store.check([self._key("wished")]))

    def _post(self) -> None:
        """Tell this rank's number and wishes."""
        with self._posting:
            if self._told:
                return
            self._told = True  # first: see Note [Two threads, one count]
            wishes = self._wishes[: len(self._wishes)]
            self._mine = [self._at, wishes]
            if self._store is not None:
                self._store.set(self._key(self._rank), json.dumps(self._mine))
                if wishes:
                    self._store.set(self._key("wished"), "")
                self._store.add(self._key("told"), 1)
            del self._wishes[: len(wishes)]

    def _numbers(self) -> list[Any]:
        """The number and the wishes of each rank, once all are told."""
        with self._posting:  # or the thread is about to
            if self._store is None:
                return [self._mine]
        started = asked = time.monotonic()
        while int(self._store.add(self._key("told"), 0)) < self._world:
            now = time.monotonic()
            if now - asked > _LONG:
                asked = now
                self._check([rank for rank in range(self._world) if not self._store.check([self._key(rank)])])
            time.sleep(min(max((now - started) / 10, 1e-3), 0.1))
        return [json.loads(self._store.get(self._key(rank))) for rank in range(self._world)]
