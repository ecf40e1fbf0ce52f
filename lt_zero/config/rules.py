"""Rules between keys: those that contradict each other, and those that have no effect in combination with others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lt_zero.common.errors import Path, Problem, dotted
from lt_zero.common.fields import Block
from lt_zero.config.blocks import ActivationCheckpointing, Schema, operation_of
from lt_zero.config.blocks.schema import ONE_BIT
from lt_zero.config.document import leaves
from lt_zero.core.comm.options import OPERATIONS
from lt_zero.features import asks, blocks

ZERO = "zero_optimization"
ACTIVATIONS = "activation_checkpointing"
_WHOLE = ("muon", "adafactor")  # configurable optimizers that need whole matrices


# ---- contradictions --------------------------------------------------------------------------------------------------


def contradictions(config: Schema) -> Iterator[Problem]:
    """Find keys that contradict each other."""
    total = config.train_batch_size
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {name: value for name in names if (value := getattr(config, name)) is not None}
    if total is not None and total % math.prod(given.values()):
        yield Problem(
            "train_batch_size",
            f"train_batch_size={total} is not a multiple of {' * '.join(f'{n}={v}' for n, v in given.items())}, so no "
            "number of ranks fits: it is train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks. Remove "
            "one of them.",
        )
    yield from _sharding(config)
    yield from _quantized_sums(config)
    yield from _one_bit(config)
    yield from _tolerance(config)
    yield from _parallel(config)
    yield from _precision(config)
    yield from _offload(config)
    unknown = [name for name in config.comms_logger.prof_ops if operation_of(name) is None]
    if unknown:
        text = f"comms_logger.prof_ops has {unknown[0]!r}, which is not a collective of lt_zero. Choose from "
        yield Problem("comms_logger.prof_ops", f"{text}{', '.join(OPERATIONS)}.")
    saved = config.activation_checkpointing
    if saved.cpu_checkpointing and saved.nvme_path is not None:
        files, host = f"{ACTIVATIONS}.nvme_path", f"{ACTIVATIONS}.cpu_checkpointing"
        text = f"{files}={str(saved.nvme_path)!r} and {host}=true are two places for saved inputs."
        yield Problem(files, f"{text} Remove one of them.")
    for name in ("every", "contiguous_memory_optimization"):
        given = getattr(saved, name)
        if saved.memory_budget is not None and given != ActivationCheckpointing.model_fields[name].default:
            text = f"{ACTIVATIONS}.{name}={given} fixes what memory_budget={saved.memory_budget:g} chooses: which"
            yield Problem(f"{ACTIVATIONS}.{name}", f"{text} modules keep saved inputs only. Remove one of them.")
    for block in _blocks_of_features(config):
        yield from block.problems_in(config)
    if config.checkpoint.async_save and not config.sharded_checkpoints:
        yield Problem(
            "checkpoint.async",
            "checkpoint.async=true needs sharded checkpoints, but checkpoints are full (checkpoint.format="
            f"{config.checkpoint.format!r}, stage {config.zero_optimization.stage}): set checkpoint.format='sharded', "
            "or use Lightning's AsyncCheckpointIO.",
        )


def _blocks_of_features(config: Schema) -> list[Block]:
    """The blocks that features bring, also registered ones, as far as they are not null."""
    values = (getattr(config, name, None) for name in blocks())
    return [value for value in values if isinstance(value, Block)]


def _sharding(config: Schema) -> Iterator[Problem]:
    zero = config.zero_optimization
    both = sorted(set(zero.zero_allowed_param_types) & set(zero.zero_force_param_types))
    if both:
        yield Problem(
            f"{ZERO}.zero_force_param_types",
            f"{both[0]!r} is in {ZERO}.zero_allowed_param_types (sharded) and in {ZERO}.zero_force_param_types (never "
            "sharded). Remove it from one.",
        )
    name = config.optimizer.type if config.optimizer is not None else ""
    if zero.stage > 0 and zero.shard_along == "element" and name.rpartition(".")[2].lower() in _WHOLE:
        yield Problem(
            f"{ZERO}.shard_along",
            f"optimizer.type={name!r} computes its update from whole matrices, and at stage {zero.stage} with "
            f"{ZERO}.shard_along='element' a rank holds only fragments of them. Set {ZERO}.shard_along=parameter "
            "(optimizer=muon does both).",
        )
    if config.quantize is not None and zero.stage == 3 and zero.zero_hpz_partition_size > 1:
        yield Problem(
            f"{ZERO}.zero_hpz_partition_size",
            f"{ZERO}.zero_hpz_partition_size={zero.zero_hpz_partition_size} keeps a second copy of gathered weights, "
            f"and with quantize={config.quantize} codes are gathered, of which there is none. Remove one of them.",
        )


def _quantized_sums(config: Schema) -> Iterator[Problem]:
    zero = config.zero_optimization
    groups = f"{ZERO}.{zero.replicas_by}={getattr(zero, zero.replicas_by)}" if zero.replicas_by else ""
    quantized, size = f"{ZERO}.zero_quantized_gradients", zero.zero_hpz_partition_size
    if zero.stage > 0 and groups:
        if zero.zero_quantized_gradients:
            text = f"{quantized}=true sums over all ranks, and {groups} in two steps"
            yield Problem(quantized, f"{text}. Remove one of them.")
        if zero.stage == 3 and size > 1:
            text = f"{ZERO}.zero_hpz_partition_size={size} keeps a second copy of the parameters inside groups of ranks"
            yield Problem(
                f"{ZERO}.zero_hpz_partition_size", f"{text}, and with {groups} the first is there. Remove one."
            )


def _tolerance(config: Schema) -> Iterator[Problem]:
    """Exchanges beside the sums that slow_node_tolerance lets go on without late ranks."""
    share, zero = config.communication.slow_node_tolerance, config.zero_optimization
    others = {
        "gradient_compression.algorithm": asks(config, "gradient_compression.algorithm"),
        "optimizer.type": bool(config.one_bit),
        f"{ZERO}.zero_quantized_gradients": zero.stage > 0 and zero.zero_quantized_gradients,
    }
    for name in [name for name, given in others.items() if share and given]:
        text = f"communication.slow_node_tolerance={share} lets sums of gradients go on without late ranks"
        yield Problem(
            "communication.slow_node_tolerance", f"{text}, and {name} asks for other sums. Remove one of them."
        )


def _one_bit(config: Schema) -> Iterator[Problem]:
    """Problems of 1-bit optimizers with other settings: their ranks do not exchange plain gradients."""
    kind = config.one_bit
    if config.optimizer is None or not kind:
        return
    zero, name = config.zero_optimization, f"optimizer.type={config.optimizer.type!r}"
    plain, local = ONE_BIT[kind], kind == "zerooneadam"
    if local and zero.stage > 0:
        yield Problem(
            "optimizer.type",
            f"{name} lets each rank step by itself between exchanges, which takes all weights and states on each, and "
            f"stage {zero.stage} shards them. Set {ZERO}.stage to 0, or use OneBitAdam, which works at stage 1, too.",
        )
    elif zero.stage > 1:
        yield Problem(
            "optimizer.type",
            f"{name} exchanges momenta, to which each rank adds all of its gradients, and at stage {zero.stage} these "
            f"are sharded. Set {ZERO}.stage to 0 or 1, or use {plain} with gradient_compression.",
        )
    clash = {
        "gradient_compression.algorithm": (
            asks(config, "gradient_compression.algorithm"),
            getattr(config.gradient_compression, "algorithm", "none"),
            "gradients are not exchanged",
        ),
        f"{ZERO}.offload_optimizer.device": (
            zero.offload_optimizer.device != "none",
            zero.offload_optimizer.device,
            "momenta have to be on the device",
        ),
        **{
            f"{ZERO}.{name}": (zero.replicas_by == name, getattr(zero, name), "all ranks exchange momenta")
            for name in ("mics_shard_size", "dp_replicate_size")
        },
        f"{ZERO}.zero_quantized_gradients": (
            zero.stage > 0 and zero.zero_quantized_gradients,
            True,
            "gradients are not exchanged",
        ),
    }
    for key, (wrong, value, why) in clash.items():
        if wrong:
            after = "var_freeze_step" if local else "freeze_step"
            yield Problem(key, f"{key}={value!r} cannot be combined with {name}: after {after} {why}. Remove it.")


def _parallel(config: Schema) -> Iterator[Problem]:
    sizes = {
        "tensor_parallel.autotp_size": config.tensor_parallel.autotp_size,
        "pipeline.stages": config.pipeline.ranks,
        "sequence_parallel_size": config.sequence_parallel_size,
    }
    yield from _sequence_parallel(config)
    sizes["expert_parallel.autoep_size"] = config.expert_parallel.ranks
    pieces, steps = config.pipeline.num_microbatches, config.gradient_accumulation_steps
    if config.pipeline.ranks > 1 and None not in (pieces, steps) and pieces != steps:
        text = f"pipeline.num_microbatches={pieces}, but gradient_accumulation_steps={steps} means the micro-batches"
        yield Problem("pipeline.num_microbatches", f"{text} of a pipeline, too. Remove one of them.")
    key, size = next(((key, size) for key, size in sizes.items() if size > 1), ("", 1))
    if size == 1:
        return
    parts = key == "sequence_parallel_size"
    needs = "gradients of whole sequences on each rank" if parts else "the same parameters on all ranks"
    exchanges = ("gradient_compression.algorithm", "communication.slow_node_tolerance", "optimizer.type")
    for other in (other for other in exchanges if asks(config, other)):
        text = f"{key}={size}: {other} needs {needs}. Remove one of them."
        yield Problem(other, text)


def _sequence_parallel(config: Schema) -> Iterator[Problem]:
    key = "sequence_parallel_size"
    size = config.sequence_parallel_size
    block = config.sequence_parallel
    if size == 1:
        return
    if asks(config, "sparse_attention"):
        text = f"{key}={size}: sparse_attention needs whole sequences on each rank. Remove one of them, or call "
        yield Problem("sparse_attention", f"{text}lt_zero.attention.sparse_attention in the model.")
    if size % block.gather:
        text = f"sequence_parallel.gather={block.gather} does not divide {key}={size}. Use a divisor."
        yield Problem("sequence_parallel.gather", text)


def _precision(config: Schema) -> Iterator[Problem]:
    fp16 = config.fp16
    bf16 = config.bf16
    autocast = config.torch_autocast
    if fp16.enabled is True and bf16.enabled is True:
        yield Problem("fp16.enabled", "fp16.enabled and bf16.enabled are both true. Switch one of them off.")
    if fp16.enabled is True and fp16.loss_scale == 0 and fp16.min_loss_scale == 0:
        text = "fp16.min_loss_scale=0 with a dynamic scale: the scale could shrink to 0."
        yield Problem("fp16.min_loss_scale", f"{text} Write 1, or a small number such as 1e-5.")
    moments = config.optimizer_states.dtype
    if moments not in (None, torch.float32, torch.bfloat16, torch.int8):
        name = str(moments).removeprefix("torch.")
        text = f"optimizer_states.dtype={name}: squares of gradients need the range of fp32. Write fp32, bf16 or int8."
        yield Problem("optimizer_states.dtype", text)
    if bf16.bf16_optimizer_states and moments in (torch.float32, torch.int8):
        name = "int8" if moments == torch.int8 else "fp32"
        text = f"optimizer_states.dtype={name} contradicts bf16.bf16_optimizer_states=true. Remove one."
        yield Problem("optimizer_states.dtype", text)
    if bf16.stochastic_rounding and not bf16.bf16_master_weights_and_grads:
        key = "bf16.stochastic_rounding"
        text = f"{key}=true rounds master weights that are kept in bf16, and here they are fp32. Set"
        yield Problem(key, f"{text} bf16.bf16_master_weights_and_grads=true, or remove the key.")
    asked = fp16.raise_error_at_min_scale
    if asked is not None and "on_min_scale" in config.model_fields_set and asked != (config.on_min_scale == "raise"):
        text = f"fp16.raise_error_at_min_scale={asked} contradicts on_min_scale={config.on_min_scale!r}. Remove one."
        yield Problem("fp16.raise_error_at_min_scale", text)
    if autocast.enabled and autocast.dtype == torch.float32:
        yield Problem("torch_autocast.dtype", "torch_autocast.dtype=fp32 casts nothing. Write bf16 or fp16.")
    name, other = ("bf16", bf16) if autocast.dtype == torch.float16 else ("fp16", fp16)
    if autocast.enabled and other.enabled is True:
        text = f"torch_autocast.dtype={autocast.dtype} contradicts {name}.enabled=true. Switch one of them off."
        yield Problem("torch_autocast.dtype", text)


def _offload(config: Schema) -> Iterator[Problem]:
    zero = config.zero_optimization
    for name, block in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.param_offload)):
        key, path = f"{ZERO}.{name}.nvme_path", block.nvme_path
        if block.device == "nvme" and path is None:
            yield Problem(key, f"{ZERO}.{name}.device='nvme' needs {key}: a folder on a local NVMe disk.")
        is_raw = path is not None and path.parts[:2] == ("/", "dev") and path.parts[2:3] != ("shm",)
        if block.device == "nvme" and is_raw:
            text = f"{key}={str(path)!r} is a raw device. Make a file system on it and name a folder there."
            yield Problem(key, text)
    if zero.offload_optimizer.device == "none" and zero.offload_optimizer.overlap_step is True:
        yield Problem(
            f"{ZERO}.offload_optimizer.overlap_step",
            f"{ZERO}.offload_optimizer.overlap_step=true needs offload_optimizer.device='cpu' or 'nvme': only an "
            "offloaded step can overlap with compute.",
        )


# ---- keys without effect ---------------------------------------------------------------------------------------------


def inactive(config: Schema, written: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Written keys that have no effect in this configuration, with the first reason for each.

    Skips blocks with ``enabled: false``, where that is expected.
    """
    own = (*_inactive_sharding(config), *_inactive_activations(config), *_inactive_elsewhere(config))
    rules = (*own, *(rule for block in _blocks_of_features(config) for rule in block.idle_in(config)))
    reasons = [rule for rule in rules if rule[0]]
    for path, _ in leaves(written, lists=False):
        block, name = dotted(path[:-1]), str(path[-1])
        found = (why for _, at, keys, why in reasons if at == block and (not keys or name in keys.split()))
        why = next(found, None)
        if why is not None and not why.startswith(f"{dotted(path)} is ") and not switched_off(written, path):
            yield path, why


