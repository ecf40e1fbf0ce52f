"""The blocks of the configuration: their keys, defaults and bounds. Rules between keys are in ``rules.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, SecretStr, field_validator

from lt_zero.config.fields import Block, Dtype, Elements, Names, ParamGroups, Params, PositiveElements, Real, Whole, key

Switch = bool | Literal["auto"] | None


class Fp16(Block):
    """The ``fp16`` block."""

    enabled: Switch = key(None, "fp16 weights in forward and backward; auto: follow Trainer(precision=...)")
    auto_cast: bool | None = key(None, "cast floating-point inputs; null: in the true modes only (DeepSpeed: false)")
    loss_scale: Real = key(0.0, "0: dynamic, else a fixed scale", ge=0)
    initial_scale_power: Whole = key(16, "initial dynamic scale, as a power of 2", ge=0, le=100)
    loss_scale_window: PositiveElements = key(1000, "steps without overflow before the scale doubles")
    hysteresis: Whole = key(2, "overflows before the scale is halved; 0 or less: never")
    consecutive_hysteresis: bool = key(False, "reset hysteresis at each step without overflow")
    min_loss_scale: Real = key(
        1.0, "lower bound of the dynamic scale, any number above 0 (DeepSpeed: whole numbers)", ge=0
    )
    raise_error_at_min_scale: bool | None = key(None, "true: on_min_scale=raise, false: hold")
    fp16_master_weights_and_grads: bool = key(False, "no fp32 copy of the weights, fp16 accumulators")
    fp16_override_modules: Names = key((), "as the key of the same name at top level")


class Bf16(Block):
    """The ``bf16`` block."""

    enabled: Switch = key(None, "bf16 weights in forward and backward; auto: follow Trainer(precision=...)")
    immediate_grad_update: bool = key(
        True, "true: add gradients to the accumulator in each backward (DeepSpeed: false)"
    )
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
        None, "dtype of the gradient accumulators; null: the master weights' (DeepSpeed: the weights')"
    )
    param_dtype: Dtype | None = key(None, "checked against the fp16 or bf16 block; no other effect")
    buffer_dtype: Dtype | None = key(None, "cast floating-point buffers; null: keep their dtype")
    keep_in_fp32_modules: Literal["auto"] | Names = key(
        "auto", "modules whose buffers are not cast; auto: the model's _keep_in_fp32_modules"
    )


class OptimizerBlock(Block):
    """The ``optimizer`` block: the optimizer to build if the module has no ``configure_optimizers``."""

    type: str = Field(
        min_length=1, description="Adam, AdamW, Adagrad, Lamb, Lion, Muon, SGD, a torch.optim class or a dotted path"
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
    nvme_path: Path | None = key(None, "folder for the files, on a fast local disk")
    pin_memory: bool = key(
        True, "use pinned host memory if there is a GPU; false in either offload block applies to both"
    )

    @field_validator("nvme_path", mode="before")
    @classmethod
    def _folder(cls, value: Any) -> Any:
        if isinstance(value, (str, Path)) and (not str(value).strip() or "\0" in str(value)):
            raise ValueError("it is empty or not a path; name a folder on a local NVMe disk, or remove the key")
        try:
            return Path(value).expanduser() if isinstance(value, (str, Path)) else value
        except RuntimeError as error:  # ~name of an unknown user
            raise ValueError(f"{error} (write the whole path)") from None


class OffloadOptimizer(_Offload):
    """The ``zero_optimization.offload_optimizer`` block."""

    buffer_count: PositiveElements = key(4, "maximum buckets in memory at a time, with nvme")
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
    buffer_count: PositiveElements = key(5, "maximum buckets to read ahead, with nvme")
    buffer_size: PositiveElements = key(100_000_000, "maximum elements to read ahead, with nvme")
    max_in_cpu: Elements = key(0, "elements to keep in host memory even with nvme (DeepSpeed: 1e9)")


class Aio(Block):
    """The ``aio`` block: how files are read and written."""

    block_size: PositiveElements = key(4 << 20, "bytes per request, a multiple of 4096 (DeepSpeed: 1048576)")
    queue_depth: PositiveElements = key(8, "maximum requests in flight per tensor")
    intra_op_parallelism: PositiveElements = key(4, "number of I/O threads (DeepSpeed: 1)")
    single_submit: bool = key(False, "true: one request in flight per tensor, like queue_depth=1")
    overlap_events: bool = key(True, "false: one request in flight per tensor, like queue_depth=1")
    checksum: bool = key(False, "verify a checksum of the data on every read")

    @field_validator("block_size")
    @classmethod
    def _whole_blocks(cls, value: int) -> int:
        if value % 4096:
            raise ValueError(f"{value} is not a multiple of 4096, as direct I/O requires")
        return value

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
    every: PositiveElements = key(1, "checkpoint every n-th module, starting with the first")
    modules: Names = key(
        (), "class names, bare or dotted, of the modules to checkpoint; empty: the repeated blocks of the model"
    )
    cpu_checkpointing: bool = key(False, "offload saved inputs to host memory between forward and backward")
    nvme_path: Path | None = key(None, "offload saved inputs to files in this folder, on a fast local disk")
    partition_activations: bool = key(
        False, "false: there is no tensor- or sequence-parallel group to split saved inputs over"
    )
    contiguous_memory_optimization: bool = key(False, "keep saved inputs in one preallocated buffer")
    number_checkpoints: PositiveElements | None = key(
        None, "number of saved inputs that fit into the preallocated buffer; null: one per checkpointed module"
    )
    synchronize_checkpoint_boundary: bool = key(
        False, "synchronize the device before and after each checkpointed module"
    )
    profile: bool = key(False, "print the time of checkpointed modules in forward and backward")


class Checkpoint(Block):
    """How training states are saved and restored."""

    format: Literal["auto", "sharded", "full"] = key(
        "auto", "sharded: a directory that all ranks write; full: one file by rank 0; auto: full at stage 0"
    )
    async_save: bool = key(
        False,
        "copy to host memory and write in the background while training continues (sharded only)",
        validation_alias="async",
    )
    save_frozen: bool = key(True, "false: leave out parameters that need no gradient")
    load_module_only: bool = key(False, "fit(ckpt_path=...) loads the weights only and starts a new run")
    load_optimizer_states: bool = key(True, "false: fit(ckpt_path=...) starts with fresh optimizers")
    load_lr_scheduler_states: bool = key(True, "false: fit(ckpt_path=...) starts with fresh schedules")


# Operations of comm/communicator.py, by their names in torch.distributed and DeepSpeed.
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


def _file(value: Any) -> Any:
    """An empty name means stdout, as in DeepSpeed."""
    return value or None


class FlopsProfiler(Block):
    """The ``flops_profiler`` block: a table of one micro-batch, counted by torch's ``FlopCounterMode``."""

    enabled: bool = key(False, "count the floating-point operations of one micro-batch per module")
    profile_step: Elements = key(
        1, "count the first micro-batch after this many optimizer steps; never the first one of a fit"
    )
    module_depth: Annotated[Whole, Field(ge=-1)] = key(
        -1, "levels of modules below the root in both tables; -1: all (DeepSpeed: in the aggregate only)"
    )
    top_modules: PositiveElements = key(1, "number of module classes per level in the aggregate")
    detailed: bool = key(True, "false: print the aggregate only, without a row per module")
    output_file: Annotated[str, BeforeValidator(_file)] | None = key(None, "text file that rank 0 writes; null: stdout")
    recompute_fwd_factor: Real = key(
        0.0, "fraction of forward assumed to be recomputed in backward, if no recomputation was seen", ge=0
    )


