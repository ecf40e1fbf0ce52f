"""Imports what features have, which may not be installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from lt_zero.common.errors import ConfigError, missing_part


class NotInstalled(ModuleNotFoundError):
    """A public name or a command is of a feature that is not installed."""


def is_there(module: str) -> bool:
    """True if a module is installed, whose package is."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None  # a folder that was taken out may leave bytecode behind


def import_public(module: str, name: str) -> ModuleType:
    """Import the module of a public name or a command.

    Args:
        module: to import.
        name: of what is asked for, in texts.

    Raises:
        NotInstalled: its feature is not installed; names both.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (missing := missing_part(module, error)) is None:
            raise  # the feature is there, and lacks a library
        text = f"{name} is not installed: there is no module {missing}. Install lt_zero with it."
        raise NotInstalled(text, name=missing) from None


def public_names(package: str, modules: Mapping[str, str], shown: str = "") -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose public names are imported when they are first used.

    Args:
        package: its name.
        modules: the module of each name.
        shown: the package in errors of names that are not installed; "": its name.
    """

    def import_name(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_public(modules[name], f"{shown or package}.{name}"), name)
        setattr(sys.modules[package], name, found)
        return found

    return import_name


def load_if_installed(place: str) -> Any:
    """Import ``module:name`` of a tool that lengthens a message; return None if the tool is not installed."""
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if missing_part(module, error) is None:
            raise  # the tool is there, and lacks a library
        return None


def load(place: str, key: str, feature: str) -> Any:
    """Import what a feature has.

    Args:
        place: ``module:name`` of it.
        key: of the configuration, or variable of the environment, by which it is asked for.
        feature: name of the feature, in texts.

    Raises:
        ConfigError: the feature is not installed, or its module lacks the name; names the key.
    """
    module, _, name = place.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (missing := missing_part(module, error)) is None:
            raise  # the feature is there, and lacks a library
        text = f"{key}: {feature} is not installed, there is no module {missing}. Install lt_zero with it, or remove"
        raise ConfigError.about(key, f"{text} {key}.") from error
    if not hasattr(found, name):
        text = (
            f"{key}: {feature} is to be at {place!r}, and {module} has no {name or 'name after a colon'}. Correct the"
        )
        raise ConfigError.about(key, f"{text} place, or install a version that has it.")
    return getattr(found, name)
