"""Exports the weights of a checkpoint to files that are readable without this package.

Tensors are read, cast chunk by chunk and written one at a time, so a model may be larger than the machine's memory. No
process group is needed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple, get_args

import safetensors.torch
import torch

from lt_zero.checkpoint.cast import Cast, some
from lt_zero.checkpoint.lora import LoraScaling, MergedSource
from lt_zero.checkpoint.native.directory import file_system, inside, is_url, naming_url, plain_path
from lt_zero.checkpoint.native.saved_file import VERSION
from lt_zero.checkpoint.native.torchfile import TensorRecord, TorchFile, Write
from lt_zero.checkpoint.open import found_at, open_source
from lt_zero.checkpoint.output import check_space, naming, whole_file, whole_folder
from lt_zero.checkpoint.source import CheckpointSource, Format, SavedOptimizer, Spec
from lt_zero.common.arguments import expect, expect_path
from lt_zero.common.errors import CheckpointError
from lt_zero.common.progress_bar import progress_bar
from lt_zero.common.units import parse_bytes
from lt_zero.common.users_code import warn

_UNIVERSAL = "deepspeed-universal"

SHARD_SIZE = 5_000_000_000  # bytes, as Hugging Face's
_SUFFIXES = {".pt": "pt", ".pth": "pt", ".bin": "pt", ".ckpt": "ckpt", ".safetensors": "safetensors"}
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_WIDER = (torch.bfloat16, torch.float32, torch.float64)  # than fp16, in range or in digits
_SAME = "same"
_DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES.values()}
_STEMS = {"pt": ("pytorch_model", "bin"), "safetensors": ("model", "safetensors")}  # of Hugging Face's shards
_WEIGHTS = (*_SUFFIXES, ".h5", ".msgpack", ".index.json")  # suffixes that a loader may take for weights
_PER_TENSOR = 4096  # maximum bytes that a format adds to a tensor
# Keys that Lightning omits with `save_weights_only`.
_TRAINING = ("optimizer_states", "lr_schedulers", "callbacks")
_OWN = "lt_zero"  # the key that only this package reads


class _There(Enum):
    """Kinds of what a path or URL leads to."""

    NOTHING = auto()
    FILE = auto()
    FOLDER = auto()
    DEVICE = auto()


class _Target(NamedTuple):
    """The files that an export writes.

    ``path``: of the file or folder, or its URL as text. ``shard_size``: maximum bytes of a file; None: one file.
    ``earlier``: names of weights in a folder that are to be replaced, their index first.
    """

    path: Path | str
    format: str
    shard_size: int | None
    earlier: list[str]

    @property
    def name(self) -> str:
        return os.path.basename(os.fspath(self.path).rstrip("/"))


def export(
    checkpoint: CheckpointSource | str | os.PathLike[str],
    out: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    format: Format = "auto",
    shard_size: int | str | None = None,
    training_state: bool = False,
    keep_fp32: Sequence[str] = (),
    progress: bool = False,
    strip_prefix: str | None = None,
    overwrite: bool = False,
    merge_lora: float | str | os.PathLike[str] | None = None,
) -> list[Path] | list[str]:
    """Write the weights of a checkpoint to one file, or to several of limited size. Never leaves partial files.

    One warning names the tensors with values that overflow ``dtype``.

    Args:
        checkpoint: an open checkpoint, or its path or URL.
        out: the file to write, or the folder for several files; or its URL, such as ``s3://bucket/model.safetensors``.
        dtype: of floating-point tensors: fp16, bf16, fp32, fp64 or torch's; "same": each keeps the one in which it was
            saved, that of the master weights. Other tensors keep theirs. Default: fp16; if the run was in fp32 or bf16,
            a warning says what is lost.
        format: ``pt`` a flat state dict for ``torch.load``, ``ckpt`` a Lightning checkpoint for
            ``load_from_checkpoint``, ``safetensors``; ``auto`` decides by the suffix of ``out``. A folder gets
            safetensors. ``deepspeed-universal`` a folder that DeepSpeed reads with ``load_universal``, in fp32.
        shard_size: maximum bytes of a file, such as 5GB or 500MiB: writes Hugging Face's layout with an index into the
            folder ``out``, and keeps files there that are not weights. A larger tensor gets its own file.
        training_state: include the state that a plain ``Trainer`` resumes from: optimizers, schedulers, loops (for
            DeepSpeed: the states of the one optimizer). For ``ckpt`` and ``deepspeed-universal`` in fp32.
        keep_fp32: patterns for names of tensors that are exported in fp32.
        progress: show the progress on stderr.
        strip_prefix: prefix to remove from names, such as ``net.``; a warning lists names without it, which are kept.
            Default: none, with a warning if all names of safetensors files or of a folder have a common prefix, as
            others load these into the inner module. ``""``: none, without the warning.
        overwrite: replace weights of this format in a folder, also under other names. A file named as ``out`` is
            always replaced.
        merge_lora: write W + s B A in place of each weight W with a low-rank adapter, under the names of the model
            without adapters: the path of peft's ``adapter_config.json`` or of its folder, or ``lora_alpha``.

    Returns:
        The files, the index last: paths, or URLs if ``out`` is one.

    Raises:
        ValueError: arguments contradict each other.
        CheckpointError: the checkpoint cannot be read, or the files cannot be written, or the folder has weights;
            existing files are unchanged, unless the error says otherwise (at a URL; see Note [Uploads]).
    """
    _expect_places(checkpoint, out)
    kind, target = _dtype(dtype), _target(checkpoint, out, format, shard_size, overwrite)
    if training_state or target.format == _UNIVERSAL:
        _check_resumable(target, dtype, strip_prefix, merge_lora is not None)
    with _opened(checkpoint, merge_lora, progress) as source:
        return _export(source, target, kind, keep_fp32, strip_prefix, training_state, progress, dtype is None)


def _export(
    source: CheckpointSource,
    target: _Target,
    kind: torch.dtype | None,
    keep_fp32: Sequence[str],
    strip_prefix: str | None,
    training_state: bool,
    progress: bool,
    is_default: bool,
) -> list[Path] | list[str]:
    """Write an open checkpoint. ``is_default``: the caller gave no dtype, so ``kind`` is fp16."""
    if is_default:
        _warn_of_loss(source)
    if strip_prefix is None and (target.format == "safetensors" or target.shard_size is not None):
        _warn_of_prefix(source.weights)
    with progress_bar(f"Exporting {target.name}", rank=0, in_bytes=True, shown=progress) as work:
        cast = Cast(source, kind, keep_fp32, work.advance, strip_prefix or "")
        specs = [*map(cast.spec, cast.names), *(_training_state(source, target.format) if training_state else ())]
        work.total = sum(spec.nbytes for spec in specs)
        files = _write(cast, target, specs, training_state)
    cast.warn()
    return files


@contextmanager
def _opened(
    checkpoint: CheckpointSource | str | os.PathLike[str],
    merge_lora: float | str | os.PathLike[str] | None,
    progress: bool,
) -> Iterator[CheckpointSource]:
    """Context with the checkpoint, open, with its adapters merged if ``merge_lora`` says how they are scaled."""
    with contextlib.ExitStack() as stack:
        source = checkpoint
        if isinstance(source, str | os.PathLike):
            if is_url(source):
                from lt_zero.checkpoint.download import local_copy

                source = stack.enter_context(local_copy(source, progress=progress))
            source = open_source(source)
        yield source if merge_lora is None else MergedSource(source, LoraScaling.of(merge_lora))


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype to write; None: that of each tensor."""
    if dtype is None:
        return torch.float16
    if dtype == _SAME:
        return None
    kind = _DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if kind is None or kind not in _DTYPES.values():
        raise ValueError(f"dtype must be fp16, bf16, fp32, fp64 or same, not {dtype}.")
    return kind