def switched_off(written: Mapping[str, Any], path: Path) -> bool:
    """True if a key is in a block with ``enabled: false``; patterns of modules apply to both precisions."""
    block: Any = written
    for key in path[:-1]:
        block = block.get(key) if isinstance(block, Mapping) else None
        if isinstance(block, Mapping) and block.get("enabled") is False:
            return path[-1] not in ("enabled", "fp16_override_modules")
    return False


# Of each rule: whether it applies, the block, names of keys in it ("": all), and why they have no effect.
Rule = tuple[bool, str, str, str]
_STAGE3 = "stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance "
_STAGE3 += "stage3_model_persistence_threshold zero_allowed_param_types zero_force_param_types"
_FILES = "nvme_path buffer_count buffer_size max_in_cpu pipeline_read pipeline_write fast_init"
_SCALE = "initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale"


def _inactive_sharding(config: Schema) -> Sequence[Rule]:
    zero, gathered = config.zero_optimization, "parameters are gathered after the step at stages 1 and 2 only"
    states, weights = zero.offload_optimizer, zero.offload_param
    optimizer, param = f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param"
    flat = "gradients are copied into one flat buffer per bucket in any case"
    short = ["zero_quantized_nontrainable_weights"] if zero.zero_quantized_nontrainable_weights else []
    short += ["zero_hpz_partition_size"] if zero.zero_hpz_partition_size > 1 else []
    at_0 = "gradients are not sharded at stage 0, where gradient_compression can send fewer bits"
    none = (states.device, zero.param_offload.device) == ("none", "none")
    codes = f"with quantize={config.quantize} frozen weights are sent as codes in any case"
    frozen = "trained parameters are stored with their master weights: without offload_optimizer only frozen ones move"
    return (
        (zero.stage != 3, ZERO, _STAGE3, "parameters are sharded at stage 3 only"),
        (zero.stage not in (1, 2), ZERO, "allgather_bucket_size", gathered),
        (zero.stage != 3 and bool(short), ZERO, " ".join(short), "parameters are sharded at stage 3 only"),
        (config.quantize is not None, ZERO, "zero_quantized_nontrainable_weights", codes),
        (
            zero.stage == 0,
            ZERO,
            "shard_along reduce_scatter mics_shard_size dp_replicate_size",
            "nothing is sharded at stage 0",
        ),
        (zero.stage == 0 and zero.zero_quantized_gradients, ZERO, "zero_quantized_gradients", at_0),
        (
            zero.stage == 0 and zero.zero_quantized_weights,
            ZERO,
            "zero_quantized_weights",
            "stage 0 gathers nothing",
        ),
        (states.device == "none", ZERO, "sub_group_size", "it needs an offloaded optimizer"),
        (not zero.contiguous_gradients, ZERO, "contiguous_gradients", flat),
        (not states.fast_init, optimizer, "fast_init", "weights are written as they are initialized in any case"),
        (states.device != "nvme", optimizer, _FILES, "it counts with device: nvme only"),
        (states.device == "none", optimizer, "ratio", "nothing is offloaded"),
        (zero.stage != 3 and weights.device != "none", param, "", "parameters are not sharded below stage 3"),
        (none, optimizer, "pin_memory", "nothing is offloaded"),
        (none, param, "pin_memory", "nothing is offloaded"),
        (weights.device != "nvme", param, _FILES, "it counts with device: nvme only"),
        (weights.device != "none" and states.device == "none", param, "device", frozen),
    )


