"""Removes secret values from messages, whichever key a message is about."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from lt_zero.common.errors import Path
from lt_zero.config.read.source import leaves

HIDDEN = "***"
_SHORT = 4
_CUT = 12  # length to which reprlib truncates text


class Mask:
    """Replaces secret values in messages, plain or quoted.

    Args:
        values: the written values, after interpolations.
        secret: paths of values, and of blocks, that are secret.
    """

    def __init__(self, values: Mapping[str, Any], secret: Iterable[Path]) -> None:
        hidden = set(secret)
        found: set[str] = set()
        for path, value in leaves(dict(values)) if hidden else ():
            shown = isinstance(value, (str, int, float)) and not isinstance(value, bool) and value != ""
            if shown and any(path[:end] in hidden for end in range(1, len(path) + 1)):
                found |= _patterns(str(value))
        self._pattern = re.compile("|".join(sorted(found, key=len, reverse=True))) if found else None

    def __call__(self, message: str) -> str:
        return message if self._pattern is None else self._pattern.sub(HIDDEN, message)


def _patterns(text: str) -> set[str]:
    """Match whole words only (4 is not in 48), and short values only where a value is expected."""
    before = r"(?<==)" if len(text) < _SHORT else r"(?<!\w)"
    quoted = {re.escape(repr(text)), re.escape(json.dumps(text))}
    whole = {rf"{before}{re.escape(text)}(?!\w)", *(quoted if len(text) >= _SHORT else (f"(?<==){q}" for q in quoted))}
    return whole | ({re.escape(text[:_CUT]) + r"\S*"} if len(text) > _CUT else set())  # messages truncate long values
