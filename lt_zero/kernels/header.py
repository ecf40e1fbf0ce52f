"""Reads the declarations of csrc/lt_zero.h, as ctypes types and numbers, so that they stand in one place.

The header keeps to a small part of C: numbers (``#define``, ``enum``), structures by ``typedef``, and functions.
Anything else is an error with its line.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEADER = Path(__file__).resolve().parent.parent / "csrc" / "lt_zero.h"
_NUMBERS: dict[str, Any] = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint8_t": ctypes.c_uint8,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_INTEGERS = _NUMBERS.keys() - {"float", "double"}
# What the preprocessor removes or has read already.
_IGNORED = re.compile(r"//[^\n]*|#ifdef __cplusplus\b.*?#endif|#pragma once|#include <stdint\.h>", re.DOTALL)
_DECLARATION = re.compile(
    r"""\s*(?:
      \#define\s+(?P<constant>\w+)\s+(?P<value>\d+)\s*?(?=\n)
    | enum\s+\w+\s*\{(?P<members>[^{}]*)\}\s*;
    | typedef\s+struct\s*\{(?P<fields>[^{}]*)\}\s*(?P<struct>\w+)\s*;
    | (?P<result>\w[\w\s]*?[\s*]+)(?P<function>\w+)\s*\((?P<arguments>[^(){};]*)\)\s*;
    )""",
    re.VERBOSE,
)


class HeaderError(ValueError):
    """A declaration that cannot be read; names its line."""


@dataclass
class Declarations:
    """The declarations of a header.

    Attributes:
        constants: numbers by name.
        structs: ``ctypes.Structure`` classes by name. Fields that point to integers or to pointers take ctypes arrays,
            and keep them alive; all other pointers are addresses, of memory that the caller keeps alive.
        functions: result type and types of the arguments, by name. Pointers to structures take ``byref``; all others,
            except text, take an address, an array or ``byref``.
    """

    constants: dict[str, int] = field(default_factory=dict)
    structs: dict[str, type[ctypes.Structure]] = field(default_factory=dict)
    functions: dict[str, tuple[Any, list[Any]]] = field(default_factory=dict)


def parse(text: str, name: str = "the header") -> Declarations:
    """Parse a header; ``name`` is for errors.

    Raises:
        HeaderError: a declaration cannot be read.
    """
    # Removed text leaves its line breaks, so that errors have the right line.
    text = _IGNORED.sub(lambda found: "\n" * found[0].count("\n"), text)
    declared, at = Declarations(), 0
    while text[at:].strip():
        found = _DECLARATION.match(text, at)
        try:
            if found is None:
                raise HeaderError("this is no number, structure or function")
            _add(declared, found)
        except HeaderError as error:
            at += len(text[at:]) - len(text[at:].lstrip())
            line, shown = text.count("\n", 0, at) + 1, " ".join(text[at : at + 200].split())[:60]
            raise HeaderError(f"{name}, line {line}: {error}: {shown!r}.") from None
        at = found.end()
    return declared


def _add(declared: Declarations, found: re.Match[str]) -> None:
    """Add one declaration."""
    if found["constant"]:
        declared.constants[found["constant"]] = int(found["value"])
    elif found["members"] is not None:
        for member in found["members"].split(","):
            pair = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", member)
            if pair is None:
                raise HeaderError(f"{member.strip()!r} has no number")
            declared.constants[pair[1]] = int(pair[2])
    elif found["struct"]:
        fields = [
            (field, _field(declared, base, stars))
            for line in found["fields"].split(";")
            if line.strip()
            for base, stars, field in _declarators(line)
        ]
        declared.structs[found["struct"]] = type(found["struct"], (ctypes.Structure,), {"_fields_": fields})
    else:
        ((base, stars, _),) = _declarators(f"{found['result']} result")
        result = ctypes.c_char_p if (base, stars) == ("char", 1) else _number(base) if not stars else ctypes.c_void_p
        arguments = [] if found["arguments"].strip() == "void" else found["arguments"].split(",")
        parsed = [next(_declarators(argument)) for argument in arguments]
        declared.functions[found["function"]] = (result, [_argument(declared, *each[:2]) for each in parsed])


def _declarators(text: str) -> Iterator[tuple[str, int, str]]:
    """(type, number of ``*``, name or "") of ``const T *const *a, b``."""
    base, _, rest = re.sub(r"\bconst\b", " ", text).strip().replace("*", " * ").partition(" ")
    for declarator in rest.split(","):
        name = declarator.replace("*", "").strip()
        if name and not name.isidentifier():
            raise HeaderError(f"{name!r} is no name")
        yield base, declarator.count("*"), name


def _number(base: str) -> Any:
    if base not in _NUMBERS:
        raise HeaderError(f"the type {base!r} is unknown")
    return _NUMBERS[base]


def _field(declared: Declarations, base: str, stars: int) -> Any:
    """The type of a field of a structure."""
    if stars == 0:
        return declared.structs[base] if base in declared.structs else _number(base)
    if base != "void" and base not in declared.structs:
        _number(base)
    if stars > 1:
        return ctypes.POINTER(ctypes.c_void_p)
    return ctypes.POINTER(_NUMBERS[base]) if base in _INTEGERS else ctypes.c_void_p


def _argument(declared: Declarations, base: str, stars: int) -> Any:
    """The type of an argument of a function."""
    if base in declared.structs and stars == 1:
        return ctypes.POINTER(declared.structs[base])
    if base == "char" and stars == 1:
        return ctypes.c_char_p
    if base != "void" or stars == 0:
        number = _number(base)
        return ctypes.c_void_p if stars else number
    return ctypes.c_void_p


_DECLARED = parse(HEADER.read_text(encoding="utf-8"), str(HEADER))
CONSTANTS = _DECLARED.constants
STRUCTS = _DECLARED.structs
FUNCTIONS = _DECLARED.functions
