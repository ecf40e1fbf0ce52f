"""Checkpoints of others become directories of ours, and training goes on from either as if it had never stopped."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from typer.testing import CliRunner

import lt_zero
from lt_zero import ZeroPrecision
from lt_zero.checkpoint import output
from lt_zero.checkpoint.archive import Archive
from lt_zero.checkpoint.deepspeed import DeepSpeedSource
from lt_zero.checkpoint.errors import CheckpointError
from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.fsdp import DcpSource
from lt_zero.checkpoint.importing import import_checkpoint
from lt_zero.checkpoint.load import as_lightning, number_states
from lt_zero.checkpoint.onefile import FileSource
from lt_zero.checkpoint.open import open_source
from lt_zero.checkpoint.resuming import require_training_state, settings_here
from lt_zero.checkpoint.shards import ShardsSource
from lt_zero.checkpoint.verify import verify
from lt_zero.cli import app
from tests.lightning_tools import sharded_trainer
from tests.pool import Pool, WorkerError

DATA = Path(__file__).parent / "data"
CASES = sorted(str(file.parent.relative_to(DATA)) for file in DATA.glob("deepspeed/*/expected.pt"))
CASES += ["fsdp/fsdp", "fsdp/model_parallel"]
OPTIONS: dict[str, Any] = {"use_distributed_sampler": False}


def source_of(case: str) -> Path:
    folder = DATA / case
    return folder / "last" if (folder / "last").is_dir() else folder


def expected_of(case: str) -> dict[str, Any]:
    folder = DATA / case
    found: dict[str, Any] = torch.load((folder.parent if case.startswith("fsdp") else folder) / "expected.pt")
    return found


def imported(case: str, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Path(import_checkpoint(source_of(case), folder / "imported"))


def makers(kind: str) -> Any:
    """The module that made the fixtures: its model and its groups."""
    spec = importlib.util.spec_from_file_location(f"make_{kind}", DATA / kind / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- values ------------------------------------------------------------------------------------------------------


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


# ---- resuming ----------------------------------------------------------------------------------------------------


def tokens(rank: int) -> Tensor:
    return torch.randint(7, (4,), generator=torch.Generator().manual_seed(100 + rank))


def module_for(case: str, everything: bool = False, rate: float = 0.5) -> pl.LightningModule:
    """The fixture's model. ``everything``: the optimizer also gets the frozen parameter; ``rate`` is to be replaced."""
    make = makers(case.split("/")[0])
    sgd = case == "deepspeed/stage3"

    def configure(self: nn.Module) -> Any:
        groups = make.groups(self)
        if everything:
            groups[0]["params"] = [p for p in self.parameters() if p.dim() > 1]
        groups = [{**group, "weight_decay": 0.7} for group in groups]
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(groups, lr=rate, momentum=0.5) if sgd else torch.optim.AdamW(groups, lr=rate)
        )
        if "lightning" not in case:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    def training_step(self: nn.Module, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = (self.net if "lightning" in case else self)(batch)
        return loss

    hooks = {"configure_optimizers": configure, "training_step": training_step, "validation_step": training_step}
    torch.manual_seed(99)
    if case.startswith("fsdp"):
        kind = type("Sharded", (make.Module,), {"configure_model": lambda self: None})
        return kind()
    if "lightning" not in case:
        return type("Plain", (make.Tiny, pl.LightningModule), hooks)()

    class Wrapped(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make.Tiny()

    return type("Module", (Wrapped,), hooks)()


def resume(case: str, path: str, steps: int, config: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """One more step from ``path``; the weights, moments and settings after it (rank 0)."""
    stage = int(re.sub(r".*stage(\d).*|.*", r"\1", case) or 3)
    module = module_for(case, **how)
    trainer = sharded_trainer(stage, None, config, max_steps=steps, max_epochs=9, **OPTIONS)
    batch = tokens(dist.get_rank())
    trainer.fit(module, torch.utils.data.DataLoader([batch], batch_size=None), ckpt_path=path)
    assert trainer.global_step == steps
    (optimizer,) = trainer.optimizers
    moments = trainer.strategy.optimizer_state(optimizer)
    weights = trainer.strategy.full_state_dict()
    return {
        "epoch": trainer.current_epoch,
        "weights": {name: value.numpy() for name, value in weights.items()},
        "moments": moments if "format" in str(config) else None,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }


def reference(case: str) -> dict[str, Tensor]:
    """One more step by plain torch in one process, from what the fixture is known to hold."""
    make, expected = makers("deepspeed"), expected_of(case)
    model = make.Tiny()
    model.load_state_dict(expected["weights"])
    groups = make.groups(model)
    kind = torch.optim.SGD if case == "deepspeed/stage3" else torch.optim.AdamW
    settings = {"lr": 0.05, "momentum": 0.9} if case == "deepspeed/stage3" else make.ADAMW
    optimizer = kind(groups, **settings)
    for name, parameter in model.named_parameters():
        if name in expected["state"]:
            optimizer.state[parameter] = {key: value.clone() for key, value in expected["state"][name].items()}
            if kind is torch.optim.AdamW:
                optimizer.state[parameter]["step"] = torch.tensor(4.0)
    for rank in range(2):
        (model(tokens(rank)) / 2).backward()
    optimizer.step()
    return dict(model.named_parameters())


def same_weights(one: dict[str, Any], two: dict[str, Any], exact: bool = True) -> None:
    assert one.keys() == two.keys()
    for name in one:
        if exact:
            np.testing.assert_array_equal(one[name], two[name], err_msg=name)
        else:
            np.testing.assert_allclose(one[name], two[name], rtol=1e-5, atol=1e-6, err_msg=name)


PLAIN = [case for case in CASES if case.startswith("deepspeed/stage") and not case.endswith(("stage0", "fp16"))]


@pytest.mark.parametrize("case", PLAIN)
def test_resuming_an_import_of_plain_deepspeed(case: str, tmp_path: Path, pool: Pool) -> None:
    out = imported(case, tmp_path)
    elastic = case.endswith("elastic")  # has no settings: those of the run hold
    how = {"everything": True} | ({"rate": 1e-2} if elastic else {})
    found = pool.run(2, resume, case, str(out), 5, {}, how)[0]
    assert found["epoch"] == 3  # began epoch 2, which is over
    if elastic:
        assert [group["weight_decay"] for group in found["groups"]] == [0.7, 0.7]
        return
    assert [group["weight_decay"] for group in found["groups"]] == [0.1, 0.0]
    wanted = reference(case)
    names = [name for name in found["weights"] if name in wanted]
    assert len(names) == 8
    same_weights(
        {name: found["weights"][name] for name in names},
        {name: wanted[name].detach().numpy() for name in names},
        exact=False,
    )


@pytest.mark.parametrize("case", ["deepspeed/lightning_stage2", "deepspeed/lightning_stage3_bf16", "fsdp/fsdp"])
def test_resuming_directly_is_resuming_an_import(case: str, tmp_path: Path, pool: Pool) -> None:
    out = imported(case, tmp_path)
    how = {"everything": True} if "lightning" in case else {}
    direct = pool.run(2, resume, case, str(source_of(case)), 4, {}, how)[0]
    ours = pool.run(2, resume, case, str(out), 4, {}, how)[0]
    same_weights(direct["weights"], ours["weights"])
    assert direct["groups"] == ours["groups"]
    assert direct["schedules"] == ours["schedules"]
    assert direct["schedules"][0]["last_epoch"] == 2
    assert direct["groups"][0]["lr"] == pytest.approx(1e-3)  # StepLR(2) of 1e-2, not of what the run has
    assert direct["groups"][0]["initial_lr"] == 1e-2
    old = expected_of(case)["weights"]
    assert any(not np.array_equal(direct["weights"][name], old[name].numpy()) for name in old)


@pytest.mark.parametrize(
    "case", ["deepspeed/stage0", "deepspeed/stage1_bf16", "deepspeed/stage2_bf16", "deepspeed/stage3_bf16"]
)
def test_the_weights_alone(case: str, tmp_path: Path, pool: Pool) -> None:
    config = {"checkpoint": {"load_module_only": True}}
    paths = [str(source_of(case)), str(imported(case, tmp_path))]
    direct, ours = (pool.run(2, resume, case, path, 1, config, {"rate": 1e-2})[0] for path in paths)
    same_weights(direct["weights"], ours["weights"])
    assert direct["epoch"] == 1
    frozen = expected_of(case)["weights"]["frozen.weight"].float().numpy()
    np.testing.assert_array_equal(direct["weights"]["frozen.weight"], frozen)


def test_a_stage_0_import_goes_on_with_fresh_optimizers(tmp_path: Path, pool: Pool) -> None:
    out = str(imported("deepspeed/stage0", tmp_path))
    with pytest.raises(WorkerError, match=r"no optimizer states.*checkpoint\.load_optimizer_states=false"):
        pool.run(2, resume, "deepspeed/stage0", out, 5, {}, {})
    config = {"checkpoint": {"load_optimizer_states": False}}
    assert pool.run(2, resume, "deepspeed/stage0", out, 5, config, {})[0]["epoch"] == 3


def test_what_has_no_loops_says_what_to_do(pool: Pool) -> None:
    path = str(source_of("deepspeed/stage2_bf16"))
    with pytest.raises(WorkerError, match=r"no loops.*load_module_only=true.*`lt-zero import`") as error:
        pool.run(2, resume, "deepspeed/stage2_bf16", path, 5, {}, {})
    assert "KeyError" not in str(error.value)


def validate(path: str) -> dict[str, Any]:
    trainer = sharded_trainer(2, **OPTIONS)
    module = module_for("deepspeed/stage2_bf16")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.validate(module, torch.utils.data.DataLoader([tokens(0)], batch_size=None), path, verbose=False)
    told = [str(warning.message) for warning in caught if "elastic_checkpoint" in str(warning.message)]
    return {"weight": module.body.weight.detach().clone(), "told": told}


def test_validating(pool: Pool) -> None:
    case = "deepspeed/stage2_elastic"
    found = pool.run(2, validate, str(source_of(case)))
    assert [len(rank["told"]) for rank in found] == [1, 0]
    assert all(torch.equal(rank["weight"], expected_of(case)["weights"]["body.weight"]) for rank in found)


def scale_of(path: str) -> tuple[dict[str, Any], int]:
    trainer = sharded_trainer(
        2, None, {"fp16": {"hysteresis": 2}}, max_steps=15, plugins=[ZeroPrecision("16-mixed")], **OPTIONS
    )
    seen: list[Any] = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
            gate = trainer.precision_plugin.gate
            seen.append((gate.scaler.state_dict(), gate.counter(0).skipped))

    trainer.callbacks.append(Look())
    trainer.fit(
        module_for("deepspeed/stage2_fp16"),
        torch.utils.data.DataLoader([tokens(dist.get_rank())], batch_size=None),
        ckpt_path=path,
    )
    return seen[0]


def test_the_loss_scale_goes_on(tmp_path: Path, pool: Pool) -> None:
    case = "deepspeed/stage2_fp16"
    wanted = expected_of(case)["scaler"]
    scaler, skipped = pool.run(2, scale_of, str(imported(case, tmp_path)))[0]
    assert scaler["scale"] == wanted["cur_scale"]
    assert scaler["steps"] == wanted["cur_iter"] == 14
    assert scaler["last_overflow"] == wanted["last_overflow_iter"]
    assert skipped == 8


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
    for state, kept in (({"last_batch_iteration": 4}, []), ({"last_epoch": 4}, [{"last_epoch": 4}])):
        torch.save({**torch.load(file, weights_only=False), "lr_scheduler": state}, file)
        with pytest.warns(UserWarning, match="saved states of schedules" if kept else "fresh schedules") as told:
            out = import_checkpoint(copy, tmp_path / f"out{len(kept)}")
        assert Archive(out).meta["lr_schedulers"] == kept
        assert any("own schedules" in str(warning.message) for warning in told) != bool(kept)


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
    with pytest.raises(CheckpointError, match="only here: b"):
        number_states(saved, [["b", "a"]], 0)
    found = number_states(saved, [["b", "a"]], 0, frozen=["b"])
    assert found == {"state": {1: {"step": 1}}, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
    gone = {**saved, "param_groups": [{"params": ["a", "b"]}]}
    assert number_states(gone, [["a"]], 0, frozen=["b"])["param_groups"] == [{"params": [0]}]
    with pytest.raises(CheckpointError, match="only there: a"):  # has moments, which would be lost
        number_states(saved, [[]], 0, frozen=["a"])
    with pytest.raises(CheckpointError, match="states of c"):
        number_states({**saved, "state": {"c": {}}}, [["a"]], 0)


# ---- what is there -----------------------------------------------------------------------------------------------


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


def test_unknown_things_say_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("hello")
    for path in (tmp_path / "folder", tmp_path / "folder" / "notes.txt"):
        with pytest.raises(
            CheckpointError, match=r"Looked for .*manifest\.json.*model_states\.pt.*\.metadata.*safeten"
        ):
            open_source(path)
    with pytest.raises(CheckpointError, match="no such file"):
        open_source(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no tags"):
        open_source(DATA / "fsdp" / "fsdp", tag="x")
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
    assert isinstance(source, ShardsSource)
    assert set(source.weights) == set(model.state_dict())
    assert source.aliases == {"head.weight": "embed.weight"}
    assert all(torch.equal(source.read(name), value) for name, value in model.state_dict().items())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = import_checkpoint(tmp_path / "folder", tmp_path / "out")
    assert torch.equal(Archive(out).read("head.weight"), model.head.weight)


def test_hugging_face_folders_that_are_not_whole(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for places, text in (
        ({"a": "../one.safetensors"}, "no file beside it"),
        ({"a": "two.safetensors"}, r"two\.safetensors"),
        ({"b": "one.safetensors"}, "has no 'b'"),
        ({}, "names no tensors"),
    ):
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(CheckpointError, match=text):
            open_source(tmp_path)
    index.write_text("{")
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


# ---- the commands ------------------------------------------------------------------------------------------------


def call(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.stdout, result.stderr


def test_commands(tmp_path: Path) -> None:
    code, said, told = call("import", source_of("deepspeed/stage1"), tmp_path / "out", "--tag", "global_step4")
    assert (code, told.count("Warning:")) == (0, 1)
    assert "step 4 with the beginning of epoch 2" in told
    assert str(tmp_path / "out") in said
    code, said, told = call("verify", tmp_path / "out" / "meta.pt")
    assert (code, told) == (0, "")
    for line in ("ranks: 1", "step: 4", "epoch: 2", "optimizers: 1", "every byte is what was written"):
        assert line in said
    assert re.search(r"bytes: \d+ bytes", said)
    code, _, told = call("import", source_of("deepspeed/stage1"), tmp_path / "out")
    assert (code, "is there already" in told) == (1, True)
    code, _, told = call("import", source_of("deepspeed/stage1"), tmp_path / "new", "--tag", "other")
    assert (code, "'other'" in told) == (1, True)
    code, _, told = call("verify", source_of("deepspeed/stage1"))
    assert (code, "lt-zero import" in told) == (1, True)
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    "file", ["weights-00000.pt", "moments-00000.pt", "meta.pt", ".metadata", "manifest.json", "extras.pt"]
)
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
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
import re, sys, warnings
from pathlib import Path
import lt_zero.checkpoint.importing as importing
# Not ru_maxrss: a process has that of the one that started it.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")  # the peak is what is in use now
before = peak()
warnings.simplefilter("ignore")
importing.import_checkpoint(sys.argv[1], sys.argv[2])
print(peak() - before)
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