def _expect_places(checkpoint: CheckpointSource | str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Raise TypeError if something else is passed."""
    if not hasattr(checkpoint, "weights"):
        remedy = "pass a checkpoint's path. Weights that train are exported by strategy.export"
        expect(checkpoint, (str, os.PathLike), "lt_zero.export(checkpoint=...)", remedy)
    expect_path(out, "lt_zero.export(out=...)")


def _check_resumable(target: _Target, dtype: torch.dtype | str | None, strip_prefix: str | None, merges: bool) -> None:
    """Raise ValueError if a run could not resume from the file."""
    dtype = "fp16" if dtype is None else dtype
    if target.format == _UNIVERSAL:
        if _dtype(dtype) != torch.float32:
            raise ValueError(f"format {_UNIVERSAL} has weights in fp32: add --dtype fp32 (dtype is {dtype}).")
    elif target.format != "ckpt" or _dtype(dtype) != torch.float32:
        raise ValueError(
            f"training_state requires format ckpt or {_UNIVERSAL} and dtype fp32, not {target.format} and {dtype}."
        )
    elif strip_prefix:
        raise ValueError("strip_prefix cannot be combined with training_state: runs resume under the saved names.")
    if merges:
        raise ValueError("merge_lora cannot be combined with training_state: the optimizer trains the factors.")


def _warn_of_loss(source: CheckpointSource) -> None:
    """Warn that fp16, the default dtype of exports, loses precision if the weights were not trained in fp16."""
    kinds = sorted({str(spec.dtype) for spec in source.weights.values() if spec.dtype in _WIDER})
    if not kinds or str(getattr(source, "precision", "")).startswith("16"):
        return
    saved = " and ".join(kind.removeprefix("torch.") for kind in kinds)
    digits = "keep 3 of 7 digits, " if kinds != ["torch.bfloat16"] else ""
    warn(
        f"The weights were saved in {saved} and are exported in fp16, the default: they {digits}become 0 below 6e-8 "
        'and inf above 65504. dtype="same" (--dtype same) keeps their dtype; dtype="fp16" exports the same as the '
        "default without a warning.",
    )


def _write(cast: Cast, target: _Target, specs: Sequence[Spec], training_state: bool) -> list[Path] | list[str]:
    """Write tensors of these ``specs``, after a check of the free space; returns the files."""
    needs = sum(spec.nbytes for spec in specs)
    path = target.path
    if isinstance(path, Path):
        folder = path if target.shard_size or target.format == _UNIVERSAL else path.parent
        check_space(folder, needs + _PER_TENSOR * (len(cast.weights) + len(specs) + 16))
        if target.format == _UNIVERSAL:
            from lt_zero.checkpoint.universal import write_universal

            return write_universal(path, cast, training_state, target.earlier)
    if target.shard_size is not None:
        names = _write_folder(cast, target, target.shard_size)
        return [inside(path, name) for name in names] if isinstance(path, str) else [path / name for name in names]
    with _whole_file(path, needs) as write:
        if target.format == "ckpt":
            write_ckpt(write, cast, training_state)
        else:
            _WRITERS[target.format](write, cast, list(cast.weights))
    return [path] if isinstance(path, str) else [path]


def _whole_file(path: Path | str, expected: int) -> AbstractContextManager[Write]:
    """Context that yields a function to write the file at a path, or at a URL, with."""
    if isinstance(path, Path):
        return whole_file(path, expected)
    from lt_zero.checkpoint import upload

    return upload.whole_file(path, expected)


@contextmanager
def _whole_folder(target: _Target, new: Sequence[str]) -> Iterator[Callable[[str, int], AbstractContextManager[Write]]]:
    """Context for the files ``new`` of a folder, or of its URL: yields ``whole_file`` by name and expected size."""
    path = target.path
    if isinstance(path, Path):
        with whole_folder(path, new, target.earlier) as folder:
            yield lambda name, expected: whole_file(folder / name, expected)
        return
    from lt_zero.checkpoint import upload

    with upload.whole_folder(path, target.earlier) as files:
        yield lambda name, expected: files.file(inside(path, name), expected)


def _training_state(source: CheckpointSource, format: str) -> list[Spec]:
    """The element-wise optimizer states; raises if the source lacks a state that training resumes from."""
    missing = [] if source.optimizers else ["optimizer states"]
    missing += [] if "loops" in source.meta or format == _UNIVERSAL else ["loops"]
    if missing:
        raise CheckpointError(
            f"The checkpoint has no {' and no '.join(missing)}, so training cannot resume from it. Export without"
            " training_state."
        )
    entries = (entry for saved in source.optimizers for entry in saved.state.values())
    return [value for entry in entries for value in entry.values() if isinstance(value, Spec)]


def _warn_of_prefix(names: Iterable[str]) -> None:
    """Warn if all names have a common prefix: others load the weights into the inner module."""
    first, *rest = {name.partition(".")[0] if "." in name else "" for name in names} or {""}
    if first and not rest:
        warn(
            f"All names begin with {first + '.'!r}. To load them into the inner module (from_pretrained), export with "
            f"--strip-prefix {first}. (strip_prefix={first + '.'!r}).",
        )


def _write_folder(cast: Cast, target: _Target, limit: int) -> list[str]:
    """Write Hugging Face's layout: files of limited size, and an index of the tensors in them; returns their names."""
    stem, suffix = _STEMS[target.format]
    shards = plan_shards(cast, limit)
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}" for number in range(1, len(shards) + 1)]
    index = [f"{stem}.{suffix}.index.json"]
    if len(shards) == 1:  # Hugging Face's tools expect this name, and no index
        names, index = [f"{stem}.{suffix}"], []
    places: dict[str, str] = {}
    with _whole_folder(target, names + index) as opened:
        for name, shard in zip(names, shards, strict=True):
            with opened(name, sum(cast.spec(n).nbytes for n in shard)) as write:
                _WRITERS[target.format](write, cast, shard)
            places |= {n: name for n in shard if target.format == "pt" or n not in cast.owner}
        total = sum(cast.spec(name).nbytes for name in cast.names)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        for name in index:
            with opened(name, 0) as write:
                write((json.dumps(content, indent=2) + "\n").encode())
    return names + index


