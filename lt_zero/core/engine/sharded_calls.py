"""Functions of torch that are called with gradients of which ranks have parts (sharded_grad.py).

Only the functions listed here work. For any other function, applying it to a piece may not give a piece of the result,
so it raises an error that names a remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lt_zero.common.compat import without_torch_function, wrapper_tensor
from lt_zero.common.tensor_tree import iter_tensors, map_tensors
from lt_zero.core.comm.shard_group import combine_rows
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.grad_accumulator import GradState
from lt_zero.core.engine.guard import called
from lt_zero.core.engine.sharded_grad import (
    REMEDY,
    Sharded,
    ShardedGrad,
    ShardedValues,
    is_whole,
    local_rows,
    refusal,
)
from lt_zero.kernels.flat import wide

_UNARY = (
    ("abs", "absolute", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "deg2rad", "digamma"),
    ("erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "frac", "lgamma", "log", "log10", "log1p", "log2"),
    ("nan_to_num", "neg", "negative", "rad2deg", "reciprocal", "relu", "round", "rsqrt", "sigmoid", "sgn", "sign"),
    ("sin", "sinc", "sinh", "sqrt", "square", "tan", "tanh", "trunc", "fix", "logit"),
)
_WITH_OPERANDS = (
    ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "remainder", "fmod"),
    ("pow", "float_power", "atan2", "arctan2", "copysign", "hypot", "heaviside", "xlogy", "nextafter", "lerp"),
    ("addcmul", "addcdiv", "clamp", "clip", "clamp_min", "clamp_max", "masked_fill", "threshold", "hardshrink"),
    ("maximum", "minimum", "fmax", "fmin", "where", "rsub", "ldexp"),
)
_CONDITIONS = (
    ("eq", "ne", "lt", "le", "gt", "ge", "greater", "greater_equal", "less", "less_equal", "not_equal", "isclose"),
    ("isnan", "isinf", "isfinite", "isposinf", "isneginf", "signbit", "logical_and", "logical_or", "logical_xor"),
    ("logical_not", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
)
_OPERATORS = (
    ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__rdiv__"),
    ("__div__", "__pow__", "__rpow__", "__neg__", "__abs__", "__and__", "__or__", "__xor__", "__rand__", "__ror__"),
    ("__invert__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__mod__", "__floordiv__"),
)
_CONVERTING = {Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.bool}
_NAMES = [name for rows in (_UNARY, _WITH_OPERANDS, _CONDITIONS) for row in rows for name in row]
_ALL = [*_NAMES, "clone", *(name for row in _OPERATORS for name in row)]
# Functions whose result is computed element by element.
_ELEMENTWISE = {getattr(where, name) for where in (Tensor, torch) for name in _ALL if hasattr(where, name)}
_ELEMENTWISE |= _CONVERTING
# The same in place, and those that there are in place only.
_CHANGING = [*(f"{name}_" for name in _NAMES), "zero_", "fill_", "copy_"]
_AUGMENTED = ("__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ipow__", "__ifloordiv__", "__imod__")
IN_PLACE = {
    getattr(where, name)
    for where in (Tensor, torch)
    for name in (*_CHANGING, *_AUGMENTED)
    if hasattr(where, name) and name != "where_"
}
# Those that may be applied to the summands of a gradient instead.
_LINEAR = {getattr(where, name) for where in (Tensor, torch) for name in ("neg_", "negative_") if hasattr(where, name)}
_LINEAR |= {Tensor.mul_, Tensor.multiply_, Tensor.div_, Tensor.divide_, Tensor.true_divide_, Tensor.zero_, torch.zero_}
_LINEAR |= {Tensor.__imul__, Tensor.__idiv__, Tensor.__itruediv__}
NORMS = {Tensor.norm, torch.norm, torch.linalg.vector_norm, torch.linalg.norm}
SAME = {getattr(Tensor, "data").__get__, Tensor.detach, Tensor.detach_}  # noqa: B009


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch with sharded arguments.

    Raises:
        RuntimeError: it is not computed element by element, and no norm.
    """
    me = args[0] if args and isinstance(args[0], Sharded) else None
    sharded = [t for t in iter_tensors((args, kwargs)) if isinstance(t, Sharded)]
    name = getattr(func, "__name__", "")
    # Torch would add up squares in another order than the ranks do.
    in_order = (func in NORMS or name == "_foreach_norm") and not sharded[0]._owners()[2].plain_norms
    # The whole gradient is here, and the stand-in is no view of it only because of its dtype.
    if not in_order and all(isinstance(grad, ShardedGrad) and is_whole(grad._owners()[0]) for grad in sharded):
        return _call_whole(func, args, kwargs)
    if name.startswith("_foreach_"):
        return _for_each(func, name.removeprefix("_foreach_"), args, kwargs, sharded[0])
    if me is not None and func in SAME:
        return me
    if me is not None and func in NORMS and (asked := asked_norm(me, func, args, kwargs)) is not None:
        return _norm(me, *asked)
    if me is not None and func in IN_PLACE:
        return _change(me, func, args, kwargs)
    if me is not None and func is Tensor.__setitem__ and (edit := _edit_of_item(me, *args[1:])) is not None:
        _change(me, *edit)
        return None
    if func in _ELEMENTWISE and kwargs.get("out") is None:
        return _compute(func, args, kwargs, sharded[0])
    raise refusal(func, sharded[0])


