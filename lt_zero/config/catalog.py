"""All supported keys, read from the schema: type, default, bounds, description and aliases of each."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import torch
from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

_NAMES: Mapping[Any, tuple[str, ...]] = {
    bool: ("true", "false"),
    int: ("whole number",),
    float: ("number",),
    str: ("text",),
    Path: ("path",),
    torch.dtype: ("fp32", "fp16", "bf16"),
    Any: ("anything",),
}
_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Entry:
    """A supported key.

    Attributes:
        key: dotted; ``<name>`` stands for names that users choose.
        type: in words of a configuration file.
        default: as in JSON; "" if there is none.
        bounds: such as ">= 0, <= 3"; "" if there are none.
        description: what it does.
        aliases: other dotted spellings in the schema.
    """

    key: str
    type: str
    default: str
    bounds: str
    description: str
    aliases: tuple[str, ...] = ()


@cache
def entries() -> tuple[Entry, ...]:
    """The catalog of ``ZeroConfig``, in the order of the schema."""
    from lt_zero.config.schema import ZeroConfig  # circular: the key table asks the catalog for similar names

    return tuple(walk(ZeroConfig))


def walk(model: type[BaseModel], prefix: str = "") -> Iterator[Entry]:
    """The keys of a model and of the blocks in it."""
    for field_name, field in model.model_fields.items():
        name, *others = _spellings(field_name, field)
        key = prefix + name
        block = block_of(field.annotation)
        aliases = tuple(prefix + other for other in others)
        if block is not None:
            yield from walk(block, f"{key}.")
            continue
        if _is_mapping(field.annotation):
            key, aliases = f"{key}.<name>", tuple(f"{alias}.<name>" for alias in aliases)
            kind, default = type_text(_arguments(field.annotation)[-1]), ""
        else:
            kind, default = type_text(field.annotation), _default_text(field)
        bounds = ", ".join(_bounds([*field.metadata, *_metadata(field.annotation)]))
        yield Entry(key, kind, default, bounds, field.description or "", aliases)


def _spellings(name: str, field: FieldInfo) -> list[str]:
    """As users write it first."""
    alias = field.validation_alias or field.alias
    if isinstance(alias, AliasChoices):
        choices = [str(choice) for choice in alias.choices]
        return choices + [name] * (name not in choices)
    return [alias, name] if isinstance(alias, str) else [name]


def block_of(annotation: Any) -> type[BaseModel] | None:
    """The model of a block, also of an optional one."""
    kinds = (inner for part in _parts(annotation) for inner in (_bare(part),))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def type_text(annotation: Any) -> str:
    """A type in words of a configuration file. None is left out: every key may be null or absent."""
    kinds = list(dict.fromkeys(kind for part in _parts(annotation) for kind in _kinds(_bare(part))))
    *most, last = kinds
    return f"{', '.join(most)} or {last}" if most else last


def _kinds(annotation: Any) -> tuple[str, ...]:
    origin = get_origin(annotation)
    if annotation is type(None):
        return ()
    if origin is Literal:
        return tuple(map(value_text, get_args(annotation)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return (f"block of {type_text(get_args(annotation)[-1])}",)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return (f"list of {type_text(get_args(annotation)[0])}",)
    return _NAMES.get(annotation, (getattr(annotation, "__name__", str(annotation)),))


def _parts(annotation: Any) -> tuple[Any, ...]:
    bare = _bare(annotation)
    return get_args(bare) if get_origin(bare) in (Union, types.UnionType) else (annotation,)


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _is_mapping(annotation: Any) -> bool:
    origins = (get_origin(_bare(part)) or _bare(part) for part in _parts(annotation))
    return any(isinstance(origin, type) and issubclass(origin, Mapping) for origin in origins)


def _arguments(annotation: Any) -> tuple[Any, ...]:
    """Types of keys and values of the mapping in an annotation."""
    found = next((get_args(_bare(p)) for p in _parts(annotation) if get_args(_bare(p))), ())
    return found or (str, Any)


def _metadata(annotation: Any) -> list[Any]:
    """The metadata of ``Annotated``, from every member of a union."""
    found: list[Any] = []
    for part in (annotation, *_parts(annotation)):
        if get_origin(part) is Annotated:
            for extra in get_args(part)[1:]:
                found += extra.metadata if isinstance(extra, FieldInfo) else [extra]
    return found


_SIGNS = {
    annotated_types.Gt: (">", "gt"),
    annotated_types.Ge: (">=", "ge"),
    annotated_types.Lt: ("<", "lt"),
    annotated_types.Le: ("<=", "le"),
}


def _bounds(metadata: Sequence[Any]) -> list[str]:
    signs = [(*_SIGNS[type(item)], item) for item in metadata if type(item) in _SIGNS]
    return list(dict.fromkeys(f"{sign} {value_text(getattr(item, name))}" for sign, name, item in signs))


def _default_text(field: FieldInfo) -> str:
    return "" if field.is_required() else value_text(field.get_default(call_default_factory=True))


def value_text(value: Any) -> str:
    """A value as in a configuration file: true, null, 5e8, fp32."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, torch.dtype):
        return _DTYPES[value]
    if isinstance(value, (int, float)):
        short = f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
        return short if value >= 100_000 and float(short) == value else f"{value:g}" if value < 1e6 else str(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(value_text, value))}]"
    return "{}" if value == {} else str(value)
