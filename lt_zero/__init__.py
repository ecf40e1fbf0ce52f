"""ZeRO for PyTorch Lightning: sharded training without changing the module."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from lt_zero.common.errors import BLOCK_CHECKS
from lt_zero.common.places import public_names

if TYPE_CHECKING:
    from lt_zero.checkpoint.export import export as export
    from lt_zero.checkpoint.last import last_checkpoint as last_checkpoint
    from lt_zero.common.errors import CheckpointError as CheckpointError
    from lt_zero.config import ConfigError as ConfigError
    from lt_zero.config import ZeroConfig as ZeroConfig
    from lt_zero.config.blocks import ActivationCheckpointing as ActivationCheckpointing
    from lt_zero.core.comm.launched_group import init_distributed as init_distributed
    from lt_zero.core.data_part import data_part as data_part
    from lt_zero.core.engine.full_params import gathered as gathered
    from lt_zero.core.engine.materialize import empty_weights as empty_weights
    from lt_zero.core.engine.uneven_forwards import synced as synced
    from lt_zero.core.engine.weights_digest import weights_digest as weights_digest
    from lt_zero.core.step.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
    from lt_zero.deepspeed.install import as_deepspeed as as_deepspeed
    from lt_zero.features.ema.callback import EMA as EMA
    from lt_zero.features.tiles.head import loss_head as loss_head
    from lt_zero.features.tiles.linear import TiledLinear as TiledLinear
    from lt_zero.features.tiles.loss import tiled_cross_entropy as tiled_cross_entropy
    from lt_zero.features.tiles.tokens import tiled as tiled
    from lt_zero.planning.activations import estimate_activations as estimate_activations
    from lt_zero.planning.estimate import estimate as estimate
    from lt_zero.planning.limits import NotEnoughMemory as NotEnoughMemory
    from lt_zero.planning.sizes import Sizes as Sizes
    from lt_zero.training.build import shard as shard
    from lt_zero.training.inference import inference as inference
    from lt_zero.training.lightning.fabric import FabricZeroStrategy as FabricZeroStrategy
    from lt_zero.training.lightning.load import load_from_checkpoint as load_from_checkpoint
    from lt_zero.training.lightning.one_package import as_pytorch_lightning as as_pytorch_lightning
    from lt_zero.training.lightning.precision import ZeroPrecision as ZeroPrecision
    from lt_zero.training.lightning.strategy import ZeroStrategy as ZeroStrategy
    from lt_zero.training.loop.access import full_grad as full_grad
    from lt_zero.training.loop.access import full_master as full_master
    from lt_zero.training.loop.access import full_state as full_state
    from lt_zero.training.loop.access import set_full_grad as set_full_grad
    from lt_zero.training.loop.access import set_full_master as set_full_master
    from lt_zero.training.loop.access import set_full_state as set_full_state
    from lt_zero.training.loop.engine import TrainingEngine as TrainingEngine
    from lt_zero.training.loop.initialize import initialize as initialize
    from lt_zero.utils import add_config_arguments as add_config_arguments
    from lt_zero.utils import safe_get_full_fp32_param as safe_get_full_fp32_param
    from lt_zero.utils import safe_get_full_grad as safe_get_full_grad
    from lt_zero.utils import safe_get_full_optimizer_state as safe_get_full_optimizer_state
    from lt_zero.utils import safe_get_local_fp32_param as safe_get_local_fp32_param
    from lt_zero.utils import safe_get_local_grad as safe_get_local_grad
    from lt_zero.utils import safe_get_local_optimizer_state as safe_get_local_optimizer_state
    from lt_zero.utils import safe_set_full_fp32_param as safe_set_full_fp32_param
    from lt_zero.utils import safe_set_full_grad as safe_set_full_grad
    from lt_zero.utils import safe_set_full_optimizer_state as safe_set_full_optimizer_state
    from lt_zero.utils import safe_set_local_fp32_param as safe_set_local_fp32_param
    from lt_zero.utils import safe_set_local_grad as safe_set_local_grad
    from lt_zero.utils import safe_set_local_optimizer_state as safe_set_local_optimizer_state
    from lt_zero.zero import GatheredParameters as GatheredParameters
    from lt_zero.zero import Init as Init

__version__ = "0.1.0"

# Imported when first used: lightning.strategy and what it imports take about a second to load.
_MODULES = {
    "ActivationCheckpointing": "config.blocks",
    "CheckpointError": "common.errors",
    "ConfigError": "config",
    "EMA": "features.ema.callback",
    "FabricZeroStrategy": "training.lightning.fabric",
    "GatheredParameters": "zero",
    "Init": "zero",
    "NotEnoughMemory": "planning.limits",
    "ShardedOptimizer": "core.step.sharded_optimizer",
    "Sizes": "planning.sizes",
    "TiledLinear": "features.tiles.linear",
    "TrainingEngine": "training.loop.engine",
    "ZeroConfig": "config",
    "ZeroPrecision": "training.lightning.precision",
    "ZeroStrategy": "training.lightning.strategy",
    "add_config_arguments": "utils",
    "as_deepspeed": "deepspeed.install",
    "as_pytorch_lightning": "training.lightning.one_package",
    "data_part": "core.data_part",
    "empty_weights": "core.engine.materialize",
    "estimate": "planning.estimate",
    "estimate_activations": "planning.activations",
    "export": "checkpoint.export",
    "full_grad": "training.loop.access",
    "full_master": "training.loop.access",
    "full_state": "training.loop.access",
    "gathered": "core.engine.full_params",
    "inference": "training.inference",
    "init_distributed": "core.comm.launched_group",
    "initialize": "training.loop.initialize",
    "last_checkpoint": "checkpoint.last",
    "load_from_checkpoint": "training.lightning.load",
    "loss_head": "features.tiles.head",
    "safe_get_full_fp32_param": "utils",
    "safe_get_full_grad": "utils",
    "safe_get_full_optimizer_state": "utils",
    "safe_get_local_fp32_param": "utils",
    "safe_get_local_grad": "utils",
    "safe_get_local_optimizer_state": "utils",
    "safe_set_full_fp32_param": "utils",
    "safe_set_full_grad": "utils",
    "safe_set_full_optimizer_state": "utils",
    "safe_set_local_fp32_param": "utils",
    "safe_set_local_grad": "utils",
    "safe_set_local_optimizer_state": "utils",
    "set_full_grad": "training.loop.access",
    "set_full_master": "training.loop.access",
    "set_full_state": "training.loop.access",
    "shard": "training.build",
    "synced": "core.engine.uneven_forwards",
    "tiled": "features.tiles.tokens",
    "tiled_cross_entropy": "features.tiles.loss",
    "weights_digest": "core.engine.weights_digest",
}


def _is_there(module: str) -> bool:
    """False for a module of a feature or a tool that is not installed."""
    path = f"{_FOLDER}/{module.replace('.', '/')}"
    return os.path.isfile(f"{path}.py") or os.path.isfile(f"{path}/__init__.py")


_FOLDER = os.path.dirname(__file__)
# As ``lt_zero.optim.Lamb`` in the documentation, and ``lt_zero.zero.Init`` as DeepSpeed's scripts write it.
_SUBMODULES = ("attention", "ops", "optim", "parallel", "utils", "zero")
__all__ = [name for name, module in _MODULES.items() if _is_there(module)]


_import_name = public_names(__name__, {name: f"{__name__}.{module}" for name, module in _MODULES.items()})


def __getattr__(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}") if name in _SUBMODULES else _import_name(name)


def _check_block(kind: str, *block: Any) -> Any:
    """Check a block of the configuration; the module that can takes time to load, and few commands need it."""
    return getattr(importlib.import_module("lt_zero.optim.from_config"), f"check_{kind}")(*block)


BLOCK_CHECKS.update({kind: partial(_check_block, kind) for kind in ("optimizer", "scheduler")})


def _open_directory(*arguments: Any) -> Any:
    """Open a checkpoint directory for Lightning; the module that can takes time to load, and files do not need it."""
    return importlib.import_module("lt_zero.training.lightning.load").open_directory(*arguments)


def _loading(cls: type, checkpoint: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Context in which Lightning builds a module from a checkpoint, ours or another; imported lazily for speed."""
    if "lt_zero" not in checkpoint:
        return nullcontext()
    made: AbstractContextManager[None] = importlib.import_module("lt_zero.training.lightning.load").taking_plain_names(
        cls
    )
    return made


