"""Damaged checkpoints of all formats: every reader ends with an error that is a sentence, or loads what was saved."""

from __future__ import annotations

import functools
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.import_ import import_checkpoint
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.open import open_source
from lt_zero.common.errors import CheckpointError
from tests.faults.case import Case, Outcome
from tests.faults.one_by_one import Wrong, copied, each
from tests.support.damage import DAMAGES, reseal
from tests.support.paths import DATA

DAMAGED, RESEALED = 50, 80  # of a case
Found = dict[str, Any]  # what a reader has found: tensors by name


# ---- sources, made in the folder of a case --------------------------------------------------------------------------


def _native(folder: Path) -> Path:
    return Path(import_checkpoint(DATA / "deepspeed" / "stage1", folder / "native"))


def _torch_file(folder: Path) -> Path:
    export(_native(folder), folder / "file.ckpt", dtype="fp32", training_state=True)
    return folder / "file.ckpt"


def _safetensors(folder: Path) -> Path:
    export(_native(folder), folder / "tensors", dtype="fp32", shard_size=1500, strip_prefix="")
    return folder / "tensors"


def _dcp(folder: Path) -> Path:
    return DATA / "fsdp" / "fsdp"


def _deepspeed(folder: Path) -> Path:
    return DATA / "deepspeed" / "stage3"


SOURCES: dict[str, Callable[[Path], Path]] = {
    "native": _native,
    "torch.save": _torch_file,
    "safetensors": _safetensors,
    "DCP": _dcp,
    "DeepSpeed": _deepspeed,
}


# ---- readers -------------------------------------------------------------------------------------------------------


def _export(path: Path, folder: Path) -> Found:
    export(path, folder / "exported.safetensors", dtype="fp32", strip_prefix="")
    return safetensors.torch.load_file(folder / "exported.safetensors")


def _import(path: Path, folder: Path) -> Found:
    archive = Archive(import_checkpoint(path, folder / "imported"))
    archive.verify()
    return _everything(archive)


def _read(path: Path, folder: Path) -> Found:
    return _everything(open_source(path))


def _everything(source: Any) -> Found:
    found: Found = {name: source.read(name).clone() for name in source.weights}
    for number, optimizer in enumerate(source.optimizers):
        for name, entry in optimizer.state.items():
            for key, value in entry.items():
                spec = hasattr(value, "shape") and not isinstance(value, Tensor)
                found[f"{number} {name} {key}"] = source.read_state(number, name, key).clone() if spec else value
    return found


READERS: dict[str, Callable[[Path, Path], Found]] = {"export": _export, "import": _import, "read": _read}