def _target(
    source: CheckpointSource | str | os.PathLike[str],
    place: str | os.PathLike[str],
    format: str,
    shard_size: int | str | None,
    overwrite: bool,
) -> _Target:
    """Choose the files to write, and check that they replace no others, unless asked to."""
    if format not in get_args(Format):
        raise ValueError(f"format must be one of {', '.join(get_args(Format))}, not {format!r}.")
    named = plain_path(place)
    if not named or (is_url(named) and not named.partition("://")[2].strip("/")):
        raise ValueError("The place to write to is empty. Name a file, or a folder (the current one is .).")
    if is_url(named) and format == _UNIVERSAL:
        raise CheckpointError(
            f"{named} is a URL, and DeepSpeed reads universal folders from local disks only. Export to a local path, "
            "and copy it."
        )
    # Files are written where a link leads, and what the user has named says in which format.
    out = named.rstrip("/") if is_url(named) else Path(os.path.realpath(named))
    there = _there(out)
    limit = None if shard_size is None else parse_bytes(shard_size, "shard_size")
    suffix = Path(named).suffix
    of_suffix = _SUFFIXES.get(suffix.lower())
    is_named = named.endswith(os.sep) or (format == "auto" and not suffix)
    folder = there == _There.FOLDER or limit is not None or is_named or format == _UNIVERSAL
    if format == _UNIVERSAL and limit is not None:
        raise ValueError(f"format {_UNIVERSAL} has a file for each tensor. Leave out shard_size.")
    if folder and of_suffix is not None and there != _There.FOLDER:
        raise ValueError(
            f"{Path(named).name!r} has the suffix of a file, but shard_size or a trailing / makes it a folder. Remove "
            "the suffix, or name a file."
        )
    if format == "auto":
        if not folder and of_suffix is None:
            raise ValueError(
                f"{Path(named).name!r} has no suffix that implies a format. Use one of {', '.join(_SUFFIXES)}, or give "
                "format."
            )
        format = "safetensors" if folder else str(of_suffix)
    if folder and format == "ckpt":
        raise ValueError(
            f"A Lightning checkpoint is one file. Name a file instead of the folder {out}, and leave out shard_size."
        )
    if isinstance(source, str | os.PathLike):
        _refuse_inside(out, plain_path(source))
    if not folder:
        if there not in (_There.NOTHING, _There.FILE):
            raise CheckpointError(f"{out} is a folder or a device, but format {format} is a file. Name a file.")
        return _Target(out, format, None, [])
    if there not in (_There.NOTHING, _There.FOLDER):
        raise CheckpointError(f"{out} is a file, but this export is a folder. Name a folder.")
    if isinstance(out, Path) and format == _UNIVERSAL:
        from lt_zero.checkpoint.universal import earlier_of

        return _Target(out, format, None, earlier_of(out, overwrite))
    earlier = _earlier(out, format, overwrite) if there == _There.FOLDER else []
    return _Target(out, format, limit or SHARD_SIZE, earlier)


