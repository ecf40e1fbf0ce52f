"""Precision through the Trainer: every mode at every stage, DDP's results, skipped steps, fp32 islands, resume."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lt_zero.config.precision import MODES
from lt_zero.training.lightning.precision import ZeroPrecision
from tests.support.lightning_tools import GPT, QUIET, assert_same, sharded_trainer, torchrun_env, weights
from tests.support.matrix import only, only_rows
from tests.support.overflowing import Overflowing, make_trainer, plugin_of
from tests.support.pool import Pool

STAGES = [0, 1, 2, 3]


def _fit(mode: str, stage: int, options: dict[str, Any]) -> Any:
    trainer = make_trainer(mode, stage, max_epochs=1, **options)
    module = GPT(dist.get_world_size(), "adamw")
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)
    assert plugin_of(trainer).skipped_steps == 0
    return weights(trainer)


WINDOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate, clip": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}


FAST_MODES = [("16-mixed", 2, "accumulate, clip"), ("64-true", 3, "plain")]


@pytest.mark.parametrize(
    ("mode", "stage", "window"), only_rows(FAST_MODES, itertools.product(sorted(MODES), STAGES[1:], WINDOWS))
)
def test_every_mode_at_every_stage(pool: Pool, mode: str, stage: int, window: str) -> None:
    options = WINDOWS[window]
    whole = pool.run(2, _fit, mode, 0, options)[0]
    kept = "float64" if mode == "64-true" else "float32"
    assert all(value.dtype.name == kept for value in whole.values()), "checkpoints hold the master weights"
    # Windows are summed in another order at stages 0 and 1: a last bit, which 16-bit weights magnify.
    loose = 1e-5 if mode in ("32-true", "64-true") or not options else 2e-3
    assert_same(pool.run(2, _fit, mode, stage, options)[0], whole, rtol=loose, atol=loose)


# ---- as under DDP --------------------------------------------------------------------------------------------------


class FloatTargets(pl.LightningModule):
    """Runs under DDP with 16-mixed: float targets, a loss in fp32, a buffer, norms of several kinds, an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 9), nn.LayerNorm(9))
        self.rnn = nn.GRU(3, 4, batch_first=True)
        self.gain = nn.Parameter(torch.ones(12))
        self.out = nn.Linear(12, 2)
        self.register_buffer("offset", torch.linspace(0, 1, 2))
        self.seen: list[torch.dtype] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, target = batch
        hidden, _ = self.rnn(self.inner(x).unflatten(1, (3, 3)))
        out = self.out(hidden.flatten(1) * self.gain) + self.offset
        loss = F.mse_loss(out, target) + (out - target).abs().mean()
        self.seen = [x.dtype, target.dtype, loss.dtype]
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        rows: Any = [(torch.randn(6, generator=generator), torch.randn(2, generator=generator)) for _ in range(16)]
        return DataLoader(rows, batch_size=4)


