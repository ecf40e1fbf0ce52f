"""Status of the DeepSpeed keys that the schema does not have: reads and searches ``keys.tsv``.

Each row is about a dotted key. A segment ``*`` matches any one segment; a last segment ``**`` matches the block itself
and everything in it. The most specific row wins: segment by segment from the left, a name precedes ``*``, which
precedes ``**``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any

from lt_zero.common.errors import Path as KeyPath

TABLE = Path(__file__).with_name("keys.tsv")
STATUSES = ("alias", "no_effect", "later", "unsupported")


@dataclass(frozen=True)
class KeyStatus:
    """A row of the table.

    Attributes:
        key: dotted; may have ``*`` and end in ``**``.
        status: "alias" (another spelling of ``to``), "no_effect" (accepted and ignored), "later" (known,
            not available yet) or "unsupported" (known, refused).
        to: for an alias, the dotted key or block that it stands for; several are joined by " and ".
        off: JSON values joined by ``|`` that switch the key off; these are accepted silently.
        note: one or two sentences for users.
    """

    key: str
    status: str
    to: str
    off: str
    note: str

    def targets(self, path: KeyPath) -> tuple[str, ...]:
        """The dotted keys that the alias ``path`` stands for; segments matched by ``**`` are kept."""
        fixed = len(self.key.split(".")) - 1 if self.key.endswith(".**") else len(path)
        rest = "".join(f".{part}" for part in path[fixed:])
        return tuple(f"{target}{rest}" for target in self.to.split(" and ") if target)


@dataclass
class _Node:
    """A segment in the tree of keys."""

    row: KeyStatus | None = None  # the row whose key ends here
    below: dict[str, _Node] = field(default_factory=dict)


@cache
def rows() -> tuple[KeyStatus, ...]:
    """The whole table, in the order of its file (by key)."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)  # ``off`` contains JSON quotes
        next(lines)
        return tuple(KeyStatus(*line) for line in lines)


def aliases() -> tuple[KeyStatus, ...]:
    """The rows of other spellings."""
    return tuple(row for row in rows() if row.status == "alias")


@cache
def _tree() -> _Node:
    root = _Node()
    for row in rows():
        node = root
        for part in row.key.split("."):
            node = node.below.setdefault(part, _Node())
        node.row = row
    return root


def lookup(path: KeyPath) -> KeyStatus | None:
    """The most specific row for a key or block, or None."""
    return _search(_tree(), tuple(map(str, path)))


def _search(node: _Node, path: tuple[str, ...]) -> KeyStatus | None:
    if not path:
        own = node.row
        return own if own is not None or "**" not in node.below else node.below["**"].row
    for part in (path[0], "*"):
        inner = node.below.get(part)
        if inner is not None and (found := _search(inner, path[1:])) is not None:
            return found
    return node.below["**"].row if "**" in node.below else None


def below(path: KeyPath) -> bool:
    """Whether the table has rows for keys inside the block ``path``."""
    node: _Node | None = _tree()
    for part in map(str, path):
        node = node.below.get(part) or node.below.get("*") if node is not None else None
    return node is not None and bool(node.below.keys() - {"**"})


def is_off(row: KeyStatus, value: Any) -> bool:
    """Whether this value switches the key off: null, or one of the values in the row's ``off``.

    Numbers are compared by value, text ignoring case; booleans are not numbers. A block equals a mapping in ``off`` if
    the keys named there do.
    """
    return value is None or any(_same(value, off) for off in _off_values(row.off))


@cache
def _off_values(text: str) -> tuple[Any, ...]:
    return tuple(json.loads(part) for part in text.split("|")) if text else ()


def _same(value: Any, off: Any) -> bool:
    if isinstance(off, dict):
        return isinstance(value, Mapping) and all(_same(value.get(key), inner) for key, inner in off.items())
    if isinstance(value, bool) or isinstance(off, bool):
        return value is off
    if isinstance(value, str) and isinstance(off, str):
        return value.lower() == off.lower()
    return bool(value == off)


# ---- suggestions for unknown keys ------------------------------------------------------------------------------------

_CLOSE = 0.78  # minimum difflib ratio of two key names: a typo or two
_ALIKE = 0.6  # minimum difflib ratio of two blocks that have a key of the same name
_FEW = 2  # up to so many blocks with this key name, suggest one: offload_optimizer and offload_param


def nearest(key: str, candidates: Iterable[str] | None = None) -> str | None:
    """The nearest key: the same name in another block, or a name that differs by a typo or two.

    Args:
        key: dotted, as it was written.
        candidates: dotted keys; default: the keys that are accepted, so that a suggestion is never another error.
    """
    if candidates is None:
        candidates = _known()
    block, _, name = key.replace("-", "_").lower().rpartition(".")
    names = {c: c.rpartition(".") for c in _with_blocks(candidates) if c != key}
    same = {c: _ratio(block, b) for c, (b, _, n) in names.items() if n.lower() == name and b != block}
    if same:
        best = max(same, key=lambda c: same[c])  # the first in a tie
        if len(same) <= _FEW or same[best] >= _ALIKE:
            return best
    scores = {c: _score(block, name, b, n) for c, (b, _, n) in names.items() if c not in same}
    best = max(scores, key=lambda c: scores[c], default="")
    return best if best and scores[best] >= _CLOSE else None


def _score(block: str, name: str, other_block: str, other_name: str) -> float:
    """Similarity of two keys, 1 if equal; a similar name counts less in a different block."""
    alike = _ratio(name, other_name.lower())
    if alike < _CLOSE:
        return 0.0
    return alike if block == other_block else alike * (0.9 + 0.1 * _ratio(block, other_block))


def _ratio(one: str, other: str) -> float:
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    return matcher.ratio() if matcher.real_quick_ratio() >= _ALIKE else 0.0


def _with_blocks(keys: Iterable[str]) -> dict[str, None]:
    """``keys`` and their blocks, cut at placeholders such as ``<name>``."""
    found: dict[str, None] = {}
    for key in keys:
        parts = key.split(".")
        if any(part[:1] in "<(*" for part in parts):
            parts = parts[: next(i for i, part in enumerate(parts) if part[:1] in "<(*")]
        found |= {".".join(parts[: n + 1]): None for n in range(len(parts))}
    return found


@cache
def _known() -> tuple[str, ...]:
    """Keys that are accepted."""
    from lt_zero.config.auto import RULES  # circular: these import the schema, which looks keys up here
    from lt_zero.config.catalog import entries

    targets = [target for row in aliases() for target in row.to.split(" and ")]
    meant = (target for target in targets if not _refuses(lookup(tuple(target.split(".")))))
    without = (row.key for row in rows() if row.status == "no_effect")
    return (*(entry.key for entry in entries()), *RULES, *meant, *without)


def refused() -> tuple[str, ...]:
    """Keys that are known but refused."""
    return tuple(row.key for row in rows() if _refuses(row))


def _refuses(row: KeyStatus | None) -> bool:
    return row is not None and row.status in ("later", "unsupported")
