"""Packages outside of lt_zero are short, and import public names or those of the core."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lt_zero

LINES = 60
PACKAGES = [path for path in sorted(Path(__file__).parent.glob("*.py")) if not path.name.startswith(("test_", "__"))]


def imported(text: str) -> Iterator[str]:
    """The modules and names of lt_zero that a source imports, dotted, wherever the statement stands."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "lt_zero")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lt_zero":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_public(name: str) -> bool:
    """True for ``lt_zero``, its public names, and what is in the core."""
    return name == "lt_zero" or name.startswith("lt_zero.core.") or name.removeprefix("lt_zero.") in lt_zero.__all__


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.stem)
def test_a_package_is_short_and_imports_public_names(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES
    names = list(imported(text))
    assert names, "it extends lt_zero"
    assert [name for name in names if not is_public(name)] == []


def test_there_is_a_package_of_each_kind() -> None:
    assert [path.stem for path in PACKAGES] == ["counted", "noise", "scaled", "sums"]


def test_other_imports_are_found() -> None:
    text = (
        "import lt_zero, torch\n"
        "def act():\n"
        "    from lt_zero.common.fields import Block\n"
        "    from lt_zero import ZeroConfig, training\n"
        "from lt_zero.core.feature import Feature\n"
        "import lt_zero.training.build\n"
    )
    found = ["lt_zero.common.fields.Block", "lt_zero.training", "lt_zero.training.build"]
    assert sorted(name for name in imported(text) if not is_public(name)) == found
