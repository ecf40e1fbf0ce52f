"""Configuration keys that count without training, and the comparison of the ranks' configurations."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from typing import Any

from lt_zero.common.errors import ConfigError, dotted, path_of
from lt_zero.config.document import HIDDEN, MISSING, Document, leaves
from lt_zero.config.load import Given, ZeroConfig, examine, plain, resolved, shown

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
