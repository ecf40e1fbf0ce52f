"""All keys, in frozen blocks. They are DeepSpeed's (0.19.8), so existing files can be passed as they are."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

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
from lt_zero.config.fields import Block, Dtype, Elements, Names, PositiveElements, Real, key


class ZeroOptimization(Block):
    """The ``zero_optimization`` block."""

    stage: int = key(0, "0: nothing sharded, 1: optimizer, 2: + gradients, 3: + parameters", ge=0, le=3)
    overlap_comm: bool = key(True, "reduce gradients during backward (DeepSpeed: true at stage 3 only)")
    shard_along: Literal["element", "parameter"] = key(
        "element",
        "where shards begin: at any element, or at parameter boundaries, so that optimizers see whole "
        "matrices; the latter pads buckets: examples/gpt.py with 24 layers by 0, 1 and 2 % at 2, 4 and 8 ranks at "
        "stages 1 and 2, by 25, 42 and 175 % at stage 3, where each layer is a bucket",
    )
    contiguous_gradients: bool = key(True, "true: copy gradients into one flat buffer per bucket as they are produced")
    reduce_scatter: bool = key(
        True, "false: all-reduce gradients and keep the own shard (no effect where CPU ranks share memory)"
    )
    reduce_bucket_size: PositiveElements = key(
        500_000_000, "maximum elements of a gradient bucket; a larger parameter gets a bucket of its own"
    )
    allgather_bucket_size: PositiveElements = key(
        500_000_000, "maximum elements per all-gather of updated parameters (stages 1 and 2)"
    )
    stage3_prefetch_bucket_size: Elements = key(50_000_000, "elements to prefetch")
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
    zero_allowed_param_types: Names = key(
        (), "class names of modules: at stage 3 only their parameters are sharded; empty: all"
    )
    zero_force_param_types: Names = key((), "class names of modules whose parameters are not sharded at stage 3")
    sync_bn_in_backward: bool = key(False, "compute batch norm statistics over all ranks")
    enable_sanity_checks: bool = key(
        False, "compare each collective across ranks before launching it, like LT_ZERO_DEBUG=1"
    )
    offload_optimizer: OffloadOptimizer = key(OffloadOptimizer(), "where optimizer states are stored")
    offload_param: OffloadParam = key(OffloadParam(), "where parameter shards are stored (stage 3)")
    load_from_fp32_weights: bool = key(
        True, "false: on resume, master weights start from saved weights rounded to the compute dtype"
    )
    stage3_gather_16bit_weights_on_model_save: bool = key(
        False, "write one file with all weights in 16 bits next to each checkpoint"
    )
    sub_group_size: Elements = key(
        1_000_000_000, "maximum elements of a bucket if the optimizer is offloaded; 0: one bucket per parameter"
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

    train_batch_size: PositiveElements | None = key(
        None, "samples per optimizer step over all ranks; checked against the data"
    )
    train_micro_batch_size_per_gpu: PositiveElements | None = key(
        None, "samples per micro-batch on each rank; checked against the first batch"
    )
    gradient_accumulation_steps: PositiveElements | None = key(
        None, "micro-batches per optimizer step; must agree with Trainer(accumulate_grad_batches) if both are set"
    )
    gradient_clipping: Real | None = key(
        None, "maximum global gradient norm, 0: no clipping; null: Trainer(gradient_clip_val) (DeepSpeed: 1.0)", ge=0
    )
    steps_per_print: PositiveElements | None = key(
        None,
        "print a line every N optimizer steps; null or inf: never. Loggers get the same metrics: "
        "zero/loss, zero/lr, zero/loss_scale (DeepSpeed: Train/Samples/train_loss, .../lr, .../loss_scale), and "
        "grad_norm, skipped_steps, samples_per_s, tflops (per device), memory_gb (1e9 bytes; GPU: peak so far)",
    )
    dump_state: bool = key(False, "print the resolved configuration and the bytes of model states once")
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = key(
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
    scheduler: SchedulerBlock | None = key(
        None, "learning-rate schedule of the optimizer, stepped after each optimizer step"
    )
    activation_checkpointing: ActivationCheckpointing = key(
        ActivationCheckpointing(), "recompute activations in backward to save memory"
    )
    csv_monitor: CsvMonitor = key(CsvMonitor(), "metrics in CSV files")
    tensorboard: TensorBoard = key(TensorBoard(), "metrics for TensorBoard")
    wandb: Wandb = key(Wandb(), "metrics for Weights & Biases")
    comet: Comet = key(Comet(), "metrics for Comet")
    communication_data_type: Dtype | None = key(
        None, "dtype in which gradients are reduced; null: their own, or the accumulators' where the sum would round"
    )
    prescale_gradients: bool = key(
        False, "divide gradients by the number of ranks before the reduction instead of after"
    )
    gradient_predivide_factor: Real = key(1.0, "divide gradients by this before the reduction", gt=0)
    gradient_allreduce_op: Literal["mean", "sum"] = key("mean", "reduction of gradients over ranks")
    fp16_override_modules: Names = key((), "class names, module or parameter patterns to keep in fp32")
    fused_step: bool = key(True, "step Adam, AdamW, SGD, Adagrad, Lion and Lamb with one fused native kernel each")
    ops: Literal["auto", "required"] = key(
        "auto",
        "auto: fall back to torch operations, with one warning, where native kernels cannot be built; "
        "required: raise at set-up if a kernel is missing",
    )
    max_cpu_gb: Real | None = key(None, "maximum host memory to use per node, in GB (1e9 bytes)", gt=0)
    on_skipped_step: Literal["hold", "advance"] = key(
        "hold", "hold: skipped steps do not advance schedules; advance: they do"
    )
    on_min_scale: Literal["raise", "hold", "warn"] = key("raise", "what to do on overflow at the minimum loss scale")
    on_nonfinite: Literal["warn", "raise", "skip"] = key(
        "warn",
        "non-finite gradients without fp16: warn once and continue, raise before the step, or skip the "
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
