"""Checks of what users pass to public functions: the error names the argument, its value and what to pass instead."""

from __future__ import annotations

import os
import reprlib
from typing import Any


def wrong(name: str, value: Any, remedy: str) -> TypeError:
    """The error about an argument of a wrong type."""
    if isinstance(value, type):
        shown = f"the class {value.__name__}"
    else:
        text = "" if "\n" in repr(value) else reprlib.repr(value)
        shown = f"{text} ({type(value).__name__})" if text else f"an object of {type(value).__name__}"
    return TypeError(f"{name} is {shown}: {remedy}.")


def expect(value: Any, kinds: type | tuple[type, ...], name: str, remedy: str) -> None:
    """Raise TypeError unless ``value`` is of one of ``kinds``; ``remedy``: "pass ..."."""
    if not isinstance(value, kinds):
        raise wrong(name, value, remedy)


def expect_path(value: Any, name: str) -> None:
    """Raise TypeError unless ``value`` is a path."""
    expect(value, (str, os.PathLike), name, "pass a path, as text or pathlib.Path")


def expect_number(value: Any, name: str, whole: bool = False) -> None:
    """Raise TypeError unless ``value`` is a number, or a whole one; true and false are none."""
    kinds: tuple[type, ...] = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise wrong(name, value, f"pass a {'whole ' if whole else ''}number")
