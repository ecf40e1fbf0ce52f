"""Opens a checkpoint of any supported format by its path, and verifies checkpoint directories.

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
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.directory import MANIFEST, file_system, find, inside, is_url, plain_path, whole_file
from lt_zero.checkpoint.native.saved_file import check_file, opened
from lt_zero.checkpoint.same import Found, Identity, OpenedCopy
from lt_zero.checkpoint.source import CheckpointSource
from lt_zero.common.errors import CheckpointError
from lt_zero.common.places import NotInstalled, import_public
from lt_zero.common.progress_bar import progress_bar
from lt_zero.common.users_code import warn
from lt_zero.core.comm.world import World
from lt_zero.core.stores.direct_file import unreadable
from lt_zero.core.stores.regular_file import read_start

if TYPE_CHECKING:
    from lt_zero.checkpoint.formats.foreign import ForeignSource

_FORMATS = "lt_zero.checkpoint.formats"
# Classes of other formats by their modules, which a run that reads and writes its own format only does not load.
_KINDS = (("deepspeed", "DeepSpeedSource"), ("dcp", "DcpSource"), ("torch_file", "FileSource"))
LATEST = "latest"  # the file that names the last checkpoint of a folder
_LONGEST = 4096  # bytes of a tag
_NOTES = 10  # maximum warnings about a source
_LOOKED_FOR = (
    f"a directory of lt_zero ({MANIFEST}, which is written last, so an interrupted save has none), of DeepSpeed "
    "(*mp_rank_00_model_states.pt, or a folder with them), of FSDPStrategy or ModelParallelStrategy (.metadata), of "
    "Hugging Face (model.safetensors, pytorch_model.bin or their index.json); a file of torch.save or safetensors"
)
_BLOCK, _BLOCKS = 4096, 16  # bytes of a sample; samples of a tensor
_PIECE = 1 << 22  # bytes that are read at a time
FileRange = tuple[Path, int, "int | None"]  # a file, and where the part of it that counts begins and ends


def is_directory(path: str | os.PathLike[str]) -> bool:
    """True if ``path`` is a checkpoint directory, or lies inside one."""
    if is_url(path):
        return Archive.is_at(find(path))
    return Path(found_at(path)).is_dir()


def found_at(path: str | os.PathLike[str], tag: str | None = None) -> str:
    """The checkpoint that ``path`` refers to: a folder of another format is one itself, else see ``find``.

    ``tag``: which one, where ``path`` is the folder of a loop's checkpoints; default: the one in its file ``latest``.
    """
    path = plain_path(path)
    found = find(path)
    whole = Archive.is_at(found)
    url = is_url(path)
    if whole and (url or os.path.isfile(Path(path, MANIFEST))):
        return found
    if url or Path(path).is_dir():
        tag = tag if tag is not None else read_latest(path)
        if tag and Path(tag).name == tag and Archive.is_at(named := inside(found if url else path, tag)):
            return named
        if not url and _kind_of(Path(path)) is not None:
            return str(path)
    return found


def read_latest(folder: str | os.PathLike[str]) -> str | None:
    """The name of the last checkpoint in a folder or at a URL; None if no file ``latest`` names one.

    Raises:
        CheckpointError: the file cannot be read, or is empty.
    """
    latest = inside(folder, LATEST)
    data = None
    if is_url(folder):
        files = file_system(latest)
        data = bytes(files.cat_file(latest)) if files.exists(latest) else None
    else:
        try:
            data = read_start(latest, _LONGEST) if os.path.lexists(latest) else None
        except OSError as error:
            raise unreadable(latest, error) from error
    if data is None:
        return None
    if not (found := data.decode("utf-8", "replace").strip()):
        raise CheckpointError(f"{latest} is empty. Pass the checkpoint's name: load_checkpoint(..., tag=...).")
    return found


def latest_of(world: World, folder: str | os.PathLike[str]) -> str | None:
    """``read_latest`` on rank 0, for all ranks. Collective.

    Raises:
        CheckpointError: on all ranks.
    """
    with world.agree("reading the latest checkpoint's name", CheckpointError):
        found = read_latest(folder) if world.rank == 0 else None
    name: str | None = world.host_broadcast(found, "the latest checkpoint")
    return name


def name_latest(folder: str | os.PathLike[str], tag: str, path: str) -> None:
    """Write the name of a checkpoint that is published at ``path`` where ``read_latest`` finds it, atomically."""
    latest = inside(folder, LATEST)
    if is_url(latest):
        file_system(latest).pipe_file(latest, tag.encode())
        return
    with whole_file(latest) as temporary:
        Path(temporary).write_text(tag, encoding="utf-8")


def open_source(
    path: str | os.PathLike[str],
    tag: str | None = None,
    tell: bool = True,
    inert: Sequence[str] = (),
    cuts: Mapping[str, int] | None = None,
    checks_files: bool = True,
) -> CheckpointSource:
    """Open a checkpoint of any supported format for reading.

    Args:
        path: a checkpoint of lt_zero, DeepSpeed, Lightning's sharded strategies, ``torch.save``, safetensors or Hugging
            Face's tools.
        tag: of a folder of DeepSpeed's, or of a loop's, checkpoints; default: the one in its file ``latest``.
        tell: warn of content that cannot be converted.
        inert: names of further classes whose objects are left out instead of refused, in files of other formats.
        cuts: of a tensor-parallel run of DeepSpeed, whose files do not tell it: the dimension that is cut, by patterns
            of names; -1 for what all ranks have whole.
        checks_files: as for ``Archive``.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or its format is unknown.
    """
    found = found_at(path, tag)
    target = Path(found)
    native = is_url(found) or (target / MANIFEST).is_file()
    if not native and not target.exists():
        raise CheckpointError(f"There is no checkpoint at {target}: no such file or directory.")
    kind = None if native else _kind_of(target)
    has_tags = kind is not None and kind.has_tags
    # torch could read the files of a directory of lt_zero without a manifest, but they may be incomplete.
    if not native and (kind is None or (target / "weights-00000.pt").is_file()):
        contents = "a file of an unknown kind"
        if target.is_dir():
            names = sorted(path.name for path in target.iterdir())
            contents = f"a directory with {', '.join(names[:5]) or 'nothing'}{', ...' if len(names) > 5 else ''}"
        lacks = "is not a checkpoint, or not a complete one" if tag is None else f"has no checkpoint {tag!r}"
        raise CheckpointError(f"{target} {lacks}: it is {contents}. Looked for {_LOOKED_FOR}.")
    if tag is not None and not has_tags and os.path.basename(found) != tag:
        text = f"{found} has no tag {tag!r}: only a folder with several checkpoints has tags. Leave it out."
        raise CheckpointError(text)
    if kind is None:
        return Archive(found, checks_files)
    if cuts and not has_tags:
        raise CheckpointError(f"{target} was not written by a tensor-parallel run of DeepSpeed: leave `--cut` out.")
    source: ForeignSource = kind(target, tag, inert, cuts) if has_tags else kind(target, inert)
    if tell:
        notes = list(dict.fromkeys(source.notes))
        more = [f"{len(notes) - _NOTES} more notes of this kind."] if len(notes) > _NOTES else []
        for note in notes[:_NOTES] + more:
            warn(note)
    return source


def _kind_of(target: Path) -> Any:
    """The class of ``formats/`` that opens what is at ``target``; None: none does."""
    name = f"What reads {target}, which is no directory of lt_zero,"
    try:
        kinds = [getattr(import_public(f"{_FORMATS}.{module}", name), kind) for module, kind in _KINDS]
        return next((kind for kind in kinds if kind.looks_like(target)), None)
    except NotInstalled as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        raise CheckpointError(f"Cannot read {target}: {error}. Check its permissions, or use another copy.") from error


_FACTS = ("stage", "ranks", "precision", "created", "imported_from", "torch")  # facts of the run


def verify(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read every byte of a checkpoint directory and compare it with its checksums.

    Args:
        path: the directory, its URL, or a path inside it.

    Returns:
        A summary: facts of the run, ``step``, ``epoch``, ``weights``, the number of ``optimizers`` and ``files``,
        ``bytes``.

    Raises:
        CheckpointError: there is none, or a file is missing or damaged; names it.
    """
    found = found_at(path)
    if not Archive.is_at(found):
        if not is_url(found) and not Path(found).exists():
            raise CheckpointError(f"There is no checkpoint at {found}: no such file or directory.")
        raise CheckpointError(
            f"{found} is not a checkpoint directory of lt_zero, or not a complete one: it has no {MANIFEST}, which"
            " is written last. To check other formats, convert them with `lt-zero import`."
        )
    with contextlib.closing(Archive(found)) as archive:
        files = archive.manifest.files
        run = archive.manifest.run
        weights = archive.weights
        total = sum(record.nbytes for record in files.values())
        with progress_bar(f"Reading all of {found}", total, rank=0, in_bytes=True) as work:
            archive.verify(work.advance)
        numel = sum(spec.numel for name, spec in weights.items() if name not in archive.aliases)
        steps = {name: archive.meta.get(key) for name, key in (("step", "global_step"), ("epoch", "epoch"))}
        return {
            **{key: run[key] for key in _FACTS if key in run},
            **{name: value for name, value in steps.items() if value is not None},
            "weights": f"{len(weights)} tensors, {numel} elements",
            "optimizers": len(archive.optimizers),
            "files": len(files) + 1,
            "bytes": total,
        }


