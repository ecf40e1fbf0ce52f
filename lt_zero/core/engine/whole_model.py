"""The state dict of the whole model on rank 0, one tensor after the other, wherever it is.

Note [Tensors of other ranks]
    Ranks of one group may have other modules (stages of a pipeline), and parts of tensors. The first rank of each group
    tells what its module has, and of several that have a name the first counts. All ranks then read the same names in
    the same order. Whoever has a tensor gathers its bucket, which is kept until a tensor of another bucket is read; the
    rank that counts sends it, unless rank 0 has it. So at most one bucket more than before is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lt_zero.common import plain_names
from lt_zero.common.names import merged
from lt_zero.common.progress_bar import progress_bar
from lt_zero.core.comm.world import World
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.full_values import full_flat, gather_own, joined, refuse_parts
from lt_zero.core.stores.store import Store

_T = TypeVar("_T")
_NOTHING: Mapping[Bucket, Store] = MappingProxyType({})


class Told(NamedTuple):
    """A tensor of the state dict, as a rank that has it tells the others.

    ``bucket``: its number on that rank, and ``place`` in it; -1: it is in none. ``part``: ranks have parts of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype  # of the master weights, or of what is read in place of them
    bucket: int = -1
    place: int = 0
    part: bool = False


class WholeModel:
    """The state dict of a model over all ranks. Collective. See Note [Tensors of other ranks].

    Args:
        engine: of the model.
        instead: what this rank has of values that are read in place of a bucket's weights, in the layout of its shard.

    Attributes:
        names: of all entries, in the order of the module that has all layers.
        tensors: by name, without further names of tied ones.
        aliases: tied name -> the name in ``tensors``.
        others: on rank 0, entries that are no dense tensors.
    """

    def __init__(self, engine: Engine, instead: Mapping[Bucket, Store] = _NOTHING) -> None:
        self._engine = engine
        self._instead = instead
        engine.prepare_reading()
        if engine.offload_manager.overlaps:
            engine.offload_manager.refuse_partially_stepped(engine.world)
        # keep_vars: no values are read from sharded parameters. On all ranks, because metrics may synchronise in it.
        self.state = plain_names.state_dict(engine.root)
        tensors = {name: value for name, value in self.state.items() if _is_dense(value)}
        first: dict[int, str] = {}
        ties = {name: known for name, v in tensors.items() if (known := first.setdefault(id(v), name)) != name}
        self._own = {name: value for name, value in tensors.items() if name not in ties}
        told = list(self.state), {name: self._tell(value) for name, value in self._own.items()}, ties
        every = [told] if engine.everywhere else self._of_firsts(told, ([], {}, {}), "names of the model")
        self._holders = dict[str, int]()
        self.tensors = dict[str, Told]()
        self.aliases = dict[str, str]()
        for rank, (_, theirs, tied) in enumerate(every):
            new = {name: found for name, found in theirs.items() if name not in self._holders}
            self.tensors |= new
            self._holders |= dict.fromkeys(new, rank)
            self.aliases |= {alias: name for alias, name in tied.items() if alias not in self._holders}
        self.names = merged(names for names, *_ in every)
        self.others = {name: value for name, value in self.state.items() if name not in tensors}
        if not engine.everywhere:
            for theirs in self._of_firsts(self.others, {}, "entries of the model that are no tensors"):
                self.others = {**theirs, **self.others}
        self._flat: Tensor | None = None
        self._last: tuple[int, int] | None = None  # the bucket that was asked for last, by the rank that counts

    def _of_firsts(self, value: _T, empty: _T, name: str) -> list[_T]:
        """Values of the first rank of each group, by rank; ``empty`` for all other ranks. Collective."""
        engine = self._engine
        return engine.world.host_gather(value if engine.peers.rank == 0 else empty, name)

    def _tell(self, value: Tensor) -> Told:
        place = self._engine.owner.get(id(value))
        if place is None:
            return Told(tuple(value.shape), value.dtype)
        bucket, index = place
        part = not bucket.layout.spans[index].spec.is_whole
        number = self._engine.buckets.index(bucket)
        other = self._instead.get(bucket)
        dtype = bucket.weights.precision if other is None else other.dtype
        return Told(tuple(value.shape), dtype, number, index, part)

    def in_buckets(self) -> Iterator[str]:
        """The names in ``tensors``, those of a bucket one after the other."""
        return iter(sorted(self.tensors, key=lambda name: (self._holders[name], *self.tensors[name][2:4])))

    def is_here(self, name: str) -> bool:
        """True if rank 0 has all of a tensor now, so that ``read`` on other ranks does nothing."""
        told, holder = self.tensors[name], self._holders[name]
        return holder == 0 and (told.bucket < 0 or (not told.part and self._last == (holder, told.bucket)))

    @torch.no_grad()
    def read(self, name: str) -> Tensor | None:
        """The full tensor on rank 0, on any device, until the next one is read. Collective unless it ``is_here``.

        Raises:
            RuntimeError: on all ranks, if those that have the tensor failed to gather it.
        """
        told = self.tensors[name]
        holder = self._holders[name]
        world = self._engine.world
        if self.is_here(name):
            return self._value(name) if world.rank == 0 else None
        asked = holder, told.bucket
        if asked != self._last:
            # Free the last bucket before the next one is gathered, so that only one is in memory.
            self._flat, self._last = None, asked if told.bucket >= 0 else None
        with nullcontext() if self._engine.everywhere else world.agree(f"gathering {name!r}", RuntimeError):
            value = self._value(name)
        if holder > 0:
            value = sent(world, holder, told.shape, told.dtype, value, name)
        if world.rank > 0 and holder == 0 and not told.part:
            self._flat = None  # rank 0 reads the others of this bucket without asking
        return value

    def _value(self, name: str) -> Tensor | None:
        """The full tensor; None if this rank has nothing of it."""
        value, engine = self._own.get(name), self._engine
        place = engine.owner.get(id(value))
        if value is None or place is None:
            return value if value is None else value.detach()
        bucket, index = place
        if self._flat is None:
            other = self._instead.get(bucket)
            self._flat = full_flat(bucket) if other is None else gather_own(bucket, other.read())
            bucket.put_away()
            engine.offload_manager.check(engine.peers, "weights in files")
        span = bucket.layout.spans[index]
        return joined(engine, bucket.params[index], self._flat[span.lo : span.hi].view(span.shape))


