"""All supported keys, read from the JSON Schema that pydantic makes: type, default, bounds and description of each."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from lt_zero.config.fields import scalars
from lt_zero.config.keys import AUTO
from lt_zero.config.load import ZeroConfig

_NAMES = {"boolean": "true, false", "integer": "whole number", "number": "number", "string": "text", "null": ""}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
_WORDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}


@dataclass(frozen=True)
class Entry:
    """A supported key.

    Attributes:
        key: dotted; ``<name>`` stands for names that users choose.
        type: in words of a configuration file.
        default: as in a configuration file; "" if there is none.
        bounds: such as ">= 0, <= 3"; "" if there are none.
        description: what it does.
    """

    key: str
    type: str
    default: str
    bounds: str
    description: str


class _Generator(GenerateJsonSchema):
    def encode_default(self, dft: Any) -> Any:
        return scalars(dft.model_dump() if isinstance(dft, BaseModel) else dft)


@cache
def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = _standard(ZeroConfig.model_json_schema(schema_generator=_Generator))
    return schema


def _standard(node: Any) -> Any:
    """Bounds in the words of JSON Schema; behind a validator of ours pydantic leaves its own."""
    if isinstance(node, dict):
        return {_WORDS.get(word, word): _standard(entry) for word, entry in node.items()}
    return [_standard(entry) for entry in node] if isinstance(node, list) else node


@cache
def entries() -> tuple[Entry, ...]:
    """All keys, in the order of the schema."""
    return tuple(_entries(_schema(), ""))


def _entries(block: Mapping[str, Any], prefix: str) -> Iterator[Entry]:
    for name, node in block["properties"].items():
        if (inner := _block(_schema(), node)) is not None:
            yield from _entries(inner, f"{prefix}{name}.")
            continue
        key, default = f"{prefix}{name}", value_text(node["default"]) if "default" in node else ""
        if node.get("type") == "object":
            key, default = f"{key}.<name>", ""
        options = node.get("anyOf", [node])
        bounds = [f"{sign} {value_text(o[word])}" for o in options for word, sign in _BOUNDS.items() if word in o]
        yield Entry(key, _type_text(node), default, ", ".join(dict.fromkeys(bounds)), node.get("description", ""))


def _block(schema: Mapping[str, Any], node: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema of the block that a key holds, or None."""
    found = (part["$ref"] for part in (node, *node.get("anyOf", ())) if "$ref" in part)
    name = next(found, "").rpartition("/")[2]
    return schema["$defs"][name] if name else None


def _type_text(node: Mapping[str, Any]) -> str:
    """A type in words of a configuration file. null is left out: every key may be null or absent."""
    kinds = [kind for part in node.get("anyOf", [node]) for kind in _kind(part).split(", ") if kind]
    *most, last = dict.fromkeys(kinds)
    return f"{', '.join(most)} or {last}" if most else last


def _kind(node: Mapping[str, Any]) -> str:
    if "const" in node or "enum" in node:
        return ", ".join(value_text(value) for value in node.get("enum", [node.get("const")]))
    if node.get("type") == "array":
        return f"list of {_type_text(node['items'])}"
    if node.get("type") == "object":
        return "blocks" if "properties" in node else "anything"
    return "path" if node.get("format") == "path" else _NAMES[node["type"]]


def value_text(value: Any) -> str:
    """A value as in a configuration file: true, null, 5e8, [1, 2]."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (int, float)):
        short = f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
        return short if value >= 100_000 and float(short) == value else f"{value:g}" if value < 1e6 else str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    return "{}" if value == {} else str(value)


def json_schema() -> str:
    """JSON Schema of the supported keys, for editors."""
    schema = copy.deepcopy(_schema())
    for key in AUTO:
        *above, last = key.split(".")
        node: dict[str, Any] | None = schema
        for name in above:
            node = _block(schema, node["properties"].get(name, {})) if node is not None else None
        if node is not None and last in node["properties"]:  # constructor arguments may be anything
            entry = node["properties"][last]
            meaning = {word: entry.pop(word) for word in ("title", "description", "default") if word in entry}
            node["properties"][last] = {**meaning, "anyOf": [entry, {"const": "auto"}]}
    return json.dumps(schema, indent=2, default=str)
