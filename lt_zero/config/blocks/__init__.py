"""All keys, in frozen blocks: types, defaults, bounds and meaning. Rules between keys are in ``config/rules.py``.

The keys are DeepSpeed's (0.19.8), so existing files can be passed as they are.
"""

from lt_zero.config.blocks.distribution import (
    Aio,
    Communication,
    Device,
    ExpertParallel,
    LayerRule,
    LeafModule,
    OffloadOptimizer,
    OffloadParam,
    PartitionConfig,
    PipelineParallel,
    SequenceParallel,
    TensorParallel,
    ZeroOptimization,
)
from lt_zero.config.blocks.monitoring import (
    Comet,
    CommsLogger,
    CsvMonitor,
    FlopsProfiler,
    TensorBoard,
    Wandb,
    operation_of,
)
from lt_zero.config.blocks.schema import Schema
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

__all__ = [
    "ActivationCheckpointing",
    "Aio",
    "Bf16",
    "Checkpoint",
    "Compile",
    "Comet",
    "CommsLogger",
    "Communication",
    "CsvMonitor",
    "DataTypes",
    "Device",
    "ExpertParallel",
    "FlopsProfiler",
    "Fp16",
    "LayerRule",
    "LeafModule",
    "OffloadOptimizer",
    "OffloadParam",
    "OptimizerBlock",
    "OptimizerStates",
    "PartitionConfig",
    "PipelineParallel",
    "SequenceParallel",
    "SchedulerBlock",
    "Schema",
    "TensorBoard",
    "TensorParallel",
    "TorchAutocast",
    "Wandb",
    "ZeroOptimization",
    "operation_of",
]
