"""Ends of ranks: what each tells of its end, and what the others make of it.

Note [Ended ranks]
    When a rank ends, the others fail one after the other, each with gloo's message about a neighbour. So a rank tells
    the store how its run, or its process, has ended: by an error of its own, because of another rank (then it passes on
    the first cause), or without an error. A rank that was killed tells nothing.
    The others read an error as soon as they wait, and leave: on gloo from a wait for what the ended rank had not
    launched, and from other packages' collectives by closed connections. Those who never wait fail at their next
    collective. A run, or an operation, may end by an error that the user's code catches on all ranks, so that concerns
    only who is still in it; see ``End.concerns``.
    The kernel closes a connection to a machine that does not answer (process_groups.py), and says so: then the link is
    named, not the process.
    The store may end with the process that serves it. So a process that has failed lets the others read why before it
    ends, for some seconds at most. torchrun serves the store itself, and takes the process that exits first for the
    cause: there nothing is waited for. Processes of multiprocessing do not run exit handlers.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import json
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lt_zero.common.descriptors import explain_full_table
from lt_zero.common.errors import add_note
from lt_zero.common.output import say
from lt_zero.common.users_code import innermost, is_users, user_line
from lt_zero.common.variables import switched
from lt_zero.core.comm.work import CollectiveId, CollectiveMonitor

_T = TypeVar("_T")
WHERE = ", here or in a log of its own (torchrun: --log-dir, SLURM: --output)"
COUNTS = (
    "Every rank has to run the same number of batches: let a sampler cut the data (`DistributedSampler`), cut an"
    " `IterableDataset` into equal parts, or limit the batches (`limit_train_batches`)."
)
ALIKE = (
    "Every rank has to make the same calls in the same order: look for `if trainer.is_global_zero:` or"
    " `rank_zero_only` around a call that needs all ranks, and for a callback, a logger or an interval that only some"
    " ranks have."
)
_PROBE_TAG = 0x5AB0  # of a message that is never received
# What the kernel says of a connection whose peer does not answer; that of a process that has ended is closed, or reset.
_UNREACHABLE = re.compile("(Connection|Operation) timed out|No route to host|(Network|Host) is (unreachable|down)")
_MANY = 64  # most ended ranks of which messages are read
_SHOWN = 2  # frames of an error that follows from another rank's
_FILES_KEPT = 5  # files with tracebacks of one rank
_DEEPEST = 3  # frames of PACKAGES that are shown below the user's
_LONGEST = 300  # characters of an error in one line
_TAKEN_BACK = "taken back"  # in place of the report of a rank that runs again
# A name begins where no other one is: else each character of a long word would be tried, with all that follow it.
_NAME = r"(?:'[^']+'|(?<![\w.])\w+(?:\.\w+)+)"
_NAMES = re.compile(rf"({_NAME})(?:, {_NAME})+")
_causes: list[str] = []  # see ``remember_cause``


@dataclass(frozen=True)
class End:
    """Report of a rank about its end.

    ``own``: it ended by an error of its own. ``text``: the error or the first cause; "": there was none. ``scope``: the
    run or the operation that has ended, with a number; None: its process. ``launched``: the number of its last launch
    in each channel.
    """

    own: bool
    text: str
    scope: str | None
    launched: dict[str, int]

    def concerns(self, scopes: list[str]) -> bool:
        """True if it ends one of ``scopes``, the runs and operations that another rank is in."""
        return self.scope is None or self.scope in scopes

    def precedes(self, launch: CollectiveId) -> bool:
        """True if the rank ended before ``launch``."""
        return self.launched.get(launch.channel, 0) < launch.number


class EndedRanks:
    """The ends of the ranks of one group.

    Args:
        store: store of the group.
        ranks: the global ranks; ``host``: a gloo group over them.
        watch: the state of this rank's collectives.

    Attributes:
        hosts: the name of each rank's host, for messages; [] if they are not known.
        posted: whether this rank has told of its end.
        told, own: the error that it has told, "" without one; whether that was its own.
        lost: ranks to which the connection was lost, and the kernel's word for it.
        server_gone: whether the process of global rank 0, which may serve the store, was found to have ended.
    """

    def __init__(
        self, store: Store, ranks: list[int], rank: int, host: dist.ProcessGroup, watch: CollectiveMonitor
    ) -> None:
        self._signal, self._store = store, PrefixStore("ended", store)
        self._ranks = ranks
        self._rank = rank
        self._world = len(ranks)
        self._host, self._watch = host, watch
        self.hosts: list[str] = []
        self.lost: dict[int, str] = {}
        self.posted = self.server_gone = False
        self.scopes: list[str] = []  # the current run, and the operation in it
        self._begun: Counter[str] = Counter()
        self._scope: str | None = None  # what has ended, as this rank has told
        self._told = 0  # number of this rank's first error in the list of errors
        self.told, self.own = "", False
        self._read = 0  # errors of the list that this rank has read
        self._errors: dict[int, End] = {}
        self._known: dict[int, End] = {}  # ends that were read, for when the store is gone
        self._lock = threading.Lock()

    @property
    def failed(self) -> bool:
        """True if this rank has told of an error."""
        return self._told > 0

    # ---- this rank -------------------------------------------------------------------------------------------------

    def begin(self, what: str) -> None:
        """Begin a run, or an operation of all ranks, and take back what was told: an error has not ended this rank."""
        remember_cause("")
        self._begun[what] += 1
        self.scopes.append(f"{what} {self._begun[what]}")
        self._take_back()

    def go_on(self, seconds: float) -> bool:
        """Take back the error of an operation or run that is over, as this rank goes on; returns whether it was told.

        The user's code has caught it on all ranks. What ends a rank later must not be put down to it. The others may
        not have found it yet, and would then wait for this rank in that run without a reason: so it stays until they
        have ended the run too, at most ``seconds``.
        """
        if self._scope is None or self._scope in self.scopes:
            return False
        self._await_ends(self._scope, seconds)
        self._take_back()
        return True

    def _await_ends(self, scope: str, seconds: float) -> None:
        """Wait until the others have told of the end of ``scope``, or have ended, at most ``seconds``.

        No-op without an error, and for one that follows from another rank's.
        """
        until = time.monotonic() + seconds
        while self._told and self.own and time.monotonic() < until:
            ended = self.ended()
            if self._store.check([f"over/{scope}/{rank}" for rank in range(self._world) if rank not in ended]):
                return
            time.sleep(0.02)

    def pass_by(self) -> None:
        """Tell that an operation or run ends on this rank: where it has failed, ``go_on`` waits for that."""
        if not self._store_has_ended():
            with contextlib.suppress(RuntimeError):  # the process that serves the store has ended
                self._store.set(f"over/{self.scopes[-1]}/{self._rank}", "")

    def _take_back(self) -> None:
        if self.posted:
            # Not deleted: another rank may have seen the key, and would wait for it until the store's timeout.
            self._store.set(str(self._rank), _TAKEN_BACK)
        self.posted = False
        self._told = 0
        self._scope = None
        self.told = ""

    def end_run(self) -> None:
        """End the run; without an error unless one was told."""
        if self.scopes and self.posted:
            self.pass_by()  # what was told is of an operation in this run
        elif self.scopes:
            self.tell(False, "")
        self.scopes.clear()

    def tell(self, own: bool, text: str, process: bool = False) -> None:
        """Tell the others of the end of this rank's run, or process."""
        if self._store_has_ended():
            return
        scope = self.scopes[-1] if self.scopes and not process else None
        launched = {name: channel.launched for name, channel in self._watch.channels.items()}
        end = End(own, text, scope, launched)
        message = json.dumps([self._rank, *astuple(end)])
        if text:
            remember_cause(described(self._rank, end))
        with contextlib.suppress(RuntimeError):  # the process that serves the store has ended
            self._store.set(str(self._rank), message)
            self._store.set(f"over/{scope}/{self._rank}", "")
            self.posted, self._scope = True, scope
            if text:
                number = self._store.add("errors", 1)
                self._store.set(f"error/{number}", message)
                self._signal.add("asks", 1)
                self._told = self._told or number
                self.told = text
                self.own = own

    def await_readers(self, seconds: float) -> None:
        """Wait until the others have read this rank's error, or have ended or told of ends too, at most some seconds.

        No-op for an error that follows from another rank's, unless this rank may serve the store.
        """
        until, serves = time.monotonic() + seconds, self._ranks[self._rank] == 0
        with contextlib.suppress(RuntimeError):
            while self._told and (self.own or serves) and not self._store_has_ended() and time.monotonic() < until:
                ended = {self._rank, *self.ended()}
                if self._store.add(f"heard/{self._told}", 0) + len(ended) >= self._world:
                    return
                if all(self.of(rank) is not None for rank in range(self._world) if rank not in ended):
                    return  # the same error on all ranks, say
                time.sleep(0.1)

    def part(self, seconds: float) -> None:
        """End the use of the store after an error. The rank that may serve it waits for the others, some seconds."""
        until = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            if self._ranks[self._rank] != 0:
                if not self._store_has_ended():
                    self._store.set(f"parted/{self._rank}", "")
                return
            while time.monotonic() < until:
                here = [rank for rank in range(self._world) if rank != self._rank and not self.has_ended(rank)]
                if not here or self._store.check([f"parted/{rank}" for rank in here]):
                    return
                time.sleep(0.1)

    def find_server(self) -> None:
        """Set ``server_gone`` if the process that may serve the store has ended."""
        self._store_has_ended()

    def _store_has_ended(self) -> bool:
        """True if the process that may serve the store has ended; the store's client would log that at length."""
        return 0 in self._ranks and self._ranks[self._rank] != 0 and self.has_ended(self._ranks.index(0))

    # ---- the others ------------------------------------------------------------------------------------------------

    def error(self, among: Iterable[int] | None = None) -> tuple[int, End] | None:
        """Another rank, of ``among`` if given, and its error, which has ended this run there, or its process."""
        ranks = None if among is None else set(among)
        with self._lock:
            count = self._store.add("errors", 0)
            while (found := self._concerned(ranks)) is None and self._read < count:
                if not self._store.check([f"error/{self._read + 1}"]):
                    break
                self._read += 1
                rank, end = _parsed(self._store.get(f"error/{self._read}"))
                if rank != self._rank:
                    self._errors[rank] = end
                    self._store.add(f"heard/{self._read}", 1)
            return found

    def _concerned(self, ranks: set[int] | None) -> tuple[int, End] | None:
        """The first known error that ends a run or an operation of this rank."""
        for rank, end in self._errors.items():
            if (ranks is None or rank in ranks) and end.concerns(self.scopes):
                now = self.of(rank)  # one that runs again has taken it back
                if now is not None and now.text and now.concerns(self.scopes):
                    return rank, now
        return None

    def of(self, rank: int) -> End | None:
        """The report of ``rank`` about its end; None if it has written none, or has taken it back."""
        if not self._store.check([str(rank)]):
            return None
        message = self._store.get(str(rank))
        if message == _TAKEN_BACK.encode():
            return None
        end = self._known[rank] = _parsed(message)[1]
        return end

    def remember_server(self) -> None:
        """Read the end of the process that may serve the store, which tells it before the store ends."""
        if 0 in self._ranks:
            self.of(self._ranks.index(0))

    def has_ended(self, rank: int) -> bool:
        """True if the connection to a rank is closed."""
        try:
            dist.isend(torch.zeros(1), self._ranks[rank], self._host, tag=_PROBE_TAG)
        except (RuntimeError, ValueError) as error:  # closed, or the group is destroyed
            self.server_gone |= self._ranks[rank] == 0 and not isinstance(error, ValueError)
            if (lost := _UNREACHABLE.search(str(error))) is not None:
                self.lost[rank] = lost[0]
            return True
        return False

    def ended(self) -> list[int]:
        """The ranks that have ended."""
        return [rank for rank in range(self._world) if rank != self._rank and self.has_ended(rank)]

    def all_over(self) -> list[int]:
        """The ranks that have come to their end without an error; [] if one has ended without telling how.

        Those that tell an error may have ended because of these.
        """
        ends = {rank: self._last_known(rank) for rank in self.ended()}
        if any(end is None or not (end.text or end.concerns(self.scopes)) for end in ends.values()):
            return []
        return [rank for rank, end in ends.items() if end is not None and not end.text]

    def _last_known(self, rank: int) -> End | None:
        """Find what a rank has told of its end; if the store has ended since, of what was read before."""
        try:
            return self.of(rank)
        except RuntimeError:  # the process that serves the store has ended
            return self._errors.get(rank) or self._known.get(rank)

    def first_cause(self, ended: list[int]) -> str:
        """Reason why ranks have ended: the error of one, the cause that one passes on, or that they have told none."""
        silent: list[int] = []
        over: list[int] = []
        causes: list[str] = []
        for rank in ended[:_MANY]:
            end = self._last_known(rank)
            if end is None or not (end.text or end.concerns(self.scopes)):
                silent.append(rank)
            elif end.own:
                return described(rank, end)
            else:
                causes.append(end.text) if end.text else over.append(rank)
        if causes:
            return causes[0]
        if over and not silent:
            went = f"while rank {self._rank} went on"
            alone = f"Or rank {self._rank} called alone what needs all ranks: call it on every rank."
            remedy = f"{COUNTS} {alone}" if self.scopes else ALIKE
            return f"{_ranks(over)} came to the end without an error (or by sys.exit), {went}. {remedy}"
        silent = self._of_gone_hosts(silent) or silent
        one, hosts = len(silent) == 1, self.on_hosts(silent)
        if lost := [rank for rank in silent if rank in self.lost]:
            return (
                f"The connection to {_ranks(lost).lower()}{self.on_hosts(lost)} was lost ({self.lost[lost[0]]}): the"
                " link is cut, or the host is down; a process that ends closes its connections, and this was not"
                " closed. See whether the host runs and can be reached (ping, the scheduler), and the last that"
                f" {'it' if len(lost) == 1 else 'they'} printed{WHERE}."
            )
        return (
            f"{_ranks(silent)}{hosts} ended without an error message: killed (for want of memory, by the"
            f" scheduler{', with the host' if hosts else ''}), or by an error outside of the Trainer. See the last that"
            f" {'it' if one else 'they'} printed{WHERE}, and dmesg."
        )

    def _of_gone_hosts(self, ended: list[int]) -> list[int]:
        """Ranks of ``ended`` on hosts where all ranks have ended: the others may have ended because of them."""
        alive = {host for rank, host in enumerate(self.hosts) if rank not in ended}
        return [rank for rank in ended if self.hosts and self.hosts[rank] not in alive]

    def on_hosts(self, ranks: list[int]) -> str:
        """Text that names the hosts of ``ranks``; "" if all ranks of the group are on one host."""
        if len(set(self.hosts)) < 2:
            return ""
        names = list(dict.fromkeys(self.hosts[rank] for rank in ranks))
        return f" (on host{'' if len(names) == 1 else 's'} {', '.join(names)})"


