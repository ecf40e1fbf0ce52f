"""What of a configuration counts without training or without a Trainer, and whether all ranks have the same one."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from lt_zero.common.errors import ConfigError, dotted, path_of
from lt_zero.common.users_code import warn
from lt_zero.config.document import HIDDEN, MISSING, Document, leaves
from lt_zero.config.load import ConfigWarning, Given, ZeroConfig, examine, plain, resolved, shown

log = logging.getLogger("lt_zero")
_ZERO = (
    *("offload_optimizer", "zero_quantized_gradients", "reduce_bucket_size", "reduce_scatter", "contiguous_gradients"),
    *("load_from_fp32_weights", "sub_group_size", "shard_along"),
)
_TRAINING = (  # keys of optimizers, gradients and steps
    *("optimizer", "scheduler", "gradient_clipping", "gradient_accumulation_steps", "gradient_compression"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "activation_checkpointing", "communication_data_type"),
    *("prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op", "fused_step", "checkpoint"),
    *("on_skipped_step", "on_min_scale", "on_nonfinite", "flops_profiler", "data_types.grad_accum_dtype"),
    "broadcast_buffers",
    *("steps_per_print", "bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads"),
    *("fp16.fp16_master_weights_and_grads", *(f"zero_optimization.{key}" for key in _ZERO)),
)
_TRAINER = (  # keys of what is done at certain points of a Trainer's run
    *("steps_per_print", "dump_state", "log_level", "flops_profiler", "comms_logger", "wall_clock_breakdown"),
    *("memory_breakdown", "disable_python_gc", "csv_monitor", "tensorboard", "wandb", "comet", "checkpoint.async_save"),
    *("zero_optimization.sync_bn_in_backward", "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
)
# Keys that may differ between nodes or ranks.
_LOCAL = ("aio", "csv_monitor", "tensorboard", "wandb", "comet", "log_level", "disable_python_gc", "max_cpu_gb")
_LOCAL_NAMES = ("nvme_path", "pin_memory")
_SHOWN = 5  # maximum keys in an error


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


def tell_without_trainer(config: ZeroConfig, rank: int, *more: str) -> None:
    """Warn, on rank 0, of keys that have no effect without a Trainer, and of ``more`` such keys."""
    document = Document(plain(config))
    found = [key for key in (*_TRAINER, *more) if _asks(document.get(path_of(key)))]
    names = ", ".join(found).replace("async_save", "async")
    if found and rank == 0:
        warn(f"These keys have no effect without a Trainer: {names}.", ConfigWarning)


def _asks(value: Any) -> bool:
    """Whether a value asks for anything."""
    if isinstance(value, Mapping):
        return bool(value.get("enabled", True))
    return value not in (MISSING, None, False)


def check_same(config: ZeroConfig, host_gather: Callable[[Any, str], list[Any]]) -> None:
    """Compare the configurations of all ranks. Collective.

    Raises:
        ConfigError: on all ranks, if they differ; shows the values of two of them.
    """
    known, told = (
        {
            dotted(path): repr(value)
            for path, value in leaves(found)
            if path[0] not in _LOCAL and path[-1] not in _LOCAL_NAMES
        }
        for found in (resolved(config), shown(config))
    )
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    digests = host_gather(digest, "configuration")
    if len(set(digests)) == 1:
        return
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
