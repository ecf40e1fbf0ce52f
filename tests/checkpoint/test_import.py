"""Checkpoints that others wrote hold what their own tools read from them."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lt_zero.checkpoint.formats.dcp import DcpSource
from lt_zero.checkpoint.formats.deepspeed import DeepSpeedSource
from lt_zero.checkpoint.formats.torch_file import FileSource
from lt_zero.checkpoint.source import CheckpointSource, Spec
from lt_zero.common.errors import CheckpointError
from tests.support.paths import DATA

DEEPSPEED = sorted(folder.parent.name for folder in DATA.glob("deepspeed/*/expected.pt"))


def checkpoint(case: str) -> Path:
    folder = DATA / "deepspeed" / case
    return folder / "last" if (folder / "last").is_dir() else folder


def same(got: Tensor, wanted: Tensor) -> bool:
    return got.shape == wanted.shape and torch.equal(got.double(), wanted.double()) and got.is_contiguous()


def compare(source: CheckpointSource, weights: dict[str, Tensor], state: dict[str, dict[str, Tensor]]) -> None:
    assert set(source.weights) == set(weights)
    for name, wanted in weights.items():
        got = source.read(name)
        assert same(got, wanted), name
        assert source.weights[name] == Spec(tuple(got.shape), got.dtype), name
    (saved,) = source.optimizers
    assert set(saved.state) == set(state) == {name for group in saved.groups for name in group["params"]}
    for name, entries in state.items():
        for key, wanted in entries.items():
            if key == "step":
                assert saved.state[name][key] == wanted
            else:
                assert saved.state[name][key] == Spec(tuple(wanted.shape), wanted.dtype)
                assert same(source.read_state(0, name, key), wanted), (name, key)


@pytest.mark.parametrize("case", DEEPSPEED)
def test_deepspeed(case: str) -> None:
    expected = torch.load(DATA / "deepspeed" / case / "expected.pt")
    assert DeepSpeedSource.looks_like(checkpoint(case))
    source = DeepSpeedSource(checkpoint(case))
    prefix = "net." if case.startswith("lightning") else ""
    assert source.aliases == {f"{prefix}head.weight": f"{prefix}embed.weight"}
    assert source.read(f"{prefix}calls").dtype == torch.int64
    if case == "stage0":
        assert source.optimizers == ()
        assert "stage 0" in source.notes[0]
        assert all(same(source.read(name), value) for name, value in expected["weights"].items())
        return
    compare(source, expected["weights"], expected["state"])
    assert source.read(f"{prefix}body.weight").dtype == torch.float32  # master weights
    (saved,) = source.optimizers
    if case != "stage2_elastic":
        assert saved.groups[0]["weight_decay"] == 0.1
        assert saved.groups[1]["weight_decay"] == 0.0
        assert source.notes == []
    if "momentum_buffer" not in expected["state"]["net.gain" if prefix else "gain"]:
        steps = {float(entries["step"]) for entries in saved.state.values()}
        assert len(steps) == 1
        assert steps.pop() > 0


def test_number_of_deepspeed_cases() -> None:
    assert len(DEEPSPEED) == 10


def test_loss_scale_of_fp16() -> None:
    wanted = torch.load(DATA / "deepspeed/stage2_fp16/expected.pt")["scaler"]
    scaler = DeepSpeedSource(checkpoint("stage2_fp16")).meta["ZeroPrecision"]["scaler"]
    assert scaler == {
        "scale": wanted["cur_scale"],
        "steps": wanted["cur_iter"],
        "last_overflow": wanted["last_overflow_iter"],
        "patience": wanted["cur_hysteresis"],
    }
    assert "ZeroPrecision" not in DeepSpeedSource(checkpoint("stage2_bf16")).meta


def test_meta_of_lightning() -> None:
    meta = DeepSpeedSource(checkpoint("lightning_stage2")).meta
    assert meta["global_step"] == 3
    assert meta["hyper_parameters"] == {"width": 5}
    assert meta["lr_schedulers"][0]["last_epoch"] == 1
    assert "ds_config" not in meta
    assert DeepSpeedSource(checkpoint("stage3")).meta == {"epoch": 2, "note": "client state"}


@pytest.mark.parametrize("case", ["fsdp", "model_parallel"])
def test_sharded_by_lightning(case: str) -> None:
    expected = torch.load(DATA / "fsdp" / "expected.pt")
    folder = DATA / "fsdp" / case
    assert DcpSource.looks_like(folder)
    assert not DeepSpeedSource.looks_like(folder)
    source = DcpSource(folder)
    compare(source, expected["weights"], expected["state"])
    assert source.optimizers[0].groups == expected["groups"]
    assert source.meta["global_step"] == 3
    assert source.notes == []


def resident(path: Path) -> int:
    """Bytes of a file that this process has mapped and touched."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_reads_what_is_asked_for(tmp_path: Path) -> None:
    """Of 32 MiB, only the pages of a small tensor (and what the system reads around them) are touched."""
    big, small, numel = torch.Size([8 << 20]), torch.Size([3]), (8 << 20) + 3
    row, moment = torch.arange(float(numel)), torch.zeros(numel)
    inner = {"zero_stage": 2, "partition_count": [1], "group_paddings": [0], "single_partition_of_fp32_groups": [row]}
    groups = [{"lr": 0.1, "params": [0]}]
    inner["base_optimizer_state"] = {"state": {0: {"exp_avg": moment}}, "param_groups": groups}
    shapes = [{"big": big, "small": small}]
    torch.save({"module": {}, "param_shapes": shapes, "buffer_names": []}, tmp_path / "mp_rank_00_model_states.pt")
    file = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": inner}, file)
    source = DeepSpeedSource(tmp_path)
    assert source.read("small").tolist() == row[-3:].tolist()
    assert source.read_state(0, "small", "exp_avg").tolist() == [0, 0, 0]
    assert 0 < resident(file) < 4 << 20
    assert torch.equal(source.read("big"), row[:-3])
    assert resident(file) > 30 << 20


