"""Runs of a Trainer with compiled models give the weights, graphs and breaks of DDP, compiled in the same way."""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lt_zero.common import plain_names
from tests.support.features import needs
from tests.support.lightning_tools import GPT, QUIET, assert_same, sharded_trainer, single_trainer, torchrun_env
from tests.support.matrix import only_rows
from tests.support.models import VOCAB, WIDTH, Block
from tests.support.overflowing import make_trainer, plugin_of
from tests.support.pool import Pool

INDUCTOR: dict[str, Any] = {"backend": "inductor"}
AOT: dict[str, Any] = {"backend": "aot_eager"}
inductor = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")


class Module(GPT):
    """``way``: what is compiled, or "none"; with "later" in ``configure_model``. ``net``: arguments of the network."""

    def __init__(self, way: str, options: dict[str, Any], **net: Any) -> None:
        super().__init__(dist.get_world_size(), **net)
        self.way, self.options, self.compiled = way, options, False
        if not way.startswith("later"):
            self._compile()

    def configure_model(self) -> None:
        if not self.compiled:
            self._compile()

    def _compile(self) -> None:
        self.compiled = True
        way = self.way.removeprefix("later ")
        if way == "blocks":
            for block in self.net.blocks:
                block.compile(**self.options)
        elif way == "wrapped blocks":
            self.net.blocks = nn.ModuleList(torch.compile(block, **self.options) for block in self.net.blocks)
        elif way == "net":
            self.net.compile(**self.options)
        elif way == "wrapped net":
            self.net = torch.compile(self.net, **self.options)  # type: ignore[assignment]