def _parsed(message: bytes) -> tuple[int, End]:
    rank, *fields = json.loads(message)
    return rank, End(*fields)


def _ranks(ranks: list[int]) -> str:
    return f"Rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def described(rank: int, end: End) -> str:
    """The error that has ended a rank: its own, or the cause that it passes on."""
    return f"Rank {rank} ended with {end.text}: see what it printed{WHERE}." if end.own else end.text


def remember_cause(text: str) -> None:
    """Remember why the last run of this process ended by an error; "": another run, or operation, has begun since.

    The next run of this process has other groups and other detectors, and may find connections closed.
    """
    _causes[:] = [text] if text else []


def last_cause() -> str:
    """Find why the last run of this process ended by an error; "" if it did not, or another has begun since."""
    return _causes[-1] if _causes else ""


def summary(error: BaseException) -> str:
    """Type, reason and place of an error, in one line."""
    lines = [line.strip() for line in str(error).strip().splitlines() or [""]]
    # A headline ("3 problems:") tells nothing without what follows.
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    text = shortened(text)
    return f"{type(error).__name__}{f': {text}' if text else ''} ({user_line(innermost(error.__traceback__))})"


def shortened(text: str, most: int = _LONGEST) -> str:
    """``text`` in about ``most`` characters: of lists of names the first one, then sentences or words as they fit.

    >>> shortened("'a.b', 'a.c' and 2 more have no gradient. Remove them.", 40)
    "'a.b', ... and 2 more have no gradient."
    """
    if len(text) <= most:
        return text
    text = _NAMES.sub(r"\1, ...", text)
    if len(text) <= most:
        return text
    whole = text[: most + 1]
    sentence = whole.rfind(". ")
    if sentence > most // 2:
        return whole[: sentence + 1]
    word = whole.rfind(" ")
    return f"{whole[:word] if word > 0 else whole[:most]} ..."


