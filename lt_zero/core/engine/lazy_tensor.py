"""Tensors of a checkpoint: those that are read when their values are needed, and fragments that are saved.

A checkpoint is passed to Lightning, to the module's hooks and to ``load_state_dict`` before any weight is read. Its
lazy tensors have shape and dtype; hooks may drop, rename, replace and edit them. An operation on one reads all of it.
The engine asks only for the elements of this rank's shard: a rank never holds more of the model than its shard and one
parameter.

Values that an operation has read are dropped after it, unless it writes to the tensor or returns memory that can be
written to (a view, a numpy array): then they are kept, and later operations see the edits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lt_zero.common.boxes import Box
from lt_zero.common.compat import aliased_arguments, no_torch_function, wrapper_tensor

# Reads elements [lo, hi) of a box of the tensor, in row-major order of the box (1D).
Reader = Callable[[int, int, Box], Tensor]
CPU = torch.device("cpu")


@dataclass
class TensorValues:
    """The values of a tensor and its aliases: in ``kept`` (after edits), or to be read."""

    read: Reader
    kept: Tensor | None = None


def _on_kept(name: str) -> Any:  # a method that reads the values, keeps them, and calls theirs
    return lambda self, *args, **kwargs: getattr(self.keep(), name)(*args, **kwargs)


class LazyTensor(Tensor):
    """A tensor of this shape, dtype and device whose values are read when they are needed."""

    _held: TensorValues
    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], dtype: torch.dtype, read: Reader, device: torch.device = CPU
    ) -> LazyTensor:
        made: LazyTensor = wrapper_tensor(cls, shape, dtype, device)
        made._held = TensorValues(read)
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"

    def _with(self, values: TensorValues) -> LazyTensor:
        made = type(self)(tuple(self.shape), self.dtype, values.read, self.device)
        made._held = values
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTensor:
        kept = self._held.kept
        made = memo[id(self)] = self._with(TensorValues(self._held.read, kept.clone() if kept is not None else None))
        return made

    def elements(self, lo: int, hi: int, box: Box | None = None) -> Tensor:
        """Elements [lo, hi) of a box, by default of all, in row-major order (1D), read now; the caller owns them."""
        box = box or Box.whole(tuple(self.shape))
        if self._held.kept is not None:
            return box.of(self._held.kept).reshape(-1)[lo:hi].clone()
        with torch.inference_mode(False):
            return self._held.read(lo, hi, box)

    def part(self, box: Box) -> Tensor:
        """A box of it, which is read when its values are needed; of edited values a view."""
        held = self._held
        if held.kept is not None:
            return box.of(held.kept)

        def read(lo: int, hi: int, inner: Box) -> Tensor:
            return held.read(lo, hi, inner.shifted(box.offsets))

        return LazyTensor(box.sizes, self.dtype, read, self.device)

    def whole(self) -> Tensor:
        """The full tensor, read now."""
        kept = self._held.kept
        return kept if kept is not None else self.elements(0, self.numel()).view(self.shape)

    def check_values(self) -> None:
        """Raise the error of reading it, if it is known already that it has no values."""

    def keep(self) -> Tensor:
        """The full tensor, read now and kept."""
        kept = self._held.kept = self.whole()
        return kept

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]._with(args[0]._held)
        positions, names = aliased_arguments(func)
        kept: dict[int, LazyTensor] = {}
        args = [_read_all(value, kept if i in positions else None) for i, value in enumerate(args)]
        kwargs = {k: _read_all(value, kept if k in names else None) for k, value in (kwargs or {}).items()}
        out = func(*args, **kwargs)
        for lazy in kept.values():
            # The wrapper subclass has a fixed shape, and cannot follow.
            if lazy.keep().shape != lazy.shape:
                lazy._held.kept = None
                raise RuntimeError(
                    f"{func} changes the shape of a tensor of a checkpoint in place: `clone()` it before."
                )
        return kept.get(id(out), out) if isinstance(out, Tensor) else out

    @property
    def data(self) -> Tensor:
        return self._with(self._held)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise RuntimeError(
                f"`.data` of {self!r} of a checkpoint cannot become {tuple(value.shape)}, {value.dtype}: put the new "
                "tensor into the state dict."
            )
        self._held.kept = whole(value).detach().clone()

    # What torch does not dispatch, and what may be written to.
    numpy = _on_kept("numpy")
    data_ptr = _on_kept("data_ptr")
    untyped_storage = _on_kept("untyped_storage")
    __array__ = _on_kept("__array__")
    __dlpack__ = _on_kept("__dlpack__")

    def tolist(self) -> Any:
        return self.whole().tolist()

    def share_memory_(self) -> LazyTensor:
        self.keep().share_memory_()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)


def read_now(module: nn.Module) -> None:
    """Read parameters and buffers that a hook assigned from a checkpoint: it may be gone when they are used."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if isinstance(parameter, LazyTensor):
                setattr(part, name, nn.Parameter(parameter.whole(), parameter.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False)):
            if isinstance(buffer, LazyTensor):
                setattr(part, name, buffer.whole())


