"""Weights of checkpoints as plain files: formats, ties, values out of range, errors that leave everything as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_model
from torch import Tensor, nn
from typer.testing import CliRunner

from lt_zero.checkpoint import output
from lt_zero.checkpoint.casting import Cast
from lt_zero.checkpoint.errors import CheckpointError
from lt_zero.checkpoint.export import export, parse_size
from lt_zero.checkpoint.formats import plan_shards
from lt_zero.checkpoint.source import SavedOptimizer, Spec
from lt_zero.cli import app


class Memory:
    """A source that holds everything; calls ``on_read`` before each tensor."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        aliases: Mapping[str, str] | None = None,
        optimizers: Sequence[SavedOptimizer] = (),
        meta: Mapping[str, Any] | None = None,
        states: Mapping[tuple[int, str, str], Tensor] | None = None,
    ) -> None:
        self.tensors, self.aliases, self.meta = tensors, aliases or {}, meta or {}
        self.weights = {name: Spec(tuple(value.shape), value.dtype) for name, value in tensors.items()}
        self.optimizers, self.states = optimizers, states or {}
        self.on_read: Callable[[str], object] = lambda name: None

    def read(self, name: str) -> Tensor:
        self.on_read(name)
        return self.tensors[name]

    def read_state(self, optimizer: int, name: str, key: str) -> Tensor:
        self.on_read(f"{name}.{key}")
        return self.states[optimizer, name, key]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("flags", torch.tensor([True, False, True]))


def tied(module: nn.Module | None = None) -> Memory:
    module = module or Tied()
    return Memory(dict(module.state_dict()), {"head.weight": "embed.weight"})


def odd() -> Memory:
    torch.manual_seed(0)
    return Memory(
        {
            "matrix": torch.randn(33, 7),
            "bytes": torch.arange(3, dtype=torch.uint8),
            "empty": torch.empty(0, 4),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "count": torch.tensor(2**40 + 1),
            "half": torch.randn(5).bfloat16(),
            "complex": torch.randn(3, dtype=torch.complex64),
            "tiny": torch.randn(1, 1, 1),
        }
    )


def in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def check_equal(
    loaded: Mapping[str, Tensor], source: Memory, dtype: torch.dtype, names: set[str] | None = None
) -> None:
    assert set(loaded) == (set(source.weights) if names is None else names)
    for name, value in loaded.items():
        expected = in_dtype(source.tensors[name], dtype)
        assert value.dtype == expected.dtype
        assert value.shape == expected.shape
        assert torch.equal(value, expected), name


def listing(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


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


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_pieces_make_the_whole(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_zero.checkpoint.casting._PIECE", 13)
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
    monkeypatch.setattr("lt_zero.checkpoint.casting._PIECE", 2)
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
    assert text.startswith("4 finite values do not fit into float16 (at most 6.55e+04)")
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


# ---- folders -----------------------------------------------------------------------------------------------------


def layers(count: int = 7) -> Memory:
    torch.manual_seed(1)
    tensors = {f"layers.{number}.weight": torch.randn(10, 10) for number in range(count)}  # 200 bytes each in fp16
    tensors["head"] = tensors["layers.0.weight"]
    return Memory(tensors, {"head": "layers.0.weight"})


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
    export(layers(3), ".", shard_size=450)
    assert listing(out) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert listing(Path()) == listing(out), "the folder is the same one"
    export(layers(3), ".")
    assert listing(out) == ["model.safetensors"]


def test_other_content_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "model"
    export(layers(), out)
    for name in ("config.json", ".tmp-7-00", "model-00001-of-00002.bin"):
        (out / name).write_text("{}")
        with pytest.raises(CheckpointError, match=f"{name}, which no earlier"):
            export(layers(), out, shard_size=450)
        assert listing(out) == sorted(["model.safetensors", name])
        (out / name).unlink()
    (out / "model.safetensors.index.json").mkdir()
    with pytest.raises(CheckpointError, match="index.json, which no earlier"):
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
            export(layers(7), out, shard_size=450)
        assert {name: (out / name).read_bytes() for name in listing(out)} == before
    calls[0], limit = 0, 100
    export(layers(7), out, shard_size=450)
    assert calls[0] == 4 + 5


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 60))
def test_shards(sizes: list[int], limit: int) -> None:
    source = Memory({str(number): torch.empty(size, dtype=torch.uint8) for number, size in enumerate(sizes)})
    shards = plan_shards(Cast(source, torch.float16, (), lambda nbytes: None), limit)
    assert [name for shard in shards for name in shard] == list(source.weights)
    assert all(len(shard) == 1 or sum(sizes[int(name)] for name in shard) <= limit for shard in shards if shard)
    for left, right in zip(shards, shards[1:], strict=False):
        assert sum(sizes[int(name)] for name in left) + sizes[int(right[0])] > limit, "as many as fit"


