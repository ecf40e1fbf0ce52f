"""The dtypes and the loss scale of a run: what ``Trainer(precision=...)`` and the configuration mean together."""

from __future__ import annotations

import torch

from lt_zero.common.errors import ConfigError
from lt_zero.config.blocks import Fp16, Schema
from lt_zero.core.engine.dtypes import DtypePolicy, ScalerRules

# Trainer(precision=...) -> (dtype of weights in forward, autocast)
MODES: dict[str, tuple[torch.dtype | None, bool]] = {
    "32-true": (None, False),
    "64-true": (torch.float64, False),
    "16-true": (torch.float16, False),
    "bf16-true": (torch.bfloat16, False),
    "16-mixed": (torch.float16, True),
    "bf16-mixed": (torch.bfloat16, True),
}


def resolve_mode(config: Schema, precision: str, asked: str | None = None) -> str:
    """Resolve the precision from the Trainer (or Fabric) and the configuration.

    Args:
        config: its ``fp16``, ``bf16`` and ``torch_autocast`` blocks are used.
        precision: that of Lightning's plugin. "32-true" is the Trainer's default, so it contradicts nothing.
        asked: what the user passed, if known: on a CPU Lightning replaces "16-mixed" by "bf16-mixed".

    Raises:
        ConfigError: they contradict each other; shows both.
    """
    replaced = (asked, precision) == ("16-mixed", "bf16-mixed")
    given = "16-mixed" if replaced else precision
    autocast, bits = config.torch_autocast, given.partition("-")[0]
    if autocast.enabled:
        mode = "16-mixed" if autocast.dtype == torch.float16 else "bf16-mixed"
        if given not in ("32-true", mode):
            raise _contradiction(given, "torch_autocast.dtype", autocast.dtype)
        return mode
    blocks = {"16": ("fp16", config.fp16.enabled), "bf16": ("bf16", config.bf16.enabled)}
    wanted = next((bits for bits, (_, enabled) in blocks.items() if enabled is True), None)
    if wanted is None:
        if bits in blocks and blocks[bits][1] is False:
            raise _contradiction(given, f"{blocks[bits][0]}.enabled", "false")
        return precision
    if given == "32-true":
        return f"{wanted}-true"
    if bits != wanted:
        raise _contradiction(given, f"{blocks[wanted][0]}.enabled", "true")
    return given


def _contradiction(precision: str, key: str, value: object) -> ConfigError:
    text = f"Trainer or Fabric(precision={precision!r}) contradicts {key}={value} in the ZeRO configuration."
    return ConfigError.about(key, f"{text} Change or remove one.")


def dtype_policy(config: Schema, mode: str, rules: ScalerRules | None = None) -> DtypePolicy:
    """The dtypes of a resolved mode and configuration; ``rules`` are those of a plugin's GradScaler.

    Raises:
        ConfigError: a key contradicts the mode, or ``rules`` contradict the ``fp16`` block.
    """
    compute, autocast = MODES[mode]
    low_master = False
    for name, dtype, low in (
        ("fp16", torch.float16, config.fp16.fp16_master_weights_and_grads),
        ("bf16", torch.bfloat16, config.bf16.bf16_master_weights_and_grads),
    ):
        if low and compute != dtype:
            key = f"{name}.{name}_master_weights_and_grads"
            text = f"{key}=true, but the precision is {mode!r}. Set {name}.enabled=true or remove the key."
            raise ConfigError.about(key, text)
        low_master |= low
    types, forward = config.data_types, compute or torch.float32
    if types.param_dtype not in (None, forward):
        text = f"data_types.param_dtype={types.param_dtype} contradicts the precision {mode!r}, in which weights are "
        raise ConfigError.about("data_types.param_dtype", f"{text}{forward} in forward. Remove the key.")
    # Only what is computed in fp32 can be rounded.
    low_step = config.bf16.bf16_optimizer_states and low_master and not config.bf16.stochastic_rounding
    skips = compute == torch.float16 or (compute == torch.bfloat16 and config.bf16.check_grad_overflow)
    cast = config.fp16.auto_cast if compute == torch.float16 else None
    return DtypePolicy(
        mode=mode,
        compute=compute,
        autocast=autocast,
        cast_inputs=cast if cast is not None else compute is not None and not autocast,
        accumulate=types.grad_accum_dtype or (compute if low_master else None),
        wire=config.communication_data_type,
        buffers=types.buffer_dtype or (compute if compute == torch.float64 else None),
        low_master=low_master,
        low_step=low_step,
        stochastic=config.bf16.stochastic_rounding,
        moments=config.optimizer_states.dtype
        or (torch.bfloat16 if config.bf16.bf16_optimizer_states and not low_step else None),
        keep_fp32=tuple(name for block in (config, config.fp16, config.bf16) for name in block.fp16_override_modules),
        check_overflow=skips or config.on_nonfinite != "warn",
        raise_nonfinite=compute != torch.float16 and config.on_nonfinite == "raise",
        scaling=_scaling(config.fp16, rules) if compute == torch.float16 else None,
    )


def _scaling(block: Fp16, rules: ScalerRules | None) -> ScalerRules:
    if rules is not None:
        keys = {"loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"}
        if given := sorted(keys & block.model_fields_set):
            key = f"fp16.{given[0]}"
            text = f"The precision plugin has its own GradScaler, and {key}={getattr(block, given[0])} is configured."
            raise ConfigError.about(key, f"{text} Remove one.")
        return rules
    return ScalerRules(
        initial=2.0**block.initial_scale_power if block.loss_scale == 0 else block.loss_scale,
        dynamic=block.loss_scale == 0,
        window=block.loss_scale_window,
        hysteresis=block.hysteresis,
        consecutive_hysteresis=block.consecutive_hysteresis,
        minimum=block.min_loss_scale,
    )


def on_min_scale(config: Schema) -> str:
    """``raise``, ``hold`` or ``warn``, from either of its two keys."""
    asked = config.fp16.raise_error_at_min_scale
    return config.on_min_scale if asked is None else "raise" if asked else "hold"