def _call_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch with stand-ins of gradients of which this rank has all elements."""
    me = args[0] if args and isinstance(args[0], ShardedGrad) else None
    if me is not None and func in SAME:
        grads = me._owners()[0].grads
        if grads.lacks_factor or grads.sums is GradState.PARTIAL:
            return me
    if not _is_linear(func, args, kwargs):
        _complete(args, kwargs)
    name = getattr(func, "__name__", "")
    # What these return shares no memory with the gradient, so a product that is dropped afterwards will do.
    reads = func in NORMS or (func in _ELEMENTWISE and func not in _CONVERTING)
    reads = (reads or (name.startswith("_foreach_") and not name.endswith("_"))) and kwargs.get("out") is None

    def whole_of(tensor: Tensor) -> Tensor:
        return _accumulated(tensor, not reads) if isinstance(tensor, ShardedGrad) else tensor

    whole = map_tensors(args, whole_of)
    result = func(*whole, **map_tensors(kwargs, whole_of))
    # An operation in place returns the stand-in, because ``p.grad *= 2`` assigns the result to ``p.grad``.
    return args[0] if args and result is whole[0] else result


def _accumulated(grad: ShardedGrad, write: bool) -> Tensor:
    """The accumulated gradient of a stand-in, in its shape.

    Raises:
        RuntimeError: it was used by a step.
    """
    bucket, index, shown_by = grad._owners()
    grads = bucket.grads
    shape = bucket.layout.spans[index].shape
    if grads.local is not None:
        rows = local_rows(bucket, index)
    elif not grads.accumulated:
        raise _earlier(bucket, index)
    elif write:
        rows = [grads.shown(piece) for piece in bucket.pieces_of(index)]
    else:
        # As ``shown``, which widens fp16 only.
        stored = grads.values.dtype
        dtype = wide(stored) if stored == torch.float16 and grads.lacks_factor else stored
        rows = [grads.of(piece, write=False).to(dtype) for piece in bucket.pieces_of(index)]
    # No row if it has no elements.
    value = rows[0].view(shape) if rows else bucket.compute.views[index].new_empty(shape)
    return shown_by.parts.show(bucket.params[index], value)


def _earlier(bucket: Bucket, index: int) -> RuntimeError:
    name = bucket.layout.spans[index].name
    return RuntimeError(f"This gradient of {name!r} is that of an earlier step. Read p.grad again.")


def _for_each(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], first: Sharded) -> Any:
    """Call a function of lists of tensors (``torch._foreach_mul_``) for each of them."""
    one_by_one = torch.linalg.vector_norm if name == "norm" else getattr(Tensor, name, None)
    if one_by_one is None or not (name == "norm" or one_by_one in IN_PLACE or one_by_one in _ELEMENTWISE):
        raise refusal(func, first)
    found = []
    for number in range(len(args[0])):
        given = [value[number] if isinstance(value, (list, tuple)) else value for value in args]
        found.append(one_by_one(*given, **kwargs))
    return None if one_by_one in IN_PLACE else tuple(found)


# ---- element by element ----------------------------------------------------------------------------------------------


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: Sharded) -> ShardedValues:
    """The values of a function that is computed element by element.

    Raises:
        RuntimeError: an operand is cut otherwise than ``like``, or larger.
    """
    meta = func(*map_tensors(args, _on_meta), **map_tensors(kwargs, _on_meta))
    if not isinstance(meta, Tensor) or meta.shape != like.shape:
        raise refusal(func, like)
    bucket = like._owners()[0]
    _require_all(func, args, kwargs)
    with torch.no_grad():
        rows = [func(*mine, **named) for mine, named in _operands(args, kwargs, like)]
    if func in _CONVERTING:
        rows = [row.clone() for row in rows]  # what has the dtype already is no copy
    bucket.grads.put_away()
    made: ShardedValues = wrapper_tensor(ShardedValues, tuple(like.shape), meta.dtype, like.device)
    made._refs = like._refs
    made._own = rows
    return made


def _change(me: Sharded, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sharded:
    """Apply a function that is computed element by element in place; returns ``me``."""
    bucket, _, shown_by = me._owners()
    if func is Tensor.copy_ and not (len(args) > 1 and isinstance(args[1], Sharded)):
        # Ranks may have different values there, of which each would take a part.
        raise refusal(func, me)
    if not _is_linear(func, args, kwargs):
        _require_all(func, args, kwargs)
    if any(operand.dim() > 0 for operand in iter_tensors((args[1:], kwargs))):
        func(*map_tensors(args, _on_meta), **map_tensors(kwargs, _on_meta))  # raises torch's errors
    with torch.no_grad():
        for row, (mine, named) in zip(me._rows(True), _operands(args[1:], kwargs, me), strict=True):
            func(row, *mine, **named)
    if isinstance(me, ShardedGrad):
        bucket.grads.put_away()
        shown_by.norms.clear()
    return me


def _edit_of_item(me: Sharded, item: Any, value: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """``me[item] = value`` as an edit in place: a mask of all elements, or all; None: it is neither."""
    is_number = not isinstance(value, Tensor) or value.dim() == 0
    if isinstance(item, Tensor) and item.dtype == torch.bool and item.shape == me.shape and is_number:
        return Tensor.masked_fill_, (me, item, value), {}
    if item is Ellipsis or (isinstance(item, slice) and item == slice(None)):
        return (Tensor.fill_ if is_number else Tensor.copy_), (me, value), {}
    return None


def _is_linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a function may be applied to the summands of its first argument, a gradient, instead."""
    operands = any(isinstance(operand, Sharded) for operand in iter_tensors((args[1:], kwargs)))
    return func in _LINEAR and kwargs.get("rounding_mode") is None and not operands