def sent(
    world: World, rank: int, shape: tuple[int, ...], dtype: torch.dtype, value: Tensor | None, name: str
) -> Tensor:
    """The ``value`` that ``rank`` has, on all ranks, on the device. Collective."""
    made = torch.empty(shape, dtype=dtype, device=world.device)
    if world.rank == rank:
        assert value is not None
        made.copy_(value)
    if made.numel():
        # Send bytes: gloo does not know every dtype.
        world.broadcast(made.view(-1).view(torch.uint8), name, rank)
    return made


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def full_state_dict(engine: Engine, instead: Mapping[Bucket, Store] = _NOTHING) -> dict[str, Any]:
    """``root.state_dict()`` with full parameters on the CPU of rank 0, {} elsewhere. Collective.

    Order and aliases of tied weights are those of the unsharded module that has all layers, names its plain ones.
    ``instead``: as for ``WholeModel``.

    Raises:
        ValueError: as ``refuse_parts``.
    """
    refuse_parts(engine, "The full state dict")
    whole, keep = WholeModel(engine, instead), engine.world.rank == 0
    count = sum(told.bucket >= 0 for told in whole.tensors.values())
    found: dict[str, Any] = {}
    with progress_bar("Gathering weights", count, rank=engine.world.rank) as work:
        for name in whole.in_buckets():
            value = whole.read(name)
            if whole.tensors[name].bucket >= 0:
                work.advance()
            if keep:
                assert value is not None
                found[name] = value.to("cpu", copy=True)
    if not keep:
        return {}
    found |= {alias: found[name] for alias, name in whole.aliases.items()} | whole.others
    state = whole.state  # with torch's versions of modules
    for name in whole.names:
        state.pop(name, None)
        state[name] = found[name]
    return state
