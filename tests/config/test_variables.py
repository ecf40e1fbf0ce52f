"""The environment variables of lt_zero: wrong values are errors, unknown names are told."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lt_zero.common.errors import ConfigError
from lt_zero.common.variables import KNOWN, switched
from lt_zero.config import ZeroConfig
from lt_zero.config.load import examine

WRONG = {
    "LT_ZERO_ALONE": "maybe",
    "LT_ZERO_DEBUG": "2",
    "LT_ZERO_ISA": "avx1024",
    "LT_ZERO_MEMORY_CHECK": "never",
    "LT_ZERO_NATIVE": "o",
    "LT_ZERO_NODE_RANK": "-1",
    "LT_ZERO_NVME": __file__,
    "LT_ZERO_OVERRIDES": "a='b",
    "LT_ZERO_SHARED_MEMORY": "nope",
    "LT_ZERO_TRIAL": __file__,
}


def test_wrong_values_are_errors_that_name_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WRONG.items():
        monkeypatch.setenv(name, value)
    for config in ({}, ZeroConfig()):
        with pytest.raises(ConfigError) as caught:
            examine(config, for_run=True)
        assert [problem.key for problem in caught.value.problems] == sorted(WRONG)
        for problem in caught.value.problems:
            shown = re.escape(repr(WRONG[problem.key]))
            pattern = rf"{problem.key}={shown} in the environment cannot be used: it must be .*Correct or unset it\."
            assert re.fullmatch(pattern, problem.message)


@pytest.mark.parametrize("text", ["x", "a=1 =", "-1", "zero_optimization.stage=${oc.env:NO_SUCH_NAME}"])
def test_errors_of_overrides_name_the_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LT_ZERO_OVERRIDES", text)
    with pytest.raises(ConfigError) as caught:
        examine({}, for_run=True).usable()
    assert all(problem.message.startswith("LT_ZERO_OVERRIDES in the") for problem in caught.value.problems)


def test_right_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = dict.fromkeys(KNOWN, "") | {"LT_ZERO_ISA": "AVX2", "LT_ZERO_NODE_RANK": "12", "LT_ZERO_DEBUG": " On "}
    right |= {"LT_ZERO_NVME": str(tmp_path / "new"), "LT_ZERO_TRIAL": str(tmp_path), "LT_ZERO_NATIVE": "no"}
    for name, value in right.items():
        monkeypatch.setenv(name, value)
    assert not examine(ZeroConfig(stage=0), for_run=True).notices
    assert switched("LT_ZERO_DEBUG", False)
    assert not switched("LT_ZERO_NATIVE", True)
    assert switched("LT_ZERO_MEMORY_CHECK", True)
    assert not switched("LT_ZERO_ALONE", False)


def test_unknown_names_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LT_ZERO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LT_ZERO_SHARED_MEMROY", "0")
    monkeypatch.setenv("LT_ZERO_TEST_ONLY", "x")
    for config in ({"zero_optimization": {"stage": 0}}, ZeroConfig(stage=0)):
        told = [str(notice) for notice in examine(config, for_run=True).notices]
        assert told == [
            "LT_ZERO_SHARED_MEMROY in the environment is no variable of lt_zero's. Did you mean LT_ZERO_SHARED_MEMORY?",
            "LT_ZERO_TEST_ONLY in the environment is no variable of lt_zero's.",
        ]
    assert not examine({}).notices
