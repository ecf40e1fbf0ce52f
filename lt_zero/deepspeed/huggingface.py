"""Answers about DeepSpeed beside its modules: the package's metadata, the loss scale, skipped steps."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from lt_zero.common.tensor_tree import map_tensors
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.training.loop.engine import TrainingEngine


class DeepSpeedDistribution(Distribution):
    """The metadata of the package ``deepspeed``: both libraries take it for installed, in this version."""

    def __init__(self, version: str) -> None:
        self._version = version

    def read_text(self, filename: str) -> str | None:
        known = filename == "METADATA"
        return f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {self._version}\n" if known else None

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / str(path)


class SkippedStep:
    """Truth value: whether an engine skipped its last step. It is computed on use, because it waits for the step."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = weakref.ref(engine)

    def __bool__(self) -> bool:
        engine = self._engine()
        return engine is not None and engine.global_steps > 0 and not engine.was_step_applied()


class LossScaleView:
    """``optimizer.loss_scaler`` of an engine under fp16, by DeepSpeed's names. It reads the scale when it is asked."""

    def __init__(self, controller: LossScaleController) -> None:
        self._controller = controller
        scaler = controller.scaler
        assert scaler is not None
        rules = scaler.rules
        self.dynamic = self.dynamic_loss_scale = rules.dynamic
        self.scale_window, self.scale_factor = rules.window, rules.growth
        self.min_scale = self.min_loss_scale = rules.minimum
        self.delayed_shift, self.consecutive_hysteresis = rules.hysteresis, rules.consecutive_hysteresis

    @property
    def cur_scale(self) -> float:
        """The scale of the next backward."""
        self._controller.read_skip_flag()
        return self._controller.scale

    loss_scale = cur_scale

    @property
    def cur_iter(self) -> int:
        """Steps so far, with skipped ones; 0 for a scale that does not change."""
        self._controller.read_skip_flag()
        assert self._controller.scaler is not None
        return int(self._controller.scaler.state_dict()["steps"])


class InnerOptimizer:
    """``optimizer.optimizer``, which DeepSpeed's optimizers have: the same optimizer, but without that name.

    So code that takes wrappers off until there is none comes to an end.
    """

    def __init__(self, optimizer: Any) -> None:
        self.__dict__["_optimizer"] = weakref.ref(optimizer)

    @property
    def __class__(self) -> Any:  # for isinstance
        return type(self.__dict__["_optimizer"]())

    @__class__.setter
    def __class__(self, value: Any) -> NoReturn:
        raise TypeError("The class of an optimizer is not changed.")

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError("optimizer.optimizer is torch's optimizer, and wraps no other.")
        return getattr(self.__dict__["_optimizer"](), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_optimizer"](), name, value)


class ParameterOffload:
    """``optimizer.parameter_offload`` of stage 3: where DeepSpeed keeps the hooks that gather and release weights.

    TRL takes these hooks off while a model generates inside of ``GatheredParameters``, and has them put back after it.
    Here they can stay, because a forward takes weights that are gathered already as they are. So there are none to
    take off.

    Attributes:
        forward_hooks, backward_hooks: empty lists, which may be replaced.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    @property
    def module(self) -> nn.Module | None:
        """The model."""
        return self._module()

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Do nothing: the hooks are in place."""


def mark_optimizer(engine: TrainingEngine) -> None:
    """Give an optimizer what scripts ask of DeepSpeed's: ``optimizer``; at stage 3 ``parameter_offload``; under fp16
    ``loss_scaler`` and ``overflow``.

    Accelerate's schedules wait after ``overflow``.
    """
    optimizer: Any = engine.optimizer
    if optimizer is None:
        return
    optimizer.optimizer = InnerOptimizer(optimizer)
    if engine.zero_optimization_stage() == 3:
        optimizer.parameter_offload = ParameterOffload(engine.module)
    if engine.fp16_enabled():
        optimizer.overflow = SkippedStep(engine)
        optimizer.loss_scaler = optimizer.loss_scale_config = LossScaleView(engine.loss_scale_controller)
        optimizer.dynamic_loss_scale = engine.dynamic_loss_scale()


def parallelism_of_accelerate() -> dict[str, int]:
    """The sizes above 1 of Accelerate's ``ParallelismConfig`` that mean something here, if it drives DeepSpeed.

    Accelerate gives DeepSpeed only ``sp_size``. ``dp_replicate_size`` counts replicas of what ``dp_shard_size`` ranks
    share; alone it says that ranks are data ranks, which they are anyway.

    Raises:
        ValueError: context parallelism is asked for.
    """
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    shared: Mapping[str, Any] = getattr(state, "_shared_state", {})
    config, kind = shared.get("parallelism_config"), getattr(shared.get("distributed_type"), "value", None)
    if config is None or kind != "DEEPSPEED":
        return {}
    if (size := config.cp_size) > 1:
        raise ValueError(
            f"ParallelismConfig(cp_size={size}) is FSDP2's way to cut sequences. Write sp_size={size} instead, which "
            "lt_zero cuts them by."
        )
    found = {"tp_size": config.tp_size, "sp_size": config.sp_size}
    if config.dp_shard_size > 1:
        found["dp_replicate_size"] = config.dp_replicate_size
    return {name: size for name, size in found.items() if size > 1}


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of Accelerate's wrapper, which it passes on where ``tp_size`` is above 1."""
    kind = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    while kind is not None and isinstance(optimizer, kind):
        optimizer = optimizer.optimizer
    return optimizer


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copies on ``device`` of all tensors in nested containers."""
    found = dict(item) if isinstance(item, Mapping) else item
    return map_tensors(found, lambda value: value.detach().clone().to(device))
