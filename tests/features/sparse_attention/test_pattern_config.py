"""The ``sparse_attention`` block: which pattern it makes, and what is wrong in it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lt_zero.attention import BigBird, Fixed, LocalSlidingWindow, Variable, pattern_of
from lt_zero.common.errors import ConfigError
from lt_zero.config import ZeroConfig
from lt_zero.config.load import examine, plain, resolved
from lt_zero.features.sparse_attention.keys import SPARSE_MODES
from lt_zero.features.sparse_attention.patterns import PATTERNS

S = "sparse_attention."


def of(**block: Any) -> Any:
    return pattern_of(ZeroConfig.of({"sparse_attention": block}))


def told(**block: Any) -> dict[str, str]:
    """Problems by their keys."""
    return {p.key.removeprefix(S): p.message for p in examine({"sparse_attention": block}).problems}


def test_modes_have_the_keys_of_their_patterns() -> None:
    assert set(SPARSE_MODES) == set(PATTERNS)
    for mode, keys in SPARSE_MODES.items():
        assert set(keys) == {field.name for field in dataclasses.fields(PATTERNS[mode])}


def test_without_the_block_there_is_no_pattern() -> None:
    for config in ({}, {"sparse_attention": None}, {"sparse_attention": False}):
        assert pattern_of(ZeroConfig.of(config)) is None


def test_defaults_are_those_of_the_patterns() -> None:
    """But for random blocks of ``bigbird``, of which DeepSpeed's configuration has none and its class one."""
    assert of() == Fixed()
    for mode, pattern in PATTERNS.items():
        expected = BigBird(num_random_blocks=0) if mode == "bigbird" else pattern()
        assert of(mode=mode) == expected
    assert of(mode="local_sliding_window").causal
    assert not of(mode="fixed").causal


def test_a_configuration_is_read_again_as_it_was_written_and_as_it_is_shown() -> None:
    for mode in PATTERNS:
        made = ZeroConfig.of({"sparse_attention": {"mode": mode, "block": 32}})
        with pytest.warns(UserWarning, match="no effect here"):  # all keys are written
            again = ZeroConfig.of(resolved(made))
        assert pattern_of(again) == pattern_of(ZeroConfig.of(plain(made))) == pattern_of(made)


def test_values_as_files_and_commands_have_them() -> None:
    config = {"mode": "BigBird", "num_random_blocks": "2", "num_global_blocks": 2.0}
    made = ZeroConfig.of({"sparse_attention": config}, overrides=["sparse_attention.seed=3"])
    assert pattern_of(made) == BigBird(num_random_blocks=2, num_global_blocks=2, seed=3)


@pytest.mark.parametrize(("mode", "near"), [("bigbrid", "bigbird"), ("sliding_window", "local_sliding_window")])
def test_a_mode_that_is_none(mode: str, near: str) -> None:
    assert told(mode=mode, num_sliding_window_blocks=5) == {
        "mode": f'{S}mode="{mode}" is wrong: it is not a mode. Did you mean {near}? Modes are {", ".join(PATTERNS)}.'
    }


def test_keys_of_other_modes() -> None:
    found = told(mode="bigbird", num_local_blocks=4, local_window_blocks=[2], global_block_end_indices=None)
    assert found["num_local_blocks"] == (
        f"{S}num_local_blocks=4 is no key of {S}mode='bigbird', which takes {', '.join(SPARSE_MODES['bigbird'])}. "
        "Remove it, or set a mode that has it: fixed."
    )
    assert set(found) == {"num_local_blocks", "local_window_blocks"}
    assert set(told(mode="local_sliding_window", seed=1)) == {"seed"}


@pytest.mark.parametrize(
    ("block", "key", "words"),
    [
        ({"block": 0}, "block", "block=0 is wrong: it must be greater than 0"),
        ({"attention": "causal"}, "attention", "one of 'unidirectional' or 'bidirectional'"),
        ({"num_local_blocks": 5, "num_global_blocks": 2}, "num_local_blocks", "a multiple of it, such as 6"),
        ({"num_global_blocks": 0}, "num_global_blocks", "Write 1 or more"),
        (
            {"horizontal_global_attention": True, "attention": "unidirectional"},
            "horizontal_global_attention",
            "attention='unidirectional' forbids. Remove one of them.",
        ),
        (
            {"num_different_global_patterns": 2},
            "num_different_global_patterns",
            f"needs {S}different_layout_per_head=true",
        ),
        (
            {"num_different_global_patterns": 5, "different_layout_per_head": True},
            "num_different_global_patterns",
            "has 4 groups of",
        ),
        ({"mode": "variable", "local_window_blocks": []}, "local_window_blocks", "a list of at least 1"),
        ({"mode": "variable", "local_window_blocks": [4, 0]}, "local_window_blocks.1", "greater than 0"),
        ({"mode": "variable", "global_block_indices": [0, -1]}, "global_block_indices.1", "at least 0"),
        ({"mode": "variable", "num_random_blocks": -1}, "num_random_blocks", "at least 0"),
        (
            {"mode": "bslongformer", "global_block_indices": [0, 3], "global_block_end_indices": [1]},
            "global_block_end_indices",
            "Write one end for each start.",
        ),
        (
            {"mode": "bslongformer", "global_block_indices": [0, 3], "global_block_end_indices": [1, 3]},
            "global_block_end_indices",
            "from 3 to 3, which is empty: an end is the block after the range. Write 4 or more.",
        ),
        ({"mode": "bigbird", "num_sliding_window_blocks": 0}, "num_sliding_window_blocks", "greater than 0"),
    ],
    ids=str,
)
def test_wrong_values(block: dict[str, Any], key: str, words: str) -> None:
    found = told(**block)
    assert set(found) == {key}
    assert words in found[key]
    assert found[key].startswith(f"{S}{key}=")
    kind = PATTERNS[block.get("mode", "fixed")]
    with pytest.raises(ConfigError) as caught:  # the same, in Python
        kind(**{name: value for name, value in block.items() if name != "mode"})
    assert [problem.message for problem in caught.value.problems] == [found[key]]


def test_all_problems_of_a_pattern_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Fixed(block=-1, num_local_blocks=3, num_global_blocks=2, attention="both")  # type: ignore[arg-type]
    keys = [problem.key.removeprefix(S) for problem in caught.value.problems]
    assert sorted(keys) == ["attention", "block", "num_local_blocks"]


def test_keys_without_effect() -> None:
    def idle(**block: Any) -> set[str]:
        notices = examine({"sparse_attention": block}).notices
        return {notice.key.removeprefix(S) for notice in notices if notice.kind == "inactive"}

    assert idle(mode="bigbird", seed=1, different_layout_per_head=True) == {"seed", "different_layout_per_head"}
    assert idle(mode="bigbird", seed=1, different_layout_per_head=True, num_random_blocks=1) == set()
    assert idle(different_layout_per_head=True) == {"different_layout_per_head"}
    assert idle(different_layout_per_head=True, num_different_global_patterns=2) == set()
    assert idle(mode="bslongformer", different_layout_per_head=True) == {"different_layout_per_head"}


def test_patterns_in_python_say_nothing(recwarn: pytest.WarningsRecorder) -> None:
    Variable(different_layout_per_head=True)
    LocalSlidingWindow()
    assert not recwarn.list