# ---- the end of the process ------------------------------------------------------------------------------------------


class EndObserver(Protocol):
    """A detector of a group. It learns of the end of this process."""

    def end_process(self, error: BaseException | None) -> bool:
        """Tell the others of the end; returns whether the error follows from another rank's."""

    def leave(self) -> None:
        """Let the others read it."""

    def abort(self) -> None:
        """End what would keep this process from ending."""


_members: weakref.WeakSet[Any] = weakref.WeakSet()
_installed: list[Any] = []  # the hook for uncaught errors that there was before
_told: list[BaseException] = []  # uncaught errors that members have been told of


def tell_at_end(member: EndObserver) -> None:
    """Tell ``member``, while it lives, of the error that ends this process, or of an end without one."""
    _members.add(member)
    if not _installed:
        _installed.append(sys.excepthook)
        sys.excepthook = _uncaught
        atexit.register(_end)


def tells() -> bool:
    """True if something would tell the others of an error that ends this process."""
    return bool(_members)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _told.append(error)
    explain_full_table(error)
    members = list(_members)
    follows = [member.end_process(error) for member in members]
    if any(follows) and not debugs() and (path := _kept(error)) is not None:
        trace = _shortened(error, trace, path)
    elif members and not debugs() and _prints(_installed[0]) and _cut(error):
        return
    _installed[0](kind, error, trace)


