"""All keys, in frozen blocks: types, defaults, bounds and meaning. Rules between keys are in ``rules.py``.

The keys are DeepSpeed's (0.19.8), so existing files can be passed as they are.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from lt_zero.common.errors import ConfigError, Problem
from lt_zero.common.numbers import to_number, to_whole_number

DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_DTYPES: Mapping[str, torch.dtype] = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32", "torch.float"), torch.float32),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16", "torch.half"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
}


def _dtype(value: Any) -> Any:
    found = _DTYPES.get(str(value).lower()) if isinstance(value, (str, torch.dtype)) else None
    if found is None:
        raise ValueError("it is not one of fp32, fp16, bf16")
    return found


def _folder(value: Any) -> Any:
    if not isinstance(value, (str, Path)):
        return value
    if not str(value).strip() or "\0" in str(value):
        raise ValueError("it is empty or not a path; name a folder on a local NVMe disk, or remove the key")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # ~name of an unknown user
        raise ValueError(f"{error} (write the whole path)") from None


def _stage(value: Any) -> Any:
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or value in ("0", "1", "2", "3")):
        raise ValueError("it is not one of 0, 1, 2, 3")
    return value


def _no_switch(value: Any) -> Any:
    """``to_whole_number`` for a choice of numbers: to Python, True is one of 1, 2, 3."""
    if isinstance(value, bool):
        raise ValueError("it is true or false, not a number")
    return to_whole_number(value)


def _whole_pages(value: int) -> int:
    if value % 4096:
        raise ValueError(f"{value} is not a multiple of 4096, as direct I/O requires")
    return value


class _FrozenDict(dict[str, Any]):
    """A mapping that cannot be changed, for blocks without a schema."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("A configuration is frozen. Make another: ZeroConfig.of(config, overrides=[...]).")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> Any:  # pickle and deepcopy would set the items of a dict
        return type(self), (dict(self),)


def thawed(value: Any) -> Any:
    """A mutable copy of a frozen dict, or of a list of these."""
    if isinstance(value, tuple) and any(isinstance(item, _FrozenDict) for item in value):
        return [thawed(item) for item in value]
    return dict(value) if isinstance(value, _FrozenDict) else value


def scalars(value: Any) -> Any:
    """Convert to types that JSON, YAML and ``torch.load(weights_only=True)`` support."""
    if isinstance(value, Mapping):
        return {str(key): scalars(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [scalars(entry) for entry in value]
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value))
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


# DeepSpeed's documentation writes null for "not given", its code an empty string.
_none_if_empty = BeforeValidator(lambda value: value or None)
_none_if_infinite = BeforeValidator(lambda value: None if value in (float("inf"), "inf") else value)
_empty_if_none = BeforeValidator(lambda value: "" if value is None else value)
_lower = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
_text = BeforeValidator(lambda value: str(value) if type(value) is int else value)  # YAML: digits are a number

_off_if_false = BeforeValidator(lambda value: {} if value in (False, "none") else value)
_one_if_zero = BeforeValidator(lambda value: 1 if type(value) is int and value == 0 else value)
_off_if_number = BeforeValidator(lambda value: {} if type(value) in (bool, int) and value in (0, 1) else value)
_none_if_false = BeforeValidator(lambda value: None if value is False else value)

Folder = Annotated[Path, BeforeValidator(_folder)]
Dtype = Annotated[
    torch.dtype, BeforeValidator(_dtype), WithJsonSchema({"type": "string", "enum": [*DTYPE_NAMES.values()]})
]
Whole = Annotated[int, BeforeValidator(to_whole_number), Field(strict=True)]
Elements = Annotated[int, BeforeValidator(to_whole_number), Field(ge=0, strict=True)]
Positive = Annotated[int, BeforeValidator(to_whole_number), Field(gt=0, strict=True)]
Real = Annotated[float, BeforeValidator(to_number), Field(strict=True, allow_inf_nan=False)]
Params = Annotated[dict[str, Any], AfterValidator(_FrozenDict)]
_GROUP = {
    "type": "object",
    "required": ["match"],
    "properties": {
        "match": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "name": {"type": "string"},
        "optional": {"type": "boolean"},
    },
}
ParamGroups = Annotated[tuple[Params, ...], WithJsonSchema({"type": "array", "items": _GROUP})]
# One name is a list of one.
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]


def key(default: Any, description: str, **more: Any) -> Any:
    """A key of a block; ``more`` as for ``Field``."""
    return Field(default, description=description, **more)


class Block(BaseModel):
    """A block of keys: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, arbitrary_types_allowed=True)


@cache
def keys_of(schema: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """The fields of a block by their keys; one with an alias has the alias, then its name."""
    found: dict[str, FieldInfo] = {}
    for name, field in schema.model_fields.items():
        if field.validation_alias is not None:
            found[str(field.validation_alias)] = field
        found[name] = field
    return found


def block_of(field: FieldInfo) -> type[Block] | None:
    """The block that a field holds, or None."""
    is_union = get_origin(field.annotation) in (Union, types.UnionType)
    kinds = get_args(field.annotation) if is_union else (field.annotation,)
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Block)), None)


def item_block_of(field: FieldInfo) -> type[Block] | None:
    """The block of the items of a list, or None."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) is tuple else ()
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Block)), None)


