"""Exports that fail or are refused leave everything as it was."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lt_zero.checkpoint import output
from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.source import SavedOptimizer, Spec
from lt_zero.common.errors import CheckpointError
from lt_zero.core.stores import direct_file
from tests.support.export_tools import Memory, check_equal, layers, listing, odd


@pytest.mark.parametrize("error", [CheckpointError("damaged"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", ["model.pt", "model.ckpt", "model.safetensors", "folder"])
def test_an_error_half_way_leaves_the_old_file(tmp_path: Path, name: str, error: BaseException) -> None:
    def fail(read: str) -> None:
        if read == "layers.4.weight":
            raise error

    source, out = layers(), tmp_path / name
    options: dict[str, Any] = {"shard_size": 450, "overwrite": True} if name == "folder" else {}
    source.on_read = fail
    with pytest.raises(type(error)):
        export(source, out, **options)
    assert listing(tmp_path) == []
    source.on_read = lambda read: None
    files = export(source, out, **options)
    before, names = [file.read_bytes() for file in files], listing(files[0].parent)
    source.on_read = fail
    with pytest.raises(type(error)):
        export(source, out, "fp32", **options)
    assert [file.read_bytes() for file in files] == before
    assert listing(files[0].parent) == names


@pytest.mark.parametrize("name", ["model.pt", "folder"])
def test_what_a_killed_export_wrote_is_removed_by_the_next(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its temporary files are as large as the weights; the next one has their room before it looks for room."""
    source, free = layers(), []
    options: dict[str, Any] = {"shard_size": 450, "overwrite": True} if name == "folder" else {}
    files = export(source, tmp_path / name, **options)
    whole, before = listing(files[0].parent), [file.read_bytes() for file in files]
    with monkeypatch.context() as killed:
        killed.setattr(output.Staging, "remove", output.Staging.unlock)  # all that the kernel does
        killed.setattr(source, "on_read", _killed)
        with pytest.raises(KeyboardInterrupt):
            export(source, tmp_path / name, **options)
    assert len(listing(files[0].parent)) > len(whole)
    assert [file.read_bytes() for file in files] == before

    def told(folder: Path) -> int:
        free.append(listing(folder))
        return 1 << 40

    monkeypatch.setattr(output, "free_bytes", told)
    export(source, tmp_path / name, **options)
    assert listing(files[0].parent) == whole
    assert free[0] == whole


def _killed(read: str) -> None:
    if read == "layers.4.weight":
        raise KeyboardInterrupt


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_disk_that_fails(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "model.pt"
    out.write_text("before")

    def failing(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((direct_file, "write_some") if call == "write" else (os, call)), failing)
        what = rf"Cannot (write|finish) (\d+ bytes at offset \d+ of )?{out}( \(existing .*\))?: No space left on device"
        with pytest.raises(CheckpointError, match=what):
            export(layers(), out)
    assert listing(tmp_path) == ["model.pt"]
    assert out.read_text() == "before"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = direct_file.write_some
    monkeypatch.setattr(direct_file, "write_some", lambda fd, data, offset: real(fd, data[:4097], offset))
    source = odd()
    export(source, tmp_path / "model.pt", "fp32")
    check_equal(torch.load(tmp_path / "model.pt"), source, torch.float32)


def test_space_is_checked_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "free_bytes", lambda path: 1000)
    source = layers()
    source.on_read = pytest.fail
    for out in ("model.pt", "deep/folder"):
        with pytest.raises(CheckpointError, match=r"has 1000 bytes left, and the export needs \d{5,} bytes"):
            export(source, tmp_path / out)
    assert listing(tmp_path) == []


def test_a_source_that_lies(tmp_path: Path) -> None:
    source = layers()
    source.weights["layers.1.weight"] = Spec((10, 11), torch.float32)
    with pytest.raises(CheckpointError, match=r"'layers.1.weight' was read as \(10, 10\).*\(10, 11\)"):
        export(source, tmp_path / "model.pt")
    assert listing(tmp_path) == []


def test_the_checkpoint_itself_is_not_overwritten(tmp_path: Path) -> None:
    folder, file = tmp_path / "epoch=1.ckpt", tmp_path / "last.ckpt"
    folder.mkdir()
    file.write_text("weights")
    os.link(file, tmp_path / "hard.ckpt")
    (tmp_path / "link.ckpt").symlink_to(file)
    for checkpoint, out in (
        *((folder, folder), (folder, folder / "model.pt"), (folder, f"{folder}/../epoch=1.ckpt/sub/model.pt")),
        *((file, file), (file, tmp_path / "link.ckpt"), (file, tmp_path / "hard.ckpt"), (tmp_path / "link.ckpt", file)),
    ):
        with pytest.raises(CheckpointError, match="the checkpoint .* itself"):
            export(checkpoint, out, format="auto" if out is not folder else "safetensors")
    assert file.read_text() == "weights"
    with pytest.raises(CheckpointError, match="There is no checkpoint at .*gone"):
        export(tmp_path / "gone", tmp_path / "model.pt")
    (tmp_path / "plain").write_text("")
    with pytest.raises(CheckpointError, match="plain is a file, but .* a folder"):
        export(layers(), tmp_path / "plain")


def test_what_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    unsavable = Memory(layers().tensors, meta={"hyper_parameters": {"loss": lambda: 0}})
    with pytest.raises(CheckpointError, match="hyper_parameters"):
        export(unsavable, tmp_path / "model.ckpt")
    assert listing(tmp_path) == []


def test_the_name_says_the_format(tmp_path: Path) -> None:
    """That of the link, which the user has named, not that of the file to which it leads."""
    (tmp_path / "target.safetensors").write_text("")
    os.symlink("target.safetensors", tmp_path / "model.pt")
    export(layers(), tmp_path / "model.pt")
    assert "layers.1.weight" in torch.load(io.BytesIO((tmp_path / "target.safetensors").read_bytes()))
    assert (tmp_path / "model.pt").is_symlink()
    (tmp_path / "plain").write_text("")
    os.symlink("plain", tmp_path / "to_plain.safetensors")
    export(layers(), tmp_path / "to_plain.safetensors")
    assert "layers.1.weight" in load_file(tmp_path / "plain")


def test_no_name_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is empty"):
        export(layers(), "")
    assert listing(tmp_path) == []


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "real.pt").write_text("old")
    (tmp_path / "model.pt").symlink_to(tmp_path / "disk" / "real.pt")
    export(layers(), tmp_path / "model.pt")
    assert (tmp_path / "model.pt").is_symlink()
    assert set(torch.load(tmp_path / "disk" / "real.pt")) == set(layers().weights)


def test_a_damaged_optimizer(tmp_path: Path) -> None:
    meta = {"loops": {}}
    weights = {"a": torch.ones(2), "b": torch.ones(2)}
    for groups, state in (([["a"]], {"b": {"step": 1}}), ([["a", "a"]], {})):
        saved = SavedOptimizer([{"params": names, "lr": 1.0} for names in groups], state)
        with pytest.raises(CheckpointError, match="Optimizer 0 has .* not once in its groups"):
            export(Memory(weights, {}, [saved], meta), tmp_path / "model.ckpt", "fp32", training_state=True)
    assert listing(tmp_path) == []