def test_sizes_in_words() -> None:
    assert [parse_size(size) for size in ("5GB", "500 MB", "1.5kb", "2GiB", "17", 17)] == [
        *(5 * 10**9, 500 * 10**6, 1500, 2**31, 17, 17),
    ]
    for wrong in ("", "GB", "-1GB", "0", 0, -5, "5 parsec", "1e3", True, "0.2"):
        with pytest.raises(ValueError, match="shard_size must be"):
            parse_size(wrong)


# ---- errors leave everything as it was ---------------------------------------------------------------------------


@pytest.mark.parametrize("error", [CheckpointError("damaged"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", ["model.pt", "model.ckpt", "model.safetensors", "folder"])
def test_an_error_half_way_leaves_the_old_file(tmp_path: Path, name: str, error: BaseException) -> None:
    def fail(read: str) -> None:
        if read == "layers.4.weight":
            raise error

    source, out = layers(), tmp_path / name
    options: dict[str, Any] = {"shard_size": 450} if name == "folder" else {}
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


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_disk_that_fails(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "model.pt"
    out.write_text("before")
    real = getattr(os, call)
    calls = [0]

    def failing(*args: Any) -> Any:
        calls[0] += 1
        if call != "write" or calls[0] == 3:
            raise OSError(28, "No space left on device")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(CheckpointError, match=f"Cannot write {out}: No space left on device"):
            export(layers(), out)
    assert listing(tmp_path) == ["model.pt"]
    assert out.read_text() == "before"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:17]))
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
    with pytest.raises(CheckpointError, match="plain is a file, and .* a folder"):
        export(layers(), tmp_path / "plain")


def test_refuses(tmp_path: Path) -> None:
    source = layers()
    for options, words in (
        ({"out": "model.onnx"}, "'model.onnx' tells no format"),
        ({"out": "model.pt", "format": "onnx"}, "format must be one of auto, pt, ckpt, safetensors"),
        ({"out": "model.pt", "dtype": "int8"}, "dtype must be fp16, bf16, fp32 or fp64, not int8"),
        ({"out": "model.pt", "dtype": torch.int8}, "not torch.int8"),
        ({"out": "model.pt", "shard_size": "5GB"}, "suffix is that of a file"),
        ({"out": "folder", "format": "ckpt", "shard_size": "5GB"}, "one file"),
        ({"out": "model.ckpt", "training_state": True}, "not with ckpt and fp16"),
        ({"out": "model.pt", "dtype": "fp32", "training_state": True}, "not with pt and fp32"),
    ):
        out = tmp_path / str(options.pop("out"))
        with pytest.raises(ValueError, match=words):
            export(source, out, **options)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="no optimizer states and no loops"):
        export(source, tmp_path / "model.ckpt", "fp32", training_state=True)
    with pytest.raises(CheckpointError, match="/dev/null is a folder or a device"):
        export(source, "/dev/null", format="pt")
    unsavable = Memory(source.tensors, meta={"hyper_parameters": {"loss": lambda: 0}})
    with pytest.raises(CheckpointError, match="hyper_parameters.*cannot be pickled.*format pt"):
        export(unsavable, tmp_path / "model.ckpt")
    assert listing(tmp_path) == []


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "real.pt").write_text("old")
    (tmp_path / "model.pt").symlink_to(tmp_path / "disk" / "real.pt")
    export(layers(), tmp_path / "model.pt")
    assert (tmp_path / "model.pt").is_symlink()
    assert set(torch.load(tmp_path / "disk" / "real.pt")) == set(layers().weights)


