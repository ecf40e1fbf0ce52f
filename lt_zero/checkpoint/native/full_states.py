"""Gathers optimizer states into an ordinary torch state dict, and loads them from one.

The full state dict equals that of a single process: moments in their parameter's shape, keyed by the parameter's
number. A plain DDP run can resume from it, and any world size and stage can load it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.checkpoint.native.pieces import is_elementwise, is_foreign, packed_states, parameter_numbers
from lt_zero.common.progress_bar import progress_bar
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.full_params import gather_own
from lt_zero.engine.layout import Piece
from lt_zero.engine.lazy_tensor import LazyTensor, elements_of, whole
from lt_zero.step.sharded_optimizer import ShardedOptimizer


def full_optimizer_state(sharded: ShardedOptimizer) -> dict[str, Any]:
    """The optimizer's ``state_dict`` with full tensors on the CPU of rank 0, {} elsewhere. Collective."""
    optimizer, engine = sharded.optimizer, sharded.engine
    packed, numbers = packed_states(sharded)
    keep = engine.comm.rank == 0
    state: dict[int, dict[str, Any]] = {}
    with progress_bar("Gathering optimizer states", len(engine.buckets), rank=engine.comm.rank) as work:
        for bucket in engine.buckets:
            mine = {i: p for i, p in enumerate(bucket.params) if id(p) in numbers}
            local = {i: optimizer.state[p] for i, p in mine.items() if p in optimizer.state}
            for store in bucket.step_stores() if local else ():
                store.read()
            for key, dtype in sorted(_keys(bucket, local).items()):
                for index, value in _collect(bucket, local, key, dtype).items():
                    if keep and index in mine:
                        state.setdefault(numbers[id(mine[index])], {})[key] = value
            bucket.put_away()
            work.advance()
    engine.offload_manager.check(engine.comm, "optimizer states in files")
    if not keep:
        return {}
    foreign = {numbers[id(p)]: optimizer.state[p] for p in sharded.parameters() if is_foreign(engine, p, optimizer)}
    return {**packed, "state": {**foreign, **dict(sorted(state.items()))}}


def _keys(bucket: Bucket, local: dict[int, dict[str, Any]]) -> dict[str, str]:
    """The state keys of all ranks, each with the dtype of its element-wise tensors, '' if it has scalars only."""
    found: dict[str, str] = {}
    for index, state in local.items():
        for key, value in state.items():
            if is_elementwise(bucket, index, value):
                found[key] = str(value.dtype).removeprefix("torch.")
            found.setdefault(key, "")
    merged: dict[str, str] = {}
    for keys in bucket.comm.host_gather(found, f"optimizer state of {bucket.name}"):
        merged |= {key: dtype for key, dtype in keys.items() if dtype or key not in merged}
    return merged


def _collect(bucket: Bucket, local: dict[int, dict[str, Any]], key: str, dtype: str) -> dict[int, Any]:
    """One entry of the state of all parameters of the bucket. Collective."""
    mine = {index: state[key] for index, state in local.items() if key in state}
    rows = {index: value for index, value in mine.items() if is_elementwise(bucket, index, value)}
    scalars = {index: value for index, value in mine.items() if index not in rows}
    every: dict[int, Any] = {}
    holders: set[int] = set()
    for other_scalars, other_rows in bucket.comm.host_gather((scalars, list(rows)), f"{key} of {bucket.name}"):
        every |= other_scalars
        holders |= set(other_rows)
    if not dtype:
        return every
    own = torch.zeros(
        bucket.shard_range[1] - bucket.shard_range[0], dtype=getattr(torch, dtype), device=bucket.flat.device
    )
    for index, value in rows.items():
        (piece,) = bucket.pieces_of(index)
        own[piece.offset : piece.offset + piece.numel] = value.reshape(-1)
    flat, spans = gather_own(bucket, own), bucket.layout.spans
    rest = {i: flat[spans[i].lo : spans[i].hi].view(spans[i].shape).to("cpu", copy=True) for i in sorted(holders)}
    return {**every, **rest}