def _float_targets(stage: int | None) -> Any:
    import os

    options: dict[str, Any] = {"max_epochs": 2, "use_distributed_sampler": False}
    if stage is None:
        warnings.filterwarnings("ignore")
        os.environ.update(torchrun_env())
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        options |= {"strategy": DDPStrategy(process_group_backend="gloo"), "devices": dist.get_world_size()}
        trainer = pl.Trainer(**{**QUIET, **options}, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    else:
        trainer = make_trainer("16-mixed", stage, **options)
    module = FloatTargets()
    trainer.fit(module)
    assert module.seen == [torch.float32] * 3
    return weights(trainer)


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_module_that_runs_under_ddp_runs_unchanged(pool: Pool, stage: int) -> None:
    want = pool.run(2, _float_targets, None)[0]
    assert_same(pool.run(2, _float_targets, stage)[0], want, rtol=5e-3, atol=2e-3)


# ---- fp32 islands and buffers --------------------------------------------------------------------------------------


class Rotary(GPT):
    """Has a buffer whose digits matter, and records in which dtypes its modules run."""

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8))
        self.dtypes: dict[str, Any] = {}
        for name in ("blocks.0.norm", "blocks.0.up", "blocks.1.norm"):
            module = self.net.get_submodule(name)
            module.register_forward_hook(self._note(name))

    def _note(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            weight: Any = module.weight
            self.dtypes[name] = (args[0].dtype, weight.dtype)

        return hook


def _islands(mode: str, stage: int, path: str) -> None:
    trainer = make_trainer(mode, stage, {"fp16_override_modules": ["net.blocks.0.norm.*"]}, max_epochs=1)
    module = Rotary(dist.get_world_size())
    before = module.frequencies.clone()
    trainer.fit(module)
    low = MODES[mode][0]
    assert torch.equal(module.frequencies, before)
    assert module.frequencies.dtype == torch.float32
    assert module.dtypes["blocks.0.norm"] == (torch.float32, torch.float32)
    assert module.dtypes["blocks.0.up"][1] == low
    if not mode.endswith("mixed"):
        assert module.dtypes["blocks.1.norm"] == (low, low)
    strategy: Any = trainer.strategy
    (bucket,) = {strategy.engine.owner[id(p)][0] for p in module.net.blocks[0].norm.parameters()}
    assert bucket.dtype == torch.float32
    kept = {id(p) for p in module.net.blocks[0].norm.parameters()}
    assert mode.endswith("mixed") or {id(p) for p in bucket.params} == kept
    strategy.export(path)
    if dist.get_rank() == 0:
        saved = torch.load(path, weights_only=True)
        assert saved["net.blocks.0.norm.weight"].dtype == torch.float32
        assert saved["net.blocks.1.norm.weight"].dtype == torch.float16
    assert weights(trainer) or dist.get_rank() > 0


ISLANDS = only_rows([("16-true", 3)], itertools.product(["16-true", "bf16-mixed", "bf16-true"], [3, 1]))


@pytest.mark.parametrize(("mode", "stage"), ISLANDS)
def test_islands_and_buffers(pool: Pool, mode: str, stage: int, tmp_path: Path) -> None:
    pool.run(2, _islands, mode, stage, str(tmp_path / "weights.pt"))


def _buffer_dtype() -> None:
    trainer = make_trainer("bf16-true", 3, {"data_types": {"buffer_dtype": "bf16"}}, max_steps=1)
    module = Rotary(dist.get_world_size())
    trainer.fit(module)
    assert module.frequencies.dtype == torch.bfloat16


def test_buffer_dtype(pool: Pool) -> None:
    pool.run(2, _buffer_dtype)


# ---- skipped steps -------------------------------------------------------------------------------------------------


def _skips(mode: str, stage: int, on_skip: str, folder: str) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        logger = CSVLogger(folder, name="", version="0")
        options: dict[str, Any] = {"max_steps": 8, "logger": logger, "log_every_n_steps": 1}
        trainer = make_trainer(mode, stage, {"on_skipped_step": on_skip}, use_distributed_sampler=False, **options)
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        module = Overflowing(2, {0, 1, 2} if on_skip == "hold" else {3, 4, 5})
        trainer.fit(module)
    schedule: Any = trainer.lr_scheduler_configs[0].scheduler
    rows = (Path(folder) / "0" / "metrics.csv").read_text() if dist.get_rank() == 0 else ""
    return schedule.last_epoch, module.rates, plugin_of(trainer).skipped_steps, rows


@pytest.mark.parametrize(
    ("mode", "stage"), only_rows([("16-true", 3)], itertools.product(["16-true", "bf16-mixed"], [3, 0]))
)
def test_schedules_wait_for_skipped_steps(pool: Pool, mode: str, stage: int, tmp_path: Path) -> None:
    last, rates, skipped, rows = pool.run(2, _skips, mode, stage, "hold", str(tmp_path))[0]
    assert (last, skipped) == (5, 3)
    assert rates[:4] == [1e-2] * 4, "the first rate is used by the first step that is taken"
    header, *lines = rows.strip().splitlines()
    column = header.split(",").index("skipped_steps")
    assert max(line.split(",")[column] for line in lines) == "3"


@pytest.mark.slow  # in a loop: tests/conformance/test_weights.py
def test_schedules_advance_if_asked(pool: Pool, tmp_path: Path) -> None:
    last, _, skipped, _ = pool.run(2, _skips, "16-true", 2, "advance", str(tmp_path))[0]
    assert (last, skipped) == (8, 3)


class Bad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(11))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * 60000.0 * 60000.0


class OneBadLayer(GPT):
    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.culprit = Bad()

    def loss(self, batch: Tensor) -> Tensor:
        logits = self.culprit(self.net(batch))
        return F.cross_entropy(logits.float().flatten(0, 1), batch.roll(-1, 1).flatten())


