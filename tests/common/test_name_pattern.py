"""Patterns of names mean what Python's ``re`` makes of them."""

from __future__ import annotations

import random
import re
import warnings

import pytest

from lt_zero.common.name_pattern import NamePattern

PATTERNS = [
    "q_proj",
    r".*\.layers\.\d+\..*q_proj",
    r"^model\.(a|b)+$",
    "a{2,3}b?",
    r"[a-c]*[^x]",
    r"(ab|a)*?c",
    r"\w+\.\S",
]
PATTERNS += ["", "a|b", "(x)(y)?", "^a$|^b", "[^a-]b", r"(?:a.)+", r"\D[\d_]", r"a\Z"]
NAMES = "q_proj model.layers.0.q_proj model.layers.12.self.q_proj model.abab aab aaab abc ababac a b"
NAMES += " xy x z.aab q.b _1 b0"


def _same(pattern: str, name: str) -> bool:
    expected = re.match(rf"(.*\.)?({pattern})$", name) is not None
    return NamePattern.of(pattern).matches_end(name) == expected


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_adapters(pattern: str) -> None:
    assert all(_same(pattern, name) for name in NAMES.split())


def test_any_patterns() -> None:
    chance, seen = random.Random(0), 0
    letters = [*"ab.()|*+?^$[]{}2,", "\\."]
    for _ in range(4000):
        pattern = "".join(chance.choice(letters) for _ in range(chance.randint(1, 8)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                re.compile(rf"(.*\.)?({pattern})$")
                NamePattern.of(pattern)
            except (re.error, ValueError):
                continue
            names = ["".join(chance.choice("ab.") for _ in range(chance.randint(0, 7))) for _ in range(3)]
            assert all(_same(pattern, name) for name in names), pattern
        seen += 1
    assert seen > 500


@pytest.mark.parametrize(
    "pattern", ["(", "(" * 400 + ")" * 400, "a" * 1001, "(?i)a", "a(?=b)", r"(a)\1", r"\bq", "a++"]
)
def test_what_has_no_meaning_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="write the names out"):
        NamePattern.of(pattern)
