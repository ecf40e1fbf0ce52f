"""Overrides in Hydra's grammar, ``a.b=value``, on top of a configuration.

A folder of ``lt_zero.conf`` is a group of options, ``group=option``; a YAML file in it is an option.
"""

from __future__ import annotations

import difflib
import importlib.resources
import re
from collections.abc import Sequence
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

from lt_zero.common.errors import ConfigError, Mark, Path, Problem, dotted
from lt_zero.config.document import DEEPEST, Document, mapped, names_secret, secrets, without_told
from lt_zero.config.files import parse_yaml

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from lt_zero.common.compat.of_hydra import HydraOverride

_WORD = re.compile(r"[\w.-]+")


def apply(document: Document, overrides: Sequence[str]) -> Document:
    """``document`` with ``overrides`` applied in their order; ``document`` itself stays as it is.

    - ``a.b=value`` sets, and creates what is missing: a file names few of the keys that exist. A mapping, ``a={b: 1}``,
      is merged into the one that is there; a list replaces. ``betas.0=0.8`` sets an item that is there.
    - ``+a.b=value`` wants the key to be new (or null, or the value to be a mapping or list); ``++a.b=value`` does not
      care. ``~a.b`` deletes a key that must be there, ``~a.b=value`` only if it has this value.
    - ``group=option`` merges the option's YAML (``lt_zero.conf``): its keys replace those of the file, other keys of
      the file's block stay, but for ``params`` and ``param_groups`` of another ``type``. As in Hydra, choices of groups
      come before all values, wherever they stand. The group must exist and the value be a bare word;
      ``group='text'``, ``group=true`` and ``group={...}`` are values.

    Raises:
        ConfigError: bad syntax, several values (``a=1,2``), settings of Hydra itself, unknown options, keys that ``+``
            finds or ``~`` does not; of all overrides at once.
    """
    if isinstance(overrides, str):
        text = f"overrides is a list of texts, not the text {overrides!r:.80}"
        raise ConfigError(f'{text}; write ["{_shown(overrides)}"]')
    if not isinstance(overrides, Sequence) and overrides is not None:
        raise ConfigError(f'overrides is a list of texts, not {type(overrides).__name__}; write ["key=value"]')
    if not overrides:
        return document
    document = document.copy()
    problems: list[Problem] = []
    parsed: list[HydraOverride] = []
    for text in overrides:
        try:
            parsed.append(_parsed(text))
        except ConfigError as error:
            problems.append(Problem("", str(error), Mark(f"override {_shown(text)!r}")))
    for override in sorted(parsed, key=lambda entry: not _is_choice(entry)):  # stable
        mark = Mark(f"override {_shown(override.text)!r}")
        try:
            _apply(document, override, mark)
        except ConfigError as error:
            problems += [Problem(override.key.replace("/", "."), str(problem), mark) for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    document.secret |= secrets(document.values)
    return document


def _shown(text: object) -> str:
    """The override for messages; without its value if that is secret."""
    shown = text if isinstance(text, str) else repr(text)
    if names_secret(shown) and (separator := re.search("[=:]", shown)):
        return f"{shown[: separator.end()]}..."
    return shown if len(shown) <= 120 else f"{shown[:117]}..."


def _parsed(text: object) -> HydraOverride:
    from lt_zero.common.compat.of_hydra import HydraSyntaxError, parse_override

    if not isinstance(text, str):
        raise ConfigError(f"an override is text, not {type(text).__name__}; write it as 'key=value'")
    if text.startswith("-"):
        raise ConfigError("an override is key=value, without - or -- before it")
    try:
        override = parse_override(text)
    except HydraSyntaxError as error:
        place = "" if error.column is None else f" at character {error.column + 1}"
        said = "" if names_secret(text) else f" ({error})"
        hint = _syntax_hint(text)
        raise ConfigError(f"bad syntax{place}{said}; {hint}") from None
    if override.key == "hydra" or override.key.startswith(("hydra.", "hydra/")):
        raise ConfigError("settings of Hydra itself belong to a program under @hydra.main; leave it out here")
    if override.is_sweep:
        raise ConfigError(f"one value only; sweeps need Hydra's --multirun. A list is {override.key}=[1,2]")
    if override.package is not None:
        raise ConfigError(
            f"@{override.package}: packages are Hydra's; write {override.key}=option, or the keys themselves"
        )
    if not override.key:
        raise ConfigError("the key before = is missing")
    return override


def _syntax_hint(text: str) -> str:
    key, equals, value = text.partition("=")
    key = without_told(key)
    if not equals:
        return f"write {key or 'key'}=value, or ~{key or 'key'} to delete it"
    if re.search(r"\[\w+\]", key):
        return "write items of lists with a point: betas.0=0.9"
    if re.search(r"\s", key):
        return "white space cannot stand before ="
    if value[:1] in ("'", '"', "[", "{"):
        return "close its quotes and brackets, and quote text with special characters in it"
    quoted = value.replace("'", "\\'")
    if names_secret(text) or len(text) > 80:
        return f"put the value in quotes: \"{key}='...'\""
    return f"text with special characters needs quotes, inside of those of the shell: \"{key}='{quoted}'\""


def _is_choice(override: HydraOverride) -> bool:
    is_word = isinstance(override.value, str) and not override.is_quoted and bool(_WORD.fullmatch(override.value))
    return is_word and override.kind != "delete" and "." not in override.key and group_options(override.key) is not None


def _apply(document: Document, override: HydraOverride, mark: Mark) -> None:
    if _is_choice(override):
        for key, option in group_values(override.key, override.value).items():
            there: Any = document.values.get(key)
            has_types = isinstance(there, dict) and isinstance(option, dict) and "type" in option
            if has_types and str(there.get("type")).lower() != str(option["type"]).lower():
                for inner in ("params", "param_groups"):  # they are another type's: Lamb's max_coeff is not AdamW's
                    there.pop(inner, None)
                    document.forget((key, inner))
            _merge(document, document.values, key, option, (key,), mark)
        return
    if "/" in override.key:
        raise ConfigError(f"there is no group {override.key}; keys are separated by points")
    *above, last = override.key.split(".")
    if override.kind == "delete":
        _delete(document, (*above, last), override)
        return
    if len(above) >= DEEPEST:
        raise ConfigError(f"the key has more than {DEEPEST} parts")
    holder: Any = document.values
    path: Path = ()
    for part in above:
        index = _index(holder, part, path)
        path = (*path, index)
        block = holder.get(index) if isinstance(holder, dict) else holder[index]
        if isinstance(block, str) and "${" in block:
            raise ConfigError(f"{dotted(path)} is {block!r}, which has no keys of its own; override what it names")
        if not isinstance(block, (dict, list)):  # a missing block is created, and a value replaced by one, as in Hydra
            document.forget(path)
            block = holder[index] = {}
            document.marks[path] = mark
        holder = block
    index = _index(holder, last, path)
    path = (*path, index)
    is_there = isinstance(holder, list) or holder.get(index) is not None
    if override.kind == "add" and is_there and not isinstance(override.value, (dict, list)):
        plain, either = _shown(override.text[1:]), _shown(override.text)
        raise ConfigError(f"{dotted(path)} is there already; write {plain} to change it, +{either} for either")
    _merge(document, holder, index, override.value, path, mark)


def _delete(document: Document, path: Path, override: HydraOverride) -> None:
    block = document.get(path[:-1])
    if isinstance(block, list):
        raise ConfigError("items of a list cannot be deleted; write the whole list")
    if not isinstance(block, dict) or path[-1] not in block:
        near = f"; there are {', '.join(block)}" if isinstance(block, dict) and block else ""
        raise ConfigError(f"{override.key} cannot be deleted: it is not there{near}")
    value = block[path[-1]]
    if override.has_value and override.value != value:
        held = "another value" if document.hides(path) else repr(value)
        raise ConfigError(f"{override.key} is not deleted: it is {held}; write ~{override.key} for any value")
    document.pop(path)
    document.forget(path)


def _index(holder: Any, key: str, path: Path) -> str | int:
    if isinstance(holder, dict):
        return key
    if not re.fullmatch(r"[0-9]{1,6}", key) or int(key) >= len(holder):
        raise ConfigError(f"{dotted(path)} is a list of {len(holder)}, without item {key}; write the whole list")
    return int(key)


def _merge(document: Document, holder: Any, key: str | int, value: Any, path: Path, mark: Mark) -> None:
    """Set ``holder[key]``; a mapping is merged into one that is there."""
    there = holder.get(key) if isinstance(holder, dict) else holder[key]
    if not (isinstance(there, dict) and isinstance(value, dict)):
        document.forget(path)
        there = holder[key] = {} if isinstance(value, dict) else mapped(value)
    document.marks.setdefault(path, mark)
    items = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
    for inner, item in items.items():
        if isinstance(value, dict) and not isinstance(inner, str):
            raise ConfigError(f"the key {inner!r} is not text; write it in quotes")
        _merge(document, there, inner, item, (*path, inner), mark)


# ---- groups ----------------------------------------------------------------------------------------------------------

_PACKAGE = re.compile(r"^[ \t]*#\s*@package\s+(\S+)\s*$", re.MULTILINE)


def group_folder() -> Traversable | None:
    """The folder of the groups: ``lt_zero.conf`` if installed, ``conf`` next to the package in a checkout."""
    try:
        return importlib.resources.files("lt_zero.conf")
    except ModuleNotFoundError:
        root = File(__file__).parents[2]
        is_checkout = (root / "pyproject.toml").is_file()  # site-packages/conf would belong to another package
        return root / "conf" if is_checkout and (root / "conf").is_dir() else None


def group_options(group: str) -> list[str] | None:
    """Names of a group's options; None if the group does not exist. ``a/b`` is a nested group."""
    found = group_folder()
    for part in group.split("/"):
        if found is None or not re.fullmatch(r"\w[\w-]*", part):
            return None
        found = found / part
        if not found.is_dir():
            return None
    names = sorted(entry.name for entry in found.iterdir()) if found is not None else []
    return [name.removesuffix(".yaml") for name in names if name.endswith(".yaml")]


def group_values(group: str, option: str) -> dict[str, Any]:
    """Values of an option, as a mapping from the top level.

    They go under the group's name, or where the file's header says: ``# @package _global_`` is the top level.

    Raises:
        ConfigError: the option does not exist (names the nearest), or its file cannot be read.
    """
    known = group_options(group) or []
    if option not in known:
        close = difflib.get_close_matches(option, known, 1, 0.4)
        near = f"; did you mean {group}={close[0]}?" if close else ""
        options = ", ".join(known) or "(none)"
        raise ConfigError(f"{group}={option}: the group {group} has the options {options}{near}")
    found = group_folder()
    assert found is not None  # options were found in it
    text = found.joinpath(*group.split("/"), f"{option}.yaml").read_text(encoding="utf-8")
    values = parse_yaml(text, f"{group}/{option}.yaml").values
    if "defaults" in values:
        raise ConfigError(f"{group}={option}: its file has a defaults list, which only Hydra composes; use hydra.main")
    header = _PACKAGE.search(text)
    package = header[1] if header is not None else "_group_"
    parts = group.split("/") if package == "_group_" else package.split(".") if package != "_global_" else []
    for part in reversed(parts):
        values = {part: values}
    return values
