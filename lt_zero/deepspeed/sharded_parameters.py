"""``deepspeed.zero``'s words about parameters that are sharded."""

from __future__ import annotations

import weakref
from enum import Enum
from typing import Any

from torch import nn
from torch.nn import Parameter

from lt_zero.engine.guard import is_guarded, owner_of


class ZeroParamStatus(Enum):
    """The states that DeepSpeed gives to a parameter, in ``ds_status``."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class _Status:
    """``ds_status``: equals the member of ``ZeroParamStatus`` that holds for a parameter now.

    While the model runs, a parameter that is used is gathered: it is available without ``GatheredParameters``.
    """

    def __init__(self, parameter: Parameter) -> None:
        self._parameter = weakref.ref(parameter)

    def now(self) -> ZeroParamStatus:
        """The member that holds now."""
        parameter = self._parameter()
        if parameter is None or not is_guarded(parameter) or getattr(owner_of(parameter), "running", False):
            return ZeroParamStatus.AVAILABLE
        return ZeroParamStatus.NOT_AVAILABLE

    def __eq__(self, other: object) -> bool:
        return self.now() is (other.now() if isinstance(other, _Status) else other)

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.now(), name)


def mark_parameters(model: nn.Module) -> None:
    """Give the parameters of a sharded model what scripts and libraries ask: ``ds_id``, ``ds_status``, their sizes."""
    for number, parameter in enumerate(model.parameters()):
        sizes = {"ds_id": number, "ds_shape": parameter.shape, "ds_numel": parameter.numel()}
        for name, value in {**sizes, "ds_status": _Status(parameter)}.items():
            setattr(parameter, name, value)


class ZeroParamType(Enum):
    """The kinds that DeepSpeed gives to a parameter."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class OffloadDeviceEnum(str, Enum):
    """Places that states are offloaded to: the values of ``offload_optimizer.device`` and ``offload_param.device``."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Kinds of states that DeepSpeed's ``engine.offload_states`` takes."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def register_external_parameter(module: nn.Module, parameter: Parameter) -> None:
    """Do nothing: a weight that is used outside of its module is gathered.

    Raises:
        TypeError: the arguments are no module and parameter.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, Parameter):
        raise TypeError(
            f"register_external_parameter({type(module).__name__}, {type(parameter).__name__}): pass a module and one "
            "of its parameters, or remove the call, which is not needed."
        )


unregister_external_parameter = register_external_parameter


def is_zero_param(parameter: Any) -> bool:
    """True if a parameter is one of an engine."""
    return isinstance(parameter, Parameter) and owner_of(parameter) is not None
