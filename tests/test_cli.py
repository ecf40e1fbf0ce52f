"""The command ``lt-zero``: its version, and the help of each command."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import lt_zero
from lt_zero import cli
from tests.support.features import needs
from tests.support.golden import compare, only_pinned

COMMANDS = ["compare", "config", "doctor", "estimate", "export", "import", "logs", "plot", "tune", "verify", "ops"]
INNER = [["config", name] for name in ("check", "show", "convert", "explain", "schema")]
INNER += [["ops", name] for name in ("build", "report")]


def output(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "80", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return result.output


def test_version() -> None:
    assert output("--version").split() == ["lt-zero", lt_zero.__version__]


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_every_command_is_listed(option: str) -> None:
    listed = output(option)
    assert all(f"│ {name} " in listed for name in COMMANDS)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=needs("compare")) if "compare" in command else command
        for command in ([[name] for name in COMMANDS] + INNER)
    ],
    ids=" ".join,
)
def test_help_has_an_example_at_80_columns(command: list[str]) -> None:
    text = output(*command, "-h")
    assert f"Example: lt-zero {' '.join(command)}" in text
    assert max(map(len, text.splitlines())) <= 80


@needs("compare")
@only_pinned("typer", "rich")
def test_help_is_in_the_golden_file() -> None:
    commands = [[], *([name] for name in COMMANDS), *INNER]
    texts = {" ".join(["lt-zero", *command, "--help"]): output(*command, "--help") for command in commands}
    lines = {about: "\n".join(line.rstrip() for line in text.splitlines()) for about, text in texts.items()}
    compare("help", lines)


def test_options_of_estimate_are_in_groups() -> None:
    text = output("estimate", "--help")
    panels = ("The model", "Ranks", "The run", "What fits a machine", "Other tables")
    at = [text.index(f"╭─ {panel} ─") for panel in panels]
    assert at == sorted(at)
    assert at[0] < text.index("--params") < at[1] < text.index("--world") < at[2] < text.index("--precision") < at[3]


def test_an_estimate_prints_as_a_table() -> None:
    cast = lt_zero.estimate(lt_zero.Sizes(7_000_000_000), {"zero_optimization": {"stage": 3}}, world=8)
    text = str(cast)
    assert text.splitlines()[0].strip() == "7,000,000,000 parameters, 8 rank(s)"
    assert all(kind in text for kind in cast.kinds("device"))
    assert max(map(len, text.splitlines())) <= 80
