"""All keys, in frozen blocks. They are DeepSpeed's (0.19.8), so existing files can be passed as they are."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from lt_zero.config.blocks import (
    ActivationCheckpointing,
    Aio,
    Bf16,
    Checkpoint,
    Comet,
    CommsLogger,
    CsvMonitor,
    DataTypes,
    FlopsProfiler,
    Fp16,
    LeafModule,
    OffloadOptimizer,
    OffloadParam,
    OptimizerBlock,
    SchedulerBlock,
    TensorBoard,
    TorchAutocast,
    Wandb,
)
from lt_zero.config.fields import Block, Dtype, Elements, Names, PositiveElements, Real


class ZeroOptimization(Block):
    """The ``zero_optimization`` block."""

    stage: int = Field(0, ge=0, le=3, description="0: nothing sharded, 1: optimizer, 2: + gradients, 3: + parameters")
    overlap_comm: bool = Field(True, description="reduce gradients during backward (DeepSpeed: true at stage 3 only)")
    shard_along: Literal["element", "parameter"] = Field(
        "element",
        description="where shards begin: at any element, or at parameter boundaries, so that optimizers see whole "
        "matrices; the latter pads buckets: examples/gpt.py with 24 layers by 0, 1 and 2 % at 2, 4 and 8 ranks at "
        "stages 1 and 2, by 25, 42 and 175 % at stage 3, where each layer is a bucket",
    )
    contiguous_gradients: bool = Field(
        True, description="true: copy gradients into one flat buffer per bucket as they are produced"
    )
    reduce_scatter: bool = Field(
        True,
        description="false: all-reduce gradients and keep the own shard (no effect where CPU ranks share memory)",
    )
    reduce_bucket_size: PositiveElements = Field(
        500_000_000, description="maximum elements of a gradient bucket; a larger parameter gets a bucket of its own"
    )
    allgather_bucket_size: PositiveElements = Field(
        500_000_000, description="maximum elements per all-gather of updated parameters (stages 1 and 2)"
    )
    stage3_prefetch_bucket_size: Elements = Field(50_000_000, description="elements to prefetch")
    stage3_param_persistence_threshold: Elements = Field(
        100_000, description="parameters with fewer elements are not sharded (DeepSpeed: with at most as many)"
    )
    stage3_model_persistence_threshold: Elements | None = Field(
        None,
        description="maximum elements of the model that are not sharded, smallest parameters first; null: no limit "
        "(DeepSpeed: in model order)",
    )
    stage3_max_live_parameters: Elements = Field(
        1_000_000_000,
        description="maximum gathered elements per rank; beyond it nothing is kept gathered or prefetched",
    )
    stage3_max_reuse_distance: Elements = Field(
        1_000_000_000,
        description="keep a parameter gathered if it is used again within this many elements; 0: release at once",
    )
    leaf_module: LeafModule = Field(
        LeafModule(), description="modules to gather as one unit although the model does not repeat them"
    )
    zero_allowed_param_types: Names = Field(
        (), description="class names of modules: at stage 3 only their parameters are sharded; empty: all"
    )
    zero_force_param_types: Names = Field(
        (), description="class names of modules whose parameters are not sharded at stage 3"
    )
    sync_bn_in_backward: bool = Field(False, description="compute batch norm statistics over all ranks")
    enable_sanity_checks: bool = Field(
        False, description="compare each collective across ranks before launching it, like LT_ZERO_DEBUG=1"
    )
    offload_optimizer: OffloadOptimizer = Field(OffloadOptimizer(), description="where optimizer states are stored")
    offload_param: OffloadParam = Field(OffloadParam(), description="where parameter shards are stored (stage 3)")
    load_from_fp32_weights: bool = Field(
        True, description="false: on resume, master weights start from saved weights rounded to the compute dtype"
    )
    stage3_gather_16bit_weights_on_model_save: bool = Field(
        False, description="write one file with all weights in 16 bits next to each checkpoint"
    )
    sub_group_size: Elements = Field(
        1_000_000_000,
        description="maximum elements of a bucket if the optimizer is offloaded; 0: one bucket per parameter",
    )

    @field_validator("stage", mode="before")
    @classmethod
    def _stage(cls, value: Any) -> Any:
        if isinstance(value, bool) or not (isinstance(value, (int, float)) or value in ("0", "1", "2", "3")):
            raise ValueError("it is not one of 0, 1, 2, 3")
        return value

    @property
    def param_offload(self) -> OffloadParam:
        """``offload_param``, or its defaults below stage 3, where parameters are not sharded."""
        return self.offload_param if self.stage == 3 else OffloadParam()


class Schema(Block):
    """Everything that can be configured. ``ZeroConfig`` adds how one is made."""

    train_batch_size: PositiveElements | None = Field(
        None, description="samples per optimizer step over all ranks; checked against the data"
    )
    train_micro_batch_size_per_gpu: PositiveElements | None = Field(
        None, description="samples per micro-batch on each rank; checked against the first batch"
    )
    gradient_accumulation_steps: PositiveElements | None = Field(
        None,
        description="micro-batches per optimizer step; must agree with Trainer(accumulate_grad_batches) if both are "
        "set",
    )
    gradient_clipping: Real | None = Field(
        None,
        ge=0,
        description="maximum global gradient norm, 0: no clipping; null: Trainer(gradient_clip_val) (DeepSpeed: 1.0)",
    )
    steps_per_print: PositiveElements | None = Field(
        None,
        description="print a line every N optimizer steps; null or inf: never. Loggers get the same metrics: "
        "zero/loss, zero/lr, zero/loss_scale (DeepSpeed: Train/Samples/train_loss, .../lr, .../loss_scale), and "
        "grad_norm, skipped_steps, samples_per_s, tflops (per device), memory_gb (1e9 bytes; GPU: peak so far)",
    )
    dump_state: bool = Field(False, description="print the resolved configuration and the bytes of model states once")
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = Field(
        None, description="level of the logger lt_zero; error and above also hide progress bars"
    )
    flops_profiler: FlopsProfiler = Field(
        FlopsProfiler(), description="floating-point operations of a micro-batch, per module"
    )
    comms_logger: CommsLogger = Field(CommsLogger(), description="time and volume of collectives")
    wall_clock_breakdown: bool = Field(
        False,
        description="print and log the time of forward, backward, waits and the optimizer, every steps_per_print "
        "(null: 10) optimizer steps",
    )
    memory_breakdown: bool = Field(
        False,
        description="print memory use at each phase of the first step, then every steps_per_print (null: 10) steps",
    )
    disable_python_gc: bool = Field(False, description="disable automatic garbage collection during fit")
    zero_optimization: ZeroOptimization = Field(ZeroOptimization(), description="what is sharded and how")
    fp16: Fp16 = Field(Fp16(), description="training with fp16 weights")
    bf16: Bf16 = Field(Bf16(), description="training with bf16 weights")
    torch_autocast: TorchAutocast = Field(TorchAutocast(), description="training under torch.autocast")
    data_types: DataTypes = Field(DataTypes(), description="dtypes of accumulators and buffers")
    aio: Aio = Field(Aio(), description="file I/O of offloaded states")
    checkpoint: Checkpoint = Field(Checkpoint(), description="saving and resuming")
    optimizer: OptimizerBlock | None = Field(
        None, description="optimizer to build if the module has no configure_optimizers"
    )
    scheduler: SchedulerBlock | None = Field(
        None, description="learning-rate schedule of the optimizer, stepped after each optimizer step"
    )
    activation_checkpointing: ActivationCheckpointing = Field(
        ActivationCheckpointing(), description="recompute activations in backward to save memory"
    )
    csv_monitor: CsvMonitor = Field(CsvMonitor(), description="metrics in CSV files")
    tensorboard: TensorBoard = Field(TensorBoard(), description="metrics for TensorBoard")
    wandb: Wandb = Field(Wandb(), description="metrics for Weights & Biases")
    comet: Comet = Field(Comet(), description="metrics for Comet")
    communication_data_type: Dtype | None = Field(
        None,
        description="dtype in which gradients are reduced; null: their own, or the accumulators' where the sum would "
        "round",
    )
    prescale_gradients: bool = Field(
        False, description="divide gradients by the number of ranks before the reduction instead of after"
    )
    gradient_predivide_factor: Real = Field(1.0, gt=0, description="divide gradients by this before the reduction")
    gradient_allreduce_op: Literal["mean", "sum"] = Field("mean", description="reduction of gradients over ranks")
    fp16_override_modules: Names = Field((), description="class names, module or parameter patterns to keep in fp32")
    fused_step: bool = Field(
        True, description="step Adam, AdamW, SGD, Adagrad, Lion and Lamb with one fused native kernel each"
    )
    ops: Literal["auto", "required"] = Field(
        "auto",
        description="auto: fall back to torch operations, with one warning, where native kernels cannot be built; "
        "required: raise at set-up if a kernel is missing",
    )
    max_cpu_gb: Real | None = Field(None, gt=0, description="maximum host memory to use per node, in GB (1e9 bytes)")
    on_skipped_step: Literal["hold", "advance"] = Field(
        "hold", description="hold: skipped steps do not advance schedules; advance: they do"
    )
    on_min_scale: Literal["raise", "hold", "warn"] = Field(
        "raise", description="what to do on overflow at the minimum loss scale"
    )
    on_nonfinite: Literal["warn", "raise", "skip"] = Field(
        "warn",
        description="non-finite gradients without fp16: warn once and continue, raise before the step, or skip the "
        "step; bf16 skips unless bf16.check_grad_overflow is false",
    )

    @field_validator("steps_per_print", mode="before")
    @classmethod
    def _never(cls, value: Any) -> Any:
        return None if value in (float("inf"), "inf") else value

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @property
    def sharded_checkpoints(self) -> bool:
        """Whether checkpoints are directories that all ranks write."""
        how = self.checkpoint.format
        return how == "sharded" or (how == "auto" and self.zero_optimization.stage > 0)