def test_names_errors(tmp_path: Path) -> None:
    source = DeepSpeedSource(checkpoint("stage1"))
    with pytest.raises(CheckpointError, match="'nothing'"):
        source.read("nothing")
    with pytest.raises(CheckpointError, match="'exp'"):
        source.read_state(0, "gain", "exp")
    with pytest.raises(CheckpointError, match="optimizer 1"):
        source.read_state(1, "gain", "exp_avg")
    with pytest.raises(CheckpointError, match="no such folder"):
        DeepSpeedSource(checkpoint("stage1"), tag="../stage2_bf16")


@pytest.mark.parametrize("lost", ["zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"])
def test_a_missing_file(tmp_path: Path, lost: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("stage1"), copy)
    (copy / "global_step4" / lost).unlink()
    with pytest.raises(CheckpointError, match="global_step4"):
        DeepSpeedSource(copy)


def test_frozen_parameters_that_were_left_out(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("stage3"), copy)
    for file in (copy / "global_step4").glob("*model_states.pt"):
        states = torch.load(file)
        states |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
        torch.save(states, file)
    source = DeepSpeedSource(copy)
    assert set(DeepSpeedSource(checkpoint("stage3")).weights) - set(source.weights) == {"frozen.weight"}
    assert source.notes == ["frozen.weight was not saved (exclude_frozen_parameters)."]


def test_files_of_two_runs(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("stage2_fp16"), copy)
    for file in (checkpoint("lightning_stage2") / "checkpoint").glob("mp_rank*"):
        shutil.copy(file, copy / "global_step4")
    shapes = torch.load(copy / "global_step4" / "mp_rank_00_model_states.pt")
    shapes["param_shapes"][0]["net.embed.weight"] = torch.Size([70, 5])
    torch.save(shapes, copy / "global_step4" / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="do not belong together"):
        DeepSpeedSource(copy)


def test_shrunk_while_open(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(DATA / "fsdp" / "fsdp", copy)
    source = DcpSource(copy)
    os.truncate(copy / "__1_0.distcp", 100)
    with pytest.raises(CheckpointError, match="__1_0.distcp"):
        source.read("body.weight")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 5)
        self.head = nn.Linear(5, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.tensor(2))


def test_single_files(tmp_path: Path) -> None:
    model = Tied()
    state = model.state_dict()
    wrapped = {f"module.{name}": value for name, value in state.items()}
    for number, legacy in enumerate((False, True)):
        path = tmp_path / f"{number}.pt"
        torch.save(wrapped, path, _use_new_zipfile_serialization=not legacy)
        assert FileSource.looks_like(path)
        source = FileSource(path)
        assert all(same(source.read(name), value) for name, value in state.items())
        assert source.aliases == {"head.weight": "embed.weight"}
        assert source.optimizers == ()
        assert source.meta == {}
    save_file({name: value.clone().bfloat16() for name, value in state.items()}, tmp_path / "a.safetensors")
    source = FileSource(tmp_path / "a.safetensors")
    assert source.weights["head.weight"] == Spec((3, 5), torch.bfloat16)
    assert same(source.read("embed.weight"), state["embed.weight"].bfloat16())
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        FileSource(tmp_path / "a.safetensors")


@pytest.mark.parametrize("named", [False, True])
def test_lightning_file(tmp_path: Path, named: bool) -> None:
    model = Tied()
    parameters: Any = model.named_parameters() if named else model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    model.head(model.embed(torch.arange(3))).sum().backward()
    optimizer.step()
    saved = {"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}, "epoch": 3}
    saved |= {"optimizer_states": [optimizer.state_dict()], "pytorch-lightning_version": "2.6.6"}
    if named:
        saved["optimizer_states"][0]["param_groups"][0]["param_names"] = ["module.embed.weight"]
    torch.save(saved, tmp_path / "a.ckpt")
    source = FileSource(tmp_path / "a.ckpt")
    assert source.meta == {"epoch": 3, "pytorch-lightning_version": "2.6.6"}
    assert "module.embed.weight" in source.weights  # Lightning 2 adds no prefix: it is the user's
    if not named:
        assert source.optimizers == ()
        assert "keyed by number" in source.notes[0]
        return
    wanted = optimizer.state[model.embed.weight]
    assert source.optimizers[0].groups[0]["params"] == ["module.embed.weight"]
    assert source.optimizers[0].state["module.embed.weight"]["step"] == 1
    assert same(source.read_state(0, "module.embed.weight", "exp_avg"), wanted["exp_avg"])
