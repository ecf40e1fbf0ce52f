"""LightningCLI builds the strategy from files and from the command line, and checks the types of its arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_tools import CLASS, strategy_of

pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse, which is not a dependency")


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])  # Lightning warns if there are some


def test_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "trainer:\n  strategy:\n    class_path: lt_zero.ZeroStrategy\n    init_args:\n      stage: 3\n      config:\n"
        "        zero_optimization: {stage3_param_persistence_threshold: 1e4, reduce_bucket_size: 2e8}\n"
        "        bf16: {enabled: true}\n"
    )
    strategy = strategy_of(f"--config={file}")
    block = strategy.config.zero_optimization
    assert (block.stage, block.stage3_param_persistence_threshold, block.reduce_bucket_size) == (3, 10_000, 200_000_000)
    assert strategy.config.bf16.enabled is True
    changed = strategy_of(f"--config={file}", "--trainer.strategy.stage=2")  # the command line is stronger
    assert (changed.stage, changed.config.zero_optimization.reduce_bucket_size) == (2, 200_000_000)


def test_the_command_line_is_stronger_than_the_block_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"trainer:\n  strategy:\n    class_path: {CLASS}\n    init_args:\n      overrides: [steps_per_print=7]\n"
        "      config: {zero_optimization: {stage: 3, reduce_bucket_size: 2e8}, broadcast_buffers: true}\n"
    )
    arguments = ["--trainer.strategy.init_args.stage", "2", "--trainer.strategy.init_args.broadcast_buffers=false"]
    config = strategy_of(f"--config={file}", *arguments).config
    assert (config.zero_optimization.stage, config.zero_optimization.reduce_bucket_size) == (2, 200_000_000)
    assert (config.broadcast_buffers, config.steps_per_print) == (False, 7)
    with pytest.raises(ValueError, match="stage=2 contradicts zero_optimization.stage=1"):
        strategy_of(
            f"--config={file}", *arguments, "--trainer.strategy.init_args.overrides=[zero_optimization.stage=1]"
        )


def test_from_the_command_line() -> None:
    strategy = strategy_of(
        f"--trainer.strategy={CLASS}",
        "--trainer.strategy.stage=2",
        "--trainer.strategy.config",
        json.dumps({"zero_optimization": {"reduce_bucket_size": 1_000_000}}),
    )
    assert strategy.stage == 2
    assert strategy.config.zero_optimization.reduce_bucket_size == 1_000_000
    assert strategy_of("--trainer.strategy=zero_1").stage == 1  # a class without arguments is taken for such a name


def test_a_file_of_deepspeed_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text('{"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}, "steps_per_print": 10}')
    run = tmp_path / "run.yaml"
    run.write_text(
        f"trainer:\n  strategy:\n    class_path: {CLASS}\n    init_args:\n      config: {file}\n"
        "      overrides: [zero_optimization.reduce_bucket_size=1e6, precision=bf16]\n"
    )
    for arguments in (
        [f"--config={run}"],
        [
            f"--trainer.strategy={CLASS}",
            f"--trainer.strategy.config={file}",
            '--trainer.strategy.overrides=["zero_optimization.reduce_bucket_size=1e6","precision=bf16"]',
        ],
    ):
        config = strategy_of(*arguments).config
        assert (config.zero_optimization.stage, config.zero_optimization.reduce_bucket_size) == (2, 1_000_000)
        assert (config.bf16.enabled, config.steps_per_print) == (True, 10)


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("stage=two", "Expected a <class 'int'>"),
        ("stage=2.5", "Expected a <class 'int'>"),
        ("stages=2", "Option 'stages' is not accepted"),
        ("start_method=forkk", "Got value: forkk"),
        ("overrides=fp16.enabled=true", "overrides"),
    ],
)
def test_types_are_checked_by_the_parser(argument: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        strategy_of(f"--trainer.strategy={CLASS}", f"--trainer.strategy.{argument}")
    assert end.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--trainer.strategy.stage=7"], "(?s)stage.*7"),
        (["--trainer.strategy.config=nowhere.json"], "nowhere.json"),
        (["--trainer.strategy.overrides=[a..b=1]"], "a..b"),
        (
            ["--trainer.strategy.config", '{"zero_optimization": {"reduce_bucket": 1}}'],
            "zero_optimization.reduce_bucket",
        ),
    ],
)
def test_values_are_checked_by_lt_zero(arguments: list[Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        strategy_of(f"--trainer.strategy={CLASS}", *arguments)
