"""Parameters whose ranks hold parts: a DTensor parameter as its local tensor, which buckets shard further.

A bucket holds the local tensor. The parameter keeps its identity and its global shape, so modules, optimizers and
torch's operations see the DTensor that they know. What the engine reads and sets (``data``, ``grad``, addresses) is of
the local tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import Parameter

from lt_zero.common.boxes import Box, ParamSpec
from lt_zero.common.compat import accumulated_grad, local_tensor, set_accumulated_grad, set_local_tensor
from lt_zero.common.errors import ConfigError
from lt_zero.engine.guard import called_on_guarded, is_guarded


class LocalParameter(DTensor):
    """A parameter that is a DTensor, of which the engine has the local tensor.

    ``grad`` is what autograd accumulated, a DTensor, until the engine takes it; then what the engine shows, which has
    the shape of the local tensor.
    """

    _shown: ClassVar[str] = "_lt_zero_shown"  # in the object's ``__dict__``

    @property
    def data(self) -> Tensor:
        return local_tensor(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        set_local_tensor(self, value.to_local() if isinstance(value, DTensor) else value)

    @property
    def grad(self) -> Tensor | None:
        shown = self.__dict__.get(self._shown)
        return shown if shown is not None else accumulated_grad(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.__dict__[self._shown] = local_part(self, value) if isinstance(value, DTensor) else value
        set_accumulated_grad(self, None)

    def data_ptr(self) -> int:
        return local_tensor(self).data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return local_tensor(self).untyped_storage()

    # These are no torch functions, so that the guard of a released parameter does not see them.

    def to_local(self, **kwargs: Any) -> Tensor:
        local: Tensor = self._of_values(DTensor.to_local, kwargs)
        return local

    def full_tensor(self, **kwargs: Any) -> Tensor:
        full: Tensor = self._of_values(DTensor.full_tensor, kwargs)
        return full

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        return self._of_values(DTensor.redistribute, kwargs, *args)

    def _of_values(self, method: Callable[..., Any], kwargs: dict[str, Any], *args: Any) -> Any:
        if is_guarded(self):
            return called_on_guarded(self, method, (self, *args), kwargs)
        return method(self, *args, **kwargs)


def local_part(parameter: DTensor, value: DTensor) -> Tensor:
    """The local tensor of ``value``, a gradient of ``parameter``, distributed as the parameter is.

    Of a replicated parameter a gradient that is a partial sum is multiplied by the number of ranks: the engine takes
    the mean over them, which is the sum then.
    """
    factor, placements = 1, list(value.placements)
    for axis, (mine, its) in enumerate(zip(parameter.placements, value.placements, strict=True)):
        if isinstance(its, Partial) and isinstance(mine, Replicate):
            factor *= value.device_mesh.size(axis)
        else:
            placements[axis] = mine
    if placements != list(value.placements):
        value = value.redistribute(placements=placements)
    local = value.to_local()
    return local * factor if factor > 1 else local


_PARTIAL = "_lt_zero_partial_over"  # in a parameter's ``__dict__``


def mark_partial(parameter: Tensor, ranks: int) -> None:
    """Note that the gradient of a plain ``parameter`` on each of ``ranks`` ranks is a part of a sum."""
    setattr(parameter, _PARTIAL, ranks)


def local_gradient(parameter: Parameter) -> Tensor | None:
    """The gradient of ``parameter`` as an engine takes it: in the shape of what it holds.

    A partial sum is multiplied by the number of ranks, as in ``local_part``. This is not done by a hook on the
    parameter: a frozen one cannot have hooks, and may be unfrozen later.
    """
    grad = parameter.grad
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
        return local_part(parameter, grad)
    ranks = getattr(parameter, _PARTIAL, 1)
    return grad * ranks if grad is not None and ranks > 1 else grad


def spec_of(name: str, parameter: DTensor) -> ParamSpec:
    """What this rank has of ``parameter``.

    Raises:
        ConfigError: it is not cut into equal parts.
    """
    offsets, sizes = [0] * parameter.dim(), list(parameter.shape)
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(parameter.placements):
        ranks = parameter.device_mesh.size(axis)
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard or sizes[placement.dim] % ranks:
            text = f"parameter {name!r} of shape {tuple(parameter.shape)} is placed as {placement} over {ranks} ranks."
            raise ConfigError.about(
                "tensor_parallel.autotp_size",
                f"tensor_parallel.autotp_size={ranks}: {text} Use a size that divides it, or Shard(dim) along another "
                "dimension, or Replicate().",
            )
        sizes[placement.dim] //= ranks
        offsets[placement.dim] += coordinate[axis] * sizes[placement.dim]
    return ParamSpec(name, tuple(parameter.shape), Box(tuple(offsets), tuple(sizes)))


def localize(module: nn.Module, mesh: DeviceMesh) -> list[ParamSpec]:
    """Make the DTensor parameters of ``module``, which are distributed over ``mesh``, local ones; returns their specs.

    Raises:
        ConfigError: one is not cut into equal parts.
        ValueError: one is distributed over other ranks.
    """
    specs, ranks = [], mesh.mesh.tolist()
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        if parameter.device_mesh.mesh.tolist() != ranks:
            raise ValueError(
                f"Parameter {name!r} is distributed over {parameter.device_mesh}, and the tensor-parallel ranks are "
                f"{mesh}. Parallelize with self.device_mesh['tensor_parallel']."
            )
        specs.append(spec_of(name, parameter))
        parameter.__class__ = LocalParameter  # type: ignore[assignment]
    return specs
