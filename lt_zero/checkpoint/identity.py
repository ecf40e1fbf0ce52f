"""Makes sure that all ranks load the same checkpoint.

Note [One checkpoint]
    Each rank opens a checkpoint for itself, and its path may lead to something else on each node: a local disk, a
    cache that lags behind, the newest file of a folder. Parts of two checkpoints fit together, so a run would go on
    from a mixture. Therefore ranks compare what they have opened before anything is loaded, in one exchange: equal
    content under different paths is the same checkpoint, and different content under one path is not.

Note [Digests]
    The manifest of a directory has a checksum that stands for all files. Of other formats only what takes no pass over
    the tensors is read: the checksums in the directory of a zip (torch.save), else the header and samples of each
    tensor. What a plugin has loaded is in memory, and is read whole.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lt_zero.checkpoint.formats.foreign import ForeignSource
from lt_zero.checkpoint.formats.reading import check_file, opened
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.open import open_source
from lt_zero.checkpoint.source import Source
from lt_zero.comm.world import World
from lt_zero.common.errors import CheckpointError
from lt_zero.io.checked_file import unreadable

_BLOCK, _BLOCKS = 4096, 16  # bytes of a sample; samples of a tensor
_PIECE = 1 << 22  # bytes that are read at a time
_SHOWN = 4  # groups of ranks in an error
_REMEDY = (
    "Nothing was loaded. Give all ranks a path on storage that all nodes share, or copies of one checkpoint. "
    '(last_checkpoint, ckpt_path="last" and a file `latest` tell what is on the disk of the node that reads them.)'
)
Found = TypeVar("Found")
Part = tuple[Path, int, "int | None"]  # a file, and where the part of it that counts begins and ends


class Identity(NamedTuple):
    """What tells checkpoints apart: equal digests mean equal content."""

    step: int | None
    digest: str


def of_source(source: Source) -> Identity:
    """The identity of an open checkpoint. See Note [Digests]."""
    assert isinstance(source, Archive | ForeignSource)
    step = getattr(source, "steps", source.meta.get("global_step"))
    return Identity(
        _number(step), source.manifest.checksum if isinstance(source, Archive) else digest_of_parts(source.parts)
    )


def of_content(content: Mapping[str, Any], file: str | os.PathLike[str] | None = None) -> Identity:
    """The identity of a checkpoint dictionary. ``file``: of torch.save, where it comes from unchanged, if there is one.

    See Note [Digests].
    """
    known = file is not None and os.path.isfile(file) and zipfile.is_zipfile(file)
    digest = digest_of_parts([(Path(file), 0, None)]) if known and file is not None else digest_of_values(content)
    return Identity(_number(content.get("global_step")), digest)


def checked_file(path: str | os.PathLike[str] | None, world: World | None) -> bool:
    """Whether ``path`` is a local file of ``torch.save``, whose checksums are right; each rank of a node does a share.

    ``path``: None if it is no local file, or if something else reads it. A file of another kind is left to its reader.

    Raises:
        CheckpointError: it is damaged, cannot be read, or is no regular file; names it. Perhaps on some ranks only.
    """
    if path is None or not os.path.exists(path):
        return False
    with opened(Path(path)) as file, reading(path):
        if not zipfile.is_zipfile(file):
            return False
    node = next(ranks for ranks in world.nodes if world.rank in ranks) if world is not None else [0]
    check_file(Path(path), node.index(world.rank) if world is not None else 0, len(node))
    return True


@contextlib.contextmanager
def reading(path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Context in which an error of the disk becomes one that names ``path``; None: it has no name.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        yield
    except OSError as error:
        if path is None or error.errno in (None, errno.ENOENT):
            raise
        raise unreadable(os.fspath(path), error) from error


def _number(step: Any) -> int | None:
    return step if isinstance(step, int) else None


def open_same(
    world: World | None, path: str | os.PathLike[str], use: Callable[[Source], Found], tell: bool = True
) -> Found:
    """What ``use`` makes of the open checkpoint, if all ranks have the same. Collective.

    ``tell``: see ``open_source``. Errors are those of ``load_same``.
    """
    return load_same(world, path, lambda: opened_source(path, use, tell))


def opened_source(
    path: str | os.PathLike[str], use: Callable[[Source], Found], tell: bool
) -> tuple[Found, Callable[[], Identity]]:
    """What ``use`` makes of the open checkpoint, and what tells its identity."""
    source = open_source(path, tell=tell)
    return use(source), partial(of_source, source)


def load_same(
    world: World | None,
    path: str | os.PathLike[str] | None,
    read: Callable[[], tuple[Found, Callable[[], Identity]]],
) -> Found:
    """What ``read`` returns, if all ranks have opened the same checkpoint. See Note [One checkpoint]. Collective.

    Args:
        world: the collectives; None: this process is on its own.
        path: of this rank's checkpoint; None: it has none, and ``read`` returns what stands for that.
        read: opens the checkpoint; also returns what tells its identity, which is not asked of a single rank.

    Raises:
        CheckpointError: on all ranks: they differ, or some cannot open theirs; names each. If none can, each rank
            raises its own error.
    """
    if world is None or world.size == 1:
        return read()[0]
    problem: Exception | None = None
    try:
        found, identify = read()
        told: str | Identity | None = identify() if path is not None else None
    except Exception as error:
        problem, told = error, str(error) or repr(error)
    place = None if path is None else os.fspath(path)
    every: list[tuple[str | None, str | Identity | None]] = world.host_gather((place, told), "the checkpoint to load")
    if problem is not None and all(isinstance(other, str) for _, other in every):
        raise problem
    if problem is not None or len({other for _, other in every}) > 1:
        raise CheckpointError(f"The ranks do not load the same checkpoint: {_listed(every)}. {_REMEDY}") from problem
    return found


def _listed(every: Iterable[tuple[str | None, str | Identity | None]]) -> str:
    """What each rank has, ranks with the same together."""
    groups: dict[str, list[int]] = {}
    for rank, (place, told) in enumerate(every):
        if place is None:
            text = "no checkpoint"
        elif isinstance(told, Identity):
            text = f"{place} (step {told.step}, content {told.digest[:8]})"
        else:
            text = f"{place} cannot be opened ({told})"
        groups.setdefault(text, []).append(rank)
    lines = [f"rank{'s' * (len(ranks) > 1)} {_ranges(ranks)}: {text}" for text, ranks in groups.items()]
    return "; ".join([*lines[:_SHOWN], *(["..."] if len(lines) > _SHOWN else [])])


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


# ---- digests ---------------------------------------------------------------------------------------------------------


def digest_of_parts(parts: Iterable[Part]) -> str:
    """A digest of files, or of parts of files. See Note [Digests].

    Raises:
        CheckpointError: a file cannot be read; names it.
    """
    digest = hashlib.sha256()
    for path, start, stop in sorted(set(parts), key=lambda part: part[:2]):
        with opened(path, start, stop) as file, reading(path):
            head = file.read(8)
            if head.startswith(b"PK\x03\x04"):
                _add_zip(digest, file)
            elif path.suffix == ".safetensors":
                _add_safetensors(digest, file, int.from_bytes(head, "little"))
            else:
                file.seek(0)
                while piece := file.read(_PIECE):
                    digest.update(piece)
    return digest.hexdigest()


def _add_zip(digest: Any, file: IO[bytes]) -> None:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            # The first folder is named after the file.
            digest.update(f"{info.filename.partition('/')[2]} {info.file_size} {info.CRC}\n".encode())
            if info.CRC == 0:  # written without checksums
                _add_samples(digest, file, info.header_offset, info.header_offset + info.file_size + _BLOCK)


def _add_safetensors(digest: Any, file: IO[bytes], length: int) -> None:
    header = file.read(length)
    digest.update(header)
    for name, entry in json.loads(header).items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            _add_samples(digest, file, 8 + length + low, 8 + length + high)


def _add_samples(digest: Any, file: IO[bytes], low: int, high: int) -> None:
    """Add the bytes of a range, or evenly spaced blocks of a long one, its first and last among them."""
    room = high - low - _BLOCK
    starts: Sequence[int] = range(low, high, _BLOCK)
    if len(starts) > _BLOCKS:
        starts = [low + room * number // (_BLOCKS - 1) for number in range(_BLOCKS)]
    for start in starts:
        file.seek(start)
        digest.update(file.read(min(_BLOCK, high - start)))


def digest_of_values(value: Any) -> str:
    """A digest of nested containers: all tensors, numbers and texts in them, and the classes of other objects."""
    digest = hashlib.sha256()
    _add_value(digest, value, set())
    return digest.hexdigest()


def _add_value(digest: Any, value: Any, outer: set[int]) -> None:
    """``outer``: ids of the containers around the value."""
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}\n".encode())
        if type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_meta:
            plain = value.dequantize() if value.is_quantized else value
            flat = plain.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy())
    elif isinstance(value, Mapping | list | tuple) and id(value) not in outer:
        digest.update(f"{type(value).__name__} {len(value)}\n".encode())
        items = (part for pair in value.items() for part in pair) if isinstance(value, Mapping) else value
        for item in items:
            _add_value(digest, item, outer | {id(value)})
    else:
        known = type(value) in (str, int, float, bool, complex, bytes, type(None))
        digest.update(f"{repr(value) if known else type(value).__qualname__}\n".encode())