def _at_minimum(stage: int, action: str) -> Any:
    block = {"initial_scale_power": 2, "hysteresis": 1}
    config = {"fp16": block, "on_min_scale": action, "fp16_override_modules": []}
    trainer = make_trainer("16-true", stage, config, max_steps=7, max_epochs=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(OneBadLayer(dist.get_world_size()))
        except RuntimeError as error:
            return "raised", str(error), plugin_of(trainer).skipped_steps
    told = [str(w.message) for w in caught if "not finite" in str(w.message)]
    return "ran", " ".join(told), plugin_of(trainer).skipped_steps


@pytest.mark.parametrize(
    ("stage", "action"),
    only_rows([(3, "raise")], itertools.product(STAGES, ["raise", "hold", "warn"])),
)
def test_overflow_at_the_minimum_scale_is_explained(pool: Pool, stage: int, action: str) -> None:
    outcomes = pool.run(2, _at_minimum, stage, action)
    what, text, skipped = outcomes[0]
    if action == "raise":
        for what, text, _ in outcomes:
            assert what == "raised"
            assert "'culprit' (Bad)" in text
            assert "culprit.weight" in text
            assert "3 optimizer steps were skipped" in text  # 4 -> 2 -> 1, and one that found no lower scale
    elif action == "hold":
        assert (what, text, skipped) == ("ran", "", 7)
    else:
        assert (what, skipped) == ("ran", 7)
        assert "'culprit' (Bad)" in text


# ---- norms, hooks, several optimizers ------------------------------------------------------------------------------


class Looking(Callback):
    """Sees gradients where users look at them."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(float(sum(p.grad.norm(2) ** 2 for p in pl_module.parameters()) ** 0.5))


def _norms(mode: str, stage: int, look: bool) -> Any:
    callback = Looking()
    options: dict[str, Any] = {"callbacks": [callback] if look else [], "gradient_clip_val": 1e-3}
    config = {"fp16": {"initial_scale_power": 10}}
    trainer = make_trainer(mode, stage, config, max_steps=2, **options)
    trainer.fit(GPT(dist.get_world_size()))
    norm = plugin_of(trainer).grad_norm
    assert norm is not None
    return float(norm), callback.norms, weights(trainer)


@pytest.mark.slow  # in the fast suite: tests/conformance/test_gradients.py
@pytest.mark.parametrize("stage", STAGES)
def test_norms_and_clipping_are_of_unscaled_gradients(pool: Pool, stage: int) -> None:
    exact, _, reference = pool.run(2, _norms, "32-true", 0, False)[0]
    norm, _, got = pool.run(2, _norms, "16-true", stage, False)[0]
    assert norm == pytest.approx(exact, rel=2e-2)
    seen_norm, seen, same = pool.run(2, _norms, "16-true", stage, True)[0]
    assert seen_norm == pytest.approx(norm, rel=1e-5)
    assert seen[-1] == pytest.approx(norm, rel=1e-5)
    assert_same(same, got, rtol=1e-6, atol=1e-7)
    assert_same(got, reference, rtol=1e-3, atol=1e-3)


class Gan(pl.LightningModule):
    """Two optimizers; gradients of the second wait while the first one's overflow changes the scale."""

    def __init__(self, overflow: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.automatic_optimization = False
        self.one, self.two, self.overflow = nn.Linear(5, 5), nn.Linear(5, 5), overflow

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        loss = self.two(batch).square().mean()
        self.manual_backward(loss)
        bad = self.overflow and batch_idx == 1
        other = self.one(batch).square().mean() * (float("inf") if bad else 1.0)
        if batch_idx != 1 or self.overflow:
            self.manual_backward(other)
            self.clip_gradients(first, 0.5, "norm")
            first.step()
            first.zero_grad()
        second.step()
        second.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (self.one, self.two)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.randn(8, 5, generator=torch.Generator().manual_seed(1)), batch_size=2)  # type: ignore[arg-type]


def _gan(stage: int, overflow: bool) -> Any:
    config = {"fp16": {"initial_scale_power": 8, "hysteresis": 1}}
    trainer = make_trainer("16-true", stage, config, max_epochs=1)
    trainer.fit(Gan(overflow))
    return weights(trainer), plugin_of(trainer).loss_scale, plugin_of(trainer).skipped_steps


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_scale_may_change_between_two_optimizers(pool: Pool, stage: int) -> None:
    got, scale, skipped = pool.run(2, _gan, stage, True)[0]
    want, calm, _ = pool.run(2, _gan, stage, False)[0]
    assert (scale, calm, skipped) == (128.0, 256.0, 1)
    assert_same(got, want, rtol=1e-3, atol=1e-4)


# ---- resume --------------------------------------------------------------------------------------------------------


def _resume(stage: int, mode: str, steps: int, path: str, resume: bool) -> Any:
    block = {"initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 5}
    saver = ModelCheckpoint(path, save_last=True, save_top_k=0, every_n_train_steps=4)
    options: dict[str, Any] = {"max_steps": steps, "enable_checkpointing": True, "callbacks": [saver]}
    trainer = make_trainer(mode, stage, {"fp16": block}, use_distributed_sampler=False, max_epochs=9, **options)
    trainer.fit(Overflowing(2, {1, 6}), ckpt_path=f"{path}/last.ckpt" if resume else None)
    schedule: Any = trainer.lr_scheduler_configs[0].scheduler
    plugin = plugin_of(trainer)
    return weights(trainer), plugin.loss_scale, plugin.skipped_steps, schedule.last_epoch


@pytest.mark.slow  # in the fast suite: tests/conformance/test_resume.py, tests/checkpoint/test_checkpoint.py
@pytest.mark.parametrize("stages", [(3, 1), (0, 3)], ids=str)
def test_scale_and_skips_survive_resume(pool: Pool, tmp_path: Path, stages: tuple[int, int]) -> None:
    whole = pool.run(2, _resume, 3, "16-true", 8, str(tmp_path / "whole"), False)[0]
    assert whole[1:] == (64.0, 2, 6)
    first, second = stages
    path = str(tmp_path / "resumed")
    pool.run(2, _resume, first, "16-true", 4, path, False)
    got = pool.run(2, _resume, second, "16-true", 8, path, True)[0]
    assert got[1:] == whole[1:]
    assert_same(got[0], whole[0], rtol=1e-4, atol=1e-5)


def _from_ddp(path: str) -> Any:
    import os

    warnings.filterwarnings("ignore")
    os.environ.update(torchrun_env())
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=2)
    saver = ModelCheckpoint(path, save_last=True, save_top_k=0, every_n_train_steps=4)
    ddp: Any = DDPStrategy(process_group_backend="gloo")
    options = {**QUIET, "strategy": ddp, "devices": 2, "enable_checkpointing": True, "callbacks": [saver]}
    theirs = pl.Trainer(**options, max_steps=4, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    theirs.fit(GPT(2))
    trainer = make_trainer("16-mixed", 3, max_steps=5, max_epochs=9)
    trainer.fit(GPT(2), ckpt_path=f"{path}/last.ckpt")
    return scaler.get_scale(), plugin_of(trainer).loss_scale, trainer.global_step


def test_resume_from_a_ddp_checkpoint(pool: Pool, tmp_path: Path) -> None:
    theirs, ours, step = pool.run(2, _from_ddp, str(tmp_path))[0]
    assert theirs == ours != 64.0
    assert step == 5


class _Adagrad(GPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


def _state_dtypes(stage: int) -> set[torch.dtype]:
    trainer = sharded_trainer(stage, precision="bf16-mixed", max_steps=1, limit_val_batches=0)
    trainer.fit(_Adagrad(dist.get_world_size()))
    return {state["sum"].dtype for state in trainer.optimizers[0].state.values()}


@pytest.mark.parametrize("stage", only([3], [1, 3]))
def test_states_that_a_constructor_makes_are_as_precise_as_others(pool: Pool, stage: int) -> None:
    assert pool.run(2, _state_dtypes, stage) == [{torch.float32}] * 2


@pytest.mark.parametrize("mode", list(MODES))
def test_outputs_of_fabric_are_in_the_default_dtype(mode: str) -> None:
    """Fabric asks for them; losses were computed in 16 bits."""
    compute, counts = MODES[mode][0] or torch.float32, torch.arange(2)
    out = ZeroPrecision(mode).convert_output({"logits": torch.ones(2, dtype=compute), "counts": counts})
    assert out["logits"].dtype == torch.float32
    assert out["counts"] is counts
