"""A digest of weights depends on their bits, and not on the ranks, the stage or the place of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lt_zero
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.weights_digest import _numbers, digest_of
from tests.support.features import skip_without
from tests.support.models import Net
from tests.support.parity import OPTIMIZERS, RELEASE, config_of
from tests.support.pool import Pool

PLACES: dict[str, dict[str, Any]] = {
    "files": {"offload_optimizer": {"device": "nvme", "nvme_path": "{folder}"}},
    "weights in files": {"offload_param": {"device": "nvme", "nvme_path": "{folder}"}},
}


class Large(nn.Module):
    """More than one chunk of rows in one parameter, with an odd number of elements, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1300, 211)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, index: Tensor) -> Tensor:
        return self.table(index).sum() * self.scale


def _sharded(stage: int, zero: dict[str, Any], kind: type[nn.Module] = Net) -> tuple[nn.Module, Engine]:
    torch.manual_seed(0)
    model = kind()
    return model, lt_zero.shard(model, config_of(stage, {**RELEASE, **zero}))


def _digest(stage: int, zero: dict[str, Any], kind: type[nn.Module]) -> str:
    model, engine = _sharded(stage, zero, kind)
    lt_zero.ShardedOptimizer(engine, OPTIMIZERS["sgd"](model.parameters()))
    return lt_zero.weights_digest(model)


@pytest.mark.parametrize("kind", [Net, Large])
def test_ranks_and_stages_do_not_count(pool: Pool, kind: type[nn.Module]) -> None:
    found = [pool.run(ranks, _digest, stage, {}, kind) for ranks, stage in ((1, 2), (2, 0), (2, 1), (3, 2), (3, 3))]
    assert len({digest for of_ranks in found for digest in of_ranks}) == 1
    assert len(found[0][0]) == 32


@pytest.mark.parametrize("where", PLACES)
def test_places_do_not_count(pool: Pool, tmp_path: Path, where: str) -> None:
    skip_without("offload")
    [(name, block)] = PLACES[where].items()
    placed = {name: {key: value.format(folder=tmp_path) for key, value in block.items()}}
    assert pool.run(2, _digest, 3, placed, Net) == pool.run(2, _digest, 3, {}, Net)


def _changed(kind: str) -> list[str]:
    model, engine = _sharded(2, {}, Large)
    found = [digest_of(engine)]
    with lt_zero.gathered(model, write=True), torch.no_grad():
        table = model.table.weight.view(-1)
        if kind == "one bit":
            bits = table.view(torch.int32)
            bits[257_111] ^= 1
        elif kind == "one bit of the second chunk":
            table.view(torch.int32)[270_000] ^= 1
        elif kind == "the sign of zero":
            table[3] = 0.0
        elif kind == "opposite neighbours that changed places":
            # In one row, in the upper half of words: their bits differ in the sign alone.
            table[3] = 0.25
            table[5] = -0.25
        else:
            table[[5, 270_000]] = table[[270_000, 5]]
    found.append(digest_of(engine))
    again = {"the sign of zero": (-0.0,), "opposite neighbours that changed places": (-0.25, None, 0.25)}.get(kind, ())
    if again:
        with lt_zero.gathered(model, write=True), torch.no_grad():
            for place, value in enumerate(again, start=3):
                if value is not None:
                    model.table.weight.view(-1)[place] = value
        found.append(digest_of(engine))
    return found


@pytest.mark.parametrize(
    "kind",
    [
        "one bit",
        "one bit of the second chunk",
        "the sign of zero",
        "two elements that changed places",
        "opposite neighbours that changed places",
    ],
)
def test_every_change_shows(pool: Pool, kind: str) -> None:
    digests = pool.run(2, _changed, kind)[0]
    assert len(set(digests)) == len(digests)
    if kind.startswith("one bit"):
        for half in slice(16), slice(16, None):
            assert len({digest[half] for digest in digests}) == 2


def test_names_count_and_a_plain_module_is_refused() -> None:
    one, two = nn.Linear(3, 3, bias=False), nn.Sequential(nn.Linear(3, 3, bias=False))
    two.load_state_dict({"0.weight": one.weight.detach().clone()})
    with pytest.raises(ValueError, match=r"weights_digest\(Linear\): the module is not sharded\. Call it in a run"):
        lt_zero.weights_digest(one)
    for module in (one, two):
        lt_zero.shard(module, {"zero_optimization": {"stage": 2}})
    assert lt_zero.weights_digest(one) != lt_zero.weights_digest(two)


def _drawn_anew(default: str) -> str:
    model, _ = _sharded(2, {}, Large)
    _numbers.cache_clear()
    with torch.device(default):
        return lt_zero.weights_digest(model)


def test_the_default_device_does_not_count() -> None:
    assert _drawn_anew("meta") == _drawn_anew("cpu")


def test_a_module_that_trains_nothing_is_refused_and_zeros_are_not() -> None:
    for trains in (True, False):
        model = nn.Linear(3, 2).requires_grad_(trains)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        lt_zero.shard(model, config_of(2, RELEASE))
        if trains:
            assert int(lt_zero.weights_digest(model), 16) == 0
            continue
        with pytest.raises(ValueError, match=r"weights_digest\(Linear\): it trains no parameter\. Call requires_grad_"):
            lt_zero.weights_digest(model)