def _inactive_activations(config: Schema) -> Sequence[Rule]:
    saved, fields = config.activation_checkpointing, ActivationCheckpointing.model_fields.items()
    changed = " ".join(name for name, field in fields if getattr(saved, name) != field.default)
    alone = saved.number_checkpoints is not None and not saved.contiguous_memory_optimization
    cuts = saved.partition_activations and config.tensor_parallel.autotp_size == 1
    recomputed = f"nothing is recomputed without {ACTIVATIONS}.mode: full or selective"
    alike = "without tensor_parallel.autotp_size above 1 no other rank has the same inputs"
    in_files = "saved inputs are in files"
    return (
        (saved.mode == "none" and changed != "", ACTIVATIONS, changed, recomputed),
        (cuts, ACTIVATIONS, "partition_activations", alike),
        (alone, ACTIVATIONS, "number_checkpoints", "it needs contiguous_memory_optimization"),
        (saved.nvme_path is not None, ACTIVATIONS, "contiguous_memory_optimization number_checkpoints", in_files),
    )


def _inactive_elsewhere(config: Schema) -> Sequence[Rule]:
    zero, saved = config.zero_optimization, config.activation_checkpointing
    uses_files = "nvme" in (zero.offload_optimizer.device, zero.param_offload.device)
    uses_files |= saved.nvme_path is not None and saved.mode != "none"
    blocks = ("flops_profiler", "comms_logger", "csv_monitor", "tensorboard", "wandb", "comet")
    divides = config.prescale_gradients and config.gradient_predivide_factor != 1.0
    adds = "each backward adds to the accumulators in any case"
    prescaled = "prescale_gradients divides by the number of ranks instead, as in DeepSpeed"
    late = bool(config.communication.slow_node_tolerance) and config.broadcast_buffers
    waits = "with communication.slow_node_tolerance ranks do not wait for rank 0's buffers"
    buffers = "buffers keep their dtype without data_types.buffer_dtype"
    exchanges = config.sequence_parallel.method != "gather" and config.sequence_parallel.gather == 1
    return (
        (config.sequence_parallel_size == 1, "sequence_parallel", "", "sequence_parallel_size is 1"),
        (not config.expert_parallel.enabled, "expert_parallel", "autoep_size", "expert_parallel.enabled is false"),
        (exchanges, "sequence_parallel", "zigzag", "no keys are gathered"),
        (not config.bf16.immediate_grad_update, "bf16", "immediate_grad_update", adds),
        *((not getattr(config, block).enabled, block, "", f"{block}.enabled is false") for block in blocks),
        (config.comms_logger.prof_all, "comms_logger", "prof_ops", "comms_logger.prof_all records all operations"),
        (not uses_files, "aio", "", "nothing is offloaded to nvme"),
        (config.fp16.loss_scale != 0, "fp16", _SCALE, "fp16.loss_scale fixes the scale"),
        (divides, "", "gradient_predivide_factor", prescaled),
        (
            config.quantize is not None and config.zero_optimization.stage < 3,
            "",
            "quantize",
            "parameters are sharded at stage 3 only",
        ),
        (config.data_types.buffer_dtype is None, "data_types", "keep_in_fp32_modules", buffers),
        (late, "", "broadcast_buffers", waits),
    )
