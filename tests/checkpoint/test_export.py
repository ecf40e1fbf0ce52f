"""Weights of checkpoints as plain files: formats, ties, values out of range."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_model

from lt_zero.checkpoint.export import export
from lt_zero.common.errors import CheckpointError
from tests.support.export_tools import Memory, Tied, check_equal, in_dtype, listing, odd, tied


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32", "float64"])
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".safetensors", ".ckpt"])
def test_values_and_dtypes(tmp_path: Path, name: str, suffix: str) -> None:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "float64": torch.float64}[name]
    source, out = odd(), tmp_path / "new" / f"model{suffix}"
    assert export(source, out, name) == [out]
    assert listing(out.parent) == [out.name]
    loaded = load_file(out) if suffix == ".safetensors" else torch.load(out, weights_only=True)
    if suffix == ".ckpt":
        assert set(loaded) == {"state_dict", "pytorch-lightning_version"}
        loaded = loaded["state_dict"]
    check_equal(loaded, source, dtype)
    if suffix != ".safetensors":
        assert list(loaded) == list(source.weights)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".ckpt"])
def test_same_keeps_each_dtype(tmp_path: Path, suffix: str) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.randn(2).half(), "n": torch.arange(3)}
    out = tmp_path / f"model{suffix}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(Memory(tensors), out, "same")
    loaded = load_file(out) if suffix == ".safetensors" else torch.load(out, weights_only=True)
    loaded = loaded["state_dict"] if suffix == ".ckpt" else loaded
    assert loaded.keys() == tensors.keys()
    for name, value in tensors.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value)


@pytest.mark.parametrize(
    ("dtype", "precision", "told"),
    [
        (torch.float32, "", r"saved in float32 and are exported in fp16.* keep 3 of 7 digits, become 0 .*\"same\""),
        (torch.bfloat16, "bf16-true", r"saved in bfloat16 and are exported in fp16.*: they become 0 .*\"same\""),
        (torch.float32, "16-mixed", ""),
        (torch.float16, "", ""),
        (torch.int64, "", ""),
    ],
)
def test_fp16_that_nobody_asked_for_says_what_is_lost(
    tmp_path: Path, dtype: torch.dtype, precision: str, told: str
) -> None:
    """Once, and not of a run in fp16; "fp16" exports the same without a word."""
    source = Memory({"a": torch.ones(3, dtype=dtype), "b": torch.ones(2, dtype=dtype)})
    source.precision = precision  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export(source, tmp_path / "default.pt")
        texts = [str(warning.message) for warning in caught]
        export(source, tmp_path / "asked.pt", "fp16")
    assert len(texts) == len(caught) == bool(told)
    assert not told or re.search(told, texts[0])
    default, asked = (torch.load(tmp_path / f"{name}.pt") for name in ("default", "asked"))
    assert default["a"].dtype == asked["a"].dtype == (torch.float16 if dtype.is_floating_point else dtype)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_pieces_make_the_whole(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_zero.checkpoint.cast._CHUNK", 13)
    source, out = odd(), tmp_path / f"model{suffix}"
    before = {name: value.clone() for name, value in source.tensors.items()}
    export(source, out, torch.bfloat16)
    check_equal(load_file(out) if suffix == ".safetensors" else torch.load(out), source, torch.bfloat16)
    assert all(torch.equal(before[name], value) for name, value in source.tensors.items()), "the source's own memory"


def test_tied_names_of_pt_share_storage(tmp_path: Path) -> None:
    module = Tied()
    export(tied(module), tmp_path / "model.pt", "fp32")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(loaded) == list(module.state_dict())
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    size = (tmp_path / "model.pt").stat().st_size
    other = Tied()
    other.load_state_dict(loaded)
    assert torch.equal(other.head.weight, module.embed.weight)
    export(Memory(dict(module.state_dict())), tmp_path / "model.pt", "fp32")
    assert (tmp_path / "model.pt").stat().st_size >= size + 7 * 5 * 4


def test_tied_names_of_safetensors(tmp_path: Path) -> None:
    module, other = Tied(), Tied()
    export(tied(module), tmp_path / "ours.safetensors", "fp32")
    save_model(module, str(tmp_path / "theirs.safetensors"))
    with (
        safe_open(tmp_path / "ours.safetensors", "pt") as ours,
        safe_open(tmp_path / "theirs.safetensors", "pt") as theirs,
    ):
        assert ours.metadata() == {"format": "pt", **theirs.metadata()}
        assert set(ours.keys()) == set(theirs.keys())
    assert load_model(other, tmp_path / "ours.safetensors") == (set(), [])
    assert torch.equal(other.head.weight, module.embed.weight)
    assert other.head.weight is other.embed.weight


def test_ties_in_a_chain(tmp_path: Path) -> None:
    value = torch.ones(2)
    source = Memory({"a": value, "b": value, "c": value}, {"a": "b", "b": "c"})
    export(source, tmp_path / "model.safetensors")
    assert set(load_file(tmp_path / "model.safetensors")) == {"c"}
    for aliases in ({"a": "b", "b": "a"}, {"a": "gone"}, {"a": "a"}):
        with pytest.raises(CheckpointError, match="ties 'a' to"):
            export(Memory(source.tensors, aliases), tmp_path / "model.pt")


def test_safetensors_layout(tmp_path: Path) -> None:
    source = odd()
    export(source, tmp_path / "model.safetensors", "fp32")
    raw = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, entry in header.items():
        lo, hi = entry["data_offsets"]
        assert (8 + length + lo) % in_dtype(source.tensors[name], torch.float32).element_size() == 0
        assert 8 + length + hi <= len(raw)
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(raw) - 8 - length


def test_what_safetensors_cannot_hold(tmp_path: Path) -> None:
    source = Memory({"z": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match="'z' of torch.complex128.*format pt"):
        export(source, tmp_path / "model.safetensors")
    assert listing(tmp_path) == []
    export(source, tmp_path / "model.pt")
    check_equal(torch.load(tmp_path / "model.pt"), source, torch.float16)


# ---- values out of range -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".ckpt"])
def test_values_out_of_range_are_named_once(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_zero.checkpoint.cast._CHUNK", 2)
    nan, inf = float("nan"), float("inf")
    source = Memory(
        {
            "fine": torch.tensor([65504.0, -65504.0]),
            "large": torch.tensor([1.0, 1e5, -3e6, inf, nan, 2.0, 7e4]),
            "was_inf": torch.tensor([inf, -inf, nan]),
            "count": torch.tensor([10**9]),
            "deep.bias": torch.tensor(1e30),
        }
    )
    with pytest.warns(UserWarning, match="finite values") as caught:
        export(source, tmp_path / f"model{suffix}", "fp16")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    text = str(caught[0].message)
    assert text.startswith("4 finite values overflow float16 (at most 6.55e+04)")
    assert "large (3, the largest 3e+06), deep.bias (1, the largest 1e+30)." in text
    assert text.endswith("Export with dtype bf16 or fp32.")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(source, tmp_path / f"model{suffix}", "bf16")


def test_many_names_out_of_range_are_counted(tmp_path: Path) -> None:
    source = Memory({f"w{number}": torch.tensor([1e39], dtype=torch.float64) for number in range(11)})
    with pytest.warns(UserWarning, match=r"w7 \(1, the largest 1e\+39\) and 3 more tensors. Export with dtype fp64"):
        export(source, tmp_path / "model.pt", torch.float32)


def test_names_that_stay_fp32(tmp_path: Path) -> None:
    source = tied()
    export(source, tmp_path / "model.pt", "fp16", keep_fp32=["norm", "head.w*"])
    found = {name: value.dtype for name, value in torch.load(tmp_path / "model.pt").items()}
    kept = {name for name, dtype in found.items() if dtype == torch.float32}
    norm = {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
    assert kept == norm | {"embed.weight", "head.weight"}
    assert found["head.bias"] == torch.float16
    with pytest.raises(ValueError, match="'nrom'"):
        export(source, tmp_path / "model.pt", keep_fp32=["nrom"])
