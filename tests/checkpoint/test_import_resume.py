"""Training goes on from checkpoints of others, and from imports of them, as if it had never stopped."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typer.testing import CliRunner

import lt_zero
from lt_zero import CheckpointError, ZeroPrecision
from lt_zero.checkpoint.import_ import import_checkpoint
from lt_zero.checkpoint.native.full_states import full_optimizer_state
from lt_zero.cli import app
from lt_zero.optim.schedules import WarmupLR
from lt_zero.training.lightning.precision import sharded_of
from tests.support.import_tools import CASES, expected_of, imported, makers, module_for, source_of
from tests.support.lightning_tools import sharded_trainer
from tests.support.matrix import only
from tests.support.pool import Pool, WorkerError

OPTIONS: dict[str, Any] = {"use_distributed_sampler": False}


def tokens(rank: int) -> Tensor:
    return torch.randint(7, (4,), generator=torch.Generator().manual_seed(100 + rank))


def states_of(optimizer: Any, module: pl.LightningModule) -> dict[str, dict[str, Any]]:
    """The full optimizer states by the parameters' names, as numpy arrays; {} on other ranks than 0. Collective."""
    sharded = sharded_of(optimizer)
    assert sharded is not None
    names = {id(p): name for name, p in module.named_parameters()}
    numbered = [names[id(p)] for p in sharded.parameters()]
    states = full_optimizer_state(sharded).get("state", {})
    return {
        numbered[number]: {key: torch.as_tensor(value).numpy() for key, value in state.items()}
        for number, state in states.items()
    }


