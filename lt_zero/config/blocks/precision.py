"""The ``fp16``, ``bf16`` and ``data_types`` blocks, and what they and ``Trainer(precision=...)`` mean together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field

from lt_zero.common.errors import ConfigError, Problem
from lt_zero.config.fields import Block, Dtype, Names, PositiveElements, Real, Whole

if TYPE_CHECKING:
    from lt_zero.config.schema import ZeroConfig

# Trainer(precision=...) -> (dtype of weights in forward, autocast)
MODES: dict[str, tuple[torch.dtype | None, bool]] = {
    "32-true": (None, False),
    "64-true": (torch.float64, False),
    "16-true": (torch.float16, False),
    "bf16-true": (torch.bfloat16, False),
    "16-mixed": (torch.float16, True),
    "bf16-mixed": (torch.bfloat16, True),
}
Switch = bool | Literal["auto"] | None


class Fp16(Block):
    """The ``fp16`` block."""

    enabled: Switch = Field(
        None, description="fp16 weights in forward and backward; auto: follow Trainer(precision=...)"
    )
    auto_cast: bool | None = Field(
        None, description="cast floating-point inputs; null: in the true modes only (DeepSpeed: false)"
    )
    loss_scale: Real = Field(0.0, ge=0, description="0: dynamic, else a fixed scale")
    initial_scale_power: Whole = Field(16, ge=0, le=100, description="initial dynamic scale, as a power of 2")
    loss_scale_window: PositiveElements = Field(1000, description="steps without overflow before the scale doubles")
    hysteresis: Whole = Field(2, description="overflows before the scale is halved; 0 or less: never")
    consecutive_hysteresis: bool = Field(False, description="reset hysteresis at each step without overflow")
    min_loss_scale: Real = Field(
        1.0, ge=0, description="lower bound of the dynamic scale, any number above 0 (DeepSpeed: whole numbers)"
    )
    raise_error_at_min_scale: bool | None = Field(None, description="true: on_min_scale=raise, false: hold")
    fp16_master_weights_and_grads: bool = Field(False, description="no fp32 copy of the weights, fp16 accumulators")
    fp16_override_modules: Names = Field((), description="as the key of the same name at top level")


class Bf16(Block):
    """The ``bf16`` block."""

    enabled: Switch = Field(
        None, description="bf16 weights in forward and backward; auto: follow Trainer(precision=...)"
    )
    immediate_grad_update: bool = Field(
        True, description="true: add gradients to the accumulator in each backward (DeepSpeed: false)"
    )
    check_grad_overflow: bool = Field(True, description="skip steps with non-finite gradients")
    bf16_master_weights_and_grads: bool = Field(False, description="no fp32 copy of the weights, bf16 accumulators")
    bf16_optimizer_states: bool = Field(False, description="keep moments in bf16; needs bf16_master_weights_and_grads")
    fp16_override_modules: Names = Field((), description="as the key of the same name at top level")


class TorchAutocast(Block):
    """The ``torch_autocast`` block: another way to say ``Trainer(precision="16-mixed")`` or ``"bf16-mixed"``."""

    enabled: bool = Field(False, description="run forward under torch.autocast and gather weights in its dtype")
    dtype: Dtype = Field(
        torch.bfloat16, description="fp16 or bf16 (DeepSpeed: any dtype that torch supports on the device)"
    )


class DataTypes(Block):
    """The ``data_types`` block."""

    grad_accum_dtype: Dtype | None = Field(
        None, description="dtype of the gradient accumulators; null: the master weights' (DeepSpeed: the weights')"
    )
    param_dtype: Dtype | None = Field(None, description="checked against the fp16 or bf16 block; no other effect")
    buffer_dtype: Dtype | None = Field(None, description="cast floating-point buffers; null: keep their dtype")
    keep_in_fp32_modules: Literal["auto"] | Names = Field(
        "auto", description="modules whose buffers are not cast; auto: the model's _keep_in_fp32_modules"
    )


@dataclass(frozen=True)
class ScalerRules:
    """How the loss scale changes.

    Attributes:
        initial: the scale at the start.
        dynamic: False: the scale is constant; overflows still skip steps.
        window: the scale grows after this many steps without overflow.
        hysteresis: the number of overflows before the scale drops.
        consecutive_hysteresis: reset the count of overflows at each finite step instead of when the scale grows.
        minimum: the scale never drops below.
        growth: factor of an increase.
        backoff: factor of a decrease.
    """

    initial: float = 2.0**16
    dynamic: bool = True
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0
    growth: float = 2.0
    backoff: float = 0.5


@dataclass(frozen=True)
class DtypePolicy:
    """Which dtype is used for what.

    Attributes:
        mode: one of ``MODES``.
        compute: of gathered weights and activations; None: that of the parameters.
        autocast: whether forward runs under ``torch.autocast(dtype=compute)``.
        cast_inputs: whether floating-point inputs of a step are cast to ``compute``.
        accumulate: of the gradient accumulators; None: that of the master weights.
        wire: of gradients in collectives; None: their own, or one in which the sum is exact.
        buffers: of floating-point buffers; None: unchanged.
        low_master: master weights are in ``compute`` instead of fp32.
        low_states: the optimizer's moments have the dtype of the master weights even if that is bf16.
        keep_fp32: class names and patterns of modules and parameters that stay fp32.
        check_overflow: steps with non-finite gradients are skipped.
        raise_nonfinite: non-finite gradients are an error.
        scaling: how the loss is scaled; None: it is not.
    """

    mode: str = "32-true"
    compute: torch.dtype | None = None
    autocast: bool = False
    cast_inputs: bool = False
    accumulate: torch.dtype | None = None
    wire: torch.dtype | None = None
    buffers: torch.dtype | None = None
    low_master: bool = False
    low_states: bool = False
    keep_fp32: tuple[str, ...] = ()
    check_overflow: bool = False
    raise_nonfinite: bool = False
    scaling: ScalerRules | None = None

    def dtype_of(self, parameter: torch.Tensor, kept: bool = False) -> torch.dtype:
        """The dtype of a parameter's gathered weights; ``kept``: whether it belongs to an fp32 module."""
        if self.compute is None or parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return parameter.dtype
        return torch.promote_types(self.compute, torch.float32) if kept else self.compute

    @property
    def low(self) -> bool:
        """Whether weights are gathered in 16 bits."""
        return self.compute in (torch.float16, torch.bfloat16)

    def accumulate_of(self, dtype: torch.dtype) -> torch.dtype:
        """The accumulators' dtype; weights of fp32 modules and fp64 weights keep theirs."""
        plain = dtype == (self.compute or torch.float32)
        return self.accumulate if plain and self.accumulate is not None else self.master_of(dtype)

    def step_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the optimizer sees such weights and keeps its state."""
        master = self.master_of(dtype)
        return master if self.low_states else torch.promote_types(master, torch.float32)

    def wire_of(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype in which gradients of such weights must be reduced; None: any."""
        return None if dtype == torch.float64 else self.wire

    def master_of(self, dtype: torch.dtype) -> torch.dtype:
        """The master weights' dtype for gathered weights of ``dtype``: fp32 for 16 bits unless configured otherwise."""
        low = dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if low and not (self.low_master and dtype == self.compute) else dtype


