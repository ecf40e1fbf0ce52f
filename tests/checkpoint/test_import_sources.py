"""Checkpoints are known by what is there; what is not whole or not known is named."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

import lt_zero
from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.formats.dcp import DcpSource
from lt_zero.checkpoint.formats.deepspeed import DeepSpeedSource
from lt_zero.checkpoint.formats.torch_file import FileSource
from lt_zero.checkpoint.import_ import import_checkpoint
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.open import open_source
from lt_zero.common.errors import CheckpointError
from tests.support.import_tools import expected_of, imported, module_for, source_of
from tests.support.paths import DATA


def test_sources_by_what_is_there(tmp_path: Path) -> None:
    stage3 = source_of("deepspeed/stage3")
    assert isinstance(open_source(stage3), DeepSpeedSource)
    assert isinstance(open_source(stage3 / "global_step4"), DeepSpeedSource)
    assert isinstance(open_source(stage3, tag="global_step4"), DeepSpeedSource)
    assert isinstance(open_source(source_of("deepspeed/lightning_stage2")), DeepSpeedSource)
    assert isinstance(open_source(DATA / "fsdp" / "fsdp"), DcpSource)
    assert isinstance(open_source(imported("deepspeed/stage1", tmp_path) / "meta.pt"), Archive)
    torch.save({"a": torch.ones(2)}, tmp_path / "a.bin")
    assert isinstance(open_source(tmp_path / "a.bin"), FileSource)
    (tmp_path / "manifest.json").write_text("{}")  # of some other tool
    shutil.copytree(stage3, tmp_path / "beside")
    assert isinstance(open_source(tmp_path / "beside"), DeepSpeedSource)


def test_an_incomplete_directory_is_refused(tmp_path: Path) -> None:
    half = imported("deepspeed/stage1", tmp_path)
    (half / "manifest.json").unlink()  # torch's own reader would take it
    with pytest.raises(CheckpointError, match="not a complete one"):
        open_source(half)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 5)
        self.body = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize("size", [64, 10_000])
def test_hugging_face_folders(tmp_path: Path, kind: Any, size: int) -> None:
    model = Tied()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    files = export(tmp_path / "model.pt", tmp_path / "folder", "fp32", kind, size)
    assert len(files) == (4 if size == 64 else 1)
    source = open_source(tmp_path / "folder")
    assert isinstance(source, FileSource)
    assert set(source.weights) == set(model.state_dict())
    assert source.aliases == {"head.weight": "embed.weight"}
    assert all(torch.equal(source.read(name), value) for name, value in model.state_dict().items())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = import_checkpoint(tmp_path / "folder", tmp_path / "out")
    assert torch.equal(Archive(out).read("head.weight"), model.head.weight)


def test_a_damaged_index_of_a_hugging_face_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        open_source(tmp_path)


def test_names_that_safetensors_keeps_apart(tmp_path: Path) -> None:
    model = Tied()
    save_model(model, str(tmp_path / "model.safetensors"))
    source = open_source(tmp_path / "model.safetensors")
    assert set(source.weights) == set(model.state_dict())
    assert torch.equal(source.read("head.weight"), source.read("embed.weight"))


def test_parameters_that_deepspeed_left_out(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source_of("deepspeed/stage3"), copy)
    for file in (copy / "global_step4").glob("*model_states.pt"):
        states = torch.load(file)
        torch.save(states | {"frozen_param_shapes": None, "frozen_param_fragments": None}, file)
    with pytest.warns(UserWarning, match=r"frozen\.weight was not saved"):
        out = import_checkpoint(copy, tmp_path / "out")
    assert Archive(out).manifest.left_out == ("frozen.weight",)
    kind = type(module_for("deepspeed/stage3"))
    with pytest.raises(RuntimeError, match="strict=False"):
        lt_zero.load_from_checkpoint(kind, out)
    assert torch.equal(
        lt_zero.load_from_checkpoint(kind, out, strict=False).gain, expected_of("deepspeed/stage3")["weights"]["gain"]
    )
