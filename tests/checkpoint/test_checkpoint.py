"""Directories through the Trainer: what is restored is what was saved, to the last bit."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lt_zero.checkpoint.native.archive import Archive
from tests.support.checkpoint_tools import SHARDED, copied, error_of, everything, resume, same, train
from tests.support.lightning_tools import GPT, sharded_trainer
from tests.support.matrix import only, only_rows
from tests.support.pool import Pool

STAGES = [0, 1, 2, 3]


def _life(stage: int, folder: str, options: dict[str, Any]) -> list[str]:
    options = {"config": SHARDED, **options}
    trainer = train(stage, **options, max_steps=-1, max_epochs=1)
    want = everything(trainer)
    path = f"{folder}/life.ckpt"
    trainer.save_checkpoint(path)
    same(everything(trainer), want, "saving changes nothing")
    got, again = resume(path, stage, steps=-1, **options, max_epochs=2)
    same(got, want)
    same(
        everything(again), everything(train(stage, **options, max_steps=-1, max_epochs=2)), "as if nothing had happened"
    )
    archive = Archive(path)
    for name, entry in archive.manifest.tensors.items():
        assert sum(chunk.box.numel for chunk in entry.chunks) == math.prod(entry.shape), f"{name} is written once"
    archive.close()
    return sorted(p.name for p in Path(path).iterdir())


@pytest.mark.parametrize(("stage", "world"), only_rows([(3, 3)], itertools.product(STAGES, [1, 2, 3])))
def test_restores_what_was_saved(pool: Pool, tmp_path: Path, stage: int, world: int) -> None:
    names = pool.run(world, _life, stage, str(tmp_path), {})[0]
    numbered = [f"{kind}-{rank:05d}.pt" for kind in ("moments", "weights") for rank in range(world)]
    assert set(names) == {".metadata", "README.txt", "extras.pt", "manifest.json", "meta.pt", *numbered}


@pytest.mark.slow  # in the fast suite: bf16-true in tests/conformance/test_resume.py, 16-mixed in the next test
@pytest.mark.parametrize("precision", ["16-true", "16-mixed", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("stage", [1, 3])
def test_restores_precision(pool: Pool, tmp_path: Path, stage: int, precision: str) -> None:
    pool.run(2, _life, stage, str(tmp_path), {"precision": precision})


def _overflows(stage: int, folder: str, options: dict[str, Any]) -> None:
    _life(stage, folder, options)
    meta = torch.load(f"{folder}/life.ckpt/meta.pt", weights_only=True)
    assert "skip" in str(meta), "the loss scale and what was skipped are in it"


@pytest.mark.parametrize(
    ("precision", "how"),
    only_rows([("16-mixed", "hold")], itertools.product(["16-true", "16-mixed"], ["advance", "hold"])),
)
def test_restores_a_run_that_skips_steps(pool: Pool, tmp_path: Path, precision: str, how: str) -> None:
    fp16 = {"initial_scale_power": 26, "hysteresis": 1, "loss_scale_window": 1}
    config = {**SHARDED, "fp16": fp16, "on_skipped_step": how}
    pool.run(2, _overflows, 2, str(tmp_path), {"precision": precision, "config": config})


# ---- what is asked for -----------------------------------------------------------------------------------------------


def _options(stage: int, folder: str) -> None:
    trainer = train(stage, config=SHARDED)
    want = everything(trainer)
    path = f"{folder}/all"
    trainer.save_checkpoint(path)
    trainer.save_checkpoint(f"{folder}/light", weights_only=True)
    light = {p.name for p in Path(folder, "light").iterdir()}
    assert not [name for name in light if name.startswith("moments")]
    bytes_of = {name: sum(p.stat().st_size for p in Path(folder, name).glob("*.pt")) for name in ("all", "light")}
    assert bytes_of["light"] < 0.6 * bytes_of["all"]

    def fit(**checkpoint: Any) -> dict[str, Any]:
        return resume(path, stage, config={"checkpoint": checkpoint})[0]

    only = fit(load_module_only=True)
    same(only["weights"], want["weights"])
    assert only["step"] == 0
    fresh = fit(load_optimizer_states=False)
    same((fresh["weights"], fresh["schedulers"], fresh["step"]), (want["weights"], want["schedulers"], 2))
    slow = fit(load_lr_scheduler_states=False)
    same((slow["weights"], slow["step"]), (want["weights"], 2))
    assert slow["schedulers"][0]["last_epoch"] == 0
    if dist.get_rank() == 0:
        assert not only["optimizers"][0]["state"]
        assert not fresh["optimizers"][0]["state"]
        same(slow["optimizers"][0]["state"], want["optimizers"][0]["state"])
    for name in ("all", "light"):
        module = GPT(dist.get_world_size())
        evaluated = sharded_trainer(stage, limit_val_batches=1)
        evaluated.validate(module, ckpt_path=f"{folder}/{name}")
        same(copied(evaluated.strategy.full_state_dict()), want["weights"])  # type: ignore[attr-defined]
    assert evaluated.predict(module, ckpt_path=f"{folder}/light/")
    evaluated.test(module, ckpt_path=Path(folder, "light"))
    text = error_of(resume, f"{folder}/light", stage)
    assert "optimizer" in text


@pytest.mark.parametrize("stage", only([3], [0, 2, 3]))
def test_parts_of_a_checkpoint(pool: Pool, tmp_path: Path, stage: int) -> None:
    pool.run(2, _options, stage, str(tmp_path))


def _rounded(folder: str, precision: str) -> None:
    trainer = train(1, config=SHARDED, precision=precision)
    want = everything(trainer)
    trainer.save_checkpoint(f"{folder}/half")
    zero = {"load_from_fp32_weights": False}
    got, _ = resume(f"{folder}/half", 2, precision=precision, zero=zero)
    if dist.get_rank() == 0:
        dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float16
        trained = [n for n, _ in GPT().named_parameters()]
        assert any(not torch.equal(want["weights"][n], want["weights"][n].to(dtype).float()) for n in trained)
        for name in trained:
            assert torch.equal(got["weights"][name], want["weights"][name].to(dtype).to(got["weights"][name].dtype)), (
                name
            )


@pytest.mark.slow  # in the fast suite: tests/conformance/test_resume.py
@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_weights_can_be_rounded_to_what_is_computed_with(pool: Pool, tmp_path: Path, precision: str) -> None:
    pool.run(2, _rounded, str(tmp_path), precision)


def _outside(folder: str) -> list[str]:
    """Before any fit, and without one."""
    trainer = sharded_trainer(3, config=SHARDED, limit_val_batches=1)
    module = GPT(dist.get_world_size())
    trainer.validate(module)
    before = copied(trainer.strategy.full_state_dict())  # type: ignore[attr-defined]
    trainer.save_checkpoint(f"{folder}/validated", weights_only=True)
    other = GPT(dist.get_world_size())
    with torch.no_grad():
        other.temperature.fill_(0.1)
    second = sharded_trainer(1, limit_val_batches=1)
    second.validate(other, ckpt_path=f"{folder}/validated")
    same(copied(second.strategy.full_state_dict()), before)  # type: ignore[attr-defined]
    second.fit_loop.epoch_loop.max_steps = 1
    second.fit(other)  # a second run of one trainer, and of a module that has been sharded
    second.save_checkpoint(f"{folder}/fitted")
    second.fit_loop.epoch_loop.max_steps = 2
    second.fit(other, ckpt_path=f"{folder}/fitted")
    assert second.global_step == 2
    return [p.name for p in Path(folder).iterdir()]


def test_outside_of_fit_and_twice_in_a_process(pool: Pool, tmp_path: Path) -> None:
    for names in pool.run(2, _outside, str(tmp_path)):
        assert sorted(names) == ["fitted", "validated"]


class Dotted(torch.optim.Optimizer):
    """Its states have names that no parameter has, and kinds that no common optimizer has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "nested": {"a": (1, 2)}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(
                        {"m.v": torch.zeros_like(p), "count": 0, "seen": torch.zeros_like(p, dtype=torch.int32)}
                    )
                state["m.v"].mul_(0.9).add_(p.grad)
                state["count"] += 1
                state["seen"] += 1
                p.sub_(state["m.v"], alpha=group["lr"])
        return loss


class Custom(GPT):
    def configure_optimizers(self) -> Any:
        return Dotted(self.parameters())


def _custom(stage: int, folder: str) -> None:
    trainer = train(stage, Custom(dist.get_world_size()), config=SHARDED)
    want = everything(trainer)
    if dist.get_rank() == 0:
        state = want["optimizers"][0]["state"][0]
        assert state["count"] == 2
        assert state["m.v"].abs().sum() > 0
        assert int(state["seen"].min()) == 2
    trainer.save_checkpoint(f"{folder}/custom")
    same(resume(f"{folder}/custom", stage, Custom(dist.get_world_size()))[0], want)


@pytest.mark.parametrize("stage", only([3], [0, 3]))
def test_an_optimizer_of_the_user(pool: Pool, tmp_path: Path, stage: int) -> None:
    pool.run(2, _custom, stage, str(tmp_path))
