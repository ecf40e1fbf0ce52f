"""Models that no rank ever holds in full: meta-device modules filled unit by unit, and sharding at construction.

Inside ``ConstructionSharder`` a module's parameters are sharded as soon as the module is registered in its parent: each
rank keeps 1/world of each, and the parameter gets a sentinel and a guard (guard.py). Later initialisation code
(``self.apply(init)``, ``module.weight.data.normal_()``) triggers the guard, which gathers the parameter, runs the code
on its values, and shards it again when others are used. All random numbers are drawn for full shapes in the
original order, so the result is bitwise that of construction in one process. The own parameters of a module that no
other registers, the outermost one, are sharded when the context ends.

Note [Who initializes a module]
    A module on the meta device is initialized by its ``reset_parameters()``, as by torch's and Lightning's FSDP. If the
    script has set it on the object, or a class outside of torch.nn defines it, that is all. Otherwise, of Linear for
    example, ``_init_weights(module)`` of the module itself or of the nearest parent that has it follows, as in nanoGPT
    and transformers: a model that calls ``self.apply(self._init_weights)`` in its constructor has lost the effect.

    Only what is on the meta device gets values. What has some already (a parameter whose module has a meta buffer
    beside it, modules inside of the module) is set aside meanwhile: it may be loaded, or in a bucket.

    What counts is what the module has afterwards: a tensor that was written to, or another one that was assigned.
"""

from __future__ import annotations

import gc
import math
import weakref
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
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
from lt_zero.common.compat import is_wrapper, replace_tensor, version_of, versions_of, without_torch_function
from lt_zero.common.flat_storage import FlatStorage
from lt_zero.common.module_hooks import is_compiled_by_jit
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.guard import guard, guarded_parameters, is_guarded, own, owner_of, sentinel, unguard
from lt_zero.core.engine.layout import plan_bucket, split_by_size
from lt_zero.core.engine.lazy_tensor import LazyTensor
from lt_zero.core.engine.parts import Parts, Unjoined
from lt_zero.core.engine.same_on_ranks import Snapshot, compare, described
from lt_zero.core.stores.pinned import return_freed_memory

_LARGE = 1 << 20  # bytes


@contextmanager
def parameters_in(dtype: torch.dtype) -> Generator[None, None, None]:
    """Context in which fp32 parameters are cast to ``dtype`` when a module registers them; ties are kept."""

    def registered(module: nn.Module, name: str, parameter: Parameter | None) -> None:
        if parameter is None or is_lazy(parameter) or is_guarded(parameter):
            return
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(dtype)

    handle = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def empty_weights() -> Generator[None, None, None]:
    """Context in which modules are built without values: their parameters are on the meta device, buffers are real.

    For models whose weights are read afterwards, by ``lt_zero.inference`` for example.
    """

    def registered(module: nn.Module, name: str, parameter: Parameter | None) -> Parameter | None:
        if parameter is None or is_lazy(parameter) or parameter.is_meta:
            return None
        return Parameter(parameter.to("meta"), parameter.requires_grad)

    hook: Any = registered  # torch's annotation leaves out that a result replaces the parameter
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


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
        opened, self._open, self._nbytes = self._open, {}, 0
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


