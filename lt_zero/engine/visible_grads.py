"""``p.grad`` for code that reads gradients between backward and step (norm logging, manual clipping).

After a backward ``p.grad`` of every reduced parameter is a stand-in; the gradients are in the buckets' accumulators.
Setting it to None clears the gradient, so ``optimizer.zero_grad()``, ``module.zero_grad()`` and loops over parameters
work. Where a rank holds the full gradient (stage 0, and stage 1 inside of an accumulation window) the stand-in is a
view of it. Elsewhere it is a ``ShardedGrad``, which supports what needs no gather: norms over all ranks (one all-reduce
for all parameters), and element-wise changes in place, of the rank's own piece. All else raises and names a remedy.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from lt_zero.comm.communicator import Comm
from lt_zero.comm.shared_memory import wide
from lt_zero.common.compat import TRACED, without_torch_function
from lt_zero.common.tensor_tree import map_tensors
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.guard import passes

T = TypeVar("T")
Place = tuple[Bucket, int]

_IN_PLACE = {Tensor.mul_, Tensor.div_, Tensor.zero_, Tensor.clamp_, Tensor.clip_, Tensor.nan_to_num_, Tensor.neg_}
_NORMS = {Tensor.norm, torch.norm, torch.linalg.vector_norm}
_SAME = {getattr(Tensor, "data").__get__, Tensor.detach, Tensor.detach_}  # noqa: B009
_REMEDY = (
    "Norms (`p.grad.norm(2)`, Lightning's `grad_norm`), `p.grad = None` and in-place scaling or clamping by numbers "
    "work; to clip use `Trainer(gradient_clip_val=...)` or `self.clip_gradients`; stage 0 keeps whole gradients."
)


class Norms:
    """Norms of all parameters' gradients, computed together when the first is read. Collective then."""

    def __init__(self, comm: Comm, places: list[Place]) -> None:
        self._comm, self._places = comm, places
        self._tables: dict[float, dict[Place, Tensor]] = {}

    def of(self, place: Place, norm_type: float) -> Tensor:
        bucket, index = place
        if bucket.grads.local is not None:
            name = bucket.layout.spans[index].name
            raise RuntimeError(f"Only a part of the gradient of {name!r} is reduced. Ask after the last micro-batch.")
        if norm_type not in self._tables:
            self._tables[norm_type] = self._compute(norm_type)
        return self._tables[norm_type][place]

    def prepare(self) -> None:
        """Compute the 2-norms, so that one rank alone may read them. Collective."""
        if self._places:
            self.of(self._places[0], 2.0)

    def scale(self, places: list[Place], factor: Tensor | float) -> None:
        """Scale the norms of ``places``, whose gradients were multiplied by ``factor`` (0D, not negative)."""
        for table in self._tables.values():
            for place in places:
                if place in table:
                    table[place] = table[place] * factor

    def forget(self) -> None:
        """Drop all norms: gradients have changed."""
        self._tables.clear()

    @torch.no_grad()
    def _compute(self, norm_type: float) -> dict[Place, Tensor]:
        row = torch.zeros(len(self._places), dtype=torch.float64, device=self._comm.device)
        infinite = norm_type == float("inf")
        for number, (bucket, index) in enumerate(self._places):
            if bucket.grads.local is not None:
                continue  # not reduced: ``of`` refuses it
            if bucket.shard_range == (0, bucket.layout.numel) and self._comm.rank > 0:
                continue  # every rank has all elements: count them once
            for grad in _local(bucket, index):
                norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64)
                row[number] = norm if infinite else norm**norm_type
            if number + 1 == len(self._places) or self._places[number + 1][0] is not bucket:
                bucket.grads.put_away()
        reduce = self._comm.max_scalar if infinite else self._comm.sum_scalar
        row = reduce(row, "gradient norms")
        row = row if infinite else row ** (1.0 / norm_type)
        return {place: row[number].to(wide(place[0].grads.dtype)) for number, place in enumerate(self._places)}


def _local(bucket: Bucket, index: int) -> list[Tensor]:
    """This rank's rows (1D) of a gradient: all elements of the unreduced one, and the piece of the reduced one."""
    grads, span = bucket.grads, bucket.layout.spans[index]
    reduced = [grads.of(piece) for piece in bucket.pieces_of(index)] if grads.accumulated else []
    return reduced if grads.local is None else [grads.local[span.lo : span.hi], *reduced]


def _is_whole(bucket: Bucket) -> bool:
    """Whether ``_local`` is a single row with all elements."""
    grads = bucket.grads
    return bucket.shard_range == (0, bucket.layout.numel) if grads.local is None else not grads.accumulated


def is_view(bucket: Bucket) -> bool:
    """Whether ``p.grad`` is a view of the accumulator."""
    local = bucket.grads.local
    if local is None and bucket.offloaded:
        return False
    dtype = local.dtype if local is not None else bucket.grads.accumulated_dtype
    return _is_whole(bucket) and dtype == bucket.dtype


