"""Forecasts with tensor ranks against what an engine takes, and what a run refuses and advises by them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lt_zero
from lt_zero import ZeroConfig, estimate
from lt_zero.common.errors import ConfigError
from lt_zero.common.host_memory import Available
from lt_zero.config.precision import dtype_policy
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.storage_plan import DEVICE, HOST
from lt_zero.parallel.mesh import ParallelMesh, ParallelSizes
from lt_zero.planning import check
from lt_zero.planning.check import check_optimizers, measured, setup_of
from lt_zero.planning.estimate import estimate_traffic
from lt_zero.planning.forecast import COPY, FRESH, GATHERED, GRADS, LOCAL, MASTER, MOMENTS, REDUCE, WEIGHTS, forecast
from lt_zero.planning.limits import NotEnoughMemory
from tests.support.cut_blocks import RULES, CutBlocks
from tests.support.matrix import only, only_rows
from tests.support.nodes import NodePool, Traffic
from tests.support.parallel_nets import CPU, Ranks
from tests.support.pool import Pool


def config_for(stage: int, tensor: int, **zero: Any) -> ZeroConfig:
    # Neither limit of a bucket is the size of a whole matrix's bucket or of its part's: numbers of the wrong one show.
    zero = {"stage": stage, "stage3_param_persistence_threshold": 500, "stage3_max_reuse_distance": 150_000, **zero}
    parallel = {"autotp_size": tensor, "partition_config": {"layer_specs": RULES}}
    return ZeroConfig.of({"zero_optimization": zero, "tensor_parallel": parallel})


def close(got: int, want: int, what: Any) -> None:
    assert abs(got - want) <= 0.03 * max(got, want) + 128, (what, "measured", got, "forecast", want)


def engine_of(
    ranks: Ranks, config: ZeroConfig, mode: str = "32-true", before: Any = lambda model: None, width: int = 96
) -> Any:
    """``before`` is called with the model when it is cut, and not sharded."""
    world = World.join(CPU)
    everyone, model = ShardGroup.of_all(world), CutBlocks(width)
    mesh = ParallelMesh(ParallelSizes(data=ranks.data, tensor=ranks.tensor), world)
    mesh.cut(model, config)
    before(model)
    return lt_zero.shard(
        model, config, CPU, dtype_policy(config, mode), group=everyone, **mesh.arguments(model, everyone, config)
    )


def _compare(stage: int, mode: str, ranks: Ranks) -> None:
    config = config_for(stage, ranks.tensor)
    options: dict[str, Any] = {"device": "cpu", "precision": mode, "accumulate_grad_batches": 2}
    cast = estimate(CutBlocks(), config, ranks.all, **options)

    def of_cut(model: nn.Module) -> None:
        assert estimate(model, config, ranks.all, **options) == cast

    engine = engine_of(ranks, config, mode, of_cut)
    optimizer = torch.optim.AdamW([p for p in engine.root.parameters() if p.requires_grad])
    sharded = lt_zero.ShardedOptimizer(engine, optimizer)
    peaks, window, own = _train(engine, optimizer)
    of_run = forecast(engine.plan, config, engine.policy, setup_of(engine, [optimizer], accumulates=True))
    have = measured(engine, [sharded])
    for which, found in (("estimate", cast), ("run", of_run)):
        want, case = found.kinds(HOST), (which, stage, mode, ranks)
        for kind in (WEIGHTS, MASTER, GRADS, MOMENTS, REDUCE):
            close(have.get(kind, 0), want.get(kind, 0), (*case, kind))
        close(peaks, want.get(GATHERED, 0), (*case, GATHERED))
        close(window, want.get(LOCAL, 0), (*case, LOCAL))
        assert found.parameters == sum(p.numel() for p in CutBlocks().parameters())
        assert found.local == sum(_numels(engine).values())
        close(own, want[FRESH], (*case, FRESH))


def _train(engine: Any, optimizer: torch.optim.Optimizer) -> tuple[int, int, int]:
    """Some steps, the last with two micro-batches.

    Returns the peak bytes of gathered weights, and of an accumulation window, and those of a block's gradients and of
    what is reduced at the end of backward.
    """
    peak = window = 0
    patch, launch = pytest.MonkeyPatch(), Bucket.launch_gather

    def noting(bucket: Bucket) -> None:
        nonlocal peak
        launch(bucket)
        peak = max(peak, sum(b.compute.flat.nbytes for b in engine.buckets if b.sharding.params and not b.released))

    patch.setattr(Bucket, "launch_gather", noting)
    dtype = engine.buckets[0].dtype
    for micros in (1, 1, 2):
        optimizer.zero_grad()
        for micro in range(micros):
            engine.reducer.sync = micro == micros - 1
            engine.root(torch.ones(2, 96, dtype=dtype)).float().square().mean().backward()
            window = max(window, measured(engine).get(LOCAL, 0))
        optimizer.step()
    patch.undo()
    trained = {name: numel for name, numel in _numels(engine).items() if not name.startswith("blocks.0.")}
    own = sum(numel for name, numel in trained.items() if name.startswith("blocks.1.") or numel < 500)
    return peak, window, own * dtype.itemsize


def _numels(engine: Any) -> dict[str, int]:
    """Elements of this rank's part of each parameter."""
    return {span.name: span.numel for bucket in engine.buckets for span in bucket.layout.spans}


