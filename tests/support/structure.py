"""Counts the figures of benchmarks/results/structure.md: ``python -m tests.support.structure [CHECKOUT]``."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

RELATIVE = {"What", "Whether", "Which", "How", "Of", "Where", "Whose", "Whom", "Who"}
LONG_FILE, LONG_FUNCTION = 600, 60  # lines


def _lengths(trees: dict[Path, ast.Module]) -> Iterator[int]:
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def _first_words(trees: dict[Path, ast.Module]) -> Iterator[str]:
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ((ast.get_docstring(node) or "").split() or [""])[0]


def count(checkout: Path) -> dict[str, str]:
    """The figures of a checkout, by their names in the table."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((checkout / "lt_zero").rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    classes: dict[str, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(path)
    lines = [line.strip() for text in texts.values() for line in text.splitlines() if line.strip()]
    comments = sum(line.startswith("#") for line in lines)
    lengths = list(_lengths(trees))
    return {
        "files": f"{len(texts):,}",
        "lines": f"{sum(text.count(chr(10)) for text in texts.values()):,}",
        f"files over {LONG_FILE} lines": str(sum(text.count("\n") > LONG_FILE for text in texts.values())),
        f"functions over {LONG_FUNCTION} lines": str(sum(length > LONG_FUNCTION for length in lengths)),
        "longest function": str(max(lengths)),
        "class names in several files": str(sum(len(found) > 1 for found in classes.values())),
        "docstrings that begin with What, Whether, Of ...": str(sum(word in RELATIVE for word in _first_words(trees))),
        "lines of comments, of those that are not blank": f"{comments / len(lines):.1%}",
    }


if __name__ == "__main__":
    for name, figure in count(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT).items():
        print(f"| {name} | {figure} |")