# ---- damages -------------------------------------------------------------------------------------------------------


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(target: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        path.symlink_to(target.replace("NAME", path.name))

    return damage


def _strange(chance: random.Random, path: Path) -> str:
    """Damage a file of a checkpoint in some way, which is returned in words."""
    files = sorted(found for found in path.rglob("*") if found.is_file()) if path.is_dir() else [path]
    file = chance.choice(files)
    how = chance.choice(["flip"] * 4 + [*DAMAGES, "cut", "noise", "swap", "fifo", "folder", "loop", "zeros", "nowhere"])
    size = file.stat().st_size
    if how == "flip" and size:  # with a seed of its own
        data = bytearray(file.read_bytes())
        data[chance.randrange(size)] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
    elif how == "cut":
        os.truncate(file, chance.randrange(size + 1))
    elif how == "noise":
        data = bytearray(file.read_bytes())
        at = chance.randrange(size + 1)
        data[at : at + 64] = chance.randbytes(min(64, size - at))
        file.write_bytes(data)
    elif how == "swap":
        other = chance.choice(files)
        data, more = file.read_bytes(), other.read_bytes()
        file.write_bytes(more)
        other.write_bytes(data)
    elif how in STRANGE:
        STRANGE[how](file)
    elif size:
        DAMAGES[how](file)
    return f"{how} of {file.relative_to(path.parent)}"


STRANGE: dict[str, Callable[[Path], None]] = {
    "fifo": _fifo,
    "folder": _folder,
    "loop": _link("NAME"),
    "zeros": _link("/dev/zero"),
    "nowhere": _link("/no/such/file"),
}


# ---- trials --------------------------------------------------------------------------------------------------------


def _same(found: Found, want: Found) -> bool:
    if list(found) != list(want) and set(found) != set(want):
        return False
    for name, value in want.items():
        got = found[name]
        if isinstance(value, Tensor):
            if not isinstance(got, Tensor) or got.dtype != value.dtype or got.shape != value.shape:
                return False
            if got.contiguous().view(-1).view(torch.uint8).ne(value.contiguous().view(-1).view(torch.uint8)).any():
                return False
        elif repr(got) != repr(value):
            return False
    return True


def _tried(read: Callable[[], Found], want: Found, unchecked: bool) -> str:
    """What reading has come to.

    Args:
        unchecked: whether the files have nothing by which a reader could tell other values.

    Raises:
        Wrong: it is against what the package promises.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = read()
    except CheckpointError as error:
        text = str(error)
        if len(text) > 5000 or "Traceback" in text or " object at 0x" in text or not text.strip():
            raise Wrong(f"no sentence: {text[:500]}") from None
        return "named errors"
    except BaseException as error:
        raise Wrong(f"{type(error).__name__}: {str(error)[:300]}") from None
    if _same(found, want):
        return "loaded exactly"
    if unchecked:
        return "other values, which nothing in the files tells"
    raise Wrong("other values are loaded without an error")


def _damaged(source: Path, reader: str, want: Found, seed: int, number: int, folder: Path) -> str:
    chance = random.Random(f"{seed} {source.name} {reader} {number}")
    path = copied(source, folder)
    how = _strange(chance, path)
    (folder / "what").write_text(how)
    # Files of DeepSpeed do not say of which rank they are: one in another's place cannot be told.
    # DCP's index has no checksum.
    unchecked = source.name == "tensors" or (source.name == "stage3" and how.startswith("swap"))
    unchecked |= how.startswith("flip") and how.endswith(".metadata")
    return _tried(lambda: READERS[reader](path, folder), want, unchecked)


def _run(name: str, reader: str, seed: int, folder: Path) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = SOURCES[name](folder)
        whole = folder / "whole"
        whole.mkdir()
        want = READERS[reader](copied(source, whole), whole)
        shutil.rmtree(whole)
    return each(range(DAMAGED), functools.partial(_damaged, source, reader, want, seed))


# ---- manifests of somebody who knows the format ----------------------------------------------------------------------

_ODD: list[Any] = [None, True, -1, 0, 1, 2**63, 1 << 40, 0.5, "", "x", "../../etc/passwd", [], {}, [[]], [1], {"a": 1}]


def _places_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += _places_of(inner, (*path, key))
    return found


def _resealed(source: Path, reader: str, seed: int, number: int, folder: Path) -> str:
    chance = random.Random(f"{seed} resealed {reader} {number}")
    path, told = copied(source, folder), ""

    def change(body: dict[str, Any]) -> None:
        nonlocal told
        place = chance.choice(_places_of(body))
        block = functools.reduce(lambda inner, key: inner[key], place[:-1], body)
        if chance.random() < 0.3:
            del block[place[-1]]
            told = f"without {place}"
        else:
            block[place[-1]] = chance.choice(_ODD)
            told = f"{place} = {block[place[-1]]!r}"

    reseal(path, change)
    (folder / "what").write_text(ascii(told))
    return _tried(lambda: READERS[reader](path, folder), {}, True)


def _run_resealed(reader: str, seed: int, folder: Path) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = _native(folder)
    found = each(range(RESEALED), functools.partial(_resealed, source, reader, seed))
    what = found.what.replace("other values, which nothing in the files tells", "loaded")
    return Outcome(found.ok, what, found.evidence)


def damaged_cases(seed: int) -> list[Case]:
    """A case for each format and reader."""
    found = [
        Case("checkpoints", f"{name}, {reader}", functools.partial(_run, name, reader, seed))
        for name in SOURCES
        for reader in READERS
    ]
    for reader in ("export", "import"):
        run = functools.partial(_run_resealed, reader, seed)
        found.append(Case("checkpoints", f"native, another manifest that fits its checksum, {reader}", run))
    return found
