"""Arguments of the strategies: how ranks start and connect, arguments of other strategies, and those of a parser."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec

from lt_zero.common.arguments import check_group_options
from lt_zero.common.fields import dotted_keys
from lt_zero.common.numbers import to_whole_number
from lt_zero.config.load import current_schema

P = ParamSpec("P")

_ZERO, _OPTIMIZER, _PARAM = (
    "zero_optimization.",
    "zero_optimization.offload_optimizer.",
    "zero_optimization.offload_param.",
)
# Arguments of Lightning's DeepSpeedStrategy, and the keys of the configuration that they set.
_KEYS = {
    "offload_optimizer": f"{_OPTIMIZER}device",
    "offload_parameters": f"{_PARAM}device",
    "offload_optimizer_device": f"{_OPTIMIZER}device",
    "offload_params_device": f"{_PARAM}device",
    "remote_device": f"{_PARAM}device",
    "nvme_path": f"{_OPTIMIZER}nvme_path",
    "optimizer_buffer_count": f"{_OPTIMIZER}buffer_count",
    "params_buffer_count": f"{_PARAM}buffer_count",
    "params_buffer_size": f"{_PARAM}buffer_size",
    "max_in_cpu": f"{_PARAM}max_in_cpu",
    "pin_memory": f"{_OPTIMIZER}pin_memory",
    "sub_group_size": f"{_ZERO}sub_group_size",
    "contiguous_gradients": f"{_ZERO}contiguous_gradients",
    "overlap_comm": f"{_ZERO}overlap_comm",
    "reduce_scatter": f"{_ZERO}reduce_scatter",
    "allgather_bucket_size": f"{_ZERO}allgather_bucket_size",
    "reduce_bucket_size": f"{_ZERO}reduce_bucket_size",
    "block_size": "aio.block_size",
    "queue_depth": "aio.queue_depth",
    "single_submit": "aio.single_submit",
    "overlap_events": "aio.overlap_events",
    "thread_count": "aio.intra_op_parallelism",
    "logging_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "logging_level": "log_level",
    "loss_scale": "fp16.loss_scale",
    "initial_scale_power": "fp16.initial_scale_power",
    "loss_scale_window": "fp16.loss_scale_window",
    "hysteresis": "fp16.hysteresis",
    "min_loss_scale": "fp16.min_loss_scale",
    "partition_activations": "activation_checkpointing.partition_activations",
    "cpu_checkpointing": "activation_checkpointing.cpu_checkpointing",
    "contiguous_memory_optimization": "activation_checkpointing.contiguous_memory_optimization",
    "synchronize_checkpoint_boundary": "activation_checkpointing.synchronize_checkpoint_boundary",
    "cpu_offload": f"{_OPTIMIZER}device",
}
# Arguments of this and other strategies that are set elsewhere, or by nothing.
_ELSEWHERE = {
    "zero_optimization": "Write the block into `config`, or `stage=` for its stage",
    "allgather_partitions": "Remove it: parameters are always gathered by all-gathers",
    "zero_allow_untested_optimizer": "Remove it: an optimizer that cannot be sharded is refused by name",
    "load_full_weights": "Remove it: checkpoints are recognised when they are loaded",
    "exclude_frozen_parameters": 'Write overrides=["checkpoint.save_frozen=false"]',
    "mixed_precision": 'Write Trainer(precision="bf16-mixed"), or the block bf16 or fp16 of the configuration',
    "auto_wrap_policy": "Remove it: repeated blocks are found; zero_optimization.leaf_module names others",
    "activation_checkpointing_policy": 'Write activation_checkpointing="full"',
    "sharding_strategy": "Write stage=3 for FULL_SHARD, 2 for SHARD_GRAD_OP, 0 for NO_SHARD; for HYBRID_SHARD also "
    "dp_replicate_size, the number of nodes",
    "data_parallel_size": "It is the number of ranks divided by tensor_, sequence_ and pipeline_parallel_size",
    "save_distributed_checkpoint": "Remove it: checkpoints are sharded; ZeroStrategy.export writes one file",
    "state_dict_type": "Remove it: checkpoints are sharded; ZeroStrategy.export writes one file",
    "device_mesh": "The strategy makes it: pass tensor_parallel_size",
    "find_unused_parameters": "Remove it: parameters may be unused in any step, on any rank",
    "gradient_as_bucket_view": "Remove it: gradients lie in buckets always",
    "static_graph": "Remove it: graphs may differ from step to step",
    "bucket_cap_mb": f'Write overrides=["{_ZERO}reduce_bucket_size=..."], in elements',
    "ddp_comm_hook": "gradient_compression and communication_data_type of the configuration decide what is sent",
    "ddp_comm_state": "gradient_compression of the configuration decides what is sent",
    "ddp_comm_wrapper": "gradient_compression of the configuration decides what is sent",
    "model_averaging_period": "ZeroOneAdam averages rarely: optimizer.type of the configuration",
}

_START_METHODS = "popen", "spawn", "fork", "forkserver"  # of Lightning


def with_sizes_of_mesh(
    overrides: Sequence[str],
    tensor_parallel_size: int | None,
    pipeline_parallel_size: int | None,
    sequence_parallel_size: int | None,
    expert_parallel_size: int | None,
    dp_replicate_size: int | None,
    virtual_ranks: int | None,
) -> Sequence[str]:
    """The overrides of a strategy with its numbers of ranks, checked as the keys are."""
    experts = to_whole_number(expert_parallel_size)
    keys = {
        "tensor_parallel.autotp_size": tensor_parallel_size,
        "pipeline.stages": pipeline_parallel_size,
        "sequence_parallel_size": sequence_parallel_size,
        "expert_parallel.autoep_size": expert_parallel_size,
        f"{_ZERO}dp_replicate_size": dp_replicate_size,
        "reproducible.virtual_ranks": virtual_ranks,
        "expert_parallel.enabled": str(experts > 1).lower() if type(experts) is int else None,
    }
    given = [f"{key}={value}" for key, value in keys.items() if value is not None]
    return [*overrides, *given] if given else overrides


def check_launch(strategy: str, start_method: object, timeout: timedelta | None, process_group_backend: object) -> None:
    """Check how a strategy is to start its ranks and connect them.

    Raises:
        TypeError, ValueError: names the argument, and what to pass.
    """
    if start_method not in _START_METHODS:
        raise ValueError(
            f'{strategy}(start_method={start_method!r}): pass "fork" in a notebook, "spawn" or "forkserver" for '
            'multiprocessing, or "popen" (the default) for a script that Lightning starts once for each rank.'
        )
    check_group_options(strategy, timeout, process_group_backend=process_group_backend)


def explained(init: Callable[P, None]) -> Callable[P, None]:
    """Decorate ``__init__`` of a strategy, so that unknown arguments are explained.

    If jsonargparse (LightningCLI) makes the strategy, ``stage`` and ``broadcast_buffers`` are overrides: they may come
    from the command line, while ``config`` is the file's.

    Raises:
        TypeError: at the call, for an argument that is not one; it names the key of the configuration, if there is one.
    """
    known = list(inspect.signature(init).parameters)[1:]

    @wraps(init)
    def explaining(*args: P.args, **kwargs: P.kwargs) -> None:
        for name, value in kwargs.items():
            if name not in known:
                raise TypeError(f"{type(args[0]).__name__} has no argument {name!r}. {_advice(name, value, known)}")
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "jsonargparse":
            kwargs.update(_as_overrides(kwargs))
        init(*args, **kwargs)

    return explaining


def _advice(name: str, value: Any, known: list[str]) -> str:
    """Advice for a replacement of the argument ``name``."""
    if name in _ELSEWHERE:
        return f"{_ELSEWHERE[name]}."
    keys = list(dotted_keys(current_schema()))
    key = _KEYS.get(name) or next((key for key in keys if key in (name, f"{_ZERO}{name}")), None)
    if key is not None and key.endswith(".device"):
        value = "cpu" if value is True else "none" if value is False or value is None else value
    if key is not None:
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
        return f'It is the key {key} of the configuration: write it there, or overrides=["{key}={shown}"].'
    if block := next((key.rpartition(".")[0] for key in keys if f".{name}." in f".{key}"), None):
        return f"It is the block {block} of the configuration: write config={{...}} with it, or overrides=[...]."
    near = difflib.get_close_matches(name, known, 1)
    return f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(known)}."


def _as_overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the strategy, with those that are keys as overrides of the configuration.

    The given overrides come after them, and the arguments stay: an override that contradicts them is an error.
    """
    values = {key: given.get(key.rpartition(".")[2]) for key in (f"{_ZERO}stage", "broadcast_buffers")}
    written = [f"{key}={str(value).lower()}" for key, value in values.items() if value is not None]
    if given.get("config") is None or not written:
        return {}
    return {"overrides": [*written, *(given.get("overrides") or ())]}
