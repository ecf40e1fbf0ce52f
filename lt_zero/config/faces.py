"""Configuration keys that a Trainer, Fabric, or a loop of one's own (``lt_zero.initialize``) uses or refuses.

A key that a face cannot follow is refused, or has no effect there, of which a warning and
``lt-zero config check --face`` tell. All other keys mean the same in the three.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from lt_zero.common.errors import ConfigError, Problem, dotted, path_of
from lt_zero.common.users_code import warn
from lt_zero.config.auto import FROM_MODEL
from lt_zero.config.document import MISSING, Document
from lt_zero.config.load import ConfigWarning, ZeroConfig, plain


class Face(str, Enum):
    """Interface through which a user trains."""

    TRAINER = "trainer"
    FABRIC = "fabric"
    LOOP = "loop"


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_TRAINER = (  # keys of what is done at certain points of a Trainer's run
    *("steps_per_print", "dump_state", "log_level", "flops_profiler", "comms_logger", "wall_clock_breakdown"),
    *("memory_breakdown", "disable_python_gc", "csv_monitor", "tensorboard", "wandb", "comet"),
    *("zero_optimization.sync_bn_in_backward", "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
)
_WITHOUT_EFFECT = {
    Face.TRAINER: (),
    Face.FABRIC: (*_TRAINER, "train_batch_size", "train_micro_batch_size_per_gpu"),
    Face.LOOP: (*_TRAINER, "checkpoint.format"),
}
_SCRIPTS = {  # keys of what a script for Fabric does itself
    "optimizer": "Make the optimizer, and pass it to fabric.setup",
    "scheduler": "Make the schedule, and step it",
    "gradient_accumulation_steps": "Use fabric.no_backward_sync, and divide the losses",
}


def without_effect(config: ZeroConfig, face: Face) -> list[str]:
    """The keys of ``config`` that ask for something that ``face`` does not do."""
    document = Document(plain(config))
    same = {"checkpoint.format": "sharded"} if face is Face.LOOP else {}  # what it does in any case
    values = {key: document.get(path_of(key)) for key in _WITHOUT_EFFECT[face]}
    return [key for key, value in values.items() if _asks(value) and value != same.get(key, MISSING)]


def tell_without_effect(config: ZeroConfig, face: Face, rank: int) -> None:
    """Warn of these keys, on rank 0."""
    found = without_effect(config, face)
    if found and rank == 0:
        warn(f"These keys have no effect without a Trainer: {', '.join(found)}.", ConfigWarning)


def refused(config: ZeroConfig, face: Face) -> list[Problem]:
    """Problems with keys that ``face`` cannot use, each with a remedy."""
    if face is Face.TRAINER:
        return []
    found = []
    for key, remedy in _SCRIPTS.items() if face is Face.FABRIC else ():
        if getattr(config, key) not in (None, 1):
            text = f"{key} is configured, which Fabric leaves to the script. {remedy}; remove the key."
            found.append(Problem(key, text))
    how = config.checkpoint
    for key in ("load_module_only", "load_optimizer_states", "load_lr_scheduler_states"):
        if face is Face.FABRIC and getattr(how, key) != type(how).model_fields[key].default:
            text = f"checkpoint.{key}: what Fabric loads is what the script passes to fabric.load. Remove the key."
            found.append(Problem(f"checkpoint.{key}", text))
    for path in sorted(config.autos, key=dotted):
        if path[0] not in _BATCH and dotted(path) not in FROM_MODEL:
            found.append(
                Problem(dotted(path), f'{dotted(path)}="auto" has no Trainer here to take a value from: write one.')
            )
    return found


def check_face(config: ZeroConfig, face: Face) -> None:
    """Raise ConfigError if there is a key that ``face`` refuses; names each."""
    if found := refused(config, face):
        raise ConfigError(found)


def _asks(value: Any) -> bool:
    """True unless a value is absent, null, false or a disabled block."""
    if isinstance(value, Mapping):
        return bool(value.get("enabled", True))
    return value not in (MISSING, None, False)
