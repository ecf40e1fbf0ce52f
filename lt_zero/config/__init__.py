"""What a user can set, validated once."""

from lt_zero.config.schema import ZeroConfig, ZeroOptimization

__all__ = ["ZeroConfig", "ZeroOptimization"]
