"""Exports the weights of a checkpoint to files that are readable without this package.

Tensors are read, cast chunk by chunk and written one at a time, so a model may be larger than the machine's memory. No
process group is needed.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from lt_zero.checkpoint.export_formats import Cast, plan_shards, write_ckpt, write_index, write_pt, write_safetensors
from lt_zero.checkpoint.native.directory import find, is_url
from lt_zero.checkpoint.open import open_source
from lt_zero.checkpoint.output import check_space, whole_file, whole_folder
from lt_zero.checkpoint.source import Source, Spec
from lt_zero.common.errors import CheckpointError
from lt_zero.common.progress_bar import progress_bar

Format = Literal["auto", "pt", "ckpt", "safetensors"]

SHARD_SIZE = 5_000_000_000  # bytes, as Hugging Face's
_SUFFIXES = {".pt": "pt", ".pth": "pt", ".bin": "pt", ".ckpt": "ckpt", ".safetensors": "safetensors"}
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES.values()}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_STEMS = {"pt": ("pytorch_model", "bin"), "safetensors": ("model", "safetensors")}  # of Hugging Face's shards
_WEIGHTS = (*_SUFFIXES, ".h5", ".msgpack", ".index.json")  # suffixes that a loader may take for weights
_PER_TENSOR = 4096  # maximum bytes that a format adds to a tensor


@dataclass(frozen=True)
class _Target:
    """Path and format of an export."""

    path: Path
    format: str
    shard_size: int | None  # None: one file


def export(
    checkpoint: Source | str | os.PathLike[str],
    out: str | os.PathLike[str],
    dtype: torch.dtype | str = "fp16",
    format: Format = "auto",
    shard_size: int | str | None = None,
    training_state: bool = False,
    keep_fp32: Sequence[str] = (),
    progress: bool = False,
    strip_prefix: str | None = None,
) -> list[Path]:
    """Write the weights of a checkpoint to one file, or to several of limited size. Never leaves partial files.

    One warning names the tensors with values that overflow ``dtype``.

    Args:
        checkpoint: an open checkpoint, or its path.
        out: the file to write, or the folder for several files.
        dtype: of floating-point tensors: fp16, bf16, fp32, fp64 or torch's. Other tensors keep theirs.
        format: ``pt`` a flat state dict for ``torch.load``, ``ckpt`` a Lightning checkpoint for
            ``load_from_checkpoint``, ``safetensors``; ``auto`` decides by the suffix of ``out``. A folder gets
            safetensors.
        shard_size: maximum bytes of a file, such as 5GB or 500MiB: writes Hugging Face's layout with an index into the
            folder ``out``, replaces an earlier export there and keeps files that are not weights (config.json). A
            larger tensor gets a file of its own.
        training_state: include what a plain ``Trainer`` resumes from: optimizers, schedulers, loops. For ``ckpt`` in
            fp32.
        keep_fp32: patterns for names of tensors that are exported in fp32.
        progress: show the progress on stderr.
        strip_prefix: prefix to remove from names, such as ``net.``; a warning lists names without it, which are kept.
            Default: none, with a warning if all names of safetensors files or of a folder have a common prefix, as
            others load these into the inner module. ``""``: none, without the warning.

    Returns:
        The files, the index last.

    Raises:
        ValueError: arguments contradict each other.
        CheckpointError: the checkpoint cannot be read, or the files cannot be written; existing files are unchanged.
    """
    kind = _DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if kind is None or kind not in _DTYPES.values():
        raise ValueError(f"dtype must be fp16, bf16, fp32 or fp64, not {dtype}.")
    target = _target(out, format, shard_size)
    if training_state and (target.format != "ckpt" or kind != torch.float32):
        raise ValueError(f"training_state requires format ckpt and dtype fp32, not {target.format} and {dtype}.")
    if training_state and strip_prefix:
        raise ValueError("strip_prefix cannot be combined with training_state: runs resume under the saved names.")
    _check_target(checkpoint, target)
    source = open_source(checkpoint) if isinstance(checkpoint, str | os.PathLike) else checkpoint
    if strip_prefix is None and (target.format == "safetensors" or target.shard_size is not None):
        _warn_of_prefix(source.weights)
    with progress_bar(f"Exporting {target.path.name}", rank=0, in_bytes=True, shown=progress) as work:
        cast = Cast(source, kind, keep_fp32, work.advance, strip_prefix or "")
        needs = sum(cast.spec(name).nbytes for name in cast.names)
        needs += _check_training_state(source) if training_state else 0
        work.expect(needs)
        tensors = len(source.weights) + sum(len(e) for saved in source.optimizers for e in saved.state.values())
        check_space(target.path if target.shard_size else target.path.parent, needs + _PER_TENSOR * (tensors + 16))
        if target.shard_size is None:
            _write_file(cast, target, training_state, needs)
            files = [target.path]
        else:
            files = _write_folder(cast, target, target.shard_size)
    cast.warn(stacklevel=2)
    return files


def _check_training_state(source: Source) -> int:
    """Bytes of the element-wise optimizer states.

    Raises:
        CheckpointError: the source lacks what training resumes from.
    """
    missing = [] if source.optimizers else ["optimizer states"]
    missing += [key for key in ("loops",) if key not in source.meta]
    if missing:
        raise CheckpointError(
            f"The checkpoint has no {' and no '.join(missing)}, so training cannot resume from it. Export without"
            " training_state."
        )
    states = (entry for saved in source.optimizers for entry in saved.state.values())
    return sum(value.nbytes for entry in states for value in entry.values() if isinstance(value, Spec))


def _warn_of_prefix(names: Iterable[str]) -> None:
    """Warn if all names have a common prefix: others load the weights into the inner module."""
    first, *rest = {name.partition(".")[0] if "." in name else "" for name in names} or {""}
    if first and not rest:
        warnings.warn(
            f"All names begin with {first + '.'!r}. To load them into the inner module (from_pretrained), export with "
            f"--strip-prefix {first}. (strip_prefix={first + '.'!r}).",
            stacklevel=3,
        )


def _write_file(cast: Cast, target: _Target, training_state: bool, expected: int) -> None:
    with whole_file(target.path, expected) as write:
        if target.format == "ckpt":
            write_ckpt(write, cast, training_state)
        elif target.format == "pt":
            write_pt(write, cast, list(cast.weights))
        else:
            write_safetensors(write, cast, list(cast.weights))


def _write_folder(cast: Cast, target: _Target, limit: int) -> list[Path]:
    stem, suffix = _STEMS[target.format]
    shards = plan_shards(cast, limit)
    count = len(shards)
    names = [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]
    index = [f"{stem}.{suffix}.index.json"]
    if count == 1:  # Hugging Face's tools expect this name, and no index
        names, index = [f"{stem}.{suffix}"], []
    write_shard = write_pt if target.format == "pt" else write_safetensors
    with whole_folder(target.path, names + index, _earlier(target)) as folder:
        for name, shard in zip(names, shards, strict=True):
            with whole_file(folder / name, sum(cast.spec(n).nbytes for n in shard)) as write:
                write_shard(write, cast, shard)
        for name in index:
            with whole_file(folder / name) as write:
                write_index(write, cast, dict(zip(names, shards, strict=True)), target.format == "pt")
    return [target.path / name for name in names + index]


def _earlier(target: _Target) -> list[str]:
    """Files of an earlier export in the folder, its index first.

    Raises:
        CheckpointError: the folder contains other weights.
    """
    if not target.path.exists():
        return []
    stem, suffix = _STEMS[target.format]
    pattern = re.compile(rf"{stem}(-\d{{5,}}-of-\d{{5,}})?\.{suffix}(\.index\.json)?")
    found = sorted(os.listdir(target.path), key=lambda name: (not name.endswith(".json"), name))
    earlier = [name for name in found if pattern.fullmatch(name) and (target.path / name).is_file()]
    others = [name for name in found if name not in earlier and name.lower().endswith(_WEIGHTS)]
    if others:
        raise CheckpointError(
            f"{target.path} contains {', '.join(others[:5])}{', ...' if len(others) > 5 else ''}, which no earlier "
            f"export to {target.format} wrote: a loader could take them for this model's. Remove them, or name another "
            "folder. Files that are not weights, such as config.json, may stay."
        )
    return earlier


def _check_target(checkpoint: Source | str | os.PathLike[str], target: _Target) -> None:
    """Check that the export replaces nothing but an earlier export."""
    out = target.path
    if isinstance(checkpoint, str | os.PathLike) and not is_url(checkpoint):
        saved = Path(os.path.realpath(find(checkpoint)))
        if out == saved or saved in out.parents or (out.exists() and saved.exists() and out.samefile(saved)):
            raise CheckpointError(f"{out} is (in) the checkpoint {saved} itself. Export to another path.")
    if target.shard_size is None:
        if out.exists() and not out.is_file():
            raise CheckpointError(f"{out} is a folder or a device, but format {target.format} is a file. Name a file.")
    elif out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file, but an export with shard_size is a folder. Name a folder.")
    else:
        _earlier(target)


def _target(place: str | os.PathLike[str], format: str, shard_size: int | str | None) -> _Target:
    if format not in get_args(Format):
        raise ValueError(f"format must be one of {', '.join(get_args(Format))}, not {format!r}.")
    out = Path(os.path.realpath(place))
    limit = None if shard_size is None else parse_size(shard_size)
    of_suffix = _SUFFIXES.get(out.suffix.lower())
    named = os.fspath(place).endswith(os.sep) or (format == "auto" and not out.suffix)
    folder = out.is_dir() or limit is not None or named
    if folder and of_suffix is not None and not out.is_dir():
        raise ValueError(
            f"{out.name!r} has the suffix of a file, but shard_size or a trailing / makes it a folder. Remove the "
            "suffix, or name a file."
        )
    if format == "auto":
        if not folder and of_suffix is None:
            raise ValueError(
                f"{out.name!r} has no suffix that implies a format. Use one of {', '.join(_SUFFIXES)}, or give format."
            )
        format = "safetensors" if folder else str(of_suffix)
    if folder and format == "ckpt":
        raise ValueError(
            f"A Lightning checkpoint is one file. Name a file instead of the folder {out}, and leave out shard_size."
        )
    return _Target(out, format, (limit or SHARD_SIZE) if folder else None)


def parse_size(size: int | str) -> int:
    """Parse a size: 5GB, 500MB (decimal), 2GiB, or a number of bytes.

    Raises:
        ValueError: it is not a positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    unit = _UNITS.get(match[2].upper()) if match else None
    nbytes = int(float(match[1]) * unit) if match and unit else 0
    if nbytes <= 0 or isinstance(size, bool):
        raise ValueError(f"shard_size must be a size such as 5GB or 500MB or a number of bytes, not {size!r}.")
    return nbytes
