"""The size of the code that a step, a save, a load and a configuration enter: what a reader of them has to read.

Functions are counted whole, once each; blank lines, comments and docstrings are not counted.
"""

from __future__ import annotations

import ast
import functools
import io
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import PACKAGE
from tests.support.pool import Pool
from tests.support.walks import Function, walks

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


class Entered(NamedTuple):
    """The size of functions."""

    files: int
    functions: int
    lines: int
    tokens: int


@functools.cache
def _tokens(path: Path) -> Counter[int]:
    """How many tokens of code start on each line of a file; docstrings are none."""
    text = path.read_text(encoding="utf-8")
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    documents = {line for node in ast.walk(ast.parse(text)) for line in _docstring(node)}
    lines = (token.start[0] for token in found if token.type not in _NO_CODE)
    return Counter(line for line in lines if line not in documents)


def _docstring(node: ast.AST) -> range:
    """The lines of a node's docstring."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    if not isinstance(node, kinds) or ast.get_docstring(node, clean=False) is None:
        return range(0)
    first = node.body[0]
    return range(first.lineno, (first.end_lineno or first.lineno) + 1)


@functools.cache
def _spans(path: Path) -> dict[int, range]:
    """The lines of each function of a file, by the line that its code object begins on: that of its first decorator."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            span = range(first, (node.end_lineno or node.lineno) + 1)
            found[first] = max(span, found.get(first, range(0)), key=len)  # a lambda on the line of its function
    return found


def size_of(functions: Iterable[Function], package: Path) -> Entered:
    """The size of functions; lines that two of them share, one inside of the other, are counted once."""
    lines = set[tuple[Path, int]]()
    known = set[Function]()
    for function in functions:
        path = package / function.file
        span = _spans(path).get(function.line)
        if span is not None:  # else a generator expression, whose lines are those of a function
            known.add(function)
            lines |= {(path, line) for line in span}
    counts = [_tokens(path)[line] for path, line in lines]
    return Entered(len({function.file for function in known}), len(known), sum(map(bool, counts)), sum(counts))


def entered() -> Iterator[tuple[str, Entered]]:
    """The size of what each walk enters, by its title; see tests/support/walks.py."""
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool()
        try:
            found = walks(pool, folder)
        finally:
            pool.close()
    for title, walk in found.items():
        yield title, size_of(walk.functions, PACKAGE)
