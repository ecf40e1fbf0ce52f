"""Universal folders for DeepSpeed hold what was exported, in DeepSpeed's layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.open import open_source
from lt_zero.checkpoint.source import SavedOptimizer, Spec
from lt_zero.cli import app
from lt_zero.common.errors import CheckpointError
from tests.support.import_tools import source_of

FORMAT: Any = "deepspeed-universal"
STAGE1 = source_of("deepspeed/stage1")


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_states_come_back(tmp_path: Path) -> None:
    command = ["export", str(STAGE1), str(tmp_path), "--format", FORMAT, "--dtype", "fp32", "--training-state"]
    assert CliRunner().invoke(app, command).exit_code == 0
    one, two = open_source(STAGE1), open_source(tmp_path)
    assert two.weights == one.weights  # also tied ones, and an integer
    assert two.aliases == one.aliases
    for name in one.weights:
        assert torch.equal(one.read(name), two.read(name)), name
    (old,), (new,) = one.optimizers, two.optimizers
    assert new.groups == old.groups
    assert new.state == old.state
    for name, entries in old.state.items():
        for key in (key for key, value in entries.items() if isinstance(value, Spec)):
            assert torch.equal(one.read_state(0, name, key), two.read_state(0, name, key)), (name, key)
    assert two.meta == one.meta == {"epoch": 2, "note": "client state"}


def test_the_layout_is_that_of_deepspeed(tmp_path: Path) -> None:
    """As ``ds_to_universal.py`` of 0.19.8 writes it; DeepSpeed itself has read such folders on one and two ranks."""
    export(STAGE1, tmp_path, "fp32", FORMAT, training_state=True)
    tag = (tmp_path / "latest_universal").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [tag, "latest_universal"]
    zero = tmp_path / tag / "zero"
    names = {"embed.weight", "body.weight", "body.bias", "gain", "norm.weight", "norm.bias", "frozen.bias"}
    assert {path.name for path in zero.iterdir()} == {*names, "optimizer_state.pt"}
    assert {path.name for path in (zero / "gain").iterdir()} == {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt"}
    fp32, step = load(zero / "body.weight" / "fp32.pt"), load(zero / "body.weight" / "step.pt")
    assert fp32["param"].shape == (9, 5)
    assert fp32["cat_dim"] == 0
    assert step == 4.0
    settings = load(zero / "optimizer_state.pt")
    assert [group["step"] for group in settings["param_groups"]] == [4, 4]  # fused optimizers count here
    assert [group["weight_decay"] for group in settings["param_groups"]] == [0.1, 0.0]
    assert settings["optimizer_state_dict"]["state"][0]["step"] == 4  # stage 3
    models = [load(tmp_path / tag / f"{kind}mp_rank_00_model_states.pt") for kind in ("", "zero_pp_rank_0_")]
    for model in models:
        counted = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size")
        assert [model[key] for key in counted] == [4, 32, 0, 1, 1]
        assert set(model["module"]) == {"frozen.weight", "mean", "calls"}


def test_weights_alone_come_with_a_new_optimizer(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(STAGE1, out, "fp32", FORMAT)
    (folder,) = out.glob("*/zero/body.weight")
    moment = folder / "exp_avg.pt"
    assert not load(moment)["param"].any()
    assert load(moment)["param"].shape == (9, 5)
    assert load(folder / "step.pt") == 0
    one, two = open_source(STAGE1), open_source(out)
    assert two.optimizers == ()
    assert set(two.weights) == set(one.weights)
    assert all(torch.equal(one.read(name).float(), two.read(name).float()) for name in one.weights)
    with pytest.raises(CheckpointError, match="no optimizer states"):
        export(out, tmp_path / "again", "fp32", FORMAT, training_state=True)


def test_a_folder_is_replaced_on_request(tmp_path: Path) -> None:
    export(STAGE1, tmp_path, "fp32", FORMAT)
    (tmp_path / "notes.txt").write_text("kept")
    with pytest.raises(CheckpointError, match=r"has a universal checkpoint \(global_step4_universal\).*--overwrite"):
        export(STAGE1, tmp_path, "fp32", FORMAT, training_state=True)
    assert open_source(tmp_path).optimizers == ()
    export(STAGE1, tmp_path, "fp32", FORMAT, training_state=True, overwrite=True)
    assert len(open_source(tmp_path).optimizers) == 1
    (tmp_path / "latest_universal").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="has a universal checkpoint"):
        export(STAGE1, tmp_path, "fp32", FORMAT)
    (tmp_path / "latest_universal").write_text("global_step4_universal")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step4_universal", "latest_universal", "notes.txt"]


class Made:
    """A checkpoint of two parameters, one of them perhaps without states."""

    meta: Mapping[str, Any] = {"global_step": 3}
    aliases: Mapping[str, str] = {}

    def __init__(
        self, second: dict[str, Any], names: tuple[str, str] = ("net.a", "net.b"), optimizers: int = 1
    ) -> None:
        spec = Spec((2,), torch.float32)
        self.weights = dict.fromkeys(names, spec)
        state = {names[0]: {"step": 3, "exp_avg": spec, "exp_avg_sq": spec}, names[1]: second}
        self.optimizers = [SavedOptimizer([{"lr": 0.5, "params": list(names)}], state)] * optimizers

    def read(self, name: str) -> Tensor:
        return torch.ones(2)

    def read_state(self, optimizer: int, name: str, key: str) -> Tensor:
        return torch.full((2,), 2.0)


@pytest.mark.parametrize("key", ["../../../../stranger", "/tmp/stranger", "fp32", "step"])
def test_a_state_that_names_no_file_writes_none(key: str, tmp_path: Path) -> None:
    """Names of states come from the checkpoint: none may lead out of the folder, or to the file of another."""
    spec = Spec((2,), torch.float32)
    with pytest.raises(CheckpointError, match=f"The state '{key}' of net.b cannot name a file"):
        export(Made({"exp_avg": spec, key: spec}), tmp_path / "out", "fp32", FORMAT, training_state=True)
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_without_states_gets_those_of_deepspeed(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"net\.b have no optimizer states"):
        export(Made({}), tmp_path, "fp32", FORMAT, training_state=True, strip_prefix="net.")
    (zero,) = tmp_path.glob("*/zero")
    assert load(zero / "a" / "exp_avg.pt")["param"].tolist() == [2, 2]
    assert load(zero / "b" / "exp_avg.pt")["param"].tolist() == [0, 0]
    assert load(zero / "b" / "step.pt") == 3


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"second": {"step": 2}}, {}, r"different numbers of steps \(net.a 3, net.b 2\)"),
    ({"second": {}, "optimizers": 2}, {}, "states of 2 optimizers"),
    ({"second": {}, "names": ("a/b", "c")}, {}, "cannot name a folder"),
    ({"second": {}}, {"dtype": "bf16"}, "add --dtype fp32"),
    ({"second": {}}, {"shard_size": "1GB"}, "Leave out shard_size"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_deepspeed_could_not_read_is_refused(number: int, tmp_path: Path) -> None:
    made, options, told = REFUSED[number]
    with pytest.raises((CheckpointError, ValueError), match=told):
        export(Made(**made), tmp_path / "out", **{"dtype": "fp32", "format": FORMAT, "training_state": True} | options)
    assert list(tmp_path.iterdir()) == []
