"""Rewords pydantic's errors for authors of configuration files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lt_zero.common.errors import Path, dotted
from lt_zero.config.classify_keys import block_of, keys_of
from lt_zero.config.document import Tree

_KINDS = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a block of keys",
    "model_type": "a block of keys",
    "model_attributes_type": "a block of keys",
    "path_type": "a path",
    "missing": "given",
}


def message_of(tree: Tree, entry: Mapping[str, Any]) -> tuple[Path, str]:
    """The key of a pydantic error, and a message."""
    from lt_zero.config.schema import ZeroConfig

    path: list[str | int] = []
    schema: Any = ZeroConfig
    description, secret = "", False
    for part in entry["loc"]:  # for unions the location ends in names internal to pydantic
        field = keys_of(schema).get(str(part)) if schema is not None else None
        if schema is not None and field is None:
            break
        path.append(part)
        if field is not None:
            description, secret = field.description or "", bool(field.exclude)
            schema = block_of(field)
        elif not isinstance(part, int):
            path.pop()
            break
    key = dotted(tuple(path))
    if entry["type"] == "missing":
        return tuple(path), f"{key} is missing: {description}."
    value = tree.get(tuple(path))
    item = bool(entry["loc"]) and isinstance(entry["loc"][-1], int)  # an item of a list: the input shows which one
    shown = _shown(value if value is not entry["input"] and not item else entry["input"])
    shown = "..." if secret else shown
    what = _requirement(entry)
    return tuple(path), f"{key}={shown} is wrong: it must be {what}. Meaning: {description}." if what else (
        f"{key}={shown} is wrong: {_sentence(entry['msg'])}"
    )


def _requirement(entry: Mapping[str, Any]) -> str:
    kind, context = entry["type"], entry.get("ctx", {})
    if kind in _KINDS:
        return _KINDS[kind]
    words = {
        "greater_than": "greater than {gt}",
        "greater_than_equal": "at least {ge}",
        "less_than": "less than {lt}",
        "less_than_equal": "at most {le}",
        "literal_error": "one of {expected}",
        "string_too_short": "some text",
    }
    return words[kind].format(**context) if kind in words else ""


def _sentence(message: str) -> str:
    text = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return text if text.endswith(".") else f"{text}."


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
