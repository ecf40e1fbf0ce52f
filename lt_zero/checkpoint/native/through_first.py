"""Plans, results and errors of the ranks that write one checkpoint: they go through the first rank."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lt_zero.common.descriptors import fullness, is_full_table
from lt_zero.common.errors import CheckpointError
from lt_zero.core.comm.objects import gather_to_first, scatter_from_first

_T = TypeVar("_T")
_S = TypeVar("_S")


@dataclass(frozen=True)
class _Failures:
    """Errors, as text, by the ranks in the group that had them."""

    by_rank: dict[int, str]


def through_first(group: Any, own: Callable[[], _T], unite: Callable[[list[_T]], Sequence[_S]]) -> _S:
    """Let the first rank unite what each has, and return each its own part of the result. Collective over ``group``.

    An error of one rank ends the call on all of them.

    Args:
        group: the process group of the ranks; None: one process.
        own: is called on each rank.
        unite: is called on the first rank with what ``own`` has returned, in the order of ranks, if no rank failed.
            Returns as many parts.

    Raises:
        CheckpointError: on all ranks; names those that failed.
    """
    size = group.size() if group is not None else 1
    rank = group.rank() if group is not None else 0
    told = gather_to_first(_attempt(own, rank), group)
    parts: Any = None
    if rank == 0:
        failures = {number: text for one in told if isinstance(one, _Failures) for number, text in one.by_rank.items()}
        parts = _Failures(failures) if failures else _attempt(lambda: list(unite(told)), rank)
        if isinstance(parts, _Failures):
            parts = [parts] * size
    part = scatter_from_first(parts, group)
    if isinstance(part, _Failures):
        failed = sorted(part.by_rank.items())
        raise CheckpointError(" ".join(f"rank {number}: {text}" if size > 1 else text for number, text in failed))
    result: _S = part
    return result


def _attempt(call: Callable[[], Any], rank: int) -> Any:
    """Call; an error is returned as text, as the other ranks are waiting, and some errors cannot be sent."""
    try:
        return call()
    except BaseException as error:
        return _Failures({rank: _reason(error)})


def _reason(error: BaseException) -> str:
    """An error as text, with its place unless it is a ``CheckpointError``."""
    if isinstance(error, CheckpointError):
        return str(error)
    if is_full_table(error):
        return f"{type(error).__name__}: {error}. {fullness()}"
    trace = traceback.extract_tb(error.__traceback__)
    place = f" ({trace[-1].filename}:{trace[-1].lineno}, in {trace[-1].name})" if trace else ""
    return f"{type(error).__name__}: {error}{place}"