def _renamed(module: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Checkpoint for another strategy than this package's: the weights by the names that they have in ``module``."""
    if "lt_zero" not in checkpoint or "state_dict" not in checkpoint:
        return checkpoint
    names = importlib.import_module("lt_zero.common.plain_names")
    return {**checkpoint, "state_dict": names.renamed(checkpoint["state_dict"], names.names_of(module))}


def _is_command() -> bool:
    """True if this process is ``lt-zero`` or ``python -m lt_zero.cli``, which need no strategies."""
    program = sys.argv[0].replace("\\", "/").rsplit("/", 1)[-1] if sys.argv else ""
    return program in ("lt-zero", "lt-zero.exe") or ("-m", f"{__name__}.cli") in itertools.pairwise(sys.orig_argv)


if not _is_command():
    importlib.import_module("lt_zero.training.lightning.names").register_strategies()
    importlib.import_module("lt_zero.common.compat").open_first(_open_directory)
    importlib.import_module("lt_zero.common.compat").load_within(_loading)
    importlib.import_module("lt_zero.common.compat").rename_weights(_renamed)
    if "lightning.pytorch.cli" in sys.modules:  # finds "class_path: ZeroStrategy" among the classes that are loaded
        importlib.import_module("lt_zero.training.lightning.strategy")
