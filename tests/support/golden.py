"""Texts that users read, in files: a test compares them with ``tests/data/golden``, and ``make golden`` writes them.

Other tests pin the type of an error and its key: a text can be improved in one place, and its change is reviewed.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.paths import DATA, ROOT

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


def only_pinned(*packages: str) -> pytest.MarkDecorator:
    """Skip a test of texts whose form is that of ``packages``, unless their versions are those of constraints.txt."""
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pins = {pin.name: pin for line in lines if line and _applies(pin := Requirement(line))}
    found = {name: Version(version(name)).public for name in packages}
    others = [f"{name} {found[name]}" for name in packages if not pins[name].specifier.contains(found[name])]
    return pytest.mark.skipif(bool(others), reason=f"constraints.txt has other versions than {', '.join(others)}")


def _applies(pin: Requirement) -> bool:
    return pin.marker is None or pin.marker.evaluate()
