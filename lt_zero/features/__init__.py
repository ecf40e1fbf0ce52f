"""Features of a run beside sharding: each folder is one, and can be taken out. Here is the table of them."""

from __future__ import annotations

import importlib
import os
from typing import Any

from lt_zero.common.errors import ConfigError, missing_part
from lt_zero.core.feature import Entry, Feature, registered

_TABLE = (
    Entry(
        name="computation in tiles",
        place="lt_zero.features.tiles.feature:Tiles",
        key="long_sequences",
        asked=lambda config: config.long_sequences.tiles,
    ),
    Entry(
        name="the record of a run",
        place="lt_zero.tools.compare.feature:Record",
        key="LT_ZERO_RECORD",
        asked=lambda config: bool(os.environ.get("LT_ZERO_RECORD")),
    ),
    Entry(
        name="the gradient noise scale",
        place="lt_zero.tools.gradient_noise.feature:Noise",
        key="gradient_noise_scale",
        asked=lambda config: config.gradient_noise_scale,
    ),
)


def features_of(config: Any) -> list[Feature]:
    """The features that a configuration asks for, in the order of the table; those of other packages come last.

    Raises:
        ConfigError: one is not installed; names its key.
    """
    return [_load(entry)(config) for entry in (*_TABLE, *registered()) if entry.asked(config)]


def _load(entry: Entry) -> type[Feature]:
    """Import the class of a feature; raise ConfigError if it is not installed."""
    module, _, name = entry.place.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (missing := missing_part(module, error)) is None:
            raise
        text = f"{entry.key}: {entry.name} is not installed, there is no module {missing}. Install lt_zero with it, or "
        raise ConfigError.about(entry.key, f"{text}remove {entry.key}.") from error
    loaded: type[Feature] = getattr(found, name)
    return loaded