class Materializer:
    """Gives the engine the values of ordinary, meta-device and sharded parameters.

    Random numbers of a parameter of which this rank has a part are drawn for all of the tensor. So ranks with the same
    seed have parts of the tensor that one process draws.

    Args:
        saved: reads the values of parameters that are not to be taken from the module.
        parts: as for ``lt_zero.shard``.
    """

    def __init__(
        self,
        root: nn.Module,
        device: torch.device,
        saved: Mapping[Parameter, Callable[[], Tensor]] | None = None,
        parts: Parts | None = None,
    ) -> None:
        self._parts = parts or Unjoined()
        self._device, self._modules, self._saved = device, dict(root.named_modules()), saved or {}
        self._named = list(self._modules.items())

    # Computed before the first parameter is filled, and never if none is to be.
    @cached_property
    def _owners(self) -> dict[Parameter, list[int]]:
        """Numbers in ``_named`` of the modules that own each parameter on the meta device."""
        owners: dict[Parameter, list[int]] = {}
        for number, (_, module) in enumerate(self._named):
            for parameter in module.parameters(recurse=False):
                if parameter.is_meta:
                    owners.setdefault(parameter, []).append(number)
        return owners

    def fetch(self, parameters: Iterable[Parameter]) -> Iterator[Tensor]:
        """Yield this rank's values of ``parameters``, one by one. Collective if they were sharded at construction."""
        sharded: dict[ConstructionSharder, list[Parameter]] = {}
        for parameter in parameters:
            owner = owner_of(parameter)
            if isinstance(owner, ConstructionSharder) and parameter not in self._saved:
                sharded.setdefault(owner, []).append(parameter)
        gathered = {p: values for owner, group in sharded.items() for values in [owner.whole(group)] for p in group}
        for parameter in parameters:
            if parameter in gathered:
                yield next(gathered[parameter])
            else:
                saved = self._saved.get(parameter)
                yield parameter.data if saved is None else self._parts.cut(parameter, saved())

    def fill(self, parameters: Iterable[Parameter]) -> None:
        """Initialize the ``parameters`` that are on the meta device, and their modules' buffers.

        See Note [Who initializes a module].

        Raises:
            RuntimeError: a module's parameters or buffers were not filled, or its parameters are others afterwards.
        """
        unfilled = set[int]()
        for parameter in parameters:
            if parameter in self._saved:
                self._free(parameter)
            elif parameter.is_meta:
                unfilled.update(self._owners[parameter])
        modules = [self._named[number] for number in sorted(unfilled)]
        # Two modules that share one both fill it, the second one when it is not on the meta device any more.
        fresh = {p for _, m in modules for p in m.parameters(recurse=False) if p.is_meta and p not in self._saved}
        for path, module in modules:
            self._fill_module(path, module, fresh)
        if unfilled:
            # Initialization leaves cycles with tensors behind, and build.py has paused the garbage collector.
            gc.collect(0)

    @torch.no_grad()
    def _free(self, parameter: Parameter) -> None:
        """Free the values of a parameter, which has to be on the device of those that it gets."""
        if parameter.is_meta:
            one = torch.empty((), dtype=parameter.dtype, device=self._device)
            empty = self._parts.place(parameter, Parameter(one.expand(parameter.shape), parameter.requires_grad))
            replace_tensor(parameter, empty)
        if not is_guarded(parameter):
            has = parameter.data
            parameter.data = has.new_empty(()).expand(has.shape)

    def fill_buffers(self) -> None:
        """Initialize the meta buffers that are left: of modules without parameters, or whose parameters have values."""
        for path, module in self._modules.items():
            if any(b.is_meta for b in module.buffers(recurse=False)):
                self._fill_module(path, module, set())

    @torch.no_grad()
    def _fill_module(self, path: str, module: nn.Module, fresh: Collection[Parameter]) -> None:
        """Initialize the own meta buffers of ``module``, and those of its own parameters that are in ``fresh``."""
        parameters, buffers = dict(module._parameters), dict(module._buffers)
        children = list(module._modules.values())
        told = f"{path or 'the root module'} ({type(module).__name__})"
        unset: dict[str, _Placeholder] = {}
        stand_ins: dict[Parameter, Parameter] = {}
        if is_compiled_by_jit(module):
            raise RuntimeError(
                f"{told} was built on the meta device and is compiled by torch.jit, whose code refers to its tensors, "
                "so they cannot be replaced. Build it without `empty_init=True`."
            )
        with _children_aside(module):
            for name, parameter in parameters.items():
                if parameter is None or is_lazy(parameter):
                    continue
                is_part = self._parts.joins and is_wrapper(parameter) and not is_guarded(parameter)
                if parameter not in fresh or is_part:
                    if parameter not in stand_ins:
                        stand_ins[parameter] = self._stand_in(parameter, is_part)
                    module._parameters[name] = stand_ins[parameter]
                    if parameter in fresh and parameter.is_meta:
                        unset[name] = _Placeholder(stand_ins[parameter])
                elif parameter.is_meta:
                    replace_tensor(parameter, Parameter(self._unset_like(parameter), parameter.requires_grad))
                    unset[name] = _Placeholder(parameter)
            for name, buffer in buffers.items():
                if buffer is None or is_lazy(buffer):
                    continue
                if buffer.is_meta:
                    replace_tensor(buffer, self._unset_like(buffer))
                    unset[name] = _Placeholder(buffer)
                else:
                    module._buffers[name] = buffer.clone()
            try:
                self._initialize(path, module)
            finally:
                found = {**module._parameters, **module._buffers}
                given = dict(module._parameters)
                module._parameters.clear()
                module._parameters.update(parameters)
                had_values = ((name, buffer) for name, buffer in buffers.items() if name not in unset)
                module._buffers.update((name, buffer) for name, buffer in had_values if buffer is not None)
        if left := [name for name, placeholder in unset.items() if not placeholder.is_filled(found.get(name))]:
            raise RuntimeError(
                f"{told} was built on the meta device and {', '.join(map(repr, left))} got no values: give the class a "
                "`reset_parameters()` that fills its parameters and buffers, or build it without `empty_init=True`."
            )
        _check_same_parameters(told, parameters, given, children, module)
        for name, parameter in parameters.items():
            now = given.get(name)
            if parameter is None or now is None or parameter not in fresh:
                continue
            if parameter in stand_ins:  # this rank has a part of it
                # A module that shares it may have filled it already, and this one may leave that.
                if name in unset or _has_values(now):
                    replace_tensor(parameter, self._parts.place(parameter, now))
            elif now is not parameter:
                parameter.data = now.detach().to(parameter.device, parameter.dtype)
                vars(parameter).update(vars(now))
        for name in unset.keys() - parameters.keys():
            buffer, before = module._buffers[name], buffers[name]
            if buffer is not None and buffer.device != self._device:
                module._buffers[name] = buffer.to(self._device)
            if before is not None and buffer is not before:
                # Nobody has set the values of the old one, and another module may share it: it has its own turn.
                replace_tensor(before, torch.empty_like(before, device="meta"))

    def _initialize(self, path: str, module: nn.Module) -> None:
        """Call what initializes ``module``. See Note [Who initializes a module]."""
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
            if _resets_itself(module):
                return
        parents = ["", *accumulate(path.split("."), "{}.{}".format)]
        # Ask the module itself, then its parents from the nearest to the root.
        for parent in reversed(parents):
            initializer = getattr(self._modules[parent], "_init_weights", None)
            if callable(initializer):
                initializer(module)
                return

    def _unset_like(self, like: Tensor) -> Tensor:
        """A tensor of the shape and dtype of ``like``, filled with a sentinel that marks elements as uninitialized."""
        if like.dtype == torch.bool:  # a byte that no operation writes
            return torch.full(like.shape, 0xFF, dtype=torch.uint8, device=self._device).view(torch.bool)
        return torch.full(like.shape, _unset_value(like.dtype), dtype=like.dtype, device=self._device)

    def _stand_in(self, parameter: Parameter, is_part: bool) -> Parameter:
        """A parameter of the shape of all of ``parameter``, with its values where it has them in memory."""
        readable = not (is_part or parameter.is_meta or is_guarded(parameter) or parameter in self._saved)
        value = parameter.detach().clone() if readable else self._unset_like(parameter)
        made = Parameter(value, requires_grad=parameter.requires_grad)
        vars(made).update(vars(parameter))
        return made