def _complete(args: Any, kwargs: Any) -> None:
    """Sum gradients among the arguments over the replicas, where that is to come. Collective then."""
    for grad in iter_tensors((args, kwargs)):
        if isinstance(grad, ShardedGrad) and (owners := grad._owners())[0].grads.sums is GradState.PARTIAL:
            owners[2].complete()


def _require_all(func: Any, args: Any, kwargs: Any) -> None:
    """Make the rows of gradients among the arguments their elements, not summands of them. Collective if they are.

    Raises:
        RuntimeError: on all ranks, they are summands that cannot be summed yet.
    """
    _complete(args, kwargs)
    for grad in iter_tensors((args, kwargs)):
        if not isinstance(grad, ShardedGrad):
            continue
        bucket, index, _ = grad._owners()
        name = bucket.layout.spans[index].name
        if bucket.grads.local is not None:
            raise RuntimeError(
                f"Only a part of the gradient of {name!r} is reduced, and `{called(func)}` needs all of it. Ask after "
                "the last micro-batch."
            )
        if not bucket.grads.accumulated:
            raise _earlier(bucket, index)


def _spans(sharded: Sharded) -> list[tuple[int, int]]:
    """The elements [lo, hi) of each of its rows, in row-major order."""
    bucket, index, _ = sharded._owners()
    pieces = [(piece.lo, piece.hi) for piece in bucket.pieces_of(index)]
    if isinstance(sharded, ShardedValues):
        return pieces
    reduced = pieces if bucket.grads.accumulated else []
    return reduced if bucket.grads.local is None else [(0, math.prod(bucket.layout.spans[index].shape)), *reduced]


