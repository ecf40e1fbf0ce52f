"""The same checkpoint on all ranks: each has opened one, or found none, and they compare what they have.

Note [One checkpoint]
    Each rank opens a checkpoint for itself, and its path may lead to something else on each node: a local disk, a
    cache that lags behind, the newest file of a folder. Parts of two checkpoints fit together, so a run would go on
    from a mixture. Therefore ranks compare what they have opened before anything is loaded, in one exchange: equal
    content under different paths is the same checkpoint, and different content under one path is not.
    A directory has two files or more of each rank that saved it, and a file that is missing has to be found before
    anything is loaded. Ranks that see the same files look at a share of them each: all files on all ranks would be 30
    million requests to a file system of 4,096 ranks. Copies on disks of nodes are looked at by the ranks of each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lt_zero.common.errors import CheckpointError
from lt_zero.core.comm.world import World

if TYPE_CHECKING:
    from lt_zero.checkpoint.native.archive import Archive

_LISTED = 4  # groups of ranks in an error
_REMEDY = (
    "Nothing was loaded. Give all ranks a path on storage that all nodes share, or copies of one checkpoint. "
    '(last_checkpoint, ckpt_path="last" and a file `latest` tell what is on the disk of the node that reads them.)'
)
Found = TypeVar("Found")


class Identity(NamedTuple):
    """Digests of a checkpoint: equal ones mean equal content."""

    step: int | None
    digest: str


class OpenedCopy(NamedTuple):
    """A rank's copy of a checkpoint, opened.

    Attributes:
        identify: computes its identity.
        archive: a directory whose files have to be checked; None: there are none, or they are.
    """

    identify: Callable[[], Identity]
    archive: Archive | None = None


class _Told(NamedTuple):
    """Description of a rank's copy for the others.

    Attributes:
        place: its path; None: there is no checkpoint.
        content: its identity, or why it cannot be opened; None without a checkpoint.
        copy: see ``Archive.copy_id``; None: no files are left to check.
    """

    place: str | None
    content: str | Identity | None
    copy: tuple[Any, ...] | None = None


def load_same(
    world: World | None,
    path: str | os.PathLike[str] | None,
    read: Callable[[], tuple[Found, OpenedCopy]],
) -> Found:
    """Return the result of ``read`` if all ranks read the same checkpoint. See Note [One checkpoint]. Collective.

    Args:
        world: the collectives; None: this process is on its own.
        path: of this rank's checkpoint; None: it has none, and ``read`` returns a stand-in.
        read: opens the checkpoint; also returns this rank's copy, which is not identified on a single rank.

    Raises:
        CheckpointError: on all ranks: they differ, or some cannot open theirs; names each. If none can, each rank
            raises its own error.
    """
    if world is None or world.size == 1:
        found, mine = read()
        if mine.archive is not None:
            mine.archive.check_files()
        return found
    problem: Exception | None = None
    place = None if path is None else os.fspath(path)
    told = _Told(place, None)
    try:
        found, mine = read()
        if place is not None:
            told = _Told(place, mine.identify(), mine.archive.copy_id() if mine.archive is not None else None)
    except Exception as error:
        problem = error
        told = _Told(place, str(error) or repr(error))
    every: list[_Told] = world.host_gather(told, "the checkpoint to load")
    _require_same(every, problem)
    if any(other.copy is not None for other in every):
        every, problem = _with_files_checked(world, every, mine.archive)
        _require_same(every, problem)
    return found


def _require_same(every: Sequence[_Told], problem: Exception | None) -> None:
    """Raise on all ranks, unless all have opened the same checkpoint. ``problem``: of this rank."""
    if problem is not None and all(isinstance(other.content, str) for other in every):
        raise problem
    if problem is not None or len({other.content for other in every}) > 1:
        raise CheckpointError(f"The ranks do not load the same checkpoint: {_listed(every)}. {_REMEDY}") from problem


def _with_files_checked(
    world: World, every: Sequence[_Told], archive: Archive | None
) -> tuple[list[_Told], Exception | None]:
    """Check the files of all copies, the ranks that see the same ones a share each. Collective.

    Returns what all ranks tell then, and the problem of this rank's copy.
    """
    copies = [told.copy for told in every]
    sharing = [rank for rank, copy in enumerate(copies) if copy == copies[world.rank]]
    problem: str | None = None
    try:
        if archive is not None:
            archive.check_files(sharing.index(world.rank), len(sharing))
    except Exception as error:
        problem = str(error) or repr(error)
    first: dict[tuple[Any, ...] | None, str] = {}  # the problem of a copy that its first rank has found
    for copy, text in zip(copies, world.host_gather(problem, "the files of the checkpoint"), strict=True):
        if text is not None:
            first.setdefault(copy, text)
    mine = first.get(copies[world.rank])
    checked = [told._replace(content=first.get(told.copy, told.content)) for told in every]
    return checked, None if mine is None else CheckpointError(mine)


def _listed(every: Iterable[_Told]) -> str:
    """List the value of each rank, ranks with equal ones together."""
    groups: dict[str, list[int]] = {}
    for rank, (place, content, _) in enumerate(every):
        if place is None:
            text = "no checkpoint"
        elif isinstance(content, Identity):
            text = f"{place} (step {content.step}, content {content.digest[:8]})"
        else:
            text = f"{place} cannot be opened ({content})"
        groups.setdefault(text, []).append(rank)
    lines = [f"rank{'s' * (len(ranks) > 1)} {_ranges(ranks)}: {text}" for text, ranks in groups.items()]
    return "; ".join([*lines[:_LISTED], *(["..."] if len(lines) > _LISTED else [])])


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as text.

    >>> _ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    ends = [[numbers[0], numbers[0]]]
    for number in numbers[1:]:
        if number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ends)