def _there(out: Path | str) -> _There:
    """Find out what is at a path or URL.

    Raises:
        CheckpointError: it cannot be a name of a file, or cannot be reached.
    """
    if isinstance(out, str):
        fs = file_system(out)
        with _reaching(out):
            return _There.FOLDER if fs.isdir(out) else _There.FILE if fs.exists(out) else _There.NOTHING
    with naming(out), contextlib.suppress(FileNotFoundError):
        os.lstat(out)  # a name that cannot be
    if out.is_dir():
        return _There.FOLDER
    return _There.FILE if out.is_file() else _There.DEVICE if out.exists() else _There.NOTHING


def _reaching(url: str) -> AbstractContextManager[None]:
    """Context that turns an error of a file system into a CheckpointError that names the URL."""
    remedy = "Check the address and your credentials, or export to a local path, and copy it. Nothing was written."
    return naming_url(lambda: f"{url} cannot be reached", remedy)


def _refuse_inside(out: Path | str, source: str) -> None:
    """Raise CheckpointError if the export would be in the checkpoint itself."""
    if isinstance(out, str) != is_url(source):
        return
    if isinstance(out, str):
        saved = source.rstrip("/")
        one = file_system(saved)
        two = file_system(out)
        is_in = one == two and f"{two._strip_protocol(out)}/".startswith(f"{one._strip_protocol(saved)}/")
    else:
        saved = os.path.realpath(found_at(source))
        place = Path(saved)
        is_in = out == place or place in out.parents or (out.exists() and place.exists() and out.samefile(place))
    if is_in:
        raise CheckpointError(f"{out} is (in) the checkpoint {saved} itself. Export to another path.")


