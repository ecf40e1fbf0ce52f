"""A configuration while it is read: values, their places, notices and problems."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lt_zero.common.errors import Mark, Path, Problem, dotted

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()


@dataclass(frozen=True)
class Notice:
    """A message about a key that is accepted.

    Attributes:
        kind: ``alias``: read as another key; ``no effect``: ignored; ``inactive``: has no effect in combination with
            the other keys; ``file``: about the file itself.
        key: dotted.
        message: one line.
        mark: where it was written.
    """

    kind: Literal["alias", "no effect", "inactive", "file"]
    key: str
    message: str
    mark: Mark | None = None

    def __str__(self) -> str:
        return self.message if self.mark is None else f"{self.mark}: {self.message}"


@dataclass
class Tree:
    """Nested mappings, changed in place.

    Attributes:
        values: plain containers.
        marks: where each value was written; for moved values, the place of the old key.
        notices, problems: what was found.
        moves: from old places to new ones.
    """

    values: dict[str, Any]
    marks: dict[Path, Mark] = field(default_factory=dict)
    notices: list[Notice] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    moves: dict[Path, Path] = field(default_factory=dict)

    def get(self, path: Path) -> Any:
        """The value, or ``MISSING``."""
        node: Any = self.values
        for key in path:
            if not isinstance(node, Mapping) or key not in node:
                return MISSING
            node = node[key]
        return node

    def put(self, path: Path, value: Any) -> bool:
        """Set a value and create the blocks around it; False if one of these is not a mapping."""
        node: Any = self.values
        for key in path[:-1]:
            if isinstance(node, list) and isinstance(key, int):
                node = node[key]
                continue
            if not isinstance(node, dict):
                return False
            if node.get(key) is None:
                node[key] = {}
            node = node[key]
        if not isinstance(node, dict):
            return False
        node[path[-1]] = copy.deepcopy(value)
        return True

    def pop(self, path: Path) -> None:
        node: Any = self.get(path[:-1])
        if isinstance(node, dict):
            node.pop(path[-1], None)

    def mark(self, path: Path) -> Mark | None:
        """Where the value, or the innermost block around it, was written."""
        while path:
            if path in self.marks:
                return self.marks[path]
            path = path[:-1]
        return None

    def move(self, old: Path, new: Path, value: Any, quiet: bool = False) -> None:
        """Move ``value`` from ``old`` to ``new``; a different value there is a problem."""
        there, mark = self.get(new), self.mark(old)
        self.pop(old)
        if there is not MISSING and there is not None and there != value:
            self.problem(
                old,
                f"{dotted(old)} says {value!r}, {dotted(new)} says {there!r}, and the first is another spelling of the "
                f"second. Remove {dotted(old)}.",
                mark,
            )
            return
        if not self.put(new, value):
            self.problem(old, f"{dotted(old)} is read as {dotted(new)}, but {dotted(new[:-1])} is no block.", mark)
            return
        if mark is not None:
            self.marks[new] = mark
        self.moves[old] = new
        if not quiet:
            self.tell(old, f"{dotted(old)} is read as {dotted(new)}={_shown(value)}. Write the latter.", mark)

    def moved(self, paths: Iterable[Path]) -> set[Path]:
        """The current paths of values that were at ``paths`` or in blocks there."""
        return {
            (*new, *path[len(old) :])
            for path in paths
            for old, new in self.moves.items()
            if path[: len(old)] == old or old[: len(path)] == path
        }

    def tell(self, path: Path, message: str, mark: Mark | None = None) -> None:
        self.notices.append(Notice("alias", dotted(path), message, mark or self.mark(path)))

    def problem(self, path: Path, message: str, mark: Mark | None = None) -> None:
        self.problems.append(Problem(dotted(path), message, mark or self.mark(path)))


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
