"""A model with a mixture of experts, and the same on one process, written without what is tested; runs of mixtures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import lt_zero
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.load import as_lightning
from lt_zero.checkpoint.native.pieces import optimizer_fragments, parameter_names, weight_fragments
from lt_zero.checkpoint.native.save import bundle, make_directory, write
from lt_zero.config.options import group_options
from lt_zero.core.ask import configure_group
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.engine.engine import Engine
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.features import features_of
from lt_zero.parallel import Experts
from lt_zero.parallel.mesh import ParallelMesh, ParallelSizes
from lt_zero.training.restore import Contents, ModuleContents, restore
from tests.support.parallel_nets import CPU, all_states, all_weights
from tests.support.parity import OPTIMIZERS, RELEASE, config_of

NUMBER = 4
WIDTH = 6
HIDDEN = 5


class FeedForwards(Experts):
    """Experts with two matrices each."""

    def __init__(self, number: int = NUMBER) -> None:
        super().__init__(number)
        self.up = nn.Parameter(torch.randn(number, WIDTH, HIDDEN) / 2)
        self.down = nn.Parameter(torch.randn(number, HIDDEN, WIDTH) / 2)

    def forward(self, tokens: Tensor, expert_ids: Tensor, scores: Tensor) -> Tensor:
        mine = self.dispatch(tokens, expert_ids)
        pairs = zip(mine.split(), self.local(self.up), self.local(self.down), strict=True)
        return self.combine(torch.cat([torch.tanh(rows @ up) @ down for rows, up, down in pairs]), mine, scores)


def dense(experts: FeedForwards, tokens: Tensor, expert_ids: Tensor, scores: Tensor) -> Tensor:
    """What ``FeedForwards`` with all experts returns: each expert sees all tokens, and those not sent to it count 0."""
    out = torch.zeros_like(tokens)
    for number in range(experts.number):
        share = (scores * (expert_ids == number)).sum(1, keepdim=True)
        out = out + share * (torch.tanh(tokens @ experts.up[number]) @ experts.down[number])
    return out


class MixtureBlock(nn.Module):
    """A router that chooses two experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUMBER)
        self.experts = FeedForwards()
        self.dense = False

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        scores, expert_ids = self.router(tokens).softmax(-1).topk(2, -1)
        made = (
            dense(self.experts, tokens, expert_ids, scores) if self.dense else self.experts(tokens, expert_ids, scores)
        )
        return x + made.view_as(x)