# ---- copies of ranks -------------------------------------------------------------------------------------------------


def of_source(source: CheckpointSource) -> Identity:
    """The identity of an open checkpoint. See Note [Digests]."""
    step = _number(getattr(source, "steps", source.meta.get("global_step")))
    if isinstance(source, Archive):
        return Identity(step, source.manifest.checksum)
    return Identity(step, digest_of_parts(cast("ForeignSource", source).parts))


def of_content(content: Mapping[str, Any], file: str | os.PathLike[str] | None = None) -> Identity:
    """The identity of a checkpoint dictionary. ``file``: of torch.save, where it comes from unchanged, if there is one.

    See Note [Digests].
    """
    known = file is not None and os.path.isfile(file) and zipfile.is_zipfile(file)
    digest = digest_of_parts([(Path(file), 0, None)]) if known and file is not None else digest_of_values(content)
    return Identity(_number(content.get("global_step")), digest)


def checked_file(path: str | os.PathLike[str] | None, world: World | None) -> bool:
    """Verify the checksums of a local file of ``torch.save``, each rank of a node a share; False for other files.

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
    """Context that turns an error of the disk into one that names ``path``; None: it has no name.

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


def opened_source(
    path: str | os.PathLike[str], use: Callable[[CheckpointSource], Found], tell: bool = True
) -> tuple[Found, OpenedCopy]:
    """Open a checkpoint, for ``load_same``; returns ``use`` of it, and the copy. ``tell``: see ``open_source``."""
    source = open_source(path, tell=tell, checks_files=False)
    return use(source), OpenedCopy(partial(of_source, source), source if isinstance(source, Archive) else None)


# ---- digests ---------------------------------------------------------------------------------------------------------


def digest_of_parts(parts: Iterable[FileRange]) -> str:
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