class _Placeholder:
    """A tensor in the place of one on the meta device, before its module is initialized."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, version_of(tensor)

    def is_filled(self, now: Tensor | None) -> bool:
        """True if ``now``, which the module has in this place, is another tensor with values, or was written to."""
        if now is None or now.is_meta:
            return False
        if now is not self._tensor or _has_values(now):
            return True
        # Any integer may be wanted. NaN that a function has multiplied was written to as well, and is no value.
        return not (now.is_floating_point() or now.is_complex()) and version_of(now) != self._version


def _unset_value(dtype: torch.dtype) -> float:
    """The value of elements that were not initialized; NaN if there is one."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).min if dtype.is_signed else torch.iinfo(dtype).max


def _has_values(tensor: Tensor | None) -> bool:
    """True if ``tensor`` has an element that is not as ``_unset_like`` made it, or no elements."""
    if tensor is None:
        return False
    if tensor.numel() == 0:
        return True
    if tensor.dtype == torch.bool:
        return not bool((tensor.detach().contiguous().view(torch.uint8) == 0xFF).all())
    unset = _unset_value(tensor.dtype)
    return not bool((tensor.isnan() if math.isnan(unset) else tensor == unset).all())


def _resets_itself(module: nn.Module) -> bool:
    """True if a script says what ``reset_parameters`` of ``module`` does, and not torch."""
    if "reset_parameters" in vars(module):
        return True
    defining = next((cls for cls in type(module).__mro__ if "reset_parameters" in vars(cls)), None)
    return defining is not None and not defining.__module__.startswith(("torch.nn.", "torch.ao."))