class Mixture(nn.Module):
    """Two blocks and a head. ``dense``: as one process without experts over ranks."""

    def __init__(self, dense: bool = False, sends_all_to: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(MixtureBlock() for _ in range(2)), nn.Linear(WIDTH, 3)
        for layer in self.layers:
            layer.dense = dense  # type: ignore[assignment]
        if sends_all_to is not None:
            send_all_to(self, sends_all_to)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


def send_all_to(model: Mixture, expert: int) -> None:
    """Let the routers choose ``expert`` for all tokens, and the one after it."""
    with torch.no_grad():
        for layer in model.layers:
            layer.router.bias[expert] += 100.0  # type: ignore[union-attr, index]
            layer.router.bias[(expert + 1) % NUMBER] += 50.0  # type: ignore[union-attr, index]


# ---- runs ------------------------------------------------------------------------------------------------------------

Loss = Callable[[Any, int, int], Tensor]  # of a model, the number of a step, and a rank


def square(model: Mixture, step: int, rank: int) -> Tensor:
    return model(torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


class MixtureRun(NamedTuple):
    """A model on this rank, and its engine."""

    model: Any
    engine: Engine
    optimizer: Optimizer
    sharded: lt_zero.ShardedOptimizer

    def train(self, step: int, loss: Loss = square) -> None:
        self.optimizer.zero_grad()
        loss(self.model, step, dist.get_rank()).backward()
        self.optimizer.step()

    def everything(self) -> dict[str, dict[str, Tensor]]:
        return {"weights": all_weights(self.engine), **all_states(self)}

    def save(self, path: str) -> None:
        world = self.engine.world
        content = {"state_dict": weight_fragments(self.engine), "optimizer_states": [optimizer_fragments(self.sharded)]}
        saved = bundle(content, [parameter_names(self.optimizer, self.engine)], world, {}, {})
        write(saved, make_directory(world, path), world, world.saving_group(background=False))

    def load(self, path: str) -> None:
        archive = Archive(path)
        found = as_lightning(archive)
        part = ModuleContents(self.model, self.engine, found["state_dict"])
        part = part.going_on({**found, "global_step": 1}, {0: (self.optimizer, found["optimizer_states"][0])})
        restore(Contents((part,)), self.engine.world, LossScaleController(self.engine.policy))
        archive.close()


def start(
    stage: int, size: int, optimizer: str, model: Callable[[], Any] = Mixture, zero: dict[str, Any] | None = None
) -> MixtureRun:
    """A run whose experts are on ``size`` ranks. ``zero``: further keys of zero_optimization."""
    world, made = World.join(CPU), model()
    config = config_of(stage, {**(RELEASE if stage == 3 else {}), **(zero or {})})
    given = dict[str, Any]()
    everyone = ShardGroup.of_all(world)
    configure_group(everyone, group_options(config), features_of(config))
    if size > 1:
        mesh = ParallelMesh(ParallelSizes(world.size, expert=size), world)
        mesh.cut(made, config)
        given = mesh.arguments(made, everyone, config)
    engine = lt_zero.shard(made, config, CPU, group=everyone, **given)
    chosen = OPTIMIZERS[optimizer](made.parameters())
    return MixtureRun(made, engine, chosen, lt_zero.ShardedOptimizer(engine, chosen))


def train_as_one_process(
    run: MixtureRun, reference: nn.Module, optimizer: str, loss: Loss, gradients: float, weights: float
) -> None:
    """Three steps: compare gradients, their norm, and weights after each, with those of ``reference``.

    ``gradients``, ``weights``: how far each of them may be.
    """
    model, engine, made, sharded = run
    ranks, rank = dist.get_world_size(), dist.get_rank()
    expected = OPTIMIZERS[optimizer](reference.parameters())
    for step in range(3):
        made.zero_grad()
        expected.zero_grad()
        loss(model, step, rank).backward()
        for other in range(ranks):
            (loss(reference, step, other) / ranks).backward()
        for name, parameter in ((n, p) for n, p in reference.named_parameters() if p.requires_grad):
            found = lt_zero.full_grad(model.get_parameter(name))
            # An expert that got no tokens has no gradient on one process, if transformers computes it.
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=gradients, msg=f"{name}, step {step}")
        want = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05))
        assert want > 0.05
        assert float(sharded.grads.clip_norm(0.05)) == pytest.approx(want, rel=1e-5)
        made.step()
        expected.step()
        for name, value in all_weights(engine).items():
            wanted = reference.get_parameter(name).detach()
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=weights, msg=f"{name}, step {step}")
    assert sum(bucket.layout.numel for bucket in engine.buckets) < sum(p.numel() for p in reference.parameters())


def go_on(folder: str, runs: list[tuple[int, int]], model: Callable[[], Any], loss: Loss, far: float) -> None:
    """Each run, of a stage and a number of expert ranks, goes on from the checkpoint of the one before.

    Weights and states are the same bits; the last one trains as the first would have, but for ``far``.
    """
    (stage, size), *others = runs
    run = start(stage, size, "adamw", model)
    run.train(0, loss)
    had = run.everything()
    assert len(had) == 3
    for number, (stage, size) in enumerate(others):
        run.save(f"{folder}/{number}")
        run = start(stage, size, "adamw", model)
        run.load(f"{folder}/{number}")
        found = run.everything()
        assert found.keys() == had.keys()
        for kind, values in had.items():
            assert all(torch.equal(found[kind][name], value) for name, value in values.items()), (number, kind)
    run.train(1, loss)
    straight = start(1, 1, "adamw", model)
    straight.train(0, loss)
    straight.train(1, loss)
    wanted = all_weights(straight.engine)
    for name, value in all_weights(run.engine).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=far, msg=name)
