"""Wrong keys and values are told all at once, each with its place and a remedy; nothing is ignored."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from lt_zero import ConfigError, ZeroStrategy
from lt_zero.common.errors import CheckpointError
from lt_zero.config.load import examine

WRONG = """{
  "zero_optimization": {"stage": 2, "reduce_bucket_sise": 5e8, "overlap_comm": "maybe"},
  "gradient_clipp1ng": 1.0,
  "fp16": {"enabled": true}, "bf16": {"enabled": true},
  "train_batch_size": 9, "gradient_accumulation_steps": 2,
  "frobnicate": 1,
  "hybrid_engine": {"enabled": true},
  "amp": {"enabled": false},
  "hidden_layers": "auto"
}
"""
# Line, column and key.
TOLD = [
    (2, 37, "zero_optimization.reduce_bucket_sise"),
    (2, 64, "zero_optimization.overlap_comm"),
    (3, 3, "gradient_clipp1ng"),
    (4, 12, "fp16.enabled"),
    (5, 3, "train_batch_size"),
    (6, 3, "frobnicate"),
    (7, 3, "hybrid_engine"),
    (9, 3, "hidden_layers"),
]


def test_all_at_once_with_their_places(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(WRONG)
    with pytest.raises(ConfigError) as error:
        ZeroStrategy(config=file)
    found = error.value.problems
    assert [(p.mark.line, p.mark.column, p.key) for p in found if p.mark is not None] == TOLD
    for line, column, _ in TOLD:
        assert f"{file}, line {line}, column {column}: " in str(error.value)


def test_mappings_and_overrides_are_as_strict() -> None:
    for key, given in (
        ("zero_optimisation", {"config": {"zero_optimisation": {"stage": 3}}}),
        ("fp16.enable", {"stage": 3, "overrides": ["fp16.enable=true"]}),
    ):
        with pytest.raises(ConfigError) as error:
            ZeroStrategy(**given)  # type: ignore[arg-type]
        assert [problem.key for problem in error.value.problems] == [key]


def test_errors_show_control_characters(tmp_path: Path) -> None:
    """What they quote of a file does not control the terminal where they are printed; line breaks of theirs stay."""
    file = tmp_path / "config.json"
    file.write_text('{\n  \x1b[2J"a": 1\n}')
    with pytest.raises(ConfigError) as caught:
        examine(file).usable()
    assert "\n    \\x1b[2J" in str(caught.value)
    assert str(CheckpointError("a\x1b[2J\nb\u202e")) == "a\\x1b[2J\nb\\u202e"
    assert str(pickle.loads(pickle.dumps(CheckpointError("a\x1b")))) == "a\\x1b"