def _prints(hook: Any) -> bool:
    """True if a hook for uncaught errors only prints them; one of the user's may send or debug them in full."""
    hook = inspect.unwrap(hook)  # that of before_joining.py
    return hook is sys.__excepthook__ or getattr(hook, "__module__", "").startswith("torch.")


def _cut(error: BaseException) -> bool:
    """Print this rank's own error without the frames of PACKAGES between the user's; a file has them all.

    Returns whether it did: no-op if it has few of them. The last line names the rank, error, place and file.
    """
    whole = [(link, link.__traceback__) for link in _chain(error)]
    line = _leave_out(error)
    if line is None:
        return False
    try:
        _installed[0](type(error), error, error.__traceback__)
    finally:
        for link, full in whole:  # for debuggers
            link.__traceback__ = full
    say(f"[rank{_rank()}]: {line}", stderr=True)
    return True


def call_with_short_errors(function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    """Call ``function`` in a process of multiprocessing, which hands the text of an error to the one that waits for it.

    Frames are left out of it as of errors that a rank prints; its last line names the rank, error, place and file.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if not debugs() and (line := _leave_out(error)) is not None:
            add_note(error, line)
        raise


def _leave_out(error: BaseException) -> str | None:
    """Take the frames of PACKAGES between the user's out of an error's tracebacks; a file has them all.

    Returns a line that names the rank, error, place and file; None, and changes nothing, if it has few of them.
    """
    chain, frames = _chain(error), 0
    cut: list[tuple[BaseException, list[TracebackType]]] = []
    for link in chain:
        entries = _entries(link.__traceback__)
        frames += len(entries)
        cut.append((link, _telling(entries)))
    left = frames - sum(len(kept) for _, kept in cut)
    if left <= _DEEPEST or (path := _kept(error)) is None:
        return None
    text = summary(error)
    for link, kept in cut:
        link.__traceback__ = _joined(kept)
    return f"Rank {_rank()} ended with {text}. {left} frames of Lightning, torch and lt_zero are left out here: {path}"


def _chain(error: BaseException) -> list[BaseException]:
    """An error, and those that are printed above it."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return chain


def _telling(entries: list[TracebackType]) -> list[TracebackType]:
    """The user's entries of a traceback, and the last ones below them."""
    deepest = max((n for n, entry in enumerate(entries) if is_users(entry.tb_frame)), default=-1)
    deepest = max(deepest, len(entries) - 1 - _DEEPEST)
    return [entry for n, entry in enumerate(entries) if n > deepest or is_users(entry.tb_frame)]


def debugs() -> bool:
    """True if ``LT_ZERO_DEBUG`` is set."""
    return switched("LT_ZERO_DEBUG", False)


def _kept(error: BaseException) -> str | None:
    """Write an error's traceback to a file, and return its path; None if that fails.

    Of this rank's files of earlier runs only the last are kept.
    """
    prefix = f"lt_zero_rank{_rank()}_"
    try:
        handle, path = tempfile.mkstemp(".txt", prefix)
        with open(handle, "w", encoding="utf-8") as file:
            file.writelines(traceback.format_exception(error))
    except OSError:
        return None
    found: list[tuple[float, Path]] = []
    for other in Path(path).parent.glob(f"{prefix}*.txt"):
        with contextlib.suppress(OSError):  # another process of this user removes them, too
            state = other.lstat()
            if state.st_uid == os.geteuid() and str(other) != path:
                found.append((state.st_mtime, other))
    for _, other in sorted(found)[: -(_FILES_KEPT - 1)]:
        with contextlib.suppress(OSError):
            other.unlink()
    return path


def _rank() -> int | str:
    return dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "0")


