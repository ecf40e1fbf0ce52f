"""Checks of what users pass to public functions: the error names the argument, its value and what to pass instead."""

from __future__ import annotations

import os
import reprlib
from datetime import timedelta
from typing import Any

from lt_zero.common.compat import process_group_backends


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


def check_group_options(call: str, timeout: timedelta | None, **backend: object) -> None:
    """Check what a user passed to ``call`` for a process group; ``backend`` under the name of its argument.

    Raises:
        TypeError, ValueError: names the argument, and what to pass.
    """
    expect(timeout, (timedelta, type(None)), f"{call}(timeout=...)", "pass datetime.timedelta(seconds=...), or None")
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(f"{call}(timeout={timeout!r}): no collective ends in that time. Pass a longer one.")
    for argument, name in backend.items():
        parts = {part.split(":")[-1].strip() for part in str(name).lower().split(",")}
        if name is not None and (not isinstance(name, str) or not parts <= process_group_backends()):
            raise ValueError(
                f'{call}({argument}={name!r}): torch has no such backend. Pass "gloo" for CPUs or "nccl" for GPUs;'
                " without the argument the one that fits is taken."
            )
