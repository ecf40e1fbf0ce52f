"""ZeRO for PyTorch Lightning: sharded training without changing the module."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lt_zero.build import shard
    from lt_zero.checkpoint.export import export
    from lt_zero.common.errors import CheckpointError
    from lt_zero.config import ConfigError, ZeroConfig
    from lt_zero.config.blocks.activation import ActivationCheckpointing
    from lt_zero.engine.full_params import gathered
    from lt_zero.lightning.load import load_from_checkpoint
    from lt_zero.lightning.precision import ZeroPrecision
    from lt_zero.lightning.strategy import ZeroStrategy
    from lt_zero.memory import NotEnoughMemory, Sizes, estimate
    from lt_zero.step.sharded_optimizer import ShardedOptimizer

__all__ = [
    "ActivationCheckpointing",
    "CheckpointError",
    "ConfigError",
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

# Imported when it is asked for: the command line starts in half the time, and in less memory, without Lightning.
_HOMES = {
    "ActivationCheckpointing": "config.blocks.activation",
    "CheckpointError": "common.errors",
    "ConfigError": "config",
    "NotEnoughMemory": "memory",
    "ShardedOptimizer": "step.sharded_optimizer",
    "Sizes": "memory",
    "ZeroConfig": "config",
    "ZeroPrecision": "lightning.precision",
    "ZeroStrategy": "lightning.strategy",
    "estimate": "memory",
    "export": "checkpoint.export",
    "gathered": "engine.full_params",
    "load_from_checkpoint": "lightning.load",
    "shard": "build",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def _is_command() -> bool:
    """Whether this process is the command ``lt-zero``, which needs no strategies."""
    program = sys.argv[0].replace("\\", "/").rsplit("/", 1)[-1] if sys.argv else ""
    return program in ("lt-zero", "lt-zero.exe") or sys.orig_argv[1:3] == ["-m", f"{__name__}.cli"]


if not _is_command():
    from lightning.pytorch.strategies import StrategyRegistry

    from lt_zero.lightning.strategy import ZeroStrategy

    ZeroStrategy.register_strategies(StrategyRegistry)  # the names zero_1, zero_2, ... exist after the import
