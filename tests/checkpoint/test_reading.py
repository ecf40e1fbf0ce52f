"""No file makes the readers of other people's checkpoints execute anything, crash, or raise another error."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import shutil
import struct
import sys
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import MetadataIndex
from typer.testing import CliRunner

from lt_zero.checkpoint.formats.dcp import DcpSource
from lt_zero.checkpoint.formats.deepspeed import DeepSpeedSource
from lt_zero.checkpoint.formats.reading import has_checksums, load, load_metadata
from lt_zero.checkpoint.formats.torch_file import FileSource
from lt_zero.checkpoint.import_ import import_checkpoint
from lt_zero.checkpoint.native import records
from lt_zero.checkpoint.native.load import as_lightning
from lt_zero.checkpoint.native.saved_file import check_file
from lt_zero.checkpoint.open import open_source
from lt_zero.cli import app
from lt_zero.common.errors import CheckpointError
from tests.support.checkpoint_tools import flip_a_value, has_values
from tests.support.paths import DATA

MARKER = "/tmp/lt_zero_test_was_here"


_seen: list[str] = []
_events = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class"}


def _listen(event: str, args: Any) -> None:
    """The interpreter reports what code does; a hook cannot be removed, so it is made once."""
    if event in _events:
        _seen.append(event)


sys.addaudithook(_listen)


@pytest.fixture(autouse=True)
def _nothing_runs() -> Iterator[None]:
    _seen.clear()
    yield
    assert not _seen
    assert not os.path.exists(MARKER)


def test_the_hook_hears() -> None:
    pickle.loads(MALICIOUS["torch.Size.__init__"][0].replace(b".__init__", b"").replace(b"\x0dSize", b"\x04Size"))
    assert _seen == ["pickle.find_class"]
    _seen.clear()


def archive(path: Path, pickled: bytes, **records: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", pickled)
        file.writestr("a/version", "3\n")
        for name, content in records.items():
            file.writestr(f"a/data/{name[1:]}", content)
    return path


def refused(folder: Path, data: bytes, match: str, match_metadata: str = "") -> None:
    """As a file of torch.save, and as the metadata of DCP."""
    path = archive(folder / "file.pt", data)
    with pytest.raises(CheckpointError, match=rf"file\.pt .*{match}"):
        load(path)
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"\.metadata .*{match_metadata or match}"):
        load_metadata(folder / ".metadata")


class Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self.what = (function, args)

    def __reduce__(self) -> Any:
        return self.what


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


_OTHER = "another pickle protocol"
_UNREAD = "damaged"
# What the two readers say.
MALICIOUS: dict[str, tuple[bytes, str, str]] = {
    "os.system": (b"cos\nsystem\n(S'touch /tmp/lt_zero_test_was_here'\ntR.", "holds os.system", "holds os.system"),
    "posix.system": (b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.", _OTHER, "holds posix.system"),
    "blocked": (b"cposix\nsystem\n(X\x04\x00\x00\x00truetR.", "holds posix.system", "holds posix.system"),
    "builtins.eval": (b"cbuiltins\neval\n(S'1'\ntR.", "holds eval", "holds builtins.eval"),
    "__builtin__.eval": (b"c__builtin__\neval\n(S'1'\ntR.", "holds eval", "holds __builtin__.eval"),
    "getattr": (b"cbuiltins\ngetattr\n(ctorch\nfloat32\nS'__class__'\ntR.", "holds getattr", "holds builtins.getattr"),
    "partial": (b"cfunctools\npartial\n(cos\nsystem\nS'true'\ntR.", "functools.partial", "functools.partial"),
    "torch.Size.__init__": (b"\x80\x04\x8c\x05torch\x8c\x0dSize.__init__\x93).", _OTHER, "torch.Size.__init__"),
    "dotted": (b"ctorch\nSize.__init__\n)R.", r"torch\.Size\.__init__", r"torch\.Size\.__init__"),
    "torch.serialization.os": (b"ctorch.serialization\nos\n.", "torch.serialization.os", "torch.serialization.os"),
    "torch.hub.load": (b"ctorch.hub\nload\n(S'a'\nS'b'\ntR.", "torch.hub.load", "torch.hub.load"),
    "numpy.load": (b"cnumpy\nload\n(S'a'\ntR.", "numpy.load", "numpy.load"),
    "_rebuild_tensor_v2": (b"ctorch._utils\n_rebuild_tensor_v2\n(tR.", _UNREAD, r"torch\._utils\._rebuild_tensor_v2"),
    "subprocess.Popen": (b"(isubprocess\nPopen\n.", _OTHER, "subprocess.Popen"),
    "EXT1": (b"\x80\x02\x82\x01.", _OTHER, "extension code"),
    "EXT4": (b"\x80\x02\x84\x01\x00\x00\x00.", _OTHER, "extension code"),
    "persistent id": (b"\x80\x02K\x01Q.", _UNREAD, "persistent"),
    "PERSID": (b"P1\n.", _OTHER, "persistent"),
    "NEXT_BUFFER": (b"\x80\x05\x97.", _OTHER, "buffer"),
    "attributes of a class": (named("torch", "Size") + b"}X\x01\x00\x00\x00aK\x01sb.", _UNREAD, _UNREAD),
    "attributes of a dtype": (named("torch", "float32") + b"}X\x01\x00\x00\x00aK\x01sb.", _UNREAD, _UNREAD),
    "attributes of a list": (b"]}X\x01\x00\x00\x00aK\x01sb.", _UNREAD, _UNREAD),
    "a call of a str": (b"X\x09\x00\x00\x00os.system(X\x04\x00\x00\x00truetR.", _UNREAD, _UNREAD),
    "a call of a stub": (
        named("datetime", "timedelta") + b")\x81)R.",
        _UNREAD,
        "holds datetime.timedelta",
    ),
    "a call of a stub in metadata": (
        named("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81)R.",
        r"holds torch\.distributed",
        _UNREAD,
    ),
    "attributes of a stub's class": (
        named("torch.distributed.checkpoint.metadata", "Metadata") + b"(N}X\x03\x00\x00\x00getK\x01stb.",
        r"holds torch\.distributed",
        _UNREAD,
    ),
    "a call of a dtype": (named("torch", "float32") + b")R.", _UNREAD, _UNREAD),
    "a list as a key": (b"}]K\x01s.", _UNREAD, _UNREAD),
}


@pytest.mark.parametrize("what", MALICIOUS)
def test_malicious(tmp_path: Path, what: str) -> None:
    refused(tmp_path, *MALICIOUS[what])


@pytest.mark.parametrize("function", [os.system, eval, exec, getattr, __import__, open, torch.load, pickle.loads, type])
@pytest.mark.parametrize("protocol", range(6))
def test_calls_in_every_protocol(tmp_path: Path, function: Any, protocol: int) -> None:
    data = {"a": [Calls(function, "true")]}
    refused(tmp_path, pickle.dumps(data, protocol), "not read", "which is not read")


DAMAGED = {
    "memo": b"h\x05.",
    "no end": b"K\x01",
    "empty": b"",
    "none left": b".",
    "mark": b"t.",
    "appended to a number": b"K\x01K\x02a.",
    "long string": b"X\xff\xff\xff\x7fabc.",
    "longer string": b"\x8d" + b"\xff" * 8 + b"abc.",
    "long number": b"\x8b\xff\xff\xff\x7f.",
    "no number": b"Iabc\n.",
    "no utf-8": b"X\x02\x00\x00\x00\xff\xfe.",
    "pairs": named("collections", "OrderedDict") + b"(]K\x01atR.",
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged(tmp_path: Path, what: str) -> None:
    refused(tmp_path, DAMAGED[what], "damaged")


def test_huge_memo_takes_no_room(tmp_path: Path) -> None:
    assert load(archive(tmp_path / "a.pt", b"K\x01r\xff\xff\xff\xff.")) == 1
    for put in (b"K\x01r\xff\xff\xff\xff.", b"K\x01p99999999999999999999\n."):
        (tmp_path / ".metadata").write_bytes(put)
        with pytest.raises(CheckpointError, match=r"\.metadata is damaged.*PUT of"):
            load_metadata(tmp_path / ".metadata")


def test_an_error_names_classes_of_a_damaged_file(tmp_path: Path) -> None:
    metadata = dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    metadata.planner_data = {"a": (MetadataIndex("a"),)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"a has the path \(<torch\.distributed\S+\.MetadataIndex>,\)"):
        DcpSource(tmp_path)


def test_deep_nesting(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nested too deeply"):
        load(archive(tmp_path / "a.pt", b"]" * 200_000 + b"a" * 199_999 + b"."))
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    torch.save({"state_dict": {"a": torch.ones(1)}, "deep": deep}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="nested too deeply"):
        FileSource(tmp_path / "a.ckpt")


def test_laughter_stays_small(tmp_path: Path) -> None:
    """Lists of one list, twice each: two to the fiftieth elements if copied apart."""
    row: Any = [1]
    for _ in range(50):
        row = [row, row]
    torch.save({"state_dict": {"a": torch.ones(1)}, "row": row}, tmp_path / "a.ckpt")
    meta = FileSource(tmp_path / "a.ckpt").meta
    assert meta["row"][0] is meta["row"][1]
    path = import_checkpoint(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    assert as_lightning(open_source(path))["row"][0][1][0] is not None


def test_plain_values(tmp_path: Path) -> None:
    value = {
        "numbers": [0, 255, 65536, -1, 1 << 80, 1.5, True, None],
        "text": "ä" * 300,
        ("a", 1): (1, (2, 3), ()),
        "bytes": [b"\x00\xff", b""],
        "set": {1, 2},
        "frozen": frozenset({3}),
        "complex": 1 + 2j,
        "dtype": torch.bfloat16,
        "numpy": [np.float32(1.5), np.int64(-7), np.bool_(True)],
    }
    for old in (False, True):
        torch.save(value, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
        assert load(tmp_path / "a.pt") == value
    torch.save([Path("/a/b"), torch.Size([2, 3])], tmp_path / "a.pt")
    assert load(tmp_path / "a.pt") == ["/a/b", (2, 3)]
    torch.save(value, tmp_path / "a.pt", pickle_protocol=4)
    with pytest.raises(CheckpointError, match="`pickle_protocol`"):
        load(tmp_path / "a.pt")


def test_tensors_that_are_no_weights(tmp_path: Path) -> None:
    odd = [torch.ones(2).to_sparse(), torch.empty(2, device="meta"), torch.ones(2, dtype=torch.complex64).conj()]
    for tensor in odd:
        torch.save({"a": [tensor]}, tmp_path / "a.pt")
        with pytest.raises(CheckpointError, match=r"a\.pt.*a tensor of layout"):
            load(tmp_path / "a.pt")


def test_nothing_stays_admitted(tmp_path: Path) -> None:
    before = set(map(str, torch.serialization.get_safe_globals()))
    torch.save({"state_dict": {"a": torch.ones(1)}, "own": Own()}, tmp_path / "a.ckpt")
    load(tmp_path / "a.ckpt", inert=[f"{Own.__module__}.Own"])
    assert set(map(str, torch.serialization.get_safe_globals())) == before
    with pytest.raises(CheckpointError, match="Own"):
        load(tmp_path / "a.ckpt")


def test_named_classes_are_data(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(1)}, "own": Own(), "epoch": 1}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"test_reading\.Own.*inert"):
        FileSource(tmp_path / "a.ckpt")
    source = open_source(tmp_path / "a.ckpt", inert=[f"{Own.__module__}.Own"])
    assert source.meta == {"own": None, "epoch": 1}
    assert "Own" in source.notes[0]
    command = ["import", str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")]
    assert "--inert tests.checkpoint.test_reading.Own" in CliRunner().invoke(app, command).output
    assert CliRunner().invoke(app, [*command, "--inert", f"{Own.__module__}.Own"]).exit_code == 0
    assert open_source(tmp_path / "b.ckpt").meta["epoch"] == 1


class Own:
    def __setstate__(self, state: Any) -> None:
        os.system("true")

    def __init__(self) -> None:
        self.a = 1


# ---- files -------------------------------------------------------------------------------------------------------


def tensor(numel: int, start: int, shape: tuple[int, ...], stride: tuple[int, ...], key: str = "0") -> bytes:
    """A pickle of one tensor, as torch.save writes them."""

    marker = object()

    class Saver(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.FloatStorage, key, "cpu", numel) if obj is marker else None

    stream = io.BytesIO()
    arguments = (marker, start, shape, stride, False, {})
    Saver(stream, 2).dump(Calls(torch._utils._rebuild_tensor_v2, *arguments))
    return stream.getvalue()


def test_impossible_tensors(tmp_path: Path) -> None:
    good = archive(tmp_path / "good.pt", tensor(4, 1, (3,), (1,)), _0=struct.pack("<4f", 1, 2, 3, 4))
    assert load(good).tolist() == [2, 3, 4]
    for number, bad in enumerate(
        [
            tensor(1 << 30, 0, (1 << 30,), (1,)),  # a longer storage than the file
            tensor(4, 2, (3,), (1,)),  # beyond its end
            tensor(4, -1, (3,), (1,)),
            tensor(4, 0, (2, 2), (1,)),
            tensor(4, 0, (-3,), (1,)),
            tensor(4, 0, (1 << 40,), (0,)),  # one element as many
            tensor(4, 0, (1 << 63, 1 << 63), (0, 0)),
            tensor(4, 0, (2,), (1 << 61,)),
            tensor(4, 0, (3,), (1,), "../data.pkl"),
            tensor(4, 0, (3,), (1,), "1"),
        ]
    ):
        path = archive(tmp_path / f"{number}.pt", bad, _0=struct.pack("<4f", 1, 2, 3, 4))
        with pytest.raises(CheckpointError, match=rf"{number}\.pt"):
            load(path)


def test_not_a_torch_file(tmp_path: Path) -> None:
    for number, content in enumerate([b"", b"text", b"PK\x03\x04", pickle.dumps({"a": 1}), b"\x80\x02" * 9]):
        path = tmp_path / f"{number}.pt"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{number}\.pt"):
            load(path)
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", b"0" * 1_000_000)
    with pytest.raises(CheckpointError, match=r"bomb\.pt.*compressed"):
        load(tmp_path / "bomb.pt")
    with pytest.raises(CheckpointError, match=r"none\.pt"):
        load(tmp_path / "none.pt")


def test_parts_are_read_without_a_copy(tmp_path: Path) -> None:
    file, values = tmp_path / "a.distcp", torch.arange(1 << 20, dtype=torch.float64)
    part = io.BytesIO()
    torch.save(values, part)
    file.write_bytes(bytes(1000) + part.getvalue() + bytes(1000))
    place = file, 1000, 1000 + part.tell()
    tracemalloc.start()  # of Python's memory: values are in that of torch
    try:
        assert torch.equal(load(*place), values)
        assert has_checksums(*place)
        assert tracemalloc.get_traced_memory()[1] < 6 << 20  # steps of 4 MiB
    finally:
        tracemalloc.stop()


def test_checksums(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.full((100,), 1.5)}, path)
    assert has_checksums(path)
    data = bytearray(path.read_bytes())
    data[data.index(struct.pack("<f", 1.5) * 100) + 7] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"checksum of its record data/0"):
        has_checksums(path)


@pytest.mark.parametrize("old", [False, True])
def test_a_part_of_a_file(tmp_path: Path, old: bool) -> None:
    """Bytes before and behind the part are not read as its own."""
    value = {"a": torch.arange(100.0), "b": [1, 2]}
    torch.save(value, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "parts").write_bytes(b"x" * 37 + data + data)
    loaded = load(tmp_path / "parts", 37, 37 + len(data))
    assert torch.equal(loaded["a"], value["a"])
    assert loaded["b"] == value["b"]
    assert has_checksums(tmp_path / "parts", 37, 37 + len(data)) is not old
    for stop in (36 + len(data), 38 + 2 * len(data)):
        with pytest.raises(CheckpointError, match="parts"):
            load(tmp_path / "parts", 37, stop)


def read_all(source: Any) -> None:
    for name in source.weights:
        source.read(name)
    for number, optimizer in enumerate(source.optimizers):
        for name, entries in optimizer.state.items():
            for key in entries:
                if hasattr(entries[key], "nbytes") and not isinstance(entries[key], torch.Tensor):
                    source.read_state(number, name, key)


FILES = [
    "deepspeed/stage2_bf16/global_step4/mp_rank_00_model_states.pt",
    "deepspeed/stage2_bf16/global_step4/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "deepspeed/stage3_bf16/global_step4/zero_pp_rank_1_mp_rank_00_model_states.pt",
    "deepspeed/stage3_bf16/global_step4/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "fsdp/fsdp/.metadata",
    "fsdp/fsdp/__1_0.distcp",
    "fsdp/fsdp/meta.pt",
    "legacy.pt",
]


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mutated") / "data"
    shutil.copytree(DATA, folder)
    values = {"a": torch.arange(9.0).view(3, 3), "b": torch.ones(2, dtype=torch.int64)}
    torch.save({"state_dict": values, "epoch": 1}, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    return folder


def opened(folder: Path, file: str) -> Any:
    if file.startswith("deepspeed"):
        return DeepSpeedSource(folder / Path(file).parents[1])
    return DcpSource(folder / "fsdp" / "fsdp") if file.startswith("fsdp") else FileSource(folder / file)


@pytest.mark.parametrize("file", FILES)
def test_mutated(copies: Path, file: str) -> None:
    """Cut off, changed or shuffled: an error of ours, or values."""
    path = copies / file
    good = path.read_bytes()
    read_all(opened(copies, file))
    unnamed: list[str] = []

    @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def mutate(draw: st.DataObject) -> None:
        data = bytearray(good)
        # The pickle, where most of the meaning is, is at the beginning.
        place = st.integers(0, len(good) - 1) | st.integers(0, min(3000, len(good) - 1))
        for _ in range(draw.draw(st.integers(1, 4))):
            data[draw.draw(place)] = draw.draw(st.integers(0, 255))
        if draw.draw(st.booleans()):
            del data[draw.draw(place) :]
        path.write_bytes(data)
        try:
            read_all(opened(copies, file))
        except CheckpointError as error:
            unnamed.extend([] if str(copies) in str(error) else [str(error)])

    try:
        mutate()
    finally:
        path.write_bytes(good)
    assert not unnamed


# ---- what is no file, and what is damaged --------------------------------------------------------------------------


def _folders(folder: Path) -> dict[Path, str]:
    """Copies of checkpoints, and the names of all files in each that are opened."""
    shutil.copytree(DATA / "deepspeed/stage3_bf16", folder / "deepspeed")
    shutil.copytree(DATA / "fsdp/fsdp", folder / "fsdp")
    (folder / "hf").mkdir()
    save_file({"a": torch.ones(3)}, folder / "hf/one.safetensors")
    torch.save({"b": torch.ones(3)}, folder / "hf/two.bin")
    places = {"a": "one.safetensors", "b": "two.bin"}
    (folder / "hf/model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return {
        folder / "deepspeed": "latest *_states.pt",
        folder / "fsdp": ".metadata meta.pt __*.distcp",
        folder / "hf": "one.safetensors two.bin model.safetensors.index.json",
    }


def _outcome(folder: Path) -> str:
    try:
        read_all(open_source(folder, tell=False))
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["pipe", "device"])
def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, make: Any) -> None:
    """A pipe kept its reader for ever, and a device has no end."""
    for folder, patterns in _folders(tmp_path).items():
        assert not _outcome(folder)
        for file in [file for pattern in patterns.split() for file in sorted(folder.rglob(pattern))]:
            kept = file.rename(tmp_path / "kept")
            make(file)
            text = _outcome(folder)
            # Without these, the folder is that of another kind, or a checkpoint without the rest of the state.
            assert str(folder) in text or file.name in ("latest", "meta.pt"), file
            file.unlink()
            kept.rename(file)


def test_a_flipped_bit_is_seen_by_every_reader(tmp_path: Path) -> None:
    """Not by import alone: an export of it had the exit code 0."""
    torch.save({"state_dict": {"a": torch.ones(300, 7), "b": torch.ones(2)}}, tmp_path / "x.ckpt")
    flip_a_value(tmp_path / "x.ckpt")
    result = CliRunner().invoke(app, ["export", str(tmp_path / "x.ckpt"), str(tmp_path / "out.safetensors")])
    assert result.exit_code == 1
    assert "x.ckpt is damaged: the checksum of its record data/0 is wrong" in result.output
    assert not (tmp_path / "out.safetensors").exists()
    shutil.copytree(DATA / "deepspeed/stage3_bf16", tmp_path / "deepspeed")
    shutil.copytree(DATA / "fsdp/fsdp", tmp_path / "fsdp")
    parts = [(file, 0, None) for file in sorted(tmp_path.glob("deepspeed/*/*optim_states.pt"))]
    stored = [part for part in DcpSource(tmp_path / "fsdp").parts if part[0].suffix == ".distcp" and has_values(*part)]
    known = {part[0]: part for part in stored}
    assert len(known) == 2
    for part in [*parts, *known.values()]:
        good = flip_a_value(*part)
        assert f"{part[0].name} is damaged" in _outcome(part[0].parents[part[2] is None]), part
        part[0].write_bytes(good)


def test_a_mapped_file_is_checked_once_where_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors in several parts, small ones together, and nothing is read twice."""
    values = {"large": torch.randn(10_000_001), **{f"small{n}": torch.randn(1000) for n in range(50)}}
    torch.save(values, tmp_path / "a.pt")
    read: list[int] = []
    crc = records._crc
    monkeypatch.setattr(records, "_crc", lambda file, record: (read.append(record.size), crc(file, record))[1])
    compared: list[str] = []
    compare = records._compare
    monkeypatch.setattr(
        records, "_compare", lambda record, *rest: (compared.append(record.name), compare(record, *rest))
    )
    source = open_source(tmp_path / "a.pt")
    assert sum(read) < 20_000, "opened, and not read"
    for _ in range(2):
        for name, value in values.items():
            assert torch.equal(source.read(name), value)
    assert sum(read) < 20_000 + sum(value.nbytes for value in values.values())
    found = [name for name in compared if name.startswith("data/")]
    assert len(found) == len(set(found)) == len(values), "not all of a group for each of it"
    os.utime(tmp_path / "a.pt", (0, 0))
    other = open_source(tmp_path / "a.pt")
    os.utime(tmp_path / "a.pt", (9, 9))
    with pytest.raises(CheckpointError, match=r"a\.pt was changed"):
        other.read("large")


