"""The commands `lt-zero import` and `lt-zero verify`: what they say, refuse, leave behind and need in memory."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from lt_zero.checkpoint import output
from lt_zero.checkpoint.formats.deepspeed import DeepSpeedSource
from lt_zero.checkpoint.import_ import import_checkpoint
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.open import verify
from lt_zero.cli import app
from lt_zero.common.errors import CheckpointError
from tests.support.import_tools import expected_of, imported, source_of
from tests.support.matrix import cover


def call(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.stdout, result.stderr


def test_commands(tmp_path: Path) -> None:
    code, said, told = call("import", source_of("deepspeed/stage1"), tmp_path / "out", "--tag", "global_step4")
    assert (code, told.count("Warning:")) == (0, 1)
    assert "step 4, at the beginning of epoch 2" in told
    assert str(tmp_path / "out") in said
    code, said, told = call("verify", tmp_path / "out" / "meta.pt")
    assert (code, told) == (0, "")
    for line in ("ranks: 1", "step: 4", "epoch: 2", "optimizers: 1", "all checksums match"):
        assert line in said
    assert re.search(r"bytes: \d+ bytes", said)
    code, _, told = call("import", source_of("deepspeed/stage1"), tmp_path / "out")
    assert (code, "exists already" in told) == (1, True)
    code, _, told = call("import", source_of("deepspeed/stage1"), tmp_path / "new", "--tag", "other")
    assert (code, "'other'" in told) == (1, True)
    missing = tmp_path / "nowhere"
    assert call("verify", missing) == (1, "", f"There is no checkpoint at {missing}: no such file or directory.\n")
    code, _, told = call("verify", source_of("deepspeed/stage1"))
    assert (code, "lt-zero import" in told) == (1, True)
    assert os.listdir(tmp_path) == ["out"]


FILES = ["weights-00000.pt", "moments-00000.pt", "meta.pt", ".metadata", "manifest.json", "extras.pt"]


@pytest.mark.parametrize(("file", "how"), cover(FILES, ["flip", "cut", "remove"]))  # all pairs: test_damage.py
def test_verify_names_what_is_damaged(tmp_path: Path, file: str, how: str) -> None:
    target = imported("deepspeed/stage2_bf16", tmp_path) / file
    data = bytearray(target.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 4
    target.write_bytes(data if how == "flip" else data[:-1])
    if how == "remove":
        target.unlink()
    code, said, told = call("verify", tmp_path / "imported")
    assert (code, said) == (1, "")
    assert file in told


def flipped(source: Path, copy: Path, pattern: str) -> None:
    shutil.copytree(source, copy)
    (target,) = copy.glob(pattern)
    data = bytearray(target.read_bytes())
    data[inside(bytes(data))] ^= 1
    target.write_bytes(data)


def inside(data: bytes) -> int:
    """Where the first storage of a file of torch.save begins."""
    start = data.rindex(b"PK\x03\x04", 0, data.index(b"/data/0"))
    name, extra = struct.unpack_from("<HH", data, start + 26)
    return start + 30 + int(name) + int(extra)


@pytest.mark.parametrize(
    ("case", "pattern"),
    [
        ("deepspeed/stage2_bf16", "*/bf16_zero_pp_rank_1_*"),
        ("deepspeed/stage3", "*/zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("deepspeed/stage1", "*/mp_rank_00_model_states.pt"),
        ("fsdp/fsdp", "__1_0.distcp"),
    ],
)
def test_flipped_bits_in_the_source(tmp_path: Path, case: str, pattern: str) -> None:
    flipped(source_of(case), tmp_path / "copy", pattern)
    code, _, told = call("import", tmp_path / "copy", tmp_path / "out")
    assert code == 1
    assert "is damaged" in told
    assert pattern.strip("*/") in told
    assert os.listdir(tmp_path) == ["copy"]


def test_places_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source_of("deepspeed/stage1"), copy)
    before = sorted(copy.rglob("*"))
    (tmp_path / "file").write_text("mine")
    for out, text in ((copy / "inside", "checkpoint"), (copy, "already"), (tmp_path / "file", "already")):
        with pytest.raises(CheckpointError, match=text):
            import_checkpoint(copy, out)
    monkeypatch.setattr(output, "free_bytes", lambda path: 10)
    with pytest.raises(CheckpointError, match=r"the import needs .* Nothing was written"):
        import_checkpoint(copy, tmp_path / "out")
    assert sorted(copy.rglob("*")) == before
    assert sorted(os.listdir(tmp_path)) == ["copy", "file"]
    monkeypatch.undo()
    (tmp_path / "empty").mkdir()
    with pytest.warns(UserWarning, match="step 4"):
        import_checkpoint(copy, tmp_path / "empty")
    assert verify(tmp_path / "empty")["step"] == 4
    assert sorted(os.listdir(tmp_path)) == ["copy", "empty", "file"]


def test_nothing_is_left_of_an_import_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: DeepSpeedSource, optimizer: int, name: str, key: str) -> Tensor:
        raise CheckpointError("the disk is gone")

    monkeypatch.setattr(DeepSpeedSource, "read_state", read)
    code, _, told = call("import", source_of("deepspeed/stage1"), tmp_path / "out")
    assert (code, "the disk is gone" in told) == (1, True)
    assert os.listdir(tmp_path) == []


def test_no_other_file_system_is_overwritten() -> None:
    name = f"memory://import-{os.getpid()}/out"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert import_checkpoint(source_of("deepspeed/stage1"), name) == name
        with pytest.raises(CheckpointError, match="already"):
            import_checkpoint(source_of("deepspeed/stage1"), name)
    assert verify(name)["step"] == 4
    wanted = expected_of("deepspeed/stage1")["weights"]["gain"]
    assert torch.equal(Archive(name).read("gain"), wanted)


PEAK = """
import re, sys, threading, warnings
from pathlib import Path
import lt_zero.checkpoint.import_ as importing
# Pages of the mapped source are not counted: the kernel takes them back when it needs memory.
used = lambda: int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
before, most, done = used(), [], threading.Event()

