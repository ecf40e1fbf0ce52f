"""What ranks that write one checkpoint tell each other, through the first of them: plans, results and errors."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from lt_zero.common.descriptors import fullness, is_full_table
from lt_zero.common.errors import CheckpointError

_T = TypeVar("_T")
_S = TypeVar("_S")


@dataclass(frozen=True)
class _Failures:
    """Errors, as text, by the ranks in the group that had them."""

    by_rank: dict[int, str]


def through_first(
    group: dist.ProcessGroup | None, own: Callable[[], _T], unite: Callable[[list[_T]], Sequence[_S]]
) -> _S:
    """Let the first rank unite what each has, and return each its own part of the result. Collective over ``group``.

    An error of one rank ends the call on all of them.

    Args:
        group: the ranks; None: one process.
        own: is called on each rank.
        unite: is called on the first rank with what ``own`` has returned, in the order of ranks, if no rank failed.
            Returns as many parts.

    Raises:
        CheckpointError: on all ranks; names those that failed.
    """
    size = dist.get_world_size(group) if group is not None else 1
    rank = dist.get_rank(group) if group is not None else 0
    mine: Any = _attempt(own, rank)
    told = _gathered(mine, group, rank, size)
    parts: Any = None
    if rank == 0:
        failures = {number: text for one in told if isinstance(one, _Failures) for number, text in one.by_rank.items()}
        parts = _Failures(failures) if failures else _attempt(lambda: list(unite(told)), rank)
        if isinstance(parts, _Failures):
            parts = [parts] * size
    part = _scattered(parts, group)
    if isinstance(part, _Failures):
        failed = sorted(part.by_rank.items())
        raise CheckpointError(" ".join(f"rank {number}: {text}" if size > 1 else text for number, text in failed))
    result: _S = part
    return result


def _attempt(call: Callable[[], Any], rank: int) -> Any:
    """What ``call`` returns; of any error the text, as the other ranks are waiting, and some errors cannot be sent."""
    try:
        return call()
    except BaseException as error:
        return _Failures({rank: _reason(error)})


def _gathered(mine: Any, group: dist.ProcessGroup | None, rank: int, size: int) -> list[Any]:
    """The values of all ranks on the first one; [] on the others."""
    if group is None:
        return [mine]
    told = [None] * size if rank == 0 else None
    dist.gather_object(mine, told, dst=dist.get_global_rank(group, 0), group=group)
    return told or []


def _scattered(parts: list[Any], group: dist.ProcessGroup | None) -> Any:
    """One of the first rank's ``parts`` for each rank."""
    if group is None:
        return parts[0]
    received = [None]
    dist.scatter_object_list(received, parts, src=dist.get_global_rank(group, 0), group=group)
    return received[0]


def _reason(error: BaseException) -> str:
    """An error as text, with its place unless it is a ``CheckpointError``."""
    if isinstance(error, CheckpointError):
        return str(error)
    if is_full_table(error):
        return f"{type(error).__name__}: {error}. {fullness()}"
    trace = traceback.extract_tb(error.__traceback__)
    place = f" ({trace[-1].filename}:{trace[-1].lineno}, in {trace[-1].name})" if trace else ""
    return f"{type(error).__name__}: {error}{place}"
