"""Regular expressions that strangers wrote, matched with names in a time that does not explode.

Python's ``re`` goes back and tries again: ``(a+)+b`` takes longer than the age of the universe for some names. Here
the ends that a part of the pattern can reach from a place are found once for each part and place, so the time grows
with the size of the pattern times the square of the name's length.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from lt_zero.common.compat.of_python import parsed_pattern

_LONGEST = 1000  # characters of a pattern; those of real files have less than a hundred
_DEEPEST = 30  # brackets in brackets
_CLASSES = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}


class NamePattern:
    """A pattern of the grammar of ``re``, without references to groups, looks ahead or back, and flags."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        try:
            self._parts: list[Any] = list(parsed_pattern(pattern)) if len(pattern) <= _LONGEST else _refused("too long")
            _check(self._parts)
        except (re.error, RecursionError, OverflowError, ValueError) as error:
            raise ValueError(f"the pattern {pattern[:100]!r} cannot be used ({error}); write the names out") from None

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(pattern: str) -> NamePattern:
        """The pattern; parsed once.

        Raises:
            ValueError: it cannot be used; says why.
        """
        return NamePattern(pattern)

    def matches_end(self, name: str) -> bool:
        """True if the pattern matches ``name``, or what follows one of its points: ``(.*\\.)?(pattern)$``."""
        match = _Match(name)
        starts = [0, *(place + 1 for place, letter in enumerate(name) if letter == ".")]
        return any(len(name) in match.ends(self._parts, start) for start in starts)


class _Match:
    """Matches of the parts of a pattern in one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._known: dict[tuple[int, int], frozenset[int]] = {}  # by the identity of parts, and a place

    def ends(self, parts: list[Any], start: int) -> frozenset[int]:
        """The places at which a match of a sequence of parts that begins at ``start`` can end."""
        key = id(parts), start
        if key not in self._known:
            places = frozenset([start])
            for part in parts:
                places = frozenset(end for place in places for end in self._of_part(part, place))
            self._known[key] = places
        return self._known[key]

    def _of_part(self, part: Any, start: int) -> frozenset[int]:
        kind, value = str(part[0]), part[1]
        if kind == "BRANCH":
            return frozenset(end for branch in value[1] for end in self.ends(branch.data, start))
        if kind == "SUBPATTERN":
            return self.ends(value[3].data, start)
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            return self._of_repeat(value[0], value[1], value[2].data, start)
        if kind == "AT":
            at_start = str(value) in ("AT_BEGINNING", "AT_BEGINNING_STRING")
            return frozenset([start]) if start == (0 if at_start else len(self._text)) else frozenset()
        fits = start < len(self._text) and _fits(part, self._text[start])
        return frozenset([start + 1]) if fits else frozenset()

    def _of_repeat(self, least: int, most: int, parts: list[Any], start: int) -> frozenset[int]:
        places = frozenset([start])
        # After as many rounds as there are places, those that are reached return.
        for _ in range(min(least, len(self._text) + 1)):
            places = frozenset(end for place in places for end in self.ends(parts, place))
        found = new = places
        for _ in range(min(most - least, len(self._text) + 1)):
            new = frozenset(end for place in new for end in self.ends(parts, place)) - found
            if not new:
                break
            found |= new
        return found


def _fits(part: Any, letter: str) -> bool:
    """True if a part that stands for one character stands for this one."""
    kind, value = str(part[0]), part[1]
    if kind == "ANY":
        return letter != "\n"
    if kind == "LITERAL":
        return bool(ord(letter) == value)
    if kind == "NOT_LITERAL":
        return bool(ord(letter) != value)
    if kind == "RANGE":
        return bool(value[0] <= ord(letter) <= value[1])
    if kind == "CATEGORY":
        name = str(value).removeprefix("CATEGORY_")
        return (re.match(_CLASSES[name.removeprefix("NOT_")], letter) is not None) != name.startswith("NOT_")
    negated = str(value[0][0]) == "NEGATE"
    return any(_fits(item, letter) for item in value[negated:]) != negated


def _check(parts: Any, depth: int = 0) -> None:
    """Raise ValueError for a part that has no meaning here."""
    if depth > _DEEPEST:
        raise ValueError("its brackets are nested too deeply")
    for kind, value in parts:
        name = str(kind)
        if name == "BRANCH":
            for branch in value[1]:
                _check(branch, depth + 1)
        elif name == "SUBPATTERN":
            if value[1] or value[2]:
                raise ValueError("it has flags")
            _check(value[3], depth + 1)
        elif name in ("MAX_REPEAT", "MIN_REPEAT"):
            _check(value[2], depth + 1)
        elif name == "AT" and str(value) not in ("AT_BEGINNING", "AT_BEGINNING_STRING", "AT_END", "AT_END_STRING"):
            raise ValueError("it asks for borders of words")
        elif name not in ("ANY", "LITERAL", "NOT_LITERAL", "IN", "AT"):
            raise ValueError(f"it has a part of the kind {name}")


def _refused(why: str) -> Any:
    raise ValueError(f"it is {why}")
