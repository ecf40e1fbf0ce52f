"""Plans of tensor parallelism for stages of a pipeline, which have different modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from lt_zero.common.errors import ConfigError
from lt_zero.config import ZeroConfig
from lt_zero.parallel import LayerSpec
from lt_zero.parallel.mesh import ParallelMesh
from lt_zero.parallel.plan import PlanRow, parallelize
from tests.support import pipelines
from tests.support.matrix import only
from tests.support.parity import OPTIMIZERS
from tests.support.pipelines import VOCABULARY, WIDTH, Block, Model, Ranks, all_weights, reference_step, start
from tests.support.plans import config, rule
from tests.support.pool import Pool

RANKS = Ranks(tensor=2, pipeline=2)
PAIR = [rule(r".*\.up\."), rule(r".*\.down\.weight", "row")]
TIED = [*PAIR, rule(r"pipe\.tied\.embed")]


def layers() -> list[Any]:
    """An embedding, wider than the rest together, so that it is a stage."""
    blocks = [LayerSpec(Block, 6), LayerSpec(Block, 8)]
    return [LayerSpec(nn.Embedding, 60, WIDTH), *blocks, LayerSpec(nn.Linear, WIDTH, VOCABULARY)]


def tied() -> list[Any]:
    return pipelines.specs(depth=4)


def _train(specs: Any, partition: dict[str, Any], stage: int) -> tuple[float, list[str]]:
    settings, names = config(2, partition), list[str]()

    def prepare(model: Model, mesh: ParallelMesh) -> None:
        names.extend(model.pipe.layers)
        mesh.cut(model, settings)

    run = start(RANKS, stage, "sgd", specs, prepare=prepare, zero=None)
    reference = Model(specs)
    plain = OPTIMIZERS["sgd"](reference.parameters())
    for number in range(2):
        run.step(number)
        reference_step(reference, plain, number, 1)
    found = all_weights(run.engine)
    expected = dict(reference.named_parameters())
    assert found.keys() == expected.keys()
    return max(float((found[name] - p.detach()).abs().max()) for name, p in expected.items()), names


@pytest.mark.parametrize("stage", only([3], [1, 3]))
def test_rules_match_layers_of_some_stages(pool: Pool, stage: int) -> None:
    only_of_the_second = [*PAIR, rule(r"pipe\.layers\.3\.", gather_output=True)]
    found = pool.run(4, _train, layers, {"layer_specs": only_of_the_second}, stage)
    assert [names for _, names in found] == [["0"], ["0"], ["1", "2", "3"], ["1", "2", "3"]]
    assert max(far for far, _ in found) < 1e-6


@pytest.mark.slow
def test_rules_for_layers_at_several_stages(pool: Pool) -> None:
    found = pool.run(4, _train, tied, {"layer_specs": TIED, "embedding_partition_dim": 0}, 1)
    assert max(far for far, _ in found) < 1e-6


def _refused(specs: Any, settings: ZeroConfig, users: str = "") -> str:
    """What is wrong with the plan; empty if the model runs."""

    def prepare(model: Model, mesh: ParallelMesh) -> None:
        if users == "blocks":
            pipelines.tensor_parallel(model, mesh)
        elif users and mesh.pipeline_rank == 0:
            parallelize_module(model.pipe.tied["embed"], mesh.tensor, RowwiseParallel(input_layouts=Replicate()))
        mesh.cut(model, settings)

    try:
        run = start(RANKS, 1, "sgd", specs, prepare=prepare)
    except ConfigError as error:
        return str(error)
    run.step(0)
    return ""


def _of_stages(value: Any) -> list[Any]:
    told = [None] * RANKS.all
    dist.all_gather_object(told, value)
    return told[:: RANKS.tensor]


def _rows() -> list[tuple[str, str, int, int]]:
    rows = list[PlanRow]()

    def prepare(model: Model, mesh: ParallelMesh) -> None:
        rows.extend(parallelize(model, mesh.tensor, config(2, {"layer_specs": PAIR}), _of_stages))

    start(RANKS, 1, "sgd", layers, prepare=prepare)
    return [(row.pattern, row.style, row.modules, row.elements) for row in rows]


def test_the_table_has_all_stages(pool: Pool) -> None:
    for rows in pool.run(4, _rows):
        up, down, *rest = rows
        assert up == (r".*\.up\.", "column", 2, (3 + 4) * (WIDTH + 1))
        assert down == (r".*\.down\.weight", "row", 2, (3 + 4) * WIDTH + 2 * WIDTH)
        assert [(pattern, style) for pattern, style, _, _ in rest] == [("(all others)", "whole")]


UNKNOWN = {  # rules, and the error
    "a rule without layers": ({"layer_specs": [*PAIR, rule("head")]}, "'head' matches no parameter"),
    "no rule that cuts": ({"layer_specs": [rule(".*", "skip")]}, "cuts no layer"),
    "no rules": (None, "no plan for Model"),
}


@pytest.mark.parametrize("case", only(["a rule without layers"], UNKNOWN))
def test_what_no_stage_has_is_refused_on_all(pool: Pool, case: str) -> None:
    partition, error = UNKNOWN[case]
    assert all(error in text for text in pool.run(4, _refused, layers, config(2, partition)))


def odd() -> list[Any]:
    return [*layers(), LayerSpec(nn.Linear, VOCABULARY, 7)]


def test_what_is_wrong_on_one_stage_is_refused_on_all(pool: Pool) -> None:
    rules = [*PAIR, rule(r"pipe\.layers\.4\.", gather_output=True)]
    for text in pool.run(4, _refused, odd, config(2, {"layer_specs": rules})):
        assert "out_features=7 of pipe.layers.4" in text


@pytest.mark.slow
def test_a_stage_without_parallelized_modules(pool: Pool) -> None:
    assert pool.run(4, _refused, layers, config(2), "blocks") == [""] * 4


def test_what_stages_share_is_cut_in_one_way(pool: Pool) -> None:
    for text in pool.run(4, _refused, tied, config(2), "first stage"):
        assert "tied.embed.weight is shared by stages" in text
        assert "S(0) on stage 0 and whole on stage 1" in text
