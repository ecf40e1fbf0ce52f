"""Tensors without values, as of released parameters: what looks at shape, dtype and device works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lt_zero.common.boxes import Box
from lt_zero.common.compat import is_view, wrapper_tensor
from lt_zero.common.tensor_tree import iter_tensors, map_tensors
from lt_zero.core.engine.lazy_tensor import CPU, LazyTensor, TensorValues


def _refused(name: str) -> Any:  # a method that raises the error of an absent tensor
    def refuse(self: AbsentTensor, *args: Any, **kwargs: Any) -> Any:
        raise self._refuse(name)

    return refuse


class AbsentTensor(LazyTensor):
    """A tensor without values, as of a released parameter: it has metadata, and views of it are such tensors, too.

    It never has memory, so there is nothing that a gather or a release could change under it.

    Args:
        refuse: makes the error that reading and writing raise, of the name of what was called.
        strides: default: those of a contiguous tensor.
        needs_grad: what ``requires_grad`` tells.
    """

    _refuse: Callable[[str], RuntimeError]
    _needs_grad: bool

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        refuse: Callable[[str], RuntimeError],
        device: torch.device = CPU,
        strides: tuple[int, ...] | None = None,
        needs_grad: bool = False,
    ) -> AbsentTensor:
        made: AbsentTensor = wrapper_tensor(cls, shape, dtype, device, strides)

        def read(lo: int, hi: int, box: Box) -> Tensor:
            raise refuse("reading")

        made._held = TensorValues(read)
        made._refuse = refuse
        made._needs_grad = needs_grad
        return made

    def _like(self, meta: Tensor, needs_grad: bool) -> AbsentTensor:
        return AbsentTensor(tuple(meta.shape), meta.dtype, self._refuse, self.device, meta.stride(), needs_grad)

    def check_values(self) -> None:
        raise self._refuse("reading")

    def _with(self, values: TensorValues) -> LazyTensor:
        return self._like(_on_meta(self), False)

    # What the parameter's views would tell; torch has none for tensors without a graph.
    requires_grad: Any = property(lambda self: self._needs_grad)
    is_leaf: Any = property(lambda self: not self._needs_grad)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        absent = next(value for value in iter_tensors((args, kwargs)) if isinstance(value, AbsentTensor))
        packet = getattr(func, "overloadpacket", None)
        if packet in _FROM_METADATA:
            return func(*map_tensors(args, _without_values), **kwargs)
        if is_view(func):
            needs_grad = absent._needs_grad and packet is not torch.ops.aten.detach
            found = func(*map_tensors(args, _on_meta), **kwargs)
            return map_tensors(found, lambda meta: absent._like(meta, needs_grad))
        raise absent._refuse(str(func._schema.name).partition("::")[2] if hasattr(func, "_schema") else str(func))

    @property
    def data(self) -> Tensor:
        return self._with(self._held)

    @data.setter
    def data(self, value: Tensor) -> None:
        raise self._refuse(".data")

    # What torch does not dispatch, and conversions, which return the tensor itself if they change nothing.
    numpy = _refused("numpy")
    data_ptr = _refused("data_ptr")
    untyped_storage = _refused("untyped_storage")
    __array__ = _refused("__array__")
    __dlpack__ = _refused("__dlpack__")
    tolist = _refused("tolist")
    share_memory_ = _refused("share_memory_")
    __reduce_ex__ = _refused("__reduce_ex__")
    __deepcopy__ = _refused("__deepcopy__")
    cpu = _refused("cpu")
    to = _refused("to")


_aten = torch.ops.aten
# Operations that look at the shape, dtype and device of a tensor only.
_FROM_METADATA = {
    *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like),
    *(_aten.randint_like, _aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided),
}


def _without_values(tensor: Tensor) -> Tensor:
    """A tensor with the metadata of an absent one that takes the memory of one element; any other tensor itself."""
    if not isinstance(tensor, AbsentTensor):
        return tensor
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _on_meta(tensor: Tensor) -> Tensor:
    """An absent tensor on the meta device; any other tensor itself."""
    if not isinstance(tensor, AbsentTensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