@pytest.mark.parametrize(
    ("stage", "mode", "ranks"),
    only_rows(
        [(1, "bf16-true", Ranks(1, 2)), (3, "32-true", Ranks(2, 2))],
        itertools.product([0, 1, 2, 3], ["32-true", "bf16-true"], [Ranks(1, 2), Ranks(2, 2), Ranks(1, 3)]),
    ),
)
def test_forecast_is_what_an_engine_takes(pool: Pool, stage: int, mode: str, ranks: Ranks) -> None:
    pool.run(ranks.all, _compare, stage, mode, ranks)


def _refused(stage: int, when: str) -> None:
    """Rank 1 of 2 tensor ranks finds too little memory; ``when``: the model is built, or before its first step."""
    config = config_for(stage, 2)
    with pytest.MonkeyPatch.context() as patch:

        def be_poor() -> None:
            free = Available(1000 if dist.get_rank() == 1 else 10**12, "a small test machine")
            patch.setattr(check, "host_memory", lambda *_: free)

        if when == "building":
            be_poor()
            with pytest.raises(NotEnoughMemory, match="No setting fits"):
                engine_of(Ranks(1, 2), config)
            return
        engine = engine_of(Ranks(1, 2), config)
        be_poor()
        with pytest.raises(NotEnoughMemory, match="No setting fits"):
            check_optimizers(engine, config, [torch.optim.AdamW(engine.root.parameters())])


@pytest.mark.parametrize(("stage", "when"), only_rows([(3, "stepping")], [(1, "building"), (3, "stepping")]))
def test_a_run_without_memory_ends_with_advice(pool: Pool, stage: int, when: str) -> None:
    pool.run(2, _refused, stage, when)


def _sent(stage: int) -> float:
    """Bytes from this rank's node in the second of two steps."""
    engine = engine_of(Ranks(2, 2), config_for(stage, 2, stage3_max_reuse_distance=0), width=256)
    optimizer = torch.optim.AdamW(p for p in engine.root.parameters() if p.requires_grad)
    lt_zero.ShardedOptimizer(engine, optimizer)
    for _ in range(2):
        with Traffic() as traffic:
            engine.root(torch.ones(2, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.finish_steps()
    return traffic.sent


@pytest.mark.nodes
@pytest.mark.parametrize("stage", only([2], [0, 1, 2, 3]))
def test_as_many_bytes_between_nodes_as_forecast(node_pool: NodePool, stage: int) -> None:
    """Two nodes of two tensor ranks: parts cross between two ranks twice, what is whole crosses between four."""
    config = config_for(stage, 2, stage3_max_reuse_distance=0)
    forecast = estimate_traffic(CutBlocks(256), config, 4, ranks_per_node=2, device="cpu")
    sent = node_pool.run(_sent, stage)
    assert forecast.total == pytest.approx((sent[0] + sent[2]) / 2, rel=0.15)


def test_tensor_ranks_on_several_nodes_have_no_traffic_forecast() -> None:
    with pytest.raises(ConfigError, match="autotp_size=4 does not divide the 2 ranks of a node"):
        estimate_traffic(1e6, {"tensor_parallel": {"autotp_size": 4}}, 8, ranks_per_node=2)


# ---- without processes -----------------------------------------------------------------------------------------------


def test_states_are_cut_by_tensor_and_then_by_data_ranks() -> None:
    """Of 1e9 parameters, all of them cut over 4 tensor ranks, on 32 ranks, at stage 1: 8 data ranks share moments."""
    cast = estimate(1e9, config_for_size(1, 4), 32)
    assert (cast.parameters, cast.local) == (10**9, 25 * 10**7)
    close(cast.kinds(DEVICE)[WEIGHTS], 10**9, "fp32 weights of a rank")
    close(cast.kinds(DEVICE)[MOMENTS], 2 * 4 * 10**9 // 32, "moments")
    close(cast.kinds(DEVICE)[GRADS], 4 * 10**9 // 32, "gradients")


def config_for_size(stage: int, tensor: int, **keys: Any) -> ZeroConfig:
    return ZeroConfig.of({"zero_optimization": {"stage": stage}, "tensor_parallel": {"autotp_size": tensor}, **keys})


def test_a_full_checkpoint_has_whole_tensors() -> None:
    first = estimate(1e9, config_for_size(1, 4, checkpoint={"format": "full"}), 32).first["checkpoint"]
    assert first[HOST, COPY] == 12 * 10**9


def test_what_no_plan_cuts_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no plan for Sequential.*give the number of parameters instead"):
        estimate(nn.Sequential(nn.Linear(4, 4)), config_for_size(1, 2), 2)
    with pytest.raises(ConfigError, match="autotp_size=3 does not divide the 4 ranks"):
        estimate(1e9, config_for_size(1, 3), 4)
    with pytest.raises(ConfigError, match="autotp_size=5 does not divide out_features=384"):
        estimate(CutBlocks(), config_for(1, 5), 5)
