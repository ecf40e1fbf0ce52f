"""The keys that apply in each place: with a Trainer, Fabric or a loop of one's own, in inference, and on all ranks.

A key that a face cannot follow is refused, or has no effect there, of which a warning and
``lt-zero config check --face`` tell. All other keys mean the same in the three.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from lt_zero.common.errors import ConfigError, Problem, dotted, path_of
from lt_zero.common.users_code import warn
from lt_zero.common.variables import switched
from lt_zero.config.auto import FROM_MODEL
from lt_zero.config.document import HIDDEN, MISSING, Document, leaves
from lt_zero.config.load import ConfigWarning, Given, ZeroConfig, examine, plain, resolved, shown
from lt_zero.core.feature import registered

log = logging.getLogger("lt_zero")

# ---- faces -----------------------------------------------------------------------------------------------------------


class Face(str, Enum):
    """Interface through which a user trains."""

    TRAINER = "trainer"
    FABRIC = "fabric"
    LOOP = "loop"


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_TRAINER = (  # keys of what is done at certain points of a Trainer's run
    *("steps_per_print", "dump_state", "log_level", "flops_profiler", "comms_logger", "wall_clock_breakdown"),
    *("memory_breakdown", "disable_python_gc", "zero_optimization.sync_bn_in_backward"),
)
_MONITORS = ("csv_monitor", "tensorboard", "wandb", "comet", "gradient_noise_scale")
_GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"  # Trainer of transformers asks the engine
_WITHOUT_EFFECT = {
    Face.TRAINER: (),
    Face.FABRIC: (*_TRAINER, *_MONITORS, _GATHER, "train_batch_size", "train_micro_batch_size_per_gpu"),
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


# ---- inference -------------------------------------------------------------------------------------------------------

_ZERO = (
    *("offload_optimizer", "zero_quantized_gradients", "reduce_bucket_size", "reduce_scatter", "contiguous_gradients"),
    *("load_from_fp32_weights", "sub_group_size", "shard_along", "optimizer_is_elementwise"),
)
_TRAINING = (  # keys of optimizers, gradients and steps
    *("optimizer", "optimizer_states", "scheduler", "gradient_clipping", "gradient_accumulation_steps"),
    "gradient_compression",
    *("train_batch_size", "train_micro_batch_size_per_gpu", "activation_checkpointing", "communication_data_type"),
    *("prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op", "fused_step", "checkpoint"),
    *(
        "on_skipped_step",
        "on_min_scale",
        "on_nonfinite",
        "flops_profiler",
        "gradient_noise_scale",
        "data_types.grad_accum_dtype",
    ),
    *("broadcast_buffers", "pipeline.activation_checkpoint_interval"),
    *("steps_per_print", "bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads"),
    "bf16.stochastic_rounding",
    *("fp16.fp16_master_weights_and_grads", *(f"zero_optimization.{key}" for key in _ZERO)),
)


def ignored_keys(config: ZeroConfig) -> list[str]:
    """The keys of ``config``, as written, that count in training only."""
    document = Document(plain(config))
    return [key for key in _TRAINING if document.get(path_of(key)) is not MISSING]


def tell_ignored(keys: list[str], rank: int) -> None:
    """Log in one line, on rank 0, which keys count in training only."""
    if keys and rank == 0:
        log.info("Inference has no use for %s: ignored.", ", ".join(keys))


def without_training(given: Given, default_stage: int = 3) -> tuple[ZeroConfig, list[str]]:
    """``ZeroConfig.of(given)`` without the keys that count in training only, and these keys.

    Raises:
        ConfigError: names every problem, also of keys that do not count.
    """
    loaded = examine(given, default_stage=default_stage)
    config = loaded.usable()
    ignored, document = ignored_keys(config), Document(plain(config))
    for key in ignored:
        document.pop(path_of(key))
    moot = (*ignored, "zero_optimization.offload_param.device")  # without an optimizer all parameters are offloaded
    loaded.notices = [note for note in loaded.notices if not dotted(path_of(note.key)).startswith(moot)]
    loaded.announce()
    return examine(document.values).usable(), ignored


# ---- ranks -----------------------------------------------------------------------------------------------------------

# Keys that may differ between nodes or ranks.
_LOCAL = ("aio", "csv_monitor", "tensorboard", "wandb", "comet", "log_level", "disable_python_gc", "max_cpu_gb")
_LOCAL_NAMES = ("nvme_path", "pin_memory")
_SHOWN = 5  # maximum keys in an error


def _common(values: dict[str, Any]) -> dict[str, str]:
    """The values that all ranks must have, by key."""
    return {
        dotted(path): repr(value)
        for path, value in leaves(values)
        if path[0] not in _LOCAL and path[-1] not in _LOCAL_NAMES
    }


def _variables() -> dict[str, str]:
    """The environment variables that decide which collectives a rank calls; of folders, whether there is one."""
    checks = "1" if switched("LT_ZERO_MEMORY_CHECK", True) else "0"
    names = ("LT_ZERO_DIGESTS", "LT_ZERO_RECORD", "LT_ZERO_TRIAL")
    folders = {name: "set" if os.environ.get(name) else "unset" for name in names}
    return {"LT_ZERO_MEMORY_CHECK": checks, **folders}


def _features(config: ZeroConfig) -> dict[str, str]:
    """The features of other packages, whose hooks may be collective, with their places in the order of calls."""
    return {
        f"register({entry.name!r})": f"number {number}, {'asked for' if entry.is_asked(config) else 'off'}"
        for number, entry in enumerate(registered(), 1)
    }


def check_same(config: ZeroConfig, host_gather: Callable[[Any, str], list[Any]]) -> None:
    """Compare the configurations of all ranks, and the variables and features that count beside them. Collective.

    Raises:
        ConfigError: on all ranks, if they differ; shows the values of two of them.
    """
    beside = _variables() | _features(config)
    known = _common(resolved(config)) | beside
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    digests = host_gather(digest, "configuration")
    if len(set(digests)) == 1:
        return
    told = _common(shown(config)) | beside
    values = {key: (told.get(key, HIDDEN), hashlib.sha256(value.encode()).digest()) for key, value in known.items()}
    ranks = host_gather(values, "configurations")
    other = next(rank for rank, found in enumerate(digests) if found != digests[0])
    lacks = ("missing", b"")
    pairs = {k: [ranks[rank].get(k, lacks) for rank in (0, other)] for k in sorted(ranks[0] | ranks[other])}
    differ = [f"{k} is {one[0]} on rank 0, {two[0]} on rank {other}" for k, (one, two) in pairs.items() if one != two]
    more = f", and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
    raise ConfigError(
        f"The ranks have different configurations: {'; '.join(differ[:_SHOWN])}{more}. Give all ranks the same values: "
        "look for values that depend on the rank or the environment."
    )