def dotted_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a schema and of the blocks in it, in their order."""
    for name, field in keys_of(schema).items():
        block = block_of(field)
        yield from (f"{prefix}{name}",) if block is None else dotted_keys(block, f"{prefix}{name}.")


# ---- blocks ----------------------------------------------------------------------------------------------------------

Switch = bool | Literal["auto"] | None


class Fp16(Block):
    """The ``fp16`` block."""

    enabled: Switch = key(None, "fp16 weights in forward and backward; auto: follow Trainer(precision=...)")
    auto_cast: bool | None = key(None, "cast floating-point inputs; null: in the true modes only (DeepSpeed: false)")
    loss_scale: Real = key(0.0, "0: dynamic, else a fixed scale", ge=0)
    initial_scale_power: Whole = key(16, "initial dynamic scale, as a power of 2", ge=0, le=100)
    loss_scale_window: Positive = key(1000, "steps without overflow before the scale doubles")
    hysteresis: Whole = key(2, "overflows before the scale is halved; 0 or less: never")
    consecutive_hysteresis: bool = key(False, "reset hysteresis at each step without overflow")
    min_loss_scale: Real = key(1.0, "lower bound of the dynamic scale, above 0 (DeepSpeed: whole numbers)", ge=0)
    raise_error_at_min_scale: bool | None = key(None, "true: on_min_scale=raise, false: hold")
    fp16_master_weights_and_grads: bool = key(False, "no fp32 copy of the weights, fp16 accumulators")
    fp16_override_modules: Names = key((), "as the key of the same name at top level")


class Bf16(Block):
    """The ``bf16`` block."""

    enabled: Switch = key(None, "bf16 weights in forward and backward; auto: follow Trainer(precision=...)")
    immediate_grad_update: bool = key(True, "add gradients to the accumulator in each backward (DeepSpeed: false)")
    check_grad_overflow: bool = key(True, "skip steps with non-finite gradients")
    bf16_master_weights_and_grads: bool = key(False, "no fp32 copy of the weights, bf16 accumulators")
    bf16_optimizer_states: bool = key(False, "keep moments in bf16; needs bf16_master_weights_and_grads")
    fp16_override_modules: Names = key((), "as the key of the same name at top level")


class TorchAutocast(Block):
    """The ``torch_autocast`` block: another way to say ``Trainer(precision="16-mixed")`` or ``"bf16-mixed"``."""

    enabled: bool = key(False, "run forward under torch.autocast and gather weights in its dtype")
    dtype: Dtype = key(torch.bfloat16, "fp16 or bf16 (DeepSpeed: any dtype that torch supports on the device)")


class DataTypes(Block):
    """The ``data_types`` block."""

    grad_accum_dtype: Dtype | None = key(
        None, "accumulators' dtype; null: the master weights' (DeepSpeed: the weights')"
    )
    param_dtype: Dtype | None = key(None, "checked against the fp16 or bf16 block; no other effect")
    buffer_dtype: Dtype | None = key(None, "cast floating-point buffers; null: keep their dtype")
    keep_in_fp32_modules: Literal["auto"] | Names = key(
        "auto", "modules whose buffers are not cast; auto: the model's _keep_in_fp32_modules"
    )


class OptimizerBlock(Block):
    """The ``optimizer`` block: the optimizer to build if the module has no ``configure_optimizers``."""

    type: str = key(
        ...,
        "Adam, AdamW, Adagrad, Lamb, Lion, Muon, OneBitAdam, OneBitLamb, SGD, ZeroOneAdam, torch.optim's or a path",
        min_length=1,
    )
    params: Params = key({}, "arguments of its constructor", validate_default=True)
    param_groups: ParamGroups = key(
        (),
        "parameter groups; a parameter joins the first that matches. Each has match: shell patterns of "
        "full parameter names joined by |, arguments as in params (also auto), a name, and optional: true if it may "
        "match nothing. All other parameters form the last group",
    )


class SchedulerBlock(Block):
    """The ``scheduler`` block: stepped after each optimizer step, ``ReduceLROnPlateau`` after each epoch."""

    type: str = Field(
        min_length=1,
        description="LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR or torch.optim.lr_scheduler's",
    )
    params: Params = key(
        {},
        "arguments of its constructor besides the optimizer; ReduceLROnPlateau, which steps at the end "
        "of each epoch, also needs monitor, a logged metric",
        validate_default=True,
    )


class LeafModule(Block):
    """Modules to gather as one unit although the model does not repeat them."""

    classes: Names = key((), "class names, bare or dotted, of unit modules (DeepSpeed: transformers' MoE blocks)")
    names: Names = key((), "full names of unit modules")
    name_suffixes: Names = key((), "suffixes of names of unit modules")


Device = Literal["none", "cpu", "nvme"]


class _Offload(Block):
    device: Device = key("none", "where to offload to")
    nvme_path: Folder | None = key(None, "folder for the files, on a fast local disk")
    pin_memory: bool = key(True, "use pinned host memory if there is a GPU; false in either block applies to both")


class OffloadOptimizer(_Offload):
    """The ``zero_optimization.offload_optimizer`` block."""

    buffer_count: Positive = key(4, "maximum buckets in memory at a time, with nvme")
    pipeline_read: bool = key(True, "read the next bucket during the step of the current one (DeepSpeed: false)")
    pipeline_write: bool = key(True, "write the previous bucket during the step of the current one (DeepSpeed: false)")
    fast_init: bool = key(False, "true: write weights to files as they are initialized (DeepSpeed: false)")
    ratio: Real = key(1.0, "fraction of the elements to offload", ge=0, le=1)
    overlap_step: bool | Literal["auto"] = key(
        "auto", "overlap the step with backward (auto), also with the next forward (true), or not at all (false)"
    )


class OffloadParam(_Offload):
    """The ``zero_optimization.offload_param`` block."""

    device: Device = key(
        "none",
        "where to offload to; trained parameters need offload_optimizer too, as they are gathered from "
        "the master weights",
    )
    buffer_count: Positive = key(5, "maximum buckets to read ahead, with nvme")
    buffer_size: Positive = key(100_000_000, "maximum elements to read ahead, with nvme")
    max_in_cpu: Elements = key(0, "elements to keep in host memory even with nvme (DeepSpeed: 1e9)")


class Aio(Block):
    """The ``aio`` block: how files are read and written."""

    block_size: Annotated[Positive, AfterValidator(_whole_pages)] = key(
        4 << 20, "bytes per request, a multiple of 4096 (DeepSpeed: 1048576)"
    )
    queue_depth: Positive = key(8, "maximum requests in flight per tensor")
    intra_op_parallelism: Positive = key(4, "number of I/O threads (DeepSpeed: 1)")
    single_submit: bool = key(False, "true: one request in flight per tensor, like queue_depth=1")
    overlap_events: bool = key(True, "false: one request in flight per tensor, like queue_depth=1")
    checksum: bool = key(False, "verify a checksum of the data on every read")

    @property
    def in_flight(self) -> int:
        """Requests in flight."""
        return 1 if self.single_submit or not self.overlap_events else self.queue_depth


class ActivationCheckpointing(Block):
    """The ``activation_checkpointing`` block (arXiv:1604.06174): activations are recomputed in backward.

    A checkpointed module saves only its inputs, and backward runs its forward again.
    """

    mode: Literal["none", "full", "selective"] = key(
        "none",
        "what to recompute: nothing, everything, or everything but matrix products and attention; the "
        "other keys of the block need full or selective",
    )
    every: Positive = key(1, "checkpoint every n-th module, starting with the first")
    modules: Names = key((), "class names, bare or dotted, of modules to checkpoint; empty: the repeated blocks")
    cpu_checkpointing: bool = key(False, "offload saved inputs to host memory between forward and backward")
    nvme_path: Folder | None = key(None, "offload saved inputs to files in this folder, on a fast local disk")
    partition_activations: bool = key(
        False, "whether of saved inputs that are the same on all tensor-parallel ranks each rank keeps a part"
    )
    contiguous_memory_optimization: bool = key(False, "keep saved inputs in one preallocated buffer")
    number_checkpoints: Positive | None = key(
        None, "number of saved inputs that fit into the preallocated buffer; null: one per checkpointed module"
    )
    synchronize_checkpoint_boundary: bool = key(False, "synchronize the device around each checkpointed module")
    profile: bool = key(False, "print the time of checkpointed modules in forward and backward")


# The keys that each pattern of ``lt_zero.attention`` has.
_HEADS = ("block", "different_layout_per_head", "attention")
SPARSE_MODES: Mapping[str, tuple[str, ...]] = {
    "dense": _HEADS,
    "fixed": (
        *(*_HEADS, "num_local_blocks", "num_global_blocks", "horizontal_global_attention"),
        "num_different_global_patterns",
    ),
    "variable": (
        *(*_HEADS, "num_random_blocks", "local_window_blocks", "global_block_indices", "global_block_end_indices"),
        *("horizontal_global_attention", "seed"),
    ),
    "bigbird": (*_HEADS, "num_random_blocks", "num_sliding_window_blocks", "num_global_blocks", "seed"),
    "bslongformer": (*_HEADS, "num_sliding_window_blocks", "global_block_indices", "global_block_end_indices"),
    "local_sliding_window": ("block", "attention", "num_sliding_window_blocks"),
}


def _sparse_mode(value: Any) -> Any:
    name = value.lower() if isinstance(value, str) else ""
    if name not in SPARSE_MODES:
        near = difflib.get_close_matches(name, SPARSE_MODES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"it is not a mode.{hint} Modes are {', '.join(SPARSE_MODES)}")
    return name


class SparseAttention(Block):
    """The ``sparse_attention`` block: which blocks of the attention matrix are computed."""

    mode: Annotated[
        Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window"],
        BeforeValidator(_sparse_mode),
    ] = key("fixed", "the pattern; a key that it does not have is an error")
    block: Positive = key(16, "tokens of a block")
    different_layout_per_head: bool = key(False, "a layout for each head, where the mode has several")
    attention: Literal["unidirectional", "bidirectional"] | None = key(
        None,
        "unidirectional: no token attends to later ones; null: unidirectional with local_sliding_window, else "
        "bidirectional (DeepSpeed: bidirectional, and the mask is the model's)",
    )
    num_local_blocks: Positive = key(4, "blocks of a local window (fixed)")
    num_global_blocks: Elements = key(
        1, "blocks of each window that all blocks attend to (fixed); how many first blocks are global (bigbird)"
    )
    horizontal_global_attention: bool = key(
        False, "global blocks attend to all blocks, too (fixed, variable; bidirectional only)"
    )
    num_different_global_patterns: Positive = key(
        1, "in how many ways heads choose the global blocks of a window, from its end (fixed)"
    )
    num_random_blocks: Elements = key(0, "random blocks in each row of blocks (variable, bigbird)")
    local_window_blocks: tuple[Positive, ...] = key(
        (4,), "blocks of the first local windows; the last number repeats (variable)", min_length=1
    )
    global_block_indices: tuple[Elements, ...] = key(
        (0,), "global blocks, or with global_block_end_indices the first of each range (variable, bslongformer)"
    )
    global_block_end_indices: tuple[Elements, ...] | None = key(
        None, "the block after each range of global blocks; null: ranges of one block (variable, bslongformer)"
    )
    num_sliding_window_blocks: Positive = key(
        3,
        "width of the window around each block; an even number is one more (bigbird, bslongformer, "
        "local_sliding_window)",
    )
    seed: Elements = key(0, "where random blocks start from (variable, bigbird)")

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of the mode, without those that are null."""
        values = {name: getattr(self, name) for name in SPARSE_MODES[self.mode]}
        return {name: value for name, value in values.items() if value is not None}

    @model_serializer
    def _of_the_mode(self) -> dict[str, Any]:
        # The configuration is read again from what was dumped, and keys of other modes are errors there.
        return {"mode": self.mode, **self.settings}


