"""Values of other libraries, a configuration that does not change, and where its warnings point."""

from __future__ import annotations

import copy
import pickle
import warnings
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lt_zero
from lt_zero import FabricZeroStrategy, ZeroStrategy
from lt_zero.common.errors import ConfigError
from lt_zero.common.fields import Block, dotted_keys
from lt_zero.config import ZeroConfig
from lt_zero.config.blocks import Schema
from lt_zero.config.load import ConfigWarning
from lt_zero.config.precision import resolve_mode


class _Unreadable:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]


def test_values_of_numpy_and_of_nobody() -> None:
    made = ZeroConfig.of({"train_batch_size": np.int64(4), "fp16_override_modules": np.array(["a", "b"])})
    assert (made.train_batch_size, made.fp16_override_modules) == (4, ("a", "b"))
    for value in (np.array([1, 2]), torch.ones(2), torch.ones(2, device="meta"), _Unreadable()):
        with pytest.raises(ConfigError, match="train_batch_size"):
            ZeroConfig.of({"train_batch_size": value})


def test_params_are_frozen() -> None:
    made = ZeroConfig.of({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}, "scheduler": {"type": "WarmupLR"}})
    assert made.optimizer is not None
    assert made.scheduler is not None
    for params in (made.optimizer.params, made.scheduler.params):
        with pytest.raises(TypeError, match="frozen"):
            params["lr"] = 1.0
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), ZeroConfig.of(made, overrides=["bf16={}"])):
        assert copied.optimizer == made.optimizer
    changed = ZeroConfig.of(made, overrides=["optimizer.params.lr=0.25"])
    assert changed.optimizer is not None
    assert (made.optimizer.params, changed.optimizer.params) == ({"lr": 0.5}, {"lr": 0.25})


def test_equal_configurations_have_one_hash() -> None:
    kwargs = {
        "compile": {"kwargs": {"mode": "default"}},
        "optimizer": {"type": "AdamW", "params": {"betas": [0.5, 0.25]}},
    }
    values: list[dict[str, Any]] = [{}, {"zero_optimization": {"stage": 3}}, kwargs]
    cache = {ZeroConfig.of(value): number for number, value in enumerate(values)}
    assert [cache[ZeroConfig.of(copy.deepcopy(value))] for value in values] == [0, 1, 2]


def test_a_configuration_reads_like_its_file_and_refuses_to_be_written() -> None:
    made = ZeroConfig.of(
        {"zero_optimization": {"stage": 2}, "checkpoint": {"async": True}, "optimizer": {"type": "SGD"}}
    )
    assert (made["zero_optimization"]["stage"], made["checkpoint"]["async"]) == (2, True)
    assert made["zero_optimization"]["offload_optimizer"]["device"] == "none"
    assert ("checkpoint" in made, "fp16" in made, "async" in made["checkpoint"], "stage" in made) == (1, 0, 1, 0)
    with pytest.raises(KeyError, match=r"zero_optimization\.stagee is not a key of lt_zero; did you mean 'stage'"):
        made["zero_optimization"]["stagee"]
    offload = made["zero_optimization"]["offload_optimizer"]
    for block, name, value, override in (
        (made, "gradient_clipping", 0.5, "gradient_clipping=0.5"),
        (made["zero_optimization"], "stage", 3, "zero_optimization.stage=3"),
        (made["checkpoint"], "async", False, "checkpoint.async=false"),
        (offload, "device", "cpu", "zero_optimization.offload_optimizer.device=cpu"),
    ):
        with pytest.raises(TypeError, match=rf'overrides=\["{override}"\] to the strategy'):
            block[name] = value
    with pytest.raises(TypeError, match=r'overrides=\["zero_optimization\.stage=3"\]'):
        made.zero_optimization.stage = 3  # type: ignore[misc]
    assert made.zero_optimization.stage == 2


