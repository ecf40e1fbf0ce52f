"""``64-true`` is Lightning's DoublePrecision in one process; which dtype modules are made in; attributes of plugins."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lt_zero import ZeroConfig, ZeroPrecision, export
from lt_zero.common.errors import ConfigError
from lt_zero.config.precision import resolve_mode
from tests.support.features import there
from tests.support.lightning_tools import FULL, assert_same, sharded_trainer, single_trainer, weights
from tests.support.matrix import only, only_rows
from tests.support.pool import Pool

EXACT = {"rtol": 1e-13, "atol": 1e-15}  # sums in another order; fp32 anywhere would show at 1e-8
ROWS = [(torch.linspace(0, 1, 7) * i, torch.linspace(-1, 1, 3) + i) for i in range(16)]  # fp32


class Deep(pl.LightningModule):
    """Inputs, a buffer and tensors that forward makes, none of them fp64 by itself."""

    def __init__(self, optimizer: str = "sgd", late: bool = False) -> None:
        super().__init__()
        self.optimizer, self.late = optimizer, late
        self.seen: set[Any] = set()
        if not late:
            self.configure_model(always=True)

    def configure_model(self, always: bool = False) -> None:
        if (always or self.late) and not hasattr(self, "net"):
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 3))
            self.register_buffer("offset", torch.linspace(0, 0.1, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x) + self.offset + torch.full((3,), 0.1)
        self.seen |= {x.dtype, y.dtype, out.dtype, self.offset.dtype, torch.ones(1).dtype, self.dtype}
        return (out - y).square().mean()  # mse_loss of torch 2.10 mixes no dtypes

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]) + self.offset

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        world = dist.get_world_size() if dist.is_initialized() else 1
        rows: Any = ROWS
        sampler = DistributedSampler(rows, shuffle=False) if world > 1 else None
        return DataLoader(rows, batch_size=4 // world, sampler=sampler)

    predict_dataloader = train_dataloader


def _single(optimizer: str, late: bool = False, **options: Any) -> dict[str, Any]:
    trainer = single_trainer(precision="64-true", **options)
    trainer.fit(module := Deep(optimizer, late))
    return {name: value.numpy() for name, value in module.state_dict().items()}


def _double(stage: int, module: Deep, zero: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    trainer = sharded_trainer(stage, zero, precision="64-true", **options)
    trainer.fit(module, ckpt_path=options.pop("ckpt_path", None))
    assert module.seen == {torch.float64}
    assert {b.dtype for b in trainer.strategy.engine.buckets} == {torch.float64}  # type: ignore[attr-defined]
    return weights(trainer)


def _runs(optimizer: str, folder: str, cases: list[tuple[int, str]]) -> list[dict[str, Any]]:
    options = {"max_epochs": 2, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    places = {"none": {}, "cpu": {"offload_optimizer": {"device": "cpu"}}}
    nvme = {"device": "nvme", "nvme_path": folder}
    places["nvme"] = {"offload_optimizer": nvme, "offload_param": {**nvme, "max_in_cpu": 0}}
    return [_double(stage, Deep(optimizer), places[place], **options) for stage, place in cases]


PLACES = [(0, "none"), (1, "none"), (2, "cpu"), (2, "none"), (3, "none"), (3, "nvme")]
HALVES = {"even": PLACES[::2], "odd": PLACES[1::2]}


@pytest.mark.parametrize(
    ("optimizer", "half"), only_rows([("sgd", "odd")], itertools.product(["sgd", "adamw"], HALVES))
)
def test_a_double_run_is_that_of_one_process(pool: Pool, tmp_path: Path, optimizer: str, half: str) -> None:
    want = _single(optimizer, max_epochs=2, gradient_clip_val=0.5, accumulate_grad_batches=2)
    cases = [(stage, place) for stage, place in HALVES[half] if place == "none" or there("offload")]
    for got, case in zip(pool.run(2, _runs, optimizer, str(tmp_path), cases)[0], cases, strict=True):
        assert all(value.dtype == np.float64 for value in got.values()), case
        assert_same(got, want, **EXACT)


def _resumed(folder: str) -> list[dict[str, Any]]:
    found = []
    for form, stages in (({}, (3, 1)), (FULL, (2, 3))):
        trainer = sharded_trainer(stages[0], precision="64-true", max_epochs=1, config=form)
        trainer.fit(Deep("adamw", late=True))
        trainer.save_checkpoint(f"{folder}/{stages[0]}.ckpt")
        trainer = sharded_trainer(stages[1], precision="64-true", max_epochs=2)
        trainer.fit(Deep("adamw", late=True), ckpt_path=f"{folder}/{stages[0]}.ckpt")
        found.append(weights(trainer))
    return found


def test_digits_survive_checkpoints_and_exports(pool: Pool, tmp_path: Path) -> None:
    want = _single("adamw", late=True, max_epochs=2)  # made in configure_model: random numbers in fp64
    for got in pool.run(2, _resumed, str(tmp_path))[0]:
        assert_same(got, want, **EXACT)
    export(tmp_path / "3.ckpt", tmp_path / "double.pt", "fp64")
    saved = torch.load(tmp_path / "double.pt")
    want = _single("adamw", late=True, max_epochs=1)
    assert_same({name: value.numpy() for name, value in saved.items()}, want, **EXACT)


class Made(Deep):
    """What its parameters and buffers are made in."""

    def __init__(self) -> None:
        super().__init__(late=True)
        self.made: set[Any] = set()

    def configure_model(self, always: bool = False) -> None:
        super().configure_model()
        self.net.register_buffer("rate", torch.ones(1) / 2)
        self.net[1].weight = self.net[1].bias  # a tie
        self.made = {p.dtype for p in self.net.parameters()}
        assert self.net.rate.dtype == torch.float32
        assert self.net[1].weight is self.net[1].bias


def _made(mode: str, block: dict[str, Any]) -> tuple[set[Any], set[Any], set[Any]]:
    trainer = sharded_trainer(3, config=block, plugins=[ZeroPrecision(mode)], max_steps=1)
    trainer.fit(fitted := Made())
    assert fitted.dtype == torch.float32, "as before the run"
    trainer = sharded_trainer(3, config=block, plugins=[ZeroPrecision(mode)])
    trainer.predict(ran := Made())
    with trainer.init_module():
        later = nn.Linear(2, 2)
    return fitted.made, ran.made, {later.weight.dtype}


@pytest.mark.parametrize("mode", only(["bf16-true"], ["16-true", "bf16-true", "bf16-mixed"]))
def test_parameters_are_made_in_16_bits_unless_masters_are_made_from_them(pool: Pool, mode: str) -> None:
    name = mode.split("-")[0]
    low = {"16": torch.float16, "bf16": torch.bfloat16}[name]
    got = pool.run(2, _made, mode, {"fp16": {"initial_scale_power": 4}})[0]
    assert got == ({torch.float32}, {torch.float32 if mode == "bf16-mixed" else low}, {torch.float32})
    if mode == "bf16-true":
        got = pool.run(2, _made, mode, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}})[0]
        assert got == ({low}, {low}, {low})


def test_what_lightnings_plugins_can_be_asked() -> None:
    plugin = ZeroPrecision("16-mixed")
    assert plugin.device == "cpu"
    assert plugin.scaler is not None
    assert plugin.scaler.is_enabled()
    assert plugin.scaler.get_scale() == plugin.loss_scale == 2.0**16
    asked = (plugin.scaler.get_growth_factor(), plugin.scaler.get_backoff_factor(), plugin.scaler.get_growth_interval())
    assert asked == (2.0, 0.5, 1000)
    with plugin.autocast_context_manager():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
    plain = ZeroPrecision("bf16-true")
    assert plain.scaler is None
    with plain.autocast_context_manager():
        assert not torch.is_autocast_enabled("cpu")


def test_other_precisions_contradict_double() -> None:
    for block in ({"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}, {"torch_autocast": {"enabled": True}}):
        with pytest.raises(ConfigError, match="precision='64-true'. contradicts"):
            resolve_mode(ZeroConfig.of(block), "64-true")
    assert resolve_mode(ZeroConfig.of({"bf16": {"enabled": "auto"}}), "64-true") == "64-true"