def load_full_optimizer_state(
    sharded: ShardedOptimizer, full: Mapping[str, Any], tick: Callable[[], object] = lambda: None
) -> None:
    """Load this rank's pieces of a full state dict, which all ranks pass. Not collective.

    Args:
        sharded: the optimizer.
        full: as ``Optimizer.state_dict`` returns it; of lazy tensors only this rank's pieces are read.
        tick: called for each parameter whose state was read.

    Raises:
        ValueError: the optimizer's parameters differ from the saved ones.
    """
    engine, parameters = sharded.engine, sharded.parameters()
    numbers = parameter_numbers(full)
    if len(numbers) != len(parameters):
        raise ValueError(
            f"The checkpoint's optimizer has {len(numbers)} parameters, this one has {len(parameters)}. Make "
            "`configure_optimizers` return the same parameters in the same order as when the checkpoint was saved."
        )
    cut: dict[int, Any] = {}
    resting: dict[Bucket, list[_Resting]] = {}
    for number, parameter in zip(numbers, parameters, strict=True):
        state = full["state"].get(number)
        place = engine.owner.get(id(parameter))
        if state is None or place is None:
            if state is not None:
                cut[number] = {key: whole(value) for key, value in state.items()}
            continue
        bucket, index = place
        for piece in bucket.pieces_of(index):
            cut[number] = {}
            for key, value in state.items():
                if not (
                    isinstance(value, Tensor) and value.dim() and tuple(value.shape) == tuple(bucket.shapes[index])
                ):
                    cut[number][key] = whole(value)
                elif bucket.step_place.streamed:
                    resting.setdefault(bucket, []).append(_Resting(parameter, piece, key, value))
                else:
                    cut[number][key] = _piece_of(bucket, piece, value)
        if bucket not in resting:
            tick()
    sharded.optimizer.load_state_dict({**full, "state": cut})
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in cut.get(number, {}).items():
            # torch casts states to the parameter's dtype, but ours have that of the master weights.
            loaded = sharded.optimizer.state[parameter]
            place = engine.owner.get(id(parameter))
            moves = place is not None and place[0].offloaded
            if isinstance(value, Tensor) and (loaded[key].dtype != value.dtype or moves):
                loaded[key] = value.to("cpu" if moves else loaded[key].device, copy=True)
    _load_resting(sharded, resting, tick)
    sharded.stepper.store_states()


class _Resting(NamedTuple):
    """An element-wise state that is stored in a file."""

    parameter: Parameter
    piece: Piece
    key: str
    value: Tensor


def _piece_of(bucket: Bucket, piece: Piece, value: Tensor) -> Tensor:
    """This rank's elements in the dtype of the running optimizer's states, which may differ from the saved one."""
    row = elements_of(value, piece.lo, piece.hi)
    row = row.to(bucket.step_dtype) if row.is_floating_point() else row
    shape = bucket.shapes[piece.index]
    row = row if isinstance(value, LazyTensor) or row.dtype != value.dtype else row.clone()
    return row.view(shape) if piece.numel == torch.Size(shape).numel() else row


def _load_resting(
    sharded: ShardedOptimizer, resting: Mapping[Bucket, Sequence[_Resting]], tick: Callable[[], object]
) -> None:
    """Write loaded states to their files, with one bucket in memory at a time."""
    for bucket, states in resting.items():
        for state in states:
            row = _piece_of(bucket, state.piece, state.value)
            store = bucket.state_store(state.key, row.dtype)
            assert store is not None
            store.write()
            kept = store.lend(state.piece.offset, row.shape).copy_(row)
            sharded.optimizer.state[state.parameter][state.key] = kept
        bucket.put_away()
        for _ in {id(state.parameter) for state in states}:
            tick()
