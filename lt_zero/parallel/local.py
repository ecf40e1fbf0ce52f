"""Parameters whose ranks hold parts: a DTensor parameter as its local tensor, which buckets shard further.

A bucket holds the local tensor. The parameter keeps its identity and its global shape, so modules, optimizers and
torch's operations see the DTensor that they know. What the engine reads and sets (``data``, addresses) is of the local
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import Parameter

from lt_zero.common.boxes import Box, ParamSpec
from lt_zero.common.compat import replace_tensor, without_torch_function
from lt_zero.common.compat.of_distributed_tensors import local_tensor, set_local_tensor
from lt_zero.common.errors import ConfigError
from lt_zero.common.norms import VectorNorm
from lt_zero.common.tensor_tree import map_tensors
from lt_zero.core.comm.part_ranks import PartRanks
from lt_zero.core.engine.guard import called_on_guarded, is_guarded
from lt_zero.core.engine.lazy_tensor import part_of, whole
from lt_zero.core.engine.sharded_calls import IN_PLACE, NORMS, SAME, asked_norm
from lt_zero.parallel.first_gradients import FirstGradients


class LocalTensor(DTensor):
    """A DTensor whose local tensor is a part of a bucket.

    Copies and pickles are torch's DTensors with memory of their own. Torch takes a DTensor for a tensor with storage if
    its local tensor is not at the beginning of one, and fails.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self._copied()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copied().__reduce_ex__(protocol)

    def _copied(self) -> DTensor:
        return copied(self)


