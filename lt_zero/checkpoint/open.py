"""Opens a checkpoint of any supported format by its path, and verifies checkpoint directories."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lt_zero.checkpoint.formats.dcp import DcpSource
from lt_zero.checkpoint.formats.deepspeed import DeepSpeedSource
from lt_zero.checkpoint.formats.foreign import ForeignSource
from lt_zero.checkpoint.formats.torch_file import FileSource
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.directory import MANIFEST, file_system, find, inside, is_url
from lt_zero.checkpoint.source import Source
from lt_zero.common.errors import CheckpointError
from lt_zero.common.progress_bar import progress_bar
from lt_zero.common.users_code import warn
from lt_zero.io.checked_file import unreadable
from lt_zero.io.regular_file import read_bytes

LATEST = "latest"  # the file that names the last checkpoint of a folder
_LONGEST = 4096  # bytes of a tag
_KINDS = (DeepSpeedSource, DcpSource, FileSource)
_SHOWN = 10  # maximum warnings about a source
_LOOKED_FOR = (
    f"a directory of lt_zero ({MANIFEST}, which is written last, so an interrupted save has none), of DeepSpeed "
    "(*mp_rank_00_model_states.pt, or a folder with them), of FSDPStrategy or ModelParallelStrategy (.metadata), of "
    "Hugging Face (model.safetensors, pytorch_model.bin or their index.json); a file of torch.save or safetensors"
)


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a checkpoint directory, or lies inside one."""
    if is_url(path):
        return Archive.is_at(find(path))
    return Path(found_at(path)).is_dir()


def found_at(path: str | os.PathLike[str], tag: str | None = None) -> str:
    """The checkpoint that ``path`` refers to: a folder of another format is one itself, else see ``find``.

    ``tag``: which one, where ``path`` is the folder of a loop's checkpoints; default: the one in its file ``latest``.
    """
    found = find(path)
    whole, url = Archive.is_at(found), is_url(path)
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
    latest, data = inside(folder, LATEST), None
    if is_url(folder):
        files = file_system(latest)
        data = bytes(files.cat_file(latest)) if files.exists(latest) else None
    else:
        try:
            data = read_bytes(latest, _LONGEST) if os.path.lexists(latest) else None
        except OSError as error:
            raise unreadable(latest, error) from error
    if data is None:
        return None
    if not (found := data.decode("utf-8", "replace").strip()):
        raise CheckpointError(f"{latest} is empty. Pass the checkpoint's name: load_checkpoint(..., tag=...).")
    return found


def open_source(
    path: str | os.PathLike[str], tag: str | None = None, tell: bool = True, inert: Sequence[str] = ()
) -> Source:
    """Open a checkpoint of any supported format for reading.

    Args:
        path: a checkpoint of lt_zero, DeepSpeed, Lightning's sharded strategies, ``torch.save``, safetensors or Hugging
            Face's tools.
        tag: of a folder of DeepSpeed's, or of a loop's, checkpoints; default: the one in its file ``latest``.
        tell: warn of what cannot be converted.
        inert: names of further classes whose objects are left out instead of refused, in files of other formats.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or its format is unknown.
    """
    found = found_at(path, tag)
    target = Path(found)
    native = is_url(found) or (target / MANIFEST).is_file()
    if not native and not target.exists():
        raise CheckpointError(f"There is no checkpoint at {target}: no such file or directory.")
    kind = None if native else _kind_of(target)
    # torch could read the files of a directory of lt_zero without a manifest, but they may be incomplete.
    if not native and (kind is None or (target / "weights-00000.pt").is_file()):
        contents = "a file of an unknown kind"
        if target.is_dir():
            names = sorted(path.name for path in target.iterdir())
            contents = f"a directory with {', '.join(names[:5]) or 'nothing'}{', ...' if len(names) > 5 else ''}"
        lacks = "is not a checkpoint, or not a complete one" if tag is None else f"has no checkpoint {tag!r}"
        raise CheckpointError(f"{target} {lacks}: it is {contents}. Looked for {_LOOKED_FOR}.")
    if tag is not None and kind is not DeepSpeedSource and os.path.basename(found) != tag:
        text = f"{found} has no tag {tag!r}: only a folder with several checkpoints has tags. Leave it out."
        raise CheckpointError(text)
    if kind is None:
        return Archive(found)
    source = DeepSpeedSource(target, tag, inert) if kind is DeepSpeedSource else kind(target, inert)
    if tell:
        notes = list(dict.fromkeys(source.notes))
        more = [f"{len(notes) - _SHOWN} more notes of this kind."] if len(notes) > _SHOWN else []
        for note in notes[:_SHOWN] + more:
            warn(note)
    return source


def _kind_of(target: Path) -> type[ForeignSource] | None:
    try:
        return next((kind for kind in _KINDS if kind.looks_like(target)), None)
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
        files, run, weights = archive.manifest.files, archive.manifest.run, archive.weights
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