def _shortened(error: BaseException, trace: TracebackType | None, path: str) -> TracebackType | None:
    """Leave of an error, which a file has in full, its text and the user's innermost frames: another rank's matters."""
    entries = _entries(trace)
    short = _joined(([entry for entry in entries if is_users(entry.tb_frame)] or entries)[-_SHOWN:])
    first, *rest = str(error).splitlines() or [""]
    text = [first, f"(The whole traceback: {path})", rest[-1]] if rest else [f"(In full: {path}) {first}"]
    error.args = ("\n".join(text),)
    error.__cause__ = error.__context__ = None
    error.__traceback__ = short
    return short


def _entries(trace: TracebackType | None) -> list[TracebackType]:
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    return entries


def _joined(entries: list[TracebackType]) -> TracebackType | None:
    """A traceback of ``entries`` only."""
    trace = None
    for entry in reversed(entries):
        trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace


def _end() -> None:
    error = None
    # A hook that was installed later may not call this package's, so the last uncaught error is looked up here.
    if sys.excepthook is not _uncaught:
        last = getattr(sys, "last_value", None)  # of an uncaught error
        error = last if last not in _told else None
    for member in list(_members):
        member.end_process(error)
    if multiprocessing.parent_process() is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        for member in list(_members):
            member.leave()
    for member in list(_members):
        member.abort()
