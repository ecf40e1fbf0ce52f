"""What a key means, in text: ``lt-zero config explain KEY``."""

from __future__ import annotations

from collections.abc import Iterator
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
        return "\n".join(_line(name) for name in found)
    near = nearest(key, _names())
    hint = f" Did you mean {near}?\n\n{explain(near)}" if near else " See docs/config.md for all keys."
    return f"{key} is not a key of lt_zero or DeepSpeed.{hint}"


def _exact(key: str) -> str | None:
    """About one key, or None if no key has this name."""
    if not key or "*" in key and key not in _names():
        return None
    path = tuple(key.split("."))
    entry, row = _entry(key), lookup(path)
    if row is None:
        return None if entry is None else _works(entry)
    if entry is not None and row.status != "alias":  # the schema parses it, and it is refused later
        return f"{_works(entry)}\n{_told(key, row)}"
    return _told(key, row)


def _entry(key: str) -> Entry | None:
    for entry in entries():
        stem = entry.key.removesuffix("<name>")
        if key in (entry.key,) or (stem != entry.key and key.startswith(stem)):
            return entry
    return None


def _works(entry: Entry) -> str:
    lines = [entry.key, f"    {entry.description}" if entry.description else ""]
    lines.append(f"    value: {entry.type}{f', {entry.bounds}' if entry.bounds else ''}")
    lines.append(f"    default: {entry.default}" if entry.default else "")
    spellings = [r.key for r in rows() if r.status == "alias" and entry.key in r.to.split(" and ")]
    lines.append(f"    also written: {', '.join(dict.fromkeys(spellings))}" if spellings else "")
    return "\n".join(filter(None, lines))


def _told(key: str, row: KeyStatus) -> str:
    if row.status != "alias":
        off = f"\n    accepted with: null, {row.off.replace('|', ', ')}" if row.off else ""
        return f"{key} {_SAYS[row.status]}.\n    {row.note}{off}"
    targets = row.targets(tuple(key.split(".")))
    about = (_exact(target) for target in targets)
    return "\n\n".join((f"{key} is read as {' and '.join(targets)}. {row.note}", *filter(None, about)))


def _names() -> list[str]:
    return [*(entry.key for entry in entries()), *(row.key for row in rows())]


def _matching(part: str) -> Iterator[str]:
    """Keys in the block ``part``, matching it as a pattern, or containing it."""
    names = _names()
    if part.replace("*", "") == "":
        yield from names
    elif any(sign in part for sign in "*?["):
        yield from (name for name in names if any(fnmatchcase(name, p) for p in (part, f"*.{part}")))
    else:
        inside = [name for name in names if name.startswith(f"{part}.")]
        yield from inside or (name for name in names if part.lower() in name.lower())


def _line(key: str) -> str:
    row = lookup(tuple(key.split(".")))
    if row is None:
        entry = _entry(key)
        return f"{key}: {entry.description if entry is not None else ''}".rstrip(": ")
    if row.status == "alias":
        return f"{key}: read as {row.to}"
    return f"{key}: {_SAYS[row.status]}. {row.note}"