@pytest.mark.parametrize("goes", ["replaced", "removed"])
def test_a_file_that_goes_while_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes: str) -> None:
    """As last.ckpt of a run that goes on: what was opened is read to its end, and checked."""
    path, other = tmp_path / "last.ckpt", tmp_path / "new"

    def go() -> None:
        torch.save({"large": torch.zeros(1)}, other)
        other.replace(path) if goes == "replaced" else path.unlink()

    values = {"large": torch.randn(10_000_001), "small": torch.randn(3)}
    for damaged in (False, True):
        torch.save(values, path)
        if damaged:
            flip_a_value(path)
        source = open_source(path)
        go()
        if damaged:
            with pytest.raises(CheckpointError, match=r"last\.ckpt is damaged: the checksum"):
                read_all(source)
        else:
            assert all(torch.equal(source.read(name), value) for name, value in values.items())
    torch.save(values, path)
    start = records.ChecksumJob.start
    monkeypatch.setattr(records.ChecksumJob, "start", lambda job, pool: (path.exists() and go(), start(job, pool))[1])
    check_file(path)
    assert not path.exists() or path.stat().st_size < 10_000


def test_crcs_are_joined() -> None:
    data = bytes(range(256)) * 1000
    for cut in (0, 1, 77_777, len(data)):
        first, second = zlib.crc32(data[:cut]), zlib.crc32(data[cut:])
        assert records.joined(first, second, len(data) - cut) == zlib.crc32(data)


def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in _folders(tmp_path):
        source: Any = open_source(folder, tell=False)
        monkeypatch.setattr(records, "_crc", _failing)
        with pytest.raises(CheckpointError, match=rf"{folder}.*(EIO|Input/output)"):
            read_all(source)
        monkeypatch.undo()


def _failing(*_: Any) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_other_formats_need_their_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.pt"
    torch.save({"weight": torch.ones(2)}, file)
    monkeypatch.setitem(sys.modules, "lt_zero.checkpoint.formats.dcp", None)
    missing = rf"What reads {file}, .* is not installed: there is no module lt_zero\.checkpoint\.formats\.dcp\."
    with pytest.raises(CheckpointError, match=missing):
        open_source(file)
