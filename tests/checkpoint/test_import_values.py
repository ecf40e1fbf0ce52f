"""What an import takes over: weights, moments, scales, schedules and settings of optimizers."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.import_ import import_checkpoint
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.directory import PendingDirectory
from lt_zero.checkpoint.native.load import (
    as_lightning,
    check_schedule,
    number_states,
    require_training_state,
    settings_here,
)
from lt_zero.checkpoint.native.save import bundle, write
from lt_zero.checkpoint.open import open_source, verify
from lt_zero.common.errors import CheckpointError
from lt_zero.core.comm.world import World
from lt_zero.core.engine.lazy_tensor import Fragment
from lt_zero.optim.schedules import WarmupLR
from tests.support.import_tools import CASES, expected_of, imported, source_of
from tests.support.paths import DATA


@pytest.mark.parametrize("case", CASES)
def test_every_value_is_taken_over(case: str, tmp_path: Path) -> None:
    expected, out = expected_of(case), imported(case, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["imported"]
    assert verify(out)["imported_from"] == str(source_of(case))
    archive = Archive(str(out))
    assert set(archive.weights) == set(expected["weights"])
    for name, wanted in expected["weights"].items():
        got = archive.read(name)
        assert got.shape == wanted.shape, name
        assert torch.equal(got.double(), wanted.double()), name
    if case == "deepspeed/stage0":
        assert archive.optimizers == []
        return
    (saved,) = archive.optimizers
    assert archive.optimizers is archive.optimizers  # computed once
    assert set(saved.state) == set(expected["state"])
    for name, entries in expected["state"].items():
        for key, wanted in entries.items():
            got = saved.state[name][key] if key == "step" else archive.read_state(0, name, key)
            assert torch.equal(torch.as_tensor(got).double(), wanted.double()), (name, key)


def test_an_import_can_be_imported_and_exported(tmp_path: Path) -> None:
    first = imported("deepspeed/lightning_stage2", tmp_path)
    again = Path(import_checkpoint(first, tmp_path / "again"))
    one, two = Archive(str(first)), Archive(str(again))
    assert one.weights == two.weights
    assert one.aliases == two.aliases == {"net.head.weight": "net.embed.weight"}
    assert one.optimizers[0].groups == two.optimizers[0].groups
    assert torch.equal(one.read_state(0, "net.gain", "exp_avg"), two.read_state(0, "net.gain", "exp_avg"))
    kept = [{k: v for k, v in archive.meta.items() if k != "lt_zero"} for archive in (one, two)]
    assert kept[0] == kept[1]
    assert kept[0]["hyper_parameters"] == {"width": 5}
    (file,) = export(again, tmp_path / "model.ckpt", "fp32", training_state=True)
    content = torch.load(file, weights_only=True)
    assert content["global_step"] == 3
    assert content["optimizer_states"][0]["state"][0]["step"] == 3


def test_sharded_tensors_in_an_ordered_dict(tmp_path: Path) -> None:
    """A module's state dict is one, so callbacks that average weights save them in one."""
    values, world = torch.arange(6.0), World(None, torch.device("cpu"))
    averaged = OrderedDict(w=Fragment(lambda: values, (2, 3), 0, 6, torch.float32))
    made = bundle({"state_dict": {}, "averaging_state": averaged}, [], world, {}, {})
    write(made, PendingDirectory.make(str(tmp_path / "saved")), world, None)
    again = open_source(import_checkpoint(tmp_path / "saved", tmp_path / "again"))
    assert torch.equal(as_lightning(again)["averaging_state"]["w"] + 0, values.view(2, 3))


