"""Optimizer states as one full, ordinary torch state dict, and the consolidated export.

The full form is what a single process would have saved: moments in their parameter's shape, keyed by the parameter's
number, so a plain DDP run resumes from it, and any world size and stage reads it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lt_zero.core.bucket import Bucket
from lt_zero.core.engine import Engine
from lt_zero.core.optimizer import ShardedOptimizer, cut_state
from lt_zero.core.values import full_parameters, gather_own


def full_optimizer_state(sharded: ShardedOptimizer) -> dict[str, Any]:
    """The optimizer's ``state_dict`` with full tensors on the CPU of rank 0, {} elsewhere. Collective."""
    optimizer, engine = sharded.optimizer, sharded.engine
    sharded.by_bucket = True
    try:
        packed = optimizer.state_dict()
    finally:
        sharded.by_bucket = False
    numbers = {id(p): n for n, p in zip(_numbers(packed), sharded.parameters(), strict=True)}
    keep = engine.comm.rank == 0
    state: dict[int, dict[str, Any]] = {}
    for bucket in engine.buckets:
        mine = {i: p for i, p in enumerate(bucket.params) if id(p) in numbers}
        local = {i: optimizer.state[p] for i, p in mine.items() if p in optimizer.state}
        for home in bucket.shelf.step_homes() if local else ():
            home.bring(write=False)
        for key, dtype in sorted(_keys(bucket, local).items()):
            for index, value in _collect(bucket, local, key, dtype).items():
                if keep and index in mine:
                    state.setdefault(numbers[id(mine[index])], {})[key] = value
        bucket.shelf.tidy()
    engine.shelves.check(engine.comm, "optimizer states in files")
    if not keep:
        return {}
    foreign = {numbers[id(p)]: optimizer.state[p] for p in sharded.parameters() if _is_foreign(engine, p, optimizer)}
    return {**packed, "state": {**foreign, **dict(sorted(state.items()))}}


def _numbers(packed: Mapping[str, Any]) -> list[int]:
    return [number for group in packed["param_groups"] for number in group["params"]]


def _is_foreign(engine: Engine, parameter: Any, optimizer: Optimizer) -> bool:
    return id(parameter) not in engine.owner and parameter in optimizer.state


def _is_elementwise(bucket: Bucket, index: int, value: Any) -> bool:
    """Whether a state entry has one element for each of the parameter's (0D parameters count as scalars)."""
    (piece,) = bucket.pieces_of(index)
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == piece.numel


def _keys(bucket: Bucket, local: dict[int, dict[str, Any]]) -> dict[str, str]:
    """What the states of any rank hold: key -> dtype of its element-wise tensors, '' if it has scalars only."""
    found: dict[str, str] = {}
    for index, state in local.items():
        for key, value in state.items():
            if _is_elementwise(bucket, index, value):
                found[key] = str(value.dtype).removeprefix("torch.")
            found.setdefault(key, "")
    merged: dict[str, str] = {}
    for keys in bucket.comm.host_gather(found, f"optimizer state of {bucket.name}"):
        merged |= {key: dtype for key, dtype in keys.items() if dtype or key not in merged}
    return merged


def _collect(bucket: Bucket, local: dict[int, dict[str, Any]], key: str, dtype: str) -> dict[int, Any]:
    """One entry of the state of all parameters of the bucket. Collective."""
    mine = {index: state[key] for index, state in local.items() if key in state}
    rows = {index: value for index, value in mine.items() if _is_elementwise(bucket, index, value)}
    scalars = {index: value for index, value in mine.items() if index not in rows}
    every: dict[int, Any] = {}
    holders: set[int] = set()
    for other_scalars, other_rows in bucket.comm.host_gather((scalars, list(rows)), f"{key} of {bucket.name}"):
        every |= other_scalars
        holders |= set(other_rows)
    if not dtype:
        return every
    own = torch.zeros(bucket.own[1] - bucket.own[0], dtype=getattr(torch, dtype), device=bucket.flat.device)
    for index, value in rows.items():
        (piece,) = bucket.pieces_of(index)
        own[piece.offset : piece.offset + piece.numel] = value.reshape(-1)
    flat, spans = gather_own(bucket, own), bucket.layout.spans
    rest = {i: flat[spans[i].lo : spans[i].hi].view(spans[i].shape).to("cpu", copy=True) for i in sorted(holders)}
    return {**every, **rest}


def load_full_optimizer_state(sharded: ShardedOptimizer, full: Mapping[str, Any]) -> None:
    """Take this rank's pieces of a full state dict (every rank passes the same one). Not collective."""
    engine, parameters = sharded.engine, sharded.parameters()
    numbers = _numbers(full)
    if len(numbers) != len(parameters):
        raise ValueError(
            f"The checkpoint's optimizer has {len(numbers)} parameters, this one has {len(parameters)}. Make "
            "`configure_optimizers` return the same parameters in the same order as when the checkpoint was saved."
        )
    cut: dict[int, Any] = {}
    for number, parameter in zip(numbers, parameters, strict=True):
        state = full["state"].get(number)
        place = engine.owner.get(id(parameter))
        if state is None or place is None:
            if state is not None:
                cut[number] = state
            continue
        bucket, index = place
        for piece in bucket.pieces_of(index):
            parts = {k: cut_state(v, bucket.shapes[index], piece.lo, piece.hi) for k, v in state.items()}
            # The run that saved them may have kept moments in another dtype.
            cut[number] = {
                k: v.to(bucket.step_dtype) if _is_elementwise(bucket, index, v) and v.is_floating_point() else v
                for k, v in parts.items()
            }
    sharded.optimizer.load_state_dict({**full, "state": cut})
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in cut.get(number, {}).items():
            # torch casts state to the parameter's dtype; ours belongs to the master weights.
            loaded = sharded.optimizer.state[parameter]
            place = engine.owner.get(id(parameter))
            moves = place is not None and place[0].shelf.moves_optim
            if isinstance(value, Tensor) and (loaded[key].dtype != value.dtype or moves):
                loaded[key] = value.to("cpu" if moves else loaded[key].device, copy=True)
    sharded.stepper.shelve_states()


def export(engine: Engine, path: str | os.PathLike[str], dtype: torch.dtype = torch.float16) -> None:
    """Write all weights as one plain state dict that ``torch.load(path, weights_only=True)`` reads. Collective.

    Floating-point parameters and buffers are cast to ``dtype``, except for parameters that ``fp16_override_modules``
    keeps in fp32. Tied weights stay tied. Rank 0 writes, under a
    temporary name first. Values that do not fit into ``dtype`` are reported by name.
    """
    keep = engine.comm.rank == 0
    values: dict[int, Tensor] = {}
    overflown = []
    for name, parameter, value in full_parameters(engine):
        if keep:
            values[id(parameter)] = _cast(value, dtype if parameter not in engine.kept else torch.float32)
            if values[id(parameter)].isinf().any() and not value.isinf().any():
                overflown.append(name)
    state = engine.root.state_dict(keep_vars=True)
    if not keep:
        return
    if overflown:
        warnings.warn(f"Values of {', '.join(overflown[:5])} exceed the range of {dtype} and became inf.", stacklevel=2)
    plain = {
        name: values[id(value)] if id(value) in values else _cast(value, dtype)
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    torch.save(plain, temporary)
    os.replace(temporary, target)


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.detach().to("cpu", dtype if value.dtype.is_floating_point else value.dtype, copy=True)