def check_precision(config: ZeroConfig) -> Iterator[Problem]:
    """Find keys about dtypes and loss scaling that contradict each other."""
    fp16, bf16 = config.fp16, config.bf16
    if fp16.enabled is True and bf16.enabled is True:
        yield Problem("fp16.enabled", "fp16.enabled and bf16.enabled are both true. Switch one of them off.")
    if fp16.enabled is True and fp16.loss_scale == 0 and fp16.min_loss_scale == 0:
        yield Problem(
            "fp16.min_loss_scale",
            "fp16.min_loss_scale=0 with a dynamic scale: the scale could shrink to 0. Write 1, or a small number "
            "such as 1e-5.",
        )
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        yield Problem(
            "bf16.bf16_optimizer_states",
            "bf16.bf16_optimizer_states=true needs bf16.bf16_master_weights_and_grads=true.",
        )
    asked = fp16.raise_error_at_min_scale
    if asked is not None and "on_min_scale" in config.model_fields_set and asked != (config.on_min_scale == "raise"):
        yield Problem(
            "fp16.raise_error_at_min_scale",
            f"fp16.raise_error_at_min_scale={asked} contradicts on_min_scale={config.on_min_scale!r}. Remove one.",
        )
    autocast = config.torch_autocast
    if autocast.enabled and autocast.dtype == torch.float32:
        yield Problem("torch_autocast.dtype", "torch_autocast.dtype=fp32 casts nothing. Write bf16 or fp16.")
    other = bf16.enabled if autocast.dtype == torch.float16 else fp16.enabled
    if autocast.enabled and other is True:
        name = "bf16" if autocast.dtype == torch.float16 else "fp16"
        yield Problem(
            "torch_autocast.dtype",
            f"torch_autocast.dtype={autocast.dtype} contradicts {name}.enabled=true. Switch one of them off.",
        )


def resolve_mode(config: ZeroConfig, precision: str, device: str) -> str:
    """Resolve the precision from the Trainer and the configuration.

    Args:
        config: its ``fp16`` and ``bf16`` blocks are used.
        precision: of the Trainer. "32-true" is its default, so it contradicts nothing.
        device: device type; on "cpu" Lightning has already replaced "16-mixed" by "bf16-mixed".

    Raises:
        ConfigError: they contradict each other; shows both.
    """
    blocks: dict[str, Switch] = {"fp16": config.fp16.enabled, "bf16": config.bf16.enabled}
    wanted = next((name for name, enabled in blocks.items() if enabled is True), None)
    asked = {"16": "fp16", "bf16": "bf16"}.get(precision.split("-")[0])
    digits = {"fp16": "16", "bf16": "bf16"}
    if config.torch_autocast.enabled:
        return _autocast_mode(config, precision, device)
    if wanted is None:
        if asked is not None and blocks[asked] is False:
            raise _contradiction(precision, f"{asked}.enabled", "false")
        return precision
    if precision == "32-true":
        return f"{digits[wanted]}-true"
    if asked != wanted:
        if device == "cpu" and precision == "bf16-mixed":
            return f"{digits[wanted]}-mixed"
        raise _contradiction(precision, f"{wanted}.enabled", "true")
    return precision


