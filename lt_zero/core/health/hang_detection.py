"""Hang detection: waits that can never end become errors on all ranks, which say which rank waits where.

The usual bugs: ``if trainer.is_global_zero: trainer.save_checkpoint(path)``, or a branch that one rank takes alone.
Ranks then wait for each other in different collectives until a timeout of half an hour.

Note [Which ranks can still arrive]
    Ranks may arrive minutes apart: one evaluates, another writes a file. Being late proves nothing, so a rank is given
    up only if it cannot arrive: it has launched another collective instead of this one, it waits in a collective that
    needs this rank and that this rank has not launched, or it has ended. Each rank has a thread that reports what its
    main thread is doing, when asked; launched collectives are known by number (work.py), those of other packages by
    torch's (foreign_waits.py), those of another engine by that one's (other_runs.py). A rank has to stay in one of
    these for ``Patience.stuck``. Waits inside of layers may have no number: there all ranks that the layers need have
    to wait, too. A rank that does not answer need not have ended, its main thread may hold the interpreter: its closed
    connection to gloo proves it.

Note [Waits of other packages]
    Lightning's and the user's collectives are not launched here, so their waits cannot be left in slices. Each rank's
    thread looks at the innermost frame of its main thread every ``Patience.poll`` seconds, and nothing else: a launch
    costs no message. If it is in the same collective for ``Patience.ask``, one of the ranks that wait in it asks all
    others. An answer tells in which collective a rank waits, for how long, and which it has launched of those that were
    asked about, by numbers (foreign_waits.py). A verdict needs a circle of ranks: each waits, since ``Patience.stuck``,
    for a collective that the next one has not launched, or in place of which that one has launched another. All answers
    are younger than that, so these waits last at the same time, and none can end. A rank that does anything else, or
    waits for something else, breaks the circle, so a rank that is late is waited for as long as the group allows.
    Another thread of a rank may launch what others wait for: a checkpoint is written there, say, and its end is a
    barrier. While such a thread of the script runs, nothing is concluded from what its rank has not launched.
    The thread lives between runs and after them, because the next wait may be in the user's script.

Note [The verdict reaches all ranks]
    One rank writes the verdict to the store and waits until the other ranks' threads have read it before it raises and
    closes its connections: otherwise they would only see "closed by peer". Waits on gloo check the verdict (work.py)
    and raise it. If the main thread waits elsewhere, its thread logs the verdict and closes the connections; the error
    that follows is explained by the verdict (``World.explain``).

Note [Closing connections]
    A process group with a collective that does not end cannot be destroyed: the process would wait at exit. gloo closes
    all connections of a group when a receive times out, which ends all waits in that group, on all ranks. NCCL aborts
    all groups of the process at once: after a verdict, at the exit of a process that an error ends, and if the device
    does not come to rest after one (``World.give_up``).

Note [Life of the thread]
    It answers from ``start`` to ``stop``; a long wait starts it again. The thread refers to the watch and to its own
    store client, not to the ``HangDetector``: when that is collected, or at exit, the thread is ended and joined,
    because a daemon thread must not be in torch's C++ code when the interpreter ends. It ends, too, with its process
    group. A forked child has no such thread, and must not use the store's connection.
    Scripts without a Trainer do not tell that they end. Rank 0 mostly serves the store, and a thread that polls a store
    that is gone makes torch print its stack. So rank 0 asks the others' threads to end, and waits some seconds for it,
    unless their processes have ended (``os._exit`` runs no exit handlers).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lt_zero.common.compat import group_in_making, process_groups
from lt_zero.common.errors import fold_notes
from lt_zero.common.users_code import user_line
from lt_zero.core.comm import shared_memory
from lt_zero.core.comm.options import CommunicationOptions
from lt_zero.core.comm.process_groups import (
    abort_nccl,
    awaits_all,
    backend_of,
    close_connections,
    closing_if_unanswered,
    exists,
)
from lt_zero.core.comm.work import CALL, CollectiveId, CollectiveMonitor, collective_of, in_collective, in_layer
from lt_zero.core.health import foreign_waits, other_runs
from lt_zero.core.health.agreement import Agreement
from lt_zero.core.health.awaited_works import work_awaited
from lt_zero.core.health.ended_ranks import EndedRanks, described, remember_cause, summary, tell_at_end
from lt_zero.core.health.foreign_waits import (
    FOREIGN,
    Blocked,
    ForeignCall,
    another_may_launch,
    call_of,
    described_call,
    group_of_channel,
    is_foreign,
    launched_by,
    question_of,
    standstill,
)
from lt_zero.core.health.next_run import RunStart
from lt_zero.core.health.other_runs import WaitElsewhere, wait_elsewhere
from lt_zero.core.health.questions import Questions, pause, read_all
from lt_zero.core.health.verdict import (
    GONE,
    OVER,
    RAN,
    RankState,
    Remedy,
    at_standstill,
    close_circles,
    diverged,
    sentence,
)

log = logging.getLogger(__name__)

_STORE_TIMEOUT = timedelta(seconds=20)
_END_PATIENCE = 1.0  # seconds to wait for a closed connection
_LONGEST_PAUSE = 0.1  # seconds between two looks for ranks that end
_MOST_FAILED = 10  # polls in a row
_RAREST_QUESTION = 30.0  # seconds between two questions about a wait that has lasted for minutes
_logged: list[str] = []  # verdicts; several groups of this process may come to the same


@dataclass(frozen=True)
class Patience:
    """Durations in seconds.

    ``poll``: between polls of the store. ``ask``: in a wait, before asking for the ranks that have not come.
    ``stuck``: in the same collective. ``limit``: for a rank that could still come to a call of the user.
    """

    poll: float = 2.0
    ask: float = 5.0
    stuck: float = 8.0
    limit: float = 1800.0


PATIENCE = Patience()  # tests replace this


class HangDetector:
    """Finds ranks of a run that will not enter its collectives, and ranks that have ended.

    Args:
        groups: process groups, the first over all ranks; more may be added.
        host: a gloo group over the same ranks.
        watch: the state of this rank's collectives.
        options: of the connections between ranks.
        timeout: of collectives; the start of a further run waits as long for a rank.

    Attributes:
        ends: the ends of the ranks.
    """

    def __init__(
        self,
        groups: list[dist.ProcessGroup],
        host: dist.ProcessGroup,
        watch: CollectiveMonitor,
        options: CommunicationOptions,
        timeout: timedelta | None = None,
    ) -> None:
        client: Any = groups[0].get_group_store()  # has the group's prefix
        with closing_if_unanswered(True, options):
            client = client.clone()
        client.set_timeout(max(_STORE_TIMEOUT, timedelta(seconds=options.link_timeout)))
        self._store = store = PrefixStore("roll_call", client)
        self._rank, self._world = dist.get_rank(groups[0]), dist.get_world_size(groups[0])
        self._ranks = dist.get_process_group_ranks(groups[0])  # global ones
        self._watch = watch
        self._patience, self._pid = PATIENCE, os.getpid()
        self._examined: CollectiveId | None = None
        self._first_question = 0  # number of the first question about it
        self._looked = 0.0  # when this rank last looked whether a wait can end
        self._asked = 0.0  # when the last question was asked
        self._first = True  # whether this rank was the first to examine that wait
        self._rounds = 0  # questions that it has asked about it
        self._recent: list[tuple[int, float]] = []  # numbers of the last questions, and when they were asked
        self._last_answers: dict[int, tuple[int, float]] = {}  # rank -> (question that it answered last, when)
        self._heeded = 0.0  # when errors of others were read
        self._end: str | None = None  # why another rank has ended
        self._host = host
        self.ends = EndedRanks(store, self._ranks, self._rank, host, watch)
        this = weakref.ref(self)

        def ask(launch: CollectiveId, waited: float) -> None:
            detector = this()
            if detector is not None:
                detector.ask_for(launch, waited)

        limit = max(self._patience.limit, timeout.total_seconds() if timeout is not None else 0)
        whose = store, self._rank, self._world, watch, self.ends
        self._run_start = RunStart(*whose, ask, self._patience.poll, limit)

        def check(ranks: list[int]) -> None:
            watch.raise_verdict()
            detector = this()
            ended = detector is not None and any(detector.ends.has_ended(rank) for rank in ranks)
            if detector is not None and ended and (text := detector.explain_end()) is not None:
                raise RuntimeError(text)

        self.agreement = Agreement(PrefixStore("agreement", store), self._rank, self._world, check)
        watch.slice = min(watch.slice, timedelta(seconds=self._patience.poll))
        watch.detector = this
        other_runs.register(groups[0].group_name, watch, self._ranks)
        self._reporter = _Reporter(watch, store, groups, self._patience, self.ends)
        self._finalizer: weakref.finalize | None = None  # type: ignore[type-arg]
        self._server = groups[0].get_group_store()  # may serve the store: not before this is gone does that end
        self.start()
        tell_at_end(self)

    @property
    def remedy(self) -> Remedy:
        """Text for users whose ranks ran these two collectives, or this one."""
        return self._reporter.remedy

    @remedy.setter
    def remedy(self, remedy: Remedy) -> None:
        self._reporter.remedy = remedy

    def start(self) -> None:
        """Answer other ranks from now on. No-op if it does, in a forked child, after a verdict, and without a store."""
        if self._watch.verdict is not None or os.getpid() != self._pid or self.ends.server_gone:
            return
        if self._finalizer is None or not self._finalizer.alive:
            thread = RollCall(self._reporter, self.agreement)
            thread.start()
            self._finalizer = weakref.finalize(self, thread.stop)

    def stop(self) -> None:
        """End the thread. No-op if there is none."""
        if self._finalizer is not None:
            self._finalizer()

    def expect_in_layers(self, ranks: list[int]) -> None:
        """Name the global ``ranks`` that this one waits for in collectives inside of layers."""
        self._reporter.layers = ranks

    # ---- one rank waits --------------------------------------------------------------------------------------------

    def examine(self, launch: CollectiveId, waited: float) -> None:
        """Raise if ``launch``, which this rank has waited for ``waited`` seconds, can never complete.

        See Note [Which ranks can still arrive].

        Raises:
            RuntimeError: on all ranks that can be reached.
        """
        self.heed(launch)
        self.ask_for(launch, waited)

    def ask_for(self, launch: CollectiveId, waited: float) -> None:
        """Ask what the ranks do that have not come to ``launch``. Raises as ``examine``."""
        now = time.monotonic()
        if waited < self._patience.ask or now - self._looked < self._patience.poll:
            return
        self._looked = now
        self.start()
        with contextlib.suppress(dist.DistError):  # the process that serves the store has ended: gloo will notice
            if self._examined != launch:
                self._examined, self._first_question = launch, 0
                self._first = self._store.add(f"examined/{launch.channel}/{launch.number}", 1) == 1
                self._rounds, self._asked = 0, now
                self._recent.clear()
                self._last_answers.clear()
                self._reporter.questions.post(launch)
            # Ranks that were behind this one have found that they diverge, and wait for its history.
            elif self._store.check([f"diverged/{launch.channel}"]):
                self.raise_divergence(launch)
            elif now - self._asked < self._pause:
                return
            else:
                self._conclude(launch, waited, now)
            self._asked = now
            self._rounds += 1
            asks = self._store.add("asks", 1)
            self._recent.append((asks, now))
            self._first_question = self._first_question or asks

    def _conclude(self, launch: CollectiveId, waited: float, now: float) -> None:
        """Raise if the answers of the other ranks tell that ``launch`` can never complete."""
        self._recent = [asked for asked in self._recent if now - asked[1] < self._patience.stuck]
        others = [rank for rank in self._watch.channels[launch.channel].ranks if rank != self._rank]
        answers = read_all(self._store, [f"doing/{rank}" for rank in others])
        states = {
            rank: self._state_of(rank, json.loads(answer) if answer is not None else {"asks": 0}, launch, now)
            for rank, answer in zip(others, answers, strict=True)
        }
        lasts = waited >= self._patience.stuck
        states[self._rank] = RankState.waiting(launch, user_line(sys._getframe()), lasts)
        close_circles(states, launch)
        lost = next((rank for rank, state in states.items() if state.never), None)
        if lost is None and launch.operation == CALL and waited > self._patience.limit:
            lost = next((rank for rank, state in states.items() if not state.came), None)
        if lost is not None:
            readers = sum(not state.text.startswith(GONE) for state in states.values())
            self._fail(sentence(states, self._rank, lost, self.remedy), readers)

    @property
    def _pause(self) -> float:
        """Seconds until the next question about the wait that is examined.

        A conclusion needs the answers to a question that was asked a moment ago, so questions come in pairs.
        """
        return pause(self._world, self._patience.poll, self._first or self._rounds % 2 == 1)

    def _state_of(self, rank: int, answer: dict[str, Any], launch: CollectiveId, now: float) -> RankState:
        """State of another rank: its activity, of which it has told, and whether it will never launch ``launch``."""
        last, since = self._last_answers.get(rank, (0, now))
        since = now if answer["asks"] != last else since
        self._last_answers[rank] = answer["asks"], since
        if now - since > 2.5 * self._patience.poll and self.ends.has_ended(rank):
            end = self.ends.of(rank)
            text = OVER if end is not None and not end.text and end.concerns(self.ends.scopes) else GONE
            lost = f", or its link is cut ({self.ends.lost[rank]})" if rank in self.ends.lost else ""
            return RankState(None, "", f"{text}{self.ends.on_hosts([rank])}{lost}", never=True)
        answered = answer["asks"] >= self._first_question
        if not answered or answer["launch"] is None:
            end = self.ends.of(rank)
            if end is not None and not end.text and end.concerns(self.ends.scopes) and end.precedes(launch):
                return RankState(None, "", OVER, never=True)
        if not answered:
            return RankState(None, "", "does not answer")
        theirs = CollectiveId(*answer["launch"]) if answer["launch"] is not None else None
        state = RankState(theirs, answer["place"], answer["text"])
        stuck = answer["seconds"] >= self._patience.stuck
        # The answer is younger than a question that was asked less than ``stuck`` ago: then the rank waited already.
        state.lasts = stuck and bool(self._recent) and answer["asks"] >= self._recent[0][0]
        if (told := answer["ran"].get(question_of(launch))) is None:  # so many have asked that it forgot the question
            self._reporter.questions.post(launch)
            return RankState(None, answer["place"], answer["text"])
        ran = told[1]
        channel = self._watch.channels.get(theirs.channel) if theirs is not None else None
        if ran is not None:
            state.compare(launch, CollectiveId(*ran))
        elif theirs is not None and channel is not None and channel.launched >= theirs.number:
            mine = channel.find(theirs.number)
            # This rank has launched that number, too. If it was the same collective, the other is on its way.
            state.never = mine is not None and not mine.like(theirs)
        elif theirs is not None:
            # In a channel without this rank it waits for other ranks, and they find out if those never come.
            state.never = stuck and channel is not None
        else:
            needs_this = answer["ranks"] is not None and self._ranks[self._rank] in answer["ranks"]
            if stuck and needs_this and answer["foreign"] is not None:
                state.never = not self._has_launched(CollectiveId(*answer["foreign"]))
            elif stuck and needs_this:
                # Ranks outside of this run get a number that no rank has.
                numbers = {known: number for number, known in enumerate(self._ranks)}
                state.needs = tuple(numbers.get(needed, -1) for needed in answer["ranks"])
        return state

    def _has_launched(self, wait: CollectiveId) -> bool:
        """True if this rank has launched the collective, not this run's, in which another waits."""
        progress = self._reporter.progress(wait.channel, wait.number)
        if progress is None:
            return another_may_launch(threading.get_ident())
        return progress[0] >= wait.number and (progress[1] is None or wait.like(progress[1]))

    def raise_divergence(self, launch: CollectiveId) -> None:
        """Raise the error of ranks that meet in different collectives. Collective.

        Raises:
            RuntimeError: always.
        """
        channel = self._watch.channels[launch.channel]
        with contextlib.suppress(dist.DistError):
            self._store.add(f"diverged/{launch.channel}", 1)
            self._store.set(f"ran/{self._rank}", json.dumps([channel.history(), user_line(sys._getframe())]))
            told = {rank: json.loads(self._store.get(f"ran/{rank}")) for rank in channel.ranks}
            histories = {rank: ([CollectiveId(*entry) for entry in ran], place) for rank, (ran, place) in told.items()}
            self._fail(diverged(histories, self.remedy), len(channel.ranks))
        raise RuntimeError(f"The ranks diverged at {launch}. {RAN}")

    def _fail(self, verdict: str, readers: int) -> None:
        """Post the verdict, wait until ``readers`` ranks have read it, and raise: Note [The verdict reaches all ranks].

        If another rank has posted one before, that is raised.
        """
        self._reporter.post_verdict(verdict)
        self._watch.verdict = self._store.get("verdict").decode()
        remember_cause(self._watch.verdict)
        self._reporter.close_connections(readers)
        self._watch.raise_verdict()

    # ---- ranks that have ended: see ended_ranks.py, Note [Ended ranks] ----------------------------------------------

    def heed(self, launch: CollectiveId) -> None:
        """Raise if an error has ended a rank before ``launch``, for which this rank waits.

        Raises:
            RuntimeError: names the rank and its error.
        """
        now = time.monotonic()
        if now - self._heeded < self._patience.poll:
            return
        self._heeded = now
        with contextlib.suppress(dist.DistError):  # the process that serves the store has ended: gloo will notice
            found = self.ends.error(self._watch.channels[launch.channel].ranks)
            if found is not None and found[1].precedes(launch):
                raise RuntimeError(self._follow(described(*found)))

    def _follow(self, cause: str) -> str:
        """Tell the others that this rank ends because of another; returns the error."""
        self.ends.tell(False, cause)
        self._end = f"{cause} The error of rank {self._rank} follows from that."
        return self._end

    def cause(self) -> str | None:
        """Reason why a collective failed: the verdict, or the end of a rank; None if neither is known."""
        if self._end is not None:
            return self._end
        with contextlib.suppress(dist.DistError):
            self._reporter.read_verdict()
        return self._watch.verdict or self.explain_end()

    def explain_end(self) -> str | None:
        """Text that names the rank that has ended and where to look; None if none has."""
        if self._end is None:
            until = time.monotonic() + _END_PATIENCE
            while (cause := self._told()) is None and time.monotonic() < until:
                time.sleep(0.05)
            if cause is not None:
                self._follow(cause)
                # This process may serve the store, from which the others read the cause before it ends.
                if self._ranks[self._rank] == 0:
                    time.sleep(self._patience.poll)
        return self._end

    def _told(self) -> str | None:
        """Reason why a rank has ended; None if none has."""
        if ended := self.ends.ended():
            return self.ends.first_cause(ended)
        with contextlib.suppress(dist.DistError):  # the process that serves the store has ended
            if (found := self.ends.error()) is not None:
                return described(*found)
        return None

    def explain(self, error: BaseException) -> bool:
        """Add the cause (a hang, or the end of another rank) to an error's text; returns whether it is known.

        The line that names the cause becomes the last one: notes (of the layer, say) would be printed below it.
        """
        if not isinstance(error, RuntimeError):
            return False
        verdict = self._watch.verdict
        if verdict is None and in_collective(error):
            # The rank that has posted it closes its connections although this rank's thread has not read it in time.
            with contextlib.suppress(dist.DistError):  # the process that serves the store has ended
                self._reporter.read_verdict()
            verdict = self._watch.verdict
        if verdict is not None:
            self._watch.raised = True
            remember_cause(verdict)  # an operation may have begun since it was read
            fold_notes(error)
            if verdict not in str(error):
                error.args = (f"{verdict} ({error})",)
            return True
        told = self._end is not None and self._end in str(error)  # ``heed`` has raised it
        cause = self.explain_end() if told or in_collective(error) else None
        if cause is not None:
            fold_notes(error)
        if cause is not None and cause not in str(error):
            error.args = (f"{error}\n{cause}",)
        return cause is not None

    def end_process(self, error: BaseException | None) -> bool:
        """Tell the others of the end of this process; returns whether its ``error`` follows from another rank's."""
        if os.getpid() != self._pid:
            return False
        if error is not None and self.explain(error):
            # The process that serves the store may end at any moment: a poll would then log pages below the error,
            # which is printed next.
            self.stop()
            return True
        if error is not None or not self.ends.failed:
            self.ends.tell(error is not None, summary(error) if error is not None else "", process=True)
        return False

    def leave(self) -> None:
        """Let the others read why this process ends, and their threads end: see Note [Life of the thread]."""
        if os.getpid() != self._pid:
            return
        self.ends.await_readers(2.5 * self._patience.poll)
        self.stop()
        if self.ends.failed:
            self.ends.part(2.5 * self._patience.poll)
        elif self._ranks[self._rank] == 0 and self._end is None:
            # A verdict has closed connections, so they do not tell which processes have ended. Threads end with it.
            closed = self._watch.verdict is not None
            deadline = time.monotonic() + (1.0 if closed else 5.0) * self._patience.poll
            with contextlib.suppress(RuntimeError):  # another process serves the store, and has ended
                self._store.set("closing", "")
                self._store.add("asks", 1)
                while self._store.add("listening", 0) > 0 and time.monotonic() < deadline:
                    if not closed and self._is_last():
                        break
                    time.sleep(min(self._patience.poll / 20, _LONGEST_PAUSE))

    def _is_last(self) -> bool:
        """True if the processes of all other ranks have ended, also without a word; unknown in a destroyed group."""
        return exists(self._host) and len(self.ends.ended()) == self._world - 1

    def abort(self) -> None:
        """Keep this process, which ends, from waiting for collectives of NCCL after an error."""
        if os.getpid() == self._pid and (self.ends.failed or self._watch.verdict is not None or self._end is not None):
            abort_nccl()

    def go_on(self) -> None:
        """Take back an error of this rank that is over: it has caught the error, and launches a collective."""
        # Another rank ends a wait inside of a layer after ``stuck``; tests have no time for that on a busy machine.
        seconds = max(self._patience.stuck + 5 * self._patience.poll, 5.0)
        with contextlib.suppress(RuntimeError):  # the process that serves the store has ended
            self._end = None if self.ends.go_on(seconds) else self._end

    def begin_run(self) -> None:
        """Begin a run: answer other ranks, and forget the errors of the last one. Collective after the first run.

        Raises:
            RuntimeError: an error has ended the last run, see next_run.py.
        """
        self.start()
        verdict = self._watch.verdict
        self._run_start.meet(verdict or self.ends.told, own=self.ends.own and verdict is None)
        self.ends.scopes.clear()  # after an error
        self.ends.begin("run")
        self._end = None


