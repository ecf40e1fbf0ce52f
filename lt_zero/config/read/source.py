"""A configuration as plain values, each with its place, before anything knows what its keys mean."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lt_zero.common.errors import ConfigError, Mark, Path, Problem

DEEPEST = 50  # mappings and lists inside each other; real files have 6
MOST_VALUES = 100_000  # keys and values; real files have 100. Bounds the time, and what aliases can expand to
_HIDES_BLOCK = re.compile(r"(api|access|private|auth)[_-]?key|passw(or)?d|passphrase|secret|credential", re.IGNORECASE)
_NAMES_TOKEN = re.compile(r"tokens?(?!\w)", re.IGNORECASE)  # hf_token; neither tokenizer nor token_dropping


@dataclass
class Source:
    """What a file, a mapping or overrides say.

    Attributes:
        values: dict, list, scalars; objects that no file can hold (torch.dtype, Path) stay what they are.
        marks: where keys and list items were written: the position of the key, or of the item.
        name: of the file, or of what else it is, for messages.
        notices: what was accepted although it is not as it should be; to be shown once.
        secret: paths of values that are not to be displayed: from environment variables, or with a telling name;
            of what an interpolation stands for as a whole (``hides`` knows what is in it).
    """

    values: dict[str, Any]
    marks: dict[Path, Mark] = field(default_factory=dict)
    name: str = "config"
    notices: list[str] = field(default_factory=list)
    secret: set[Path] = field(default_factory=set)

    def mark(self, path: Path) -> Mark | None:
        """Where ``path``, or else the block that holds it, was written."""
        return next((self.marks[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.marks), None)

    def hides(self, path: Path) -> bool:
        """Whether the value at ``path``, or a block that holds it, is not to be displayed."""
        return any(path[:end] in self.secret for end in range(1, len(path) + 1))


class Text:
    """Text of a file, with the lines that its offsets are in."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self._starts = [0, *(found.end() for found in re.finditer(r"\r\n|\n|\r", text))]

    def mark(self, offset: int) -> Mark:
        row = bisect.bisect_right(self._starts, offset) - 1
        return Mark(self.name, row + 1, offset - self._starts[row] + 1)

    def line(self, offset: int) -> str:
        row = bisect.bisect_right(self._starts, offset)
        end = self._starts[row] if row < len(self._starts) else len(self.text)
        return self.text[self._starts[row - 1] : end]

    def problem(self, offset: int, message: str, key: str = "") -> Problem:
        """``message`` with the place and the text of its line, unless that may hold a secret."""
        line, mark = self.line(offset), self.mark(offset)
        column = offset - self._starts[(mark.line or 1) - 1]
        shown = "" if names_secret(line) else line[max(0, column - 60) : column + 60].strip()
        return Problem(key, f"{message}\n    {shown}" if shown else message, mark)

    def problem_at(self, row: int, column: int, message: str, key: str = "") -> Problem:
        """``problem`` for a parser that counts lines and columns, from 0."""
        start = self._starts[row] if row < len(self._starts) else len(self.text)
        return self.problem(min(start + column, len(self.text)), message, key)


def names_secret(text: str) -> bool:
    """Whether a key of this name, or one in this line, has a value that is not to be displayed."""
    return bool(_HIDES_BLOCK.search(text) or _NAMES_TOKEN.search(text))


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All values that are neither mapping nor list, with their paths."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def secrets(values: dict[str, Any]) -> set[Path]:
    """Paths of values with a telling name, their own or of a block around them.

    A token is text that has this name itself: a number is none ("max_tokens": 512), nor is a block of tokens one.
    """
    found = set()
    for path, value in leaves(values):
        names = [part for part in path if isinstance(part, str)]
        is_token = isinstance(value, str) and bool(_NAMES_TOKEN.search(names[-1]))
        says_something = value is not None and value != "" and not isinstance(value, bool)
        if says_something and (is_token or any(map(_HIDES_BLOCK.search, names))):
            found.add(path)
    return found


def mapped(value: Any, change: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """A copy of dicts and lists with ``change`` of every other value."""
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    return change(value)


class Budget:
    """Counts values and depth while a configuration is built: one of either too many is an error, not a hang."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values = 0

    def take(self, depth: int, mark: Mark | None = None) -> None:
        """One more value, inside of ``depth`` mappings and lists.

        Raises:
            ConfigError: it is too deep, or one too many.
        """
        self.values += 1
        if depth > DEEPEST:
            message = f"mappings and lists are nested more than {DEEPEST} deep; a configuration is not"
        elif self.values > MOST_VALUES:
            message = f"there are more than {MOST_VALUES:,} values (aliases counted as often as used)"
        else:
            return
        raise ConfigError([Problem("", f"{self.name}: {message}" if mark is None else message, mark)])
