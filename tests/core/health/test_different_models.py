"""Ranks with different models: the error on all ranks names the parameter, the ranks and what they have."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn

import lt_zero
from lt_zero import FabricZeroStrategy
from tests.support.lightning_tools import GPT, quick, sharded_trainer, torchrun_env
from tests.support.matrix import only_rows
from tests.support.models import WIDTH, Block, Net
from tests.support.parity import config_of
from tests.support.pool import Pool

WHOLE = {"stage3_param_persistence_threshold": 0}


def other() -> bool:
    """Whether this is the last rank, which has another model."""
    return dist.get_rank() == dist.get_world_size() - 1


def wide(net: Net) -> None:
    if other():
        net.blocks[1].up = nn.Linear(WIDTH, 7)


def deep(net: Net) -> None:
    if other():
        net.blocks.append(Block())


def frozen(net: Net) -> None:
    net.blocks[2].requires_grad_(not other())


def tied(net: Net) -> None:
    if other():
        net.head.weight = nn.Parameter(net.head.weight.detach().clone())


def half(net: Net) -> None:
    if other():
        net.blocks[0].to(torch.float16)


def buffered(net: Net) -> None:
    net.blocks[0].register_buffer("seen", torch.zeros(3 if other() else 2))


def classes(net: Net) -> None:
    if other():
        net.blocks[0].norm.__class__ = type("OtherNorm", (nn.LayerNorm,), {})


def longer(net: Net) -> None:
    net.head = nn.Sequential(net.head, nn.ReLU()) if other() else nn.Sequential(net.head)


F32 = r"float32 on rank\S* 0.*"
DIFFERENT: dict[Callable[[Net], None], str] = {
    wide: rf"'[\w.]*blocks.1.up.weight' \(of Linear\) is \(31, 10\) {F32} and \(7, 10\) float32 on rank",
    deep: r"'[\w.]*blocks.3.norm.weight' \(of LayerNorm\) is missing on rank\S* 0.* and \(10,\) float32 on rank",
    frozen: rf"'[\w.]*blocks.2.norm.weight' .* is \(10,\) {F32} and \(10,\) float32, frozen on rank",
    tied: r"'[\w.]*head.weight' .* float32, tied to '[\w.]*embedding.weight' on rank.* and \(11, 10\) float32 on rank",
    half: rf"'[\w.]*blocks.0.norm.weight' .* {F32} and \(10,\) float16 on rank",
    buffered: rf"buffer '[\w.]*blocks.0.seen' \(of Block\) is \(2,\) {F32} and \(3,\) float32 on rank",
    longer: r"module 'head.1' is missing on rank\S* 0.* and ReLU\(\) on rank",
    classes: rf"'[\w.]*blocks.0.norm.weight' \(of LayerNorm\) is \(10,\) {F32} and missing on rank",
}


class Different(GPT):
    def __init__(self, change: Callable[[Net], None]) -> None:
        super().__init__(dist.get_world_size())
        change(self.net)


class Late(GPT):
    """Makes its model where stage 3 shards it at construction."""

    def __init__(self, width: int) -> None:
        super().__init__(dist.get_world_size())
        self.width = width

    def configure_model(self) -> None:
        self.more = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, self.width))


def _start(face: str, stage: int, change: Callable[[Net], None]) -> None:
    net = Net()
    if face == "Trainer":
        auto = {"reduce_bucket_size": "auto"}
        sharded_trainer(stage, auto, max_steps=1).fit(Different(change))
        return
    change(net)
    if face == "Fabric":
        os.environ.update(torchrun_env())
        strategy = FabricZeroStrategy(config=config_of(stage))
        fabric = L.Fabric(accelerator="cpu", strategy=strategy, devices=dist.get_world_size())
        fabric.launch()
        fabric.setup_module(net)
    elif face == "loop":
        auto = {"stage": stage, "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": "auto"}
        lt_zero.initialize(model=net, config={"zero_optimization": auto})
    else:
        lt_zero.shard(net, config_of(stage))


def _error(face: str, stage: int, change: Callable[[Net], None]) -> str:
    with quick(), pytest.raises(RuntimeError) as caught:
        _start(face, stage, change)
    return str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "face", "stage", "change"),
    only_rows(
        [
            *((2, "shard", 3, change) for change in (deep, frozen, tied, classes, longer)),
            (3, "shard", 3, wide),
            (2, "loop", 2, buffered),
            (2, "Fabric", 0, half),
        ],
        [
            (ranks, face, stage, change)
            for ranks, face, stage in [(2, "shard", 3), (3, "shard", 3), (2, "loop", 2), (2, "Fabric", 0)]
            for change in DIFFERENT
        ],
    ),
)
def test_the_error_names_the_difference(
    pool: Pool, ranks: int, face: str, stage: int, change: Callable[[Net], None]
) -> None:
    for told in pool.run(ranks, _error, face, stage, change):
        assert re.search(DIFFERENT[change], told), told


def _shows() -> list[str]:
    """A module without values on the last rank only, which no forward uses; returns the warnings about it."""
    net = Net()
    if other():
        net.shown = nn.Upsample(scale_factor=2)
    with quick(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lt_zero.shard(net, config_of(3))
    return [str(each.message) for each in caught if "different modules" in str(each.message)]


def test_a_module_without_values_on_one_rank(pool: Pool) -> None:
    first, second = pool.run(2, _shows)
    assert len(first) == 1
    assert "attribute 'shown' (of Net) is missing on rank 0 and Upsample(scale_factor=2" in first[0]
    assert not second


def test_in_a_trainer(pool: Pool) -> None:
    for told in pool.run(2, _error, "Trainer", 3, wide):
        assert re.search(DIFFERENT[wide], told), told


def _between_runs() -> str:
    """One rank changes its model between two runs of a Trainer."""
    module = GPT(dist.get_world_size())
    with quick():
        trainer = sharded_trainer(2, max_steps=1, limit_val_batches=0)
        trainer.fit(module)
        if other():
            module.late = nn.Linear(2, 2)
        with pytest.raises(RuntimeError) as caught:
            trainer.validate(module, verbose=False)
    return str(caught.value)


def test_one_rank_changes_its_model_between_runs(pool: Pool) -> None:
    for told in pool.run(2, _between_runs):
        assert re.search(r"'late.weight' \(of Linear\) is missing on rank 0 and \(2, 2\) float32 on rank 1", told), told


def _at_construction(face: str) -> str:
    width = 4 if other() else 3
    with quick(), pytest.raises(RuntimeError) as caught:
        sharded_trainer(3, max_steps=1).fit(Late(width)) if face == "Trainer" else _built(width)
    return str(caught.value)


def _built(width: int) -> Any:
    with lt_zero.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3, **WHOLE}}):
        return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, width))


@pytest.mark.parametrize("face", ["Trainer", "Init"])
def test_models_that_are_sharded_at_construction(pool: Pool, face: str) -> None:
    for told in pool.run(2, _at_construction, face):
        match = r"'(Late.more|Sequential).1.weight' is \(3, 5\) float32 on rank 0 and \(4, 5\) float32 on rank 1"
        assert re.search(match, told), told


def _on_meta() -> str:
    with quick(), pytest.raises(RuntimeError) as caught:
        lt_zero.shard(_meta(), config_of(3))
    return str(caught.value)


def _meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(4 if other() else 3, 2)


def test_models_without_values(pool: Pool) -> None:
    for told in pool.run(2, _on_meta):
        assert re.search(
            r"'weight' \(of Linear\) is \(2, 3\) float32 on rank 0 and \(2, 4\) float32 on rank 1", told
        ), told
