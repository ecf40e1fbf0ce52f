"""Runs that are recorded for ``lt-zero compare``: one model through each face, and over each kind of ranks.

A bug that is planted makes the gradient of a layer's output too large from a step on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero import FabricZeroStrategy
from lt_zero.tools.compare.recorder import RECORD
from tests.support import parallel_module, pipeline_module, sequences
from tests.support.lightning_tools import sharded_trainer, torchrun_env
from tests.support.mixtures import WIDTH, Mixture
from tests.support.parity import OPTIMIZERS

STEPS = 3


@contextmanager
def planted(layer: str | None, calls: int) -> Iterator[None]:
    """Context in which gradients of a layer's output are 1.05 times too large from its call ``calls`` on.

    Layers are found by the end of their names when modules are sharded.
    """
    seen = [0]

    def hook(module: nn.Module, arguments: Any, output: Tensor) -> None:
        seen[0] += 1
        if seen[0] > calls and output.requires_grad:
            output.register_hook(lambda grad: grad * 1.05)

    def plant(engine: Any, *rest: Any) -> Any:
        for name, module in engine.root.named_modules():
            if layer is not None and name.endswith(layer):
                module.register_forward_hook(hook)
        return recorded(engine, *rest)

    recorded = lt_zero.training.session.follow  # type: ignore[attr-defined]
    with mock.patch("lt_zero.training.session.follow", plant):
        yield


def run(name: str, folder: str, stage: int, options: dict[str, Any], layer: str | None = None, calls: int = 0) -> None:
    """Record the run ``name`` in ``folder``, with a planted bug if there is a ``layer``."""
    with mock.patch.dict(os.environ, {RECORD: folder}), planted(layer, calls):
        RUNS[name](stage, **options)


def _sequences(face: str) -> Callable[..., object]:
    def train(stage: int, sequence: int = 1, tensor: int = 1, accumulates: int = 1) -> object:
        return sequences.FACES[face](stage, STEPS, accumulates, "sgd", sequences.keys_of(sequence, tensor))

    return train


def _fabric(stage: int, accumulates: int = 1) -> None:
    os.environ.update(torchrun_env())
    block = {"stage": stage, "stage3_param_persistence_threshold": 0}
    strategy = FabricZeroStrategy(config={"zero_optimization": block})
    fabric = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    net = sequences.Decoder()
    model, optimizer = fabric.setup(net, OPTIMIZERS["sgd"](net.parameters()))
    for number in range(STEPS * accumulates):
        ends = number % accumulates == accumulates - 1
        batch = sequences.whole(sequences.batch_of(number * dist.get_world_size() + dist.get_rank()))
        with fabric.no_backward_sync(model, enabled=not ends):
            fabric.backward(model(**batch) / accumulates)
        if ends:
            optimizer.step()
            optimizer.zero_grad()


def _tensor(stage: int, tensor: int = 1) -> None:
    config = {"tensor_parallel": {"autotp_size": tensor}}
    module = parallel_module.Module(data=dist.get_world_size() // tensor)
    sharded_trainer(stage, config=config, max_steps=STEPS, log_every_n_steps=1).fit(module)


def _pipeline(stage: int, stages: int = 1) -> None:
    config = {"pipeline": {"stages": stages, "num_microbatches": 4}}
    module = pipeline_module.Module(data=dist.get_world_size() // stages)
    sharded_trainer(stage, config=config, max_steps=STEPS, log_every_n_steps=1).fit(module)


def _experts(stage: int, experts: int = 1) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    if experts > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": experts}
    optimizer = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    engine, *_ = lt_zero.initialize(model=Mixture(), config={**config, "optimizer": optimizer})
    for step in range(STEPS):
        rows = torch.randn(12, 3, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        engine.backward(engine(rows).square().mean())
        engine.step()
    engine.destroy()


RUNS: dict[str, Callable[..., object]] = {
    **{face: _sequences(face) for face in ("trainer", "loop")},
    "fabric": _fabric,
    "tensor": _tensor,
    "pipeline": _pipeline,
    "experts": _experts,
}
