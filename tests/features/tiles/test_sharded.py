"""Tiles of tokens, of weights and of a loss in sharded training, beside one process."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import lt_zero
from lt_zero.core.engine.bucket import Bucket, GatherStrategy
from lt_zero.core.engine.find_units import UnitRules, find_repeated, find_units
from tests.support.models import tokens
from tests.support.parity import OPTIMIZERS, RELEASE, Case, check, config_of, counted_storages
from tests.support.pool import Pool

ROWS, WIDTH = 11, 6


def mlp(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 3 * width + 1), nn.GELU(), nn.Linear(3 * width + 1, width))


class Layer(nn.Module):
    """A block whose MLP has tiles of tokens, and whose second one has tiles of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), lt_zero.tiled(mlp(), 2)
        self.wide = lt_zero.TiledLinear(WIDTH, WIDTH, in_splits=2, out_splits=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wide(self.mlp(self.norm(x)))


class LongNet(nn.Module):
    """Returns the loss; ``tied``: of the output layer with the embedding."""

    def __init__(self, tied: bool, recomputes: bool = False) -> None:
        super().__init__()
        self.embedding, self.recomputes = nn.Embedding(ROWS, WIDTH), recomputes
        self.first = lt_zero.tiled(mlp(), tokens_per_tile=2)  # no part of a block
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.head = lt_zero.loss_head(nn.Linear(WIDTH, ROWS, bias=False), tokens_per_tile=4, softcap=3.0)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, batch: Tensor) -> Tensor:
        x = self.first(self.embedding(batch))
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        loss: Tensor = self.head(x, labels=batch.roll(-1, 1))
        return loss


def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    loss: Tensor = model(tokens(step, micro, rank))
    return loss


def _trains(stage: int, optimizer: str, tied: bool, recomputes: bool = False) -> None:
    zero = RELEASE if stage == 3 else {}
    check(Case(partial(LongNet, tied, recomputes=recomputes), loss_of, stage, optimizer, micro=2, zero=zero))


@pytest.mark.parametrize("tied", [True, False])
def test_weights_after_steps_are_those_of_one_process(pool: Pool, tied: bool) -> None:
    pool.run(2, _trains, 3, "sgd", tied)


def _all_cases() -> None:
    for stage in range(4):
        for optimizer in OPTIMIZERS:
            for tied in (False, True):
                for recomputes in (False, True):
                    _trains(stage, optimizer, tied, recomputes)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_all_stages_train_alike(pool: Pool, world: int) -> None:
    pool.run(world, _all_cases)


def test_units() -> None:
    found = {unit.name: [name for name, _ in unit.parameters] for unit in find_units(LongNet(False), UnitRules(10))}
    grid = [
        f"blocks.{block}.wide.linears.{row}.{place}" for block in range(2) for row in range(2) for place in range(2)
    ]
    assert list(found) == ["embedding", "first", *grid[:4], "blocks.0", *grid[4:], "blocks.1", "head", ""]
    assert found["first"] == [f"first.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]
    assert found[grid[1]] == [f"{grid[1]}.weight", f"{grid[1]}.bias"]
    assert found["blocks.0"][-1] == "blocks.0.mlp.2.bias"
    assert [name for name, _ in find_repeated(LongNet(False))] == ["blocks.0", "blocks.1"]


def _gathers_and_reductions() -> tuple[Counter[str], Counter[str]]:
    torch.manual_seed(0)
    engine = lt_zero.shard(LongNet(False), config_of(3, RELEASE))
    gathers, reductions = Counter[str](), Counter[str]()
    launch, sent = GatherStrategy.launch, engine.reducer._launch

    def count(self: GatherStrategy, bucket: Bucket) -> Any:
        gathers[bucket.name] += 1
        return launch(self, bucket)

    def reduced(bucket: Bucket, *args: Any) -> Any:
        reductions[bucket.name] += 1
        return sent(bucket, *args)

    with mock.patch.object(GatherStrategy, "launch", count), mock.patch.object(engine.reducer, "_launch", reduced):
        loss_of(engine.root, 0, 0, 0).backward()
    return gathers, reductions


def test_weights_are_gathered_once_for_all_tiles_in_forward_and_in_backward(pool: Pool) -> None:
    for gathers, reductions in pool.run(2, _gathers_and_reductions):
        assert gathers.pop("embedding") == 1, "its backward needs no weights"
        assert set(gathers.values()) == {2}, gathers
        assert set(reductions.values()) == {1}, reductions


def _most_gathered(tiles: bool) -> tuple[int, int]:
    """The most bytes of gathered weights at a time in a step, and those of the wide layer."""
    torch.manual_seed(0)
    splits = {"in_splits": 2, "out_splits": 4} if tiles else {}
    with counted_storages() as counted:
        layer = lt_zero.TiledLinear(64, 128, bias=False, **splits)
        engine = lt_zero.shard(nn.Sequential(nn.Linear(8, 64), layer), config_of(3, RELEASE))
        counted.most = counted.live
        before = counted.live
        engine.root(torch.randn(3, 8, requires_grad=True)).sum().backward()
        return counted.most - before, 64 * 128 * 4


def test_one_tile_of_weights_is_gathered_at_a_time(pool: Pool) -> None:
    ((most, whole), _), ((tiled, _), _) = pool.run(2, _most_gathered, False), pool.run(2, _most_gathered, True)
    assert (most, tiled) == (whole, whole // 8)


def test_a_tiled_linear_is_a_linear() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(7, 5).double()
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    layer = lt_zero.TiledLinear(7, 5, in_splits=3, out_splits=2, init_linear=linear, dtype=torch.float64)
    torch.testing.assert_close(layer(x), linear(x), rtol=1e-12, atol=1e-12)
    assert [tuple(p.shape) for p in layer.parameters()] == [(3, 3), (3, 2), (3, 2), (3,), (2, 3), (2, 2), (2, 2), (2,)]
    apart = lt_zero.TiledLinear(
        7, 5, in_splits=3, out_splits=2, init_linear=linear, dtype=x.dtype, input_is_already_split=True,
        combine_out_splits=False,
    )  # fmt: skip
    assert torch.equal(torch.cat(apart(x.split([3, 2, 2], -1)), -1), layer(x))
    with pytest.raises(ValueError, match=r"parts of \[7\] features. Pass \[3, 2, 2\]"):
        apart([x])
    with pytest.raises(ValueError, match=r"in_splits=8\): pass 1 to in_features=7"):
        lt_zero.TiledLinear(7, 5, in_splits=8)
    with pytest.raises(TypeError, match="out_splits of lt_zero.TiledLinear"):
        lt_zero.TiledLinear(7, 5, out_splits=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(5, 7\) with bias, and this \(5, 7\) without. Pass"):
        lt_zero.TiledLinear(7, 5, bias=False, init_linear=linear)
