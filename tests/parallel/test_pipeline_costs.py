"""What schedules and stages cost, as it is forecast, against pipelines that run."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial
from typing import Any

import pytest
from torch import nn

from lt_zero import ZeroConfig, estimate
from lt_zero.common.errors import ConfigError
from lt_zero.config.pipelines import bubble, in_flight, running
from lt_zero.planning.check import measured
from lt_zero.planning.estimate import estimate_traffic
from lt_zero.planning.forecast import GRADS, LOCAL, MASTER, MOMENTS, WEIGHTS
from lt_zero.planning.sizes import Sizes, Stage, fullest, stages_of_module, stages_of_sizes
from lt_zero.planning.transformer import Transformer
from lt_zero.training.build import built_by
from tests.support.matrix import only_rows
from tests.support.pipelines import Model, Ranks, specs, start
from tests.support.pool import Pool


def _waiting(block: dict[str, Any], count: int) -> None:
    """Count the forwards of this rank's stages whose backward has not run."""
    block = {**block, "num_microbatches": count}
    run = start(Ranks(1, 1, 2), 1, "sgd", partial(specs, False), block)
    runner = run.model.pipe.runner
    now = 0
    most = 0
    forward, backward = runner.forward, runner.backward

    def counted(*arguments: Any) -> Any:
        nonlocal now, most
        now += 1
        most = max(most, now)
        return forward(*arguments)

    def done(*arguments: Any) -> Any:
        nonlocal now
        now -= 1
        return backward(*arguments)

    runner.forward, runner.backward = counted, done
    run.step(0, 2 * count)
    position = run.model.pipe.position
    chunks = position.block.chunks
    want = in_flight(position.block.schedule, position.ranks, count, chunks, position.rank)
    assert (now, most) == (0, want), (block, position.rank)


@pytest.mark.parametrize(
    ("schedule", "count"),
    only_rows(
        [("1F1B", 5), ("Interleaved1F1B", 4)],
        itertools.product(["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"], [1, 4, 5]),
    ),
)
def test_forwards_that_wait_for_their_backward(pool: Pool, schedule: str, count: int) -> None:
    pool.run(2, _waiting, {"schedule": schedule}, count)


def test_the_bubble_by_counting_slots() -> None:
    """A schedule on paper: every stage of a chunk takes a slot for a forward, and another for a backward."""
    assert bubble(1, 7) == 0
    for ranks, count, chunks in ((2, 4, 1), (4, 8, 1), (4, 8, 2), (8, 3, 1)):
        busy, idle = 2 * count * chunks, 2 * (ranks - 1)  # until the first micro-batch is there, and after the last
        assert bubble(ranks, count, chunks) == pytest.approx(idle / (busy + idle))
    assert running("1F1B", 4, 3) == "GPipe"
    assert running("1F1B", 4, 8, trains=False) == "GPipe"
    assert running("Interleaved1F1B", 2, 5) == "LoopedBFS"


