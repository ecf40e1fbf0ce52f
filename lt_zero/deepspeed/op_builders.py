"""``deepspeed.ops.op_builder``: scripts ask it whether an optimizer's kernel is there, and lt_zero builds its own."""

from __future__ import annotations

from typing import Any, NoReturn


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
