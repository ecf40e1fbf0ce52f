"""Exports to URLs and imports from them: what appears there is whole, and what fails leaves nothing that looks so."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from safetensors.torch import load
from torch import Tensor
from typer.testing import CliRunner

from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.import_ import import_checkpoint
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.open import open_source, verify
from lt_zero.cli import app
from lt_zero.common.errors import CheckpointError
from tests.support.checkpoint_tools import error_of, resume, train
from tests.support.export_tools import Memory, check_equal, layers
from tests.support.import_tools import source_of
from tests.support.pool import Pool

# Exports without a dtype are of no interest here.
pytestmark = pytest.mark.filterwarnings("ignore:The weights were saved in")


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's file system in memory, empty."""
    found = fsspec.filesystem("memory")
    before = dict(found.store), list(found.pseudo_dirs)
    found.store.clear()
    yield found
    found.store.clear()
    found.store.update(before[0])
    found.pseudo_dirs[:] = before[1]


def names(files: Any, folder: str) -> list[str]:
    return sorted(os.path.basename(path) for path in files.find(folder))


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "ckpt"])
def test_a_file(memory: Any, suffix: str) -> None:
    source, url = layers(), f"memory://bucket/deep/model.{suffix}"
    for _ in range(2):  # a file is replaced
        assert export(source, url, "fp32") == [url]
        with memory.open(url) as file:
            found = load(file.read()) if suffix == "safetensors" else torch.load(file, weights_only=True)
        tied = {"head"} if suffix == "safetensors" else set()
        check_equal(
            found["state_dict"] if suffix == "ckpt" else found, source, torch.float32, set(source.weights) - tied
        )
    assert names(memory, "/bucket") == [f"model.{suffix}"]


def test_a_folder_with_an_index(memory: Any) -> None:
    url = "memory://bucket/hf"
    memory.pipe("/bucket/hf/config.json", b"{}")
    first = export(layers(7), url, "fp32", shard_size=450)
    with pytest.raises(CheckpointError, match="memory://bucket/hf contains weights, which an export there deletes"):
        export(layers(3), url, shard_size=450)
    source = layers(3)
    files = export(source, f"{url}/", "fp32", shard_size=900, overwrite=True)
    assert len(files) < len(first)
    assert names(memory, "/bucket/hf") == sorted([*(os.path.basename(file) for file in files), "config.json"])
    index = json.loads(memory.cat_file(files[-1]))
    found: dict[str, Tensor] = {}
    for file in files[:-1]:
        part = load(memory.cat_file(file))
        assert {index["weight_map"][name] for name in part} == {os.path.basename(file)}
        found |= part
    check_equal(found, source, torch.float32, set(source.weights) - {"head"})
    memory.pipe("/bucket/hf/other.h5", b"x")
    with pytest.raises(CheckpointError, match=r"memory://bucket/hf contains other\.h5"):
        export(source, url, overwrite=True)


def test_a_file_url_is_a_local_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each place that takes a path: a folder named ``file:`` is never made in the current one."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    url = f"file://{tmp_path}"
    assert export(layers(), f"{url}/model.pt", "fp32") == [tmp_path / "model.pt"]
    assert set(open_source(f"{url}/model.pt").weights) == set(layers().weights)
    assert import_checkpoint(f"{url}/model.pt", f"{url}/saved") == str(tmp_path / "saved")
    assert verify(f"{url}/saved")["files"] == verify(tmp_path / "saved")["files"]
    export(f"{url}/saved", f"{url}/hf/", "fp32")
    with pytest.raises(CheckpointError, match="is \\(in\\) the checkpoint"):
        export(f"{url}/saved", f"{url}/saved/model.pt")
    result = CliRunner().invoke(app, ["export", f"{url}/saved", f"{url}/again.safetensors", "--dtype", "same"])
    assert result.exit_code == 0, result.output
    assert sorted(os.listdir(tmp_path)) == ["again.safetensors", "hf", "model.pt", "saved", "work"]
    assert os.listdir(work) == []


def _fails_at(source: Memory, name: str) -> Memory:
    def read(asked: str) -> None:
        if asked == name:
            raise CheckpointError("the source is damaged")

    source.on_read = read
    return source