def sample():
    while not done.wait(0.001):
        most.append(used())

sampler = threading.Thread(target=sample)
sampler.start()
warnings.simplefilter("ignore")
importing.import_checkpoint(sys.argv[1], sys.argv[2])
done.set()
sampler.join()
assert len(most) > 50
print(max(most) - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepspeed", "safetensors"])
def test_memory(tmp_path: Path, kind: str) -> None:
    """600 MB of parameters and moments, the largest of 64 MB: in memory is one of them, and not much else."""
    size = 16 << 20
    if kind == "safetensors":
        save_file({f"w{i}": torch.full((size // 4, 4), float(i)) for i in range(9)}, tmp_path / "a.safetensors")
        path = tmp_path / "a.safetensors"
    else:
        path = tmp_path / "global_step1"
        path.mkdir()
        shapes = {f"w{i}": torch.Size([size // 4, 4]) for i in range(3)}
        module = {name: torch.empty(0) for name in shapes}
        for rank in range(2):
            flat = torch.full((3 * size // 2,), 1.0)
            inner = {
                "zero_stage": 3,
                "partition_count": 2,
                "fp32_flat_groups": [flat],
                "optimizer_state_dict": {
                    "state": {0: {"step": torch.tensor(1.0), "exp_avg": flat + 1, "exp_avg_sq": flat + 2}},
                    "param_groups": [{"lr": 0.1, "params": [0]}],
                },
            }
            torch.save({"optimizer_state_dict": inner}, path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
            states = {"module": module, "param_shapes": [shapes], "buffer_names": [], "global_steps": 1}
            torch.save(states, path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    command = [sys.executable, "-c", PEAK, str(path), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    print("extra bytes", result.stdout)
    assert int(result.stdout) < 4 * size + 200e6
    archive = Archive(str(tmp_path / "out"))
    if kind == "deepspeed":
        assert archive.read_state(0, "w2", "exp_avg_sq").unique().tolist() == [3.0]
    assert archive.read("w2").unique().tolist() == [1.0 if kind == "deepspeed" else 2.0]
