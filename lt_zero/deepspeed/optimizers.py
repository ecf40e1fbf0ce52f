"""DeepSpeed's optimizers by the names and arguments of its classes: the same as ``optimizer.type`` in a configuration.

They are optimizers of torch or lt_zero, stepped by the native kernels, with states where the configuration says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from lt_zero.optim.from_config import build_optimizer


class _Named:
    """Base of names that make an optimizer of another class. Arguments are ``optimizer.params``.

    Raises:
        ConfigError: lists all problems of the arguments.
    """

    kind: str
    order: tuple[str, ...] = ("lr",)
    renamed: dict[str, str] = {}
    without_effect: tuple[str, ...] = ()

    def __new__(cls, params: Iterable[Any] | None = None, *args: Any, **options: Any) -> Any:
        if params is None:
            params = options.pop("model_params", None)
        if params is None:
            raise TypeError(f"{cls.__name__} got no parameters: pass model.parameters(), or parameter groups.")
        options |= dict(zip(cls.order, args, strict=False))
        given = {cls.renamed.get(key, key): value for key, value in options.items() if key not in cls.without_effect}
        made: Optimizer = build_optimizer(cls.kind, given, params)
        return made


class FusedAdam(_Named):
    """``optimizer.type: Adam``: AdamW unless ``adam_w_mode=False``."""

    kind = "Adam"
    order = ("lr", "bias_correction", "betas", "eps", "adam_w_mode", "weight_decay", "amsgrad", "set_grad_none")


class DeepSpeedCPUAdam(_Named):
    """``FusedAdam``; ``zero_optimization.offload_optimizer`` decides where its states are."""

    kind = "Adam"
    order = ("lr", "bias_correction", "betas", "eps", "weight_decay", "amsgrad", "adamw_mode", "fp32_optimizer_states")
    renamed = {"adamw_mode": "adam_w_mode"}


class FusedLamb(_Named):
    """``optimizer.type: Lamb``."""

    kind = "Lamb"
    order = ("lr", "bias_correction", "betas", "eps", "eps_inside_sqrt", "weight_decay")
    without_effect = ("max_grad_norm",)  # DeepSpeed does not read it


class FusedLion(_Named):
    """``optimizer.type: Lion``."""

    kind = "Lion"
    order = ("lr", "betas", "weight_decay", "set_grad_none")


class DeepSpeedCPULion(FusedLion):
    """``FusedLion``; ``zero_optimization.offload_optimizer`` decides where its states are."""


class DeepSpeedCPUAdagrad(_Named):
    """``optimizer.type: Adagrad``."""

    kind = "Adagrad"
    order = ("lr", "eps", "weight_decay", "amsgrad")


class OnebitAdam(_Named):
    """``optimizer.type: OneBitAdam``."""

    kind = "OneBitAdam"
    order = ("deepspeed", "lr")
    without_effect = ("deepspeed",)


class OnebitLamb(OnebitAdam):
    """``optimizer.type: OneBitLamb``."""

    kind = "OneBitLamb"


class ZeroOneAdamOptimizer(OnebitAdam):
    """``optimizer.type: ZeroOneAdam``."""

    kind = "ZeroOneAdam"
