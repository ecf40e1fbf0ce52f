"""Forecasts of experts on several ranks: memory and traffic beside what an engine has and sends, and the command."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typer.testing import CliRunner

import lt_zero
from lt_zero import Sizes, ZeroConfig, estimate
from lt_zero.cli import app
from lt_zero.config.precision import dtype_policy
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.storage_plan import DEVICE, HOST
from lt_zero.parallel import Experts
from lt_zero.parallel.mesh import ParallelMesh, ParallelSizes
from lt_zero.planning.check import measured, setup_of
from lt_zero.planning.estimate import estimate_traffic
from lt_zero.planning.forecast import GATHERED, GRADS, MASTER, MOMENTS, REDUCE, WEIGHTS, forecast
from lt_zero.planning.transformer import Transformer
from lt_zero.training.lightning.monitor.comm_log import CommLog
from tests.support.matrix import only_rows
from tests.support.nodes import NodePool, Traffic
from tests.support.parallel_nets import CPU
from tests.support.pool import Pool

NUMBER, WIDTH, HIDDEN, TOKENS = 4, 64, 96, 320  # tokens of a rank, beside which numbers of tokens are few bytes


class Wide(Experts):
    def __init__(self) -> None:
        super().__init__(NUMBER)
        self.up = nn.Parameter(torch.randn(NUMBER, WIDTH, HIDDEN) / 8)
        self.down = nn.Parameter(torch.randn(NUMBER, HIDDEN, WIDTH) / 8)

    def forward(self, tokens: Tensor, expert_ids: Tensor) -> Tensor:
        mine = self.dispatch(tokens, expert_ids)
        experts = zip(mine.split(), self.local(self.up), self.local(self.down), strict=True)
        return self.combine(torch.cat([torch.relu(rows @ up) @ down for rows, up, down in experts]), mine)


class Layer(nn.Module):
    """Each expert gets as many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.experts = nn.Linear(WIDTH, WIDTH), Wide()

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.stack([torch.arange(len(x)) % NUMBER, torch.arange(1, len(x) + 1) % NUMBER], 1)
        result: Tensor = x + self.experts(self.dense(x), ids)
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(3)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


def config_for(stage: int, size: int, **zero: Any) -> ZeroConfig:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 500, "stage3_max_reuse_distance": 0, **zero}
    return ZeroConfig.of({"zero_optimization": zero, "expert_parallel": {"enabled": True, "autoep_size": size}})


def engine_of(config: ZeroConfig, mode: str, records: bool = False) -> Any:
    world = World.join(CPU, new_log=CommLog if records else None)
    model = Model()
    everyone = ShardGroup.of_all(world)
    mesh = ParallelMesh(ParallelSizes.of(config, world.size), world)
    mesh.cut(model, config)
    how = mesh.arguments(model, everyone, config)
    return lt_zero.shard(model, config, CPU, dtype_policy(config, mode), group=everyone, **how)


def _step(engine: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    dtype = engine.buckets[0].dtype
    engine.root(torch.ones(TOKENS, WIDTH, dtype=dtype)).float().square().mean().backward()
    optimizer.step()


def _compare(stage: int, mode: str, size: int) -> None:
    config, peak = config_for(stage, size), 0
    world = dist.get_world_size()
    cast = estimate(Model(), config, world, device="cpu", precision=mode)
    engine = engine_of(config, mode)
    assert estimate(engine.root, config, world, device="cpu", precision=mode) == cast, "of a model that is cut"
    optimizer = torch.optim.AdamW(engine.root.parameters())
    sharded, launch = lt_zero.ShardedOptimizer(engine, optimizer), Bucket.launch_gather

    def noting(bucket: Bucket) -> None:
        nonlocal peak
        launch(bucket)
        here = (b.compute.flat.nbytes for b in engine.buckets if b.sharding.params and not b.released)
        peak = max(peak, sum(here))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "launch_gather", noting)
        for _ in range(3):
            _step(engine, optimizer)
    have = {**measured(engine, [sharded]), GATHERED: peak}
    of_run = forecast(engine.plan, config, engine.policy, setup_of(engine, [optimizer]))
    for which, found in (("estimate", cast), ("run", of_run)):
        want = found.kinds(HOST)
        for kind in (WEIGHTS, MASTER, GRADS, MOMENTS, REDUCE, GATHERED):
            got, wanted = have.get(kind, 0), want.get(kind, 0)
            assert abs(got - wanted) <= 0.03 * max(got, wanted) + 128, (
                which,
                kind,
                "measured",
                got,
                "forecast",
                wanted,
            )
        assert found.parameters == sum(p.numel() for p in Model().parameters())


CASES = list(itertools.product([2, 4], [0, 1, 2, 3], ["32-true", "bf16-true"], [2, 4]))
CASES = [case for case in CASES if case[3] <= case[0]]


@pytest.mark.parametrize(("ranks", "stage", "mode", "size"), only_rows([(2, 3, "32-true", 2)], CASES))
def test_forecast_is_what_an_engine_takes(pool: Pool, ranks: int, stage: int, mode: str, size: int) -> None:
    pool.run(ranks, _compare, stage, mode, size)


# ---- traffic ---------------------------------------------------------------------------------------------------------


def _tokens(size: int) -> int:
    """Bytes of tokens that this rank gets in a step."""
    engine = engine_of(config_for(3, size), "32-true", records=True)
    optimizer = torch.optim.SGD(engine.root.parameters(), lr=0.1)
    _sharded = lt_zero.ShardedOptimizer(engine, optimizer)
    log = engine.world.log
    assert isinstance(log, CommLog)
    log.clear()
    _step(engine, optimizer)
    return sum(record.nbytes * record.calls for record in log.records() if record.name == "tokens of experts")


