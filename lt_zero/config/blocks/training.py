"""Blocks of how a model is trained: precision, optimizer, schedule, recomputation, attention, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from lt_zero.common.errors import ConfigError
from lt_zero.common.fields import Block, Dtype, Folder, MomentDtype, Names, Params, Positive, Real, Whole, key
from lt_zero.common.numbers import to_number
from lt_zero.common.units import parse_bytes

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
    bf16_optimizer_states: bool = key(
        False,
        "as optimizer_states.dtype=bf16; with bf16_master_weights_and_grads the step is computed in bf16, too "
        "(DeepSpeed: needs these)",
    )
    stochastic_rounding: bool = key(
        False,
        "round the weights of a step up or down at random, right in the mean, instead of to the nearest; needs "
        "bf16_master_weights_and_grads, and the step is computed in fp32 (DeepSpeed: has no such key)",
    )
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


class OptimizerStates(Block):
    """The ``optimizer_states`` block: how an optimizer's moments are kept between steps."""

    dtype: MomentDtype | None = key(
        None,
        "dtype of moments: fp32, bf16, or int8 for codes in blocks of 256 elements; null: that in which the step is "
        "computed",
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

    @property
    def follows_metric(self) -> bool:
        """True if it is stepped with a metric, at the end of an epoch."""
        return self.type == "ReduceLROnPlateau"


def _memory_budget(value: Any) -> Any:
    """A share as a float, a size as an int; any other value stays as it is."""
    number = to_number(value)
    if isinstance(number, str):
        with suppress(ConfigError):
            nbytes = parse_bytes(number, "memory_budget")
            if nbytes > 1:  # 1 is the share of all memory
                return nbytes
        raise ValueError("it is no size; write a share of the memory without recomputation, such as 0.5, or 4GB")
    if number is None:
        return None
    if (
        isinstance(number, bool)
        or not isinstance(number, (int, float))
        or not 0 < number < math.inf
        or (number > 1 and number != int(number))
    ):
        raise ValueError("it is neither a share above 0 and up to 1 nor a size such as 4GB")
    return float(number) if number <= 1 else int(number)


MemoryBudget = Annotated[
    float | int, BeforeValidator(_memory_budget), WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}]})
]


class ActivationCheckpointing(Block):
    """The ``activation_checkpointing`` block (arXiv:1604.06174): activations are recomputed in backward.

    A checkpointed module saves only its inputs, and backward runs its forward again.
    """

    mode: Literal["none", "full", "selective"] = key(
        "none",
        "what to recompute: nothing, everything, or everything but matrix products and attention; the "
        "other keys of the block need full or selective",
    )
    memory_budget: MemoryBudget | None = key(
        None,
        "recompute as few modules as keep their activations' peak within this share of the peak without "
        "recomputation, or this size, such as 4GB; chosen after two steps of full recomputation. mode is full if it "
        "is not written",
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

    @model_validator(mode="before")
    @classmethod
    def _with_mode(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("memory_budget") is not None and "mode" not in values:
            return {"mode": "full", **values}
        return values


class Compile(Block):
    """The ``compile`` block: the repeated blocks of the model are compiled by torch.compile, each in place."""

    disable: bool = key(True, "whether nothing is compiled; false if only other keys of the block are written")
    backend: str = key("inductor", "backend of torch.compile", min_length=1)
    kwargs: Params = key({}, "further arguments of torch.compile, such as dynamic or mode", validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _unless_disabled(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values and "disable" not in values:
            return {"disable": False, **values}
        return values


class Checkpoint(Block):
    """Settings for saving and restoring training states."""

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
