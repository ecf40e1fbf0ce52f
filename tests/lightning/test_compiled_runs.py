"""Runs of a Trainer with compiled models give the weights, graphs and breaks of DDP, compiled in the same way."""

from __future__ import annotations

import os
import shutil
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lt_zero.common import plain_names
from tests.support.lightning_tools import GPT, QUIET, sharded_trainer, torchrun_env
from tests.support.pool import Pool


class Module(GPT):
    """``way``: what is compiled, and whether in ``configure_model``."""

    def __init__(self, way: str, options: dict[str, Any]) -> None:
        super().__init__(dist.get_world_size())
        self.way, self.options, self.compiled = way, options, False
        if not way.startswith("later"):
            self._compile()

    def configure_model(self) -> None:
        if not self.compiled:
            self._compile()

    def _compile(self) -> None:
        self.compiled = True
        if self.way == "wrapped":
            self.net.blocks = nn.ModuleList(torch.compile(block, **self.options) for block in self.net.blocks)
        for module in [self.net] if self.way == "net" else self.net.blocks if self.way != "wrapped" else []:
            module.compile(**self.options)


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


def _run(stage: int | None, way: str, options: dict[str, Any], **settings: Any) -> tuple[dict[str, Tensor], Any]:
    """Weights (rank 0), and what has to be equal: metrics, graphs, breaks, calls; ``stage``: None: DDP."""
    warnings.filterwarnings("ignore")
    os.environ.update(torchrun_env())
    torch._dynamo.reset()
    counters.clear()
    hooks = Hooks()
    given: dict[str, Any] = {"max_steps": 3, "max_epochs": 3, "precision": "64-true", **settings}
    given["callbacks"] = [hooks] if given.pop("hooks", False) else []
    zero = given.pop("zero", None)
    if stage is None:
        trainer = pl.Trainer(**{**QUIET, "strategy": DDPStrategy(), "devices": dist.get_world_size(), **given})
    else:
        trainer = sharded_trainer(stage, zero, **given)
    module = Module(way, options)
    trainer.fit(module)
    if stage is None:
        found = {name: value.detach().clone() for name, value in plain_names.state_dict(module).items()}
    else:
        found = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    metrics = [*trainer.validate(module, verbose=False), *trainer.test(module, verbose=False)]
    return found, (metrics, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), hooks.calls)


def _beside_ddp(stages: list[int], *run: Any, **settings: Any) -> None:
    want, same = _run(None, *run, **settings)
    for stage in stages:
        found, also = _run(stage, *run, **settings)
        assert also[1:] == same[1:]
        for mine, theirs in zip(also[0], same[0], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-10)
        for name, value in found.items():
            torch.testing.assert_close(value, want[name], rtol=1e-10, atol=1e-12, msg=name)
        assert bool(found) == (dist.get_rank() == 0)


INDUCTOR: dict[str, Any] = {"backend": "inductor"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
@pytest.mark.parametrize(
    ("stages", "way", "options", "settings"),
    [
        ([1, 2, 3], "blocks", INDUCTOR, {}),
        ([1, 2], "net", INDUCTOR, {}),
        ([2, 3], "wrapped", INDUCTOR, {}),
        ([2, 3], "later", INDUCTOR, {}),
        ([3], "blocks", {"mode": "reduce-overhead"}, {}),
        ([2, 3], "blocks", INDUCTOR, {"hooks": True}),
        ([3], "blocks", INDUCTOR, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
        ([3], "blocks", INDUCTOR, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
    ],
)
def test_a_run_is_that_of_ddp(pool: Pool, stages: list[int], way: str, options: Any, settings: dict[str, Any]) -> None:
    pool.run(2, _call, stages, way, options, settings)


def _call(stages: list[int], way: str, options: dict[str, Any], settings: dict[str, Any]) -> None:
    _beside_ddp(stages, way, options, **settings)