# ---- the thread --------------------------------------------------------------------------------------------------


class _Reporter:
    """Polls the store, and reports what the thread that made it is doing."""

    def __init__(
        self,
        watch: CollectiveMonitor,
        store: Store,
        groups: list[dist.ProcessGroup],
        patience: Patience,
        ends: EndedRanks,
    ) -> None:
        self.interval, self._stuck, self._ends = patience.poll, patience.stuck, ends
        self._alarmed = False  # whether another rank has told of an error that ends this run
        self._doomed: tuple[FrameType, float] | None = None  # a wait for that rank, and its beginning
        self._watch = watch
        self._store = store
        self._groups = groups
        self._rank, self._world = dist.get_rank(groups[0]), dist.get_world_size(groups[0])
        self._all_ranks = dist.get_process_group_ranks(groups[0])
        self._thread = threading.get_ident()
        self.layers: list[int] = []  # global ranks that compute layers with this one
        self._stuck_after, self._ask_after = patience.stuck, patience.ask
        self.questions = Questions(store)
        self.remedy: Remedy = lambda launch, other: RAN
        # In what the thread waits: a launch, also of another run, the call of another package's collective, or its
        # frame where these are unknown. A frame keeps its tensors alive, so it is kept only while there are questions.
        self._in: CollectiveId | WaitElsewhere | ForeignCall | FrameType | None = None
        self._since = 0.0
        self._foreign: CollectiveId | None = None  # what the call ``_in`` has launched, once that was looked up
        self._led: CollectiveId | None = None  # the foreign collective about which this rank decided whether it asks
        self._leads = False
        self._question: tuple[int, float] | None = None  # number and time of its last question about that
        self._next_question = 0.0
        self._last_question = self._idle_polls = 0  # number of the last question; polls since

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Context of the thread: it is counted among those that poll the store."""
        self._store.add("listening", 1)
        yield
        self._ends.find_server()
        if not _is_removed(self._store) and not self.server_gone:
            self._store.add("listening", -1)

    @property
    def server_gone(self) -> bool:
        """True if the store must be left alone: its client would log pages after the error that names the rank."""
        return self._ends.server_gone

    @property
    def store_is_removed(self) -> bool:
        """True if the file of the store was removed."""
        return _is_removed(self._store)

    def read_verdict(self) -> bool:
        """Update the verdict; returns whether there is one."""
        if self._watch.verdict is None and self._store.check(["verdict"]):
            self._watch.verdict = self._store.get("verdict").decode()
            remember_cause(self._watch.verdict)
        return self._watch.verdict is not None

    def poll(self) -> bool:
        """Answer questions; returns whether the thread ends: after a verdict, and with the group or the store."""
        if not all(map(exists, self._groups)):
            return True
        asks = self._store.add("asks", 0)
        self._idle_polls = 0 if asks != self._last_question else self._idle_polls + 1
        if self._idle_polls > 3 and isinstance(self._in, FrameType):
            self._in = None
        self._observe(self._frame())
        if (not self._idle_polls or self._alarmed) and self._watch.verdict is None:
            self._heed()
        if self._idle_polls:
            if self._watch.verdict is not None:
                return True
            self._examine_foreign_wait()
            return False
        self._last_question, known = asks, self._watch.verdict is not None
        if not self.read_verdict():
            self._answer(asks)
            self._examine_foreign_wait()  # after the answer: its own question needs one, too
            closing = self._store.check(["closing"])
            if closing:
                self._ends.remember_server()
            return closing
        # The main thread waits for no collective of this package, so it may not find out by itself.
        if not known and self._watch.waiting is None and self._watch.verdict not in _logged:
            _logged.append(str(self._watch.verdict))
            log.error("%s", self._watch.verdict)
        self._store.add("heard", 1)
        self.close_connections(self._world)
        return True

    def _heed(self) -> None:
        """Read errors of other ranks, and end a wait of another package for a rank that one has ended.

        A wait of this package ends by itself (``HangDetector.heed``), also in another run.
        """
        found, frame, before = self._ends.error(), self._frame(), self._doomed
        self._doomed, self._alarmed = None, found is not None
        if found is None or self._watch.waiting is not None or self._elsewhere() is not None:
            return
        ranks = self._needs(frame) if frame is not None else None
        if frame is None or ranks is None:
            return
        if (found := self._ends.error([rank for rank, known in enumerate(self._all_ranks) if known in ranks])) is None:
            return
        self._doomed = (frame, time.monotonic()) if before is None or before[0] is not frame else before
        if time.monotonic() - self._doomed[1] >= self._stuck:
            cause = described(*found)
            self._ends.tell(False, cause)
            self._watch.verdict = f"{cause} The error of rank {self._rank} follows from that."
            log.error("%s", self._watch.verdict)
            self.close_connections(0)

    def close_connections(self, readers: int) -> None:
        """Wait until ``readers`` ranks know the verdict, or a timeout, then close. See Note [Closing connections]."""
        patience = time.monotonic() + 2.5 * self.interval
        while time.monotonic() < patience and self._store.add("heard", 0) < readers:
            time.sleep(self.interval / 20)
        frame = self._frame()
        _close_all(self._groups)
        # In a wait of another run, that run's detector closes its groups. Code that has been told the verdict has left
        # this run: it may be in the next one by now, and wait there for a rank that is late.
        own = self._watch.waiting is not None or self._elsewhere() is not None
        if not own and not self._watch.raised and frame is not None and self._needs(frame) is not None:
            _close_all(self._groups_of(frame))

    def _groups_of(self, frame: FrameType) -> list[dist.ProcessGroup]:
        """Process groups of other packages; ``frame`` still waits in one of them.

        No more than these: a script that goes on after the error makes its next groups over the default one.
        """
        if (group := self._group_of_wait(frame)) is not None:
            return [] if group in self._groups else [group]
        if not in_layer(frame):
            group = frame.f_locals.get("group")
            return list(filter(None, [group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD]))
        until = time.monotonic() + self._stuck
        while time.monotonic() < until:
            if frame not in sys._current_frames().values():
                return []  # it was a collective of a layer, whose group is one of those that are closed
            time.sleep(self.interval / 20)
        return process_groups()  # the user's: the call does not tell in which it is

    def _elsewhere(self) -> WaitElsewhere | None:
        """The wait of the thread in another run of this process; None if it waits in none."""
        return wait_elsewhere(self._thread, self._watch)

    def _needs(self, frame: FrameType) -> list[int] | None:
        """Global ranks of another package's collective in which this frame waits; None if it waits in none."""
        if awaits_all(frame):
            return self._all_ranks
        if (made := group_in_making(frame)) is not None:
            return made[1]
        if (found := collective_of(frame)) is not None:
            return found or None
        if (group := self._group_of_wait(frame)) is not None:
            return dist.get_process_group_ranks(group)
        return self.layers or None if in_layer(frame) else None

    def _group_of_wait(self, frame: FrameType) -> dist.ProcessGroup | None:
        """The process group of the collective for which this frame, of a layer or with a work, waits.

        None if it does not, or that is unknown. The ranks of a layer are those of all of its groups: if only some of
        them are late, a wait is not one for the others.
        """
        if not isinstance(self._in, ForeignCall) or not (in_layer(frame) or work_awaited(frame) is not None):
            return None
        wait = self._foreign_wait()
        return group_of_channel(wait.channel) if wait is not None else None

    def _frame(self) -> FrameType | None:
        """Innermost frame of the thread; if it polls a barrier, the frame that waits for the barrier.

        Backward may run on other threads while this thread waits for them. Then it is the frame of one of those, if
        it waits inside of a layer.
        """
        # Do not give the dictionary a name: it has the frame of this function, so they would keep each other, and the
        # tensors in frames of other threads, until garbage is collected.
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame.f_code.co_filename == shared_memory.__file__:
            frame = frame.f_back
        if self.layers and self._watch.waiting is None and (frame is None or self._needs(frame) is None):
            return next(filter(in_layer, sys._current_frames().values()), frame)
        return frame

    def _observe(self, frame: FrameType | None) -> CollectiveId | WaitElsewhere | ForeignCall | None:
        """Note in which collective the thread waits, and since when; returns it, None if it is in none or unknown."""
        now = self._watch.waiting or self._elsewhere() or call_of(frame)
        if now is not None or not isinstance(self._in, FrameType):
            self._enter(now)
        return now

    def _enter(self, now: CollectiveId | WaitElsewhere | ForeignCall | FrameType | None) -> None:
        if now is None or now != self._in:
            self._in = now
            self._since = time.monotonic()
            self._foreign = None

    def _foreign_wait(self) -> CollectiveId | None:
        """The collective of others in which the thread waits; None if it does not, or that is unknown."""
        if isinstance(self._in, WaitElsewhere):
            return self._in.launch
        if self._foreign is None and isinstance(self._in, ForeignCall):
            self._foreign = launched_by(self._in)
        return self._foreign

    def progress(self, channel: str, number: int) -> tuple[int, CollectiveId | None] | None:
        """The number of this rank's last launch in a channel, and its launch of ``number``; None: unknown."""
        if is_foreign(channel):
            # First the threads: what one has launched that ends meanwhile is on record by then.
            may_launch = another_may_launch(self._thread)
            found = foreign_waits.progress(channel, number)
            return None if found is not None and found[0] < number and may_launch else found
        own = self._watch.channels.get(channel)
        return (own.launched, own.find(number)) if own is not None else (0, None)

    def _answer(self, asks: int) -> None:
        """Tell what the thread does, and which of the collectives that were asked about it has launched."""
        frame = self._frame()
        now = self._observe(frame)
        launch = now if isinstance(now, CollectiveId) else None
        ranks: list[int] | None = None
        place = user_line(frame)
        text, members = f"is at {place}", list[int]()
        if launch is not None:
            text, members = RankState.waiting(launch, place).text, list(self._watch.channels[launch.channel].ranks)
        elif isinstance(now, WaitElsewhere):
            ranks = now.ranks
            text = f"waits in {now} ({place})"
        elif frame is not None and (ranks := self._needs(frame)) is not None:
            what = "a layer" if in_layer(frame) else described_call(frame)
            text = f"waits in {what} ({place})"
            if now is None:
                self._enter(frame)
        if ranks is not None:
            members = [rank for rank, known in enumerate(self._all_ranks) if known in ranks]
        foreign = self._foreign_wait() if launch is None and ranks is not None else None
        waits = launch or foreign
        ran: dict[str, tuple[int, CollectiveId | None]] = {}
        for channel, number in self.questions.known():
            progress: tuple[int, CollectiveId | None] | None = None
            if waits is not None and (waits.channel, waits.number) == (channel, number):
                progress = number, waits  # without the recorder, which takes a moment to read
            elif waits is not None or not is_foreign(channel):
                progress = self.progress(channel, number)
            # A rank that does not wait blocks no other for ever, so its foreign launches do not matter.
            if progress is not None:
                ran[f"{channel}#{number}"] = progress
        seconds = time.monotonic() - self._since if self._in is not None else 0.0
        answer = {"asks": asks, "seconds": seconds, "ran": ran, "launch": launch, "foreign": foreign, "place": place}
        answer |= {"text": text, "ranks": ranks, "members": members}
        self._store.set(f"doing/{self._rank}", json.dumps(answer))

    def _examine_foreign_wait(self) -> None:
        """Ask the others if the thread waits in another package's collective for long, and give up one that cannot end.

        See Note [Waits of other packages].
        """
        now = time.monotonic()
        if self._watch.waiting is not None or self._in is None or now - self._since < self._ask_after:
            return
        if (wait := self._foreign_wait()) is None:
            return
        if self._led != wait:
            name = f"{wait.channel}/{wait.number}/{wait.name}"
            self._led = wait
            self._leads = self._store.add(f"leader/{name}", 1) == 1
            self._question = None
            if self._leads:
                self.questions.post(wait)
        if not self._leads:
            return
        if self._question is not None:
            number, asked = self._question
            if now - asked < self.interval:
                return
            self._question = None
            if now - asked < self._stuck_after:
                self._judge(number)
        if self._question is None and now >= self._next_question:
            # A long wait is mostly one for a rank that is busy, so the questions become rarer.
            self._next_question = now + min((now - self._since) / 8, _RAREST_QUESTION)
            self._question = self._store.add("asks", 1), now

    def _judge(self, question: int) -> None:
        """Post a verdict if the answers to ``question`` prove that ranks wait for each other in a circle."""
        states = dict[int, Blocked]()
        told_by = read_all(self._store, [f"doing/{rank}" for rank in range(self._world)])
        for rank, text in enumerate(told_by):
            if text is None:
                continue
            answer = json.loads(text)
            told = answer["launch"] or answer["foreign"]
            if told is None or answer["asks"] < question or answer["seconds"] < self._stuck_after:
                continue
            ran = {
                key: (launched, CollectiveId(*found) if found is not None else None)
                for key, (launched, found) in answer["ran"].items()
            }
            place, members = answer["place"], answer["members"]
            states[rank] = Blocked(CollectiveId(*told), members, answer["text"], place, ran)
        circle = standstill(states)
        of_this_package = any(states[rank].wait.operation != FOREIGN for rank in circle)
        # If one of two waits in a collective of this package, it asks by itself, and knows all that have come there.
        if circle and not (of_this_package and len(circle) == 2):
            self.post_verdict(at_standstill(states, circle, self.remedy))

    def post_verdict(self, verdict: str) -> None:
        """Post a verdict for all ranks, unless another rank has posted one before."""
        if self._store.add("verdicts", 1) == 1:
            self._store.set("verdict", verdict)
            self._store.add("asks", 1)


