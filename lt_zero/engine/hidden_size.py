"""The hidden size of a model, from which bucket sizes that are "auto" are computed."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from lt_zero.common.errors import ConfigError, Problem
from lt_zero.config import ZeroConfig
from lt_zero.config.auto import resolve_sizes


def hidden_size(root: nn.Module) -> tuple[int, str]:
    """The width of the residual stream, and how it was found. Only shapes of parameters are read.

    It is ``hidden_size``, or the largest of ``hidden_sizes``, of the ``config`` or ``config.text_config`` of the model
    or of one of its modules, as in transformers. Otherwise it is the most frequent dimension of matrices (embeddings
    and feed-forward layers have one other dimension, attention none); of equally frequent ones the smallest.

    Raises:
        ConfigError: there is no matrix.
    """
    for name, module in root.named_modules():
        config = getattr(module, "config", None)
        for place in (config, getattr(config, "text_config", None)):
            found = _of(place)
            if found is not None:
                return found, f"{name + '.' if name else ''}config of the model"
    sizes = Counter(size for p in root.parameters() if p.dim() == 2 for size in set(p.shape) if size > 1)
    if not sizes:
        raise ConfigError(
            [
                Problem(
                    "zero_optimization.reduce_bucket_size",
                    'A bucket size is "auto", and the model has neither config.hidden_size nor a matrix. Write numbers '
                    "for zero_optimization.reduce_bucket_size, stage3_prefetch_bucket_size and "
                    "stage3_param_persistence_threshold.",
                )
            ]
        )
    most = max(sizes.values())
    return min(size for size, count in sizes.items() if count == most), "the size that most matrices have"


def with_sizes(config: ZeroConfig, root: nn.Module) -> ZeroConfig:
    """The configuration with bucket sizes that were "auto" resolved for this model.

    Raises:
        ConfigError: there is no matrix.
    """
    return resolve_sizes(config, lambda: hidden_size(root))


def _of(config: Any) -> int | None:
    if config is None:
        return None
    values: Any = config if isinstance(config, dict) else _Attributes(config)
    size, sizes = values.get("hidden_size"), values.get("hidden_sizes")
    if isinstance(size, int) and size > 0:
        return size
    if isinstance(sizes, (list, tuple)) and sizes and all(isinstance(s, int) for s in sizes):
        return int(max(sizes))
    return None


class _Attributes:
    def __init__(self, config: Any) -> None:
        self._config = config

    def get(self, name: str) -> Any:
        return getattr(self._config, name, None)
