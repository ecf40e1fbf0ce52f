"""A rank's elements of the model and its optimizers, as fragments that are saved.

Fragments are not copied, but read when they are written. The full state dict of an optimizer, gathered on rank 0, is
that of a single process: a plain DDP run can resume from it, and any world size and stage can load it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lt_zero.common import plain_names
from lt_zero.common.names import merged
from lt_zero.core.engine.averaged_weights import average_of
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.lazy_tensor import Fragment
from lt_zero.core.step.sharded_optimizer import ShardedOptimizer
from lt_zero.core.stores.store import Store, put_away

log = logging.getLogger("lt_zero")


def weight_fragments(engine: Engine, averaged: bool | None = None) -> dict[str, Any]:
    """The module's state dict with a ``Fragment`` for each parameter of the engine. Collective.

    Order and ties are those of the unsharded module, names its plain ones; tied names share an object. Other entries
    (buffers, parameters that the engine does not own) are unchanged.

    Args:
        engine: of the module.
        averaged: True: averages where there are some; False: the trained weights; None: what the model has now.
    """
    engine.prepare_reading()
    if engine.offload_manager.overlaps:
        engine.offload_manager.refuse_partially_stepped(engine.world)
    average = average_of(engine) if averaged is not None else None
    made: dict[int, Fragment] = {}
    for bucket in engine.buckets:
        bucket.edits.check(values=True)
        streamed = any(store.streamed for store in (*bucket.weights.stores(), *bucket.states.beside.values()))
        rows, dtype = None, bucket.weights.precision
        if average is not None:
            rows, averages = average.rows(bucket, averaged is True), average.averages(bucket)
            dtype = averages.dtype if averaged and averages is not None else dtype
        for index, parameter in enumerate(bucket.params):
            local = partial(_weight, bucket, index, rows)
            made[id(parameter)] = _fragment(bucket, index, local, dtype, streamed)
    # keep_vars: sharded parameters are not read. On all ranks, as metrics may synchronize in it.
    state = plain_names.state_dict(engine.root)
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = made[id(value)] if id(value) in made else value.detach()
    if average is not None:
        state |= {name: value for name, value in average.buffers(averaged is True).items() if name in state}
    return state


def _weight(bucket: Bucket, index: int, rows: Callable[[], Tensor] | None) -> Tensor:
    (piece,) = bucket.pieces_of(index)
    return (rows or bucket.weights.values)()[piece.offset : piece.offset + piece.numel]


def _fragment(bucket: Bucket, index: int, local: Callable[[], Tensor], dtype: torch.dtype, streamed: bool) -> Fragment:
    """This rank's elements of a parameter, or of a state of its shape. ``streamed``: they are read into a buffer."""
    spec = bucket.layout.spans[index].spec
    lo, hi = next(((piece.lo, piece.hi) for piece in bucket.pieces_of(index)), (0, 0))
    if 0 in spec.shape:
        local = partial(torch.empty, 0, dtype=dtype)
    done = bucket.put_away if streamed else None
    return Fragment(local, spec.global_shape, lo, hi, dtype, done, spec.local_box, bucket.group.of_process)


class _Scalar(NamedTuple):
    """A 0D tensor (a step counter) for other ranks: pickling thousands of tensors is slow."""

    dtype: torch.dtype
    value: Any


def optimizer_fragments(sharded: ShardedOptimizer) -> dict[str, Any]:
    """The optimizer's ``state_dict`` with a ``Fragment`` for each element-wise state. Collective.

    Other states (step counters) are complete on every rank. Tensors of other shapes of a parameter that one rank owns
    alone (Adafactor's factors, Shampoo's matrices) are a ``Fragment`` of their own shape.
    """
    optimizer, engine = sharded.optimizer, sharded.engine
    packed, numbers = packed_states(sharded)
    state: dict[int, dict[str, Any]] = {}
    own: dict[str, dict[str, Any]] = {}  # by name: numbers are those of a module, of which ranks may have others
    known: dict[str, int] = {}
    for bucket in engine.buckets:
        for index, parameter in enumerate(bucket.params):
            if (number := numbers.get(id(parameter))) is None:
                continue
            name = bucket.layout.spans[index].name
            known[name] = number
            if parameter in optimizer.state:
                state[number] = states_of(bucket, index, optimizer.state[parameter])
                if not bucket.storage.is_whole and _tells_of(bucket, index):  # else every rank has it
                    entries = state[number].items()
                    own[name] = {key: _plain(value) for key, value in entries if not isinstance(value, Fragment)}
        if any(span.shape == () for span in bucket.layout.spans):
            put_away(bucket.states.by_key.values())  # ``states_of`` has read them
    for others in engine.world.host_gather(own, "optimizer states that are no tensors"):
        for name, held in others.items():
            if name not in known:
                continue
            mine = state.setdefault(known[name], {})
            for key, value in held.items():
                if key not in mine:
                    mine[key] = torch.tensor(value.value, dtype=value.dtype) if isinstance(value, _Scalar) else value
    return {**packed, "state": {**packed["state"], **dict(sorted(state.items()))}}


def _plain(value: Any) -> Any:
    return _Scalar(value.dtype, value.item()) if isinstance(value, Tensor) and value.dim() == 0 else value


