"""Sharding at construction: a model that no rank ever holds in full.

Inside ``ConstructionSharder`` a module's parameters are sharded as soon as the module is registered in its parent: each
rank keeps 1/world of each, and the parameter gets a sentinel and a guard (guard.py). Later initialisation code
(``self.apply(init)``, ``module.weight.data.normal_()``) triggers the guard, which gathers the parameter, runs the code
on its values, and shards it again when others are used. All random numbers are drawn for full shapes in the
original order, so the result is bitwise that of construction in one process. The own parameters of a module that no
other registers, the outermost one, are sharded when the context ends.
"""

from __future__ import annotations

import gc
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from lt_zero.common.boxes import Box, ParamSpec
from lt_zero.common.compat import is_wrapper, versions_of, without_torch_function
from lt_zero.common.flat_storage import FlatStorage
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.guard import guard, guarded_parameters, is_guarded, own, owner_of, sentinel, unguard
from lt_zero.core.engine.layout import plan_bucket, split_by_size
from lt_zero.core.engine.lazy_tensor import LazyTensor
from lt_zero.core.engine.same_on_ranks import Snapshot, compare, described
from lt_zero.core.stores.pinned import return_freed_memory

_LARGE = 1 << 20  # bytes


class ConstructionSharder:
    """Context in which modules, the same on every rank, are built with their parameters sharded over ``group``.

    Parameters with fewer than ``threshold`` elements are not sharded.
    """

    def __init__(self, group: ShardGroup, threshold: int = 0) -> None:
        self._group, self._threshold = group, threshold
        self._slices: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> this rank's 1D slice
        # Registered, or gathered for initialisation code: to be sharded, small ones together.
        self._open: dict[Parameter, None] = {}
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> its name, for messages
        self._nbytes = 0  # bytes of the open parameters
        self._handles: list[Any] = []
        # Registered parameters: those of the outermost module are sharded last, as no other registers that.
        self._named: list[tuple[weakref.ref[nn.Module], str]] = []
        # A strong reference: parameters keep this object, which has their values, until the engine takes them over.
        self._owner: Callable[[], ConstructionSharder | None] = lambda: self

    def __enter__(self) -> ConstructionSharder:
        note: Any = self._note  # torch's annotation leaves out None
        self._handles = [
            register_module_module_registration_hook(self._registered),
            register_module_parameter_registration_hook(note),
        ]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        named, self._named = self._named, []
        if exc[0] is None:
            if any(self._is_free(parameter) for _, parameter in _registered_now(named)):
                # Collect cycles first, so that all ranks have the same modules left for the collectives below.
                gc.collect()
                self._take(_registered_now(named))
            self._shard_open(0)

    def _note(self, module: nn.Module, name: str, parameter: Parameter | None) -> None:
        self._named.append((weakref.ref(module), name))

    def _registered(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        named = module.named_parameters(f"{type(parent).__name__}.{name}") if module is not None else ()
        self._take(named)

    def shard(self, module: nn.Module) -> None:
        """Shard the parameters of a module that is built already. Collective; rank 0's values are kept.

        Raises:
            ValueError: an engine has them.
        """
        for name, parameter in module.named_parameters():
            if _is_owned(parameter) and not isinstance(owner_of(parameter), ConstructionSharder):
                raise ValueError(f"Parameter {name!r} of {type(module).__name__} is sharded already. Use it as it is.")
        self._take(module.named_parameters())
        self._shard_open(0)

    def _take(self, parameters: Iterable[tuple[str, Parameter]]) -> None:
        """Shard those of ``parameters`` that have no owner yet, as soon as there are many bytes."""
        for name, parameter in parameters:
            if not self._is_free(parameter):
                continue
            self._names[parameter] = name
            self._shard_open(_LARGE)
            self._keep_open(parameter)
        self._shard_open(_LARGE)

    def _is_free(self, parameter: Parameter) -> bool:
        """True if a parameter is to be sharded and has no owner yet."""
        if parameter.is_meta or is_lazy(parameter) or is_guarded(parameter) or parameter.numel() < self._threshold:
            return False
        # A DTensor is a part already, and is left as it is.
        return not (_is_owned(parameter) or is_wrapper(parameter))

    def _keep_open(self, parameter: Parameter) -> None:
        if parameter not in self._open:
            own(parameter, self._owner)
            self._open[parameter] = None
            self._nbytes += parameter.nbytes

    def _shard_open(self, least: int) -> None:
        """Shard the open parameters if they have at least ``least`` bytes."""
        if self._nbytes < least:
            return
        opened = self._open
        self._open = {}
        self._nbytes = 0
        # Meanwhile an engine may have taken one over, or it was moved.
        self._cut([p for p in opened if owner_of(p) is self and not (is_guarded(p) or p.is_meta)])

    @torch.no_grad()
    def _cut(self, parameters: list[Parameter]) -> None:
        if not parameters:
            return
        facts = {f"parameter {self._names[p]!r}": described(p) for p in parameters}
        compare(self._group, Snapshot.of(facts), "parameters at construction")
        # Bytes, so that parameters of any dtypes travel in one broadcast.
        flat = _zeros(sum(p.nbytes for p in parameters), torch.uint8, self._group.device)
        rows = flat.split([p.nbytes for p in parameters])
        for parameter, row in zip(parameters, rows, strict=True):
            # Resolve lazy conjugation and strides: only then the bytes are the values.
            plain = parameter.resolve_conj().resolve_neg().contiguous()
            row.copy_(plain.view(-1).view(torch.uint8))
        # Ranks may have drawn different random numbers: those of rank 0 count.
        self._group.broadcast(flat, self._name(parameters))
        for parameter, row in zip(parameters, rows, strict=True):
            spec, mesh = ParamSpec.whole("", tuple(parameter.shape)), self._group.mesh
            lo, hi = plan_bucket([spec], mesh.shards).shard(mesh.shard_rank)
            mine = _zeros(hi - lo, parameter.dtype, parameter.device)
            kept = row[lo * mine.itemsize : hi * mine.itemsize]
            mine.view(torch.uint8)[: kept.numel()].copy_(kept)
            self._put_back(parameter, mine)
        if flat.nbytes >= _LARGE:
            # Otherwise small tensors are put into the gap, and the next large parameter beyond it.
            return_freed_memory()

    def whole(self, parameters: Sequence[Parameter]) -> Iterator[Tensor]:
        """The full values of ``parameters``; frees this rank's slices. Collective, unless they are gathered."""
        sizes = [self._slices[p].nbytes if is_guarded(p) else 0 for p in parameters]
        for group in split_by_size(sizes, _LARGE // self._group.mesh.shards):
            values = self._gather([parameters[index] for index in group if is_guarded(parameters[index])])
            for index in group:
                yield values.pop(parameters[index]) if parameters[index] in values else parameters[index].detach()

    @torch.no_grad()
    def _gather(self, parameters: list[Parameter]) -> dict[Parameter, Tensor]:
        # Large elements first, so that each piece begins at a multiple of its element size.
        parameters = sorted(parameters, key=lambda p: -p.itemsize)
        pieces: list[Tensor] = [self._slices.pop(parameter) for parameter in parameters]
        sizes = [piece.nbytes for piece in pieces]
        flat = _zeros(self._group.mesh.shards * sum(sizes), torch.uint8, self._group.device)
        # Each row is what one rank contributes.
        columns = flat.view(self._group.mesh.shards, sum(sizes)).split(sizes, dim=1)
        for column, piece in zip(columns, pieces, strict=True):
            column[self._group.mesh.shard_rank].copy_(piece.view(torch.uint8))
        if parameters:
            self._group.all_gather(flat, self._name(parameters)).wait()
        values = {}
        for parameter, column, piece in zip(parameters, columns, pieces, strict=True):
            value = column.reshape(-1).view(piece.dtype)[: parameter.numel()]
            values[parameter] = value.view(parameter.shape).to(piece.device)
        return values

    def _name(self, parameters: Sequence[Parameter]) -> str:
        """The name of a collective, which differs if ranks build other parameters."""
        told = [f"{self._names[p]} {tuple(p.shape)}" for p in parameters]
        rest = f" and {len(told) - 1} more" if len(told) > 1 else ""
        shapes = zlib.crc32(repr([(name, p.dtype) for name, p in zip(told, parameters, strict=True)]).encode())
        return f"{told[0]}{rest}, parameters at construction (shapes {shapes:08x})"

    def on_guarded_use(self, parameters: list[Tensor], func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Gather parameters that initialisation code uses, and call it."""
        if func is Tensor.detach and not self._handles:  # built: ``state_dict()``, of which often only names are used
            return BuiltTensor.of(parameters[0], self)
        # Shard what is open first, arguments included: the operation then gathers all that it needs at the same time.
        self._shard_open(_LARGE)
        for parameter in self._unguarded(guarded_parameters((args, kwargs))):
            self._keep_open(parameter)
        return func(*args, **kwargs)

    @torch.no_grad()
    def read(self, parameter: Parameter) -> Tensor:
        """A parameter's values, which stay sharded. Collective."""
        if parameter not in self._slices:
            return parameter.detach()
        mine = self._slices[parameter]
        [value] = self.whole([parameter])
        self._slices[parameter] = mine
        return value

    def open(self, parameter: Parameter) -> Tensor:
        """A parameter's memory, to be written to: gathered, and sharded again when others are used. Collective."""
        for sharded in self._unguarded([parameter]):
            self._keep_open(sharded)
        return parameter.detach()

    @contextmanager
    def gathered(self, parameters: Iterable[Parameter], write: bool) -> Iterator[None]:
        """Context in which ranks may do different things with ``parameters``. Collective.

        ``write``: rank 0's values are kept.

        Raises:
            RuntimeError: on all ranks, if one has changed them without ``write``. They have their old values.
        """
        self._shard_open(0)
        before = {parameter: self._slices[parameter] for parameter in parameters if parameter in self._slices}
        unguarded = self._unguarded(before)
        versions, changed = versions_of(unguarded), False
        places = [parameter.data_ptr() for parameter in unguarded]
        try:
            yield
            if not write:
                changed = versions != versions_of(unguarded) or places != [p.data_ptr() for p in unguarded]
        finally:
            for parameter in unguarded:
                if owner_of(parameter) is not self:
                    continue
                if write:
                    self._keep_open(parameter)
                else:
                    changed |= not self._has(parameter, before[parameter])
                    self._put_back(parameter, before[parameter])
        if write:
            # Not in ``finally``: after an error that other ranks do not have, this collective would hang.
            self._shard_open(0)
            return
        if self._group.problems("changed" if changed else None, "changes of gathered parameters"):
            raise RuntimeError(
                f"A parameter of shape {tuple(unguarded[0].shape)} and {len(unguarded) - 1} others were gathered to be "
                "read, and were changed: the changes are dropped. To keep those of rank 0 pass write=True to "
                "lt_zero.gathered, or modifier_rank=0 to GatheredParameters."
            )

    @torch.no_grad()
    def _has(self, parameter: Parameter, mine: Tensor) -> bool:
        """True if this rank's elements of a whole parameter have the bits of ``mine``."""
        lo = self._group.mesh.shard_rank * mine.numel()
        row = parameter.detach().reshape(-1)[lo : lo + mine.numel()]
        return torch.equal(row.contiguous().view(torch.uint8), mine[: row.numel()].view(torch.uint8))

    def _put_back(self, parameter: Parameter, mine: Tensor) -> None:
        """Shard a parameter again; ``mine`` are this rank's elements of it."""
        self._slices[parameter] = mine
        parameter.data = sentinel(parameter, tuple(parameter.shape))
        guard(parameter)

    def _unguarded(self, parameters: Iterable[Any]) -> list[Parameter]:
        """Those of ``parameters`` that are sharded, which get their full values."""
        sharded = [parameter for parameter in dict.fromkeys(parameters) if parameter in self._slices]
        for parameter, value in zip(sharded, self.whole(sharded), strict=True):
            unguard(parameter)
            parameter.data = value
        return sharded


class BuiltTensor(LazyTensor):
    """Result of ``detach`` of a parameter that was built sharded: gathered when its values are needed.

    So ``state_dict()`` holds no whole model. Operations that write reach the parameter.
    """

    @classmethod
    def of(cls, parameter: Any, sharder: ConstructionSharder) -> BuiltTensor:
        """One for a ``parameter`` that is sharded by ``sharder``."""
        read = _Reader(parameter, sharder)
        with without_torch_function():
            made = cls(tuple(parameter.shape), parameter.dtype, read, parameter.device)
        assert isinstance(made, BuiltTensor)
        return made

    def keep(self) -> Tensor:
        read = self._held.read
        if self._held.kept is None and isinstance(read, _Reader):
            self._held.kept = read.sharder.open(read.parameter)
        return super().keep()


@dataclass(frozen=True)
class _Reader:
    """Reads elements of a parameter."""

    parameter: Any
    sharder: ConstructionSharder

    def __call__(self, lo: int, hi: int, box: Box) -> Tensor:
        return box.of(self.sharder.read(self.parameter)).reshape(-1)[lo:hi].clone()


def _is_owned(parameter: Parameter) -> bool:
    """True if a sharder, or an engine that still runs its model, has a parameter."""
    owner: Any = owner_of(parameter)
    return owner is not None and getattr(owner, "attached", True)


def _registered_now(named: Iterable[tuple[weakref.ref[nn.Module], str]]) -> Iterator[tuple[str, Parameter]]:
    """The parameters that modules have under these names, without those that are gone."""
    for ref, name in named:
        if (module := ref()) is not None and (parameter := module._parameters.get(name)) is not None:
            yield f"{type(module).__name__}.{name}", parameter


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros (1D). Large ones are not on the heap, where slices that are kept between freed parameters fragment it."""
    if numel * dtype.itemsize < _LARGE:
        return torch.zeros(numel, dtype=dtype, device=device)
    return FlatStorage(numel, dtype, device).tensor
