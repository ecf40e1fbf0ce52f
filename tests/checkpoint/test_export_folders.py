"""Exports to folders: shards and their index, what is replaced and what is left alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from lt_zero.checkpoint.cast import Cast
from lt_zero.checkpoint.export import export, plan_shards
from lt_zero.checkpoint.source import Format
from lt_zero.cli import app
from lt_zero.common.errors import CheckpointError
from tests.support.export_tools import Memory, check_equal, layers, listing


def test_sharded_safetensors(tmp_path: Path) -> None:
    source, out = layers(), tmp_path / "model.d"
    files = export(source, out, "fp16", shard_size=450)
    names = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    assert files == [out / name for name in (*names, "model.safetensors.index.json")]
    assert listing(out) == sorted(file.name for file in files)
    index = json.loads(files[-1].read_text())
    assert index["metadata"] == {"total_size": 1400}
    assert set(index["weight_map"]) == set(source.weights) - {"head"}
    loaded = {}
    for name in names:
        part = load_file(out / name)
        assert set(part) == {key for key, file in index["weight_map"].items() if file == name}
        loaded |= part
    check_equal(loaded, source, torch.float16, set(source.weights) - {"head"})
    with safe_open(out / names[0], "pt") as file:
        assert file.metadata() == {"format": "pt", "head": "layers.0.weight"}


def test_sharded_pt(tmp_path: Path) -> None:
    source, out = layers(), tmp_path / "new"
    *files, index = export(source, out, "fp32", format="pt", shard_size="1KB")
    assert [file.name for file in files] == [f"pytorch_model-0000{n}-of-00004.bin" for n in range(1, 5)]
    assert index.name == "pytorch_model.bin.index.json"
    places = json.loads(index.read_text())["weight_map"]
    assert set(places) == set(source.weights)
    parts = {file.name: torch.load(file, weights_only=True) for file in files}
    check_equal({name: parts[file][name] for name, file in places.items()}, source, torch.float32)
    first = parts[places["head"]]
    assert first["head"].data_ptr() == first["layers.0.weight"].data_ptr()


def test_a_folder_with_one_file_has_no_index(tmp_path: Path) -> None:
    assert export(layers(), tmp_path / "plain") == [tmp_path / "plain" / "model.safetensors"]
    (tmp_path / "there.pt").mkdir()
    assert export(layers(), tmp_path / "there.pt", format="pt") == [tmp_path / "there.pt" / "pytorch_model.bin"]
    assert export(layers(), f"{tmp_path}/new.d/") == [tmp_path / "new.d" / "model.safetensors"]


def test_an_earlier_export_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "model"
    out.mkdir()
    monkeypatch.chdir(out)
    export(layers(7), ".", shard_size=450)
    export(layers(3), ".", shard_size=450, overwrite=True)
    assert listing(out) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert listing(Path()) == listing(out), "the folder is the same one"
    export(layers(3), ".", overwrite=True)
    assert listing(out) == ["model.safetensors"]


@pytest.mark.parametrize("format", ["safetensors", "pt"])
def test_weights_in_the_folder_are_only_replaced_on_request(tmp_path: Path, format: Format) -> None:
    """Those of ``save_pretrained`` have the same names."""
    out, options = tmp_path / "hf", {"format": format, "shard_size": 450}
    export(layers(7), out, **options)  # type: ignore[arg-type]
    before = {name: (out / name).read_bytes() for name in listing(out)}
    assert len(before) == 5
    for of_one_file in ({}, options):
        with pytest.raises(CheckpointError, match="deletes: .*index.json, .*--overwrite"):
            export(layers(3), out, **{"format": format, **of_one_file})  # type: ignore[arg-type]
    torch.save(layers(3).tensors, tmp_path / "small.pt")
    command = ["export", str(tmp_path / "small.pt"), str(out), "--format", format, "--dtype", "fp32"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1
    assert "--overwrite" in refused.output
    assert {name: (out / name).read_bytes() for name in listing(out)} == before
    assert CliRunner().invoke(app, [*command, "--overwrite"]).exit_code == 0
    assert listing(out) == ["model.safetensors" if format == "safetensors" else "pytorch_model.bin"]


def test_other_content_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "model"
    export(layers(), out)
    for name in ("config.json", "tokenizer.model", ".gitattributes"):
        (out / name).write_text(name)
    export(layers(), out, overwrite=True)  # what others put beside the weights may be there before them, too
    assert listing(out) == [".gitattributes", "config.json", "model.safetensors", "tokenizer.model"]
    assert (out / "config.json").read_text() == "config.json"
    for name in ("config.json", "tokenizer.model", ".gitattributes"):
        (out / name).unlink()
    for name in ("adapter.safetensors", "tf_model.h5", "model-00001-of-00002.bin"):
        (out / name).write_text("{}")
        with pytest.raises(CheckpointError, match=f"{name}, which no export"):
            export(layers(), out, shard_size=450)
        assert listing(out) == sorted(["model.safetensors", name])
        (out / name).unlink()
    (out / "model.safetensors.index.json").mkdir()
    with pytest.raises(CheckpointError, match="index.json, which no export"):
        export(layers(), out)


def test_a_replacement_that_fails_half_way_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "model"
    export(layers(5), out, shard_size=450)
    before = {name: (out / name).read_bytes() for name in listing(out)}
    rename, calls = os.rename, [0]

    def failing(old: Any, new: Any) -> None:
        calls[0] += 1
        if calls[0] == limit:
            raise OSError(28, "No space left on device")
        rename(old, new)

    monkeypatch.setattr(os, "rename", failing)
    for step in range(1, 4 + 5 + 1):
        calls[0], limit = 0, step
        with pytest.raises(CheckpointError, match="No space left"):
            export(layers(7), out, shard_size=450, overwrite=True)
        assert {name: (out / name).read_bytes() for name in listing(out)} == before
    calls[0], limit = 0, 100
    export(layers(7), out, shard_size=450, overwrite=True)
    assert calls[0] == 4 + 5


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 60))
def test_shards(sizes: list[int], limit: int) -> None:
    source = Memory({str(number): torch.empty(size, dtype=torch.uint8) for number, size in enumerate(sizes)})
    shards = plan_shards(Cast(source, torch.float16, (), lambda nbytes: None), limit)
    assert [name for shard in shards for name in shard] == list(source.weights)
    assert all(len(shard) == 1 or sum(sizes[int(name)] for name in shard) <= limit for shard in shards if shard)
    for left, right in zip(shards, shards[1:], strict=False):
        assert sum(sizes[int(name)] for name in left) + sizes[int(right[0])] > limit, "as many as fit"
