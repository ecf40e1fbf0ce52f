"""The table of a process's file descriptors: what to say when it is full.

Files, sockets of stores and process groups, shared memory and pipes of loaders take their descriptors from one table.
Whoever finds it full has rarely filled it, and says no more than "Too many open files".
"""

from __future__ import annotations

import errno
import functools
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

from lt_zero.common.errors import add_note

_P = ParamSpec("_P")
_T = TypeVar("_T")
_WORDS = os.strerror(errno.EMFILE)
_OF_SYSTEM = os.strerror(errno.ENFILE)  # begins with the same words
_ENOUGH = 65_536
_runs: list[int] = [0]


def count_run() -> None:
    """Count a run (fit, validate, test or predict) that this process begins."""
    _runs[0] += 1


def limits() -> tuple[int, int]:
    """The soft limit of this process's descriptors, and the one to which ``raise_limit`` raises it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    return soft, soft if soft == resource.RLIM_INFINITY else max(soft, most)


@functools.cache
def raise_limit() -> None:
    """Raise the soft limit of this process's descriptors to the hard one, at most to 65,536.

    Each group over n ranks takes n descriptors, and the usual soft limit of 1,024 is one for programs that call
    ``select``. No-op the second time: a limit that the script sets after that stays.
    """
    soft, raised = limits()
    if raised != soft:
        with suppress(ValueError, OSError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def fullness() -> str:
    """The limit of descriptors, the number of runs in this process, and the remedy."""
    soft, hard = (_shown(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    return (
        f"The table of this process's file descriptors is full: its limit is {soft} (ulimit -n; the hard limit is"
        f" {hard}), and {_runs[0]} {'run has' if _runs[0] == 1 else 'runs have'} begun in this process. Raise the limit"
        " before the start (ulimit -n 65536), and let go of what earlier runs left open: Trainers, Fabrics and engines"
        " that are still referred to, workers of data loaders, files."
    )


def has_room(count: int) -> bool:
    """Try to open ``count`` files, and close them again; returns whether the table of descriptors has room for them."""
    opened = list[int]()
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno != errno.EMFILE
    finally:
        for number in opened:
            os.close(number)
    return True


def explain_full_table(error: BaseException) -> None:
    """Add ``fullness`` to an error that a full table has caused, as a note. No-op for others, and the second time."""
    text = fullness()
    if is_full_table(error) and text not in getattr(error, "__notes__", ()) and text not in str(error):
        add_note(error, text)


def explaining_full_table(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function``, whose errors are explained if a full table has caused them."""

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            explain_full_table(error)
            raise

    return called


def is_full_table(error: BaseException | None) -> bool:
    """True if an error, or one that it follows from, says that the process's table is full."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        # torch and gloo raise RuntimeError with the words of the system.
        if (isinstance(error, OSError) and error.errno == errno.EMFILE) or _says_so(str(error)):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def _says_so(text: str) -> bool:
    return _WORDS in text.replace(_OF_SYSTEM, "")


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
