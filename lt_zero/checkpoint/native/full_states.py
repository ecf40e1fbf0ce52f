"""Gathers optimizer states into an ordinary torch state dict, and loads them from one.

The full state dict equals that of a single process: moments in their parameter's shape, keyed by the parameter's
number. A plain DDP run can resume from it, and any world size and stage can load it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.checkpoint.native.pieces import is_elementwise, packed_states, parameter_numbers
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
    state: dict[int, dict[str, Any]] = {}
    with progress_bar("Gathering optimizer states", len(engine.buckets), rank=engine.comm.rank) as work:
        for bucket in engine.buckets:
            mine = [(i, p) for i, p in enumerate(bucket.params) if id(p) in numbers]
            local = {i: optimizer.state[p] for i, p in mine if p in optimizer.state}
            for store in bucket.step_stores() if local else ():
                store.read()
            for index, entries in _gathered(bucket, local).items():
                state[numbers[id(bucket.params[index])]] = entries
            bucket.put_away()
            work.advance()
    engine.offload_manager.check(engine.comm, "optimizer states in files")
    if engine.comm.rank != 0:
        return {}
    return {**packed, "state": {**packed["state"], **dict(sorted(state.items()))}}


def _gathered(bucket: Bucket, local: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The states of a bucket's parameters; element-wise ones, on rank 0, in full on the CPU. Collective."""
    rows: dict[str, dict[int, Tensor]] = {}
    others: dict[int, dict[str, Any]] = {index: {} for index in local}
    for index, entries in local.items():
        for key, value in entries.items():
            if is_elementwise(bucket, index, value):
                rows.setdefault(key, {})[index] = value
            else:
                others[index][key] = value
    dtypes = {key: {index: value.dtype for index, value in values.items()} for key, values in rows.items()}
    state: dict[int, dict[str, Any]] = {}
    every: dict[str, dict[int, torch.dtype]] = {}  # the element-wise states of all ranks
    for found, found_dtypes in bucket.comm.host_gather((others, dtypes), f"optimizer state of {bucket.name}"):
        for index, entries in found.items():
            state.setdefault(index, {}).update(entries)
        for key, held in found_dtypes.items():
            every.setdefault(key, {}).update(held)
    lo, hi = bucket.shard_range
    for key, held in sorted(every.items()):
        own = torch.zeros(hi - lo, dtype=next(iter(held.values())), device=bucket.flat.device)
        for index, value in rows.get(key, {}).items():
            (piece,) = bucket.pieces_of(index)
            own[piece.offset : piece.offset + piece.numel] = value.reshape(-1)
        flat = gather_own(bucket, own)
        for index in sorted(held) if bucket.comm.rank == 0 else ():
            span = bucket.layout.spans[index]
            state[index][key] = flat[span.lo : span.hi].view(span.shape).to("cpu", copy=True)
        del own, flat  # before the next one is gathered
    return state


def load_full_optimizer_state(
    sharded: ShardedOptimizer, full: Mapping[str, Any], tick: Callable[[], object] = lambda: None
) -> None:
    """Load this rank's pieces of a full state dict, which all ranks pass. Not collective.

    Args:
        full: as ``Optimizer.state_dict`` returns it; of lazy tensors only this rank's pieces are read.
        tick: called for each parameter whose state was read.

    Raises:
        ValueError: the optimizer's parameters differ from the saved ones.
    """
    engine, optimizer, parameters = sharded.engine, sharded.optimizer, sharded.parameters()
    numbers = parameter_numbers(full)
    if len(numbers) != len(parameters):
        raise ValueError(
            f"The checkpoint's optimizer has {len(numbers)} parameters, this one has {len(parameters)}. Make "
            "`configure_optimizers` return the same parameters in the same order as when the checkpoint was saved."
        )
    cut: dict[int, Any] = {}
    streamed: dict[Bucket, list[tuple[Parameter, Piece, str, Tensor]]] = {}  # element-wise states stored in files
    for number, parameter in zip(numbers, parameters, strict=True):
        state, place = full["state"].get(number), engine.owner.get(id(parameter))
        if state is not None and place is None:
            cut[number] = {key: whole(value) for key, value in state.items()}
        if state is None or place is None:
            continue
        bucket, index = place
        for piece in bucket.pieces_of(index):
            cut[number] = {}
            for key, value in state.items():
                is_whole = isinstance(value, Tensor) and value.dim() > 0 and value.shape == bucket.shapes[index]
                if not is_whole:
                    cut[number][key] = whole(value)
                elif bucket.step_place.streamed:
                    streamed.setdefault(bucket, []).append((parameter, piece, key, value))
                else:
                    cut[number][key] = _piece_of(bucket, piece, value)
        if bucket not in streamed:
            tick()
    optimizer.load_state_dict({**full, "state": cut})
    for number, parameter in zip(numbers, parameters, strict=True):
        place, loaded = engine.owner.get(id(parameter)), optimizer.state[parameter] if number in cut else {}
        moves = place is not None and place[0].offloaded
        for key, value in cut.get(number, {}).items():
            # torch casts states to the parameter's dtype, but here they have that of the master weights.
            if isinstance(value, Tensor) and (loaded[key].dtype != value.dtype or moves):
                loaded[key] = value.to("cpu" if moves else loaded[key].device, copy=True)
    for bucket, states in streamed.items():  # one bucket in memory at a time
        for parameter, piece, key, value in states:
            row = _piece_of(bucket, piece, value)
            store = bucket.state_store(key, row.dtype)
            assert store is not None
            store.write()
            optimizer.state[parameter][key] = store.lend(piece.offset, row.shape).copy_(row)
        bucket.put_away()
        for _ in {id(state[0]) for state in states}:
            tick()
    sharded.store_states()


def _piece_of(bucket: Bucket, piece: Piece, value: Tensor) -> Tensor:
    """This rank's elements in the dtype of the running optimizer's states, which may differ from the saved one."""
    row = elements_of(value, piece.lo, piece.hi)
    row = row.to(bucket.step_dtype) if row.is_floating_point() else row
    shape = bucket.shapes[piece.index]
    row = row if isinstance(value, LazyTensor) or row.dtype != value.dtype else row.clone()
    return row.view(shape) if piece.numel == torch.Size(shape).numel() else row