def elements_of(value: Tensor, lo: int, hi: int, box: Box | None = None) -> Tensor:
    """Elements [lo, hi) of a box, by default of all, in row-major order (1D), of any tensor."""
    if isinstance(value, LazyTensor):
        return value.elements(lo, hi, box)
    part = value.detach() if box is None else box.of(value.detach())
    return part.reshape(-1)[lo:hi]


def part_of(value: Tensor, box: Box) -> Tensor:
    """A box of any tensor; of a lazy tensor one that is read when its values are needed."""
    return value.part(box) if isinstance(value, LazyTensor) else box.of(value)


def _read_all(value: Any, kept: dict[int, LazyTensor] | None) -> Any:
    """Nested arguments of an operation with lazy tensors read; with ``kept`` (by id of the values) values are kept."""
    if isinstance(value, LazyTensor):
        if kept is None:
            return value.whole()
        values = value.keep()
        kept[id(values)] = value
        return values
    if isinstance(value, list | tuple):
        return type(value)([_read_all(item, kept) for item in value])
    if isinstance(value, dict):
        return {key: _read_all(item, kept) for key, item in value.items()}
    return value


def whole(value: Tensor) -> Tensor:
    """``value`` with its values: a lazy tensor is read."""
    return value.whole() if isinstance(value, LazyTensor) else value


class Fragment(Tensor):
    """Elements [lo, hi) of a box of a tensor, which are read when they are written.

    It has the shape and dtype of the full tensor, but no values.

    Args:
        local: returns the elements (1D, contiguous).
        shape: of the full tensor.
        lo, hi: the range of this rank's elements in row-major order of the box; empty if they are equal.
        dtype: of the elements.
        done: called when the elements are no longer needed, until ``local`` is called again.
        box: default: all of the tensor.
        ranks: that have the elements of the box together; default: all. See plan.py, Note [Who decides the names].
    """

    local: Callable[[], Tensor]
    lo: int
    hi: int
    done: Callable[[], object] | None
    box: Box
    ranks: tuple[int, ...]
    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(
        cls,
        local: Callable[[], Tensor],
        shape: tuple[int, ...],
        lo: int,
        hi: int,
        dtype: torch.dtype,
        done: Callable[[], object] | None = None,
        box: Box | None = None,
        ranks: tuple[int, ...] = (),
    ) -> Fragment:
        made: Fragment = wrapper_tensor(cls, shape, dtype)
        made.local = local
        made.lo = lo
        made.hi = hi
        made.done = done
        made.box = box or Box.whole(shape)
        made.ranks = ranks
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Fragment({tuple(self.shape)}, {self.dtype}, elements {self.lo} to {self.hi} of {self.box})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _no_values(str(func))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _no_values("Pickling")

    def __deepcopy__(self, memo: dict[int, Any]) -> Fragment:
        return self


def _no_values(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} needs values that are on several ranks: while a sharded checkpoint is being saved, its tensors "
        'have shapes and dtypes only. Read weights under `lt_zero.gathered(...)`, or set checkpoint.format="full".'
    )
