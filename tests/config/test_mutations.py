"""Configurations that are wrong in any way raise ``ConfigError`` and nothing else, or are right."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lt_zero.common.errors import ConfigError
from lt_zero.config import ZeroConfig
from lt_zero.config import keys as key_table
from lt_zero.config.catalog import entries, json_schema
from lt_zero.config.cli import to_yaml
from lt_zero.config.load import examine, plain, resolved
from tests.support.paths import DATA

BASES = [json.loads(path.read_text()) for path in sorted((DATA / "configs").glob("hf_*.json"))]
KEYS = [entry.key for entry in entries() if "<" not in entry.key] + [
    row.key.replace(".**", ".enabled") for row in key_table.rows() if row.key[0].isalpha() and "*" not in row.key[:-3]
]
TYPICAL: list[Any] = [None, True, False, 0, 1, -1, 3, 2.5, 1e9, 1e400, -0.0, 10**30, "auto", "AUTO", "", " ", "cpu"]
TYPICAL += ["nvme", "none", "fp16", "2e8", "1_0", "5e-1", "${a}", "~", "~nobody/x", "\0", "é" * 300, [], {}, [None]]
TYPICAL += [[[]], {"": 1}, {"a": {"b": 1}}, {"enabled": False}, ["a", 1], float("nan")]
VALUES = st.one_of(
    st.sampled_from(TYPICAL),
    st.floats(),
    st.integers(),
    st.text(max_size=8),
    st.recursive(st.none() | st.booleans() | st.text(max_size=4), lambda v: st.lists(v, max_size=3), max_leaves=4),
    st.dictionaries(st.text(max_size=6), st.none() | st.integers() | st.text(max_size=4), max_size=3),
)


def _places(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from _places(value, (*path, key))


@st.composite
def mutated(draw: Any) -> dict[str, Any]:
    config = copy.deepcopy(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(1, 4))):
        places = list(_places(config)) or [("x",)]
        how = draw(st.sampled_from(["change", "rename", "delete", "known", "known"]))
        known = tuple(draw(st.sampled_from(KEYS)).split("."))
        path = known if how == "known" else draw(st.sampled_from(places))
        block = config
        for key in path[:-1]:
            if not isinstance(block.get(key), dict):
                block[key] = {}
            block = block[key]
        if how == "rename":
            name = path[-1]
            at = draw(st.integers(0, len(name)))
            block[name[:at] + draw(st.text(max_size=2)) + name[at + 1 :]] = block.pop(name, None)
        elif how == "delete":
            block.pop(path[-1], None)
        else:
            block[path[-1]] = draw(VALUES)
    return config


def caught(config: dict[str, Any]) -> ZeroConfig | ConfigError:
    try:
        return examine(config).usable()
    except ConfigError as error:
        return error


def check(config: dict[str, Any]) -> bool:
    before = repr(config)
    found = caught(config)
    assert repr(config) == before, "what is passed is not changed"
    if isinstance(found, ConfigError):
        assert found.problems
        assert all(problem.message and problem.key in problem.message for problem in found.problems), str(found)
        return False
    made = found
    assert isinstance(made, ZeroConfig)
    again = examine(plain(made)).usable()
    assert again == made, "a configuration that was understood is understood in its own words"
    told = examine(json.loads(json.dumps(resolved(made))))
    whole = told.usable()
    assert whole.zero_optimization == made.zero_optimization
    assert not [notice for notice in told.notices if notice.kind == "alias"]
    assert isinstance(to_yaml(resolved(made)), str)
    return True


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(mutated())
def test_nothing_but_config_errors(config: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(config)


@pytest.mark.slow
@settings(max_examples=8000, deadline=None, suppress_health_check=list(HealthCheck))
@given(mutated())
def test_nothing_but_config_errors_at_length(config: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(config)


def test_the_bases_are_right() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(check(base) for base in BASES)


def test_the_schema_for_editors_knows_each_key() -> None:
    schema = json.loads(json_schema())
    assert {"zero_optimization", "fp16", "optimizer", "train_batch_size"} <= set(schema["properties"])
    block = schema["$defs"]["ZeroOptimization"]
    assert {"const": "auto"} in block["properties"]["reduce_bucket_size"]["anyOf"]
    assert block["additionalProperties"] is False
    assert "async" in schema["$defs"]["Checkpoint"]["properties"]
