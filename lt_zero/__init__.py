"""ZeRO for PyTorch Lightning: sharded training without changing the module."""

from __future__ import annotations

import importlib
import itertools
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from lt_zero.common.errors import BLOCK_CHECKS

if TYPE_CHECKING:
    from lt_zero.build import shard as shard
    from lt_zero.checkpoint.export import export as export
    from lt_zero.common.errors import CheckpointError as CheckpointError
    from lt_zero.config import ConfigError as ConfigError
    from lt_zero.config import ZeroConfig as ZeroConfig
    from lt_zero.config.blocks import ActivationCheckpointing as ActivationCheckpointing
    from lt_zero.engine.full_params import gathered as gathered
    from lt_zero.engine.materialize import empty_weights as empty_weights
    from lt_zero.engine.synced import synced as synced
    from lt_zero.inference import inference as inference
    from lt_zero.lightning.load import load_from_checkpoint as load_from_checkpoint
    from lt_zero.lightning.precision import ZeroPrecision as ZeroPrecision
    from lt_zero.lightning.strategy import ZeroStrategy as ZeroStrategy
    from lt_zero.memory import NotEnoughMemory as NotEnoughMemory
    from lt_zero.memory import Sizes as Sizes
    from lt_zero.memory.estimate import estimate as estimate  # not of the package: there mypy takes it for the module
    from lt_zero.step.sharded_optimizer import ShardedOptimizer as ShardedOptimizer

__version__ = "0.1.0"

# Imported when first used: lightning.strategy and what it imports take about a second to load.
_MODULES = {
    "ActivationCheckpointing": "config.blocks",
    "CheckpointError": "common.errors",
    "ConfigError": "config",
    "NotEnoughMemory": "memory",
    "ShardedOptimizer": "step.sharded_optimizer",
    "Sizes": "memory",
    "ZeroConfig": "config",
    "ZeroPrecision": "lightning.precision",
    "ZeroStrategy": "lightning.strategy",
    "empty_weights": "engine.materialize",
    "estimate": "memory",
    "export": "checkpoint.export",
    "gathered": "engine.full_params",
    "inference": "inference",
    "load_from_checkpoint": "lightning.load",
    "shard": "build",
    "synced": "engine.synced",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def _make_strategy(**options: Any) -> ZeroStrategy:
    strategy: type[ZeroStrategy] = __getattr__("ZeroStrategy")
    return strategy(**options)


def _register_strategies() -> None:
    """Make ``Trainer(strategy="zero_1")``, "zero_2_spawn", ... known to Lightning."""
    from lightning.pytorch.strategies import StrategyRegistry

    start_methods = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
    for stage, (suffix, start_method) in itertools.product((1, 2, 3), start_methods.items()):
        description = f"ZeRO stage {stage}, processes started with {start_method}"
        options = {"stage": stage, "start_method": start_method}
        StrategyRegistry.register(f"zero_{stage}{suffix}", _make_strategy, description, override=True, **options)


def _check_block(kind: str, *block: Any) -> Any:
    """Check a block of the configuration; the module that can takes time to load, and few commands need it."""
    return getattr(importlib.import_module("lt_zero.optim.from_config"), f"check_{kind}")(*block)


BLOCK_CHECKS.update({kind: partial(_check_block, kind) for kind in ("optimizer", "scheduler")})


def _is_command() -> bool:
    """Whether this process is ``lt-zero`` or ``python -m lt_zero.cli``, which need no strategies."""
    program = sys.argv[0].replace("\\", "/").rsplit("/", 1)[-1] if sys.argv else ""
    return program in ("lt-zero", "lt-zero.exe") or ("-m", f"{__name__}.cli") in itertools.pairwise(sys.orig_argv)


if not _is_command():
    _register_strategies()
    if "lightning.pytorch.cli" in sys.modules:  # finds "class_path: ZeroStrategy" among the classes that are loaded
        importlib.import_module("lt_zero.lightning.strategy")
