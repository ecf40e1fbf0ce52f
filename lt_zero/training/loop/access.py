"""Full values of single parameters during training: master weights, gradients, optimizer states. All are collective.

All ranks that have the parameter, or parts of it, call them: with pipelines those of its stages. Called on some of
these only, each raises on all of them. A ``local`` function is not collective: it returns this rank's
elements (1D), of which there may be none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.checkpoint.native.pieces import states_of
from lt_zero.common.arguments import expect
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.full_values import full_flat, gather_own, joined
from lt_zero.core.engine.grad_accumulator import GradState
from lt_zero.core.engine.guard import owner_of
from lt_zero.core.engine.layout import Piece
from lt_zero.core.engine.lazy_tensor import Fragment
from lt_zero.core.step.sharded_optimizer import ShardedOptimizer
from lt_zero.kernels.flat import wide

_GRADS = "call it between backward and the step, on all ranks"


def full_master(parameter: Parameter) -> Tensor:
    """A copy of a parameter's master weights, in their dtype and full shape: of a DTensor, that of all ranks.

    Raises:
        ValueError: no engine has the parameter.
        RuntimeError: on all ranks, if some do not call it.
    """
    engine, bucket, index = _place(parameter, "lt_zero.full_master")
    engine.prepare_reading()
    value = _whole_of(engine, bucket, index, full_flat(bucket))
    bucket.put_away()
    return value


@torch.no_grad()
def set_full_master(parameter: Parameter, value: Tensor) -> None:
    """Set a parameter's weights to ``value`` (full shape, the same on every rank), in every copy.

    Raises:
        ValueError: no engine has the parameter, or the shape differs.
        RuntimeError: on all ranks, if some do not call it.
    """
    engine, bucket, index = _place(parameter, "lt_zero.set_full_master")
    _check_shape(bucket, index, value)
    engine.prepare_reading()
    narrow = value.dtype == bucket.dtype != bucket.weights.precision
    bucket.write(index, _part_of(engine, bucket, index, value), rounded=narrow)
    bucket.edits.note()
    bucket.put_away()


def full_grad(parameter: Parameter) -> Tensor | None:
    """A copy of the gradient as the step takes it (in fp32, or fp64); None if no rank has one.

    Averaged over ranks and micro-batches, without the loss scale, clipped if it was clipped.

    Raises:
        ValueError: no engine has the parameter.
        RuntimeError: on all ranks, if some do not call it.
    """
    engine, bucket, index = _place(parameter, "lt_zero.full_grad")
    engine.exchange.check_mean()
    if (bucket, index) not in engine.finish_reductions():
        return None
    flat = gather_own(bucket, bucket.grads.read())
    value = _unscaled(_whole_of(engine, bucket, index, flat), _scale_of(engine, parameter))
    bucket.put_away()
    return value


@torch.no_grad()
def set_full_grad(parameter: Parameter, value: Tensor) -> None:
    """Replace the averaged gradient by ``value`` (full shape, the same on every rank, without the loss scale).

    Raises:
        ValueError: no engine has the parameter, it has no gradient, or the shape differs.
        RuntimeError: on all ranks, if some do not call it.
    """
    engine, bucket, index = _place(parameter, "lt_zero.set_full_grad")
    engine.exchange.check_mean()
    _check_shape(bucket, index, value)
    if (bucket, index) not in engine.finish_reductions():
        raise ValueError(f"{_name(bucket, index)!r} has no gradient to be replaced: {_GRADS}.")
    row = _part_of(engine, bucket, index, value).reshape(-1) * _scale_of(engine, parameter)
    for piece in bucket.pieces_of(index):
        bucket.grads.of(piece).copy_(row[piece.lo : piece.hi])
    bucket.grads.put_away()
    engine.grad_views.changed()


def full_state(parameter: Parameter, key: str) -> Any:
    """A copy of an optimizer state such as "exp_avg" in the parameter's shape; of others the value itself.

    Raises:
        ValueError: no engine or no optimizer has the parameter.
        KeyError: there is no such state; before the first step there is none.
        RuntimeError: on all ranks, if some do not call it.
    """
    engine, bucket, index = _place(parameter, "lt_zero.full_state")
    engine.prepare_reading()
    state = _optimizer_of(engine, parameter).optimizer.state.get(parameter, {})
    own = states_of(bucket, index, state).get(key)
    mine = own if isinstance(own, Fragment) and own.box.sizes == bucket.layout.spans[index].shape else None
    if mine is None and isinstance(own, Fragment):  # of another shape (a row's statistics): one rank has all of it
        own = own.local().view(own.shape).clone()
    ranks = bucket.holders(index)
    every = ranks.host_gather(mine.dtype if mine is not None else own, f"states of {_name(bucket, index)}")
    found = [value for value in every if value is not None]
    if not found:
        names = sorted({name for some in ranks.host_gather(list(state), "states") for name in some})
        raise KeyError(f"{_name(bucket, index)!r} has no state {key!r}; it has {', '.join(names) or 'none yet'}.")
    if not isinstance(found[0], torch.dtype):
        return found[0]
    lo, hi = bucket.shard_range
    rows = torch.zeros(hi - lo, dtype=found[0], device=bucket.group.device)
    if mine is not None:
        for piece in bucket.pieces_of(index):
            rows[piece.offset : piece.offset + piece.numel] = mine.local()
    value = _whole_of(engine, bucket, index, gather_own(bucket, rows))
    bucket.put_away()
    return value


@torch.no_grad()
def set_full_state(parameter: Parameter, value: Tensor, key: str) -> None:
    """Set an element-wise optimizer state to ``value`` (full shape, the same on every rank).

    Raises:
        ValueError: no engine or no optimizer has the parameter, or the shape differs.
        KeyError: there is no such state.
        RuntimeError: on all ranks, if some do not call it.
    """
    engine, bucket, index = _place(parameter, "lt_zero.set_full_state")
    _check_shape(bucket, index, value)
    engine.prepare_reading()
    state = _optimizer_of(engine, parameter).optimizer.state.get(parameter, {})
    pieces = bucket.pieces_of(index)
    lacks = bool(pieces) and not _is_elementwise(bucket, pieces[0], state.get(key))
    if any(bucket.holders(index).host_gather(lacks, f"optimizer state of {_name(bucket, index)}")):
        raise KeyError(f"{_name(bucket, index)!r} has no element-wise state {key!r}. Call it after the first step.")
    row = _part_of(engine, bucket, index, value).reshape(-1)
    for piece in pieces:
        if (stored := bucket.states.by_key.get(key)) is not None:
            stored.write()
        state[key].copy_(row[piece.lo : piece.hi].view(state[key].shape))
    bucket.put_away()


# ---- this rank's elements --------------------------------------------------------------------------------------------


def local_master(parameter: Parameter) -> Tensor:
    """This rank's master weights of a parameter: a copy (1D)."""
    _, bucket, piece = _piece(parameter)
    values = bucket.weights.values()
    rows = values.new_empty(0) if piece is None else _rows(values, piece).clone()
    bucket.put_away()
    return rows


