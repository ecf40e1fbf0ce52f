"""Loads the full states of an optimizer, each rank its pieces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.checkpoint.native.pieces import parameter_numbers
from lt_zero.common.moment_form import PlainMoments
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.layout import Piece
from lt_zero.core.engine.lazy_tensor import LazyTensor, elements_of, whole
from lt_zero.core.step.sharded_optimizer import ShardedOptimizer

log = logging.getLogger("lt_zero")


def load_full_optimizer_state(
    sharded: ShardedOptimizer, full: Mapping[str, Any], tick: Callable[[], object] = lambda: None
) -> None:
    """Load this rank's pieces of a full state dict, which all ranks pass. Not collective.

    Args:
        full: as ``Optimizer.state_dict`` returns it; of lazy tensors only this rank's pieces are read.
        tick: called after the state of each parameter is read.

    Raises:
        ValueError: the optimizer's parameters differ from the saved ones.
    """
    engine = sharded.engine
    optimizer = sharded.optimizer
    parameters = sharded.parameters()
    numbers = parameter_numbers(full)
    if len(numbers) != len(parameters):
        raise ValueError(
            f"The checkpoint's optimizer has {len(numbers)} parameters, this one has {len(parameters)}. Make "
            "`configure_optimizers` return the same parameters in the same order as when the checkpoint was saved."
        )
    cut: dict[int, Any] = {}
    streamed: dict[Bucket, list[tuple[Parameter, Piece, str, Tensor]]] = {}  # element-wise states stored in files
    converted: set[tuple[str, str]] = set()  # dtypes of moments: saved, and kept here
    for number, parameter in zip(numbers, parameters, strict=True):
        state = full["state"].get(number)
        place = engine.owner.get(id(parameter))
        if state is not None and place is None:
            cut[number] = {key: whole(value) for key, value in state.items()}
        if state is None or place is None:
            continue
        bucket, index = place
        for piece in bucket.pieces_of(index):
            cut[number] = {}
            for key, value in state.items():
                spec = bucket.layout.spans[index].spec
                if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != spec.global_shape:
                    cut[number][key] = whole(value)
                    continue
                if value.is_floating_point() and _name_of(value.dtype) != bucket.storage.moments.name:
                    converted.add((_name_of(value.dtype), bucket.storage.moments.name))
                if bucket.places.step.streamed:
                    streamed.setdefault(bucket, []).append((parameter, piece, key, value))
                else:
                    cut[number][key] = bucket.storage.moments.kept(_piece_of(bucket, piece, value), key)
        if bucket not in streamed:
            tick()
    if converted and engine.world.rank == 0:
        log.info("Moments are converted: saved in %s, kept in %s", *min(converted))
    optimizer.load_state_dict({**full, "state": cut})
    for bucket, states in streamed.items():  # one bucket in memory at a time
        _write_states(bucket, states, optimizer)
        for _ in {id(state[0]) for state in states}:
            tick()
    sharded.store_states()


def _write_states(
    bucket: Bucket, states: Sequence[tuple[Parameter, Piece, str, Tensor]], optimizer: torch.optim.Optimizer
) -> None:
    """Load element-wise states of a bucket, which stay in files."""
    for parameter, piece, key, value in states:
        row = _piece_of(bucket, piece, value)
        form = bucket.storage.moments if row.is_floating_point() else PlainMoments(row.dtype)
        store = bucket.states.store(key, form)
        assert store is not None
        store.write()
        optimizer.state[parameter][key] = form.view(store.lend, piece.offset, row.shape, key).copy_(row)
    bucket.put_away()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _piece_of(bucket: Bucket, piece: Piece, value: Tensor) -> Tensor:
    """This rank's elements, in the dtype in which they were saved."""
    row = elements_of(value, piece.lo, piece.hi, bucket.layout.spans[piece.index].spec.local_box)
    shape = bucket.layout.spans[piece.index].shape
    row = row if isinstance(value, LazyTensor) else row.clone()
    return row.view(shape) if piece.numel == torch.Size(shape).numel() else row