class Checkpoint(Block):
    """How training states are saved and restored."""

    format: Literal["auto", "sharded", "full"] = key(
        "auto",
        "sharded: a directory that all ranks write; full: one file by rank 0; auto: full at stage 0 without "
        "tensor parallelism",
    )
    async_save: bool = key(
        False, "write a copy in host memory to files in the background (sharded only)", validation_alias="async"
    )
    save_frozen: bool = key(True, "false: leave out parameters that need no gradient")
    load_module_only: bool = key(False, "fit(ckpt_path=...) loads the weights only and starts a new run")
    load_optimizer_states: bool = key(True, "false: fit(ckpt_path=...) starts with fresh optimizers")
    load_lr_scheduler_states: bool = key(True, "false: fit(ckpt_path=...) starts with fresh schedules")


# Operations of comm/, by their names in torch.distributed and DeepSpeed.
OPERATIONS: dict[str, tuple[str, ...]] = {
    "all_gather": ("all_gather_into_tensor", "all_gather_single", "all_gather_base"),
    "reduce_scatter": ("reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter_base"),
    "all_reduce": (),
    "broadcast": (),
    "barrier": (),
    "all_gather_object": (),
    "broadcast_object_list": (),
}


def operation_of(name: str) -> str | None:
    """The operation with this name; None if unknown.

    >>> operation_of("all-gather"), operation_of("all_gather_into_tensor"), operation_of("send")
    ('all_gather', 'all_gather', None)
    """
    name = name.strip().lower().replace("-", "_")
    return next((known for known, others in OPERATIONS.items() if name in (known, *others)), None)