@pytest.mark.parametrize("rank", ["RANK", "LOCAL_RANK", "NODE_RANK"])
def test_warnings_point_at_the_caller(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rank, "0")
    for make in (ZeroConfig.of, lambda config: ZeroStrategy(config=config)):
        with pytest.warns(ConfigWarning, match="cpu_offload") as seen:
            make({"zero_optimization": {"stage": 2, "cpu_offload": True}})
        assert [w.filename for w in seen] == [__file__]
    monkeypatch.setenv(rank, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ZeroConfig.of({"zero_optimization": {"stage": 2, "cpu_offload": True}})


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, True),
        ({"bf16": {"enabled": True}, "zero_optimization": {"overlap_comm": False}}, True),
        (ZeroConfig(), True),
        ({"zero_optimization": False}, False),
        (ZeroConfig(stage=0), False),
    ],
)
def test_that_nothing_is_sharded_is_told_unless_the_stage_is_written(
    config: ZeroConfig | dict[str, object], told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "no zero_optimization.stage, which means 0"
    for make in (lambda: ZeroStrategy(config=config), lambda: lt_zero.FabricZeroStrategy(config=config)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            make()
        assert [text in str(warning.message) for warning in seen].count(True) == told
    monkeypatch.setenv("LT_ZERO_OVERRIDES", "zero_optimization.stage=0")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ZeroStrategy(config=config)
        ZeroStrategy()
    assert not any(text in str(warning.message) for warning in seen)


def test_sizes_of_a_model_that_is_not_there() -> None:
    zero = {"stage": 3, "reduce_bucket_size": "auto", "offload_param": {"device": "auto"}}
    with pytest.raises(ValueError, match=r'reduce_bucket_size "auto" needs the model'):
        lt_zero.estimate(10**6, {"zero_optimization": zero})


def test_an_import_that_ends_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lt_zero_test_exits.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot be imported .*SystemExit"):
        ZeroConfig.of({"optimizer": {"type": "lt_zero_test_exits.Adam"}})


def test_the_same_stage_in_another_type() -> None:
    assert ZeroConfig.of({"zero_optimization": {"stage": 2.0}}, stage=2).zero_optimization.stage == 2


def test_a_precision_that_contradicts_is_a_problem_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"bf16-true.* contradicts fp16\.enabled=true") as caught:
        resolve_mode(ZeroConfig.of({"fp16": {"enabled": True}}), "bf16-true")
    assert [problem.key for problem in caught.value.problems] == ["fp16.enabled"]


def test_a_switch_of_old_files_and_the_argument_say_the_same() -> None:
    assert ZeroConfig.of({"zero_optimization": True}, stage=1).zero_optimization.stage == 1
    with pytest.raises(ConfigError, match="stage=2 contradicts zero_optimization.stage=1"):
        ZeroConfig.of({"zero_optimization": True}, stage=2)


def test_folders_below_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    for block in ("activation_checkpointing", "zero_optimization.offload_param", "zero_optimization.offload_optimizer"):
        config = ZeroConfig.of(overrides=[f"{block}.nvme_path='~/nvme'", "zero_optimization.stage=3"])
        assert attrgetter(f"{block}.nvme_path")(config) == Path("/home/somebody/nvme")


def test_counts_may_be_short() -> None:
    zero = {"stage": 3, "reduce_bucket_size": "500M", "stage3_max_live_parameters": "1.1B", "sub_group_size": "2_000K"}
    made = ZeroConfig.of({"zero_optimization": zero}, overrides=["zero_optimization.allgather_bucket_size=0.5g"])
    block = made.zero_optimization
    assert (block.reduce_bucket_size, block.stage3_max_live_parameters) == (500_000_000, 1_100_000_000)
    assert (block.sub_group_size, block.allgather_bucket_size) == (2_000_000, 500_000_000)
    for wrong in ("500MB", "M", "7 B", "0.0001K", "1e400B", "1e-999999999B"):  # the last one would take for ever
        with pytest.raises(ConfigError, match="reduce_bucket_size"):
            ZeroConfig.of({"zero_optimization": {"stage": 3, "reduce_bucket_size": wrong}})


@pytest.mark.parametrize("value", [True, False])
def test_a_switch_is_no_number(value: bool) -> None:
    """Python's True is 1: every key that takes it stays a switch, or leaves it out."""
    for key in dotted_keys(Schema):
        config: Any = value
        for part in reversed(key.split(".")):
            config = {part: config}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                made = ZeroConfig.of(config)
            except ConfigError:
                continue
        got: Any = made
        for part in key.split("."):
            got = getattr(
                got, next(n for n, f in type(got).model_fields.items() if part in (n, f.validation_alias)), None
            )
            if not isinstance(got, Block):  # the value, or a block that false turns off
                break
        assert got is None or got is value or not isinstance(got, (int, float)), key


AXES = ("tensor", "pipeline", "sequence", "expert")


def _axes(**sizes: Any) -> list[int]:
    config = FabricZeroStrategy(stage=1, **{f"{axis}_parallel_size": size for axis, size in sizes.items()}).config
    tensor, stages = config.tensor_parallel.autotp_size, config.pipeline.ranks
    return [tensor, stages, config.sequence_parallel_size, config.expert_parallel.ranks]


@pytest.mark.parametrize("axis", AXES)
def test_sizes_of_axes_are_numbers_texts_or_0_for_off(axis: str) -> None:
    for size in (2, "2"):
        assert _axes(**{axis: size}) == [2 if each == axis else 1 for each in AXES]
    for size in (0, "0", 1):
        assert _axes(**{axis: size}) == [1] * 4
    for size in (True, False, -1, 1.5, "some", ""):
        with pytest.raises(ConfigError, match="whole number|greater than 0"):
            _axes(**{axis: size})


def test_a_size_of_one_byte_is_no_share() -> None:
    for value, found in ((1, 1.0), ("0.5", 0.5), ("2B", 2), ("4GB", 4 * 10**9)):
        block = ZeroConfig.of({"activation_checkpointing": {"memory_budget": value}}).activation_checkpointing
        assert block.memory_budget == found
    with pytest.raises(ConfigError, match='memory_budget="1B" is wrong'):
        ZeroConfig.of({"activation_checkpointing": {"memory_budget": "1B"}})