def resume(case: str, path: str, steps: int, config: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """One more step from ``path``; the weights, optimizer states (by name) and settings after it (rank 0)."""
    stage = int(re.sub(r".*stage(\d).*|.*", r"\1", case) or 3)
    module = module_for(case, **how)
    trainer = sharded_trainer(stage, None, config, max_steps=steps, max_epochs=9, **OPTIONS)
    batch = tokens(dist.get_rank())
    trainer.fit(module, torch.utils.data.DataLoader([batch], batch_size=None), ckpt_path=path)
    assert trainer.global_step == steps
    (optimizer,) = trainer.optimizers
    weights = trainer.strategy.full_state_dict()
    return {
        "epoch": trainer.current_epoch,
        "weights": {name: value.numpy() for name, value in weights.items()},
        "states": states_of(optimizer, module),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }


def reference(case: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Weights and optimizer states by name, as numpy arrays: one more step by plain torch in one process."""
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
    named = dict(model.named_parameters())
    states = {name: {key: value.numpy() for key, value in optimizer.state[p].items()} for name, p in named.items()}
    return {name: p.detach().numpy() for name, p in named.items()}, states


def same(one: dict[str, Any], two: dict[str, Any], exact: bool = True) -> None:
    assert one.keys() == two.keys()
    for name in one:
        if exact:
            np.testing.assert_array_equal(one[name], two[name], err_msg=name)
        else:
            np.testing.assert_allclose(one[name], two[name], rtol=1e-5, atol=1e-6, err_msg=name)


def same_states(one: dict[str, Any], two: dict[str, Any], exact: bool = True) -> None:
    assert one.keys() == two.keys()
    for name in one:
        same(
            {f"{key} of {name}": value for key, value in one[name].items()},
            {f"{key} of {name}": value for key, value in two[name].items()},
            exact,
        )


PLAIN = [case for case in CASES if case.startswith("deepspeed/stage") and not case.endswith(("stage0", "fp16"))]


@pytest.mark.parametrize("case", only(["deepspeed/stage1", "deepspeed/stage3_bf16"], PLAIN))
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
    weights, states = reference(case)
    assert len(weights) == 8
    kinds = {"momentum_buffer"} if case == "deepspeed/stage3" else {"step", "exp_avg", "exp_avg_sq"}
    trained = {name: state for name, state in states.items() if state}
    assert len(trained) == 7
    assert all(state.keys() == kinds for state in trained.values())
    same_states({name: found["states"][name] for name in trained}, trained, exact=False)
    same({name: found["weights"][name] for name in weights}, weights, exact=False)


@pytest.mark.parametrize(
    "case", only(["fsdp/fsdp"], ["deepspeed/lightning_stage2", "deepspeed/lightning_stage3_bf16", "fsdp/fsdp"])
)
def test_resuming_directly_is_resuming_an_import(case: str, tmp_path: Path, pool: Pool) -> None:
    out = imported(case, tmp_path)
    how = {"everything": True} if "lightning" in case else {}
    direct = pool.run(2, resume, case, str(source_of(case)), 4, {}, how)[0]
    ours = pool.run(2, resume, case, str(out), 4, {}, how)[0]
    same(direct["weights"], ours["weights"])
    same_states(direct["states"], ours["states"])
    assert {float(state["step"]) for state in direct["states"].values()} == {4.0}  # 3 before, 1 here
    assert direct["groups"] == ours["groups"]
    assert direct["schedules"] == ours["schedules"]
    assert direct["schedules"][0]["last_epoch"] == 2
    assert direct["groups"][0]["lr"] == pytest.approx(1e-3)  # StepLR(2) of 1e-2, not of what the run has
    assert direct["groups"][0]["initial_lr"] == 1e-2
    old = expected_of(case)["weights"]
    assert any(not np.array_equal(direct["weights"][name], old[name].numpy()) for name in old)


@pytest.mark.parametrize(
    "case",
    only(
        ["deepspeed/stage3_bf16"], [f"deepspeed/{s}" for s in ("stage0", "stage1_bf16", "stage2_bf16", "stage3_bf16")]
    ),
)
def test_the_weights_alone(case: str, tmp_path: Path, pool: Pool) -> None:
    config = {"checkpoint": {"load_module_only": True}}
    paths = [str(source_of(case)), str(imported(case, tmp_path))]
    direct, ours = (pool.run(2, resume, case, path, 1, config, {"rate": 1e-2})[0] for path in paths)
    same(direct["weights"], ours["weights"])
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
            gate = trainer.precision_plugin.loss_scale_controller
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


# ---- schedules of DeepSpeed, its engine's counters, models saved by themselves -----------------------------------

WARMUP = {"warmup_max_lr": 0.01, "warmup_num_steps": 8, "warmup_type": "linear"}


def with_schedule(folder: Path, stage: str) -> Path:
    """A checkpoint of 4 steps under DeepSpeed's WarmupLR, as 0.19.8 writes it."""
    copy = Path(shutil.copytree(source_of(f"deepspeed/{stage}"), folder / stage))
    for file in copy.glob("*/*mp_rank_00_model_states.pt"):
        torch.save({**torch.load(file, weights_only=False), "lr_scheduler": {"last_batch_iteration": 3}}, file)
    return copy


def in_a_loop(path: str, out: str) -> dict[str, Any]:
    model = makers("deepspeed").Tiny()
    optimizer = torch.optim.AdamW(makers("deepspeed").groups(model), lr=0.5)
    config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 4}
    engine, _, _, schedule = lt_zero.initialize(
        model=model, optimizer=optimizer, lr_scheduler=lambda o: WarmupLR(o, **WARMUP), config=config
    )
    found, client = engine.load_checkpoint(path)
    assert found == f"{path}/global_step4"
    counts = [engine.global_steps, engine.micro_steps, engine.global_samples]
    rates = []
    for _ in range(3):
        engine.backward(engine(tokens(dist.get_rank())))
        engine.step()
        rates.append(engine.get_lr()[0])
    engine.save_checkpoint(out, "ours")
    plain = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    engine.lr_scheduler = plain
    with pytest.raises(CheckpointError, match="iteration 3, which StepLR cannot take"):
        engine.load_checkpoint(path)
    return {"client": client, "counts": counts, "rates": rates, "last": schedule.last_epoch}


def test_a_loop_goes_on_from_a_checkpoint_of_deepspeed(tmp_path: Path, pool: Pool) -> None:
    path = with_schedule(tmp_path, "stage1")
    for found in pool.run(2, in_a_loop, str(path), str(tmp_path / "out")):
        assert found["client"] == {"epoch": 2, "note": "client state"}
        assert found["counts"] == [4, 4, 32]
        assert found["rates"] == pytest.approx([0.005, 0.00625, 0.0075])  # DeepSpeed's iterations 4, 5, 6 of 8
        assert found["last"] == 7


def under_an_attribute(path: str, steps: int, **options: Any) -> dict[str, Any]:
    """A LightningModule whose ``model`` is what was saved by itself."""
    make = makers("deepspeed")

    class Outer(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make.Tiny()
            self.rates: list[float] = []

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            self.rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
            loss: Tensor = self.model(batch)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(make.groups(self.model), lr=0.5)
            return [optimizer], [{"scheduler": WarmupLR(optimizer, **WARMUP), "interval": "step"}]  # type: ignore[arg-type]

    module = Outer()
    trainer = sharded_trainer(2, None, {}, max_steps=steps, max_epochs=9, **OPTIONS)
    loader = torch.utils.data.DataLoader([tokens(dist.get_rank())] * 2, batch_size=None)
    trainer.fit(module, loader, ckpt_path=path)
    weights = trainer.strategy.full_state_dict()
    (state,) = [states_of(optimizer, module) for optimizer in trainer.optimizers]
    first = next(iter(state.values()), {"step": np.array(0)})
    return {"rates": module.rates, "weights": {n: w.numpy() for n, w in weights.items()}, "step": float(first["step"])}


def test_a_model_saved_by_itself_resumes_under_a_lightning_module(tmp_path: Path, pool: Pool) -> None:
    path = with_schedule(tmp_path, "stage1")
    with pytest.raises(ValueError, match="'model' does not end with a dot"):
        import_checkpoint(path, tmp_path / "no", add_prefix="model")
    command = ["import", str(path), str(tmp_path / "a"), "--add-prefix", "model."]
    assert CliRunner().invoke(app, command).exit_code == 0
    found = pool.run(2, under_an_attribute, str(tmp_path / "a"), 6)[0]
    assert found["rates"] == pytest.approx([0.01, 0.005])  # the saved group's, then that of DeepSpeed's iteration 4
    assert found["step"] == 6
    assert all(name.startswith("model.") for name in found["weights"])
    # A loop's own checkpoint, too; and what has no prefix says what to do.
    pool.run(2, in_a_loop, str(path), str(tmp_path / "out"))
    with pytest.warns(UserWarning, match="continues at step 7"):
        import_checkpoint(tmp_path / "out" / "ours", tmp_path / "b", add_prefix="model.")
    assert pool.run(2, under_an_attribute, str(tmp_path / "b"), 8)[0]["rates"] == pytest.approx([0.0075])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_checkpoint(path, tmp_path / "bare")
    with pytest.raises(WorkerError, match=r"lack 'model\.', which `lt-zero import SRC OUT --add-prefix model\.` adds"):
        pool.run(2, under_an_attribute, str(tmp_path / "bare"), 6)
