"""The configuration: everything that a user can set, validated once."""

from lt_zero.common.errors import ConfigError
from lt_zero.config.blocks import ZeroOptimization
from lt_zero.config.load import ZeroConfig

__all__ = ["ConfigError", "ZeroConfig", "ZeroOptimization"]
