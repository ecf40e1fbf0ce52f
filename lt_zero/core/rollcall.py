"""A roll call before operations that every rank must enter: if some never will, all ranks say so and stop.

The usual bug is ``if trainer.is_global_zero: trainer.save_checkpoint(path)``. Rank 0 would wait for the others' shards,
and the others for rank 0 in the next step, until a timeout of half an hour; or two different collectives of equal
size would meet, and swap data.

Note [Who can still come]
    Ranks may come minutes apart: one evaluates, another writes a file. Lateness proves nothing, so a rank is given up
    only for what makes its coming impossible: it waits in a collective that this rank is part of and has not launched,
    it is gone, or it came for something else. Each rank has a thread that tells what its main thread is doing, once
    somebody asks; which collectives have been launched is known by number (pending.py). In a collective that is
    not ours nothing is numbered, so such a rank has to stay in the same call for ``Patience.stuck``. A rank that does
    not answer need not be gone, its main thread may hold the interpreter: gloo knows, its connection is closed.

Note [Telling everybody]
    One rank writes the verdict into the store and waits until the other ranks' threads have read it, before it raises:
    its end closes the connections that they wait on, and they would know no better than "closed by peer". Waits on
    gloo look at the verdict (pending.py) and raise it. A main thread that waits elsewhere cannot be woken: its thread
    logs the verdict, and the error that follows when the first rank has left is explained by it (``Comm.explain``).

Note [Life of the thread]
    The thread knows the watch and a store client of its own, not the ``RollCall``: when nobody has that any more, or
    at exit, the thread is ended and joined, because a daemon thread inside of torch's C++ code must not meet the end
    of the interpreter. A forked child has no such thread and must not use the store's connection.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]

from lt_zero.core import pending
from lt_zero.core.pending import Launch, Watch

log = logging.getLogger(__name__)

_PACKAGES = {"lt_zero", "lightning", "pytorch_lightning", "lightning_fabric", "torch", "torchmetrics", "contextlib"}
_POINT_TO_POINT = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}  # do not need this rank
_PROBE_TAG = 0x5AB0  # of a message that nobody receives
_STORE_TIMEOUT = timedelta(seconds=20)


@dataclass(frozen=True)
class Patience:
    """In seconds. ``poll``: between looks at the store. ``ask``: before asking for those who have not come.
    ``stuck``: in the same collective. ``limit``: for a rank that could still come.
    """

    poll: float = 2.0
    ask: float = 5.0
    stuck: float = 8.0
    limit: float = 1800.0


PATIENCE = Patience()  # tests replace this


class RollCall:
    """The roll calls of one process group.

    Args:
        group: whose ranks have to come.
        host: a gloo group over the same ranks.
        watch: what the collectives of this rank have come to.
        store: a client of its own for this object.
    """

    def __init__(self, group: dist.ProcessGroup, host: dist.ProcessGroup, watch: Watch, store: Store) -> None:
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group)  # global ones
        self._host, self._watch, self._store = host, watch, store
        self._patience, self._count, self._pid = PATIENCE, 0, os.getpid()
        self._heard_of: dict[int, tuple[int, float]] = {}  # rank -> (number of its last answer, when)
        self._reporter = reporter = _Reporter(watch, store, self._rank, self._patience.poll)
        self._stop = threading.Event()
        thread = threading.Thread(target=_serve, args=(reporter, self._stop), name="lt_zero-roll-call", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _end, self._stop, thread, os.getpid())

    @classmethod
    def over(cls, group: dist.ProcessGroup | None, host: dist.ProcessGroup | None, watch: Watch) -> RollCall | None:
        """Roll calls of ``group``, or None where there is nobody to call (one process, a simulated group)."""
        if group is None or host is None or dist.get_world_size(group) == 1 or dist.get_backend(host) != "gloo":
            return None
        store: Any = group.get_group_store()  # has the group's prefix
        store = store.clone()
        store.set_timeout(_STORE_TIMEOUT)
        return cls(group, host, watch, PrefixStore("roll_call", store))

    def close(self) -> None:
        """End the thread. Again a no-op."""
        self._finalizer()

    def enter(self, what: str) -> None:
        """Return when every rank has entered the same operation.

        Raises:
            RuntimeError: a rank never will, or entered another one; on all ranks that can be told.
        """
        self._watch.refuse()
        if os.getpid() != self._pid:
            raise RuntimeError(f"`{what}` was called in a forked process, which is no rank. Call it in rank processes.")
        self._count += 1
        where, started = user_line(sys._getframe()), time.monotonic()
        self._heard_of.clear()
        try:
            came = self._register(what, where)
            before, self._watch.waiting = self._watch.waiting, Launch("roll call", self._count, "roll call", what)
            try:
                self._await(what, started, self._patience.ask * (1 if came == 1 else 3))
            finally:
                self._watch.waiting = before
        except dist.DistError as error:
            raise RuntimeError(
                f"`{what}` was called at {where} on rank {self._rank}, but the process that serves torch.distributed's"
                f" store (rank 0, unless a launcher does) is gone. {_REMEDY}"
            ) from error

    # ---- arriving ----------------------------------------------------------------------------------------------

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._count, *parts)))

    def _register(self, what: str, where: str) -> int:
        """Returns how many have come before, with this one."""
        self._reporter.entered = self._count
        self._store.set(self._key("entry", self._rank), json.dumps({"what": what, "where": where}))
        if self._count > 2:  # everybody who could still ask for it has passed it
            self._store.delete_key(f"{self._count - 2}/entry/{self._rank}")
        self._store.add(self._key("for", what), 1)  # in this order: see `_all_came`
        return int(self._store.add(self._key("all"), 1))

    def _all_came(self, what: str) -> bool:
        everybody = int(self._store.get(self._key("all")))
        alike = int(self._store.get(self._key("for", what)))
        if alike < everybody:
            self._fail(self._contradiction(what))
        return everybody == self._world

    def _await(self, what: str, started: float, ask_after: float) -> None:
        asked = started + ask_after - self._patience.poll
        while not self._all_came(what):
            self._watch.refuse()
            now = time.monotonic()
            if now - started >= ask_after and now - asked >= self._patience.poll:
                asked = now
                self._examine(what, out_of_time=now - started > self._patience.limit)
            time.sleep(min(max((now - started) / 10, 1e-3), 0.2, self._patience.poll))

    def _entries(self) -> dict[int, dict[str, str]]:
        keys = {rank: self._key("entry", rank) for rank in range(self._world)}
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def _contradiction(self, what: str) -> str:
        entries = self._entries()
        mine = {rank: e for rank, e in entries.items() if e["what"] == what}
        rank, other = next((rank, e) for rank, e in entries.items() if e["what"] != what)
        return (
            f"`{what}` was called on {_names(list(mine))} ({next(iter(mine.values()))['where']}) while"
            f" `{other['what']}` was called on rank {rank} ({other['where']}). Both need all ranks: call the same"
            " operations in the same order on every rank."
        )

    # ---- who does not come ---------------------------------------------------------------------------------------

    def _examine(self, what: str, out_of_time: bool) -> None:
        """Fail if one of the missing can never come. See Note [Who can still come]."""
        self._store.set("asked", str(self._count))
        entries = self._entries()
        missing = [rank for rank in range(self._world) if rank not in entries]
        doing = {rank: self._doing(rank) for rank in missing}
        hearing = self._world - sum(text == _GONE for text, _ in doing.values())
        lost = {rank: text for rank, (text, never) in doing.items() if never}
        if missing and (lost or out_of_time):
            rank, text = next(iter(lost.items())) if lost else (missing[0], doing[missing[0]][0])
            others = [r for r in missing if r != rank]
            also = f" (nor on {_names(others)})" if others else ""
            place = next(iter(entries.values()))["where"]
            self._fail(
                f"`{what}` was called on {_names(list(entries))} ({place}) and not on rank {rank}, which {text}{also}."
                f" {_REMEDY}",
                hearing,
            )

    def _doing(self, rank: int) -> tuple[str, bool]:
        """What a rank that has not come is doing, and whether it never will come."""
        key = self._key("doing", rank)
        answer: dict[str, Any] = json.loads(self._store.get(key)) if self._store.check([key]) else {"beat": 0}
        now = time.monotonic()
        last, since = self._heard_of.get(rank, (-1, now))
        if answer["beat"] != last:
            since = now
        self._heard_of[rank] = answer["beat"], since
        if now - since > 2.5 * self._patience.poll and self._gone(rank):
            return _GONE, True
        if answer["beat"] == 0:
            return "does not answer", False
        return str(answer["text"]), self._is_lost(answer)

    def _is_lost(self, answer: dict[str, Any]) -> bool:
        channel, needs = answer["channel"], answer["ranks"]
        if channel in self._watch.launched and answer["number"] <= self._watch.launched[channel]:
            return False  # it was launched here as well, and is on its way
        needed = channel is not None or (needs is not None and self._ranks[self._rank] in needs)
        return needed and answer["seconds"] >= self._patience.stuck

    def _gone(self, rank: int) -> bool:
        """Whether the connection to a rank is closed."""
        try:
            dist.isend(torch.zeros(1), self._ranks[rank], self._host, tag=_PROBE_TAG)
        except RuntimeError:
            return True
        return False

    # ---- the verdict ---------------------------------------------------------------------------------------------

    def _fail(self, verdict: str, hearing: int | None = None) -> None:
        """Tell every rank, of which ``hearing`` (all) may listen, and raise. See Note [Telling everybody]."""
        if self._store.add("verdicts", 1) == 1:
            self._store.set("verdict", verdict)
            self._store.set("asked", str(self._count))
        patience = time.monotonic() + 2.5 * self._patience.poll
        while time.monotonic() < patience and self._store.add("heard", 0) < (hearing or self._world):
            time.sleep(self._patience.poll / 20)
        self._watch.verdict = self._store.get("verdict").decode()
        self._watch.refuse()


_GONE = "has ended or left the process group"
_REMEDY = (
    "Every rank has a part of the state: call it on every rank, without `if trainer.is_global_zero:` or"
    " `rank_zero_only` around it."
)


def _names(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" if len(ranks) <= 8 else f"{len(ranks)} ranks ({shown}, ...)"


# ---- the thread --------------------------------------------------------------------------------------------------


class _Reporter:
    """Looks at the store, and answers what the thread that made it is doing."""

    def __init__(self, watch: Watch, store: Store, rank: int, poll: float) -> None:
        self.poll, self.entered = poll, 0
        self._watch, self._store, self._rank = watch, store, rank
        self._thread = threading.get_ident()
        self._in: Any = None  # a Launch, or the frame of a collective that is not ours
        self._since = 0.0
        self._beat = 0

    def look(self) -> bool:
        """Answer if somebody asks. Returns whether there is a verdict: it is known now, and all is over."""
        if not self._store.check(["asked"]):
            return False
        if self._store.check(["verdict"]):
            verdict = self._store.get("verdict").decode()
            if self._watch.waiting is None:  # the main thread may not find out by itself
                log.error("%s", verdict)
            self._watch.verdict = verdict
            self._store.add("heard", 1)
            return True
        asked = int(self._store.get("asked"))
        if asked > self.entered:
            self._answer(asked)
        else:
            self._in = None
        return False

    def _answer(self, asked: int) -> None:
        frame = sys._current_frames().get(self._thread)
        launch, ranks, place = self._watch.waiting, None, user_line(frame)
        now: Any = launch
        text = f"is at {place}"
        if launch is not None:
            text = f"waits in the {launch.operation} of {launch.name!r} ({place})"
        elif frame is not None and (ranks := _collective_of(frame)) is not None:
            now, text = frame, f"waits in {frame.f_code.co_name} of torch.distributed ({place})"
        if now is None or now is not self._in:
            self._in, self._since = now, time.monotonic()
        self._beat += 1
        answer = {"beat": self._beat, "text": text, "seconds": time.monotonic() - self._since, "ranks": ranks}
        answer |= {"channel": launch.channel if launch else None, "number": launch.number if launch else 0}
        self._store.set(f"{asked}/doing/{self._rank}", json.dumps(answer))


def _serve(reporter: _Reporter, stop: threading.Event) -> None:
    try:
        while not stop.wait(reporter.poll):
            if reporter.look():
                return
    except RuntimeError as error:  # who serves the store has ended: nobody asks any more
        log.debug("No more roll calls: %s", error)


def _end(stop: threading.Event, thread: threading.Thread, pid: int) -> None:
    stop.set()
    if os.getpid() == pid and thread is not threading.current_thread():
        thread.join(_STORE_TIMEOUT.total_seconds())


# ---- frames ------------------------------------------------------------------------------------------------------


def user_line(frame: FrameType | None) -> str:
    """``file:line`` of the innermost frame that is neither ours, nor Lightning's, nor torch's."""
    innermost = frame
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PACKAGES:
        frame = frame.f_back
    shown = frame or innermost
    return f"{_short(shown.f_code.co_filename)}:{shown.f_lineno}" if shown is not None else "an unknown place"


def _short(path: str) -> str:
    folder = os.path.join(os.getcwd(), "")
    return path.removeprefix(folder)


def _collective_of(frame: FrameType) -> list[int] | None:
    """The global ranks that the collective in which this frame waits needs; None if it waits in none."""
    code = frame.f_code
    if code.co_filename == pending.__file__:  # of another engine
        return list(range(dist.get_world_size()))
    if code.co_filename != distributed_c10d.__file__ or code.co_name in _POINT_TO_POINT:
        return None
    group = frame.f_locals.get("group")
    return dist.get_process_group_ranks(group if isinstance(group, dist.ProcessGroup) else None)
