"""The validated, frozen configuration. Keys are DeepSpeed's (0.19.8), so existing blocks can be passed as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import AliasChoices, Field, field_validator, model_validator

from lt_zero.config.checkpoint import Checkpoint
from lt_zero.config.fields import Block, Dtype, Elements, PositiveElements
from lt_zero.config.offload import Aio, OffloadOptimizer, OffloadParam, check_offload, modernise
from lt_zero.config.precision import Bf16, DataTypes, Fp16, check_precision


class LeafModule(Block):
    """Which modules are gathered as one although the model does not repeat them."""

    classes: tuple[str, ...] = Field((), description="class names, bare or dotted, whose instances are units")


class ZeroOptimization(Block):
    """The ``zero_optimization`` block."""

    stage: int = Field(0, ge=0, le=3, description="0: nothing sharded, 1: optimizer, 2: + gradients, 3: + parameters")
    overlap_comm: bool = Field(True, description="gradients are reduced while backward goes on")
    contiguous_gradients: bool = Field(
        True, description="always on: gradients are copied into one flat buffer per bucket as they appear"
    )
    reduce_scatter: bool = Field(True, description="false: gradients are all-reduced, each rank keeps its shard")
    reduce_bucket_size: PositiveElements = Field(500_000_000, description="elements of a gradient bucket at most")
    allgather_bucket_size: PositiveElements = Field(
        500_000_000, description="elements per all-gather of updated parameters (stages 1 and 2) at most"
    )
    stage3_prefetch_bucket_size: Elements = Field(
        50_000_000,
        validation_alias=AliasChoices("stage3_prefetch_bucket_size", "prefetch_bucket_size"),
        description="elements gathered ahead of their use",
    )
    stage3_param_persistence_threshold: Elements = Field(
        100_000,
        validation_alias=AliasChoices("stage3_param_persistence_threshold", "param_persistence_threshold"),
        description="parameters with fewer elements stay whole on every rank",
    )
    stage3_max_live_parameters: Elements = Field(
        1_000_000_000,
        validation_alias=AliasChoices("stage3_max_live_parameters", "max_live_parameters"),
        description="gathered elements per rank beyond which nothing is kept or prefetched",
    )
    stage3_max_reuse_distance: Elements = Field(
        1_000_000_000,
        validation_alias=AliasChoices("stage3_max_reuse_distance", "max_reuse_distance"),
        description="a parameter stays gathered if it is used again within this many elements; 0 releases at once",
    )
    leaf_module: LeafModule = LeafModule()
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    offload_param: OffloadParam = OffloadParam()
    load_from_fp32_weights: bool = Field(
        True, description="false: master weights start from what was saved rounded to the compute dtype"
    )
    stage3_gather_16bit_weights_on_model_save: bool = Field(
        False,
        validation_alias=AliasChoices(
            "stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"
        ),
        description="one file with all weights in 16 bits is written beside each checkpoint",
    )
    sub_group_size: PositiveElements = Field(
        1_000_000_000, description="elements of a bucket at most, if the optimizer is offloaded"
    )

    @field_validator("offload_optimizer", "offload_param", mode="before")
    @classmethod
    def _absent(cls, value: Any) -> Any:
        return {} if value is None else value

    @model_validator(mode="before")
    @classmethod
    def _old_spellings(cls, value: Any) -> Any:
        return modernise(value) if isinstance(value, Mapping) else value


class ZeroConfig(Block):
    """Everything that can be configured.

    >>> ZeroConfig.of({"zero_optimization": {"stage": 2, "reduce_bucket_size": "5e7"}}).zero_optimization.stage
    2
    """

    zero_optimization: ZeroOptimization = ZeroOptimization()
    fp16: Fp16 = Fp16()
    bf16: Bf16 = Field(Bf16(), validation_alias=AliasChoices("bf16", "bfloat16"))
    data_types: DataTypes = DataTypes()
    aio: Aio = Aio()
    checkpoint: Checkpoint = Checkpoint()
    communication_data_type: Dtype | None = Field(None, description="dtype of gradients on the wire")
    prescale_gradients: bool = Field(False, description="gradients are divided before the reduction, not after")
    gradient_predivide_factor: float = Field(1.0, gt=0, description="the part of that division that comes before")
    gradient_allreduce_op: Literal["mean", "sum"] = Field("mean", description="what a gradient is, over the ranks")
    fp16_override_modules: tuple[str, ...] = Field((), description="class names, module or parameter patterns in fp32")
    fused_step: bool = Field(True, description="torch's Adam and AdamW are stepped by one native kernel")
    max_cpu_gb: float | None = Field(None, gt=0, description="GB (1e9 bytes) of a node's host memory to use at most")
    on_skipped_step: Literal["hold", "advance"] = Field("hold", description="whether schedules wait for skipped steps")
    on_min_scale: Literal["raise", "hold", "warn"] = Field("raise", description="overflow at the minimum loss scale")

    @model_validator(mode="after")
    def _consistent(self) -> ZeroConfig:
        check_precision(self)
        check_offload(self)
        if self.checkpoint.async_save and self.sharded_checkpoints is False:
            raise ValueError(
                "checkpoint.async=true needs sharded checkpoints, and these are full ones (checkpoint.format="
                f"{self.checkpoint.format!r}, stage {self.zero_optimization.stage}): set checkpoint.format='sharded', "
                "or use Lightning's AsyncCheckpointIO."
            )
        return self

    @property
    def sharded_checkpoints(self) -> bool:
        """Whether checkpoints are directories that all ranks write."""
        how = self.checkpoint.format
        return how == "sharded" or (how == "auto" and self.zero_optimization.stage > 0)

    @classmethod
    def of(cls, config: ZeroConfig | Mapping[str, Any] | None = None, stage: int | None = None) -> ZeroConfig:
        """Validate ``config``; ``stage`` sets ``zero_optimization.stage``.

        Raises:
            ValueError: a key is unknown or a value is wrong, or ``stage`` contradicts the config.
        """
        if not isinstance(config, cls):
            values = dict(config or {})
            zero = values.get("zero_optimization", {})
            if stage is not None and isinstance(zero, Mapping):  # rules between keys need to know the stage
                values["zero_optimization"] = {"stage": stage, **zero}
            config = cls.model_validate(values)
        parsed = config
        if stage is None:
            return parsed
        block = parsed.zero_optimization
        if "stage" in block.model_fields_set and block.stage != stage:
            raise ValueError(
                f"stage={stage} contradicts zero_optimization.stage={block.stage} of the config. Remove one of them."
            )
        values = {name: getattr(block, name) for name in block.model_fields_set} | {"stage": stage}
        changed = parsed.model_copy(update={"zero_optimization": ZeroOptimization.model_validate(values)})
        check_offload(changed)  # copies are not validated
        return changed
