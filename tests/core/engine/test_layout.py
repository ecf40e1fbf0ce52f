"""Integer arithmetic of buckets, on random shapes, and the search for units."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lt_zero import ZeroConfig
from lt_zero.common.boxes import ParamSpec
from lt_zero.common.errors import ConfigError
from lt_zero.config.options import engine_options
from lt_zero.config.precision import dtype_policy
from lt_zero.core.engine.find_units import UnitRules, find_units
from lt_zero.core.engine.layout import ALIGN, plan_bucket, split_by_size
from lt_zero.core.engine.partition import plan_engine
from tests.support.models import Block, Net

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=8)


@given(shapes, st.integers(1, 9))
def test_every_element_has_one_owner(parameters: list[tuple[int, ...]], world: int) -> None:
    layout = plan_bucket([ParamSpec.whole(str(i), tuple(s)) for i, s in enumerate(parameters)], world)
    assert layout.numel == layout.shard_numel * world
    covered: dict[int, list[tuple[int, int]]] = {}
    for rank in range(world):
        lo, hi = layout.shard(rank)
        for piece in layout.pieces(lo, hi):
            span = layout.spans[piece.index]
            assert span.lo + piece.lo == lo + piece.offset
            assert 0 < piece.numel <= layout.shard_numel
            covered.setdefault(piece.index, []).append((piece.lo, piece.hi))
    for index, shape in enumerate(parameters):
        span, numel = layout.spans[index], math.prod(shape)
        assert span.lo % ALIGN == 0
        edges = covered.get(index, [])
        assert sum(hi - lo for lo, hi in edges) == numel
        assert all(a[1] == b[0] for a, b in zip(edges, edges[1:], strict=False)), "consecutive over ranks"
    used = sum(hi - lo for lo, hi in layout.gaps) + sum(s.hi - s.lo for s in layout.spans)
    assert used == layout.numel


@given(st.lists(st.integers(0, 20), max_size=20), st.integers(1, 30))
def test_split_by_size(numels: list[int], limit: int) -> None:
    groups = split_by_size(numels, limit)
    assert [i for g in groups for i in g] == list(range(len(numels)))
    assert all(len(g) == 1 or sum(numels[i] for i in g) <= limit for g in groups)


def _names(model: nn.Module, **rules: object) -> list[str]:
    return [u.name for u in find_units(model, UnitRules(**{"min_numel": 0, **rules}))]  # type: ignore[arg-type]


class Stage(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.shrink = nn.Linear(width, 2 * width)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class CalledList(nn.ModuleList):
    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return self[choice](x)


class MoeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(4))
        self.router = nn.Linear(4, 4)


def test_blocks_embedding_and_rest() -> None:
    plans = find_units(Net(tied=False), UnitRules(min_numel=100))
    assert [p.name for p in plans] == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head", ""]
    assert [n for n, _ in plans[-1].parameters] == ["scale"]


def test_tied_weights_belong_to_the_root() -> None:
    plans = find_units(Net(), UnitRules(min_numel=0))
    assert {n for n, _ in plans[-1].parameters} == {"embedding.weight", "scale"}


def test_pyramids_are_entered_and_mixtures_are_not() -> None:
    pyramid = nn.Module()
    pyramid.stages = nn.ModuleList([Stage(2, 4), Stage(3, 8)])
    assert _names(pyramid, min_numel=10**6) == [
        *(f"stages.0.blocks.{i}" for i in range(2)),
        *(f"stages.1.blocks.{i}" for i in range(3)),
        "",
    ]
    mixture = nn.Module()
    mixture.layers = nn.ModuleList(MoeBlock() for _ in range(3))
    assert _names(mixture) == ["layers.0", "layers.1", "layers.2", ""]


def test_large_blocks_are_entered_only_if_there_is_something_inside() -> None:
    pyramid = nn.Module()
    pyramid.layers = nn.ModuleList(Stage(2, 4) for _ in range(2))
    assert "layers.0.blocks.0" in _names(pyramid, max_numel=100)
    assert _names(nn.Sequential(Block(8), Block(8)), max_numel=1) == ["0", "1", ""]


def test_experts_are_no_units() -> None:
    mixture = nn.Module()
    mixture.layers = nn.ModuleList(MoeBlock() for _ in range(2))
    assert _names(mixture, max_numel=100) == ["layers.0", "layers.1", ""]
    assert _names(MoeBlock()) == ["router", ""], "the root has them"
    mixture.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    mixture.named = nn.ModuleDict({"a": Expert(), "b": Expert()})
    assert _names(mixture, leaf_names=("named",)) == ["layers.0", "layers.1", ""]
    assert _names(mixture) == ["layers.0", "layers.1", "named.a", "named.b", ""]
    nothing = _names(nn.ModuleDict({"lists": nn.ModuleDict({"experts": nn.ModuleList([Expert(), Expert()])})}))
    assert nothing == [""], "nobody calls a dictionary: the root has its experts"
    called = nn.Module()
    called.experts, called.gate = CalledList([Expert(), Expert()]), nn.Linear(4, 4)
    assert _names(called) == ["gate", ""], "a list may have a forward"
    assert _names(nn.ModuleDict({"a": called}), leaf_names=("a.experts",)) == ["a.experts", "a.gate", ""]


def test_experts_that_leaf_module_names_are_units() -> None:
    """All ranks call them, one after the other: joined they would take the memory of the whole model."""
    model = nn.Module()
    model.expert_layers = nn.ModuleList(Expert() for _ in range(2))
    assert _names(model) == [""]
    for rules in ({"leaf_classes": ("Expert",)}, {"leaf_suffixes": (".0", ".1")}):
        assert _names(model, **rules) == ["expert_layers.0", "expert_layers.1", ""]
    assert _names(model, leaf_classes=("Expert",), leaf_names=("expert_layers",)) == [""]


def test_large_blocks_with_experts_and_blocks_are_whole() -> None:
    """Else the root had the experts of all blocks."""
    model = nn.Module()
    model.layers = nn.ModuleList(MoeBlock() for _ in range(2))
    for layer in model.layers:
        layer.heads = nn.ModuleList(Expert() for _ in range(2))
    assert _names(model, max_numel=100) == ["layers.0", "layers.1", ""]


def test_explicit_classes() -> None:
    pyramid = nn.Module()
    pyramid.stages = nn.ModuleList([Stage(2, 4), Stage(3, 8)])
    assert _names(pyramid, leaf_classes=("Stage",)) == ["stages.0", "stages.1", ""]
    assert _names(pyramid, leaf_classes=(f"{Stage.__module__}.Stage",)) == ["stages.0", "stages.1", ""]


@pytest.mark.parametrize(
    ("zero", "told"),
    [
        ({"leaf_module": {"classes": ["Blok"]}}, "leaf_module.classes: 'Blok': no module .* Did you mean 'Block'"),
        ({"zero_force_param_types": ["Blok"]}, "zero_force_param_types: 'Blok': no module"),
        ({"leaf_module": {"names": ["block.1"]}}, "leaf_module.names: 'block.1': .* Did you mean 'blocks.1'"),
        ({"leaf_module": {"name_suffixes": [".x"]}}, "leaf_module.name_suffixes: '.x': no module's name ends so"),
    ],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_names_that_match_nothing_are_errors(stage: int, zero: dict[str, object], told: str) -> None:
    config = ZeroConfig.of({"zero_optimization": {"stage": stage, **zero}})
    with pytest.raises(ConfigError, match=told):
        plan_engine(Net(), engine_options(config, dtype_policy(config, "32-true")), 2)


def test_a_module_that_is_registered_twice() -> None:
    twice = nn.Module()
    block = Block()
    twice.first = nn.ModuleList([block, Block(), block])
    names = _names(twice)
    assert names == ["first.0", "first.1", ""]
    assert not find_units(twice, UnitRules(min_numel=0))[-1].parameters


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match="lazy"):
        find_units(nn.Sequential(nn.LazyLinear(3)), UnitRules())
