"""Where values of the ``pipeline`` block are looked for: in a step of a pipeline on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lt_zero import ZeroConfig
from lt_zero.parallel import LayerSpec
from lt_zero.parallel.mesh import ParallelSizes
from tests.support.pipelines import VOCABULARY, WIDTH, Ranks, mean_loss, start
from tests.support.pool import Pool
from tests.support.reach_engine import Config, Lab, nested

COUNTS = {"made": 0, "forwards": 0, "losses": 0}


class Layer(nn.Linear):
    def __init__(self, numel: int) -> None:
        COUNTS["made"] += torch.get_default_device().type != "meta"  # where elements are counted
        super().__init__(WIDTH, WIDTH)
        self.beside = nn.Parameter(torch.zeros(numel))

    def forward(self, x: Tensor) -> Tensor:
        COUNTS["forwards"] += torch.is_grad_enabled()
        return super().forward(x) + self.beside.sum()


def _layers() -> list[Any]:
    others = [LayerSpec(Layer, numel) for numel in (500, 1, 1, 1, 1)]
    return [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *others, LayerSpec(nn.Linear, WIDTH, VOCABULARY)]


def _counted_loss(logits: Tensor, targets: Tensor) -> Tensor:
    COUNTS["losses"] += 1
    return mean_loss(logits, targets)


def _run(block: dict[str, Any]) -> dict[str, Any]:
    COUNTS.update(dict.fromkeys(COUNTS, 0))
    run = start(Ranks(), 1, "sgd", _layers, {"num_microbatches": None, **block})
    run.model.pipe.loss_fn = _counted_loss
    run.step(0, rows=24)
    pipe = run.model.pipe
    (schedule,) = pipe.runner._schedules.values()
    return {**COUNTS, "stages": len(pipe.parts), "cut": pipe.parts[0].stop, "schedule": type(schedule).__name__}


def _seen(pool: Pool, block: dict[str, Any], what: str) -> Any:
    found = [facts[what] for facts in pool.run(2, _run, block)]
    return sum(found) if what in COUNTS else found[0]


def step(what: str) -> Callable[[Lab, Config], Any]:
    """``made``, ``forwards``, ``losses``: of both ranks together; ``cut``: the first layer of the second stage."""

    def look(lab: Lab, config: Config) -> Any:
        return _seen(lab.pool, nested(config, lab.folder).get("pipeline", {}), what)

    return look


def ranks(lab: Lab, config: Config) -> int:
    """How many of four ranks have stages after each other."""
    return ParallelSizes.of(ZeroConfig.of(nested(config, lab.folder)), 4).pipeline