# ---- in processes of their own -----------------------------------------------------------------------------------

GROWTH = """
import sys, torch
from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.source import Spec

class Lazy:
    aliases, optimizers, meta = {}, (), {}
    def __init__(self, count, numel):
        self.weights = {str(n): Spec((numel,), torch.float32) for n in range(count)}
    def read(self, name):
        return torch.full(self.weights[name].shape, float(name))

def peak():  # not ru_maxrss, which a process has from the one that started it
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

for name in ("a.pt", "a.safetensors", "a.ckpt"):
    export(Lazy(2, 100), sys.argv[1] + "/" + name)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = peak()
for name in ("a.pt", "a.safetensors", "a.ckpt"):
    export(Lazy(6, 9 << 20), sys.argv[1] + "/" + name)
    print((peak() - before) / 2**20)
"""


def run(script: str, *args: str, **env: str) -> str:
    command = [sys.executable, "-c", script, *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1]), **env}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_memory_is_that_of_one_tensor(tmp_path: Path) -> None:
    """6 tensors of 36 MiB (which malloc gives back at once); a file that is held would be 108 MiB."""
    growth = [float(line) for line in run(GROWTH, str(tmp_path)).split()]
    assert len(growth) == 3
    assert 30 < max(growth) < 36 + 30, growth


PLAIN = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "lt_zero":
            raise ImportError("lt_zero is not here")

sys.meta_path.insert(0, Refused())
import torch, warnings
import lightning as L
from torch import nn
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")

class Model(L.LightningModule):
    def __init__(self, width, rate=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, width)
        self.head.weight = self.body.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.tensor(0))
    def training_step(self, batch, index):
        self.seen += 1
        return (self.head(self.body(batch).relu()) * self.scale).square().mean()
    def configure_optimizers(self):
        groups = [{"params": [self.scale], "lr": 0.1}, {"params": [self.body.weight, self.body.bias, self.head.bias]}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.rate)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

def fit(epochs, **options):
    torch.manual_seed(3)
    model = Model(6)
    data = DataLoader(torch.arange(48.0).view(8, 6) / 48, batch_size=4)
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False, **options.pop("trainer", {}))
    trainer.fit(model, data, **options)
    return trainer, model
"""


def names_of(groups: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    return [{**group, "params": [names[number] for number in group["params"]]} for group in groups]


def as_source(path: Path) -> Memory:
    """A file of Lightning's own as a source."""
    saved = torch.load(path, weights_only=True)
    weights = saved.pop("state_dict")
    (optimizer,) = saved.pop("optimizer_states")
    names = ["scale", "body.weight", "body.bias", "head.bias"]
    states: dict[tuple[int, str, str], Tensor] = {}
    entries: dict[str, dict[str, Any]] = {}
    for number, state in optimizer["state"].items():
        for key, value in state.items():
            entry = entries.setdefault(names[number], {})
            entry[key] = value
            if key != "step":
                states[0, names[number], key] = value
                entry[key] = Spec(tuple(value.shape), value.dtype)
    saved["lt_zero"] = {"optimizers": "what only this package reads"}
    groups = names_of(optimizer["param_groups"], names)
    return Memory(weights, {"head.weight": "body.weight"}, [SavedOptimizer(groups, entries)], saved, states)


