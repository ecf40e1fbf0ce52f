"""A configuration as text: YAML with the source of each value, or a file of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from lt_zero.common.errors import Path, dotted
from lt_zero.config.document import HIDDEN, Document, leaves
from lt_zero.config.fields import scalars
from lt_zero.config.keys import AUTO
from lt_zero.config.load import Loaded, ZeroConfig, plain


def resolved(config: ZeroConfig) -> dict[str, Any]:
    """All keys with their values in plain containers, readable by ``ZeroConfig.of``. Secrets are left out."""
    document = Document(scalars(config.model_dump()))
    for path in config.autos:
        document.put(path, "auto")
    return document.values


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Blocks in block style, lists in flow style."""


_Dumper.add_representer(list, lambda dumper, values: dumper.represent_sequence("tag:yaml.org,2002:seq", values, True))


def to_yaml(values: Mapping[str, Any]) -> str:
    """YAML with two spaces of indentation and keys in order; ``read`` returns the same values."""
    text = yaml.dump(scalars(values), Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
    return str(text)


def clean(loaded: Loaded) -> str:
    """The written keys as YAML with current spellings, preceded by comments on the changes."""
    assert loaded.config is not None
    lines = [f"# {notice.message}" for notice in loaded.notices if notice.kind in ("alias", "no effect")]
    values = _masked(plain(loaded.config), loaded.secret, to_give := "???")
    if to_give in (leaf for _, leaf in leaves(values)):
        lines.append(f"# {to_give}: a secret, or from an environment variable; write ${{oc.env:NAME}} for it")
    return "\n".join([*lines, to_yaml(values)])


def with_origins(loaded: Loaded, everything: bool) -> str:
    """YAML of the validated configuration with the source of each value.

    Args:
        loaded: must have no problems.
        everything: include keys that have their defaults.
    """
    assert loaded.config is not None
    written = Document(plain(loaded.config), dict(loaded.marks))
    values = resolved(loaded.config) if everything else written.values
    lines = list(_lines(_masked(values, loaded.secret), written, ()))
    width = max((len(text) for text, origin in lines if origin), default=0)
    return "\n".join(f"{text.ljust(width)}  # {origin}" if origin else text for text, origin in lines)


def _lines(values: Mapping[str, Any], written: Document, path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a block, each with the source of its value."""
    indent = "  " * len(path)
    for key, value in values.items():
        here = (*path, key)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:", ""
            yield from _lines(value, written, here)
            continue
        block = written.get(path)
        origin = str(written.mark(here) or "given") if isinstance(block, Mapping) and key in block else "default"
        rule = AUTO.get(dotted(here), "") if value == "auto" else ""
        yield f"{indent}{to_yaml({key: value}).rstrip()}", f"{origin}; becomes {rule}" if rule else origin


def _masked(value: Any, secret: frozenset[Path], sign: str = HIDDEN, path: Path = ()) -> Any:
    if path in secret:
        return sign
    if isinstance(value, Mapping):
        return {key: _masked(entry, secret, sign, (*path, key)) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(entry, secret, sign, (*path, number)) for number, entry in enumerate(value)]
    return value
