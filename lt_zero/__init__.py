"""ZeRO for PyTorch Lightning: sharded training without changing the module."""

from lt_zero.config import ZeroConfig
from lt_zero.core.build import shard
from lt_zero.core.optimizer import ShardedOptimizer
from lt_zero.core.values import gathered

__all__ = ["ShardedOptimizer", "ZeroConfig", "gathered", "shard"]
__version__ = "0.1.0"