def _close_all(groups: Iterable[dist.ProcessGroup]) -> None:
    """Close this rank's connections in those of ``groups`` that have gloo, and abort all of NCCL's."""
    for group in groups:
        with contextlib.suppress(RuntimeError, ValueError):  # it may be gone
            if backend_of(torch.device("cpu"), group) == "gloo":
                close_connections(group)
    abort_nccl()


def _is_removed(store: Any) -> bool:
    """True if the file of a store was removed: a client would wait for it until a timeout."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    path = getattr(store, "path", None)
    return path is not None and not os.path.exists(path)


class RollCall(threading.Thread):
    """Answers other ranks until ``stop``, a verdict, or the end of the process group."""

    def __init__(self, reporter: _Reporter, agreement: Agreement) -> None:
        super().__init__(name="lt_zero-roll-call", daemon=True)
        self._reporter, self._agreement = reporter, agreement
        self._stop_asked, self._pid = threading.Event(), os.getpid()
        self._failed = 0  # polls in a row

    def run(self) -> None:
        try:
            with self._reporter.listening():
                while not self._stop_asked.wait(self._reporter.interval) and not self._reporter.server_gone:
                    if self._poll():
                        return
        except RuntimeError as error:  # the process that serves the store has ended
            log.debug("No more roll calls: %s", error)

    def _poll(self) -> bool:
        """Poll; returns whether the thread ends. It looks into other threads while they run, so a poll may fail.

        Without this thread all ranks might wait for this one, and for each other, until a timeout.

        Raises:
            RuntimeError: the store is gone.
        """
        try:
            self._agreement.poll()
            ended = self._reporter.poll()
        except Exception as error:
            if isinstance(error, dist.DistError) or self._reporter.store_is_removed:
                raise RuntimeError(str(error)) from error
            self._failed += 1
            log.debug("A poll of the hang detection failed.", exc_info=True)
            if self._failed < _MOST_FAILED:
                return False
            log.warning(
                "The hang detection of this process has ended by an error of its own: %s: %s. Ranks that wait for each"
                " other are no longer found before the timeout of collectives. Please report this.",
                type(error).__name__,
                error,
            )
            return True
        self._failed = 0
        return ended

    def stop(self) -> None:
        """End and join the thread. No-op in a forked child."""
        self._stop_asked.set()
        if os.getpid() == self._pid and self is not threading.current_thread():
            self.join(_STORE_TIMEOUT.total_seconds())
