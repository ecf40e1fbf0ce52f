"""All keys, in frozen blocks: types, defaults, bounds and meaning. Rules between keys are in ``config/rules.py``.

The keys are DeepSpeed's (0.19.8), so existing files can be passed as they are.
"""

from lt_zero.config.blocks.distribution import (
    Aio,
    Communication,
    Device,
    GradientCompressionBlock,
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
    OPERATIONS,
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
    SPARSE_MODES,
    ActivationCheckpointing,
    Bf16,
    Checkpoint,
    DataTypes,
    Fp16,
    OptimizerBlock,
    SchedulerBlock,
    SparseAttention,
    TorchAutocast,
)

__all__ = [
    "ActivationCheckpointing",
    "Aio",
    "Bf16",
    "Checkpoint",
    "Comet",
    "CommsLogger",
    "Communication",
    "CsvMonitor",
    "DataTypes",
    "Device",
    "FlopsProfiler",
    "Fp16",
    "GradientCompressionBlock",
    "LayerRule",
    "LeafModule",
    "OPERATIONS",
    "OffloadOptimizer",
    "OffloadParam",
    "OptimizerBlock",
    "PartitionConfig",
    "PipelineParallel",
    "SequenceParallel",
    "SPARSE_MODES",
    "SchedulerBlock",
    "Schema",
    "SparseAttention",
    "TensorBoard",
    "TensorParallel",
    "TorchAutocast",
    "Wandb",
    "ZeroOptimization",
    "operation_of",
]