def _tells_of(bucket: Bucket, index: int) -> bool:
    """True on the rank that tells others of a parameter: the one that has its first element, in the first replica.

    If all ranks with elements told, each would get as many values as parameters have shards.
    """
    pieces = bucket.pieces_of(index)
    is_first = pieces[0].lo == 0 if pieces else bucket.layout.spans[index].numel == 0
    return is_first and bucket.group.mesh.replica == 0


def states_of(bucket: Bucket, index: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter on this rank, with fragments."""
    shape = tuple(bucket.layout.spans[index].shape)
    numel = sum(piece.numel for piece in bucket.pieces_of(index))  # of this rank
    alone = numel == math.prod(shape) and not bucket.storage.is_whole
    made = dict(state)
    for key, value in state.items():
        if not isinstance(value, Tensor) or not bucket.pieces_of(index):
            continue
        stored = bucket.states.by_key.get(key)
        if value.dim() == 0:  # a state of a 0D parameter counts as a scalar
            made[key] = _row(stored, value).clone().view(()) if stored is not None and not shape else value
        elif value.numel() == numel and (tuple(value.shape) == shape or numel != math.prod(shape)):
            made[key] = _fragment(bucket, index, partial(_row, stored, value), value.dtype, stored is not None)
        elif alone:
            row = value.detach().contiguous().view(-1)
            made[key] = Fragment(partial(row.view, -1), tuple(value.shape), 0, value.numel(), value.dtype)
    return made


def _row(stored: Store | None, value: Tensor) -> Tensor:
    """A state (1D), which is read from its store first."""
    if stored is not None:
        stored.read()
    return value.detach().reshape(-1)


def check_form(state: Any, what: str, count: int | None = None) -> None:
    """Raise CheckpointError if a state is neither as torch's ``state_dict`` returns it nor {}.

    ``what``: the beginning of messages; ``count``: of the parameters, if keys are their numbers.
    """
    if isinstance(state, Mapping) and not state:
        return
    groups, states = (state.get("param_groups"), state.get("state")) if isinstance(state, Mapping) else (None, None)
    if isinstance(groups, (list, tuple)) and isinstance(states, Mapping):
        lists = [group.get("params") if isinstance(group, Mapping) else None for group in groups]
        sound = all(isinstance(each, (list, tuple)) for each in lists)
        if sound and all(isinstance(entries, Mapping) for entries in states.values()):
            numbers = parameter_numbers(state)
            if count is None or (len(numbers) == count and states.keys() <= set(numbers)):
                return
    from lt_zero.checkpoint.native.state_form import broken

    raise broken(state, what, count)


def packed_states(sharded: ShardedOptimizer) -> tuple[dict[str, Any], dict[int, int]]:
    """The optimizer's own ``state_dict``, without reading states from files, and parameter numbers by id. Collective.

    Its states are those of parameters that the engine does not own.
    """
    sharded.engine.prepare_reading()
    optimizer, parameters = sharded.optimizer, sharded.parameters()
    with sharded.by_bucket():
        packed = optimizer.state_dict()
    # A hook may have dropped the states: those of the engine's parameters are not read from there.
    form = {"state": {}, **packed} if isinstance(packed, Mapping) else packed
    check_form(form, f"What state_dict of {type(optimizer).__name__} returns", len(parameters))
    numbers = {id(p): n for n, p in zip(parameter_numbers(packed), parameters, strict=True)}
    foreign = (p for p in parameters if id(p) not in sharded.engine.owner and p in optimizer.state)
    return {**packed, "state": {numbers[id(p)]: optimizer.state[p] for p in foreign}}, numbers


def parameter_numbers(packed: Mapping[str, Any]) -> list[int]:
    """The numbers of the parameters in a packed state dict, in the order of the groups."""
    return [number for group in packed["param_groups"] for number in group["params"]]


def parameter_names(optimizer: Optimizer, engine: Engine) -> list[list[str]]:
    """The names of the optimizer's parameters, by group; ``#<number>`` for those outside the module."""
    known = {id(p): name for name, p in plain_names.named_parameters(engine.root, remove_duplicate=True)}
    known |= {key: bucket.layout.spans[index].name for key, (bucket, index) in engine.owner.items()}
    groups, first = [], 0
    for group in optimizer.param_groups:
        groups.append([known.get(id(p), f"#{i}") for i, p in enumerate(group["params"], first)])
        first += len(group["params"])
    return groups


def on_all_ranks(engine: Engine, names: Sequence[str], what: str) -> list[str]:
    """All names that ranks have, in the order of the module that has all layers. ``names``: this rank's.

    Collective if ranks have other modules.
    """
    return list(names) if engine.everywhere else merged(engine.world.host_gather(list(names), what))


def names_on_all_ranks(optimizer: Optimizer, engine: Engine) -> list[list[str]]:
    """``parameter_names`` of all ranks, by group, in the order of the module that has all layers.

    Collective if ranks have other modules.
    """
    mine = parameter_names(optimizer, engine)
    if engine.everywhere:
        return mine
    every = engine.world.host_gather(mine, "parameters of an optimizer")
    return [merged(groups) for groups in zip_longest(*every, fillvalue=[])]