def _earlier(folder: Path | str, format: str, overwrite: bool) -> list[str]:
    """The files of this layout in the folder, its index first, which are to be replaced.

    Raises:
        CheckpointError: there are some, and not ``overwrite``; or the folder contains other weights.
    """
    stem, suffix = _STEMS[format]
    pattern = re.compile(rf"{stem}(-\d{{5,}}-of-\d{{5,}})?\.{suffix}(\.index\.json)?")
    files = _files(folder)
    found = sorted(files, key=lambda name: (not name.endswith(".json"), name))
    earlier = [name for name in found if pattern.fullmatch(name) and files[name]]
    others = [name for name in found if name not in earlier and name.lower().endswith(_WEIGHTS)]
    if others:
        raise CheckpointError(
            f"{folder} contains {some(others)}, which no export to {format} writes: a loader could take them for this "
            "model's. Remove them, or name another folder. Files that are not weights (config.json) may stay."
        )
    if earlier and not overwrite:
        raise CheckpointError(
            f"{folder} contains weights, which an export there deletes: {some(earlier)}. Name another folder, or "
            "replace them with --overwrite (overwrite=True)."
        )
    return earlier


def _files(folder: Path | str) -> dict[str, bool]:
    """The names in a folder, or at its URL; True: a file."""
    if isinstance(folder, Path):
        return {name: (folder / name).is_file() for name in os.listdir(folder)}
    with _reaching(folder):
        listed = file_system(folder).ls(folder, detail=True)
    return {os.path.basename(entry["name"].rstrip("/")): entry["type"] == "file" for entry in listed}


def write_pt(write: Write, cast: Cast, names: Sequence[str]) -> None:
    """A flat state dict of ``names`` for ``torch.load(path, weights_only=True)``; tied names share storage."""
    file = TorchFile(write)
    file.finish(_weights(file, cast, names))


