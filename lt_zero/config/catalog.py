"""All supported keys, from the JSON Schema that pydantic makes: as a list, explained in text, and as a page.

``python -m lt_zero.config.catalog [FILE]`` writes ``docs/config.md``.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from lt_zero.common.fields import scalars
from lt_zero.config.keys import AUTO, FORMS, aliases, lookup, nearest, rows
from lt_zero.config.load import NOTHING, ZeroConfig, current_schema
from lt_zero.features import MissingBlock, own_blocks

_NAMES = {"boolean": "true, false", "integer": "whole number", "number": "number", "string": "text", "null": ""}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
_WORDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}


@dataclass(frozen=True)
class KeyEntry:
    """A supported key, in words of a configuration file."""

    key: str  # dotted; <name> stands for names that users choose
    type: str
    default: str  # "" if there is none
    bounds: str  # such as ">= 0, <= 3"
    description: str

    @property
    def value(self) -> str:
        """Type and bounds."""
        return f"{self.type}, {self.bounds}" if self.bounds else self.type


class _Generator(GenerateJsonSchema):
    def encode_default(self, dft: Any) -> Any:
        return scalars(dft.model_dump() if isinstance(dft, BaseModel) else dft)


def _schema() -> dict[str, Any]:
    return _schema_of(current_schema())


@cache
def _schema_of(config: type[ZeroConfig]) -> dict[str, Any]:
    schema: dict[str, Any] = _standard(config.model_json_schema(schema_generator=_Generator))
    return schema


def _standard(node: Any) -> Any:
    """Bounds in the words of JSON Schema; for a type with a validator before it, pydantic writes its own words."""
    if isinstance(node, dict):
        return {_WORDS.get(word, word): _standard(entry) for word, entry in node.items()}
    return [_standard(entry) for entry in node] if isinstance(node, list) else node


def entries() -> tuple[KeyEntry, ...]:
    """All keys, in the order of the schema."""
    return _entries_of(current_schema())


@cache
def _entries_of(config: type[ZeroConfig]) -> tuple[KeyEntry, ...]:
    schema = _schema_of(config)
    return tuple(_entries(schema, schema, ""))


def _entries(schema: Mapping[str, Any], block: Mapping[str, Any], prefix: str) -> Iterator[KeyEntry]:
    for name, node in block["properties"].items():
        if (inner := _block(schema, node)) is not None:
            yield from _entries(schema, inner, f"{prefix}{name}.")
            continue
        if node.items() >= NOTHING.items():  # of a feature that is not installed
            continue
        key, default = f"{prefix}{name}", value_text(node["default"]) if "default" in node else ""
        if node.get("type") == "object":
            key, default = f"{key}.<name>", ""
        options = node.get("anyOf", [node])
        bounds = [f"{sign} {value_text(o[word])}" for o in options for word, sign in _BOUNDS.items() if word in o]
        yield KeyEntry(key, _type_text(node), default, ", ".join(dict.fromkeys(bounds)), node.get("description", ""))


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
    if "$ref" in node:
        return "blocks"
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


# ---- explanations ----------------------------------------------------------------------------------------------------

_SAYS = {"no_effect": "has no effect here", "unsupported": "is not supported"}


def explain(key: str) -> str:
    """Text about a key: dotted, or any part ("bucket"), an old spelling, or a pattern; a list if several match."""
    key = key.strip().strip(".")
    if isinstance(missing := own_blocks().get(key.partition(".")[0]), MissingBlock):
        return str(missing.error)
    names = dict.fromkeys([*(entry.key for entry in entries()), *(row.key for row in rows())])
    if key and ("*" not in key or key in names) and (text := _about(key)):
        return text
    if any(sign in key for sign in "*?["):
        found = [name for name in names if fnmatchcase(name, key) or fnmatchcase(name, f"*.{key}")]
    else:
        found = [name for name in names if name.startswith(f"{key}.")]
        found = found or [name for name in names if key.lower() in name.lower()]
        words = [name for name in found if f"_{key.lower()}_" in f"_{name.lower().replace('.', '_')}_"]
        found = words or found  # `lr` is no part of `allreduce`
    if argument := next((name for name in AUTO if name.endswith(f".params.{key}")), ""):
        block = argument.partition(".")[0]
        lines = [argument, f"    argument of the class that {block}.type names", f'    "auto" is {AUTO[argument]}']
        return "\n".join([*lines, *([f"    in other keys: {', '.join(found)}"] if found else [])])
    if len(found) == 1:
        return _about(found[0]) or found[0]
    lines = []
    for name in found:
        row, entry = lookup(tuple(name.split("."))), _entry(name)
        says = entry.description if entry is not None else ""
        if row is not None:
            says = f"read as {row.to}" if row.status == "alias" else f"{_SAYS[row.status]}. {row.note}"
        lines.append(f"{name}: {says}")
    if lines:
        return "\n".join(lines)
    near = nearest(key, names)
    hint = f" Did you mean {near}?\n\n{explain(near)}" if near else " See docs/config.md for all keys; arguments of "
    hint = hint if near else f"{hint}optimizers and schedules are in optimizer.params and scheduler.params."
    return f"{key} is not a key of lt_zero or DeepSpeed.{hint}"


def _entry(key: str) -> KeyEntry | None:
    for entry in entries():
        stem = entry.key.removesuffix("<name>")
        if key == entry.key or (stem != entry.key and key.startswith(stem)):
            return entry
    return None


def _about(key: str) -> str:
    """The text about one key, from the schema and from the table; empty for an unknown key."""
    entry, row = _entry(key), lookup(tuple(key.split(".")))
    if row is not None and row.status == "alias":
        targets = row.targets(tuple(key.split(".")))
        texts = [f"{key} is read as {' and '.join(targets)}. {row.note}", *map(_about, targets)]
        return "\n\n".join(filter(None, texts))
    lines = []
    if entry is not None:
        spellings = [alias.key for alias in aliases() if entry.key in alias.to.split(" and ")]
        lines = [entry.key, f"    {entry.description}", f"    value: {entry.value}"]
        lines += [f"    default: {entry.default}"] if entry.default else []
        lines += [f"    also written: {', '.join(spellings)}"] if spellings else []
    if row is not None:
        lines += [f"{key} {_SAYS[row.status]}.", f"    {row.note}"]
        lines += [f"    accepted with: null, {row.off.replace('|', ', ')}"] if row.off else []
    return "\n".join(lines)


# ---- the page --------------------------------------------------------------------------------------------------------

_HEAD = """\
---
search: {boost: 0.1}
---

