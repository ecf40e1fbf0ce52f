"""What users are told about checkpoints that cannot be read or written: ``tests/data/golden/checkpoint.txt``."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lt_zero.checkpoint import output
from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.import_ import import_checkpoint
from lt_zero.checkpoint.open import open_source, verify
from lt_zero.common.errors import CheckpointError
from tests.support.damage import BELIEVED, DAMAGES, STRANGE, reseal
from tests.support.export_tools import Memory, layers, listing
from tests.support.golden import compare
from tests.support.paths import DATA


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """What the error of a call says: DIR is the folder of the test, DATA that of the fixtures, N a size in bytes."""

    def said(call: Callable[..., Any], *args: Any, **options: Any) -> str:
        with pytest.raises((CheckpointError, ValueError)) as caught:
            call(*args, **options)
        text = str(caught.value).replace(str(tmp_path), "DIR").replace(str(DATA), "DATA")
        sizes = re.sub(r"\b\d{3,}\b", "N", text)
        return f"[{type(caught.value).__name__}] {sizes}"

    return said


def _opened(tmp_path: Path, refused: Callable[..., str]) -> dict[str, str]:
    texts = {}
    for name in ("nothing", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("hello")
    (tmp_path / "several" / "a").mkdir(parents=True)
    shutil.copy(DATA / "deepspeed" / "stage1" / "latest", tmp_path / "several" / "latest")
    for name in ("nowhere", "nothing", "notes", "notes/notes.txt", "several"):
        texts[f"open {name}"] = refused(open_source, tmp_path / name)
    texts["open with a tag"] = refused(open_source, DATA / "fsdp" / "fsdp", tag="x")
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for places in ({"a": "../one.safetensors"}, {"a": "two.safetensors"}, {"b": "one.safetensors"}, {}):
        index.write_text(json.dumps({"weight_map": places}))
        texts[f"open an index of {places}"] = refused(open_source, tmp_path)
    index.unlink()
    return texts


def _damaged(tmp_path: Path, refused: Callable[..., str]) -> dict[str, str]:
    texts = {}
    torch.save({"a": torch.ones(4, 3), "b": torch.ones(5)}, tmp_path / "small.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        good = Path(import_checkpoint(tmp_path / "small.pt", tmp_path / "imported"))
    kept = {path.name: path.read_bytes() for path in good.iterdir()}

    def after(change: Callable[[], Any]) -> str:
        change()
        said = refused(verify, good)
        for name, data in kept.items():
            (good / name).write_bytes(data)
        return said

    for name in sorted(kept):
        if name in (".metadata", "extras.pt", "README.txt"):
            continue
        for how, damage in DAMAGES.items():
            if name == "manifest.json" and how in ("flip", "overwrite"):
                continue  # the error depends on which byte it is
            texts[f"{how} {name}"] = after(lambda name=name, damage=damage: damage(good / name))  # type: ignore[misc]
    for how, change in {**STRANGE, **BELIEVED}.items():
        texts[f"a manifest with {how}"] = after(lambda change=change: reseal(good, change))  # type: ignore[misc]
    texts["a version of tomorrow"] = after(lambda: reseal(good, lambda body: body.update(version=99)))
    return texts


def _exported(tmp_path: Path, refused: Callable[..., str], patch: pytest.MonkeyPatch) -> dict[str, str]:
    texts, source = {}, layers()
    options: dict[str, Any]
    for options in (
        {"out": "model.onnx"},
        {"out": "model.pt", "format": "onnx"},
        {"out": "model.pt", "dtype": "int8"},
        {"out": "model.pt", "shard_size": "5GB"},
        {"out": "folder", "format": "ckpt", "shard_size": "5GB"},
        {"out": "model.ckpt", "training_state": True},
        {"out": "model.pt", "dtype": "fp32", "training_state": True},
        {"out": "model.ckpt", "dtype": "fp32", "training_state": True},
        {"out": "/dev/null", "format": "pt"},
        {"out": "memory://b/out", "dtype": "fp32", "format": "deepspeed-universal"},
        {"out": "plain"},
    ):
        (tmp_path / "plain").write_text("")
        given = {**options, "out": str(options["out"])}
        if "/" not in given["out"]:
            given["out"] = str(tmp_path / given["out"])
        before = listing(tmp_path)
        texts[f"export {options}"] = refused(export, source, **given)
        assert listing(tmp_path) == before, "nothing was written"
    folder = tmp_path / "epoch=1.ckpt"
    folder.mkdir()
    texts["export into itself"] = refused(export, folder, folder / "model.pt")
    texts["export of what is gone"] = refused(export, tmp_path / "gone", tmp_path / "model.pt")
    ties = Memory({"a": torch.ones(2)}, {"a": "gone"})
    texts["export of a tie to nothing"] = refused(export, ties, tmp_path / "model.pt")
    complex_ = Memory({"z": torch.ones(2, dtype=torch.complex128)})
    texts["export of complex numbers"] = refused(export, complex_, tmp_path / "model.safetensors")
    patch.setattr(output, "free_bytes", lambda path: 1000)
    texts["export to a full disk"] = refused(export, source, tmp_path / "model.pt")
    patch.undo()
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("hello")
    texts["import onto something"] = refused(import_checkpoint, DATA / "fsdp" / "fsdp", tmp_path / "there")
    return texts


def test_what_is_told_is_in_the_golden_file(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {**_opened(tmp_path, refused), **_damaged(tmp_path, refused), **_exported(tmp_path, refused, monkeypatch)}
    compare("checkpoint", texts)
