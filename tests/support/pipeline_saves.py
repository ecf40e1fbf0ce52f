"""Saves and loads of pipelines, and all of their values, found without what tests check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.load import as_lightning
from lt_zero.checkpoint.native.pieces import optimizer_fragments, parameter_names
from lt_zero.checkpoint.native.save import bundle, make_directory, write
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.parallel import LayerSpec, TiedLayerSpec
from lt_zero.training.checkpoints import beside, weights_to_save
from lt_zero.training.restore import Contents, ModuleContents, restore
from tests.support.parallel_nets import all_states, all_weights
from tests.support.pipelines import VOCABULARY, WIDTH, Block, Ranks, Run, head, start


class Counting(nn.Module):
    """A layer without parameters, whose buffer counts its calls, and another that forward does not use."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.randn(3, generator=torch.Generator().manual_seed(number)))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.calls += 1
        return x


def layers(dropout: float = 0.0) -> list[Any]:
    """Tied ends, blocks that two tensor ranks can cut, and layers of buffers only."""
    embed = ("embed", nn.Embedding, VOCABULARY, WIDTH)
    blocks = [LayerSpec(Block, 8, dropout), LayerSpec(Counting, 1), LayerSpec(Block, 12, dropout)]
    blocks += [LayerSpec(Block, 8, dropout), LayerSpec(Counting, 2), LayerSpec(Block, 10, dropout)]
    return [TiedLayerSpec(*embed), *blocks, nn.LayerNorm(WIDTH), TiedLayerSpec(*embed, forward_fn=head)]


class Mesh(NamedTuple):
    """Ranks, and how layers are divided among them."""

    ranks: Ranks
    pipeline: dict[str, Any]

    def __repr__(self) -> str:
        data, tensor, stages = self.ranks
        return "-".join([f"data{data}", f"tensor{tensor}", f"pipeline{stages}", *self.pipeline.values()])

    def start(self, stage: int, optimizer: str, **how: Any) -> Run:
        return start(self.ranks, stage, optimizer, layers, {"partition_method": "uniform", **self.pipeline}, **how)


def mesh(data: int = 1, tensor: int = 1, pipeline: int = 1, **block: Any) -> Mesh:
    return Mesh(Ranks(data, tensor, pipeline), block)


def train(run: Run, steps: range) -> None:
    for number in steps:
        run.step(number)


def save(run: Run, path: str, left_out: Sequence[str] = ()) -> None:
    engine = run.engine
    world, names = engine.world, [parameter_names(run.optimizer, engine)]
    content = {"state_dict": weights_to_save(engine, left_out), "optimizer_states": [optimizer_fragments(run.sharded)]}
    content |= beside({"": engine})
    saved = bundle(content, names, world, {}, {}, left_out, engine.peers.ranks)
    write(saved, make_directory(world, path), world, world.saving_group(background=False))


def load(run: Run, path: str) -> None:
    archive = Archive(path)
    found = as_lightning(archive)
    part = ModuleContents(run.model, run.engine, found["state_dict"], left_out=found["lt_zero"]["frozen_left_out"])
    part = part.going_on({**found, "global_step": 1}, {0: (run.optimizer, found["optimizer_states"][0])})
    restore(Contents((part,)), run.engine.world, LossScaleController(run.engine.policy))
    archive.close()


def everything(run: Run) -> dict[str, Any]:
    """Weights, states, step counters and buffers of all stages, by kind and name. Collective."""
    engine = run.engine
    found: dict[str, Any] = {"weights": all_weights(engine), **all_states(run)}
    steps = {engine.owner[id(p)]: state["step"] for p, state in run.optimizer.state.items() if "step" in state}
    mine = {bucket.layout.spans[index].name: float(step) for (bucket, index), step in steps.items()}
    buffers = {name: value.clone() for name, value in run.model.named_buffers()}
    for kind, held in (("steps", mine), ("buffers", buffers)):
        found[kind] = {}
        for theirs in engine.world.host_gather(held, kind):
            found[kind] = {**theirs, **found[kind]}
    return found
