"""Experts of a mixture over ranks, against one process in which each expert sees all tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import lt_zero
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.load import as_lightning, restore_weights
from lt_zero.checkpoint.native.pieces import optimizer_fragments, parameter_names, weight_fragments
from lt_zero.checkpoint.native.save import bundle, make_directory, write
from lt_zero.comm.shard_group import ShardGroup
from lt_zero.comm.world import World
from lt_zero.common.errors import ConfigError
from lt_zero.config import ZeroConfig
from lt_zero.engine.engine import Engine
from lt_zero.parallel import Experts, combine, dispatch
from lt_zero.parallel.experts import SIZE, cut_experts
from lt_zero.parallel.mesh import ParallelMesh, ParallelSizes
from lt_zero.session.checkpoints import Progress, restore_optimizers
from tests.support.matrix import only_rows
from tests.support.mixtures import NUMBER, FeedForwards, Mixture, dense, send_all_to
from tests.support.parallel_nets import CPU, all_states, all_weights
from tests.support.parity import OPTIMIZERS, RELEASE, config_of
from tests.support.pool import Pool

# ---- dispatch and combine --------------------------------------------------------------------------------------------


def _choices(kind: str, rank: int, count: int) -> Tensor:
    drawn = torch.Generator().manual_seed(rank)
    if kind == "one":
        return torch.full((count, 1), 1)
    # With "none", ranks after the first get nothing.
    return torch.rand(count, 2 if kind == "none" else NUMBER, generator=drawn).argsort(1)[:, :2]


def _layer(kinds: list[str], dtype: torch.dtype) -> None:
    """Values and gradients of tokens, scores and experts, with other numbers of tokens on each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    for kind in kinds:
        torch.manual_seed(0)
        whole = FeedForwards().to(dtype)
        mine = [nn.Parameter(p.detach().chunk(size)[rank].clone()) for p in (whole.up, whole.down)]
        for other in range(size):
            count = 3 + other if kind != "no tokens" else 4 * (other > 0)
            torch.manual_seed(other)
            tokens, ids = torch.randn(count, 6, dtype=dtype), _choices(kind, other, count)
            scores = torch.rand(ids.shape, dtype=dtype)
            given = tokens.clone().requires_grad_(), scores.clone().requires_grad_()
            want = dense(whole, given[0], ids, given[1])
            want.square().sum().backward()
            if other == rank:
                own = tokens.requires_grad_(), scores.requires_grad_()
                sent = dispatch(tokens, ids, NUMBER, group)
                pairs = zip(sent.split(), *mine, strict=True)
                rows = torch.cat([torch.tanh(x @ up) @ down for x, up, down in pairs])
                found = combine(rows, sent, scores)
                wanted = want, *given
        bound: Any = {"rtol": 0, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.1}
        torch.testing.assert_close(found, wanted[0], **bound)
        found.square().sum().backward()
        for one, other in zip(own, wanted[1:], strict=True):
            torch.testing.assert_close(one.grad, other.grad, **bound)
        for one, other in zip(mine, (whole.up, whole.down), strict=True):
            assert other.grad is not None
            torch.testing.assert_close(one.grad, other.grad.chunk(size)[rank], **bound)


KINDS = ["two", "one", "none", "no tokens"]


@pytest.mark.parametrize(
    ("ranks", "dtype"), only_rows([(2, torch.float64)], [(2, torch.float64), (4, torch.float64), (2, torch.bfloat16)])
)
def test_tokens_go_to_experts_and_back(pool: Pool, ranks: int, dtype: torch.dtype) -> None:
    pool.run(ranks, _layer, KINDS, dtype)


# ---- training --------------------------------------------------------------------------------------------------------


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(10 * step + rank))