def _on_meta(tensor: Tensor) -> Tensor:
    with without_torch_function():
        is_number = tensor.dim() == 0 and tensor.device.type == "cpu"  # which torch may read
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if is_number else "meta")


def _operands(args: Any, kwargs: Any, like: Sharded) -> list[tuple[Any, Any]]:
    """The arguments of a function for each of this rank's rows of ``like``.

    Raises:
        RuntimeError: on all ranks, whether they have rows or not: an operand is a gradient of another parameter, or a
            parameter that is not in memory.
    """
    bucket, index, _ = like._owners()
    for operand in iter_tensors((args, kwargs)):
        if not isinstance(operand, Sharded):
            _cut(operand, like, 0, 0)
        elif operand._owners()[:2] != (bucket, index):
            theirs, at = operand._owners()[:2]
            raise RuntimeError(
                f"A function takes the gradients of {bucket.layout.spans[index].name!r} and "
                f"{theirs.layout.spans[at].name!r}, whose pieces lie on different ranks. {REMEDY}"
            )
    found = []
    for number, (lo, hi) in enumerate(_spans(like)):

        def mine(operand: Tensor, number: int = number, lo: int = lo, hi: int = hi) -> Tensor:
            return operand._rows(False)[number] if isinstance(operand, Sharded) else _cut(operand, like, lo, hi)

        found.append((map_tensors(args, mine), map_tensors(kwargs, mine)))
    return found


def _cut(operand: Tensor, like: Sharded, lo: int, hi: int) -> Tensor:
    """The elements [lo, hi) (1D) of an operand that is broadcast to the shape of ``like``; a number stays one."""
    if operand.dim() == 0:
        return operand
    bucket, index, shown_by = like._owners()
    part = shown_by.parts.cut(bucket.params[index], operand.expand(like.shape))
    columns = max(math.prod(part.shape[1:]), 1)
    first = lo // columns
    few = part[first : -(-hi // columns)]
    return few.reshape(-1)[lo - first * columns : hi - first * columns].to(like.device)


# ---- norms -----------------------------------------------------------------------------------------------------------

_PARAMETERS_OF_NORMS = {
    Tensor.norm: ("p", "dim", "keepdim", "dtype"),
    torch.norm: ("p", "dim", "keepdim", "out", "dtype"),
    torch.linalg.vector_norm: ("ord", "dim", "keepdim"),
    torch.linalg.norm: ("ord", "dim", "keepdim"),
}


def asked_norm(
    me: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[float, torch.dtype | None] | None:
    """The order and dtype of a norm of all elements; None: it is another one."""
    given = {**dict(zip(_PARAMETERS_OF_NORMS[func], args[1:], strict=False)), **kwargs}
    order = given.pop("p", given.pop("ord", None))
    dtype = given.pop("dtype", None)
    along = given.pop("dim", None)
    # Compare with ``is``: an order of 0 equals False.
    if along is not None or any(value is not None and value is not False for value in given.values()):
        return None
    if order is None or (isinstance(order, str) and order == "fro"):
        return 2.0, dtype
    if isinstance(order, str) or (func is torch.linalg.norm and me.dim() != 1):
        return None  # of matrices
    return float(order), dtype


def _norm(me: Sharded, order: float, dtype: torch.dtype | None) -> Tensor:
    """A norm (0D) of all elements. Collective, unless that of all gradients is known."""
    if me.numel() == 0:
        # Torch's own error, or 0: no elements have no minimum, and no maximum.
        none: Tensor = torch.linalg.vector_norm(torch.empty(0, dtype=me.dtype, device=me.device), order, dtype=dtype)
        return none
    bucket, index, shown_by = me._owners()
    if isinstance(me, ShardedGrad):
        return shown_by.norm((bucket, index), order).to(dtype or wide(bucket.grads.dtype))
    kind = shown_by.norm_of(order)
    device = bucket.group.device
    rows: Iterator[Tensor] = iter(() if bucket.repeats(index) else me._rows(False))
    parts = combine_rows(kind.part(rows, device)[None], [bucket.holders(index)], "gradient norms", kind.takes_maximum)
    return kind.finish(parts)[0].to(dtype or wide(me.dtype))
