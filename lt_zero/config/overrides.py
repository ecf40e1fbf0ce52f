"""Overrides in Hydra's grammar, ``a.b=value``, on top of a configuration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lt_zero.common.errors import ConfigError, Mark, Path, Problem, dotted
from lt_zero.config import groups
from lt_zero.config.read.source import DEEPEST, Budget, Source, leaves, mapped, names_secret, secrets

if TYPE_CHECKING:
    from lt_zero.common.compat import HydraOverride

_WORD = re.compile(r"[\w.-]+")


class _Refused(Exception):
    """An override that cannot be applied; holds the reason."""


def apply(source: Source, overrides: Sequence[str]) -> Source:
    """``source`` with ``overrides`` applied in their order; ``source`` itself stays as it is.

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
        raise ConfigError(
            f'overrides is a list of texts, not the text {overrides!r:.80}; write ["{_shown(overrides)}"]'
        )
    if not overrides:
        return source
    edit = _Edit(source)
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
    return edit.result()


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
    return (
        is_word and override.kind != "delete" and "." not in override.key and groups.options(override.key) is not None
    )


class _Edit:
    """A configuration while overrides change it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.values: dict[str, Any] = mapped(source.values)
        self.marks = dict(source.marks)
        self.secret = set(source.secret)

    def result(self) -> Source:
        budget = Budget("the configuration with overrides")
        for path, _ in leaves(self.values):
            budget.take(len(path))
        secret = self.secret | secrets(self.values)
        return Source(self.values, self.marks, self.source.name, list(self.source.notices), secret)

    def apply(self, override: HydraOverride, mark: Mark) -> None:
        if _is_choice(override):
            for key, value in groups.load(override.key, override.value).items():
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
                self.forget((key, inner))

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
            held = "another value" if self.source.hides(path) else repr(block[last])
            raise _Refused(f"{override.key} is not deleted: it is {held}; write ~{override.key} for any value")
        del block[last]
        self.forget(tuple(override.key.split(".")))

    def enter(self, holder: Any, key: str, path: Path, mark: Mark) -> tuple[Any, Path]:
        """The block ``key`` of ``holder``, made if it is missing; what is no block is replaced, as in Hydra."""
        index = _index(holder, key, path)
        inside = (*path, index)
        value = holder.get(index) if isinstance(holder, dict) else holder[index]
        if isinstance(value, str) and "${" in value:
            raise _Refused(f"{dotted(inside)} is {value!r}, which has no keys of its own; override what it names")
        if not isinstance(value, (dict, list)):
            self.forget(inside)
            value = holder[index] = {}
            self.marks[inside] = mark
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
            self.marks.setdefault(path, mark)
            for inner, item in value.items():
                self.merge(there, inner, item, (*path, inner), mark)
            return
        self.forget(path)
        holder[key] = mapped(value)
        self.marks[path] = mark
        for inner_path in _inside(value, path):
            self.marks[inner_path] = mark

    def forget(self, path: Path) -> None:
        """Marks and secrets of what was there."""
        self.marks = {at: mark for at, mark in self.marks.items() if at[: len(path)] != path}
        self.secret = {at for at in self.secret if at[: len(path)] != path}


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
