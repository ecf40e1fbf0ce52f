"""Pipelines: recomputation, seeds of layers, layers on the meta device, how layers are divided."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero import ConfigError
from lt_zero.common.compat.of_compile import is_compiled
from lt_zero.config.blocks import PipelineParallel
from lt_zero.core.engine.engine import Engine
from lt_zero.parallel import LayerSpec, Pipeline, TiedLayerSpec
from lt_zero.parallel.pipeline.position import Position
from tests.support.features import needs, skip_without
from tests.support.lightning_tools import GPT, single_trainer
from tests.support.matrix import only, only_rows
from tests.support.parity import OPTIMIZERS
from tests.support.pipelines import WIDTH, Block, Model, Ranks, all_weights, reference_step, specs, start
from tests.support.pool import Pool

CALLS = [0]


class Counted(Block):
    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        return super().forward(x)


def counted(depth: int, dropout: float) -> list[Any]:
    embed, norm, head = (layer for layer in specs() if not isinstance(layer, LayerSpec) or layer.typename is not Block)
    return [embed, *(LayerSpec(Counted, 6 + 2 * number, dropout) for number in range(depth)), norm, head]


RECOMPUTED: dict[str, dict[str, Any]] = {
    "interval 1": {"pipeline": {"activation_checkpoint_interval": 1}},
    "interval 2": {"pipeline": {"activation_checkpoint_interval": 2}},
    "full": {"activation_checkpointing": {"mode": "full"}},
    "selective, named": {"activation_checkpointing": {"mode": "selective", "modules": ["Counted", "LayerNorm"]}},
    "both": {"pipeline": {"activation_checkpoint_interval": 2}, "activation_checkpointing": {"mode": "full"}},
}


def _recompute(stage: int, how: str, depth: int, dropout: float) -> int:
    """Weights after steps are those without recomputation; returns the forwards of blocks in a step."""
    layers, weights = partial(counted, depth, dropout), list[dict[str, Tensor]]()
    for keys in ({}, RECOMPUTED[how]):
        torch.manual_seed(7)
        keys = dict(keys)
        run = start(Ranks(), stage, "sgd", layers, keys.pop("pipeline", None), **keys)
        run.step(0)
        CALLS[0] = 0
        run.step(1)
        calls = CALLS[0]
        weights.append(all_weights(run.engine))
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name
    if dropout == 0:
        reference = Model(layers)
        optimizer = OPTIMIZERS["sgd"](reference.parameters())
        for step in range(2):
            reference_step(reference, optimizer, step, 1)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(weights[1][name], parameter.detach(), rtol=1e-6, atol=1e-6, msg=name)
    return calls


@pytest.mark.parametrize(
    ("how", "stage", "dropout"),
    only_rows(
        [("selective, named", 3, 0.5), ("both", 2, 0.0)],
        itertools.product(RECOMPUTED, [0, 1, 2, 3], [0.0, 0.5]),
    ),
)
def test_recomputation_changes_no_bit(pool: Pool, how: str, stage: int, dropout: float) -> None:
    if "activation_checkpointing" in RECOMPUTED[how]:
        skip_without("activation_checkpointing")
    calls = pool.run(2, _recompute, stage, how, 5, dropout)
    assert sum(calls) >= 2 * 5 * 4, "blocks ran once for each of 4 micro-batches: nothing was recomputed"


@pytest.mark.parametrize("call", ["validate", "fit"])
def test_an_interval_without_a_pipeline_is_refused(call: str) -> None:
    """Also by an evaluation, as a fit may go on with its engine."""
    trainer = single_trainer(strategy=lt_zero.ZeroStrategy(config=RECOMPUTED["interval 1"]), max_steps=1)
    with pytest.raises(ConfigError, match=r"interval=1 recomputes layers .* GPT has none"):
        getattr(trainer, call)(GPT())


def test_inference_leaves_an_interval_out() -> None:
    model = lt_zero.inference(nn.Linear(2, 2), RECOMPUTED["interval 1"])
    assert model(torch.zeros(1, 2)).shape == (1, 2)


@pytest.mark.slow
@needs("activation_checkpointing")
def test_one_block_on_each_stage(pool: Pool) -> None:
    assert sum(pool.run(2, _recompute, 1, "full", 2, 0.0)) >= 2 * 2 * 4


def _recomputed(engine: Engine) -> list[bool] | None:
    """Whether each of the checkpointed modules is recomputed; None: nothing is checkpointed."""
    from lt_zero.features.activation_checkpointing.checkpointing import installed

    found = installed(engine)
    return None if found is None else [forward.recomputes for forward in found._forwards]


def _uneven(modules: list[str]) -> str:
    """The second stage has the head alone; returns the key of an error."""
    layers = [LayerSpec(Counted), LayerSpec(Counted), LayerSpec(nn.Linear, WIDTH, 500)]
    keys = {"activation_checkpointing": {"mode": "full", "modules": modules}}
    try:
        run = start(Ranks(), 1, "sgd", lambda: layers, **keys)
    except ConfigError as error:
        return error.problems[0].key
    assert (_recomputed(run.engine) is not None) == (dist.get_rank() == 0)
    return ""


@needs("activation_checkpointing")
@pytest.mark.parametrize("modules", only(["Counted"], ["", "Counted", "Counter"]))
def test_a_stage_without_blocks_checkpoints_nothing(pool: Pool, modules: str) -> None:
    refused = "activation_checkpointing.modules" if modules == "Counter" else ""
    assert pool.run(2, _uneven, [modules] if modules else []) == [refused] * 2


def _budgeted() -> int:
    """The second stage has the head alone, and answers the first one; returns how many modules are recomputed."""
    embed, *blocks, _, _ = counted(3, 0.0)
    layers = [embed, *blocks, LayerSpec(nn.Linear, WIDTH, 500)]
    weights = list[dict[str, Tensor]]()
    for keys in ({}, {"activation_checkpointing": {"memory_budget": 0.8, "modules": ["Counted"]}}):
        torch.manual_seed(7)
        run = start(Ranks(), 1, "sgd", lambda: layers, **keys)
        for step in range(3):
            run.step(step)
        weights.append(all_weights(run.engine))
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name
    return sum(_recomputed(run.engine) or [])


@needs("activation_checkpointing")
def test_a_memory_budget_of_one_stage(pool: Pool) -> None:
    first, second = pool.run(2, _budgeted)
    assert (0 < first < 3, second) == (True, 0)


def _train_alike(run: Any, reference: nn.Module) -> None:
    """Two steps of a pipeline give the weights of one process."""
    optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for step in range(2):
        run.step(step)
        reference_step(reference, optimizer, step, 1)
    weights = all_weights(run.engine)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-6, atol=1e-6, msg=name)


def _compiled(stage: int, layers: bool) -> int:
    """The module is compiled, and maybe layers by themselves; returns how many graphs layers have."""
    graphs = list[Any]()

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    run, reference = start(Ranks(), stage, "sgd"), Model()
    run.model.loss = torch.compile(run.model.loss, backend="eager")  # type: ignore[method-assign]
    for layer in run.model.pipe.layers.values() if layers else ():
        layer.compile(backend=backend)
    _train_alike(run, reference)
    return len(graphs)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "layers"), [(1, False), (3, True)])
def test_a_compiled_module_calls_its_pipeline_as_it_is(pool: Pool, stage: int, layers: bool) -> None:
    assert all((found > 0) == layers for found in pool.run(2, _compiled, stage, layers))


def _configured() -> None:
    """The block ``compile`` compiles the blocks of each stage, of which each has a single one, or one has none."""
    rank = dist.get_rank()
    keys: dict[str, Any] = {"compile": {"backend": "eager"}}
    torch._dynamo.reset()
    layers = partial(counted, 2, 0.0)
    run, reference = start(Ranks(), 3, "sgd", layers, **keys), Model(layers)
    blocks = [layer for layer in run.model.pipe.layers.values() if isinstance(layer, Counted)]
    assert blocks
    assert all(map(is_compiled, blocks))
    _train_alike(run, reference)
    uneven = [LayerSpec(Counted), LayerSpec(Counted), LayerSpec(nn.Linear, WIDTH, 500)]
    run = start(Ranks(), 1, "sgd", lambda: uneven, **keys)
    assert any(map(is_compiled, run.model.modules())) == (rank == 0)
    # Errors are those of all ranks, also of one that has nothing to compile.
    plain = [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.Linear, WIDTH, WIDTH)]
    for some, block, words in ((uneven, {"backend": "no_such_backend"}, "no_such_backend"), (plain, {}, "has none")):
        with pytest.raises(ConfigError, match=words):
            start(Ranks(), 1, "sgd", partial(list, some), compile={"disable": False, **block})


def test_blocks_of_stages_are_compiled(pool: Pool) -> None:
    pool.run(2, _configured)


# ---- which layers, with which values -------------------------------------------------------------------------------


def _made(rank: int, ranks: int, meta: bool = False, **keys: Any) -> dict[str, Tensor]:
    torch.manual_seed(5)
    block, layers = PipelineParallel(stages=ranks, **keys), specs()
    with torch.device("meta" if meta else "cpu"):
        made = Pipeline(layers, position=Position(rank, ranks, block))
    return {name: value.detach() for name, value in made.named_parameters()}


@pytest.mark.parametrize("keys", [{}, {"seed_layers": True}, {"seed_layers": True, "meta": True}], ids=str)
def test_values_do_not_depend_on_the_stages(keys: dict[str, Any]) -> None:
    whole = _made(0, 1, **keys)
    for ranks in (2, 3):
        parts = [_made(rank, ranks, **keys) for rank in range(ranks)]
        assert set().union(*parts) == set(whole)
        for name, value in (item for part in parts for item in part.items()):
            assert torch.equal(value, whole[name]), name


def test_layers_with_seeds_differ_and_leave_the_stream_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    made = _made(0, 1, seed_layers=True)
    assert torch.equal(torch.rand(3), wanted)
    assert not torch.equal(made["layers.1.down.bias"], made["layers.2.down.bias"])


def test_ties_whose_order_cannot_be_told_are_refused() -> None:
    """Stage 1 has the first tied layer, so that the second rank is the only one with it, and stage 2 the other one."""
    block = PipelineParallel(stages=2, schedule="Interleaved1F1B", partition_method="uniform")
    tied = {key: TiedLayerSpec(key, nn.Linear, WIDTH, WIDTH) for key in "ab"}
    plain = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(2)]
    with pytest.raises(ConfigError, match="order of the tied layers cannot be told. Use 1F1B"):
        Pipeline([*plain, *[tied["a"]] * 2, *[tied["b"]] * 2, *plain], position=Position(0, 2, block))
    Pipeline([*[tied["a"]] * 2, *[tied["b"]] * 2, *plain, *plain], position=Position(0, 2, block))


def test_meta_device_without_seeds_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        _made(0, 2, meta=True)
    assert caught.value.problems[0].key == "pipeline.seed_layers"
    block = PipelineParallel(stages=2, seed_layers=True)
    with pytest.raises(ConfigError, match="LayerSpec"):
        Pipeline([nn.Linear(2, 2, device="meta"), nn.Linear(2, 2)], position=Position(1, 2, block))


CLOCK = [0.0]


class Slow(nn.Module):
    """Takes ``seconds``, whatever it has of parameters."""

    def __init__(self, seconds: float, numel: int) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(numel))

    def forward(self, x: Tensor) -> Tensor:
        CLOCK[0] += self.seconds
        return x + self.weight.sum()


def test_layers_are_divided_by_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [LayerSpec(Slow, seconds, numel) for seconds, numel in [(4.0, 1), (1.0, 99), (1.0, 99), (1.0, 1)]]
    block = PipelineParallel(stages=2, partition_method="time")
    monkeypatch.setattr("time.perf_counter", lambda: CLOCK[0])
    assert Pipeline(layers, example=torch.zeros(2), position=Position(0, 2, block)).parts[0] == range(1)
    with pytest.raises(ConfigError, match="example"):
        Pipeline(layers, position=Position(0, 2, block))
