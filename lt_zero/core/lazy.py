"""Tensors that are somewhere else, in a checkpoint, and are read when their values are needed.

Note [Lazy state dicts]
    A checkpoint is handed to Lightning, to the module's hooks and to ``load_state_dict`` before any weight is read. Its
    values know shape and dtype; hooks may drop, rename and replace them. An operation on one reads it, whole. The
    engine asks for the elements that this rank keeps, and only these are read: a rank never holds more of the model
    than its shard and one parameter.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from lt_zero.compat import no_torch_function, wrapper_tensor


class Reader(Protocol):
    """Reads elements [lo, hi) in row-major order (1D)."""

    def __call__(self, lo: int, hi: int) -> Tensor: ...


class LazyTensor(Tensor):
    """A tensor that is somewhere else. See Note [Lazy state dicts].

    Args:
        shape, dtype: its.
        read: reads it.
    """

    _read: Reader
    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, read: Reader) -> LazyTensor:
        made: LazyTensor = wrapper_tensor(cls, shape, dtype)
        made._read = read
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyTensor({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTensor:
        return self

    def elements(self, lo: int, hi: int) -> Tensor:
        """Elements [lo, hi) in row-major order (1D), read now."""
        with torch.inference_mode(False):
            return self._read(lo, hi)

    def whole(self) -> Tensor:
        """All of it, read now."""
        return self.elements(0, self.numel()).view(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        return func(*_read_all(args), **_read_all(kwargs or {}))


def elements_of(value: Tensor, lo: int, hi: int) -> Tensor:
    """Elements [lo, hi) in row-major order (1D) of any tensor."""
    return value.elements(lo, hi) if isinstance(value, LazyTensor) else value.detach().reshape(-1)[lo:hi]


def _read_all(value: Any) -> Any:
    """Nested arguments of an operation with lazy tensors read."""
    if isinstance(value, LazyTensor):
        return value.whole()
    if isinstance(value, list | tuple):
        return type(value)(_read_all(item) for item in value)
    if isinstance(value, dict):
        return {key: _read_all(item) for key, item in value.items()}
    return value


def whole(value: Tensor) -> Tensor:
    """A tensor with values: a lazy one is read."""
    return value.whole() if isinstance(value, LazyTensor) else value
