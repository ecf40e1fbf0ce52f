"""Agreement on requests: what one rank requests, all ranks do at the same point, such as a stop after a signal.

Ranks pass the same points (batches) in the same order, and count them. A request is posted to the store. Each rank that
sees it posts its count, and all ranks act at the first point beyond all of these counts: no rank has passed it, and all
reach it. Threads post, because a main thread may wait in a collective for a rank that waits for the counts. Nothing is
sent without a request; a thread polls the store every few seconds.

Requests are posted with the count, so all ranks know the same requests when they know all counts. Later ones belong to
the next round. A rank whose run is over posts an infinite count.

Threads: the main thread increments its count and then checks whether it was posted; the other thread marks it as posted
and then reads it. In any interleaving the posted count is at least that of each point that was passed without waiting.
Signal handlers only append to a list, as the code that they interrupt may hold any lock.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

_CHECK_INTERVAL = 5.0  # seconds of waiting for counts between checks for ended ranks


class Agreement:
    """Agrees on requests.

    Args:
        store: store of the group; by default one in this process, for a single rank.
        check: raises if one of the given ranks has ended, or no collective can complete any more.
    """

    def __init__(
        self,
        store: Store | None = None,
        rank: int = 0,
        world: int = 1,
        check: Callable[[list[int]], object] = lambda ranks: None,
    ) -> None:
        self._store = store if store is not None else HashStore()
        self._rank, self._world, self._check = rank, world, check
        self._requests: list[str] = []  # of this rank, not posted yet
        self._count = (0.0, 0.0)  # training points that were passed, and other points since the last of them
        self._posted = False  # whether the count of this round was posted
        self._posting = threading.Lock()
        self._run, self._round = -1, 0
        self._open = False

    def begin(self) -> None:
        """Begin a run. On all ranks, with a collective between this and the first point."""
        self.end()
        self._run, self._round = self._run + 1, 0
        self._count, self._posted, self._open = (0.0, 0.0), False, True

    def end(self) -> None:
        """End the run: this rank reaches no more points."""
        if not self._open:
            return
        self._count = (math.inf, math.inf)
        self._requests.clear()
        try:
            self._post()
        finally:
            self._open = False

    def request(self, what: str) -> None:
        """Request ``what`` of all ranks. May be called in signal handlers."""
        if what not in self._requests:
            self._requests.append(what)

    def poll(self) -> None:
        """Poll the store, and post if there is a request. Called periodically by another thread."""
        if not self._open or self._posted:
            return
        if self._requests or self._store.check([self._key("requested")]):
            self._post()

    def step_boundary(self, trains: bool) -> list[str]:
        """Count a point of the main thread; returns the requests that all ranks serve here. In order on all ranks.

        Args:
            trains: whether it is a training point; the number of other points (validation) between may differ by rank.

        Raises:
            RuntimeError: a rank has ended without posting its count.
        """
        if self._requests and self._open:
            # Posted before this point is counted, so that the requests can be served here already.
            self._post()
        points, others = self._count
        self._count = (points + 1, 0.0) if trains else (points, others + 1)
        if not self._posted:
            return []
        with self._posting:
            pass  # the other thread may be posting
        started = checked = time.monotonic()
        while int(self._store.add(self._key("posted"), 0)) < self._world:
            now = time.monotonic()
            if now - checked > _CHECK_INTERVAL:
                checked = now
                self._check([rank for rank in range(self._world) if not self._store.check([self._key(rank)])])
            time.sleep(min(max((now - started) / 10, 1e-3), 0.1))
        posts = [json.loads(self._store.get(self._key(rank))) for rank in range(self._world)]
        if self._count <= max(tuple(count) for count, _ in posts):
            return []
        self._round += 1
        self._posted = False
        return sorted({request for _, requests in posts for request in requests})

    def _key(self, name: object) -> str:
        return f"{self._run}/{self._round}/{name}"

    def _post(self) -> None:
        with self._posting:
            if self._posted:
                return
            # Set before ``_count`` is read: a point that passes later finds it, and waits until the count is posted.
            self._posted = True
            requests = list(self._requests)
            self._store.set(self._key(self._rank), json.dumps([self._count, requests]))
            if requests:
                self._store.set(self._key("requested"), "")
            self._store.add(self._key("posted"), 1)
            del self._requests[: len(requests)]
