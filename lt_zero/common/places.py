"""Imports what features have, which may not be installed."""

from __future__ import annotations

import importlib
from typing import Any

from lt_zero.common.errors import ConfigError


def load(place: str, key: str, feature: str) -> Any:
    """Import what a feature has.

    Args:
        place: ``module:name`` of it.
        key: of the configuration, by which it is asked for.
        feature: name of the feature, in texts.

    Raises:
        ConfigError: the feature is not installed; names the key.
    """
    module, _, name = place.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the feature is there, and lacks a library
        raise ConfigError.about(
            key,
            f"{key}: {feature} is not installed, there is no module {error.name}. Install lt_zero with it, or remove "
            "the key.",
        ) from error
    return getattr(found, name)
