"""Plans of tensor parallelism: models that are cut by them train as one process does, and what is wrong is refused."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lt_zero import ZeroConfig
from lt_zero.common.errors import ConfigError
from lt_zero.parallel import PartialGradient
from lt_zero.parallel.plan import PlanRow, keeping_ties, parallelize, table
from lt_zero.parallel.styles import SequenceNorm
from tests.support.llamas import VOCABULARY, WIDTH, Attention, Llama, RMSNorm, rules
from tests.support.matrix import only, only_rows
from tests.support.parity import STAGES
from tests.support.plans import config, cut_over_all, plans_as_it_cuts, rule, train
from tests.support.pool import Pool

VARIANTS: dict[str, dict[str, bool]] = {
    "plain": {},
    "fused": {"fused": True},
    "head norms": {"head_norms": True},
    "untied, embedding whole": {"tied": False, "vocabulary": False},
}


def _train_llama(stage: int, optimizer: str, tensor: int, variant: str) -> float:
    keys = dict(VARIANTS[variant])
    partition = rules(**{key: value for key, value in keys.items() if key != "tied"})
    keys.pop("vocabulary", None)
    return train(Llama(**keys), config(tensor, partition, stage), optimizer)


@pytest.mark.parametrize(
    ("stage", "optimizer", "variant"),
    only_rows([(1, "sgd", "plain"), (3, "adamw", "fused")], itertools.product(STAGES, ["sgd", "adamw"], VARIANTS)),
)
def test_two_tensor_ranks_train_as_one_process(pool: Pool, stage: int, optimizer: str, variant: str) -> None:
    limit = 1e-6 if optimizer == "sgd" else 2e-6
    assert max(pool.run(2, _train_llama, stage, optimizer, 2, variant)) < limit


@pytest.mark.parametrize("variant", only(["untied, embedding whole"], VARIANTS))
def test_three_tensor_ranks_train_as_one_process(pool: Pool, variant: str) -> None:
    assert max(pool.run(3, _train_llama, 1, "sgd", 3, variant)) < 1e-6


@pytest.mark.parametrize("stage", only([3], [1, 3]))
def test_tensor_and_data_ranks_train_as_one_process(pool: Pool, stage: int) -> None:
    assert max(pool.run(4, _train_llama, stage, "sgd", 2, "head norms")) < 1e-6


def _plan_llama(variant: str) -> None:
    keys = dict(VARIANTS[variant])
    partition = rules(**{key: value for key, value in keys.items() if key != "tied"})
    keys.pop("vocabulary", None)
    plans_as_it_cuts(Llama(**keys), config(dist.get_world_size(), partition))


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_planned_is_what_is_cut(pool: Pool, variant: str) -> None:
    pool.run(2, _plan_llama, variant)


# ---- without the engine ----------------------------------------------------------------------------------------------


def _refused(build: Callable[[], nn.Module], partition: dict[str, Any] | None, keys: dict[str, Any]) -> str:
    model = build()
    before = {name: parameter for name, parameter in model.named_parameters()}
    with pytest.raises(ConfigError) as error:
        cut_over_all(model, config(dist.get_world_size(), partition, **keys))
    assert all(before[name] is parameter for name, parameter in model.named_parameters()), "nothing is cut"
    return str(error.value)


def odd() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 4))


def odd_vocabulary() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 3))


def attention() -> nn.Module:
    return Attention(fused=False, head_norms=False)


def fused() -> nn.Module:
    return Attention(fused=True, head_norms=False)


def odd_heads() -> nn.Module:
    module = Attention(fused=False, head_norms=False)
    module.num_kv_heads = 3
    return module


def odd_hidden() -> nn.Module:
    class Feed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.back = nn.Linear(4, 12), nn.Linear(6, 4)

    return Feed()


def without_numbers() -> nn.Module:
    module = Attention(fused=False, head_norms=False)
    del module.num_heads, module.num_kv_heads
    return module


def normed_heads() -> nn.Module:
    return Attention(fused=False, head_norms=True)


def headed() -> nn.Module:
    layers = [nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2)]
    return nn.ModuleDict({"layers": nn.ModuleList(layers), "back": nn.Linear(4, 4), "out": nn.Linear(4, 6)})


def normed() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))


def renormed() -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 4, max_norm=1.0))


PAIR = [rule(r"0\.weight"), rule(r"2\.weight", "row")]
QKVO = [rule(r"[qkv]_proj\."), rule(r"o_proj\.weight", "row")]
WRONG: dict[str, tuple[Callable[[], nn.Module], list[dict[str, Any]] | None, dict[str, Any], list[str]]] = {
    "no plan": (odd, None, {}, ["no plan for Sequential", "layer_specs"]),
    "a pattern without effect": (odd, [*PAIR, rule(r"head\.")], {}, ["layer_specs.2", "'head", "0.weight"]),
    "output features": (odd, PAIR, {}, ["out_features=7 of 0", "in_features=7 of 2", "autotp_size=2"]),
    "vocabulary": (
        odd_vocabulary,
        [rule("0")],
        {"embedding_partition_dim": 0},
        ["num_embeddings=7 of 0", "Pad"],
    ),
    "embedding width": (odd_vocabulary, [rule("0")], {}, ["embedding_dim=3 of 0"]),
    "heads": (odd_heads, QKVO, {}, ["num_kv_heads=3", "autotp_size=2"]),
    "outputs in one weight": (fused, [rule("qkv"), QKVO[1]], {}, ["qkv", "shape"]),
    "more outputs than go on": (odd_hidden, [rule("mix"), rule("back.weight", "row")], {}, ["12 outputs", "shape"]),
    "wrong sizes": (fused, [rule("qkv", shape=[[4, 4], -1]), QKVO[1]], {}, ["together 8", "out_features=48"]),
    "wrong number of inputs": (fused, [rule("qkv", shape=[3, 7]), QKVO[1]], {}, ["7 inputs", f"in_features={WIDTH}"]),
    "equal parts that are none": (fused, [rule("qkv", shape=[5, -1]), QKVO[1]], {}, ["5 equal", "48"]),
    "output stays cut": (attention, [QKVO[0]], {}, ["no layer after it in the model takes parts"]),
    "a head stays cut": (
        headed,
        [rule(".*(up|out)"), rule(".*(down|back).weight", "row")],
        {},
        ["the output of out", "gather_output", "row"],
    ),
    "no number of heads": (without_numbers, QKVO, {}, ["q_proj is cut", "num_heads", "head_dim"]),
    "norms of heads": (normed_heads, QKVO, {}, ["q_norm.weight of shape (2,)", "k_norm.weight", "grad_allreduce"]),
    "a norm": (normed, [rule("0"), rule("1", gather_output=True)], {}, ["LayerNorm", "skip"]),
    "max_norm": (renormed, [rule("0")], {}, ["max_norm"]),
    "the other axis": (odd, [rule("0", partition_dim=1), PAIR[1]], {}, ["partition_dim=1"]),
    "strict": (odd, [PAIR[1], rule("0", "skip")], {"strict_mode": True}, ["in_features=7"]),
    "strict, unmatched": (attention, QKVO[1:], {"strict_mode": True}, ["strict_mode", "q_proj, k_proj, v_proj"]),
    "nothing cut": (odd, [rule(".*", "skip")], {}, ["cuts no layer"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_before_anything_is_cut(pool: Pool, name: str) -> None:
    build, specs, keys, parts = WRONG[name]
    partition = None if specs is None else {"layer_specs": specs, **keys}
    for text in pool.run(2, _refused, build, partition, {}):
        for part in parts:
            assert part in text


def _tie_in_two_ways(added: list[dict[str, Any]], keys: dict[str, Any]) -> str:
    layers = rules(vocabulary=False)["layer_specs"]
    return _refused(Llama, {"layer_specs": [*layers, *added], **keys}, {})


@pytest.mark.parametrize(
    ("added", "axis", "shown"),
    [
        ([rule("embed_tokens")], 0, ["embed_tokens.weight (cut along axis 0)", "lm_head.weight (whole)"]),
        ([rule("lm_head")], 0, ["embed_tokens.weight (whole)", "lm_head.weight (cut along axis 0)"]),
        ([rule("embed_tokens|lm_head")], 1, ["embed_tokens.weight (cut along axis 1)", "(cut along axis 0)"]),
        ([rule("embed_tokens"), rule("lm_head", "row")], 0, ["(cut along axis 0)", "(cut along axis 1)"]),
    ],
)
def test_tied_weights_in_different_places_are_refused(
    pool: Pool, added: list[dict[str, Any]], axis: int, shown: list[str]
) -> None:
    for text in pool.run(2, _tie_in_two_ways, added, {"embedding_partition_dim": axis}):
        for part in [*shown, "embedding_partition_dim"]:
            assert part in text


def _ties_and_heads() -> None:
    model = Llama()
    cut_over_all(model, config(2, rules()))
    assert isinstance(model.lm_head.weight, DTensor)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert model.lm_head.weight.placements == (Shard(0),)
    attention = model.layers[0].self_attn
    assert (attention.num_heads, attention.num_kv_heads) == (6, 3)
    copy.deepcopy(model.layers[0].norm1)


def test_ties_are_kept_and_modules_get_their_number_of_heads(pool: Pool) -> None:
    pool.run(2, _ties_and_heads)


def _embedding_columns() -> float:
    """An embedding that is cut along axis 1, and a head of which the input is cut."""
    specs = [rule("embed_tokens"), rule("lm_head", "row"), *rules(vocabulary=False)["layer_specs"]]
    return train(Llama(tied=True), config(2, {"layer_specs": specs}, 2))


def test_a_tied_weight_that_is_cut_along_the_width(pool: Pool) -> None:
    assert max(pool.run(2, _embedding_columns)) < 1e-6


def _model_types() -> list[str]:
    model = Llama()
    model.config = type("Config", (), {"model_type": "Mine"})()
    mine = [{**each, "model_types": "mine"} for each in rules()["layer_specs"]]
    other = {**rule("nothing"), "model_types": ["other"]}
    rows = cut_over_all(model, config(2, {"layer_specs": [other, *mine], "embedding_partition_dim": 0}))
    return [row.pattern for row in rows if row.modules == 0]


def test_rules_of_other_model_types_do_not_count(pool: Pool) -> None:
    assert pool.run(2, _model_types) == [["nothing"], ["nothing"]]


def _first_match() -> list[PlanRow]:
    model = nn.ModuleDict({n: nn.Linear(4, 4) for n in ("a", "b", "c")})
    specs = [rule(r"a\.", "skip"), rule(r"[ab]\.", gather_output=True), rule(r"a\.w"), rule(r"c\.weight", "row")]
    return cut_over_all(model, config(2, {"layer_specs": specs, "lm_head_patterns": ["c"]}))


def test_the_first_rule_that_matches_counts(pool: Pool) -> None:
    (rows, _) = pool.run(2, _first_match)
    assert rows == [
        PlanRow(r"a\.", "whole", 1, 2, 20),
        PlanRow(r"[ab]\.", "column, gathered", 1, 2, 10),
        PlanRow(r"a\.w", "-", 0, 0, 0),
        PlanRow(r"c\.weight", "row, input whole", 1, 2, 12),
    ]


def _rows(tied: bool) -> list[PlanRow]:
    return cut_over_all(Llama(tied=tied), config(2, rules()))


def test_the_table_counts_each_parameter_once(pool: Pool) -> None:
    for rows in pool.run(2, _rows, True):
        assert sum(row.parameters for row in rows) == len(list(Llama().parameters()))
        whole = {row.pattern: row for row in rows}["(all others)"]
        assert (whole.style, whole.modules, whole.elements) == ("whole", 5, 5 * WIDTH)
        assert table(rows).row_count == len(rows)


# ---- models that their users have parallelized -----------------------------------------------------------------------


def _by_hand(written: bool) -> list[PlanRow] | str:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.LayerNorm(4))
    mesh = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tensor",))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    before = list(model.parameters())
    try:
        return parallelize(model, mesh, config(2, {"layer_specs": PAIR} if written else None))
    except ConfigError as error:
        return str(error)
    finally:
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_a_parallelized_model_is_left_as_it_is(pool: Pool) -> None:
    for rows in pool.run(2, _by_hand, False):
        assert isinstance(rows, list)
        assert [(row.modules, row.parameters, row.elements) for row in rows] == [(1, 2, 15), (1, 2, 16), (1, 2, 8)]
    for text in pool.run(2, _by_hand, True):
        assert "parallelized already" in text


def _one_rank() -> list[PlanRow]:
    mesh = DeviceMesh("cpu", torch.arange(1), mesh_dim_names=("tensor",))
    return parallelize(odd(), mesh, config(1))


def _untied() -> list[str]:
    model = Llama(tied=True)
    mesh = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tensor",))
    plan = {"embed_tokens": RowwiseParallel(input_layouts=Replicate()), "lm_head": ColwiseParallel()}
    parallelize_module(model, mesh, plan)
    found = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            parallelize(model, mesh, config(2))
        found.append("".join(str(each.message) for each in seen))
        model.lm_head.weight = model.embed_tokens.weight
    return found


def test_ties_that_a_user_has_lost_are_told(pool: Pool) -> None:
    for lost, tied in pool.run(2, _untied):
        assert "embed_tokens.weight and lm_head.weight have the same values" in lost
        assert not tied


def _tied_by_halves() -> str:
    model, mesh = Llama(tied=True), DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tensor",))
    with pytest.raises(ConfigError) as caught, keeping_ties(model):
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
    return str(caught.value)


def test_a_tied_weight_that_a_user_cuts_in_one_place_is_named(pool: Pool) -> None:
    for text in pool.run(2, _tied_by_halves):
        assert "embed_tokens.weight (whole), lm_head.weight ((Shard(dim=0),))" in text


def _meta() -> list[PlanRow]:
    with torch.device("meta"):
        model = Llama()
    return cut_over_all(model, config(2, rules()))


def test_models_on_the_meta_device(pool: Pool) -> None:
    assert pool.run(2, _meta) == pool.run(2, _rows, True)


def test_one_rank_needs_no_plan(pool: Pool) -> None:
    assert pool.run(1, _one_rank) == [[]]


class Norms(nn.Module):
    """A norm of single heads, and one of positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.heads = RMSNorm(4)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.position(self.embed(batch))
        inner = self.up(x).unflatten(-1, (-1, 4))
        x = x + self.down(self.heads(inner).flatten(-2))
        return F.mse_loss(x, torch.ones_like(x))


def _styles(stage: int) -> float:
    def cut(model: nn.Module, mesh: DeviceMesh, settings: ZeroConfig) -> None:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "heads": PartialGradient()}
        parallelize_module(model, mesh, {**plan, "position": SequenceNorm()})

    return train(Norms(), config(2, stage=stage), "adamw", cut)


@pytest.mark.parametrize("stage", STAGES)
def test_styles_of_parameters_whose_gradients_are_partial(pool: Pool, stage: int) -> None:
    assert max(pool.run(2, _styles, stage)) < 2e-6


def _unfrozen() -> float:
    """A frozen parameter is marked, and trained later."""
    model = Norms()

    def cut(model: nn.Module, mesh: DeviceMesh, settings: ZeroConfig) -> None:
        model.heads.weight.requires_grad_(False)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "heads": PartialGradient()}
        parallelize_module(model, mesh, plan)
        model.heads.weight.requires_grad_(True)

    return train(model, config(2, stage=2), "sgd", cut)


def test_a_parameter_that_was_frozen_when_it_was_marked(pool: Pool) -> None:
    assert max(pool.run(2, _unfrozen)) < 1e-6
