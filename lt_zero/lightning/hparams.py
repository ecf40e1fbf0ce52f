"""Values of a module or its hparams that resolve "auto": ``lr``, ``weight_decay``, ``warmup_steps``, ..."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from lt_zero.common.errors import ConfigError


def find_value(module: pl.LightningModule, names: Sequence[str]) -> tuple[Any, str] | None:
    """The number or list of numbers under the first of ``names`` that exists, and its source; hparams first.

    Accepts numbers written as text and 0D tensors. Skips methods, layers, parameters and booleans of these names.

    Raises:
        ConfigError: the value is of another type, or a property raised.
    """
    for place, value in _places(module, names):
        if value is None or isinstance(value, (bool, nn.Module, nn.Parameter)) or callable(value):
            continue
        if (number := _plain(value)) is None:
            raise ConfigError(
                f'{place}={value!r:.80} would resolve "auto", but is not a number. Make it one, or write a value '
                'instead of "auto".'
            )
        return number, place
    return None


def _places(module: pl.LightningModule, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for name in names:
        yield _read(f"{type(module).__name__}.hparams.{name}", module.hparams.get, name)
    for name in names:
        yield _read(f"{type(module).__name__}.{name}", lambda attribute: getattr(module, attribute, None), name)


def _read(place: str, get: Any, name: str) -> tuple[str, Any]:
    try:
        return place, get(name)
    except Exception as error:  # a user's property or an interpolation of OmegaConf
        raise ConfigError(
            f'{place} would resolve "auto", but reading it raised {type(error).__name__}: {error}. Correct it, or '
            'write a value instead of "auto".'
        ) from error


def _plain(value: Any) -> Any:
    """Convert to a Python number or list of numbers; None if it is neither."""
    if isinstance(value, Tensor) and value.is_meta:
        return None
    if not isinstance(value, (int, float)) and hasattr(value, "tolist"):  # tensors and numpy scalars
        value = value.tolist()
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
        return int(value) if math.isfinite(value) and value.is_integer() else value
    if isinstance(value, Sequence):
        entries = [_plain(entry) for entry in value]
        return entries if all(isinstance(entry, (int, float)) for entry in entries) else None
    return value if isinstance(value, (int, float)) and not isinstance(value, (bool, Mapping)) else None