class FlopsProfiler(Block):
    """The ``flops_profiler`` block: a table of one micro-batch, counted by torch's ``FlopCounterMode``."""

    enabled: bool = key(False, "count the floating-point operations of one micro-batch per module")
    profile_step: Elements = key(1, "count the first micro-batch after this many steps; never the first one of a fit")
    module_depth: Annotated[Whole, Field(ge=-1)] = key(
        -1, "levels of modules below the root in both tables; -1: all (DeepSpeed: in the aggregate only)"
    )
    top_modules: Positive = key(1, "number of module classes per level in the aggregate")
    detailed: bool = key(True, "false: print the aggregate only, without a row per module")
    output_file: Annotated[str, _none_if_empty] | None = key(None, "text file that rank 0 writes; null: stdout")
    recompute_fwd_factor: Real = key(0.0, "assumed fraction of forward recomputed in backward, if none was seen", ge=0)


class CommsLogger(Block):
    """The ``comms_logger`` block: time and volume of the engine's collectives."""

    enabled: bool = key(False, "record collectives, print a table after fit (DeepSpeed: true if the block has any key)")
    verbose: bool = key(False, "rank 0 prints each collective when it completes; synchronizes the GPU")
    prof_all: bool = key(True, "record all operations; false: only those in prof_ops")
    debug: bool = key(False, "break down by unit, bucket or purpose")
    prof_ops: Names = key((), "operations to record if prof_all is false: " + ", ".join(OPERATIONS))

    @property
    def operations(self) -> frozenset[str]:
        """Those that are recorded."""
        if self.prof_all:
            return frozenset(OPERATIONS)
        return frozenset(known for name in self.prof_ops if (known := operation_of(name)) is not None)


class _Monitor(Block):
    enabled: bool = key(
        False,
        "attach this logger unless the Trainer already has one of its kind; it gets the metrics of "
        "steps_per_print, at the Trainer's log_every_n_steps if that is null",
    )


class _Files(_Monitor):
    output_path: Annotated[str, _empty_if_none] = key("", "directory; empty: Trainer(default_root_dir=...)")
    job_name: str = key("DeepSpeedJobName", "subdirectory; each run gets its own version_<n> there")


class CsvMonitor(_Files):
    """The ``csv_monitor`` block: Lightning's ``CSVLogger``."""


class TensorBoard(_Files):
    """The ``tensorboard`` block: Lightning's ``TensorBoardLogger``."""


