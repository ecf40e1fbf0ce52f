"""The ready-made blocks of ``lt_zero.conf``: a folder is a group, a YAML file in it an option."""

from __future__ import annotations

import difflib
import importlib.resources
import re
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from lt_zero.common.errors import ConfigError
from lt_zero.config.read import yaml_text

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_PACKAGE = re.compile(r"#\s*@package\s+(\S+)\s*")


def folder() -> Traversable | None:
    """The folder of the groups: ``lt_zero.conf`` if installed, ``conf`` next to the package in a checkout."""
    try:
        return importlib.resources.files("lt_zero.conf")
    except ModuleNotFoundError:
        root = FilePath(__file__).parents[2]
        is_checkout = (root / "pyproject.toml").is_file()  # site-packages/conf would belong to another package
        return root / "conf" if is_checkout and (root / "conf").is_dir() else None


def options(group: str) -> list[str] | None:
    """Names of a group's options; None if the group does not exist. ``a/b`` is a nested group."""
    found = folder()
    for part in group.split("/"):
        if found is None or not re.fullmatch(r"\w[\w-]*", part):
            return None
        found = found / part
        if not found.is_dir():
            return None
    names = sorted(entry.name for entry in found.iterdir()) if found is not None else []
    return [name.removesuffix(".yaml") for name in names if name.endswith(".yaml")]


def load(group: str, option: str) -> dict[str, Any]:
    """Values of an option, as a mapping from the top level.

    They go under the group's name, or where the file's header says: ``# @package _global_`` is the top level.

    Raises:
        ConfigError: the option does not exist (names the nearest), or its file cannot be read.
    """
    known = options(group) or []
    if option not in known:
        close = difflib.get_close_matches(option, known, 1, 0.4)
        nearest = f"; did you mean {group}={close[0]}?" if close else ""
        raise ConfigError(
            f"{group}={option}: the group {group} has the options {', '.join(known) or '(none)'}{nearest}"
        )
    found = folder()
    assert found is not None  # options were found in it
    for part in (*group.split("/"), f"{option}.yaml"):
        found = found / part
    text = found.read_text(encoding="utf-8")
    values = yaml_text.parse(text, f"{group}/{option}.yaml").values
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