def _states(ranks: Ranks, stage: int) -> None:
    """The states of each rank against its forecast; of tied layers the ranks of two stages share them."""
    run = start(ranks, stage, "adamw", specs)
    for number in range(2):
        run.step(number)
    config = built_by(run.engine)
    stages = stages_of_module(partial(Model, specs), config, ranks.all)
    mine = stages[run.mesh.pipeline_rank]
    cast = estimate(mine, config, ranks.all, device="cpu", optimizer="adam", saves=False)
    total = sum(parameter.numel() for parameter in Model(specs).parameters())
    assert (cast.parameters, cast.local) == (total, mine.parameters)
    alike = [rank for rank in range(ranks.all) if rank // run.mesh.sizes.of_stage == run.mesh.pipeline_rank]
    told = run.engine.world.host_gather(measured(run.engine, [run.sharded]), "bytes")
    for kind in (WEIGHTS, MASTER, MOMENTS, GRADS):
        want, got = cast.kinds("host").get(kind, 0), max(told[rank].get(kind, 0) for rank in alike)
        assert abs(got - want) <= 0.03 * max(got, want) + 256, (kind, "measured", got, "forecast", want)


@pytest.mark.parametrize(
    ("ranks", "stage"),
    only_rows(
        [(Ranks(2, 1, 2), 2), (Ranks(1, 1, 3), 1)],
        itertools.product([Ranks(1, 1, 2), Ranks(2, 1, 2), Ranks(1, 1, 3)], [0, 1, 2, 3]),
    ),
)
def test_states_of_stages_are_as_forecast(pool: Pool, ranks: Ranks, stage: int) -> None:
    pool.run(ranks.all, _states, ranks, stage)


@pytest.mark.parametrize("stage", [1, 2])
def test_all_ranks_compare_the_same_phases(stage: int) -> None:
    """The stage in the middle shares no layer, so that its gradients may all be sharded; those of others are not."""
    config = config_of(3, stage)
    casts = [estimate(mine, config, 3, device="cpu") for mine in stages_of_module(partial(Model, specs), config, 3)]
    assert len({tuple(cast.phases) for cast in casts}) == 1
    for cast in casts:
        kept = sum(nbytes for (_, kind), nbytes in cast.phases["accumulation"].items() if kind in (GRADS, LOCAL))
        assert kept >= 4 * cast.local // 3, "gradients of a window are kept, whole or sharded"


def config_of(ranks: int, stage: int = 1, tensor: int = 1, **block: Any) -> ZeroConfig:
    keys = {"pipeline": {"stages": ranks, **block}, "tensor_parallel": {"autotp_size": tensor}}
    return ZeroConfig.of({"zero_optimization": {"stage": stage}, **keys})


def test_stages_of_sizes() -> None:
    """Every layer is on one rank; the fullest has the embedding or the head."""
    sizes = Transformer(10, 64, 4, vocabulary=500).sizes()
    for ranks, block in ((2, {}), (3, {}), (3, {"schedule": "Interleaved1F1B"}), (4, {"partition_method": "uniform"})):
        found = stages_of_sizes(sizes, config_of(ranks, **block))
        units = [unit for stage in found if isinstance(stage.model, Sizes) for unit in stage.model.units()]
        assert Counter(units) == Counter(sizes.units())
        assert {stage.parameters + stage.elsewhere for stage in found} == {sizes.total}
    uniform = stages_of_sizes(sizes, config_of(4, partition_method="uniform"))
    assert [stage.layers for stage in uniform] == [3, 3, 3, 3]
    with pytest.raises(ConfigError, match="more than the 12 layers"):
        stages_of_sizes(sizes, config_of(16))


def test_sizes_count_the_fullest_stage() -> None:
    """Equal stages over equal ranks: each has a quarter, as a model of a quarter on a quarter of the ranks."""
    whole = estimate(8e9, config_of(4), 32, ranks_per_node=8)
    quarter = estimate(Sizes(2_000_000_000, 250_000_000), config_of(1), 8, accumulate_grad_batches=8)
    assert whole.parameters == 8_000_000_000
    assert whole.local == quarter.local == 2_000_000_000
    assert whole.rank("device") == quarter.rank("device")
    both = estimate(8e9, config_of(4, tensor=2), 32, ranks_per_node=8)
    assert both.local == 1_000_000_000


def test_stages_of_a_module_need_a_pipeline() -> None:
    with pytest.raises(ConfigError, match="has no lt_zero.parallel.Pipeline"):
        stages_of_module(lambda: nn.Linear(2, 2), config_of(2), 2)
    with pytest.raises(ConfigError, match="has no lt_zero.parallel.Pipeline"):
        estimate(nn.Sequential(nn.Linear(4, 4)), config_of(2), 2)


def test_traffic_of_stages() -> None:
    """Stages on nodes of their own send what a run of as many ranks does; those that share a node send nothing."""
    of_stage = estimate_traffic(Sizes(10**9, 10**8), config_of(1), 16, ranks_per_node=8)
    found = estimate_traffic(Sizes(2 * 10**9, 10**8), config_of(2), 32, ranks_per_node=8)
    assert found.total == pytest.approx(of_stage.total)
    assert found.total > 0
    assert estimate_traffic(10**9, config_of(4), 32, ranks_per_node=8).total == 0
    twice = estimate_traffic(Sizes(2 * 10**9, 10**8), config_of(2, 2, num_microbatches=8), 32, ranks_per_node=8)
    assert twice.gradients == pytest.approx(8 * found.gradients), "stage 2 reduces for each micro-batch"
    with pytest.raises(ConfigError, match="parts of nodes"):
        estimate_traffic(10**9, config_of(2), 24, ranks_per_node=8)


def test_activations_are_those_of_the_formula() -> None:
    """sbh(34 + 5as/h) of arXiv:2205.05198, with a block of tensor ranks, and recomputed."""
    shape = Transformer(4, 128, 2, sequence=256, micro_batch=3)
    sbh = 256 * 3 * 128
    assert shape.activations().whole == sbh * (34 + 5 * 2 * 256 / 128)
    assert shape.activations(4).whole == pytest.approx(sbh * (10 + 24 / 4 + 5 * 2 * 256 / (128 * 4)))
    assert shape.activations().recomputed == 2 * sbh
    block = nn.TransformerEncoderLayer(128, 2, 512, batch_first=True)
    assert abs(sum(p.numel() for p in block.parameters()) - shape.block) < 0.01 * shape.block


def test_the_fullest() -> None:
    stages = [Stage(Sizes(n), 0, 1, n, 0) for n in (3, 5, 4)]
    assert fullest(stages).parameters == 5