def shape_of() -> Transformer:
    return Transformer(3, WIDTH, 1, sequence=TOKENS, experts=NUMBER, top_k=2)


def test_as_many_bytes_of_tokens_as_forecast(pool: Pool) -> None:
    want = 3 * shape_of().to_experts(itemsize=4)
    assert pool.run(2, _tokens, 2) == [want, want]


def _sent(stage: int, size: int) -> float:
    """Bytes from this rank's node in the second of two steps."""
    engine = engine_of(config_for(stage, size), "32-true")
    optimizer = torch.optim.AdamW(engine.root.parameters())
    _sharded = lt_zero.ShardedOptimizer(engine, optimizer)
    for _ in range(2):
        with Traffic() as traffic:
            _step(engine, optimizer)
            engine.finish_steps()
    return traffic.sent


@pytest.mark.nodes
@pytest.mark.parametrize(("stage", "size"), only_rows([], list(itertools.product([1, 2, 3], [2, 4]))))
def test_as_many_bytes_between_nodes_as_forecast(node_pool: NodePool, stage: int, size: int) -> None:
    """Two nodes of two ranks: experts of two ranks stay on a node, those of four are on both, on one rank each."""
    zero = estimate_traffic(Model(), config_for(stage, size), 4, ranks_per_node=2, device="cpu").total
    tokens = 2 * 3 * shape_of().to_experts(itemsize=4) * (0.5 if size == 4 else 0)
    found = node_pool.run(_sent, stage, size)[::2]
    assert sum(found) / 2 == pytest.approx(zero + tokens, rel=0.06)


# ---- the command, without processes ----------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["estimate", *arguments], env={"COLUMNS": "120"})
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_experts_are_cut_by_expert_and_then_by_other_ranks() -> None:
    """Of 1e9 parameters 8e8 are of experts, over 8 of 32 ranks: at stage 1 a rank has 3e8, and 1/32 of all states."""
    sizes, config = Sizes(10**9, experts=8 * 10**8), config_for(1, 8)
    cast = estimate(sizes, config, 32)
    assert (cast.parameters, cast.local) == (10**9, 3 * 10**8)
    assert cast.kinds(DEVICE)[WEIGHTS] == pytest.approx(4 * 3e8, rel=0.01)
    assert cast.kinds(DEVICE)[MOMENTS] == pytest.approx(8 * 1e9 / 32, rel=0.01)
    both = ZeroConfig.of(config, overrides=["tensor_parallel.autotp_size=2"])
    cast = estimate(sizes, both, 32)
    assert cast.local == 2 * 10**8, "half of 2e8, and an eighth of the experts"
    assert cast.kinds(DEVICE)[MOMENTS] == pytest.approx(8 * 1e9 / 32, rel=0.01)


def test_a_stage_has_its_layers_experts() -> None:
    config = ZeroConfig.of(config_for(1, 4), overrides=["pipeline.stages=2"])
    cast = estimate(Sizes(10**9, experts=8 * 10**8), config, 16)
    assert cast.local == 2 * 10**8 // 2 + 8 * 10**8 // 2 // 4
    assert Transformer(4, 64, 1, experts=8).sizes().experts == 4 * 8 * (8 * 64**2 + 5 * 64)


def test_gathers_of_experts_send_their_part_only() -> None:
    """Two nodes of four ranks: of n that have the same experts, a node sends (n - 1) / n of these in a ring."""
    sizes, how = Sizes(10**8, experts=10**8), {"ranks_per_node": 4}
    parted, whole = (estimate_traffic(sizes, config_for(3, size), 8, **how) for size in (4, 1))
    assert parted.weights / whole.weights == pytest.approx(4 / 7, rel=0.01), "4 rings of 2 for a fourth each"
    spread = estimate_traffic(sizes, config_for(3, 8), 8, **how)
    assert spread.weights == spread.gradients == 0, "tokens cross, and no weights"


def test_the_command_draws_expert_ranks() -> None:
    size = ("--layers", "32", "--hidden", "4096", "--experts", "8", "--expert-ranks", "4", "--stage", "1")
    code, text = run(*size, "--world", "16", "--per-node", "8", "--tensor", "2", "--sequence-length", "1024")
    assert code == 0, text
    assert "a rank has 1/4. Ranks (0, 2, 4, 6) and (1, 3, 5, 7), and so on, send each other tokens" in text
    assert "over the 4 that have the same" in text
    assert "a rank sends 2.15 GB of tokens to experts and back, in 16 bits: 75% to other ranks and 0% to other" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--params", "1B", "--world", "8"), "does not say how many of them are experts'"),
        (("--params", "1B", "--expert-params", "2B", "--world", "8"), "experts are a part of the total"),
        (("--params", "1B", "--expert-params", "1M", "--world", "6"), "does not divide the 6 data ranks"),
        (("--layers", "2", "--hidden", "64", "--experts", "1", "--world", "8"), "--top-k 2 is more than"),
        (("--module", "tests.support.cut_blocks:CutBlocks", "--world", "8"), "has no lt_zero.parallel.Experts"),
    ],
)
def test_wrong_numbers_of_experts_are_errors(arguments: tuple[str, ...], text: str) -> None:
    code, found = run(*arguments, "--expert-ranks", "4")
    assert code == 2
    assert text in found
