"""The command `lt-zero export`: sizes in words, what it prints, errors in one line, the bar."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from lt_zero.checkpoint.export import export
from lt_zero.cli import app
from lt_zero.common import progress_bar
from lt_zero.common.errors import CheckpointError
from tests.support.export_tools import Memory, layers, listing


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the command opened, as ``layers`` with one value out of fp16's range."""
    paths: list[str] = []

    def open_source(path: str) -> Memory:
        if not os.path.exists(path):
            raise CheckpointError(f"There is no checkpoint at {path}")
        paths.append(path)
        source = layers()
        source.tensors["layers.2.weight"][0, 0] = 1e6
        return source

    monkeypatch.setattr("lt_zero.checkpoint.export.open_source", open_source)
    return paths


def test_command(tmp_path: Path, opened: list[str]) -> None:
    (tmp_path / "last.ckpt").write_text("")
    command = ["export", str(tmp_path / "last.ckpt"), str(tmp_path / "hf")]
    result = CliRunner().invoke(app, [*command, "--shard-size", "450", "--dtype", "bf16"])
    assert result.exit_code == 0, result.output
    assert opened == [str(tmp_path / "last.ckpt")]
    assert "model-00004-of-00004.safetensors (320 bytes)" in result.output
    assert len(listing(tmp_path / "hf")) == 5
    assert load_file(tmp_path / "hf" / "model-00001-of-00004.safetensors")["layers.0.weight"].dtype == torch.bfloat16
    result = CliRunner().invoke(app, ["export", str(tmp_path / "last.ckpt"), str(tmp_path / "model.pt")])
    assert result.exit_code == 0
    assert "Warning: 1 finite values overflow float16" in result.stderr
    assert "layers.2.weight (1, the largest 1e+06)" in result.stderr


def test_a_prefix_is_stripped_or_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = layers()
    inside = Memory(
        {f"net.{name}": value for name, value in bare.tensors.items()},
        {f"net.{tied}": f"net.{name}" for tied, name in bare.aliases.items()},
    )
    sources = [inside]
    monkeypatch.setattr("lt_zero.checkpoint.export.open_source", lambda path: sources[0])
    (tmp_path / "last.ckpt").write_text("")

    def run(*options: str, out: str = "hf") -> Any:
        paths = [str(tmp_path / "last.ckpt"), str(tmp_path / out)]
        return CliRunner().invoke(app, ["export", *paths, "--overwrite", *options])

    told = "All names begin with 'net.'"
    assert told in run().stderr
    assert told in run(out="one.safetensors").stderr
    assert told not in run(out="weights.pt").stderr, "names of the LightningModule, which loads them"
    result = run("--strip-prefix", "net.", "--keep-fp32", "net.layers.0.*", "--dtype", "fp16")
    assert (result.exit_code, result.stderr) == (0, "")
    loaded = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(loaded) == set(bare.tensors) - set(bare.aliases)
    assert [name for name, value in loaded.items() if value.dtype == torch.float32] == ["layers.0.weight"]
    run("--strip-prefix", "net.", out="weights.pt")
    assert set(torch.load(tmp_path / "weights.pt")) == set(bare.tensors), "tied names, too"
    result = run("--strip-prefix", "nett.")
    assert result.exit_code == 1
    assert "no name begins with 'nett.'. Names are net.layers.0.weight" in result.stderr
    sources[0] = Memory({"net.a": torch.ones(2), "scale": torch.ones(1)})
    result = run("--strip-prefix", "net.")
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == {"a", "scale"}
    assert "do not begin with 'net.' and are kept: scale" in result.stderr
    sources[0] = Memory({"net.a": torch.ones(2), "a": torch.ones(1)})
    assert "would have the name of another weight" in run("--strip-prefix", "net.").stderr


def test_command_says_what_is_wrong_in_one_line(tmp_path: Path, opened: list[str]) -> None:
    (tmp_path / "last.ckpt").write_text("")
    for arguments, words in (
        (["last.ckpt", "model.onnx"], "has no suffix that implies a format"),
        (["last.ckpt", "last.ckpt"], "the checkpoint"),
        (["gone.ckpt", "model.pt"], "There is no checkpoint at"),
        (["last.ckpt", "model.ckpt", "--dtype", "fp32", "--training-state"], "no optimizer states"),
        (["last.ckpt", "model.ckpt", "--training-state"], "dtype fp32"),
    ):
        paths = [str(tmp_path / name) for name in arguments[:2]]
        result = CliRunner().invoke(app, ["export", *paths, *arguments[2:]])
        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
        assert words in result.stderr
    assert listing(tmp_path) == ["last.ckpt"]


def test_command_has_help() -> None:
    result = CliRunner().invoke(app, ["export", "--help"])
    assert result.exit_code == 0
    assert "--training-state" in result.output


def test_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[progress_bar.Work] = []
    monkeypatch.setattr(progress_bar, "_watch", lambda work, *_: seen.append(work))
    for shown in (True, False):
        export(layers(), tmp_path / "model.pt", progress=shown)
    assert [(work.what, work.done, work.total) for work in seen] == [("Exporting model.pt", 1400, 1400)]
