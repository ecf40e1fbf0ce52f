"""What ``make same-as`` says of two checkouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.paths import ROOT
from tests.support.same_as import checkout, compare, differences, resumed
from tests.support.same_as_runs import LAST, SAVED, Values

NAN, ZERO = torch.tensor([1.0, float("nan")]), torch.tensor([0.0])
# A user's program that computes something else with the same package.
OTHER_GELU = """
import functools
import torch
torch.nn.functional.gelu = functools.partial(torch.nn.functional.gelu, approximate="tanh")
"""


@pytest.mark.parametrize(
    ("found", "wanted", "told"),
    [
        ({(1, "a"): NAN}, {(1, "a"): NAN.clone()}, []),
        ({(1, "a"): ZERO}, {(1, "a"): -ZERO}, ["rank 1, step 1: a"]),
        ({(1, "a"): ZERO}, {(1, "a"): ZERO.half()}, ["rank 1, step 1: a"]),
        ({(1, "a"): ZERO}, {(1, "a"): ZERO.view(1, 1)}, ["rank 1, step 1: a"]),
        ({(1, "a"): ZERO, (2, "b"): ZERO}, {(1, "a"): ZERO}, ["rank 1, step 2: b is new"]),
        ({(1, "a"): ZERO}, {(1, "a"): ZERO, (2, "b"): ZERO}, ["rank 1, step 2: b is missing"]),
    ],
)
def test_each_difference_is_told(found: Values, wanted: Values, told: list[str]) -> None:
    same = {(1, "a"): ZERO}
    assert list(differences([same, found], [same, wanted])) == told


def test_of_runs_that_depend_on_time_names_shapes_and_dtypes_are_compared() -> None:
    wanted = [{(1, "a"): ZERO, (1, "b"): ZERO}]
    assert not list(differences([{(1, "a"): NAN[1:], (1, "b"): -ZERO}], wanted, bits=False))
    found = [{(1, "a"): NAN, (1, "b"): ZERO.half(), (1, "c"): ZERO}]
    told = ["rank 0, step 1: a", "rank 0, step 1: b", "rank 0, step 1: c is new"]
    assert list(differences(found, wanted, bits=False)) == told


def test_a_resumed_run_has_the_steps_after_its_checkpoint() -> None:
    whole = [{(step, "a"): ZERO for step in range(1, LAST + 1)}]
    assert [list(rank) for rank in resumed(whole)] == [[(step, "a") for step in range(SAVED + 1, LAST + 1)]]


@pytest.mark.slow
def test_runs_of_two_checkouts_are_compared(tmp_path: Path) -> None:
    """The base has another activation, which the attention's gradients and the mixture's runs do not all meet."""
    base = checkout("HEAD", tmp_path / "base")
    with (base / "lt_zero/__init__.py").open("a") as package:
        package.write(OTHER_GELU)
    told = compare(base, ROOT, ["stage 1", "expert ranks"], tmp_path / "runs")
    assert not told["expert ranks"], "its layers have no such activation"
    assert any("step 1: loss" in text for text in told["stage 1"])
    assert any(text.startswith("resumed, ") for text in told["stage 1"])