class LocalParameter(LocalTensor):
    """A parameter that is a DTensor; the engine has its local tensor."""

    def _copied(self) -> Any:
        return Parameter(self._read(copied, {}), self.requires_grad)

    @property
    def data(self) -> Tensor:
        return local_tensor(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        has = local_tensor(self).shape
        if isinstance(value, DTensor) or (value.shape == self.shape and value.shape != has):
            value = cut(self, value)
        if value.shape == has and (value.dtype, value.device) != (self.dtype, self.device):
            made = DTensor.from_local(value, self.device_mesh, self.placements, run_check=False)
            made.requires_grad_(self.requires_grad)
            replace_tensor(self, made)
        else:
            set_local_tensor(self, value)

    def data_ptr(self) -> int:
        return local_tensor(self).data_ptr()

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> DTensor:
        """Make an object of the class that torch.compile expects: it compares classes."""
        made: DTensor = DTensor.__tensor_unflatten__(*args)
        made.__class__ = LocalParameter
        return made

    def storage_offset(self) -> int:
        """Offset of the local tensor, by which torch.compile describes a DTensor that it makes from one."""
        return int(local_tensor(self).storage_offset())

    def copy_(self, src: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy a DTensor, or a tensor of the whole shape, as ``load_state_dict`` does: torch refuses the latter."""
        if is_guarded(self):
            called_on_guarded(self, LocalParameter.copy_, (self, src), {})
            return self
        if not isinstance(src, DTensor) or src.placements != self.placements:
            src = shown(self, whole(cut(self, src if src.shape == self.shape else src.expand(self.shape))))
        DTensor.copy_(self, src, non_blocking)
        return self

    def detach(self) -> Any:
        """Return the tensor for ``state_dict``, which users save."""
        found = self._read(Tensor.detach, {})
        if type(found) is DTensor:
            found.__class__ = LocalTensor
        return found

    # These are no torch functions, so that the guard of a released parameter does not see them.

    def to_local(self, **kwargs: Any) -> Any:
        return self._read(DTensor.to_local, kwargs)

    def full_tensor(self, **kwargs: Any) -> Any:
        return self._read(DTensor.full_tensor, kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        return self._read(DTensor.redistribute, kwargs, *args)

    def _read(self, method: Callable[..., Any], kwargs: dict[str, Any], *args: Any) -> Any:
        if is_guarded(self):
            return called_on_guarded(self, method, (self, *args), kwargs)
        return method(self, *args, **kwargs)


class LocalGrad(LocalTensor):
    """The accumulated gradient of a ``LocalParameter``, as ``p.grad`` shows it.

    Norms and other reductions are plain tensors of all of it, collective over the ranks that have parts; and scaling in
    place takes plain numbers. Otherwise code that handles all gradients of a model (``clip_grad_norm_``, Lightning's
    ``grad_norm``) would meet plain tensors and DTensors, or DTensors of two meshes, in one operation, which torch
    refuses.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        me, kwargs = args[0] if args else None, kwargs or {}
        if getattr(func, "__name__", "") == "_foreach_norm":
            return tuple(torch.linalg.vector_norm(grad, *args[1:], **kwargs) for grad in args[0])
        with without_torch_function():
            if not isinstance(me, LocalGrad):
                return func(*args, **kwargs)
            if func in SAME:
                return me
            if func in IN_PLACE:
                others = [other.full_tensor() if isinstance(other, DTensor) else other for other in args[1:]]
                if not any(isinstance(other, Tensor) and other.dim() for other in [*others, *kwargs.values()]):
                    func(local_tensor(me), *others, **kwargs)
                    return me
            if func in NORMS and (asked := asked_norm(me, func, args, kwargs)) is not None:
                return _norm(me, *asked)
            if func in _OF_ALL_ELEMENTS:
                return func(*map_tensors(args, _full), **map_tensors(kwargs, _full))
            return map_tensors(func(*args, **kwargs), _shown_in_full)


# Functions of all elements. Of a DTensor torch reads this rank's summand, and some are wrong along a cut dimension, so
# they are computed of the full tensor. All others keep the parts, and what is read in the end is read in full.
_REDUCTIONS = (
    ("sum", "nansum", "mean", "nanmean", "std", "var", "std_mean", "var_mean", "min", "max", "amin", "amax", "aminmax"),
    ("median", "nanmedian", "mode", "prod", "argmin", "argmax", "count_nonzero", "any", "all", "norm", "logsumexp"),
    (
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "logcumsumexp",
        "topk",
        "sort",
        "msort",
        "argsort",
        "kthvalue",
        "quantile",
    ),
    ("nanquantile", "histc", "bincount", "unique", "unique_consecutive", "nonzero", "dist", "trace", "softmax"),
    (
        "log_softmax",
        "dot",
        "vdot",
        "inner",
        "mv",
        "mm",
        "matmul",
        "einsum",
        "equal",
        "allclose",
        "isin",
        "diff",
        "cdist",
    ),
    ("item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__", "__complex__"),
    ("__format__", "__contains__", "__matmul__", "__rmatmul__"),
)
_OF_ALL_ELEMENTS = {
    getattr(where, name)
    for where in (Tensor, torch, torch.linalg)
    for row in _REDUCTIONS
    for name in row
    if hasattr(where, name)
} | {torch.linalg.vector_norm, torch.linalg.matrix_norm}


def _full(value: Tensor) -> Tensor:
    """All of a DTensor, of any other tensor itself. Collective over the ranks that have parts."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _shown_in_full(result: Tensor) -> Tensor:
    """A result of a gradient, such that reading it gives that of all elements: a number is a plain tensor."""
    if not isinstance(result, DTensor):
        return result
    if result.dim() == 0:
        return _full(result)
    result.__class__ = LocalGrad
    return result


def _norm(grad: DTensor, order: float, dtype: torch.dtype | None) -> Tensor:
    """The norm (0D) of all elements. Collective over the ranks that have parts.

    Not by DTensor's own operation, which is wrong for orders of 0 and below.
    """
    kind = VectorNorm(order)
    part = kind.part([local_tensor(grad)], grad.device)
    summand = Partial("max" if kind.takes_maximum else "sum")
    placements = [summand if isinstance(place, Shard) else Replicate() for place in grad.placements]
    combined = DTensor.from_local(part, grad.device_mesh, placements, run_check=False).full_tensor()
    return kind.finish(combined[None])[0].to(dtype or grad.dtype)


def copied(tensor: DTensor) -> DTensor:
    """A DTensor with the same values, and memory of its own."""
    return shown(tensor, local_tensor(tensor).detach().clone(memory_format=torch.preserve_format))


class LocalParts:
    """``Parts`` of DTensors; of other parameters all of the tensor.

    ``first``: sees the gradients of the first backward that tensor ranks should have alike. ``ranks``: that have the
    other parts. ``elsewhere``: tells parameters that are cut over other ranks than tensor ranks. ``uneven``: see there.
    """

    joins = True

    def __init__(
        self,
        first: FirstGradients | None = None,
        ranks: PartRanks | None = None,
        elsewhere: Callable[[Parameter], bool] = lambda parameter: False,
        uneven: str = "",
    ) -> None:
        self.first = first
        self.ranks = ranks
        self.uneven = uneven
        self._elsewhere = elsewhere

    def cut(self, parameter: Parameter, value: Tensor) -> Tensor:
        return cut(parameter, value) if isinstance(parameter, DTensor) else value

    def show(self, parameter: Parameter, part: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return part
        grad = shown(parameter, part)
        grad.__class__ = LocalGrad
        return grad

    def gradient(self, parameter: Parameter) -> Tensor | None:
        grad = parameter.grad
        if grad is None:
            return None
        # Not by a hook on the parameter: a frozen one cannot have hooks, and may be unfrozen later.
        if (ranks := getattr(parameter, _PARTIAL, 1)) > 1:
            return (cut(parameter, grad) if isinstance(parameter, DTensor) else grad) * ranks
        told = isinstance(grad, DTensor) and any(isinstance(placement, Partial) for placement in grad.placements)
        if isinstance(parameter, DTensor):
            grad = cut(parameter, grad)
        alike = self._elsewhere(parameter) or not is_cut(parameter)
        if self.first is not None and alike and not (self.first.over or told):
            self.first.see(parameter, grad)
        return grad

    def place(self, empty: Parameter, full: Parameter) -> Parameter:
        if not isinstance(empty, DTensor):
            return full
        part = cut(empty, full.detach()).clone(memory_format=torch.contiguous_format)
        made = Parameter(DTensor.from_local(part, empty.device_mesh, empty.placements, run_check=False))
        made.requires_grad_(empty.requires_grad)
        made.__class__ = type(empty)
        return made

    def join(self, parameter: Parameter, part: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return part
        with torch.no_grad():
            return shown(parameter, part).full_tensor()

    def check_graph(self, name: str, parameters: Iterable[Parameter]) -> None:
        # Collectives of torch's backward have no derivative, and drop terms of the second one without an error.
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            raise RuntimeError(
                f"The backward of {name!r} is to be differentiated (create_graph=True), whose parameters are DTensors: "
                "torch would leave out what goes through other tensor ranks. Leave this module out of the plan, or "
                "train without terms that need second derivatives (gradient penalties)."
            )


def cut(parameter: DTensor, value: Tensor) -> Tensor:
    """The part of ``value``, a DTensor or all of a tensor, that this rank has of ``parameter``."""
    if isinstance(value, DTensor):
        return local_part(parameter, value)
    return part_of(value, spec_of("", parameter).local_box)


def shown(parameter: DTensor, part: Tensor) -> DTensor:
    """``part`` as a DTensor that is distributed as ``parameter``."""
    part = part if part.device.type == parameter.device.type else part.to(parameter.device)
    return DTensor.from_local(part, parameter.device_mesh, parameter.placements, run_check=False)


def local_part(parameter: DTensor, value: DTensor) -> Tensor:
    """The local tensor of ``value``, a gradient of ``parameter``, distributed as the parameter is.

    Of a replicated parameter a gradient that is a partial sum is multiplied by the number of ranks: the engine takes
    the mean over them, which is the sum then.
    """
    factor = 1
    placements = list(value.placements)
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
    """Note that the gradient of a plain ``parameter`` on each of ``ranks`` ranks is a part of a sum.

    It is multiplied by their number, as in ``local_part``.
    """
    setattr(parameter, _PARTIAL, ranks)


def spec_of(name: str, parameter: DTensor) -> ParamSpec:
    """Spec of this rank's part of ``parameter``.

    Raises:
        ConfigError: it is not cut into equal parts.
    """
    offsets = [0] * parameter.dim()
    sizes = list(parameter.shape)
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


def localize(module: nn.Module, meshes: Sequence[DeviceMesh]) -> list[ParamSpec]:
    """Make the DTensor parameters of ``module``, each distributed over one of ``meshes``, local ones; returns specs.

    Raises:
        ConfigError: one is not cut into equal parts.
        ValueError: one is distributed over other ranks.
    """
    specs = []
    ranks = [mesh.mesh.tolist() for mesh in meshes]
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        if parameter.device_mesh.mesh.tolist() not in ranks:
            raise ValueError(
                f"Parameter {name!r} is distributed over {parameter.device_mesh}, and the tensor-parallel ranks are "
                f"{meshes[0]}. Parallelize with self.device_mesh['tensor_parallel']."
            )
        specs.append(spec_of(name, parameter))
        parameter.__class__ = LocalParameter  # type: ignore[assignment]
    return specs


def is_cut(parameter: Tensor) -> bool:
    """True if each rank has only a part of ``parameter``."""
    return isinstance(parameter, DTensor) and not all(isinstance(p, Replicate) for p in parameter.placements)