class CommsLogger(Block):
    """The ``comms_logger`` block: time and volume of the engine's collectives."""

    enabled: bool = key(
        False, "record collectives and print a table at the end of fit (DeepSpeed: true if the block has any key)"
    )
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


def _path(value: Any) -> Any:
    """DeepSpeed's documentation writes null for "not given", its code an empty string."""
    return "" if value is None else value


def _text(value: Any) -> Any:
    """A key of digits only reads as a number from YAML; an error would show it."""
    return str(value) if isinstance(value, int) else value


class _Monitor(Block):
    enabled: bool = key(
        False,
        "attach this logger unless the Trainer already has one of its kind; it gets the metrics of "
        "steps_per_print, at the Trainer's log_every_n_steps if that is null",
    )


class _Files(_Monitor):
    output_path: Annotated[str, BeforeValidator(_path)] = key("", "directory; empty: Trainer(default_root_dir=...)")
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

    samples_log_interval: PositiveElements = key(
        100, "accepted, no effect; Trainer(log_every_n_steps=...) sets the interval, in optimizer steps"
    )
    project: str | None = key(None, "project of the experiment")
    workspace: str | None = key(None, "workspace of the project")
    # excluded from every dump: the configuration is saved with each checkpoint
    api_key: Annotated[SecretStr, BeforeValidator(_text)] | None = key(
        None, "API key; COMET_API_KEY in the environment keeps it out of files", exclude=True
    )
    experiment_name: str | None = key(None, "name of the experiment")
    experiment_key: str | None = key(
        None, "id of the experiment, 32 to 50 letters and digits", pattern="^[A-Za-z0-9]{32,50}$"
    )
    online: bool | None = key(None, "false: an offline experiment; null: true")
    mode: Literal["get", "create", "get_or_create"] | None = key(
        None, "get: continue experiment_key, create: always a new one; null: get_or_create"
    )
