"""Supported keys that have no effect in combination with others, such as keys of stage 3 at stage 2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any, NamedTuple

from lt_zero.common.errors import Path, dotted
from lt_zero.config.blocks.activation import ActivationCheckpointing
from lt_zero.config.schema import ZeroConfig

Z, A = "zero_optimization", "activation_checkpointing"


class _Rule(NamedTuple):
    """Keys of a block that have an effect only under a condition.

    Attributes:
        block: dotted.
        keys: names in it; none: all.
        counts: the condition.
        why: why they have no effect otherwise.
    """

    block: str
    keys: tuple[str, ...]
    counts: Callable[[ZeroConfig], bool]
    why: str


def _stage3(config: ZeroConfig) -> bool:
    return config.zero_optimization.stage == 3


def _offloads(config: ZeroConfig) -> bool:
    zero = config.zero_optimization
    return (zero.offload_optimizer.device, zero.param_offload.device) != ("none", "none")


def _in_files(config: ZeroConfig) -> bool:
    zero, block = config.zero_optimization, config.activation_checkpointing
    saved = block.nvme_path is not None and block.mode != "none"
    return saved or "nvme" in (zero.offload_optimizer.device, zero.param_offload.device)


def _value(config: ZeroConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _always(block: str, name: str, why: str) -> _Rule:
    """A switch that is always on."""
    return _Rule(block, (name,), lambda config: bool(_value(config, f"{block}.{name}")), f"{why} in any case")


def _switched(block: str) -> _Rule:
    """A block that has no effect unless ``enabled`` is true."""
    return _Rule(block, (), lambda config: bool(_value(config, f"{block}.enabled")), f"{block}.enabled is false")


def _without_mode(name: str) -> _Rule:
    """A key of ``activation_checkpointing`` that differs from its default while nothing is recomputed."""
    default = ActivationCheckpointing.model_fields[name].default

    def counts(config: ZeroConfig) -> bool:
        block = config.activation_checkpointing
        return block.mode != "none" or getattr(block, name) == default

    return _Rule(A, (name,), counts, f"nothing is recomputed without {A}.mode: full or selective")


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
_RULES = (
    _Rule(Z, _STAGE3, _stage3, "parameters are sharded at stage 3 only"),
    _Rule(
        Z,
        ("allgather_bucket_size",),
        lambda config: config.zero_optimization.stage in (1, 2),
        "parameters are gathered after the step at stages 1 and 2 only",
    ),
    _Rule(
        Z,
        ("shard_along", "reduce_scatter"),
        lambda config: config.zero_optimization.stage > 0,
        "nothing is sharded at stage 0",
    ),
    _Rule(
        Z,
        ("sub_group_size",),
        lambda config: config.zero_optimization.offload_optimizer.device != "none",
        "it needs an offloaded optimizer",
    ),
    _always(Z, "contiguous_gradients", "gradients are copied into one flat buffer per bucket"),
    _always(f"{Z}.offload_optimizer", "fast_init", "weights are written as they are initialized"),
    _always("bf16", "immediate_grad_update", "each backward adds to the accumulators"),
    _Rule(
        f"{Z}.offload_optimizer",
        _FILES,
        lambda config: config.zero_optimization.offload_optimizer.device == "nvme",
        "it counts with device: nvme only",
    ),
    _Rule(
        f"{Z}.offload_optimizer",
        ("ratio",),
        lambda config: config.zero_optimization.offload_optimizer.device != "none",
        "nothing is offloaded",
    ),
    _Rule(
        f"{Z}.offload_param",
        (),
        lambda config: _stage3(config) or config.zero_optimization.offload_param.device == "none",
        "parameters are not sharded below stage 3",
    ),
    _Rule(f"{Z}.offload_optimizer", ("pin_memory",), _offloads, "nothing is offloaded"),
    _Rule(f"{Z}.offload_param", ("pin_memory",), _offloads, "nothing is offloaded"),
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
        "trained parameters are stored with their master weights: without offload_optimizer only frozen ones move",
    ),
    *map(_switched, ("flops_profiler", "comms_logger", "csv_monitor", "tensorboard", "wandb", "comet")),
    _Rule(
        "comms_logger",
        ("prof_ops",),
        lambda config: not config.comms_logger.prof_all,
        "comms_logger.prof_all records all operations",
    ),
    *(_without_mode(name) for name in ActivationCheckpointing.model_fields if name != "mode"),
    _Rule(
        A,
        ("partition_activations",),
        lambda config: not config.activation_checkpointing.partition_activations,
        "there is no tensor- or sequence-parallel group to split saved inputs over",
    ),
    _Rule(
        A,
        ("number_checkpoints",),
        lambda config: (
            config.activation_checkpointing.contiguous_memory_optimization
            or config.activation_checkpointing.number_checkpoints is None
        ),
        "it needs contiguous_memory_optimization",
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
        "",
        ("gradient_predivide_factor",),
        lambda config: not config.prescale_gradients or config.gradient_predivide_factor == 1.0,
        "prescale_gradients divides by the number of ranks instead, as in DeepSpeed",
    ),
    _Rule(
        "data_types",
        ("keep_in_fp32_modules",),
        lambda config: config.data_types.buffer_dtype is not None,
        "buffers keep their dtype without data_types.buffer_dtype",
    ),
)


def inactive(config: ZeroConfig, written: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Written keys that have no effect in this configuration, with the first reason for each.

    Skips blocks with ``enabled: false``, where that is expected.
    """
    for path in _leaves(written, ()):
        block, name = dotted(path[:-1]), str(path[-1])
        rules = (rule for rule in _RULES if rule.block == block and (name in rule.keys or not rule.keys))
        why = next((rule.why for rule in rules if not rule.counts(config)), None)
        if why is not None and not why.startswith(f"{dotted(path)} is ") and not switched_off(written, path):
            yield path, why


def switched_off(written: Mapping[str, Any], path: Path) -> bool:
    """Whether a key is in a block with ``enabled: false``; patterns of modules apply to both precisions."""
    block: Any = written
    for key in path[:-1]:
        block = block.get(key) if isinstance(block, Mapping) else None
        if isinstance(block, Mapping) and block.get("enabled") is False:
            return path[-1] not in ("enabled", "fp16_override_modules")
    return False


def _leaves(values: Mapping[str, Any], path: Path) -> Iterator[Path]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key)
