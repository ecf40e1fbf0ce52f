"""Figures that may fall and not rise: what a default fit loads, and which imports lead out of the core.

They lie in tests/data/house.json. ``make golden`` lowers what has fallen, and fails where something has risen: who has
a reason to raise a figure writes it there by hand, where a review sees it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.golden import REWRITE
from tests.support.paths import DATA

FILE = DATA / "house.json"
# A line more in a file that is loaded anyway is no news; a whole file is, and is counted by itself.
ROOM_FOR_LINES = 1.01


def keep_list(name: str, found: Sequence[str], file: Path = FILE) -> None:
    """Compare the number of things with that of the file, which has them by name; or lower it.

    Raises:
        AssertionError: there are more than in the file; names those that are not in it.
    """
    known = _read(file)
    ceiling = known[name]
    new = sorted(set(found) - set(ceiling))
    gone = sorted(set(ceiling) - set(found))
    assert len(found) <= len(ceiling), (
        f"{name}: {len(found)}, and {file.name} allows {len(ceiling)}. New: {', '.join(new)}."
        + (f" No more: {', '.join(gone)}." if gone else "")
    )
    _lower(name, sorted(found), file)


def keep_number(name: str, found: int, file: Path = FILE, room: float = ROOM_FOR_LINES) -> None:
    """Compare a number with that of the file, of which it may be ``room`` times as large; or lower it.

    Raises:
        AssertionError: it is larger.
    """
    ceiling = _read(file)[name]
    assert found <= ceiling * room, f"{name}: {found:,}, and {file.name} allows {ceiling:,} and {room - 1:.0%} more."
    _lower(name, min(found, ceiling), file)


def _read(file: Path) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return known


def _lower(name: str, value: Any, file: Path) -> None:
    if os.environ.get(REWRITE):
        text = json.dumps({**_read(file), name: value}, indent=1, sort_keys=True)
        file.write_text(f"{text}\n", encoding="utf-8")