def write_ckpt(write: Write, cast: Cast, training_state: bool) -> None:
    """A Lightning checkpoint that is readable without this package.

    Raises:
        CheckpointError: its values besides weights cannot be pickled, or its optimizer states are damaged.
    """
    file, source = TorchFile(write), cast.source
    meta = {k: v for k, v in source.meta.items() if k != _OWN and (training_state or k not in _TRAINING)}
    if training_state:
        meta.setdefault("lr_schedulers", [])
    meta.setdefault(VERSION, importlib.metadata.version("lightning"))  # decides the migrations of a checkpoint
    value = {**meta, "state_dict": _weights(file, cast, list(cast.weights))}
    if training_state:
        value["optimizer_states"] = [_optimizer(file, cast, i, saved) for i, saved in enumerate(source.optimizers)]
    try:
        file.finish(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"The checkpoint's values besides its weights ({', '.join(meta)}) cannot be pickled: {error}. Export the"
            " weights alone, with format pt or safetensors."
        ) from error


def _weights(file: TorchFile, cast: Cast, names: Sequence[str]) -> dict[str, TensorRecord]:
    stored: dict[str, TensorRecord] = {}
    for name in names:
        if name not in cast.owner:
            spec = cast.spec(name)
            stored[name] = file.add_parts(spec.shape, spec.dtype, cast.parts(name))
    return {name: stored[cast.owner.get(name, name)] for name in names}


def _optimizer(file: TorchFile, cast: Cast, index: int, saved: SavedOptimizer) -> dict[str, Any]:
    """An optimizer's state in torch's form, with parameters numbered through the groups."""
    names = [name for group in saved.groups for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    ungrouped = [name for name in saved.state if name not in numbers]
    if ungrouped or len(numbers) != len(names):
        wrong = ungrouped or sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(
            f"Optimizer {index} has {wrong[:5]} not once in its groups: the checkpoint is damaged. Use another copy."
        )
    state = {
        numbers[name]: {
            key: file.add(cast.state(index, name, key, value)) if isinstance(value, Spec) else value
            for key, value in saved.state[name].items()
        }
        for name in names
        if name in saved.state
    }
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in saved.groups]
    return {"state": state, "param_groups": groups}


def write_safetensors(write: Write, cast: Cast, names: Sequence[str]) -> None:
    """A file of the safetensors library. Of tied names one is written; the file's metadata lists the others.

    Raises:
        CheckpointError: safetensors does not support a dtype.
    """
    # Larger elements first, as the library does, which aligns all values.
    own = sorted((name for name in names if name not in cast.owner), key=lambda name: -cast.spec(name).dtype.itemsize)
    metadata = {**{name: cast.owner[name] for name in names if name in cast.owner}, "format": "pt"}
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name in own:
        spec = cast.spec(name)
        try:  # the library's own name of the dtype
            dtype = json.loads(safetensors.torch.save({"": torch.empty(0, dtype=spec.dtype)})[8:])[""]["dtype"]
        except KeyError:
            dtype = None
        if dtype is None or name == "__metadata__":
            raise CheckpointError(f"safetensors does not support {name!r} of {spec.dtype}. Export to format pt.")
        end = at + spec.nbytes
        header[name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > 100_000_000:
        raise CheckpointError(
            f"safetensors supports a header of 100 MB, and this one has {len(text)} bytes. Export to format pt."
        )
    write(len(text).to_bytes(8, "little") + text)
    for name in own:
        for part in cast.parts(name):
            if part.numel():
                write(part.view(torch.uint8))


def plan_shards(cast: Cast, limit: int) -> list[list[str]]:
    """Names by file, in order: as many as fit into ``limit`` bytes, but at least one. Tied names follow their owner."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name in cast.names:
        nbytes = cast.spec(name).nbytes
        if shards[-1] and filled + nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    place = {name: shard for shard in shards for name in shard}
    for alias, owner in cast.owner.items():
        place[owner].append(alias)
    return shards


_WRITERS = {"pt": write_pt, "safetensors": write_safetensors}
