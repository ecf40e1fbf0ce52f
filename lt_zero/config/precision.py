"""The dtypes and the loss scale of a run: what ``Trainer(precision=...)`` and the configuration mean together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lt_zero.common.errors import ConfigError
from lt_zero.config.blocks import Fp16, Schema, Switch

# Trainer(precision=...) -> (dtype of weights in forward, autocast)
MODES: dict[str, tuple[torch.dtype | None, bool]] = {
    "32-true": (None, False),
    "64-true": (torch.float64, False),
    "16-true": (torch.float16, False),
    "bf16-true": (torch.bfloat16, False),
    "16-mixed": (torch.float16, True),
    "bf16-mixed": (torch.bfloat16, True),
}


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


def resolve_mode(config: Schema, precision: str, device: str) -> str:
    """Resolve the precision from the Trainer and the configuration.

    Args:
        config: its ``fp16``, ``bf16`` and ``torch_autocast`` blocks are used.
        precision: of the Trainer. "32-true" is its default, so it contradicts nothing.
        device: device type; on "cpu" Lightning has already replaced "16-mixed" by "bf16-mixed".

    Raises:
        ConfigError: they contradict each other; shows both.
    """
    autocast = config.torch_autocast
    if autocast.enabled:
        mode = "16-mixed" if autocast.dtype == torch.float16 else "bf16-mixed"
        replaced = device == "cpu" and mode == "16-mixed" and precision == "bf16-mixed"
        if precision not in ("32-true", mode) and not replaced:
            raise _contradiction(precision, "torch_autocast.dtype", autocast.dtype)
        return mode
    blocks: dict[str, Switch] = {"fp16": config.fp16.enabled, "bf16": config.bf16.enabled}
    wanted = next((name for name, enabled in blocks.items() if enabled is True), None)
    asked = {"16": "fp16", "bf16": "bf16"}.get(precision.split("-")[0])
    if wanted is None:
        if asked is not None and blocks[asked] is False:
            raise _contradiction(precision, f"{asked}.enabled", "false")
        return precision
    digits = {"fp16": "16", "bf16": "bf16"}[wanted]
    if precision == "32-true":
        return f"{digits}-true"
    if asked != wanted:
        if device == "cpu" and precision == "bf16-mixed":
            return f"{digits}-mixed"
        raise _contradiction(precision, f"{wanted}.enabled", "true")
    return precision


def _contradiction(precision: str, key: str, value: object) -> ConfigError:
    text = f"Trainer(precision={precision!r}) contradicts {key}={value} in the ZeRO configuration."
    return ConfigError.about(key, f"{text} Change or remove one.")


def dtype_policy(config: Schema, mode: str, rules: ScalerRules | None = None) -> DtypePolicy:
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
            key = f"{name}.{name}_master_weights_and_grads"
            text = f"{key}=true, but the precision is {mode!r}. Set {name}.enabled=true or remove the key."
            raise ConfigError.about(key, text)
    param, types = config.data_types.param_dtype, config.data_types
    if param is not None and param != (compute or torch.float32):
        text = f"data_types.param_dtype={param} contradicts the precision {mode!r}, in which weights are "
        raise ConfigError.about(
            "data_types.param_dtype", f"{text}{compute or torch.float32} in forward. Remove the key."
        )
    kept = [*config.fp16_override_modules, *config.fp16.fp16_override_modules, *config.bf16.fp16_override_modules]
    skips = compute == torch.float16 or (compute == torch.bfloat16 and config.bf16.check_grad_overflow)
    cast = config.fp16.auto_cast if compute == torch.float16 else None
    low_master = low.get(compute, False)
    return DtypePolicy(
        mode=mode,
        compute=compute,
        autocast=autocast,
        cast_inputs=cast if cast is not None else compute is not None and not autocast,
        accumulate=types.grad_accum_dtype or (compute if low_master else None),
        wire=config.communication_data_type,
        buffers=types.buffer_dtype or (compute if compute == torch.float64 else None),
        low_master=low_master,
        low_states=config.bf16.bf16_optimizer_states,
        keep_fp32=tuple(kept),
        check_overflow=skips or config.on_nonfinite != "warn",
        raise_nonfinite=compute != torch.float16 and config.on_nonfinite == "raise",
        scaling=_scaling(config.fp16, rules) if compute == torch.float16 else None,
    )


_SCALE_KEYS = {"loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"}


def _scaling(block: Fp16, rules: ScalerRules | None) -> ScalerRules:
    if rules is not None:
        if given := sorted(_SCALE_KEYS & block.model_fields_set):
            key = f"fp16.{given[0]}"
            text = f"The precision plugin has its own GradScaler, and {key}={getattr(block, given[0])} is configured."
            raise ConfigError.about(key, f"{text} Remove one.")
        return rules
    dynamic = block.loss_scale == 0
    return ScalerRules(
        initial=2.0**block.initial_scale_power if dynamic else block.loss_scale,
        dynamic=dynamic,
        window=block.loss_scale_window,
        hysteresis=block.hysteresis,
        consecutive_hysteresis=block.consecutive_hysteresis,
        minimum=block.min_loss_scale,
    )


def on_min_scale(config: Schema) -> str:
    """``raise``, ``hold`` or ``warn``, from either of its two keys."""
    asked = config.fp16.raise_error_at_min_scale
    return config.on_min_scale if asked is None else "raise" if asked else "hold"