def test_loss_scale_of_fsdp(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(DATA / "fsdp" / "fsdp", copy)
    meta = torch.load(copy / "meta.pt", weights_only=False)
    torch.save({**meta, "FSDPPrecision": {"scale": 64.0, "_growth_tracker": 3}}, copy / "meta.pt")
    with pytest.warns(UserWarning, match="without checksums"):
        out = import_checkpoint(copy, tmp_path / "out")
    assert Archive(out).meta["MixedPrecision"]["scale"] == 64.0


def test_schedules_of_deepspeed_itself(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source_of("deepspeed/stage1"), copy)
    (file,) = copy.glob("*/mp_rank_00_model_states.pt")
    for number, state in enumerate(({"last_batch_iteration": 4}, {"last_epoch": 4})):
        torch.save({**torch.load(file, weights_only=False), "lr_scheduler": state}, file)
        with pytest.warns(UserWarning, match="saved states of schedulers"):
            out = import_checkpoint(copy, tmp_path / f"out{number}")
        assert Archive(out).meta["lr_schedulers"] == [state]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    check_schedule({"last_batch_iteration": 4}, WarmupLR(optimizer), "x")
    check_schedule({"last_epoch": 4}, torch.optim.lr_scheduler.StepLR(optimizer, 1), "x")
    with pytest.raises(CheckpointError, match="iteration 4, which StepLR cannot take.*load_lr_scheduler_states=false"):
        check_schedule({"last_batch_iteration": 4}, torch.optim.lr_scheduler.StepLR(optimizer, 1), "x")


def test_what_users_of_deepspeed_saved_is_not_taken_for_lightnings(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source_of("deepspeed/stage1"), copy)
    (file,) = copy.glob("*/mp_rank_00_model_states.pt")
    odd = {"loops": {"fit_loop": 1}, "callbacks": 2, "hyper_parameters": 3, "lt_zero": 4, "optimizer_states": [5]}
    torch.save({**torch.load(file, weights_only=False), **odd, "epoch": "third"}, file)
    source = open_source(copy)
    with pytest.raises(CheckpointError, match="no loops"):
        require_training_state(as_lightning(source), True)
    with pytest.warns(UserWarning, match="epoch 0"):
        out = import_checkpoint(copy, tmp_path / "out")
    meta = Archive(out).meta
    assert meta["loops"]["fit_loop"]["epoch_progress"]["current"]["ready"] == 0
    assert not {"callbacks", "hyper_parameters", "optimizer_states"} & set(meta)
    assert meta["note"] == "client state"


# ---- optimizers --------------------------------------------------------------------------------------------------


def test_settings_of_another_class() -> None:
    running = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=1.0, fused=True).param_groups
    fused_adam = {"lr": 0.1, "bias_correction": True, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    saved = [{**fused_adam, "initial_lr": 0.3, "adam_w_mode": 1, "foreach": True, "fused": None, "params": ["a"]}]
    groups, dropped = settings_here(saved, running)
    kept = {key: groups[0][key] for key in ("lr", "betas", "eps", "weight_decay", "initial_lr", "params")}
    assert kept == {
        **{k: v for k, v in fused_adam.items() if k != "bias_correction"},
        "initial_lr": 0.3,
        "params": ["a"],
    }
    assert groups[0].keys() == running[0].keys() | {"initial_lr"}
    assert groups[0]["fused"] is True
    assert dropped == ["adam_w_mode=1"]
    assert settings_here([{"params": [], "bias_correction": False}], running)[1] == ["bias_correction=False"]
    assert len(settings_here([*saved, *saved], running)[0]) == 2  # the difference is reported elsewhere


def test_frozen_parameters_need_no_saved_state() -> None:
    saved = {"state": {"a": {"step": 1}}, "param_groups": [{"params": ["a"], "lr": 0.1}]}
    with pytest.raises(CheckpointError, match="only in the model: b"):
        number_states(saved, [["b", "a"]], 0)
    found = number_states(saved, [["b", "a"]], 0, frozen=["b"])
    assert found == {"state": {1: {"step": 1}}, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
    gone = {**saved, "param_groups": [{"params": ["a", "b"]}]}
    assert number_states(gone, [["a"]], 0, frozen=["b"])["param_groups"] == [{"params": [0]}]
    with pytest.raises(CheckpointError, match="only in the checkpoint: a"):  # has moments, which would be lost
        number_states(saved, [[]], 0, frozen=["a"])
    with pytest.raises(CheckpointError, match="states of c"):
        number_states({**saved, "state": {"c": {}}}, [["a"]], 0)