def stand_in(place: Place, norms: Norms, view: bool) -> Tensor:
    """The tensor for ``p.grad``; ``view``: ``is_view`` of the bucket."""
    bucket, index = place
    local = _local(bucket, index) if view else []
    return local[0].view(bucket.shapes[index]) if local else ShardedGrad.make(place, norms)


@torch.no_grad()
def replace_grad(bucket: Bucket, index: int, grad: Tensor) -> None:
    """Replace the gradient by a tensor that the user assigned to ``p.grad``.

    Raises:
        RuntimeError: this rank holds only a piece of the gradient.
    """
    name = bucket.layout.spans[index].name
    if not is_view(bucket):
        raise RuntimeError(f"`p.grad` of {name!r} was replaced, but its gradient is sharded over the ranks. {_REMEDY}")
    for local in _local(bucket, index):
        local.copy_(grad.reshape(-1))


class ShardedGrad(Tensor):
    """A gradient that is sharded over the ranks. Reading a norm is collective.

    It refers weakly to its bucket and norms: the garbage collector does not traverse ``p.grad``, so a cycle of a
    parameter, its stand-in and its bucket, with the process groups of the run, would never be freed.
    """

    _refs: tuple[weakref.ref[Bucket], int, weakref.ref[Norms]]

    @property
    def _place(self) -> Place:
        return self._alive(self._refs[0]()), self._refs[1]

    @property
    def _norms(self) -> Norms:
        return self._alive(self._refs[2]())

    @staticmethod
    def _alive(owner: T | None) -> T:
        if owner is None:
            raise RuntimeError("A gradient of a model whose ZeRO engine is gone was read.")
        return owner

    @classmethod
    def make(cls, place: Place, norms: Norms) -> ShardedGrad:
        bucket, index = place
        parameter = bucket.params[index]
        grad = _nothing(bucket.shapes[index], parameter.dtype, parameter.device).as_subclass(cls)
        grad._refs = (weakref.ref(bucket), index, weakref.ref(norms))
        return grad

    def refer_to(self, norms: Norms) -> None:
        """Use the norms of a later backward."""
        self._refs = (*self._refs[:2], weakref.ref(norms))

    def _apply(self, func: Any, *args: Any, **kwargs: Any) -> ShardedGrad:
        """Apply an element-wise in-place function to this rank's piece."""
        for piece in _local(*self._place):
            func(piece, *args, **kwargs)
        self._place[0].grads.put_away()
        self._norms.forget()
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if passes(func) or func in TRACED:
            with without_torch_function():
                return func(*args, **kwargs)
        if func is Tensor.__repr__:
            return f"ShardedGrad(shape={tuple(args[0].shape)}, dtype={args[0].dtype}, device={str(args[0].device)!r})"
        if all(_is_whole(grad._place[0]) for grad in _stand_ins(args)):  # no view only because of its dtype
            return func(*_open(args), **_open(kwargs))
        if getattr(func, "__name__", "") == "_foreach_zero_":  # optimizer.zero_grad(set_to_none=False)
            for grad in args[0]:
                grad._apply(Tensor.zero_) if isinstance(grad, ShardedGrad) else grad.zero_()
            return None
        me = args[0] if args and isinstance(args[0], ShardedGrad) else None
        if me is not None and func in _SAME:
            return me
        given = {key: value for key, value in kwargs.items() if value not in (None, False)}
        if me is not None and func in _NORMS and not given.keys() - {"p", "ord"} and len(args) <= 2:
            order = args[1] if len(args) == 2 else given.get("p", given.get("ord", 2))
            return me._norms.of(me._place, float(2 if order == "fro" else order))
        others = [*args[1:], *kwargs.values()]
        if me is not None and func in _IN_PLACE and not any(isinstance(o, Tensor) and o.dim() > 0 for o in others):
            return me._apply(func, *args[1:], **kwargs)
        name = getattr(func, "__name__", func)
        raise RuntimeError(f"`{name}` needs all of a gradient whose pieces lie on several ranks. {_REMEDY}")


@lru_cache(maxsize=1024)
def _nothing(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One NaN expanded to the shape of a gradient; stand-ins are aliases of it, and it is never written."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)


def _stand_ins(value: Any) -> list[ShardedGrad]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [value] if isinstance(value, ShardedGrad) else [g for item in items for g in _stand_ins(item)]


def _open(value: Any) -> Any:
    """``value`` with stand-ins replaced by the accumulated gradients."""

    def whole(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, ShardedGrad):
            return tensor
        bucket, index = tensor._place
        local = _local(bucket, index)  # none if it has no elements
        return (
            local[0].view(bucket.shapes[index]) if local else bucket.param_views[index].new_empty(bucket.shapes[index])
        )

    return map_tensors(value, whole)