def _autocast_mode(config: ZeroConfig, precision: str, device: str) -> str:
    """The mode of ``torch_autocast``, unless the Trainer sets another."""
    low = config.torch_autocast.dtype == torch.float16
    mode = "16-mixed" if low else "bf16-mixed"
    if precision not in ("32-true", mode) and not (device == "cpu" and low and precision == "bf16-mixed"):
        raise _contradiction(precision, "torch_autocast.dtype", config.torch_autocast.dtype)
    return mode


def _contradiction(precision: str, key: str, value: object) -> ConfigError:
    text = f"Trainer(precision={precision!r}) contradicts {key}={value} in the ZeRO configuration."
    return ConfigError([Problem(key, f"{text} Change or remove one.")])


def dtype_policy(config: ZeroConfig, mode: str, rules: ScalerRules | None = None) -> DtypePolicy:
    """The dtypes of a resolved mode and configuration.

    Args:
        config: its keys about dtypes and loss scaling are used.
        mode: one of ``MODES``.
        rules: loss scaling from a plugin's GradScaler.

    Raises:
        ConfigError: a key contradicts the mode, or ``rules`` contradict the ``fp16`` block.
    """
    compute, autocast = MODES[mode]
    low: dict[torch.dtype | None, bool] = {torch.float16: config.fp16.fp16_master_weights_and_grads}
    low[torch.bfloat16] = config.bf16.bf16_master_weights_and_grads
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        if low[dtype] and compute != dtype:
            raise ConfigError(
                [
                    Problem(
                        f"{name}.{name}_master_weights_and_grads",
                        f"{name}.{name}_master_weights_and_grads=true, but the precision is {mode!r}. Set "
                        f"{name}.enabled=true "
                        "or remove the key.",
                    )
                ]
            )
    param = config.data_types.param_dtype
    if param is not None and param != (compute or torch.float32):
        raise ConfigError(
            [
                Problem(
                    "data_types.param_dtype",
                    f"data_types.param_dtype={param} contradicts the precision {mode!r}, in which weights are "
                    f"{compute or torch.float32} in forward. Remove the key.",
                )
            ]
        )
    low_master = low.get(compute, False)
    return DtypePolicy(
        mode=mode,
        compute=compute,
        autocast=autocast,
        cast_inputs=_cast_inputs(config, mode),
        accumulate=config.data_types.grad_accum_dtype or (compute if low_master else None),
        wire=config.communication_data_type,
        buffers=config.data_types.buffer_dtype or (compute if compute == torch.float64 else None),
        low_master=low_master,
        low_states=config.bf16.bf16_optimizer_states,
        keep_fp32=(
            *config.fp16_override_modules,
            *config.fp16.fp16_override_modules,
            *config.bf16.fp16_override_modules,
        ),
        check_overflow=compute == torch.float16
        or (compute == torch.bfloat16 and config.bf16.check_grad_overflow)
        or config.on_nonfinite != "warn",
        raise_nonfinite=compute != torch.float16 and config.on_nonfinite == "raise",
        scaling=_scaling(config, rules) if compute == torch.float16 else None,
    )


def _cast_inputs(config: ZeroConfig, mode: str) -> bool:
    compute, autocast = MODES[mode]
    if compute == torch.float16 and config.fp16.auto_cast is not None:
        return config.fp16.auto_cast
    return compute is not None and not autocast


_SCALE_KEYS = {"loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"}


def _scaling(config: ZeroConfig, rules: ScalerRules | None) -> ScalerRules:
    block: Any = config.fp16
    if rules is not None:
        given = sorted(_SCALE_KEYS & block.model_fields_set)
        if given:
            raise ConfigError(
                [
                    Problem(
                        f"fp16.{given[0]}",
                        f"The precision plugin has its own GradScaler, and "
                        f"fp16.{given[0]}={getattr(block, given[0])} is "
                        "configured. Remove one.",
                    )
                ]
            )
        return rules
    dynamic = ScalerRules(
        initial=2.0**block.initial_scale_power,
        window=block.loss_scale_window,
        hysteresis=block.hysteresis,
        consecutive_hysteresis=block.consecutive_hysteresis,
        minimum=block.min_loss_scale,
    )
    return dynamic if block.loss_scale == 0 else replace(dynamic, initial=block.loss_scale, dynamic=False)


def on_min_scale(config: ZeroConfig) -> str:
    """``raise``, ``hold`` or ``warn``, from either of its two keys."""
    asked = config.fp16.raise_error_at_min_scale
    return config.on_min_scale if asked is None else "raise" if asked else "hold"