def test_lightning_reads_it_without_this_package(tmp_path: Path) -> None:
    made = PLAIN + ("trainer, model = fit(1)\ntrainer.save_checkpoint(sys.argv[1] + '/theirs.ckpt')\n")
    run(made, str(tmp_path))
    source = as_source(tmp_path / "theirs.ckpt")
    export(source, tmp_path / "half.ckpt", "fp16")
    export(source, tmp_path / "ours.ckpt", "fp32", training_state=True)
    half = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert not {"optimizer_states", "lr_schedulers", "callbacks"} & set(half)
    assert half["hyper_parameters"] == {"width": 6, "rate": 0.01}
    read = PLAIN + (
        "folder = sys.argv[1]\n"
        "model = Model.load_from_checkpoint(folder + '/half.ckpt')\n"
        "theirs = torch.load(folder + '/theirs.ckpt', weights_only=True)\n"
        "for name, value in model.state_dict().items():\n"
        "    expected = theirs['state_dict'][name]\n"
        "    assert torch.equal(value, expected.half().float() if expected.is_floating_point() else expected), name\n"
        "ours = torch.load(folder + '/ours.ckpt', weights_only=True)\n"
        "assert set(ours) == set(theirs)\n"
        "states = [file['optimizer_states'][0] for file in (ours, theirs)]\n"
        "assert states[0]['param_groups'] == states[1]['param_groups']\n"
        "assert list(states[0]['state']) == [0, 1, 2, 3]\n"
        "results = [fit(3, ckpt_path=f'{folder}/{name}.ckpt', trainer={'strategy': 'ddp'})\n"
        "           for name in ('ours', 'theirs')]\n"
        "(trainer, model), (other, expected) = results\n"
        "assert trainer.global_step == other.global_step == 6\n"
        "for name, value in model.state_dict().items():\n"
        "    assert torch.equal(value, expected.state_dict()[name]), name\n"
        "assert trainer.optimizers[0].param_groups[0]['lr'] == other.optimizers[0].param_groups[0]['lr'] < 0.1\n"
        "assert 'lt_zero' not in sys.modules\n"
        "print('same')\n"
    )
    assert run(read, str(tmp_path)).strip().endswith("same")


def test_a_damaged_optimizer(tmp_path: Path) -> None:
    meta = {"loops": {}}
    weights = {"a": torch.ones(2), "b": torch.ones(2)}
    for groups, state in (([["a"]], {"b": {"step": 1}}), ([["a", "a"]], {})):
        saved = SavedOptimizer([{"params": names, "lr": 1.0} for names in groups], state)
        with pytest.raises(CheckpointError, match="Optimizer 0 has .* not once in its groups"):
            export(Memory(weights, {}, [saved], meta), tmp_path / "model.ckpt", "fp32", training_state=True)
    assert listing(tmp_path) == []


# ---- the command -------------------------------------------------------------------------------------------------


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

    monkeypatch.setattr("lt_zero.checkpoint.open.open_source", open_source)
    return paths


def test_command(tmp_path: Path, opened: list[str]) -> None:
    (tmp_path / "last.ckpt").write_text("")
    command = ["export", str(tmp_path / "last.ckpt"), str(tmp_path / "hf")]
    result = CliRunner().invoke(app, [*command, "--shard-size", "450", "--dtype", "bf16"])
    assert result.exit_code == 0, result.output
    assert opened == [str(tmp_path / "last.ckpt")]
    assert "model-00004-of-00004.safetensors (0.0 MB)" in result.output
    assert len(listing(tmp_path / "hf")) == 5
    assert load_file(tmp_path / "hf" / "model-00001-of-00004.safetensors")["layers.0.weight"].dtype == torch.bfloat16
    result = CliRunner().invoke(app, ["export", str(tmp_path / "last.ckpt"), str(tmp_path / "model.pt")])
    assert result.exit_code == 0
    assert "Warning: 1 finite values do not fit into float16" in result.stderr
    assert "layers.2.weight (1, the largest 1e+06)" in result.stderr


def test_command_says_what_is_wrong_in_one_line(tmp_path: Path, opened: list[str]) -> None:
    (tmp_path / "last.ckpt").write_text("")
    for arguments, words in (
        (["last.ckpt", "model.onnx"], "tells no format"),
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


def test_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(layers(), tmp_path / "model.pt", progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "export" in captured.err
    assert "1.4/1.4 kB" in captured.err
