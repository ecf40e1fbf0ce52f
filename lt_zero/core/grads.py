"""``p.grad`` for code that looks at gradients between backward and step (norm logging, clipping by hand).

Sharded gradients are not in memory in full. A ``ShardedGrad`` has its parameter's shape and answers what can be
answered without gathering: norms over all ranks (one all-reduce for all parameters), and element-wise changes in
place, which reach the rank's own piece. Everything else raises and says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lt_zero.compat import without_torch_function
from lt_zero.core.bucket import Bucket
from lt_zero.core.engine import Engine
from lt_zero.core.guard import passes

_IN_PLACE = {Tensor.mul_, Tensor.div_, Tensor.zero_, Tensor.clamp_, Tensor.clip_, Tensor.nan_to_num_, Tensor.neg_}
_NORMS = {Tensor.norm, torch.norm, torch.linalg.vector_norm}
_SAME = {Tensor.data.__get__, Tensor.detach}  # type: ignore[attr-defined]


class _Norms:
    """Norms of all parameters' gradients, computed for all at once when the first is asked for."""

    def __init__(self, engine: Engine, places: list[tuple[Bucket, int]]) -> None:
        self._engine, self._places = engine, places
        self._tables: dict[float, dict[tuple[Bucket, int], Tensor]] = {}

    def of(self, place: tuple[Bucket, int], norm_type: float) -> Tensor:
        if norm_type not in self._tables:
            self._tables[norm_type] = self._compute(norm_type)
        return self._tables[norm_type][place]

    @torch.no_grad()
    def _compute(self, norm_type: float) -> dict[tuple[Bucket, int], Tensor]:
        comm = self._engine.comm
        row = torch.zeros(len(self._places), dtype=torch.float64, device=comm.device)
        infinite = norm_type == float("inf")
        for number, (bucket, index) in enumerate(self._places):
            for grad in _local(bucket, index):
                norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64)
                row[number] = norm if infinite else norm**norm_type
        row = comm.max_scalar(row, "gradient norms") if infinite else comm.sum_scalar(row, "gradient norms")
        row = row if infinite else row ** (1.0 / norm_type)
        return {place: row[number].to(torch.float32) for number, place in enumerate(self._places)}


def _local(bucket: Bucket, index: int) -> list[Tensor]:
    assert bucket.grad is not None
    return [bucket.grad[p.offset : p.offset + p.numel] for p in bucket.pieces_of(index)]


class ShardedGrad(Tensor):
    """The gradient of a parameter whose pieces lie on several ranks. Asking for a norm is collective."""

    _place: tuple[Bucket, int]
    _norms: _Norms

    @classmethod
    def make(cls, place: tuple[Bucket, int], norms: _Norms) -> ShardedGrad:
        bucket, index = place
        parameter = bucket.params[index]
        fill = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
        grad = fill.expand(bucket.shapes[index]).as_subclass(cls)
        grad._place, grad._norms = place, norms
        return grad

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if passes(func):
            with without_torch_function():
                return func(*args, **kwargs)
        me = args[0] if args and isinstance(args[0], ShardedGrad) else None
        if me is not None and func in _SAME:
            return me
        given = {key: value for key, value in kwargs.items() if value not in (None, False)}
        if me is not None and func in _NORMS and not given.keys() - {"p", "ord"} and len(args) <= 2:
            order = args[1] if len(args) == 2 else given.get("p", given.get("ord", 2))
            return me._norms.of(me._place, float(2 if order == "fro" else order))
        if me is not None and func in _IN_PLACE:
            for piece in _local(*me._place):
                func(piece, *args[1:], **kwargs)
            return me
        raise RuntimeError(
            f"`{getattr(func, '__name__', func)}` needs all of a gradient whose pieces lie on several ranks. Norms "
            "(`p.grad.norm(2)`, Lightning's `grad_norm`) and in-place scaling or clamping work; to clip use "
            "`Trainer(gradient_clip_val=...)` or `self.clip_gradients`; stage 0 keeps whole gradients."
        )


@contextmanager
def shown_grads(engine: Engine) -> Iterator[None]:
    """Inside, ``p.grad`` of each used parameter is its averaged gradient (stage 0) or a ``ShardedGrad``. Collective."""
    used: Callable[[Bucket, int], bool] = engine.settle_grads()
    places = [(b, i) for b in engine.buckets for i in range(len(b.params)) if used(b, i)]
    norms = _Norms(engine, places)
    for bucket, index in places:
        parameter = bucket.params[index]
        if bucket.own == (0, bucket.layout.numel):
            (grad,) = _local(bucket, index)
            grad = grad.view(bucket.shapes[index])
            parameter.grad = grad if grad.dtype == parameter.dtype else None
        else:
            parameter.grad = ShardedGrad.make((bucket, index), norms)
    engine.grads_shown = True  # these are not gradients that a backward has left behind
    try:
        yield
    finally:
        engine.grads_shown = False
        for bucket, index in places:
            bucket.params[index].grad = None
