"""The status of each key that was written: it works, has no effect here, is not supported, or is unknown."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Union, get_args, get_origin

from pydantic import AliasChoices
from pydantic.fields import FieldInfo

from lt_zero.common.errors import Path, dotted
from lt_zero.config import auto, key_table
from lt_zero.config.document import Notice, Tree
from lt_zero.config.fields import Block
from lt_zero.config.key_table import KeyStatus
from lt_zero.optim.from_config import check_optimizer, check_scheduler

_OFF = (False, None, "none", "None")  # values that switch an unsupported block off
_FREE = {("optimizer", "params"), ("scheduler", "params")}  # checked where their type is known


def classify_keys(tree: Tree, schema: type[Block]) -> frozenset[Path]:
    """Remove keys that the schema does not have from ``tree``, with a notice or a problem for each.

    Returns:
        keys written "auto", which are removed, too.
    """
    return frozenset(_block(tree, tree.values, schema, ()))


@cache
def keys_of(schema: type[Block]) -> Mapping[str, FieldInfo]:
    """The fields of a block by all their spellings."""
    found: dict[str, FieldInfo] = {}
    for name, field in schema.model_fields.items():
        found[name] = field
        if isinstance(field.validation_alias, AliasChoices):
            found |= {str(choice): field for choice in field.validation_alias.choices}
    return found


def block_of(field: FieldInfo) -> type[Block] | None:
    """The block that a field holds, or None."""
    kinds = get_args(field.annotation) if _is_union(field.annotation) else (field.annotation,)
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Block)), None)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _block(tree: Tree, values: dict[str, Any], schema: type[Block], path: Path) -> Iterator[Path]:
    fields = keys_of(schema)
    for key in list(values):
        here, value = (*path, key), values[key]
        if key not in fields:
            _foreign(tree, here, value)
            del values[key]
            continue
        if value is None and not fields[key].is_required() and fields[key].default is not None:
            del values[key]  # null is the same as absent
            continue
        inner = block_of(fields[key])
        if value == "auto" and not _takes_auto(fields[key]):
            del values[key]
            if auto.resolvable(here):
                yield here
            else:
                tree.problem(here, auto.refusal(here, fields[key]))
        elif inner is not None and isinstance(value, Mapping):
            yield from _block(tree, values[key], inner, here)
        elif here in _FREE and isinstance(value, Mapping):
            yield from _free(tree, values[key], here)


def _takes_auto(field: FieldInfo) -> bool:
    """Whether "auto" is one of the field's own values."""
    return "auto" in str(field.annotation)


def _free(tree: Tree, params: dict[str, Any], path: Path) -> Iterator[Path]:
    for name in [name for name in params if key_table.lookup((*path, name)) is not None]:
        _foreign(tree, (*path, name), params.pop(name))
    for name in [name for name, value in params.items() if value == "auto"]:
        del params[name]
        if auto.resolvable((*path, name)):
            yield (*path, name)
        else:
            tree.problem((*path, name), auto.refusal((*path, name), None))


# ---- keys that the schema does not have ------------------------------------------------------------------------------


def _foreign(tree: Tree, path: Path, value: Any) -> None:
    row = key_table.lookup(path)
    key = dotted(path)
    inside = isinstance(value, Mapping) and key_table.below(path)
    if inside and (row is None or row.status == "no_effect"):
        for name in value:
            _foreign(tree, (*path, name), value[name])
    elif row is None:
        tree.problem(path, f"{key} is not a key of lt_zero or DeepSpeed.{_hint(tree, path, value)}")
    elif row.status == "no_effect":
        if value is not None:
            tree.notices.append(Notice("no effect", key, f"{key} has no effect here: {row.note}", tree.mark(path)))
    elif row.status == "alias":  # an alias, but the value has another type
        tree.problem(path, f"{key}={value!r} cannot be read as {row.to}. Write {row.to}.")
    elif not unused(row, path, value):
        state = "is not available yet" if row.status == "later" else "is known, but not supported"
        shown = "" if isinstance(value, (Mapping, list)) else f"={value!r}"
        tree.problem(path, f"{key}{shown} {state}: {row.note}")


def _hint(tree: Tree, path: Path, value: Any) -> str:
    """A suggestion: a supported key, an argument one level too high, or a key that is refused."""
    if near := key_table.nearest(dotted(path)):
        return f" Did you mean {near}?"
    if len(path) == 2 and path[0] in ("optimizer", "scheduler"):
        check = check_optimizer if path[0] == "optimizer" else check_scheduler
        near = f"{path[0]}.params.{path[1]}"
        problems = check(tree.get((path[0], "type")), {str(path[1]): value})
        if not any(problem.key in (near, f"{path[0]}.type") for problem in problems):
            return f" Did you mean {near}?"
    refused = key_table.nearest(dotted(path), key_table.refused())
    row = key_table.lookup(tuple(refused.split("."))) if refused else None
    if row is not None:
        return f" It looks like {refused}, which is not supported either: {row.note}"
    return " Remove it, or see docs/config.md for all keys."


def unused(row: KeyStatus, path: Path, value: Any) -> bool:
    """Whether an unsupported key or block is written, but switched off."""
    if row.status == "no_effect":
        return True
    if not isinstance(value, Mapping):
        return key_table.is_off(row, value) if row.off else value is None or value in _OFF
    if value.get("enabled", True) in (False, None, 0, "false", "auto") or key_table.is_off(row, value):
        return True
    return all(unused(key_table.lookup((*path, key)) or row, (*path, key), inner) for key, inner in value.items())
