"""Features of a run beside sharding: each folder is one, and can be taken out. Here is the table of them."""

from __future__ import annotations

import importlib
from typing import Any

from lt_zero.common.errors import ConfigError
from lt_zero.core.feature import Entry, Feature, registered

_TABLE = (
    Entry(
        name="computation in tiles",
        place="lt_zero.features.tiles.feature:Tiles",
        key="long_sequences",
        asked=lambda config: config.long_sequences.tiles,
    ),
)


def features_of(config: Any) -> list[Feature]:
    """The features that a configuration asks for, in the order of the table; those of other packages come last.

    Raises:
        ConfigError: one is not installed; names its key.
    """
    return [load(entry)(config) for entry in (*_TABLE, *registered()) if entry.asked(config)]


def load(entry: Entry) -> type[Feature]:
    """Import the class of a feature.

    Raises:
        ConfigError: it is not installed; names the key.
    """
    module, _, name = entry.place.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the feature is there, and lacks a library
        raise ConfigError.about(
            entry.key,
            f"{entry.key}: {entry.name} is not installed, there is no module {error.name}. Install lt_zero with it, or "
            "remove the key.",
        ) from error
    loaded: type[Feature] = getattr(found, name)
    return loaded
