"""Configurations that are wrong in some way, and what has to come of each: ``ConfigError``, or what was meant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lt_zero.common.errors import ConfigError
from lt_zero.config import ZeroConfig
from lt_zero.config import keys as key_table
from lt_zero.config.catalog import entries
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


def places(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


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