@contextmanager
def _children_aside(module: nn.Module) -> Iterator[None]:
    """Context in which the modules inside of ``module`` have tensors on the meta device in the place of their values.

    So a function that initializes ``module`` changes nothing that has values already, or is in a bucket.
    """
    own = {*module._parameters.values(), *module._buffers.values()}
    empty: dict[Tensor, Tensor] = {}
    aside: list[tuple[dict[str, Any], str, Tensor]] = []
    inside = module.modules()
    next(inside)
    for sub in inside:
        tables: tuple[dict[str, Any], ...] = (sub._parameters, sub._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or is_lazy(tensor) or tensor.is_meta or tensor in own:
                    continue
                if tensor not in empty:
                    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    is_parameter = isinstance(tensor, Parameter)
                    empty[tensor] = Parameter(made, tensor.requires_grad) if is_parameter else made
                aside.append((table, name, tensor))
                table[name] = empty[tensor]
    try:
        yield
    finally:
        for table, name, tensor in aside:
            table[name] = tensor


def _check_same_parameters(
    told: str,
    before: Mapping[str, Parameter | None],
    after: Mapping[str, Parameter | None],
    children: Sequence[nn.Module | None],
    module: nn.Module,
) -> None:
    """Raise RuntimeError if an initializer has made parameters for which no bucket was planned, or of other shapes."""
    added = [name for name, parameter in after.items() if parameter is not None and before.get(name) is None]
    known = set(children)
    replaced = [(n, m) for n, m in module._modules.items() if m is not None and m not in known]
    added += [f"{name}.{own}" for name, child in replaced for own, _ in child.named_parameters()]
    if added:
        raise RuntimeError(
            f"{told}: its initialization registers {', '.join(map(repr, added))}, which the module did not have when "
            "it was sharded. Register parameters and modules in the constructor, and fill or assign them in "
            "`reset_parameters()`."
        )
    for name, parameter in before.items():
        now = after.get(name)
        if parameter is not None and now is not None and now.shape != parameter.shape:
            raise RuntimeError(
                f"{told}: its initialization assigns {name!r} the shape {tuple(now.shape)}, and the module was built "
                f"with {tuple(parameter.shape)}. Give it that shape in the constructor, too."
            )
