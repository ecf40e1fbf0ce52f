"""The top level of a configuration: all blocks, and the keys outside of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from lt_zero.common.fields import Block, Dtype, Names, Positive, Real, key, lower, off_if_false
from lt_zero.common.numbers import to_whole_number
from lt_zero.config.blocks.distribution import (
    Aio,
    Communication,
    ExpertParallel,
    PipelineParallel,
    SequenceParallel,
    TensorParallel,
    ZeroOptimization,
    one_if_zero,
)
from lt_zero.config.blocks.monitoring import Comet, CommsLogger, CsvMonitor, FlopsProfiler, TensorBoard, Wandb
from lt_zero.config.blocks.training import (
    ActivationCheckpointing,
    Bf16,
    Checkpoint,
    Compile,
    DataTypes,
    Fp16,
    OptimizerBlock,
    OptimizerStates,
    SchedulerBlock,
    TorchAutocast,
)

# 1-bit optimizers, by their names in lower case, and what they are without 1 bit.
ONE_BIT = {"onebitadam": "Adam", "onebitlamb": "Lamb", "zerooneadam": "Adam"}

_none_if_infinite = BeforeValidator(lambda value: None if value in (float("inf"), "inf") else value)
_off_if_number = BeforeValidator(lambda value: {} if type(value) in (bool, int) and value in (0, 1) else value)
# The place of a key among the others. Its block is brought by a feature, see config/load.py.
of_feature: Any = key(None, "")


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
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"] | None, lower] = key(
        None, "level of the logger lt_zero; error and above also hide progress bars"
    )
    flops_profiler: FlopsProfiler = key(FlopsProfiler(), "floating-point operations of a micro-batch, per module")
    comms_logger: CommsLogger = key(CommsLogger(), "time and volume of collectives")
    wall_clock_breakdown: bool = key(
        False,
        "print and log the time of forward, backward, waits and the optimizer, every steps_per_print "
        "(null: 10) optimizer steps",
    )
    gradient_noise_scale: bool = key(
        False, "log about how many samples a step should have, from the gradients of its micro-batches"
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
    optimizer_states: OptimizerStates = key(OptimizerStates(), "how the optimizer's moments are kept")
    scheduler: SchedulerBlock | None = key(None, "learning-rate schedule, stepped after each optimizer step")
    activation_checkpointing: ActivationCheckpointing = key(
        ActivationCheckpointing(), "recompute activations in backward to save memory"
    )
    compile: Annotated[Compile, off_if_false] = key(Compile(), "compile the repeated blocks by torch.compile")
    sparse_attention: Any = of_feature
    long_sequences: Any = of_feature
    csv_monitor: CsvMonitor = key(CsvMonitor(), "metrics in CSV files")
    tensorboard: TensorBoard = key(TensorBoard(), "metrics for TensorBoard")
    wandb: Wandb = key(Wandb(), "metrics for Weights & Biases")
    comet: Comet = key(Comet(), "metrics for Comet")
    communication: Communication = key(Communication(), "collectives over several nodes")
    data_parallel_size: Positive | None = key(None, "ranks that see different data; checked against the others")
    tensor_parallel: Annotated[TensorParallel, _off_if_number] = key(
        TensorParallel(), "ranks that have parts of each layer"
    )
    sequence_parallel_size: Annotated[Positive, one_if_zero] = key(
        1, "ranks that have parts of the same sequences, and see the same data; they divide all ranks (DeepSpeed: null)"
    )
    sequence_parallel: SequenceParallel = key(
        SequenceParallel(), "how ranks with parts of the same sequences compute attention"
    )
    expert_parallel: ExpertParallel = key(ExpertParallel(), "ranks that have some of a layer's experts each")
    pipeline: PipelineParallel = key(PipelineParallel(), "ranks that have some of the model's layers each")
    reproducible: Any = of_feature
    gradient_compression: Any = of_feature
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
    quantize: Annotated[Literal[8, 4] | None, BeforeValidator(to_whole_number)] = key(
        None,
        "bits in which sharded parameters that are not trained rest; they are decoded when they are gathered. 8: "
        "integers, blocks of 256 elements share a scale; 4: NormalFloat (NF4), blocks of 64 (DeepSpeed: "
        "weight_quantization)",
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
    def one_bit(self) -> str:
        """The name of the 1-bit optimizer that ``optimizer.type`` is, in lower case, or ""."""
        name = self.optimizer.type.rpartition(".")[2].lower() if self.optimizer is not None else ""
        return name if name in ONE_BIT else ""

    @property
    def sharded_checkpoints(self) -> bool:
        """True if checkpoints are directories that all ranks write."""
        if self.checkpoint.format != "auto":
            return self.checkpoint.format == "sharded"
        return self.zero_optimization.stage > 0 or self.tensor_parallel.autotp_size > 1 or self.pipeline.ranks > 1
