"""Where a configuration's values are looked for in what profilers show: the table of FLOPs, recorded collectives."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from lt_zero.common.errors import ConfigError
from tests.support.lightning_tools import torchrun_env
from tests.support.reach_engine import Config, Lab
from tests.support.reach_trainer import fit, fit_once


def table(find: Callable[[str], Any]) -> Callable[[Lab, Config], Any]:
    """A look at the table of FLOPs of a run of four steps."""
    return lambda lab, config: find(fit_once(lab, config, max_steps=4).text)


def counted_at(text: str) -> Any:
    """After how many steps."""
    return re.findall(r"after (\d+) optimizer steps", text)


def levels(text: str) -> Any:
    """Of the aggregate."""
    return re.findall(r"^│ (\d) ", text, re.M)


def classes(text: str) -> Any:
    """That the aggregate names at the first level, by parameters."""
    (row,) = re.findall(r"^│ 1 +│([^│]*)│", text, re.M)
    return re.findall(r"[A-Z]\w+", row)


def rows(text: str) -> Any:
    """Names in the table of modules."""
    return re.findall(r"^│ (first|norm|second) .*%", text, re.M)


def recomputed(text: str) -> Any:
    return re.findall(r"recomputed in backward: (.*)", text)


def written(lab: Lab, config: Config) -> Any:
    """Where the table is: on stdout, in a file."""
    text = fit(lab, config, max_steps=4).text
    file = lab.folder / "made" / "flops.txt"
    return [("flops_profiler" in found) for found in (text, file.read_text() if file.exists() else "")]


def _comms(config: dict[str, Any]) -> Any:
    with mock.patch.dict("os.environ", torchrun_env()):
        found = fit(Lab(Path(), None), config, devices=2, max_steps=1)  # type: ignore[arg-type]
    assert not isinstance(found.error, ConfigError), found.error
    try:
        records = found.strategy.comms_summary()
    except RuntimeError:
        return "", [], []
    return found.text, sorted({r.operation for r in records}), sorted({r.name for r in records if r.name})


def comms(find: Callable[[str, list[str], list[str]], Any]) -> Callable[[Lab, Config], Any]:
    """A look at a step of two ranks: what rank 0 prints, which operations are recorded, for what."""

    def look(lab: Lab, config: Config) -> Any:
        if (key := repr(sorted(config.items()))) not in _RECORDED:
            _RECORDED[key] = lab.pool.run(2, _comms, config)[0]
        return find(*_RECORDED[key])

    return look


_RECORDED: dict[str, Any] = {}  # by configuration


def enabled(text: str, operations: list[str], names: list[str]) -> Any:
    return "Collectives of rank 0" in text


def lines(text: str, operations: list[str], names: list[str]) -> Any:
    """Whether each collective has its line."""
    return bool(re.search(r"^comm: reduce_scatter, \d+ bytes, [\d.e-]+ ms$", text, re.M))


def some(text: str, operations: list[str], names: list[str]) -> Any:
    """Two of the operations, if they are recorded."""
    return [name for name in operations if name in ("broadcast", "reduce_scatter")]


def named(text: str, operations: list[str], names: list[str]) -> Any:
    return bool(names)