class Hooks(Callback):
    """Hooks of the user on compiled blocks, of which one changes the output."""

    def __init__(self) -> None:
        self.calls = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for block in pl_module.net.blocks:
            block.register_forward_hook(self._after)
            block.register_full_backward_hook(self._count)

    def _after(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.calls += 1
        return output * 1.01

    def _count(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.calls += 1


def _forget_graphs() -> None:
    warnings.filterwarnings("ignore")
    torch._dynamo.reset()
    counters.clear()


def _graphs() -> tuple[int, int]:
    """Graphs and breaks."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def _ddp(**options: Any) -> pl.Trainer:
    os.environ.update(torchrun_env())
    return pl.Trainer(**{**QUIET, "strategy": DDPStrategy(), "devices": dist.get_world_size(), **options})


def _weights(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Tensor]:
    """On rank 0; with DDP on all."""
    if isinstance(trainer.strategy, DDPStrategy) and not hasattr(trainer.strategy, "full_state_dict"):
        return {name: value.detach().clone() for name, value in plain_names.state_dict(module).items()}
    return trainer.strategy.full_state_dict()  # type: ignore[attr-defined, no-any-return]


def _run(stage: int | None, way: str, options: dict[str, Any], **settings: Any) -> tuple[dict[str, Tensor], Any]:
    """Weights, and what has to be equal: metrics, graphs and breaks, calls of hooks. ``stage``: None: DDP."""
    _forget_graphs()
    hooks = Hooks()
    given: dict[str, Any] = {"max_steps": 3, "max_epochs": 3, "precision": "64-true", "callbacks": [], **settings}
    if given.pop("hooks", False):
        given["callbacks"] = [hooks]
    if given.pop("averages", False):
        given["callbacks"] = [EMAWeightAveraging(decay=0.7)]
    zero, config, net = (given.pop(name, {}) for name in ("zero", "config", "net"))
    if stage is None:
        trainer = _ddp(**given)
        module = Module("blocks" if way == "configured" else way, options, **net)
    else:
        if way == "configured":
            config = {**config, "compile": options}
        trainer = sharded_trainer(stage, zero, config, **given)
        module = Module(way, options, **net)
    trainer.fit(module)
    found = _weights(trainer, module)
    # The next run hooks the model anew, and torch compiles what has these hooks inside of it again.
    graphs = _graphs()
    metrics = [*trainer.validate(module, verbose=False), *trainer.test(module, verbose=False)]
    return found, (metrics, *graphs, hooks.calls)


def _beside_ddp(stages: list[int], way: str, options: dict[str, Any], settings: dict[str, Any]) -> None:
    want, same = _run(None, way, options, **settings)
    assert same[1] > 0
    for stage in stages:
        found, also = _run(stage, way, options, **settings)
        assert also[1:] == same[1:], stage
        for mine, theirs in zip(also[0], same[0], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-10)
        for name, value in found.items():
            torch.testing.assert_close(value, want[name], rtol=1e-10, atol=1e-12, msg=name)
        assert bool(found) == (dist.get_rank() == 0)


OVERHEAD: dict[str, Any] = {"mode": "reduce-overhead"}
OFFLOADED: dict[str, Any] = {"zero": {"offload_optimizer": {"device": "cpu"}}}
SELECTIVE: dict[str, Any] = {"config": {"activation_checkpointing": {"mode": "selective"}}}
# docs/compile.md has these rows.
RUNS: list[Any] = [
    ([1, 2, 3], "blocks", INDUCTOR, {}),
    ([1, 2, 3], "wrapped blocks", INDUCTOR, {}),
    ([1, 2, 3], "net", INDUCTOR, {}),
    ([1, 2, 3], "wrapped net", INDUCTOR, {}),
    ([2, 3], "later blocks", INDUCTOR, {}),
    ([2, 3], "configured", INDUCTOR, {}),
    ([2, 3], "blocks", INDUCTOR, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    ([2, 3], "blocks", INDUCTOR, OFFLOADED),
    pytest.param([2, 3], "blocks", INDUCTOR, {**OFFLOADED, **SELECTIVE}, marks=needs("activation_checkpointing")),
    ([2, 3], "blocks", OVERHEAD, {}),
    ([2, 3], "net", OVERHEAD, {}),
    ([1, 2], "blocks", INDUCTOR, {"averages": True}),
    ([2, 3], "blocks", INDUCTOR, {"hooks": True}),
    ([2, 3], "blocks", INDUCTOR, {"net": {"checkpointed": "outside"}}),
    ([2, 3], "blocks", INDUCTOR, {"net": {"checkpointed": "inside"}}),
]


@pytest.mark.slow
@inductor
@pytest.mark.parametrize(("stages", "way", "options", "settings"), RUNS)
def test_a_run_is_that_of_ddp(pool: Pool, stages: list[int], way: str, options: Any, settings: dict[str, Any]) -> None:
    pool.run(2, _beside_ddp, stages, way, options, settings)


# ---- 16 bits ---------------------------------------------------------------------------------------------------------

BATCHES, BAD = 6, 2  # of three epochs; of these the one whose gradients overflow, if any do
FP16 = {"initial_scale_power": 6, "hysteresis": 1}  # as DDP's scaler below: each overflow halves the scale


class Rounded(Module):
    """``bad``: the batch at which the loss overflows on rank 1. With ``skips`` its step is left out instead."""

    def __init__(self, way: str, options: dict[str, Any], bad: int | None = None, skips: bool = False) -> None:
        super().__init__(way, options)
        self.bad, self.skips, self.batches = bad, skips, 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.batches += 1
        overflows = not self.skips and self.bad == self.batches - 1 and self.global_rank == 1
        loss = self.loss(batch)
        return loss * float("inf") if overflows else loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.skips and self.bad == self.batches:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        """Call a block outside of a step, as code that draws samples does."""
        dtype = torch.float64 if self.skips else torch.float32
        with torch.no_grad():
            drawn = self.net.blocks[0](torch.ones(2, 3, WIDTH, dtype=dtype))
        assert drawn.dtype == dtype
        assert drawn.isfinite().all()

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()["optimizer"]  # without a schedule, for which DDP counts skipped steps


def _rounded(mode: str, stage: int | None, way: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    """Weights, and the loss scale in the end; ``stage``: None: DDP."""
    _forget_graphs()
    given: dict[str, Any] = {"max_epochs": 3, "limit_val_batches": 0}
    bad = BAD if mode == "16-mixed" else None
    if stage is not None:
        trainer = make_trainer(mode, stage, {"fp16": FP16}, **given)
    elif mode == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        trainer = _ddp(**given, plugins=[MixedPrecision(mode, "cpu", scaler)])
    else:
        trainer = _ddp(**given, precision=mode)
    module = Rounded(way, options, bad)
    trainer.fit(module)
    assert module.batches == BATCHES
    assert _graphs()[0] > 0
    assert _graphs()[1] == 0
    if mode != "16-mixed":
        return _weights(trainer, module), 1.0
    if stage is None:
        return _weights(trainer, module), scaler.get_scale()
    assert plugin_of(trainer).skipped_steps == 1
    return _weights(trainer, module), plugin_of(trainer).loss_scale


def _exact(bad: int | None) -> dict[str, Tensor]:
    """Weights of an uncompiled run of DDP in 64 bits, which leaves out the step of batch ``bad``."""
    trainer, module = _ddp(max_epochs=3, limit_val_batches=0, precision="64-true"), Rounded("none", {}, bad, skips=True)
    trainer.fit(module)
    return _weights(trainer, module)


def _errors(mode: str, stages: list[int], way: str, options: dict[str, Any]) -> None:
    """Compare the error of all weights with DDP's: its norm, and its largest element."""
    exact = _exact(BAD if mode == "16-mixed" else None)
    plain, scale = _rounded(mode, None, way, options)
    assert scale == (32.0 if mode == "16-mixed" else 1.0)
    bound = _difference(plain, exact)
    assert 0 < bound.norm() < 0.1 * torch.cat([value.flatten() for value in exact.values()]).norm()
    for stage in stages:
        found, also = _rounded(mode, stage, way, options)
        assert also == scale
        assert bool(found) == (dist.get_rank() == 0)
        if found:
            assert all(value.dtype == torch.float32 for value in found.values())
            error = _difference(found, exact)
            for order in (2.0, float("inf")):
                assert error.norm(order) <= 2 * bound.norm(order), f"stage {stage}: {error.norm(order)}"


def _difference(found: dict[str, Tensor], exact: dict[str, Tensor]) -> Tensor:
    return torch.cat([(found[name].double() - value).flatten() for name, value in exact.items()])


LOW: list[tuple[str, list[int], str, dict[str, Any]]] = [
    ("16-mixed", [2], "blocks", AOT),
    ("bf16-mixed", [3], "blocks", AOT),
    *itertools.product(("16-mixed", "bf16-mixed"), [[1, 2, 3]], ("blocks", "net"), [INDUCTOR]),
]


@pytest.mark.parametrize(("mode", "stages", "way", "options"), only_rows(LOW[1:2], LOW))
def test_errors_of_16_bits_are_those_of_ddp(
    pool: Pool, mode: str, stages: list[int], way: str, options: dict[str, Any]
) -> None:
    if options is INDUCTOR and shutil.which("g++") is None:
        pytest.skip("inductor needs a compiler")
    pool.run(2, _errors, mode, stages, way, options)


# ---- two optimizers --------------------------------------------------------------------------------------------------


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.score = Block(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.score(self.body(x))
        return made


class Gan(GPT):
    """Two networks in turn, each compiled as a whole if there are ``options``. ``backward``: how it is called."""

    def __init__(self, world: int, options: dict[str, Any] | None, bare: bool) -> None:
        super().__init__(world)
        self.automatic_optimization = False
        del self.net, self.temperature
        torch.manual_seed(3)
        self.maker, self.critic, self.bare = Block(), Critic(), bare
        if options is not None:
            self.maker.compile(**options)
            self.critic.compile(**options)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        rows = F.one_hot(batch, VOCAB)[..., 1:].to(self.dtype)
        optimizers: Any = self.optimizers()
        for number, optimizer in enumerate(optimizers):
            self.toggle_optimizer(optimizer)
            made = self.maker(rows)
            loss = self.critic(made.detach() if number else made).sin().mean()
            loss = self.critic(rows).square().mean() - loss if number else loss
            optimizer.zero_grad()
            self.backward_of(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def backward_of(self, loss: Tensor) -> None:
        call: Callable[[], None] = loss.backward if self.bare else lambda: self.manual_backward(loss)
        call()

    def configure_optimizers(self) -> Any:
        kinds: list[Any] = [torch.optim.SGD, torch.optim.AdamW]
        options: list[dict[str, Any]] = [{"lr": 0.1, "momentum": 0.9}, {"lr": 1e-2}]
        nets = (self.maker, self.critic)
        return [kind(net.parameters(), **given) for kind, net, given in zip(kinds, nets, options, strict=True)]


GAN_RUN: dict[str, Any] = {"max_epochs": 2, "precision": "64-true", "limit_val_batches": 0}


def _gan(stage: int, options: dict[str, Any], bare: bool) -> dict[str, Any]:
    _forget_graphs()
    trainer, module = sharded_trainer(stage, **GAN_RUN), Gan(dist.get_world_size(), options, bare)
    trainer.fit(module)
    assert _graphs()[0] > 0
    assert stage == 3 or _graphs()[1] == 0, "at stage 3 a graph ends at each unit"
    return {name: value.numpy() for name, value in _weights(trainer, module).items()}


@pytest.mark.parametrize(
    ("stage", "options", "bare"),
    only_rows([(2, AOT, True)], [(2, AOT, True), *itertools.product([1, 2, 3], [INDUCTOR], [False, True])]),
)
def test_two_optimizers(pool: Pool, stage: int, options: dict[str, Any], bare: bool) -> None:
    if options is INDUCTOR and shutil.which("g++") is None:
        pytest.skip("inductor needs a compiler")
    module = Gan(1, None, False)
    single_trainer(**GAN_RUN).fit(module)
    want = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    assert_same(pool.run(2, _gan, stage, options, bare)[0], want, rtol=1e-10, atol=1e-12)
