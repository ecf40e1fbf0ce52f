"""The environment variables ``LT_ZERO_...``: their names and values, checked when a run is configured."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Callable

from lt_zero.common.errors import ConfigError, Problem

_PREFIX = "LT_ZERO_"
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_ISA = ("amx", "avx512", "avx2", "neon", "portable")
_LONGEST = 60  # characters of a name


def _switch(value: str) -> str:
    return "" if value.lower() in (*_ON, *_OFF) else f"one of {', '.join(_ON)}, or of {', '.join(_OFF)}"


def _isa(value: str) -> str:
    return "" if value.lower() in _ISA else f"one of {', '.join(_ISA)}"


def _number(value: str) -> str:
    return "" if value.isdecimal() else "a whole number, such as 1"


def _folder(value: str) -> str:
    return "" if not os.path.lexists(path := os.path.expanduser(value)) or os.path.isdir(path) else "a folder"


def _words(value: str) -> str:
    try:
        shlex.split(value)
    except ValueError as error:
        return f'texts such as "a.b=1 c=2", quoted as on a command line ({error})'
    return ""


def _any(value: str) -> str:
    return ""


# What a value has to be instead, or "" if it can be used; empty ones are the same as unset.
KNOWN: dict[str, Callable[[str], str]] = {
    "LT_ZERO_ALONE": _switch,
    "LT_ZERO_CACHE": _any,  # kernels/library.py checks it when kernels are loaded
    "LT_ZERO_DEBUG": _switch,
    "LT_ZERO_DIGESTS": _folder,
    "LT_ZERO_ISA": _isa,
    "LT_ZERO_MEMORY_CHECK": _switch,
    "LT_ZERO_NATIVE": _switch,
    "LT_ZERO_NODE_RANK": _number,
    "LT_ZERO_NVME": _folder,
    "LT_ZERO_OVERRIDES": _words,
    "LT_ZERO_RECORD": _folder,
    "LT_ZERO_SHARED_MEMORY": _switch,
    "LT_ZERO_JOB_RESULT": _any,  # this one and the next are set by lt_zero itself, for its processes
    "LT_ZERO_TRIAL": _folder,
}


def switched(name: str, default: bool) -> bool:
    """True if a variable that is a switch is on."""
    value = os.environ.get(name, "").strip().lower()
    return value not in _OFF if value else default


def check_variables() -> list[str]:
    """Check all variables of lt_zero's; returns a message for each name that it does not know.

    Raises:
        ConfigError: values cannot be used.
    """
    problems, unknown = [], []
    for name in sorted(name for name in os.environ if name.startswith(_PREFIX)):
        if name not in KNOWN:
            near = difflib.get_close_matches(name[:_LONGEST], KNOWN, 1, 0.8)
            hint = f" Did you mean {near[0]}?" if near else ""
            unknown.append(f"{name[:_LONGEST]} in the environment is no variable of lt_zero's.{hint}")
        elif (value := os.environ[name].strip()) and (wanted := KNOWN[name](value)):
            text = f"{name}={value!r:.200} in the environment cannot be used: it must be {wanted}. Correct or unset it."
            problems.append(Problem(name, text))
    if problems:
        raise ConfigError(problems)
    return unknown
