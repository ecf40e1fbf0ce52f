"""The validated, frozen configuration. Keys are DeepSpeed's (0.19.8), so existing blocks can be passed as they are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from lt_zero.common.errors import ConfigError, Path, Problem
from lt_zero.config.blocks.activation import ActivationCheckpointing, check_activations
from lt_zero.config.blocks.checkpoint import Checkpoint
from lt_zero.config.blocks.monitor import Comet, CsvMonitor, TensorBoard, Wandb
from lt_zero.config.blocks.offload import Aio, OffloadOptimizer, OffloadParam, check_offload
from lt_zero.config.blocks.precision import Bf16, DataTypes, Fp16, TorchAutocast, check_precision
from lt_zero.config.blocks.profiling import CommsLogger, FlopsProfiler, check_profiling
from lt_zero.config.blocks.training import (
    LeafModule,
    OptimizerBlock,
    SchedulerBlock,
    check_leaves,
    check_training,
    check_whole,
)
from lt_zero.config.fields import Block, Dtype, Elements, Names, PositiveElements, Real


class ZeroOptimization(Block):
    """The ``zero_optimization`` block."""

    stage: int = Field(0, ge=0, le=3, description="0: nothing sharded, 1: optimizer, 2: + gradients, 3: + parameters")
    overlap_comm: bool = Field(
        True, description="gradients are reduced while backward goes on (DeepSpeed: true at stage 3 only)"
    )
    shard_along: Literal["element", "parameter"] = Field(
        "element",
        description="where shards begin: anywhere, or between parameters, so that optimizers see whole matrices; then "
        "buckets are padded: examples/gpt.py with 24 layers by 0, 1 and 2 % at 2, 4 and 8 ranks at stages 1 and 2, by "
        "25, 42 and 175 % at stage 3, where each layer is a bucket",
    )
    contiguous_gradients: bool = Field(
        True, description="true: gradients are copied into one flat buffer per bucket as they appear"
    )
    reduce_scatter: bool = Field(
        True,
        description="false: gradients are all-reduced, each rank keeps its shard (but where CPUs share memory)",
    )
    reduce_bucket_size: PositiveElements = Field(
        500_000_000, description="elements of a gradient bucket at most; a larger parameter is a bucket by itself"
    )
    allgather_bucket_size: PositiveElements = Field(
        500_000_000, description="elements per all-gather of updated parameters (stages 1 and 2) at most"
    )
    stage3_prefetch_bucket_size: Elements = Field(50_000_000, description="elements gathered ahead of their use")
    stage3_param_persistence_threshold: Elements = Field(
        100_000, description="parameters with fewer elements stay whole on every rank (DeepSpeed: with as many, too)"
    )
    stage3_model_persistence_threshold: Elements | None = Field(
        None,
        description="elements of the model that stay whole at most, the smallest parameters first; null: no limit "
        "(DeepSpeed: in the order of the model)",
    )
    stage3_max_live_parameters: Elements = Field(
        1_000_000_000, description="gathered elements per rank beyond which nothing is kept or prefetched"
    )
    stage3_max_reuse_distance: Elements = Field(
        1_000_000_000,
        description="a parameter stays gathered if it is used again within this many elements; 0 releases at once",
    )
    leaf_module: LeafModule = Field(LeafModule(), description="modules that are units although nothing repeats them")
    zero_allowed_param_types: Names = Field(
        (), description="class names of modules: only their parameters are sharded at stage 3; empty: all are"
    )
    zero_force_param_types: Names = Field(
        (), description="class names of modules whose parameters stay whole on every rank at stage 3"
    )
    sync_bn_in_backward: bool = Field(False, description="batch norms compute their statistics over all ranks")
    enable_sanity_checks: bool = Field(
        False, description="the ranks compare each collective before they launch it, as with LT_ZERO_DEBUG=1"
    )
    offload_optimizer: OffloadOptimizer = Field(OffloadOptimizer(), description="where optimizer states rest")
    offload_param: OffloadParam = Field(OffloadParam(), description="where sharded parameters rest (stage 3)")
    load_from_fp32_weights: bool = Field(
        True, description="false: master weights start from what was saved rounded to the compute dtype"
    )
    stage3_gather_16bit_weights_on_model_save: bool = Field(
        False, description="one file with all weights in 16 bits is written beside each checkpoint"
    )
    sub_group_size: Elements = Field(
        1_000_000_000,
        description="elements of a bucket at most, if the optimizer is offloaded; 0: each parameter is a bucket",
    )

    @field_validator("stage", mode="before")
    @classmethod
    def _stage(cls, value: Any) -> Any:
        if isinstance(value, bool) or not (isinstance(value, (int, float)) or value in ("0", "1", "2", "3")):
            raise ValueError("it is not one of 0, 1, 2, 3")
        return value

    @property
    def param_offload(self) -> OffloadParam:
        """``offload_param`` where it counts: below stage 3 every rank uses all parameters all the time."""
        return self.offload_param if self.stage == 3 else OffloadParam()


class ZeroConfig(Block):
    """Everything that can be configured.

    >>> ZeroConfig.of({"zero_optimization": {"stage": 2, "reduce_bucket_size": "5e7"}}).zero_optimization.stage
    2
    """

    train_batch_size: PositiveElements | None = Field(
        None, description="samples per optimizer step over all ranks; compared with what is seen"
    )
    train_micro_batch_size_per_gpu: PositiveElements | None = Field(
        None, description="samples per forward of a rank; compared with the first batch"
    )
    gradient_accumulation_steps: PositiveElements | None = Field(
        None, description="micro-batches per optimizer step: Trainer(accumulate_grad_batches), which may say it, too"
    )
    gradient_clipping: Real | None = Field(
        None,
        ge=0,
        description="norm of all gradients at most, 0: any; null: Trainer(gradient_clip_val) (DeepSpeed: 1.0)",
    )
    steps_per_print: PositiveElements | None = Field(
        None,
        description="optimizer steps from one printed line to the next; null or inf: none. Loggers get its numbers: "
        "zero/loss, zero/lr, zero/loss_scale (DeepSpeed: Train/Samples/train_loss, .../lr, .../loss_scale), and "
        "grad_norm, skipped_steps, samples_per_s, tflops (per device), memory_gb (10^9 bytes; GPU: peak so far)",
    )
    dump_state: bool = Field(False, description="print the resolved configuration and bytes of model states once")
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = Field(
        None, description="level of the logger lt_zero; from error on, what takes long shows no progress either"
    )
    flops_profiler: FlopsProfiler = Field(FlopsProfiler(), description="what a micro-batch computes, per module")
    comms_logger: CommsLogger = Field(CommsLogger(), description="what collectives cost")
    wall_clock_breakdown: bool = Field(
        False,
        description="print and log how long forward, backward, waits and the optimizer take, every steps_per_print "
        "(null: 10) optimizer steps",
    )
    memory_breakdown: bool = Field(
        False,
        description="print the memory at each phase of the first step, then every steps_per_print (null: 10) steps",
    )
    disable_python_gc: bool = Field(False, description="no automatic garbage collection while fitting")
    zero_optimization: ZeroOptimization = Field(ZeroOptimization(), description="what is sharded, and how")
    fp16: Fp16 = Field(Fp16(), description="training with fp16 weights")
    bf16: Bf16 = Field(Bf16(), description="training with bf16 weights")
    torch_autocast: TorchAutocast = Field(TorchAutocast(), description="training under torch.autocast")
    data_types: DataTypes = Field(DataTypes(), description="dtypes of accumulators and buffers")
    aio: Aio = Field(Aio(), description="reading and writing files of offloaded states")
    checkpoint: Checkpoint = Field(Checkpoint(), description="saving and resuming")
    optimizer: OptimizerBlock | None = Field(None, description="built if the module has no configure_optimizers")
    scheduler: SchedulerBlock | None = Field(None, description="of the one optimizer, stepped after each of its steps")
    activation_checkpointing: ActivationCheckpointing = Field(
        ActivationCheckpointing(), description="what backward computes again, to save memory"
    )
    csv_monitor: CsvMonitor = Field(CsvMonitor(), description="metrics in CSV files")
    tensorboard: TensorBoard = Field(TensorBoard(), description="metrics for TensorBoard")
    wandb: Wandb = Field(Wandb(), description="metrics for Weights & Biases")
    comet: Comet = Field(Comet(), description="metrics for Comet")
    communication_data_type: Dtype | None = Field(
        None, description="dtype of gradients on the wire; null: theirs, or the accumulators' where sums would round"
    )
    prescale_gradients: bool = Field(
        False, description="gradients are divided by the number of ranks before the reduction, not after"
    )
    gradient_predivide_factor: Real = Field(1.0, gt=0, description="by what gradients are divided before the reduction")
    gradient_allreduce_op: Literal["mean", "sum"] = Field("mean", description="what a gradient is, over the ranks")
    fp16_override_modules: Names = Field((), description="class names, module or parameter patterns in fp32")
    fused_step: bool = Field(True, description="torch's Adam and AdamW are stepped by one native kernel")
    ops: Literal["auto", "required"] = Field(
        "auto",
        description="auto: torch's operations run where native kernels cannot be built, with one warning; required: "
        "a missing kernel is an error at set-up",
    )
    max_cpu_gb: Real | None = Field(None, gt=0, description="GB (1e9 bytes) of a node's host memory to use at most")
    on_skipped_step: Literal["hold", "advance"] = Field("hold", description="whether schedules wait for skipped steps")
    on_min_scale: Literal["raise", "hold", "warn"] = Field("raise", description="overflow at the minimum loss scale")

    on_nonfinite: Literal["warn", "raise", "skip"] = Field(
        "warn",
        description="gradients that are not finite, without fp16: warn once and go on, raise before the step, or skip "
        "the step; bf16 skips unless bf16.check_grad_overflow is false",
    )

    def __init__(self, *, stage: int | None = None, **keys: Any) -> None:
        """Keys as in a file; ``stage`` is ``zero_optimization.stage``, as ``ZeroStrategy`` has it."""
        if stage is not None:
            block = keys.get("zero_optimization", {})
            block = block.model_dump(exclude_unset=True) if isinstance(block, ZeroOptimization) else block
            keys["zero_optimization"] = {**block, "stage": stage}
        super().__init__(**keys)

    _autos: frozenset[Path] = PrivateAttr(frozenset())  # written "auto" and not resolved: they have their defaults

    @field_validator("steps_per_print", mode="before")
    @classmethod
    def _never(cls, value: Any) -> Any:
        return None if value in (float("inf"), "inf") else value

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> ZeroConfig:
        if problems := list(self.problems()):
            raise ConfigError(problems)
        return self

    def problems(self) -> Iterator[Problem]:
        """Keys that do not fit together."""
        yield from check_training(self)
        yield from check_leaves(self)
        yield from check_whole(self)
        yield from check_precision(self)
        yield from check_offload(self)
        yield from check_profiling(self)
        yield from check_activations(self)
        if self.checkpoint.async_save and self.sharded_checkpoints is False:
            yield Problem(
                "checkpoint.async",
                "checkpoint.async=true needs sharded checkpoints, and these are full ones (checkpoint.format="
                f"{self.checkpoint.format!r}, stage {self.zero_optimization.stage}): set checkpoint.format='sharded', "
                "or use Lightning's AsyncCheckpointIO.",
            )

    @property
    def sharded_checkpoints(self) -> bool:
        """Whether checkpoints are directories that all ranks write."""
        how = self.checkpoint.format
        return how == "sharded" or (how == "auto" and self.zero_optimization.stage > 0)

    @property
    def autos(self) -> frozenset[Path]:
        """Keys that were written "auto" and are not resolved yet; until then they have their defaults."""
        return self._autos

    @classmethod
    def of(
        cls,
        config: ZeroConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        stage: int | None = None,
        overrides: Sequence[str] = (),
        default_stage: int | None = None,
        activations: ActivationCheckpointing | Mapping[str, Any] | str | bool | None = None,
    ) -> ZeroConfig:
        """Validate a configuration; keys that are read differently, or have no effect, are warned of.

        Args:
            config: a mapping, the path of a JSON or YAML file, or a configuration that is changed.
            stage: sets ``zero_optimization.stage``.
            overrides: ``key=value`` and ``group=option`` in Hydra's grammar.
            default_stage: the stage if nothing says one.
            activations: keys of ``activation_checkpointing``, or its ``mode``; True: full, False: none.

        Raises:
            ConfigError: all that is wrong.
        """
        from lt_zero.config.load import load  # load knows the schema

        made, loaded = load(config, stage, overrides, default_stage, activations)
        loaded.announce()
        return made
