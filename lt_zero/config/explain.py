"""What a key means, in text: ``lt-zero config explain KEY``."""

from __future__ import annotations

from fnmatch import fnmatchcase

from lt_zero.config.catalog import Entry, entries
from lt_zero.config.keys import KeyStatus, lookup, nearest, rows

_SAYS = {
    "no_effect": "has no effect here",
    "later": "is not available yet",
    "unsupported": "is not supported",
}


def explain(key: str) -> str:
    """Explain a key.

    Args:
        key: dotted, or any part of it ("bucket"); an old spelling; or a pattern ("offload_*.device").

    Returns:
        text: about the key, or a list if several match.
    """
    key = key.strip().strip(".")
    if (exact := _exact(key)) is not None:
        return exact
    found = list(dict.fromkeys(_matching(key)))
    if len(found) == 1:
        return _exact(found[0]) or found[0]
    if found:
        return "\n".join(map(_line, found))
    near = nearest(key, _names())
    hint = f" Did you mean {near}?\n\n{explain(near)}" if near else " See docs/config.md for all keys."
    return f"{key} is not a key of lt_zero or DeepSpeed.{hint}"


def _exact(key: str) -> str | None:
    """About one key, or None if no key has this name."""
    if not key or ("*" in key and key not in _names()):
        return None
    entry, row = _entry(key), lookup(tuple(key.split(".")))
    about = [_supported(entry)] if entry is not None and (row is None or row.status != "alias") else []
    about += [_in_table(key, row)] if row is not None else []
    return "\n".join(about) or None


def _entry(key: str) -> Entry | None:
    for entry in entries():
        stem = entry.key.removesuffix("<name>")
        if key == entry.key or (stem != entry.key and key.startswith(stem)):
            return entry
    return None


def _supported(entry: Entry) -> str:
    spellings = [row.key for row in rows() if row.status == "alias" and entry.key in row.to.split(" and ")]
    lines = [
        entry.key,
        f"    {entry.description}",
        f"    value: {entry.type}{f', {entry.bounds}' if entry.bounds else ''}",
        f"    default: {entry.default}" if entry.default else "",
        f"    also written: {', '.join(spellings)}" if spellings else "",
    ]
    return "\n".join(filter(None, lines))


def _in_table(key: str, row: KeyStatus) -> str:
    if row.status != "alias":
        off = f"\n    accepted with: null, {row.off.replace('|', ', ')}" if row.off else ""
        return f"{key} {_SAYS[row.status]}.\n    {row.note}{off}"
    targets = row.targets(tuple(key.split(".")))
    about = (_exact(target) for target in targets)
    return "\n\n".join((f"{key} is read as {' and '.join(targets)}. {row.note}", *filter(None, about)))


def _names() -> list[str]:
    return [*(entry.key for entry in entries()), *(row.key for row in rows())]


def _matching(part: str) -> list[str]:
    """Keys in the block ``part``, matching it as a pattern, or containing it."""
    if any(sign in part for sign in "*?["):
        return [name for name in _names() if any(fnmatchcase(name, p) for p in (part, f"*.{part}"))]
    inside = [name for name in _names() if name.startswith(f"{part}.")]
    return inside or [name for name in _names() if part.lower() in name.lower()]


def _line(key: str) -> str:
    row, entry = lookup(tuple(key.split("."))), _entry(key)
    if row is None:
        return f"{key}: {entry.description if entry is not None else ''}"
    return f"{key}: read as {row.to}" if row.status == "alias" else f"{key}: {_SAYS[row.status]}. {row.note}"
