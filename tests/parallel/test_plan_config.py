"""The keys of plans: what is refused before there is a model, and that what was understood can be written again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lt_zero.common.errors import ConfigError
from lt_zero.config import ZeroConfig
from lt_zero.config.load import plain, resolved

P = "tensor_parallel.partition_config."
SPECS = P + "layer_specs"


def of(specs: Any, **keys: Any) -> ZeroConfig:
    return ZeroConfig.of({"tensor_parallel": {"partition_config": {"layer_specs": specs, **keys}}})


@pytest.mark.parametrize(
    ("specs", "key", "part"),
    [
        ([{"patterns": ["("]}], f"{SPECS}.0.patterns.0", "no regular expression"),
        ([{"patterns": []}], f"{SPECS}.0.patterns", "at least 1"),
        ([{}], f"{SPECS}.0", "patterns is missing"),
        ([{"patterns": "a"}, {"patterns": "b", "partition_type": "both"}], f"{SPECS}.1.partition_type", "'row'"),
        ([{"patterns": "a", "partition_dim": 2}], f"{SPECS}.0.partition_dim", "0 or 1"),
        ([{"patterns": "a", "partition_dim": True}], f"{SPECS}.0.partition_dim", "not a number"),
        ([{"patterns": "a", "grad_allreduce": True}], f"{SPECS}.0", "partition_type=skip"),
        ([{"patterns": "a", "partition_type": "row", "gather_output": True}], f"{SPECS}.0", "partition_type=column"),
        ([{"patterns": "a", "partition_type": "row", "shape": [2, -1]}], f"{SPECS}.0", "partition_type=column"),
        ([{"patterns": "a", "shape": [4, -1, 8], "partition_dim": 1}], f"{SPECS}.0", "[[sizes], -1]"),
        ([{"patterns": "a", "shape": [-1, -1]}], f"{SPECS}.0", "[[sizes], -1]"),
        ([{"patterns": "a", "shape": [2, [3, 4]]}], f"{SPECS}.0", "[[sizes], -1]"),
        ([{"patterns": "a", "shape": [[3, 0], -1]}], f"{SPECS}.0.shape.0", "shape"),
        ([{"patterns": "a", "shape": [2, -1], "partition_dim": 1}], f"{SPECS}.0", "partition_dim=1"),
        ([{"patterns": "a", "kind": "row"}], f"{SPECS}.0", "partition_type"),
        (["a"], f"{SPECS}.0", "a block"),
        ("a", SPECS, "a list"),
    ],
)
def test_rules_that_say_nothing_sensible(specs: Any, key: str, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        of(specs)
    (problem, *_) = error.value.problems
    assert (problem.key, part in problem.message) == (key, True), str(problem)


def test_what_was_understood_can_be_written_again() -> None:
    made = of([{"patterns": "a", "shape": [[4, 2, 2], -1]}, {"patterns": ["b"], "partition_type": "SKIP"}], tp_size=2)
    for values in (plain(made), json.loads(json.dumps(resolved(made)))):
        again = ZeroConfig.of(values)
        assert again.tensor_parallel == made.tensor_parallel
    partition = made.tensor_parallel.partition_config
    assert partition is not None
    first, second = partition.layer_specs
    assert (first.patterns, first.shape, first.partition_type) == (("a",), ((4, 2, 2), -1), "column")
    assert (second.partition_type, second.grad_allreduce) == ("skip", False)
    with pytest.raises(Exception, match="frozen"):
        first.patterns = ("b",)  # type: ignore[misc]