class MixtureRun(NamedTuple):
    """A model on this rank, and its engine."""

    model: Mixture
    engine: Engine
    optimizer: Optimizer
    sharded: lt_zero.ShardedOptimizer

    def train(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.model(_batch(step, dist.get_rank())).square().mean().backward()
        self.optimizer.step()

    def everything(self) -> dict[str, dict[str, Tensor]]:
        return {"weights": all_weights(self.engine), **all_states(self)}


def start(stage: int, size: int, optimizer: str, sends_all_to: int | None = None) -> MixtureRun:
    """A run whose experts are on ``size`` ranks."""
    world, model = World.join(CPU), Mixture()
    if sends_all_to is not None:
        send_all_to(model, sends_all_to)
    config, given = config_of(stage, RELEASE if stage == 3 else {}), dict[str, Any]()
    everyone = ShardGroup.of_all(world)
    if size > 1:
        mesh = ParallelMesh(ParallelSizes(world.size, expert=size), world)
        mesh.cut(model, config)
        given = mesh.arguments(model, everyone, config)
    engine = lt_zero.shard(model, config, CPU, group=everyone, **given)
    made = OPTIMIZERS[optimizer](model.parameters())
    return MixtureRun(model, engine, made, lt_zero.ShardedOptimizer(engine, made))


def _train(stage: int, size: int, optimizer: str, sends_all_to: int | None) -> None:
    """Compare gradients' norm, and weights, after each step."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, engine, made, sharded = start(stage, size, optimizer, sends_all_to)
    reference = Mixture(dense=True)
    if sends_all_to is not None:
        send_all_to(reference, sends_all_to)
    expected = OPTIMIZERS[optimizer](reference.parameters())
    for step in range(3):
        made.zero_grad()
        expected.zero_grad()
        model(_batch(step, rank)).square().mean().backward()
        for other in range(ranks):
            (reference(_batch(step, other)).square().mean() / ranks).backward()
        for name, parameter in reference.named_parameters():
            found = lt_zero.full_grad(model.get_parameter(name))
            torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=1e-6, msg=f"{name}, step {step}")
        want = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05))
        assert want > 0.05
        assert float(sharded.grads.clip_norm(0.05)) == pytest.approx(want, rel=1e-5)
        made.step()
        expected.step()
        for name, value in all_weights(engine).items():
            wanted = reference.get_parameter(name).detach()
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=2e-6, msg=f"{name}, step {step}")
    assert sum(bucket.layout.numel for bucket in engine.buckets) < sum(p.numel() for p in reference.parameters())


@pytest.mark.parametrize(
    ("ranks", "stage", "size", "optimizer", "sends_all_to"),
    only_rows(
        [(2, 3, 2, "adamw", None), (2, 1, 2, "sgd", 2)],
        [
            *((2, stage, 2, "adamw", None) for stage in (0, 1, 2, 3)),
            *((2, stage, 2, "sgd", 2) for stage in (1, 3)),
            *((4, stage, size, "sgd", None) for stage in (0, 1, 2, 3) for size in (2, 4)),
            *((4, stage, 2, "adamw", 1) for stage in (2, 3)),
        ],
    ),
)
def test_experts_train_as_in_one_process(
    pool: Pool, ranks: int, stage: int, size: int, optimizer: str, sends_all_to: int | None
) -> None:
    pool.run(ranks, _train, stage, size, optimizer, sends_all_to)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _save(run: MixtureRun, path: str) -> None:
    world = run.engine.world
    content = {"state_dict": weight_fragments(run.engine), "optimizer_states": [optimizer_fragments(run.sharded)]}
    saved = bundle(content, [parameter_names(run.optimizer, run.engine)], world, {}, {})
    write(saved, make_directory(world, path), world, world.saving_group(background=False))


def _load(run: MixtureRun, path: str) -> None:
    archive = Archive(path)
    found = as_lightning(archive)
    restore_weights(run.model, run.engine, run.engine.config, found["state_dict"], strict=True)
    Progress(stepped=True).restore(run.engine, None)
    restore_optimizers(run.engine, {0: (run.optimizer, found["optimizer_states"][0])})
    archive.close()


def _goes_on(folder: str, runs: list[tuple[int, int]]) -> None:
    """Each run goes on from the checkpoint of the one before; a last one trains as the first would have."""
    (stage, size), *others = runs
    run = start(stage, size, "adamw")
    run.train(0)
    had = run.everything()
    assert len(had) == 3
    for number, (stage, size) in enumerate(others):
        _save(run, f"{folder}/{number}")
        run = start(stage, size, "adamw")
        _load(run, f"{folder}/{number}")
        found = run.everything()
        assert found.keys() == had.keys()
        for kind, values in had.items():
            assert all(torch.equal(found[kind][name], value) for name, value in values.items()), (number, kind)
    run.train(1)
    straight = start(1, 1, "adamw")
    straight.train(0)
    straight.train(1)
    wanted = all_weights(straight.engine)
    for name, value in all_weights(run.engine).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=2e-6, msg=name)


PATHS = [(2, [(3, 2), (1, 1), (2, 2)]), (4, [(1, 2), (3, 4), (0, 1), (3, 2), (0, 4)])]


@pytest.mark.parametrize(("ranks", "runs"), only_rows(PATHS[:1], PATHS))
def test_checkpoints_go_on_at_another_number_of_expert_ranks(
    pool: Pool, tmp_path: Path, ranks: int, runs: list[tuple[int, int]]
) -> None:
    pool.run(ranks, _goes_on, str(tmp_path), runs)


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    tokens, ids = torch.ones(3, 2), torch.tensor([0, 1, 4])
    for given, text in (
        ((tokens, ids, 4), "from 0 to 4, and there are 4 experts"),
        ((tokens, ids - 1, 4), "from -1 to 3"),
        ((tokens, ids[:2], 4), r"\[2\] for 3 tokens"),
        ((tokens, ids.float(), 5), "Pass whole numbers"),
    ):
        with pytest.raises(ValueError, match=text):
            dispatch(*given)
    sent = dispatch(tokens, ids, 5)
    with pytest.raises(ValueError, match="got 2 rows, and dispatch gave 3"):
        combine(tokens[:2], sent)
    with pytest.raises(ValueError, match="scores of shape"):
        combine(tokens, sent, tokens)


class _Ranks:
    size = 2


class Odd(Experts):
    """Experts with a parameter of any shape."""

    def __init__(self, number: int, *shape: int) -> None:
        super().__init__(number)
        self.weight = nn.Parameter(torch.ones(shape))


def test_modules_that_cannot_be_cut_are_refused() -> None:
    tied, alone = Odd(4, 4, 2), nn.Linear(2, 4, bias=False)
    alone.weight = tied.weight
    for module, text in (
        (nn.Linear(2, 2), "Linear has no lt_zero.parallel.Experts"),
        (nn.Sequential(Odd(3, 3, 2)), "does not divide the 3 experts of 0.weight"),
        (Odd(4, 2, 4), r"weight of shape \[2, 4\] is no stack of 4 experts"),
        (nn.ModuleDict({"experts": tied, "head": alone}), "head.weight is a parameter of lt_zero.parallel.Experts"),
    ):
        with pytest.raises(ConfigError, match=text) as caught:
            cut_experts(module, None, _Ranks())  # type: ignore[arg-type]
        assert caught.value.problems[0].key == SIZE


BLOCK = {"expert_parallel": {"enabled": True, "autoep_size": 2}}


def test_keys_that_exclude_experts_over_ranks() -> None:
    with pytest.raises(ConfigError, match="gradient_compression.algorithm needs the same parameters"):
        ZeroConfig.of({**BLOCK, "gradient_compression": {"algorithm": "topk"}})


def test_sizes_have_to_divide_the_ranks() -> None:
    with pytest.raises(ConfigError, match="autoep_size=2 does not divide the 3 data ranks"):
        ParallelSizes.of(ZeroConfig.of(BLOCK), 3)
    with pytest.raises(ConfigError, match="autoep_size=2 does not divide the 3 data and sequence ranks"):
        ParallelSizes.of(ZeroConfig.of({**BLOCK, "sequence_parallel_size": 3}), 3)
    sizes = ParallelSizes.of(ZeroConfig.of({**BLOCK, "tensor_parallel": {"autotp_size": 2}}), 8)
    assert sizes.expert_rows().tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]], "each tensor rank among its own"
    assert sizes.expert_parts().tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert sizes.parts().tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
