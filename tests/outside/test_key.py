"""A key that a feature from outside brings is read, checked, compared and shown as lt_zero's own."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typer.testing import CliRunner

import lt_zero
from lt_zero import ConfigError, ZeroConfig, cli
from lt_zero.config.applicability import check_same
from lt_zero.config.catalog import explain, json_schema
from lt_zero.config.load import examine, plain, resolved, shown
from lt_zero.core.comm.world import World
from lt_zero.core.feature import Block, Entry, Real, register, registered, unregister
from lt_zero.features import features_of
from tests.outside import noise
from tests.support.models import Net, next_token_loss
from tests.support.outside import features
from tests.support.parity import config_of, full_values
from tests.support.pool import Pool

SHARDED = {"zero_optimization": {"stage": 2}}


LATE = Entry("late", "tests.outside.noise:Noise", "LATE", lambda config: True)


@pytest.fixture
def known() -> Iterator[None]:
    with features(noise.ENTRY):
        yield


def problems(values: dict[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.of(values)
    return [(problem.key, problem.message) for problem in caught.value.problems]


@pytest.mark.usefixtures("known")
def test_it_is_read_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {**SHARDED, "noise": {"scale": 0.1}}
    (tmp_path / "zero.json").write_text(json.dumps(values), encoding="utf-8")
    (tmp_path / "zero.yaml").write_text("zero_optimization: {stage: 2}\nnoise: {scale: 1e-1}\n", encoding="utf-8")
    made = [
        ZeroConfig.of(values),
        ZeroConfig.of(tmp_path / "zero.json"),
        ZeroConfig.of(tmp_path / "zero.yaml"),
        ZeroConfig.of(SHARDED, overrides=["noise.scale=0.1"]),
        ZeroConfig(stage=2, noise={"scale": 0.1}),
    ]
    monkeypatch.setenv("LT_ZERO_OVERRIDES", "noise.scale=0.1")
    made.append(examine(SHARDED, for_run=True).usable())
    for config in made:
        assert config == made[0]
        assert config["noise"] == noise.NoiseBlock(scale=0.1)
    again = pickle.loads(pickle.dumps(made[0]))
    assert again == made[0]
    assert type(again) is type(made[0])
    assert plain(made[0]) == values
    assert resolved(made[0])["noise"] == shown(made[0])["noise"] == {"scale": 0.1, "seed": 0}
    assert ZeroConfig.of(SHARDED)["noise"] == noise.NoiseBlock()


@pytest.mark.usefixtures("known")
def test_errors_are_those_of_own_keys() -> None:
    assert problems({"noise": {"scale": -1}}) == [
        (
            "noise.scale",
            "noise.scale=-1 is wrong: it must be at least 0.0. Meaning: standard deviation of the noise; 0: none.",
        )
    ]
    ((key, text),) = problems({"noise": {"scales": 0.5}})
    assert key == "noise.scales"
    assert text.endswith("Did you mean noise.scale?")
    ((key, text),) = problems({"noice": {"scale": 0.5}})
    assert (key, text.endswith("Did you mean noise?")) == ("noice", True)
    assert [key for key, _ in problems({"noise": 3})] == ["noise"]
    assert [key for key, _ in problems({"noise": {"scale": "much", "seed": 0.5}})] == ["noise.scale", "noise.seed"]
    with pytest.raises(TypeError, match=r"noise\.scale = 1: a configuration is frozen"):
        ZeroConfig.of({"noise": {"scale": 0.5}})["noise"].scale = 1


@pytest.mark.usefixtures("known")
def test_its_rule_is_one_of_the_problems(tmp_path: Path) -> None:
    file = tmp_path / "zero.yaml"
    file.write_text("gradient_allreduce_op: sum\nnoise:\n  scale: 0.5\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.of(file)
    (found,) = caught.value.problems
    assert found.key == "noise.scale"
    assert found.mark is not None
    assert found.mark.line == 3
    assert ZeroConfig.of({"gradient_allreduce_op": "sum"})["noise"].scale == 0, "it is off"
    every = {"gradient_allreduce_op": "sum", "noise": {"scale": 0.5}, "train_batch_size": 7}
    keys = [key for key, _ in problems({**every, "gradient_accumulation_steps": 2})]
    assert sorted(keys) == ["noise.scale", "train_batch_size"]


@pytest.mark.usefixtures("known")
def test_it_is_explained_and_in_the_schema() -> None:
    assert explain("noise.scale").splitlines() == [
        "noise.scale",
        "    standard deviation of the noise; 0: none",
        "    value: number, >= 0, <= 1",
        "    default: 0",
    ]
    assert "noise" in json.loads(json_schema())["properties"]


def test_without_the_package_the_key_is_unknown() -> None:
    before = json_schema()
    with features(noise.ENTRY):
        config = ZeroConfig.of({**SHARDED, "noise": {"scale": 0.5}})
        assert ZeroConfig.of(config) is config
    assert [key for key, _ in problems({"noise": {"scale": 0.5}})] == ["noise"]
    assert json_schema() == before
    with pytest.raises(ConfigError, match="noise is not a key"):
        ZeroConfig.of(config)
    plainly = ZeroConfig.of(SHARDED)
    with features(noise.ENTRY):
        assert features_of(plainly) == [], "one that was made before does not ask for it"
        assert ZeroConfig.of(plainly)["noise"].scale == 0, "one that was made before gets the key"


def test_the_command_imports_what_registers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = "from lt_zero.core.feature import register\nfrom tests.outside.noise import ENTRY\nregister(ENTRY)\n"
    Path("registers_noise.py").write_text(text, encoding="utf-8")
    Path("zero.yaml").write_text("zero_optimization: {stage: 2}\nnoise: {scale: 0.1}\n", encoding="utf-8")

    def told(*before: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.app, [*before, "config", "check", "zero.yaml"])
        return done.exit_code, done.output

    code, output = told()
    assert (code, "noise is not a key of lt_zero" in output) == (1, True)
    code, output = told("--import", "not_there")
    assert code == 1
    assert (
        output == "lt-zero --import not_there: there is no module not_there. Install it, or name one of this folder.\n"
    )
    try:
        code, output = told("--import", "registers_noise")
        assert (code, output.splitlines()[1].split()) == (0, ["works", "0.1", "noise.scale"])
    finally:
        unregister("noise")
        sys.modules.pop("registers_noise", None)


class Needy(Block):
    """A key without default."""

    scale: Real


@pytest.mark.parametrize(
    ("key", "block", "text"),
    [
        ("optimizer", noise.NoiseBlock, "lt_zero or DeepSpeed has this key"),
        ("data_efficiency", noise.NoiseBlock, "lt_zero or DeepSpeed has this key"),
        ("model_config", noise.NoiseBlock, "lt_zero or DeepSpeed has this key"),
        ("noise-more", noise.NoiseBlock, "no configuration can have this key"),
        ("_noise", noise.NoiseBlock, "no configuration can have this key"),
        ("needy", Needy, r"needy\.scale has no default"),
    ],
)
def test_keys_that_cannot_be_brought(key: str, block: type[Block], text: str) -> None:
    with features(Entry("one", "nowhere:One", key, lambda config: False, block)), pytest.raises(ValueError, match=text):
        ZeroConfig.of(SHARDED)


def test_a_key_of_two_features_is_refused() -> None:
    with features(noise.ENTRY):
        with pytest.raises(ValueError, match="another feature brings the key 'noise'"):
            register(Entry("other", "nowhere:Other", "noise", lambda config: False, noise.NoiseBlock))
        assert registered() == (noise.ENTRY,)


def _differ() -> str:
    with features(noise.ENTRY):
        config = ZeroConfig.of({**SHARDED, "noise": {"scale": 0.1 * (dist.get_rank() + 1)}})
        with pytest.raises(ConfigError) as caught:
            check_same(config, World.join(torch.device("cpu")).host_gather)
    return str(caught.value)


def test_ranks_with_other_values_are_an_error(pool: Pool) -> None:
    for text in pool.run(2, _differ):
        assert "noise.scale is 0.1 on rank 0, 0.2 on rank 1" in text


def _registered_on_one() -> str:
    mine = [LATE] if dist.get_rank() == 1 else []
    with features(*mine), pytest.raises(ConfigError) as caught:
        check_same(ZeroConfig.of(SHARDED), World.join(torch.device("cpu")).host_gather)
    return str(caught.value)


def test_ranks_with_other_features_are_an_error(pool: Pool) -> None:
    for text in pool.run(2, _registered_on_one):
        assert "register('late') is missing on rank 0, number 1, asked for on rank 1" in text


def _trained(stage: int, scale: float) -> dict[str, Tensor]:
    with features(noise.ENTRY):
        torch.manual_seed(0)
        model = Net()
        engine = lt_zero.shard(model, config_of(stage, noise={"scale": scale}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lt_zero.ShardedOptimizer(engine, optimizer)
        for step in range(2):
            optimizer.zero_grad()
            next_token_loss(model, step, 0, dist.get_rank()).backward()
            optimizer.step()
        return full_values(engine)


def _with_and_without(stage: int) -> None:
    without, found, again = _trained(stage, 0.0), _trained(stage, 0.1), _trained(stage, 0.1)
    for name, value in found.items():
        assert torch.equal(value, again[name]), name
        assert not torch.equal(value, without[name]), name


@pytest.mark.parametrize("stage", [1, 3])
def test_the_feature_follows_its_key(pool: Pool, stage: int) -> None:
    pool.run(2, _with_and_without, stage)