class Wandb(_Monitor):
    """The ``wandb`` block: Lightning's ``WandbLogger``."""

    group: str | None = key(None, "group of runs that this run belongs to")
    team: str | None = key(None, "entity (user or team) that owns the project; null: the user's default")
    project: str = key("deepspeed", "project that the run is part of")


class Comet(_Monitor):
    """The ``comet`` block: Lightning's ``CometLogger``. Comet's own files and environment set what is null."""

    samples_log_interval: Positive = key(
        100, "accepted, no effect; Trainer(log_every_n_steps=...) sets the interval, in optimizer steps"
    )
    project: str | None = key(None, "project of the experiment")
    workspace: str | None = key(None, "workspace of the project")
    # excluded from every dump: the configuration is saved with each checkpoint
    api_key: Annotated[SecretStr, _text] | None = key(
        None, "API key; COMET_API_KEY in the environment keeps it out of files", exclude=True
    )
    experiment_name: str | None = key(None, "name of the experiment")
    experiment_key: str | None = key(None, "its id, 32 to 50 letters and digits", pattern="^[A-Za-z0-9]{32,50}$")
    online: bool | None = key(None, "false: an offline experiment; null: true")
    mode: Literal["get", "create", "get_or_create"] | None = key(
        None, "get: continue experiment_key, create: always a new one; null: get_or_create"
    )


class Communication(Block):
    """The ``communication`` block: collectives over several nodes."""

    topology: Annotated[Literal["auto", 1, 2, 3], BeforeValidator(_no_switch)] = key(
        "auto",
        "1: one ring of all ranks, 2: ranks of a node, then nodes, 3: a torus in 3 dimensions; auto: 2 with gloo on "
        "several nodes",
    )
    slow_node_tolerance: Real = key(
        0.0, "share of the ranks whose gradients a sum does not wait for: they are in a later one (gloo)", ge=0, lt=1
    )
    link_timeout: Real = key(
        120.0,
        "seconds for which a link may be cut, or a host not answer, before ranks give each other up with an error; "
        "processes that end are noticed at once (gloo; NCCL has limits of its own)",
        ge=1,
        le=900,
    )


def _regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"it is no regular expression ({error})") from None
    return value


