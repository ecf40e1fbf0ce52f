"""A configuration as text: YAML with the source of each value, or a file of its own."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path as File
from typing import Any

import torch
import yaml
from pydantic.json_schema import PydanticJsonSchemaWarning

from lt_zero.common.errors import Mark, Path
from lt_zero.config.auto import RULES
from lt_zero.config.document import Tree
from lt_zero.config.fields import Block
from lt_zero.config.load import Loaded, plain
from lt_zero.config.read.source import leaves
from lt_zero.config.redact import HIDDEN
from lt_zero.config.schema import ZeroConfig

_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def resolved(config: ZeroConfig) -> dict[str, Any]:
    """All keys with their values in plain containers, readable by ``ZeroConfig.of``. Secrets are left out."""
    values = _plain(config)
    for path in config.autos:
        Tree(values).put(path, "auto")
    return values


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Blocks in block style, lists in flow style."""


_Dumper.add_representer(list, lambda dumper, values: dumper.represent_sequence("tag:yaml.org,2002:seq", values, True))


def to_yaml(values: Mapping[str, Any]) -> str:
    """YAML with two spaces of indentation and keys in order; ``files.read`` returns the same values."""
    text = yaml.dump(_scalars(values), Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
    return str(text)


def clean(loaded: Loaded) -> str:
    """The written keys as YAML with current spellings, preceded by comments on the changes."""
    assert loaded.config is not None
    lines = [f"# {notice.message}" for notice in loaded.notices if notice.kind in ("alias", "no effect")]
    values = _masked(plain(loaded.config), loaded.secret, to_give := "???")
    if to_give in (leaf for _, leaf in leaves(values)):
        lines.append(f"# {to_give}: a secret, or from an environment variable; write ${{oc.env:NAME}} for it")
    return "\n".join([*lines, to_yaml(values)] if lines else [to_yaml(values)])


def with_origins(loaded: Loaded, everything: bool) -> str:
    """YAML of the validated configuration with the source of each value.

    Args:
        loaded: must have no problems.
        everything: include keys that have their defaults.
    """
    assert loaded.config is not None
    written, whole = plain(loaded.config), resolved(loaded.config)
    lines = list(_lines(_masked(whole if everything else written, loaded.secret), written, loaded.marks, ()))
    width = max((len(text) for text, origin in lines if origin), default=0)
    return "\n".join(f"{text.ljust(width)}  # {origin}" if origin else text for text, origin in lines)


def json_schema() -> str:
    """JSON Schema of the supported keys, for editors."""
    with warnings.catch_warnings():  # leaves out defaults that are dtypes
        warnings.simplefilter("ignore", PydanticJsonSchemaWarning)
        schema = ZeroConfig.model_json_schema()
    for key in RULES:
        _allow_auto(schema, key.split("."))
    return json.dumps(schema, indent=2, default=str)


def _lines(
    values: Mapping[str, Any], written: Any, marks: Mapping[Path, Mark], path: Path
) -> Iterator[tuple[str, str]]:
    indent = "  " * len(path)
    for key, value in values.items():
        here = (*path, key)
        given = isinstance(written, Mapping) and key in written
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:", ""
            yield from _lines(value, written[key] if given else None, marks, here)
        else:
            text = to_yaml({key: value}).rstrip()
            origin = str(_mark(marks, here) or "given") if given else "default"
            rule = RULES.get(".".join(map(str, here)), "") if value == "auto" else ""
            yield f"{indent}{text}", f"{origin}; becomes {rule}" if rule else origin


def _mark(marks: Mapping[Path, Mark], path: Path) -> Mark | None:
    while path:
        if path in marks:
            return marks[path]
        path = path[:-1]
    return None


def _plain(block: Block) -> dict[str, Any]:
    found = {}
    for name, field in type(block).model_fields.items():
        value = getattr(block, name)
        if field.exclude:  # secrets
            continue
        found[name] = _plain(value) if isinstance(value, Block) else _scalars(value)
    return found


def _scalars(value: Any) -> Any:
    """Convert to types that YAML and ``torch.load(weights_only=True)`` support."""
    if isinstance(value, Mapping):
        return {str(key): _scalars(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_scalars(entry) for entry in value]
    if isinstance(value, torch.dtype):
        return _SHORT.get(value, str(value))
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    return str(value) if isinstance(value, File) else HIDDEN if "Secret" in type(value).__name__ else str(value)


def _masked(value: Any, secret: frozenset[Path], sign: str = HIDDEN, path: Path = ()) -> Any:
    if path in secret:
        return sign
    if isinstance(value, Mapping):
        return {key: _masked(entry, secret, sign, (*path, key)) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(entry, secret, sign, (*path, number)) for number, entry in enumerate(value)]
    return value


def _allow_auto(schema: dict[str, Any], keys: list[str]) -> None:
    """Allow "auto" for a key that may have it."""
    node = schema
    for number, key in enumerate(keys):
        properties = node.get("properties", {})
        if key not in properties:
            return  # constructor arguments may be anything
        if number == len(keys) - 1:
            entry = properties[key]
            meaning = {k: entry.pop(k) for k in ("title", "description", "default") if k in entry}
            properties[key] = {**meaning, "anyOf": [entry, {"const": "auto"}]}
            return
        node = _follow(schema, properties[key])


def _follow(schema: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    for part in (entry, *entry.get("anyOf", ()), *entry.get("allOf", ())):
        if "$ref" in part:
            found: dict[str, Any] = schema["$defs"][part["$ref"].rsplit("/", 1)[1]]
            return found
    return entry
