"""``deepspeed.ops``: optimizers and builders of kernels, as DeepSpeed names them.

Optimizers are those of torch or lt_zero, the same as ``optimizer.type`` in a configuration makes: stepped by the native
kernels, with states where the configuration says. Patterns of sparse attention are in sparse_attention.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch.optim import Adagrad, Adam, AdamW, Optimizer

from lt_zero import optim
from lt_zero.optim.from_config import build_optimizer
from lt_zero.optim.lamb import Lamb
from lt_zero.optim.lion import Lion

# ---- optimizers ------------------------------------------------------------------------------------------------------


class _NamedType(type):
    """Lets ``isinstance`` know the optimizers that a name makes."""

    kind: str
    makes: tuple[type[Optimizer], ...]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.makes or getattr(optim, cls.kind))


class _Named(metaclass=_NamedType):
    """Base of names that make an optimizer of another class: one of ``makes``, or that of ``lt_zero.optim``.

    Arguments are ``optimizer.params``.

    Raises:
        ConfigError: lists all problems of the arguments.
    """

    kind: str
    makes: tuple[type[Optimizer], ...] = ()
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
    makes = (AdamW, Adam)
    order = ("lr", "bias_correction", "betas", "eps", "adam_w_mode", "weight_decay", "amsgrad", "set_grad_none")


class DeepSpeedCPUAdam(_Named):
    """``FusedAdam``; ``zero_optimization.offload_optimizer`` decides where its states are."""

    kind = "Adam"
    makes = (AdamW, Adam)
    order = ("lr", "bias_correction", "betas", "eps", "weight_decay", "amsgrad", "adamw_mode", "fp32_optimizer_states")
    renamed = {"adamw_mode": "adam_w_mode"}


class FusedLamb(_Named):
    """``optimizer.type: Lamb``."""

    kind = "Lamb"
    makes = (Lamb,)
    order = ("lr", "bias_correction", "betas", "eps", "eps_inside_sqrt", "weight_decay")
    without_effect = ("max_grad_norm",)  # DeepSpeed does not read it


class FusedLion(_Named):
    """``optimizer.type: Lion``."""

    kind = "Lion"
    makes = (Lion,)
    order = ("lr", "betas", "weight_decay", "set_grad_none")


class DeepSpeedCPULion(FusedLion):
    """``FusedLion``; ``zero_optimization.offload_optimizer`` decides where its states are."""


class DeepSpeedCPUAdagrad(_Named):
    """``optimizer.type: Adagrad``."""

    kind = "Adagrad"
    makes = (Adagrad,)
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


# ---- builders of kernels ---------------------------------------------------------------------------------------------


class _Builder:
    """Base of builders. ``NAME`` is the key in ``deepspeed.ops.__compatible_ops__``."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """True: without a kernel the optimizer is stepped by torch."""
        return True

    def load(self, verbose: bool = False) -> NoReturn:
        """Raise NotImplementedError: the kernels have other functions."""
        raise NotImplementedError(
            f"deepspeed.ops.op_builder.{type(self).__name__}().load is not in lt_zero. Make the optimizer: kernels are "
            "compiled when they are needed, or by lt-zero ops build."
        )


class CPUAdamBuilder(_Builder):
    """Stands for the builder of ``DeepSpeedCPUAdam``."""

    NAME = "cpu_adam"


class FusedAdamBuilder(_Builder):
    """Stands for the builder of ``FusedAdam``."""

    NAME = "fused_adam"


class FusedLambBuilder(_Builder):
    """Stands for the builder of ``FusedLamb``."""

    NAME = "fused_lamb"


class CPULionBuilder(_Builder):
    """Stands for the builder of ``DeepSpeedCPULion``."""

    NAME = "cpu_lion"


class FusedLionBuilder(_Builder):
    """Stands for the builder of ``FusedLion``."""

    NAME = "fused_lion"


class CPUAdagradBuilder(_Builder):
    """Stands for the builder of ``DeepSpeedCPUAdagrad``."""

    NAME = "cpu_adagrad"


class _Compatible(dict[str, bool]):
    """Kernel -> whether the optimizer that needs it can be made here: False for what is not one of these."""

    def __missing__(self, name: Any) -> bool:
        return False


compatible_ops = _Compatible({builder.NAME: True for builder in _Builder.__subclasses__()})