_Axis = Annotated[Literal[0, 1], BeforeValidator(_no_switch)]
_PositiveList = Annotated[tuple[Positive, ...], Field(min_length=1)]
Regexes = Annotated[
    tuple[Annotated[str, AfterValidator(_regex)], ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    Field(min_length=1),
]


class LayerSpec(Block):
    """A rule of ``tensor_parallel.partition_config.layer_specs``."""

    patterns: Regexes = Field(description="regular expressions for full parameter names, matched from the beginning")
    partition_type: Annotated[Literal["column", "row", "skip"], _lower] = key(
        "column", "column: each rank has a part of a linear layer's outputs, row: of its inputs, skip: all of it"
    )
    shape: tuple[Positive | Literal[-1] | _PositiveList, ...] | None = key(
        None, "of a layer whose output is several outputs in a row: [[sizes], -1], or [number, -1] if they are equal"
    )
    partition_dim: _Axis | None = key(None, "axis of the weight; null: 0 for column, 1 for row")
    model_types: Names | None = key(None, "model_type of the models to which the rule applies; null: any")
    gather_output: bool = key(False, "gather the output of a column layer, so that each rank has all of it")
    grad_allreduce: bool = key(False, "with skip: sum gradients over the ranks, each of which has used its part only")

    @model_validator(mode="after")
    def _consistent(self) -> LayerSpec:
        kind = self.partition_type
        if kind != "column" and (self.shape is not None or self.gather_output):
            word = "gather_output" if self.gather_output else "shape"
            raise ValueError(f"{word} is of partition_type=column, not {kind}. Remove it, or change the type")
        if kind != "skip" and self.grad_allreduce:
            raise ValueError(f"grad_allreduce is of partition_type=skip, not {kind}. Remove it, or change the type")
        if self.shape is not None and (len(self.shape) != 2 or self.shape[0] == -1 or not _is_size(self.shape[1])):
            raise ValueError(
                f"shape={scalars(self.shape)} is neither [[sizes], -1] nor [number, -1]: outputs in a row along "
                "axis 0, and all inputs. Write one of these, or gather_output: true without shape"
            )
        if self.shape is not None and self.partition_dim == 1:
            raise ValueError("partition_dim=1 with shape is not supported. Remove partition_dim, or shape")
        return self


def _is_size(value: Any) -> bool:
    return isinstance(value, int)


class PartitionConfig(Block):
    """The ``tensor_parallel.partition_config`` block: which rank has which part of a layer."""

    layer_specs: tuple[LayerSpec, ...] = key(
        (),
        "rules; a parameter takes the first that matches. Each has patterns, and may have partition_type: column "
        "(default), row or skip, shape: [[sizes], -1] of outputs in a row, partition_dim, model_types, gather_output, "
        "and grad_allreduce. A pattern that matches nothing is an error",
    )
    use_default_specs: bool = key(True, "rules of preset_model, if there is one, for what layer_specs does not match")
    strict_mode: bool = key(False, "raise if a linear layer matches no rule; false: each rank has all of it")
    embedding_partition_dim: _Axis = key(1, "axis along which embeddings are cut: 0, the vocabulary, or 1")
    lm_head_patterns: Names = key(
        ("lm_head", "embed_out"), "last parts of names of heads, whose outputs are gathered if a rule cuts them"
    )


class TensorParallel(Block):
    """The ``tensor_parallel`` block: ranks that have parts of each layer."""

    autotp_size: Annotated[int, BeforeValidator(to_whole_number), Field(gt=0, strict=True), _one_if_zero] = key(
        1, "ranks that share the tensors of each layer, and see the same data; they divide all ranks (DeepSpeed: 0)"
    )
    partition_config: PartitionConfig | None = key(
        None, "how layers are cut; null: as the model's own plan (transformers) says"
    )
    preset_model: str | None = key(
        None, "a model type of transformers whose plan is used, such as llama or qwen2", min_length=1
    )


def _partition_method(value: Any) -> Any:
    method = value.lower() if isinstance(value, str) and not value.lower().startswith("type:") else value
    if method == "best":  # DeepSpeed's default of the key that it does not read
        return "parameters"
    if isinstance(method, str) and method.lower().startswith("type:"):
        return f"type:{_regex(method[5:])}"
    if method not in ("parameters", "uniform", "time"):
        raise ValueError("it is not one of parameters, uniform, time, type:REGEX")
    return method


class PipelineParallel(Block):
    """The ``pipeline`` block: ranks that have some of a model's layers each, one after the other."""

    stages: Literal["auto"] | Annotated[Positive, _one_if_zero] = key(
        "auto", "ranks that have layers after each other, and see the same data; auto: as the model says, or 1"
    )
    partition_method: Annotated[str, BeforeValidator(_partition_method)] = key(
        "parameters",
        "how layers are divided: parameters: equally many, uniform: equally many layers, type:REGEX: equally many "
        "layers of these classes, time: equally long forwards, measured",
    )
    schedule: Literal["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"] = key(
        "1F1B", "order of forwards and backwards of micro-batches; the last two have several stages on each rank"
    )
    num_microbatches: Positive | None = key(
        None, "micro-batches that a batch is cut into; null: gradient_accumulation_steps, or twice the stages"
    )
    stages_per_rank: Positive | None = key(
        None, "stages on each rank, in turn; null: 2 for Interleaved1F1B and LoopedBFS, else 1"
    )
    activation_checkpoint_interval: Elements = key(0, "layers that are recomputed together in backward; 0: none")
    seed_layers: bool = key(
        False, "seed each layer by its number, so that ranks need not draw the values of others' layers"
    )

    @property
    def ranks(self) -> int:
        """``stages`` as a number."""
        return 1 if self.stages == "auto" else self.stages

    @property
    def chunks(self) -> int:
        """Stages on each rank."""
        return self.stages_per_rank or (2 if self.schedule in ("Interleaved1F1B", "LoopedBFS") else 1)

    @model_validator(mode="after")
    def _consistent(self) -> PipelineParallel:
        looped = self.schedule in ("Interleaved1F1B", "LoopedBFS")
        if not looped and self.chunks > 1:
            raise ValueError(
                f"stages_per_rank={self.chunks} needs schedule=Interleaved1F1B or LoopedBFS, not {self.schedule}"
            )
        return self


class GradientCompression(Block):
    """The ``gradient_compression`` block: gradients are sent in fewer bits, with error feedback."""

    algorithm: Annotated[Literal["none", "topk", "1bit", "2bit"], _lower] = key(
        "none", "topk: only the largest elements, 1bit: signs, 2bit: four levels, in blocks with a scale each"
    )
    topk_ratio: Real = key(0.01, "share of the elements that topk sends", gt=0, le=1)
    huffman_coding: bool = key(False, "code what topk sends: fewer bytes, more work for the host")
    hierarchical_compress: bool = key(
        False, "sum gradients inside a node uncompressed, and compress what goes between nodes only"
    )
    exclude: Literal["auto"] | Names = key(
        "auto",
        "parameters that are sent as they are: class names of modules, patterns of modules or parameters; auto: norms, "
        "biases and embeddings with 1bit, else none",
    )
    warmup_steps: Elements = key(0, "optimizer steps whose gradients are sent as they are")


class ZeroOptimization(Block):
    """The ``zero_optimization`` block."""

    stage: Annotated[int, BeforeValidator(_stage)] = key(
        0, "0: nothing sharded, 1: optimizer, 2: + gradients, 3: + parameters", ge=0, le=3
    )
    overlap_comm: bool = key(
        True,
        "reduce gradients during backward, gather updated weights during forward (DeepSpeed: true at stage 3 only)",
    )
    shard_along: Literal["element", "parameter"] = key(
        "element",
        "where shards begin: at any element, or at parameter boundaries, so that optimizers see whole "
        "matrices; the latter pads buckets: examples/gpt.py with 24 layers by 0, 1 and 2 % at 2, 4 and 8 ranks at "
        "stages 1 and 2, by 25, 42 and 175 % at stage 3, where each layer is a bucket",
    )
    contiguous_gradients: bool = key(True, "true: copy gradients into one flat buffer per bucket as they are produced")
    reduce_scatter: bool = key(True, "false: all-reduce and keep the own shard (no effect if CPU ranks share memory)")
    reduce_bucket_size: Positive = key(
        500_000_000, "maximum elements of a gradient bucket; a larger parameter gets a bucket of its own"
    )
    allgather_bucket_size: Positive = key(500_000_000, "maximum elements per all-gather of parameters (stages 1, 2)")
    stage3_prefetch_bucket_size: Elements = key(
        50_000_000, "elements to prefetch; a unit may be larger if no other is prefetched; 0: none"
    )
    stage3_param_persistence_threshold: Elements = key(
        100_000, "parameters with fewer elements are not sharded (DeepSpeed: with at most as many)"
    )
    stage3_model_persistence_threshold: Elements | None = key(
        None,
        "maximum elements of the model that are not sharded, smallest parameters first; null: no limit "
        "(DeepSpeed: in model order)",
    )
    stage3_max_live_parameters: Elements = key(
        1_000_000_000, "maximum gathered elements per rank; beyond it nothing is kept gathered or prefetched"
    )
    stage3_max_reuse_distance: Elements = key(
        1_000_000_000, "keep a parameter gathered if it is used again within this many elements; 0: release at once"
    )
    leaf_module: LeafModule = key(LeafModule(), "modules to gather as one unit although the model does not repeat them")
    zero_allowed_param_types: Names = key((), "class names of modules: at stage 3 only these are sharded; empty: all")
    zero_force_param_types: Names = key((), "class names of modules whose parameters are not sharded at stage 3")
    mics_shard_size: Whole = key(
        -1,
        "shard over groups of so many neighbouring ranks, which hold a full copy each, instead of all ranks (MiCS); "
        "-1: all ranks",
        ge=-1,
    )
    zero_quantized_weights: bool = key(
        False,
        "gather parameters (stages 1, 2: updates) as 8 bits of an element (ZeRO++, qwZ); master weights stay exact",
    )
    zero_quantized_nontrainable_weights: bool = key(False, "the same for frozen parameters only (stage 3)")
    zero_hpz_partition_size: Whole = key(
        1,
        "so many neighbouring ranks (a node) keep a second copy of the parameters, which gathers read until the "
        "weights change (ZeRO++, hpZ; stage 3); 1: none",
        ge=0,
    )
    zero_quantized_gradients: bool = key(
        False,
        "reduce gradients as 8 bits of an element inside a node, as 4 bits between nodes (ZeRO++, qgZ)",
    )
    sync_bn_in_backward: bool = key(False, "compute batch norm statistics over all ranks")
    enable_sanity_checks: bool = key(False, "compare each collective across ranks before launch, like LT_ZERO_DEBUG=1")
    offload_optimizer: OffloadOptimizer = key(OffloadOptimizer(), "where optimizer states are stored")
    offload_param: OffloadParam = key(OffloadParam(), "where parameter shards are stored (stage 3)")
    load_from_fp32_weights: bool = key(True, "false: on resume, master weights start from those in the compute dtype")
    stage3_gather_16bit_weights_on_model_save: bool = key(
        False, "one 16-bit file of all weights next to each checkpoint"
    )
    sub_group_size: Elements = key(
        1_000_000_000, "maximum elements of a bucket if the optimizer is offloaded; 0: one bucket per parameter"
    )

    def shards(self, world: int) -> int:
        """Into how many parts ``world`` ranks cut what is sharded.

        Raises:
            ConfigError: ``mics_shard_size`` does not divide ``world``.
        """
        wanted = self.mics_shard_size if self.stage > 0 and self.mics_shard_size > 0 else world
        return self._divisor("mics_shard_size", wanted, world)

    def secondary_shards(self, world: int) -> int:
        """How many of ``world`` ranks share a second copy of the parameters; 1: there is none.

        Raises:
            ConfigError: ``zero_hpz_partition_size`` does not divide ``world``.
        """
        wanted = self.zero_hpz_partition_size if self.stage == 3 and world > 1 else 1
        return self._divisor("zero_hpz_partition_size", max(wanted, 1), world)

    def _divisor(self, name: str, size: int, world: int) -> int:
        if world % size:
            key = f"zero_optimization.{name}"
            fitting = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
            text = f"{key}={size} does not divide the {world} ranks that a parameter is sharded over (with tensor "
            text = f"{text}parallelism the data ranks): write one of {fitting}"
            raise ConfigError([Problem(key, f"{text}, or remove the key.")])
        return size

    @property
    def param_offload(self) -> OffloadParam:
        """``offload_param``, or its defaults below stage 3, where parameters are not sharded."""
        return self.offload_param if self.stage == 3 else OffloadParam()


class Schema(Block):
    """Everything that can be configured. ``ZeroConfig`` adds how one is made."""

    train_batch_size: Positive | None = key(None, "samples per optimizer step over all ranks; checked against the data")
    train_micro_batch_size_per_gpu: Positive | None = key(
        None, "samples per micro-batch on each rank; checked against the first batch"
    )
    gradient_accumulation_steps: Positive | None = key(
        None, "micro-batches per optimizer step; must agree with Trainer(accumulate_grad_batches) if both are set"
    )
    gradient_clipping: Real | None = key(
        None, "maximum global gradient norm, 0: no clipping; null: Trainer(gradient_clip_val) (DeepSpeed: 1.0)", ge=0
    )
    steps_per_print: Annotated[Positive | None, _none_if_infinite] = key(
        None,
        "print a line every N optimizer steps; null or inf: never. Loggers get the same metrics: "
        "zero/loss, zero/lr, zero/loss_scale (DeepSpeed: Train/Samples/train_loss, .../lr, .../loss_scale), and "
        "grad_norm, skipped_steps, samples_per_s, tflops (per device), memory_gb (1e9 bytes; GPU: peak so far)",
    )
    dump_state: bool = key(False, "print the resolved configuration and the bytes of model states once")
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"] | None, _lower] = key(
        None, "level of the logger lt_zero; error and above also hide progress bars"
    )
    flops_profiler: FlopsProfiler = key(FlopsProfiler(), "floating-point operations of a micro-batch, per module")
    comms_logger: CommsLogger = key(CommsLogger(), "time and volume of collectives")
    wall_clock_breakdown: bool = key(
        False,
        "print and log the time of forward, backward, waits and the optimizer, every steps_per_print "
        "(null: 10) optimizer steps",
    )
    memory_breakdown: bool = key(
        False, "print memory use at each phase of the first step, then every steps_per_print (null: 10) steps"
    )
    disable_python_gc: bool = key(False, "disable automatic garbage collection during fit")
    zero_optimization: ZeroOptimization = key(ZeroOptimization(), "what is sharded and how")
    fp16: Fp16 = key(Fp16(), "training with fp16 weights")
    bf16: Bf16 = key(Bf16(), "training with bf16 weights")
    torch_autocast: TorchAutocast = key(TorchAutocast(), "training under torch.autocast")
    data_types: DataTypes = key(DataTypes(), "dtypes of accumulators and buffers")
    aio: Aio = key(Aio(), "file I/O of offloaded states")
    checkpoint: Checkpoint = key(Checkpoint(), "saving and resuming")
    optimizer: OptimizerBlock | None = key(None, "optimizer to build if the module has no configure_optimizers")
    scheduler: SchedulerBlock | None = key(None, "learning-rate schedule, stepped after each optimizer step")
    activation_checkpointing: ActivationCheckpointing = key(
        ActivationCheckpointing(), "recompute activations in backward to save memory"
    )
    sparse_attention: Annotated[SparseAttention | None, _none_if_false] = key(
        None, "block-sparse attention; null or false: the model's own"
    )
    csv_monitor: CsvMonitor = key(CsvMonitor(), "metrics in CSV files")
    tensorboard: TensorBoard = key(TensorBoard(), "metrics for TensorBoard")
    wandb: Wandb = key(Wandb(), "metrics for Weights & Biases")
    comet: Comet = key(Comet(), "metrics for Comet")
    communication: Communication = key(Communication(), "collectives over several nodes")
    data_parallel_size: Positive | None = key(None, "ranks that see different data; checked against the others")
    tensor_parallel: Annotated[TensorParallel, _off_if_number] = key(
        TensorParallel(), "ranks that have parts of each layer"
    )
    pipeline: PipelineParallel = key(PipelineParallel(), "ranks that have some of the model's layers each")
    gradient_compression: Annotated[GradientCompression, _off_if_false] = key(
        GradientCompression(), "gradients in fewer bits, with error feedback"
    )
    communication_data_type: Dtype | None = key(
        None, "dtype in which gradients are reduced; null: their own, or the accumulators' where the sum would round"
    )
    prescale_gradients: bool = key(False, "divide gradients by the number of ranks before the reduction, not after")
    gradient_predivide_factor: Real = key(1.0, "divide gradients by this before the reduction", gt=0)
    gradient_allreduce_op: Literal["mean", "sum"] = key("mean", "reduction of gradients over ranks")
    broadcast_buffers: bool = key(
        True, "send rank 0's buffers that change before each training forward; false: each rank keeps its own"
    )
    fp16_override_modules: Names = key((), "class names, module or parameter patterns to keep in fp32")
    fused_step: bool = key(True, "step Adam, AdamW, SGD, Adagrad, Lion and Lamb with one fused native kernel each")
    ops: Literal["auto", "required"] = key(
        "auto",
        "auto: fall back to torch operations, with one warning, where native kernels cannot be built; "
        "required: raise at set-up if a kernel is missing",
    )
    quantize: Annotated[Literal[8] | None, BeforeValidator(to_whole_number)] = key(
        None,
        "8: parameters that are sharded rest in 8 bits, in blocks of 256 elements with a scale, and are decoded when "
        "they are gathered; for inference only (DeepSpeed: weight_quantization)",
    )
    max_cpu_gb: Real | None = key(None, "maximum host memory to use per node, in GB (1e9 bytes)", gt=0)
    on_skipped_step: Literal["hold", "advance"] = key("hold", "whether skipped steps hold schedules, or advance them")
    on_min_scale: Literal["raise", "hold", "warn"] = key("raise", "what to do on overflow at the minimum loss scale")
    on_nonfinite: Literal["warn", "raise", "skip"] = key(
        "warn",
        "non-finite gradients without fp16: warn once and continue, raise before the step, or skip the "
        "step; bf16 skips unless bf16.check_grad_overflow is false",
    )

    @property
    def micro_batches(self) -> int:
        """Micro-batches that a pipeline cuts a batch of the data loader into; 1: there is none."""
        if self.pipeline.ranks == 1:
            return 1
        return self.pipeline.num_microbatches or self.gradient_accumulation_steps or 2 * self.pipeline.ranks

    @property
    def sharded_checkpoints(self) -> bool:
        """Whether checkpoints are directories that all ranks write."""
        parts = self.tensor_parallel.autotp_size > 1 or self.pipeline.ranks > 1
        how, cut = self.checkpoint.format, self.zero_optimization.stage > 0 or parts
        return how == "sharded" or (how == "auto" and cut)
