"""Keys that work, and do nothing beside the others: those of stage 3 at stage 2, of files without files, and so on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from lt_zero.config.activation import ActivationCheckpointing
from lt_zero.config.errors import Path, dotted
from lt_zero.config.schema import ZeroConfig

Z, A = "zero_optimization", "activation_checkpointing"


class _Rule(NamedTuple):
    """Keys of a block that count only sometimes.

    Attributes:
        block: dotted.
        keys: names in it; none: all but ``enabled`` and ``device``.
        counts: when they do.
        why: why they do not.
    """

    block: str
    keys: tuple[str, ...]
    counts: Callable[[ZeroConfig], bool]
    why: str


def _stage3(config: ZeroConfig) -> bool:
    return config.zero_optimization.stage == 3


def _in_files(config: ZeroConfig) -> bool:
    zero = config.zero_optimization
    saved = config.activation_checkpointing.nvme_path is not None and config.activation_checkpointing.kind != "none"
    return saved or "nvme" in (zero.offload_optimizer.device, zero.offload_param.device)


def _without_mode(name: str) -> _Rule:
    """A key of ``activation_checkpointing`` that says something, where nothing is recomputed."""
    field = ActivationCheckpointing.model_fields[name]

    def counts(config: ZeroConfig) -> bool:
        block = config.activation_checkpointing
        return block.kind != "none" or getattr(block, name) == field.default

    return _Rule(A, (name,), counts, f"{A}.mode is none")


_STAGE3 = (
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "zero_allowed_param_types",
    "zero_force_param_types",
)
_FILES = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init")
_SCALE = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
_FLOPS = ("profile_step", "module_depth", "top_modules", "detailed", "output_file", "recompute_fwd_factor")
_COMMS = ("verbose", "prof_all", "debug", "prof_ops")
_RULES = (
    _Rule(Z, _STAGE3, _stage3, "parameters are sharded at stage 3 only"),
    _Rule(
        Z,
        ("allgather_bucket_size",),
        lambda config: config.zero_optimization.stage in (1, 2),
        "parameters are gathered after the step at stages 1 and 2 only",
    ),
    _Rule(Z, ("shard_along",), lambda config: config.zero_optimization.stage > 0, "nothing is sharded at stage 0"),
    _Rule(
        Z,
        ("sub_group_size",),
        lambda config: config.zero_optimization.offload_optimizer.device != "none",
        "it counts with an offloaded optimizer only",
    ),
    _Rule(
        f"{Z}.offload_optimizer",
        _FILES,
        lambda config: config.zero_optimization.offload_optimizer.device == "nvme",
        "it counts with device: nvme only",
    ),
    _Rule(
        f"{Z}.offload_param",
        _FILES,
        lambda config: config.zero_optimization.offload_param.device == "nvme",
        "it counts with device: nvme only",
    ),
    _Rule(
        f"{Z}.offload_param",
        ("device",),
        lambda config: (
            config.zero_optimization.offload_param.device == "none"
            or config.zero_optimization.offload_optimizer.device != "none"
        ),
        "trained parameters rest with their master weights: without offload_optimizer only frozen ones move",
    ),
    _Rule(
        "gradient_compression",
        ("topk_ratio", "huffman_coding", "hierarchical_compress"),
        lambda config: config.gradient_compression.algorithm != "none",
        "gradient_compression.algorithm is none",
    ),
    _Rule("flops_profiler", _FLOPS, lambda config: config.flops_profiler.enabled, "flops_profiler.enabled is false"),
    _Rule("comms_logger", _COMMS, lambda config: config.comms_logger.enabled, "comms_logger.enabled is false"),
    _Rule(
        "comms_logger",
        ("prof_ops",),
        lambda config: not config.comms_logger.prof_all or not config.comms_logger.enabled,
        "comms_logger.prof_all records all operations",
    ),
    *(_without_mode(name) for name in ActivationCheckpointing.model_fields if name != "mode"),
    _Rule(
        A,
        ("number_checkpoints",),
        lambda config: (
            config.activation_checkpointing.contiguous_memory_optimization
            or config.activation_checkpointing.number_checkpoints is None
        ),
        "it counts with contiguous_memory_optimization only",
    ),
    _Rule(
        A,
        ("contiguous_memory_optimization", "number_checkpoints"),
        lambda config: config.activation_checkpointing.nvme_path is None,
        "saved inputs are in files",
    ),
    _Rule("aio", (), _in_files, "nothing is offloaded to nvme"),
    _Rule("fp16", _SCALE, lambda config: config.fp16.loss_scale == 0, "fp16.loss_scale fixes the scale"),
    _Rule(
        "data_types",
        ("keep_in_fp32_modules",),
        lambda config: config.data_types.buffer_dtype is not None,
        "buffers keep their dtype without data_types.buffer_dtype",
    ),
)


def inactive(config: ZeroConfig, written: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Keys among those that were written which do nothing in this configuration, and why."""
    for path in _leaves(written, ()):
        block, name = dotted(path[:-1]), str(path[-1])
        for rule in _RULES:
            if rule.block == block and (name in rule.keys or not rule.keys) and not rule.counts(config):
                yield path, rule.why


def _leaves(values: Mapping[str, Any], path: Path) -> Iterator[Path]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key)
