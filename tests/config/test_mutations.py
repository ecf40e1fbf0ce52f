"""Configurations that are wrong in any way raise ``ConfigError`` and nothing else, or are right."""

from __future__ import annotations

import copy
import json
import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lt_zero.config.catalog import json_schema
from tests.support.config_mutations import BASES, KEYS, TYPICAL, check, places

VALUES = st.one_of(
    st.sampled_from(TYPICAL),
    st.floats(),
    st.integers(),
    st.text(max_size=8),
    st.recursive(st.none() | st.booleans() | st.text(max_size=4), lambda v: st.lists(v, max_size=3), max_leaves=4),
    st.dictionaries(st.text(max_size=6), st.none() | st.integers() | st.text(max_size=4), max_size=3),
)


@st.composite
def mutated(draw: Any) -> dict[str, Any]:
    config = copy.deepcopy(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(1, 4))):
        there = list(places(config)) or [("x",)]
        how = draw(st.sampled_from(["change", "rename", "delete", "known", "known"]))
        known = tuple(draw(st.sampled_from(KEYS)).split("."))
        path = known if how == "known" else draw(st.sampled_from(there))
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


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
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