<!-- Generated by `make docs` from lt_zero/config. Change the schema or keys.tsv, not this file. -->

# Configuration keys

Keys are those of DeepSpeed 0.19.8, so its files work unchanged; some are lt_zero's own. Each key of
DeepSpeed is in one of the sections, and a key that is not on this page is an error. `a.b` is the key `b` in the block
`a`. `*` stands for any name, `a.**` for the block `a` and everything in it, `<name>` for names of your choice. null is
the same as leaving a key out. `lt-zero config explain KEY` shows a part of this page.
"""
_AUTO = """\
"auto" is resolved as by Hugging Face's Trainer. `fp16.enabled` and `bf16.enabled` follow `Trainer(precision=...)`,
`zero_optimization.stage` follows `ZeroStrategy(stage=...)`; a few keys have "auto" as a value of their own, see above.
Anywhere else it is an error. The hidden size is `hidden_size`, or the largest of `hidden_sizes`, in the `config` of the
model or one of its modules, or in its `text_config`; without one, the most frequent size among the model's matrices
(the smaller in a tie).
"""
_REFUSED = """\
They are an error, unless they are switched off: by a value in the middle column, or by `enabled: false` in a block.
"""


def working() -> list[KeyEntry]:
    """The keys of the schema; top-level keys first."""
    return sorted(entries(), key=lambda entry: "." in entry.key)


def generate() -> str:
    """The whole page."""
    parts = [_HEAD, "## Keys that work\n"]
    lines: list[Sequence[str]]
    for block, found in groupby(working(), key=lambda entry: entry.key.split(".")[0] if "." in entry.key else ""):
        lines = [(_code(entry.key), entry.value, _code(entry.default), entry.description) for entry in found]
        parts += [f"### {_code(block) or 'Outside of blocks'}\n", _table(("key", "value", "default", "meaning"), lines)]
    parts += ['## "auto"\n', _AUTO, _table(("key", "becomes"), [(_code(key), rule) for key, rule in AUTO.items()])]
    lines = [(_code(written), _code(meant), "") for written, meant in FORMS.items()]
    for row in aliases():
        rest = ".**" if row.key.endswith(".**") else ""
        lines.append((_code(row.key), " and ".join(_code(to + rest) for to in row.to.split(" and ")), row.note))
    text = (
        "Each is read as the key next to it, with a warning. Writing both is an error if they contradict each other.\n"
    )
    parts += ["## Other spellings\n", text, _table(("written", "read as", ""), lines)]
    text = "They are accepted and ignored: training, memory and files are the same without them.\n"
    lines = [(keys, why) for keys, _, why in _rows("no_effect")]
    parts += ["## No effect\n", text, _table(("key", "why"), lines)]
    parts += ["## Not supported\n", _REFUSED, _table(("key", "accepted with", ""), _rows("unsupported"))]
    return "\n".join(parts)


def _rows(status: str) -> Iterator[tuple[str, str, str]]:
    """Keys, values that switch them off, and note; rows with the same text are one, at the place of the first."""
    same: dict[tuple[str, str], list[str]] = {}
    for row in rows():
        if row.status == status:
            same.setdefault((_code(row.off.replace("|", ", ")), row.note), []).append(_code(row.key))
    return ((", ".join(keys), off, note) for (off, note), keys in same.items())


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    cells = [header, ["---"] * len(header), *lines]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in cells)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    Path(*sys.argv[1:] or ["docs/config.md"]).write_text(generate(), encoding="utf-8")