def local_grad(parameter: Parameter) -> Tensor | None:
    """This rank's part of the gradient, otherwise as ``full_grad``: a copy (1D); None without a gradient.

    Raises:
        RuntimeError: it is not reduced yet.
    """
    engine, bucket, piece = _piece(parameter)
    index = engine.owner[id(parameter)][1]
    _check_reduced(engine, bucket, index)
    if index not in bucket.grads.valid:
        return None
    if piece is None:
        return torch.empty(0, device=bucket.group.device)
    rows = _unscaled(bucket.grads.of(piece, write=False), _scale_of(engine, parameter))
    bucket.grads.put_away()
    return rows


def local_state(parameter: Parameter, key: str) -> Tensor | None:
    """This rank's part of an optimizer state: a copy (1D); None if no parameter has it here."""
    engine, bucket, piece = _piece(parameter)
    states = _optimizer_of(engine, parameter).optimizer.state
    if piece is None:
        return torch.empty(0, device=bucket.group.device) if any(key in each for each in states.values()) else None
    state = states.get(parameter, {})
    own = states_of(bucket, engine.owner[id(parameter)][1], state).get(key)
    row = own.local().clone() if isinstance(own, Fragment) else None
    bucket.put_away()
    return row


@torch.no_grad()
def set_local_master(parameter: Parameter, value: Tensor | None) -> None:
    """Set this rank's master weights of a parameter (1D; None where it has none). Collective: all ranks set theirs."""
    engine, bucket, index = _place(parameter, "lt_zero.safe_set_local_fp32_param")
    full_flat(bucket)  # keeps edits
    rows = torch.zeros_like(bucket.weights.values())
    for piece in bucket.pieces_of(index):
        _rows(rows, piece).copy_(_checked(bucket, index, piece, value))
    set_full_master(parameter, _whole_of(engine, bucket, index, gather_own(bucket, rows)))


@torch.no_grad()
def set_local_grad(parameter: Parameter, value: Tensor | None) -> None:
    """Set this rank's part of the averaged gradient (1D, without the loss scale; None where it has none).

    Raises:
        ValueError: it has no gradient, or the number of elements differs.
        RuntimeError: it is not reduced yet.
    """
    engine, bucket, piece = _piece(parameter)
    index = engine.owner[id(parameter)][1]
    _check_reduced(engine, bucket, index)
    if piece is not None:
        if index not in bucket.grads.valid:
            raise ValueError(f"{_name(bucket, index)!r} has no gradient to be replaced: {_GRADS}.")
        row = _checked(bucket, index, piece, value) * _scale_of(engine, parameter)
        bucket.grads.of(piece).copy_(row)
        bucket.grads.put_away()
    engine.grad_views.norms.clear()  # on every rank: norms are computed together


