"""Progress of long operations on stderr.

Note [Bar or lines]
    A terminal shows a bar; log files (SLURM) get lines at growing intervals. So does a terminal that already shows a
    bar: rich allows one live display and prints lines above it, and tqdm's bars make room for lines written through
    tqdm. Operations of under two seconds show nothing.

    A thread per operation polls its counters. All bars of a process share one display.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lt_zero.common.units import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger("lt_zero")

FIRST = 2.0  # seconds before anything is shown
LINES = (FIRST, 10.0, 30.0)  # seconds after which a line is due
EACH = 60.0  # seconds between later lines
_REFRESH = 0.2  # seconds between updates of a bar
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_RANK")

_local_rank: int | None = None  # of a process whose launcher does not set it in the environment


def set_local_rank(rank: int) -> None:
    """Set the local rank of this process; local rank 0 shows the operations of its machine."""
    global _local_rank
    _local_rank = rank


def local_rank() -> int:
    """The local rank of this process, 0 if unknown."""
    if _local_rank is not None:
        return _local_rank
    found = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0")
    return int(found) if found.isdigit() else 0


class ProgressBar:
    """Progress of an operation. Any thread may advance it.

    Args:
        what: a few words, such as "Sharding 24 units".
        total: the total of what ``advance`` counts, which may be set later; None: unknown.
        in_bytes: whether bytes are counted.
        clock: returns seconds.
    """

    def __init__(
        self, what: str, total: float | None = None, in_bytes: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.what, self.total, self._in_bytes, self._clock = what, total, in_bytes, clock
        self.done = 0.0
        self._start = clock()
        self._lock = threading.Lock()

    def advance(self, count: float = 1) -> None:
        """Add ``count`` to the amount done."""
        with self._lock:
            self.done += count

    def reach(self, done: float) -> None:
        """Raise the amount done to this value."""
        with self._lock:
            self.done = max(self.done, done)

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    def status(self) -> str:
        """The amount done and the elapsed time: ``7 of 24 (29 %), 12 s``."""
        count = self._amount(self.done)
        if self.total:
            count += f" of {self._amount(self.total)} ({self.done / self.total * 100:.0f} %)"
        return f"{count}, {duration(self.elapsed)}" if self.total or self.done else duration(self.elapsed)

    def _amount(self, count: float) -> str:
        return format_bytes(count, 1) if self._in_bytes else f"{count:g}"


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(12.4), duration(75), duration(7322)
    ('12 s', '1 min 15 s', '2 h 2 min')
    """
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


@contextmanager
def progress_bar(
    what: str, total: float | None = None, *, rank: int | None = None, in_bytes: bool = False, shown: bool = True
) -> Iterator[ProgressBar]:
    """Context that shows the progress of an operation on stderr after two seconds. See Note [Bar or lines].

    Silent if the logger "lt_zero" shows no warnings (``log_level: error``).

    Args:
        what, total, in_bytes: see ``ProgressBar``.
        rank: the rank in a collective operation, which rank 0 shows; None for an operation of each machine, which
            local rank 0 shows.
        shown: False shows nothing.
    """
    work = ProgressBar(what, total, in_bytes)
    first = (local_rank() if rank is None else rank) == 0
    if not (shown and first and log.isEnabledFor(logging.WARNING)):
        yield work
        return
    ended = threading.Event()
    outcome = ["done"]
    thread = threading.Thread(target=_watch, args=(work, ended, outcome), name="lt_zero-waiting", daemon=True)
    with contextlib.suppress(RuntimeError):  # show nothing if no thread can be started
        thread.start()
    try:
        yield work
    except BaseException:
        outcome[0] = "stopped"
        raise
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()


def _watch(work: ProgressBar, ended: threading.Event, outcome: list[str]) -> None:
    """Body of the thread that shows an operation. A failing display must not fail the operation."""
    with contextlib.suppress(Exception):
        if ended.wait(FIRST):
            return
        if not _draws() or not follow_bar(work, ended.wait):
            follow_lines(work, ended.wait, outcome)


# ---- lines ---------------------------------------------------------------------------------------------------------


def follow_lines(work: ProgressBar, wait: Callable[[float], bool], outcome: list[str], write: Any = None) -> None:
    """Write a line whenever one is due until the operation ends, and one at its end; by default to stderr.

    ``wait`` waits for the end at most the given seconds, and returns whether it has come. ``outcome`` has one item, how
    the operation ended ("done", "stopped"), which is read at the end.
    """
    write, written = write or _write, False
    for due in itertools.chain(LINES, itertools.count(LINES[-1] + EACH, EACH)):
        if written and due <= work.elapsed:
            continue  # skip lines that a busy machine delayed
        if wait(max(0.0, due - work.elapsed)):
            break
        write(f"lt_zero: {work.what}: {work.status()}")
        written = True
    if written:
        write(f"lt_zero: {work.what}: {outcome[0]} after {duration(work.elapsed)}")


def _write(line: str) -> None:
    stderr = sys.stderr
    if stderr is not None and _tqdm_bars():
        sys.modules["tqdm"].tqdm.write(line, file=stderr)
    elif stderr is not None:
        stderr.write(f"{line}\n")
        stderr.flush()


# ---- a bar ---------------------------------------------------------------------------------------------------------

_display: Progress | None = None
_shown = 0  # number of operations that it shows
_lock = threading.Lock()


def _reset() -> None:
    """Reset in a forked child, which has neither the display nor the thread that may hold its lock."""
    global _display, _shown, _lock
    _display, _shown, _lock = None, 0, threading.Lock()


os.register_at_fork(after_in_child=_reset)


def _tqdm_bars() -> bool:
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return len(getattr(tqdm, "_instances", ())) > 0


def _draws() -> bool:
    """True if stderr is a terminal without another live display."""
    stderr = sys.stderr
    if stderr is None or not stderr.isatty() or os.environ.get("TERM", "") in ("dumb", "unknown"):
        return False
    with _lock:
        if _display is not None:
            return True
    return not _tqdm_bars() and all(type(s).__module__ != "rich.file_proxy" for s in (sys.stdout, stderr))


def follow_bar(work: ProgressBar, wait: Callable[[float], bool]) -> bool:
    """Show a bar until the operation ends; False if another live display prevents it."""
    from rich.errors import LiveError
    from rich.progress import BarColumn, Progress, TextColumn

    from lt_zero.common.console import RunConsole

    global _display, _shown
    with _lock:
        if _display is None:
            texts = [TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[status]")]
            display = Progress(texts[0], BarColumn(), texts[1], console=RunConsole(stderr=True))
            try:
                display.start()
            except LiveError:
                return False
            _display = display
        display = _display
        _shown += 1
        task = display.add_task(work.what, total=work.total, completed=work.done, status=work.status())  # type: ignore[arg-type]
    try:
        while not wait(_REFRESH):
            display.update(task, total=work.total, completed=work.done, description=work.what, status=work.status())
    finally:
        with _lock:
            display.update(task, completed=work.done, status=work.status())
            display.stop_task(task)
            if display is _display:
                _shown -= 1
                if _shown == 0:
                    _display = None
                    display.stop()
    return True
