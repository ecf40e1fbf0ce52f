"""What of a configuration counts without training."""

from __future__ import annotations

import logging

from lt_zero.common.errors import dotted, path_of
from lt_zero.config.document import MISSING, Document
from lt_zero.config.load import Given, ZeroConfig, examine, plain

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
    *("steps_per_print", "bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads"),
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