@pytest.mark.parametrize("kind", ["held back", "visible when closed", "written in place"])
def test_a_source_that_fails_leaves_no_half_file(memory: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind != "held back":
        _without_transactions(monkeypatch, in_place=kind == "written in place")
    bad = _fails_at(layers(), "layers.2.weight")
    with pytest.raises(CheckpointError, match="the source is damaged"):
        export(bad, "memory://bucket/model.safetensors")
    with pytest.raises(CheckpointError, match="the source is damaged"):
        export(bad, "memory://bucket/hf", shard_size=450)
    assert names(memory, "/") == []
    MemoryFile(memory, "/bucket/hf/config.json", b"{}").commit()
    export(layers(2), "memory://bucket/hf", shard_size=450)
    before = {path: memory.cat_file(path) for path in memory.find("/bucket")}
    with pytest.raises(CheckpointError, match="the source is damaged"):
        export(bad, "memory://bucket/hf", shard_size=450, overwrite=True)
    # Without transactions the old files are gone before the first new one appears: a mixture would look whole.
    kept = before if kind == "held back" else {"/bucket/hf/config.json": b"{}"}
    assert {path: memory.cat_file(path) for path in memory.find("/bucket")} == kept
    export(layers(4), "memory://bucket/hf", shard_size=450, overwrite=True)
    whole = json.loads(memory.cat_file("/bucket/hf/model.safetensors.index.json"))["weight_map"]
    assert set(names(memory, "/bucket/hf")) == {*whole.values(), "config.json", "model.safetensors.index.json"}


class _InPlace:
    """A file as file systems without transactions have it; ``fsspec.spec.AbstractBufferedFile`` or another."""

    def __init__(self, fs: MemoryFileSystem, path: str) -> None:
        self.file = MemoryFile(fs, path)
        self.file.commit()

    def write(self, data: bytes) -> int:
        return self.file.write(data)

    def close(self) -> None:
        pass


class _Buffered(fsspec.spec.AbstractBufferedFile):  # type: ignore[misc]
    """Appears with its last part, as at stores whose files have no ``commit``."""

    def _initiate_upload(self) -> None:
        self.parts = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts += self.buffer.getvalue()
        if final:
            MemoryFile(self.fs, self.path, self.parts).commit()
        return True


def _without_transactions(monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    def opened(self: MemoryFileSystem, path: str, mode: str = "rb", **options: Any) -> Any:
        path = self._strip_protocol(path)
        if mode != "wb":
            return real(self, path, mode, **options)
        return _InPlace(self, path) if in_place else _Buffered(self, path, mode, block_size=1000)

    real = MemoryFileSystem._open
    monkeypatch.setattr(MemoryFileSystem, "_open", opened)


def test_an_upload_that_fails_names_the_url(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    export(layers(3), "memory://bucket/hf", shard_size=450)
    before = set(memory.find("/bucket"))

    def full(self: MemoryFile, data: Any) -> int:
        raise OSError("quota exceeded")

    monkeypatch.setattr(MemoryFile, "write", full)
    with pytest.raises(CheckpointError, match=r"Cannot write memory://bucket/m\.pt \(existing .* unchanged\).*quota"):
        export(layers(), "memory://bucket/m.pt")
    with pytest.raises(CheckpointError, match=r"Cannot write memory://bucket/hf/model-00001-of-.*unchanged.*quota"):
        export(layers(), "memory://bucket/hf", shard_size=450, overwrite=True)
    assert set(memory.find("/bucket")) == before
    monkeypatch.undo()

    commit, done = MemoryFile.commit, list[str]()

    def breaks(self: MemoryFile) -> None:
        if len(done) == 2:
            raise ConnectionError("no route")
        done.append(self.path)
        commit(self)

    monkeypatch.setattr(MemoryFile, "commit", breaks)
    with pytest.raises(CheckpointError, match=r"memory://bucket/hf/.* \(files of an earlier export may be missing"):
        export(layers(), "memory://bucket/hf", shard_size=450, overwrite=True)
    left = names(memory, "/bucket/hf")
    assert "model.safetensors.index.json" not in left, "nothing says that these are one model"
    assert not {os.path.basename(path) for path in done} & set(left)


def test_a_file_that_was_cut_is_removed(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = MemoryFile.commit

    def cut(self: MemoryFile) -> None:
        self.truncate(100)
        commit(self)

    monkeypatch.setattr(MemoryFile, "commit", cut)
    with pytest.raises(CheckpointError, match=r"memory://bucket/m\.pt has 100 bytes, and \d+ were written"):
        export(layers(), "memory://bucket/m.pt")
    assert names(memory, "/bucket") == []


def test_others_of_the_file_system_are_in_no_transaction(memory: Any) -> None:
    source = layers()
    source.on_read = lambda name: memory.pipe("/bucket/checkpoint", b"of a thread")
    with pytest.raises(CheckpointError, match="damaged"):
        export(_fails_at(source, "layers.1.weight"), "memory://bucket/m.pt")
    source.on_read = lambda name: memory.pipe("/bucket/checkpoint", b"of a thread")
    export(source, "memory://bucket/m.pt")
    assert names(memory, "/bucket") == ["checkpoint", "m.pt"]
    assert memory.cat_file("/bucket/checkpoint") == b"of a thread"


def test_what_a_url_cannot_be(memory: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="memory://b/ds is a URL, and DeepSpeed reads"):
        export(layers(), "memory://b/ds", "fp32", format="deepspeed-universal")
    with pytest.raises(ValueError, match="The place to write to is empty"):
        export(layers(), "memory://")
    with pytest.raises(ValueError, match="has no suffix that implies a format"):
        export(layers(), "memory://b/model.onnx")
    memory.pipe("/b/file", b"x")
    with pytest.raises(CheckpointError, match="memory://b/file is a file, but this export is a folder"):
        export(layers(), "memory://b/file")
    saved = "memory://b/saved"
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", saved)
    for place in ("memory://b/saved", "memory:///b/saved/model.pt"):
        with pytest.raises(CheckpointError, match="is \\(in\\) the checkpoint memory://b/saved itself"):
            export(saved, place)
    export(saved, "memory://b/saved.pt")


def test_the_command_does_not_write_into_its_own_memory(tmp_path: Path, memory: Any) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    for command in ("export", "import"):
        result = CliRunner().invoke(app, [command, str(tmp_path / "a.pt"), "memory://bucket/b.pt"])
        assert result.exit_code == 1
        assert "memory://bucket/b.pt is in the memory of this command, and is lost when it ends" in result.stderr
    assert names(memory, "/") == []


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", ["deepspeed/stage1", "file"])
def test_other_formats_are_read_from_urls(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    if case == "file":
        torch.save({"state_dict": {"a": torch.arange(5.0)}}, tmp_path / "a.ckpt")
        source, url = tmp_path / "a.ckpt", "memory://bucket/a.ckpt"
        memory.put_file(str(source), "/bucket/a.ckpt")
    else:
        source, url = Path(source_of(case)), "memory://bucket/run"
        memory.put(f"{source}/", "/bucket/run", recursive=True)
        memory.pipe("/bucket/run/global_step99/of_another_step.pt", b"x")
        enough = memory.du("/bucket/run") - 1  # but for that step
        monkeypatch.setattr("lt_zero.checkpoint.download.free_bytes", lambda folder: enough)
    one = Archive(import_checkpoint(source, tmp_path / "one"))
    two = Archive(import_checkpoint(url, tmp_path / "two"))
    assert two.manifest.run["imported_from"] == url
    assert list(one.weights) == list(two.weights)
    assert all(torch.equal(one.read(name), two.read(name)) for name in one.weights)
    export(url, tmp_path / "model.pt", "fp32")
    with pytest.raises(CheckpointError, match="There is no checkpoint at memory://bucket/gone"):
        import_checkpoint("memory://bucket/gone", tmp_path / "three")


def test_a_copy_needs_space(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe("/bucket/a.pt", bytes(5000))
    monkeypatch.setattr("lt_zero.checkpoint.download.free_bytes", lambda folder: 4999)
    with pytest.raises(CheckpointError, match=r"memory://bucket/a\.pt has 5000 bytes.*Set TMPDIR"):
        import_checkpoint("memory://bucket/a.pt", tmp_path / "out")
    assert os.listdir(tmp_path) == []


def _from_ranks(folder: str) -> tuple[str, str]:
    trainer = train(3)
    wrong = error_of(trainer.strategy.export, "memory://bucket/model.pt")
    trainer.strategy.export(f"file://{folder}/model.pt", dtype="same")
    for name in ("saved", "old"):
        trainer.save_checkpoint(f"file://{folder}/{name}")
    resume(f"file://{folder}/saved", 3)
    trainer.strategy.remove_checkpoint(f"file://{folder}/old")
    dist.barrier()
    return wrong, str(sorted(os.listdir(folder)))


def test_weights_of_several_ranks(pool: Pool, tmp_path: Path) -> None:
    for wrong, found in pool.run(2, _from_ranks, str(tmp_path)):
        assert "memory://bucket/model.pt is in the memory of rank 0 alone" in wrong
        assert found == "['model.pt', 'saved']"