@torch.no_grad()
def set_local_state(parameter: Parameter, value: Tensor | None, key: str) -> None:
    """Set this rank's part of an optimizer state (1D; None where it has none).

    Raises:
        KeyError: there is no such state.
    """
    engine, bucket, piece = _piece(parameter)
    if piece is None:
        return
    index = engine.owner[id(parameter)][1]
    state = _optimizer_of(engine, parameter).optimizer.state.get(parameter, {})
    if not _is_elementwise(bucket, piece, state.get(key)):
        raise KeyError(f"{_name(bucket, index)!r} has no element-wise state {key!r}. Call it after the first step.")
    if (stored := bucket.states.by_key.get(key)) is not None:
        stored.write()
    state[key].copy_(_checked(bucket, index, piece, value).view(state[key].shape))
    bucket.put_away()


def _checked(bucket: Bucket, index: int, piece: Piece, value: Tensor | None) -> Tensor:
    if value is not None:
        expect(value, Tensor, f"The value for {_name(bucket, index)!r}", "pass a tensor of this rank's elements")
    if value is None or value.numel() != piece.numel:
        found = "none" if value is None else value.numel()
        raise ValueError(
            f"{_name(bucket, index)!r} has {piece.numel} elements on this rank, and the value has {found}."
        )
    return value.reshape(-1).to(bucket.group.device)


def _is_elementwise(bucket: Bucket, piece: Piece, value: Any) -> bool:
    """True if a state has one element for each of the piece. A step counter (0D) is none, even for a piece of one."""
    known = isinstance(value, Tensor) and value.numel() == piece.numel
    return known and (value.dim() > 0 or not bucket.layout.spans[piece.index].shape)


def _check_reduced(engine: Engine, bucket: Bucket, index: int) -> None:
    """Raise RuntimeError if this rank's part of a gradient lacks gradients that are in no sum over the ranks yet."""
    engine.exchange.check_mean()
    engine.grad_views.take_assigned()  # None, by zero_grad, or a tensor
    unreduced = engine.grad_views.unreduced([(bucket, index, bucket.params[index])])
    grads = bucket.grads
    summed = grads.local is None or index not in grads.used
    if unreduced or not summed or (grads.sums is GradState.PARTIAL and index in grads.valid):
        raise RuntimeError(
            f"The gradient of {_name(bucket, index)!r} is not reduced yet: ask after the last micro-batch, or call "
            "lt_zero.full_grad on all ranks, which reduces it."
        )


def _unscaled(value: Tensor, scale: float) -> Tensor:
    # Divide in a wide dtype: small values would vanish in fp16.
    return value.to(wide(value.dtype)) / scale


def _rows(values: Tensor, piece: Piece) -> Tensor:
    return values[piece.offset : piece.offset + piece.numel]


def _piece(parameter: Parameter) -> tuple[Engine, Bucket, Piece | None]:
    engine, bucket, index = _place(parameter, "")
    bucket.wait_background_step()
    return engine, bucket, next(iter(bucket.pieces_of(index)), None)


# ---- where a parameter is --------------------------------------------------------------------------------------------


def _place(parameter: Parameter, call: str) -> tuple[Engine, Bucket, int]:
    """The engine of a parameter, its bucket and its index there. Collective if ``call`` is not ""."""
    expect(parameter, Tensor, "The parameter", "pass one of model.parameters()")
    engine: Any = owner_of(parameter)
    if not isinstance(engine, Engine) or id(parameter) not in engine.owner:
        raise ValueError(
            f"A tensor of shape {tuple(parameter.shape)} is no parameter of a model that lt_zero has sharded. Pass one "
            "of model.parameters()."
        )
    bucket, index = engine.owner[id(parameter)]
    if call:
        bucket.holders(index).roll_call(call)
    return engine, bucket, index


def _name(bucket: Bucket, index: int) -> str:
    return bucket.layout.spans[index].name


def _whole_of(engine: Engine, bucket: Bucket, index: int, flat: Tensor) -> Tensor:
    """A copy of all of the tensor, in ``flat`` with all elements of its bucket. Collective."""
    span = bucket.layout.spans[index]
    found = joined(engine, bucket.params[index], flat[span.lo : span.hi].view(span.shape))
    return found.clone() if span.spec.is_whole else found


def _part_of(engine: Engine, bucket: Bucket, index: int, value: Tensor) -> Tensor:
    """The part of a ``value`` for all of a tensor that this rank's group has, on its device."""
    return engine.parts.cut(bucket.params[index], value).to(bucket.group.device)


def _check_shape(bucket: Bucket, index: int, value: Tensor) -> None:
    expect(value, Tensor, f"The value for {_name(bucket, index)!r}", "pass a tensor of the parameter's shape")
    if value.shape != (shape := bucket.params[index].shape):
        text = f"has shape {tuple(shape)}, and the value {tuple(value.shape)}: pass the full tensor"
        raise ValueError(f"{_name(bucket, index)!r} {text}.")


def _optimizer_of(engine: Engine, parameter: Parameter) -> ShardedOptimizer:
    for sharded in engine.optimizers:
        if any(known is parameter for known in sharded.parameters()):
            return sharded  # type: ignore[no-any-return]
    raise ValueError(f"No optimizer steps {_name(*engine.owner[id(parameter)])!r}. Pass it to one.")


def _scale_of(engine: Engine, parameter: Parameter) -> float:
    return _optimizer_of(engine, parameter).grads.loss_scale
