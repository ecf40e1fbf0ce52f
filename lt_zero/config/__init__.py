"""What a user can set, validated once."""

from lt_zero.common.errors import ConfigError
from lt_zero.config.load import ZeroConfig
from lt_zero.config.schema import ZeroOptimization

__all__ = ["ConfigError", "ZeroConfig", "ZeroOptimization"]
