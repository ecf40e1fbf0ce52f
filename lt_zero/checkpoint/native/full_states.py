"""The states of an optimizer over all ranks as one state dict on rank 0, for checkpoints that are one file."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lt_zero.checkpoint.native.pieces import (
    names_on_all_ranks,
    optimizer_fragments,
    parameter_names,
    parameter_numbers,
)
from lt_zero.common.progress_bar import progress_bar
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.full_values import gather_own, joined, refuse_parts
from lt_zero.core.engine.lazy_tensor import Fragment
from lt_zero.core.engine.whole_model import sent
from lt_zero.core.step.param_groups import compare_options
from lt_zero.core.step.sharded_optimizer import ShardedOptimizer


def full_optimizer_state(sharded: ShardedOptimizer) -> dict[str, Any]:
    """The optimizer's ``state_dict`` with full tensors on the CPU of rank 0, {} elsewhere. Collective.

    If ranks have stages of a module, it is that of the whole module.

    Raises:
        ValueError: as ``refuse_parts``.
    """
    refuse_parts(sharded.engine, "The optimizer's full state")
    engine, packed = sharded.engine, optimizer_fragments(sharded)
    numbers = {id(p): n for n, p in zip(parameter_numbers(packed), sharded.parameters(), strict=True)}
    with progress_bar("Gathering optimizer states", len(engine.buckets), rank=engine.world.rank) as work:
        for bucket in engine.buckets:
            mine = {i: numbers[id(p)] for i, p in enumerate(bucket.params) if id(p) in numbers}
            _gather(engine, bucket, {i: packed["state"][n] for i, n in mine.items() if n in packed["state"]})
            bucket.put_away()
            work.advance()
    engine.offload_manager.check(engine.peers, "optimizer states in files")
    if not engine.everywhere:
        packed = _united(sharded, packed)
    if engine.world.rank > 0:
        return {}

    def place(entry: tuple[str, Any]) -> str:  # the order is the same wherever the elements were: scalars first
        return entry[0] if isinstance(entry[1], Tensor) and entry[1].dim() > 0 else ""

    state = {number: dict(sorted(entries.items(), key=place)) for number, entries in packed["state"].items()}
    return {**packed, "state": state}


class _Form(NamedTuple):
    """Shape and dtype of a tensor that another rank has."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _united(sharded: ShardedOptimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """The state dict of all modules on rank 0, from those of the first ranks of groups. Collective.

    One tensor after the other is sent.

    Raises:
        RuntimeError: on all ranks, if groups have other options there.
    """
    engine, world = sharded.engine, sharded.engine.world
    compare_options(engine, [sharded.optimizer])
    every = names_on_all_ranks(sharded.optimizer, engine)
    own = list(chain.from_iterable(parameter_names(sharded.optimizer, engine)))
    states = {own[number]: entries for number, entries in packed["state"].items()}
    told: tuple[dict[str, dict[str, Any]], list[Any]] = {}, []
    if engine.peers.rank == 0:
        for name, entries in states.items():
            told[0][name] = {key: _form_of(value) for key, value in entries.items()}
        told[1].extend({**group, "params": []} for group in packed["param_groups"])
    found: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for rank, (theirs, its_groups) in enumerate(world.host_gather(told, "optimizer states of all ranks")):
        groups += its_groups[len(groups) :]
        for name in [name for name in theirs if name not in found]:
            found[name] = dict(theirs[name])
            for key, value in theirs[name].items():
                if isinstance(value, _Form):
                    mine = states[name][key] if world.rank == rank else None
                    found[name][key] = mine if rank == 0 else sent(world, rank, *value, mine, f"{key} of {name}").cpu()
    numbers = {name: number for number, name in enumerate(chain.from_iterable(every))}
    state = {numbers[name]: entries for name, entries in found.items()}
    named = [{**group, "params": [numbers[n] for n in names]} for group, names in zip(groups, every, strict=True)]
    return {**packed, "state": dict(sorted(state.items())), "param_groups": named}


def _form_of(value: Any) -> Any:
    return _Form(tuple(value.shape), value.dtype) if isinstance(value, Tensor) and value.dim() > 0 else value


def _gather(engine: Engine, bucket: Bucket, states: Mapping[int, dict[str, Any]]) -> None:
    """Replace the fragments in the states of a bucket's parameters by full tensors on the first ranks of groups.

    Collective. ``states``: by index.
    """
    own: dict[str, dict[int, Any]] = {}  # the dtypes of element-wise states, and other tensors
    for index, entries in states.items():
        for key, value in entries.items():
            if isinstance(value, Fragment):
                mine = own.setdefault(key, {})
                mine[index] = value.dtype
                if value.box.sizes != bucket.layout.spans[index].shape:
                    mine[index] = value.local().view(value.shape).to("cpu", copy=True)
    every: dict[str, dict[int, Any]] = {}  # of all ranks
    for found in bucket.group.host_gather(own, f"optimizer state of {bucket.name}"):
        for key, held in found.items():
            every.setdefault(key, {}).update(held)
    lo, hi = bucket.shard_range
    for key, held in sorted(every.items()):
        dtypes = {index: value for index, value in held.items() if isinstance(value, torch.dtype)}
        rows = torch.zeros(hi - lo, dtype=next(iter(dtypes.values()), None), device=bucket.compute.flat.device)
        for index in dtypes.keys() & own.get(key, {}).keys():
            (piece,) = bucket.pieces_of(index)
            rows[piece.offset : piece.offset + piece.numel] = states[index][key].local()
        flat = gather_own(bucket, rows) if dtypes else rows
        for index, value in sorted(held.items()):
            span = bucket.layout.spans[index]
            if index in dtypes:
                value = joined(engine, bucket.params[index], flat[span.lo : span.hi].view(span.shape))
                value = value.to("cpu", copy=True) if engine.peers.rank == 0 else None
            if engine.peers.rank == 0:
                states[index][key] = value
        # Free this bucket before the next one is gathered.
        del rows, flat
