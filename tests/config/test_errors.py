"""Wrong keys and values are told all at once, each with its place and a remedy; nothing is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from lt_zero import ConfigError, ZeroStrategy

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
# Line, column, and what is said there.
TOLD = [
    (
        2,
        37,
        "reduce_bucket_sise is not a key of lt_zero or DeepSpeed. Did you mean zero_optimization.reduce_bucket_size?",
    ),
    (2, 64, 'zero_optimization.overlap_comm="maybe" is wrong: it must be true or false'),
    (3, 3, "gradient_clipp1ng is not a key of lt_zero or DeepSpeed. Did you mean gradient_clipping?"),
    (4, 12, "fp16.enabled and bf16.enabled are both true"),
    (5, 3, "train_batch_size=9 is not a multiple of gradient_accumulation_steps=2"),
    (6, 3, "frobnicate is not a key of lt_zero or DeepSpeed."),
    (7, 3, "hybrid_engine is known, but not supported"),
    (9, 3, "hidden_layers is not a key of lt_zero or DeepSpeed."),
]


def test_all_at_once_with_their_places(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(WRONG)
    with pytest.raises(ConfigError) as error:
        ZeroStrategy(config=file)
    found = error.value.problems
    assert [(p.mark.line, p.mark.column) for p in found if p.mark is not None] == [(at, col) for at, col, _ in TOLD]
    for problem, (line, column, words) in zip(found, TOLD, strict=True):
        assert words in problem.message
        assert f"{file}, line {line}, column {column}: " in str(error.value)


def test_mappings_and_overrides_are_as_strict() -> None:
    with pytest.raises(ConfigError, match="zero_optimisation is not a key.*Did you mean zero_optimization"):
        ZeroStrategy(config={"zero_optimisation": {"stage": 3}})
    with pytest.raises(ConfigError, match=r"override 'fp16.enable=true': fp16.enable is not a key.*fp16.enabled"):
        ZeroStrategy(stage=3, overrides=["fp16.enable=true"])
