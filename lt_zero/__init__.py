"""ZeRO for PyTorch Lightning: sharded training without changing the module."""

from lightning.pytorch.strategies import StrategyRegistry

from lt_zero.build import shard
from lt_zero.checkpoint.errors import CheckpointError
from lt_zero.checkpoint.export import export
from lt_zero.config import ZeroConfig
from lt_zero.core.optimizer import ShardedOptimizer
from lt_zero.core.values import gathered
from lt_zero.loading import load_from_checkpoint
from lt_zero.planning import NotEnoughMemory, Sizes, estimate
from lt_zero.precision import ZeroPrecision
from lt_zero.strategy import ZeroStrategy

__all__ = [
    "CheckpointError",
    "NotEnoughMemory",
    "ShardedOptimizer",
    "Sizes",
    "ZeroConfig",
    "ZeroPrecision",
    "ZeroStrategy",
    "estimate",
    "export",
    "gathered",
    "load_from_checkpoint",
    "shard",
]
__version__ = "0.1.0"

ZeroStrategy.register_strategies(StrategyRegistry)
