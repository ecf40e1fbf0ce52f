"""Texts that users read, in files: a test compares them with ``tests/data/golden``, and ``make golden`` writes them.

Other tests pin the type of an error and its key: a text can be improved in one place, and its change is reviewed.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping

from tests.support.paths import DATA

FOLDER = DATA / "golden"
REWRITE = "REWRITE_GOLDEN"  # a variable, which `make golden` sets


def compare(area: str, texts: Mapping[str, str]) -> None:
    """Compare ``texts``, by what they are about, with the file of ``area``; or write it.

    Raises:
        AssertionError: a text is not as in the file, is not there, or the file has one more.
    """
    file = FOLDER / f"{area}.txt"
    found = "\n".join(f"{about}\n{textwrap.indent(text, '    ')}\n" for about, text in texts.items())
    if os.environ.get(REWRITE):
        file.parent.mkdir(exist_ok=True)
        file.write_text(found, encoding="utf-8")
    assert found == file.read_text(encoding="utf-8"), "if the new texts are better: `make golden`, and read the diff"
