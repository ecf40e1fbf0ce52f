"""Forwards outside of a step, in callbacks and hooks: DDP's values, up to the rounding of the compute dtype."""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lt_zero
from lt_zero import FabricZeroStrategy, ZeroStrategy
from lt_zero.core.engine.outside_steps import AutocastOutsideOfSteps, within_step
from lt_zero.training.lightning.precision import ZeroPrecision
from tests.support.lightning_tools import QUIET, torchrun_env, weights
from tests.support.pool import Pool

MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Block(nn.Module):
    """Uses the weight of a child without calling it, as tied heads do, and has an odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 17)
        self.norm = nn.LayerNorm(17)
        self.table = nn.Embedding(7, 17)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(F.gelu(self.up(x)))
        return {"logits": F.linear(hidden, self.table.weight), "ids": hidden.argmax(-1)}


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.scale = Block(), nn.Parameter(torch.full((3, 5), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x @ self.scale)["logits"]

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, index: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(8, 3, generator=torch.Generator().manual_seed(dist.get_rank())), batch_size=2)

    val_dataloader = train_dataloader


class Samples(Callback):
    """Calls the model, its parts and a layer wherever a callback may, with and without gradients."""

    def __init__(self, calls: bool = True) -> None:
        self.calls, self.seen = calls, list[Tensor]()

    def look(self, trainer: pl.Trainer, module: Any) -> None:
        if not self.calls:
            return
        whole: Any = trainer.model
        with torch.no_grad():
            found = [whole(ROWS), module(ROWS), module.net(WIDE)["logits"], module.net.up(WIDE)]
        graph = module(ROWS)  # without a backward
        own = WIDE @ WIDE.T  # the callback's own arithmetic stays in fp32
        assert not torch.is_autocast_enabled("cpu")
        self.seen += [value.detach().clone() for value in (*found, graph, own)]

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        self.look(trainer, module)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.look(trainer, module)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.look(trainer, module)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.look(trainer, module)


def _fit(strategy: Any, precision: Any, calls: bool = True) -> tuple[list[Tensor], Any]:
    warnings.filterwarnings("ignore")
    os.environ.update(torchrun_env())
    samples = Samples(calls)
    # Plugins, since on a CPU Lightning replaces "16-mixed" by "bf16-mixed".
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0) if precision == "16-mixed" else None
    plugin = MixedPrecision(precision, "cpu", scaler) if strategy == "ddp" else ZeroPrecision(precision)
    options = {**QUIET, "devices": dist.get_world_size(), "strategy": strategy, "plugins": [plugin]}
    trainer = pl.Trainer(**options, callbacks=[samples], max_epochs=1)
    module = Model()
    trainer.fit(module)
    samples.look(trainer, module)
    return samples.seen, weights(trainer)


CONFIG: dict[str, Any] = {"fp16": {"initial_scale_power": 4}}  # without skipped steps


def _zero(stage: int) -> ZeroStrategy:
    block = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return ZeroStrategy(config={"zero_optimization": block, **CONFIG})


def _error(got: list[Tensor], want: list[Tensor]) -> float:
    assert [x.shape for x in got] == [x.shape for x in want]
    assert [x.dtype for x in got] == [torch.float32] * len(want)
    return max(float((x - y).abs().max()) for x, y in zip(got, want, strict=True))


ROWS = torch.linspace(-1, 1, 6).reshape(2, 3)
WIDE = torch.linspace(-1, 1, 10).reshape(2, 5)


def _rounding(precision: str) -> float:
    """The error of plain PyTorch under autocast."""
    exact = Model()
    with torch.no_grad():
        want = exact(ROWS)
        with torch.autocast("cpu", MIXED[precision]):
            return float((exact(ROWS).float() - want).abs().max())


def _like_ddp(precision: str, stages: list[int]) -> list[float]:
    """The largest error against DDP, for each stage."""
    want, _ = _fit("ddp", precision)
    errors = []
    for stage in stages:
        quiet = _fit(_zero(stage), precision, calls=False)[1]
        seen, trained = _fit(_zero(stage), precision)
        errors.append(_error(seen, want))
        assert trained.keys() == quiet.keys()
        for name in quiet:
            assert (trained[name] == quiet[name]).all(), f"{name}: the calls changed what was trained"
    return errors


@pytest.mark.parametrize(
    ("precision", "stages"),
    [
        ("bf16-mixed", [3]),
        pytest.param("bf16-mixed", [0, 1, 2], marks=pytest.mark.slow),
        pytest.param("16-mixed", [0, 1, 2, 3], marks=pytest.mark.slow),
    ],
)
def test_a_trainer(pool: Pool, precision: str, stages: list[int]) -> None:
    for errors in pool.run(2, _like_ddp, precision, stages):
        assert max(errors) <= 2 * _rounding(precision)


def _by_hand(stage: int) -> list[float]:
    """Fabric and a loop, with a step of each: values of parts outside of it against those of fp32 weights."""
    os.environ.update(torchrun_env())
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    size = dist.get_world_size()
    fabric = L.Fabric(
        accelerator="cpu", devices=size, strategy=FabricZeroStrategy(config=config), precision="bf16-mixed"
    )
    fabric.launch()
    model = Model()
    wrapped, optimizer = fabric.setup(model, model.configure_optimizers())
    loss = wrapped(ROWS).square().mean()
    assert loss.dtype == torch.float32
    fabric.backward(loss)
    optimizer.step()
    loop = Model()
    options = {**config, "torch_autocast": {"enabled": True, "dtype": "bf16"}, "train_batch_size": size}
    engine, *_ = lt_zero.initialize(model=loop, optimizer=loop.configure_optimizers(), config=options)
    assert engine(ROWS).dtype == torch.bfloat16, "the outputs of the engine itself are those of autocast"
    engine.backward(engine(ROWS).float().square().mean())
    engine.step()
    plain = Model()
    plain(ROWS).square().mean().backward()
    plain.configure_optimizers().step()
    errors = []
    for trained in (model, loop):
        with torch.no_grad():
            pairs = [(trained(ROWS), plain(ROWS)), (trained.net.up(WIDE), plain.net.up(WIDE))]
            for got, want in pairs:
                assert got.dtype == torch.float32
                errors.append(float((got - want).abs().max()))
    engine.destroy()
    return errors


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_fabric_and_a_loop(pool: Pool, stage: int) -> None:
    for errors in pool.run(2, _by_hand, stage):
        assert max(errors) <= 2 * _rounding("bf16-mixed")


def _global_hooks() -> set[int]:
    """Identify them: engines of other tests may have some, and may lose them at any time."""
    return set(torch.nn.modules.module._global_forward_pre_hooks)


def test_calls_that_fail_or_nest_leave_no_autocast() -> None:
    """The outermost module enables autocast, and every way out of it ends it; a detached model is plain again."""
    before = _global_hooks()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3).bfloat16()
            self.depth = 2
            self.error = BaseException

        def forward(self, x: Tensor, depth: int = 0) -> Tensor:
            if depth == self.depth and self.error is not None:
                raise self.error
            if depth < self.depth:
                return self(x, depth + 1)
            with within_step():  # of another engine's module
                pass
            return self.layer(x)

    outer: Any = Outer()
    handle = AutocastOutsideOfSteps([outer, outer.layer], torch.bfloat16, "cpu")
    try:
        for error in (ValueError, KeyboardInterrupt):
            outer.error = error
            with pytest.raises(error):
                outer(ROWS)
            with within_step():
                assert not torch.is_autocast_enabled("cpu")
        outer.error = None
        assert outer(ROWS).dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", torch.bfloat16):
            assert outer(ROWS).dtype == torch.bfloat16, "the caller decides"
        outer.error = KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            outer(ROWS)
    finally:
        handle.remove()
    assert not torch.is_autocast_enabled("cpu")
    outer.error = None
    with pytest.raises(RuntimeError, match="BFloat16"):
        outer(ROWS)
    assert _global_hooks() <= before


def test_a_recomputation_is_as_its_forward_was() -> None:
    """A part that disables autocast itself computes in 16 bits in backward, too."""
    layer = nn.Linear(3, 3).bfloat16()
    seen: list[torch.dtype] = []

    def part(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = layer(x.bfloat16())
        seen.append(y.dtype)
        return y.float().square()  # saves a tensor, so that the recomputation comes here

    handle = AutocastOutsideOfSteps([layer], torch.bfloat16, "cpu")
    try:
        with within_step(), torch.autocast("cpu", torch.bfloat16):
            loss = checkpoint(part, ROWS, use_reentrant=False).sum()
        loss.backward()
    finally:
        handle.remove()
    assert seen == [torch.bfloat16, torch.bfloat16]
