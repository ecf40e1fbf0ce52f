"""Gradients of which ranks have parts, as users see them: what needs no gather works, and all else raises.

``p.grad`` is a ``ShardedGrad``, and what is computed from it element by element is ``ShardedValues``: masks, or what is
assigned to ``p.grad``. Each rank computes the elements of its own pieces; together the ranks have all. Operands are
numbers, gradients of the same parameter, and tensors that can be broadcast to its shape, which are cut as it is. Norms
are those of all elements, over all ranks. sharded_calls.py computes all that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lt_zero.common.compat import TRACED, without_torch_function
from lt_zero.common.tensor_tree import iter_tensors
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.guard import PASSING, called, changes_nothing
from lt_zero.core.engine.parts import Parts

if TYPE_CHECKING:
    from lt_zero.common.norms import VectorNorm

Place = tuple[Bucket, int]

REMEDY = (
    "Norms (`p.grad.norm(2)`, Lightning's `grad_norm`), `p.grad = None`, and what is computed element by element work: "
    "edits in place (`mul_`, `clamp_`, `nan_to_num_`, `masked_fill_`), and values of `p.grad` that are assigned to it; "
    "on all ranks `lt_zero.full_grad(parameter)` reads all of it, and `lt_zero.set_full_grad(parameter, value)` sets "
    "it; to clip use `Trainer(gradient_clip_val=...)` or `self.clip_gradients`; stage 0 keeps whole gradients."
)


class ShownBy(Protocol):
    """The object that attaches gradients to ``p.grad`` (visible_grads.py)."""

    parts: Parts
    norms: dict[float, dict[Place, Tensor]]
    norm_of: Callable[[float], VectorNorm]
    plain_norms: bool

    def norm(self, place: Place, norm_type: float) -> Tensor: ...

    def complete(self) -> None: ...

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


def local_rows(bucket: Bucket, index: int, write: bool = True) -> list[Tensor]:
    """This rank's rows (1D) of a gradient: all elements of the unreduced one, and the piece of the reduced one."""
    grads, span = bucket.grads, bucket.layout.spans[index]
    reduced = [grads.of(piece, write) for piece in bucket.pieces_of(index)] if grads.accumulated else []
    return reduced if grads.local is None else [grads.local[span.lo : span.hi], *reduced]


def is_whole(bucket: Bucket) -> bool:
    """True if ``local_rows`` is a single row with all elements."""
    grads = bucket.grads
    return bucket.storage.is_whole if grads.local is None else not grads.accumulated


class Sharded(Tensor):
    """A tensor of a parameter's shape, of which each rank has the elements of its pieces.

    It refers weakly to its bucket and engine: the garbage collector does not traverse ``p.grad``, so a cycle of a
    parameter, its stand-in and its bucket, with the process groups of the run, would never be freed.
    """

    _refs: tuple[weakref.ref[Bucket], int, weakref.ref[Any]]

    def _owners(self) -> tuple[Bucket, int, ShownBy]:
        bucket = self._refs[0]()
        index = self._refs[1]
        shown_by = self._refs[2]()
        if bucket is None or shown_by is None:
            raise RuntimeError("A gradient of a model whose ZeRO engine is gone was read.")
        return bucket, index, shown_by

    def _rows(self, write: bool) -> list[Tensor]:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PASSING or func in TRACED:
            with without_torch_function():
                return func(*args, **kwargs)
        if func is Tensor.__repr__:
            me = args[0]
            return f"{type(me).__name__}(shape={tuple(me.shape)}, dtype={me.dtype}, device={str(me.device)!r})"
        if args and isinstance(args[0], Sharded) and changes_nothing(func, args, kwargs):
            return args[0]
        first = next(value for value in iter_tensors((args, kwargs)) if isinstance(value, Sharded))
        return first._owners()[2].call(func, args, kwargs)


class ShardedGrad(Sharded):
    """A gradient that is sharded over the ranks. Reading a norm is collective."""

    def _rows(self, write: bool) -> list[Tensor]:
        bucket, index, _ = self._owners()
        return local_rows(bucket, index, write)


class ShardedValues(Sharded):
    """Values that were computed from a sharded gradient element by element. Only this rank's rows (1D) have memory."""

    _own: list[Tensor]

    def _rows(self, write: bool) -> list[Tensor]:
        return self._own

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        like = next(value for value in iter_tensors((args, kwargs)) if isinstance(value, ShardedValues))
        # Only functions that need no values pass ``__torch_function__``; more may call this below it.
        if getattr(func, "overloadpacket", None) in _FROM_METADATA:
            plain = [_nothing(v.shape, v.dtype, v.device) if isinstance(v, ShardedValues) else v for v in args]
            return func(*plain, **(kwargs or {}))
        raise refusal(func, like)


_aten = torch.ops.aten
_FROM_METADATA = {
    *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like),
    *(_aten.randint_like, _aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided),
}


def stand_in(parameter: Tensor, refs: tuple[weakref.ref[Bucket], int, weakref.ref[Any]]) -> ShardedGrad:
    """A ``ShardedGrad`` of ``parameter``, which is number ``refs[1]`` of bucket ``refs[0]``."""
    made = _nothing(parameter.shape, parameter.dtype, parameter.device).as_subclass(ShardedGrad)
    made._refs = refs
    return made


@lru_cache(maxsize=1024)
def _nothing(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One NaN expanded to the shape of a gradient; stand-ins are aliases of it, and it is never written."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)


def refusal(func: Any, sharded: Sharded) -> RuntimeError:
    """The error of a function that needs all of a gradient."""
    bucket, index, _ = sharded._owners()
    name = bucket.layout.spans[index].name
    return RuntimeError(
        f"`{called(func)}` needs all of a gradient whose pieces lie on several ranks (of {name!r}). {REMEDY}"
    )
