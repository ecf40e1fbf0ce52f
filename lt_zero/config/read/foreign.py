"""Files that look like ours and are another program's: what they are, and what to write instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lt_zero.common.errors import ConfigError, Problem
from lt_zero.config.read.source import Source

_ACCELERATE = ("compute_environment", "distributed_type", "main_training_function", "num_machines")
_ACCELERATE_ZERO = ("zero_stage", "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_config_file")
_PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "no": "32-true"}


def refuse(source: Source) -> None:
    """Accelerate's own file, by ``accelerate config``, is not DeepSpeed's: its keys have other names.

    Raises:
        ConfigError: it is one; says how to write it here.
    """
    inner = source.values.get("deepspeed_config")
    block: Mapping[str, Any] = inner if isinstance(inner, dict) else {}
    known = sum(key in source.values for key in _ACCELERATE)
    if known < 2 and not any(key in block for key in _ACCELERATE_ZERO):
        return
    key = "deepspeed_config" if block else next(key for key in _ACCELERATE if key in source.values)
    what = "this is a file of `accelerate config`, for `accelerate launch`; its keys are not DeepSpeed's"
    raise ConfigError([Problem(key, f"{what}. {_remedy(source.values, block)}", source.mark((key,)))])


def _remedy(values: Mapping[str, Any], block: Mapping[str, Any]) -> str:
    if block.get("deepspeed_config_file"):
        return f"Pass the file that it names, {block['deepspeed_config_file']}"
    trainer = []
    if isinstance(values.get("num_processes"), int):
        trainer.append(f"devices={values['num_processes']}")
    if isinstance(values.get("num_machines"), int) and values["num_machines"] > 1:
        trainer.append(f"num_nodes={values['num_machines']}")
    precision = _PRECISIONS.get(str(values.get("mixed_precision")))
    if precision:
        trainer.append(f'precision="{precision}"')
    written = f"Write {json.dumps(_translated(block), default=str)} instead"
    return f"{written}, and Trainer({', '.join(trainer)}) for the rest" if trainer else written


def _translated(block: Mapping[str, Any]) -> dict[str, Any]:
    """The block in DeepSpeed's own keys. Names: accelerate 1.15, ``DeepSpeedPlugin``."""
    zero: dict[str, Any] = {"stage": block.get("zero_stage", 2)}
    for ours, device, path in (
        ("offload_optimizer", "offload_optimizer_device", "offload_optimizer_nvme_path"),
        ("offload_param", "offload_param_device", "offload_param_nvme_path"),
    ):
        if block.get(device) in ("cpu", "nvme"):
            zero[ours] = {"device": block[device]}
            if block[device] == "nvme":
                zero[ours]["nvme_path"] = str(block.get(path, "/local_nvme"))
    if block.get("zero3_save_16bit_model") is True:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    kept = {key: block[key] for key in ("gradient_accumulation_steps", "gradient_clipping") if key in block}
    return {"zero_optimization": zero, **{key: value for key, value in kept.items() if isinstance(value, (int, float))}}
