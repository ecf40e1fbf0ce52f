"""Overrides in Hydra's grammar, ``a.b=value``, on top of a configuration, and the groups that they choose from.

A folder of ``lt_zero.conf`` is a group, a YAML file in it an option.
"""

from __future__ import annotations

import difflib
import importlib.resources
import re
from collections.abc import Sequence
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

from lt_zero.common.errors import ConfigError, Mark, Path, Problem, dotted
from lt_zero.config.document import DEEPEST, Document, mapped, names_secret, secrets
from lt_zero.config.text import parse_yaml

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from lt_zero.common.compat import HydraOverride

_WORD = re.compile(r"[\w.-]+")


class _Refused(Exception):
    """An override that cannot be applied; holds the reason."""


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
    if not overrides:
        return document
    edit = _Edit(document)
    problems: list[Problem] = []
    parsed: list[HydraOverride] = []
    for text in overrides:
        try:
            parsed.append(_parsed(text))
        except _Refused as refusal:
            problems.append(Problem("", str(refusal), Mark(f"override {_shown(text)!r}")))
    for override in sorted(parsed, key=lambda entry: not _is_choice(entry)):  # stable
        key = override.key.replace("/", ".")
        mark = Mark(f"override {_shown(override.text)!r}")
        try:
            edit.apply(override, mark)
        except _Refused as refusal:
            problems.append(Problem(key, str(refusal), mark))
        except ConfigError as error:
            problems += [Problem(key, str(problem), mark) for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    edit.document.secret |= secrets(edit.values)
    return edit.document


def _shown(text: object) -> str:
    """The override for messages; without its value if that is secret."""
    shown = text if isinstance(text, str) else repr(text)
    key, equals, _ = shown.partition("=")
    if names_secret(shown):
        return f"{key}{equals}..."
    return shown if len(shown) <= 120 else f"{shown[:117]}..."


def _parsed(text: object) -> HydraOverride:
    from lt_zero.common.compat import HydraSyntaxError, parse_override

    if not isinstance(text, str):
        raise _Refused(f"an override is text, not {type(text).__name__}; write it as 'key=value'")
    if text.startswith("-"):
        raise _Refused("an override is key=value, without - or -- before it")
    try:
        override = parse_override(text)
    except HydraSyntaxError as error:
        place = "" if error.column is None else f" at character {error.column + 1}"
        said = "" if names_secret(text) else f" ({error})"
        hint = _syntax_hint(text)
        raise _Refused(f"bad syntax{place}{said}; {hint}") from None
    if override.key == "hydra" or override.key.startswith(("hydra.", "hydra/")):
        raise _Refused("settings of Hydra itself belong to a program under @hydra.main; leave it out here")
    if override.is_sweep:
        raise _Refused(f"one value only; sweeps need Hydra's --multirun. A list is {override.key}=[1,2]")
    if override.package is not None:
        raise _Refused(
            f"@{override.package}: packages are Hydra's; write {override.key}=option, or the keys themselves"
        )
    if not override.key:
        raise _Refused("the key before = is missing")
    return override


def _syntax_hint(text: str) -> str:
    key, equals, value = text.partition("=")
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


class _Edit:
    """A configuration while overrides change it."""

    def __init__(self, document: Document) -> None:
        self.document = document.copy()
        self.values = self.document.values

    def apply(self, override: HydraOverride, mark: Mark) -> None:
        if _is_choice(override):
            for key, value in group_values(override.key, override.value).items():
                self.leave_params(key, value)
                self.merge(self.values, key, value, (key,), mark)
            return
        if "/" in override.key:
            raise _Refused(f"there is no group {override.key}; keys are separated by points")
        *above, last = override.key.split(".")
        _check_keys(override.value)
        if override.kind == "delete":
            self.delete(self.find(above), last, override)
            return
        if len(above) >= DEEPEST:
            raise _Refused(f"the key has more than {DEEPEST} parts")
        holder: Any = self.values
        path: Path = ()
        for part in above:
            holder, path = self.enter(holder, part, path, mark)
        self.set(holder, last, path, override, mark)

    def leave_params(self, key: str, option: Any) -> None:
        """Parameters of one type mean nothing to another: Lamb's max_coeff to AdamW."""
        there = self.values.get(key)
        if not (isinstance(there, dict) and isinstance(option, dict) and "type" in option):
            return
        if str(there.get("type")).lower() == str(option["type"]).lower():
            return
        for inner in ("params", "param_groups"):
            if there.pop(inner, None) is not None:
                self.document.forget((key, inner))

    def find(self, keys: Sequence[str]) -> Any:
        """The block at ``keys``, None if there is none."""
        block: Any = self.values
        for key in keys:
            block = block.get(key) if isinstance(block, dict) else None
        return block

    def delete(self, block: Any, last: str, override: HydraOverride) -> None:
        if isinstance(block, list):
            raise _Refused("items of a list cannot be deleted; write the whole list")
        if not isinstance(block, dict) or last not in block:
            near = f"; there are {', '.join(block)}" if isinstance(block, dict) and block else ""
            raise _Refused(f"{override.key} cannot be deleted: it is not there{near}")
        if override.has_value and override.value != block[last]:
            path = tuple(override.key.split("."))
            held = "another value" if self.document.hides(path) else repr(block[last])
            raise _Refused(f"{override.key} is not deleted: it is {held}; write ~{override.key} for any value")
        del block[last]
        self.document.forget(tuple(override.key.split(".")))

    def enter(self, holder: Any, key: str, path: Path, mark: Mark) -> tuple[Any, Path]:
        """The block ``key`` of ``holder``, made if it is missing; what is no block is replaced, as in Hydra."""
        index = _index(holder, key, path)
        inside = (*path, index)
        value = holder.get(index) if isinstance(holder, dict) else holder[index]
        if isinstance(value, str) and "${" in value:
            raise _Refused(f"{dotted(inside)} is {value!r}, which has no keys of its own; override what it names")
        if not isinstance(value, (dict, list)):
            self.document.forget(inside)
            value = holder[index] = {}
            self.document.marks[inside] = mark
        return value, inside

    def set(self, holder: Any, key: str, path: Path, override: HydraOverride, mark: Mark) -> None:
        index = _index(holder, key, path)
        full = (*path, index)
        there = isinstance(holder, list) or holder.get(index) is not None
        if override.kind == "add" and there and not isinstance(override.value, (dict, list)):
            plain = _shown(override.text[1:])
            raise _Refused(
                f"{dotted(full)} is there already; write {plain} to change it, +{_shown(override.text)} for either"
            )
        self.merge(holder, index, override.value, full, mark)

    def merge(self, holder: Any, key: str | int, value: Any, path: Path, mark: Mark) -> None:
        """Set ``holder[key]``; a mapping is merged into one that is there."""
        there = holder.get(key) if isinstance(holder, dict) else holder[key]
        if isinstance(there, dict) and isinstance(value, dict):
            self.document.marks.setdefault(path, mark)
            for inner, item in value.items():
                self.merge(there, inner, item, (*path, inner), mark)
            return
        self.document.forget(path)
        holder[key] = mapped(value)
        self.document.marks[path] = mark
        for inner_path in _inside(value, path):
            self.document.marks[inner_path] = mark


def _index(holder: Any, key: str, path: Path) -> str | int:
    if isinstance(holder, dict):
        return key
    if not re.fullmatch(r"[0-9]{1,6}", key) or int(key) >= len(holder):
        raise _Refused(f"{dotted(path)} is a list of {len(holder)}, without item {key}; write the whole list")
    return int(key)


def _inside(value: Any, path: Path) -> list[Path]:
    """Paths of all keys and items in ``value``."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    below = [((*path, key), item) for key, item in pairs]
    return [found for inner, item in below for found in (inner, *_inside(item, inner))]


def _check_keys(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise _Refused(f"the key {key!r} is not text; write it in quotes")
            _check_keys(item)
    elif isinstance(value, list):
        for item in value:
            _check_keys(item)


# ---- groups ----------------------------------------------------------------------------------------------------------

_PACKAGE = re.compile(r"#\s*@package\s+(\S+)\s*")


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
        nearest = f"; did you mean {group}={close[0]}?" if close else ""
        raise ConfigError(
            f"{group}={option}: the group {group} has the options {', '.join(known) or '(none)'}{nearest}"
        )
    found = group_folder()
    assert found is not None  # options were found in it
    for part in (*group.split("/"), f"{option}.yaml"):
        found = found / part
    text = found.read_text(encoding="utf-8")
    values = parse_yaml(text, f"{group}/{option}.yaml").values
    if "defaults" in values:
        raise ConfigError(f"{group}={option}: its file has a defaults list, which only Hydra composes; use hydra.main")
    for part in reversed(_package(text, group)):
        values = {part: values}
    return values


def _package(text: str, group: str) -> list[str]:
    lines = (line.strip() for line in text.splitlines())
    headers = (found[1] for line in lines if line.startswith("#") and (found := _PACKAGE.fullmatch(line)))
    package = next(headers, "_group_")
    if package == "_global_":
        return []
    return (group.replace("/", ".") if package == "_group_" else package).split(".")
