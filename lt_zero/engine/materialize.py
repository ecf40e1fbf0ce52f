"""Models that no rank ever holds in full: meta-device modules filled unit by unit, and sharding at construction.

Inside ``ConstructionSharder`` a module's parameters are sharded as soon as the module is registered in its parent: each
rank keeps 1/world of each, and the parameter gets a sentinel and a guard (guard.py). Later initialisation code
(``self.apply(init)``, ``module.weight.data.normal_()``) triggers the guard, which gathers the parameter, runs the code
on its values, and shards it again when the next one is used. All random numbers are drawn for full shapes in the
original order, so the result is bitwise that of construction in one process.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
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

from lt_zero.comm.communicator import Comm
from lt_zero.common.flat_storage import FlatStorage
from lt_zero.engine.guard import guard, is_guarded, own, owner_of, sentinel, unguard
from lt_zero.engine.layout import plan_bucket
from lt_zero.io.pinned import return_freed_memory

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
    """Context in which modules, the same on every rank, are built with their parameters sharded over ``comm``.

    Parameters with fewer than ``threshold`` elements are not sharded.
    """

    def __init__(self, comm: Comm, threshold: int = 0) -> None:
        self._comm, self._threshold = comm, threshold
        self._slices: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> this rank's 1D slice
        self._open: list[Parameter] = []  # gathered for initialisation code, to be sharded again
        self._handle: Any = None
        # A strong reference: parameters keep this object, which has their values, until the engine takes them over.
        self._owner: Callable[[], ConstructionSharder | None] = lambda: self

    def __enter__(self) -> ConstructionSharder:
        self._handle = register_module_module_registration_hook(self._registered)
        return self

    def __exit__(self, *exc: object) -> None:
        self._handle.remove()
        if exc[0] is None:
            self._shard_open()

    def _registered(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        self._shard_open()
        for parameter in module.parameters() if module is not None else ():
            if parameter.device.type != "meta" and not is_guarded(parameter) and parameter.numel() >= self._threshold:
                self._cut(parameter)

    def _shard_open(self) -> None:
        while self._open:
            parameter = self._open.pop()
            if owner_of(parameter) is self:  # else an engine has taken it over meanwhile
                self._cut(parameter)

    def _flat(self, parameter: Parameter, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A tensor for all elements of ``parameter`` (1D, zeros, padded), and this rank's slice of it."""
        layout, comm = plan_bucket([("", parameter.shape)], self._comm.mesh.shards), self._comm
        flat = _zeros(layout.numel, dtype, comm.device)
        return flat, flat[slice(*layout.shard(comm.mesh.shard_rank))]

    @torch.no_grad()
    def _cut(self, parameter: Parameter) -> None:
        flat, mine = self._flat(parameter, parameter.dtype)
        flat[: parameter.numel()].copy_(parameter.reshape(-1))
        self._comm.broadcast(flat, "a parameter at construction")  # ranks may have drawn different numbers
        self._slices[parameter] = _zeros(mine.numel(), mine.dtype, parameter.device).copy_(mine)
        parameter.data = sentinel(parameter, tuple(parameter.shape))
        own(parameter, self._owner)
        guard(parameter)
        if flat.nbytes >= _LARGE:
            return_freed_memory()  # small tensors would be put into the gap, and the next parameter beyond it

    @torch.no_grad()
    def whole(self, parameter: Parameter) -> Tensor:
        """The full value of a parameter; frees this rank's slice. Collective, unless the parameter is gathered."""
        if not is_guarded(parameter):
            return parameter.detach()
        piece: Tensor = self._slices.pop(parameter)
        flat, mine = self._flat(parameter, piece.dtype)
        mine.copy_(piece)
        self._comm.all_gather(flat, "a parameter at construction").wait()
        return flat[: parameter.numel()].view(parameter.shape).to(piece.device)

    def on_guarded_use(self, parameters: list[Tensor], func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Gather parameters that initialisation code uses, and call it."""
        self._shard_open()
        for parameter in dict.fromkeys(p for p in parameters if isinstance(p, Parameter)):
            value = self.whole(parameter)
            unguard(parameter)
            parameter.data = value
            self._open.append(parameter)
        return func(*args, **kwargs)


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros (1D). Large ones are not on the heap, where slices that are kept between freed parameters fragment it."""
    if numel * dtype.itemsize < _LARGE:
        return torch.zeros(numel, dtype=dtype, device=device)
    return FlatStorage(numel, dtype, device).tensor


class Materializer:
    """Gives the engine the values of ordinary, meta-device and sharded parameters.

    ``saved``: reads the values of parameters that are not to be taken from the module.
    """

    def __init__(
        self, root: nn.Module, comm: Comm, saved: Mapping[Parameter, Callable[[], Tensor]] | None = None
    ) -> None:
        self._device, self._modules, self._saved = comm.device, dict(root.named_modules()), saved or {}
        self._named = list(self._modules.items())

    @cached_property  # before the first parameter is filled, and never if none is to be
    def _owners(self) -> dict[Parameter, list[int]]:
        """Of parameters on the meta device: the numbers in ``_named`` of their modules."""
        owners: dict[Parameter, list[int]] = {}
        for number, (_, module) in enumerate(self._named):
            for parameter in module.parameters(recurse=False):
                if parameter.is_meta:
                    owners.setdefault(parameter, []).append(number)
        return owners

    def fetch(self, parameter: Parameter) -> Tensor:
        """The full value of ``parameter``. Collective if it was sharded at construction."""
        if parameter in self._saved:
            return self._saved[parameter]()
        owner = owner_of(parameter)
        return owner.whole(parameter) if isinstance(owner, ConstructionSharder) else parameter.detach()

    def fill(self, parameters: Iterable[Parameter]) -> None:
        """Initialise the ``parameters`` that are on the meta device, and their modules' buffers.

        Calls the module's ``reset_parameters``, then ``_init_weights(module)`` of the nearest parent that has it, as in
        nanoGPT and transformers.

        Raises:
            RuntimeError: a module's parameters or buffers were not filled.
        """
        unfilled = set[int]()
        for parameter in parameters:
            if parameter in self._saved:
                _free(parameter, self._device)
            elif parameter.is_meta:
                unfilled.update(self._owners[parameter])
        for number in sorted(unfilled):
            self._fill_module(*self._named[number])
        if unfilled:
            gc.collect(0)  # cycles with tensors that initialisation left behind: it is paused (build.py)

    def fill_buffers(self) -> None:
        """Initialise the meta buffers of modules without parameters."""
        for path, module in self._modules.items():
            if any(b.is_meta for b in module.buffers(recurse=False)):
                self._fill_module(path, module)

    @torch.no_grad()
    def _fill_module(self, path: str, module: nn.Module) -> None:
        made: dict[str, Tensor] = {}
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in tensors:
            if not tensor.is_meta:
                continue
            value = torch.full(tensor.shape, _unset(tensor.dtype), dtype=tensor.dtype, device=self._device)
            if isinstance(tensor, Parameter):
                torch.utils.swap_tensors(tensor, Parameter(value, requires_grad=tensor.requires_grad))
                made[name] = tensor
            else:
                made[name] = value
                setattr(module, name, value)
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
        parents = ["", *accumulate(path.split("."), "{}.{}".format)]
        for parent in reversed(parents):  # the module itself, then its parents from the nearest to the root
            initializer = getattr(self._modules[parent], "_init_weights", None)
            if callable(initializer):
                initializer(module)
                break
        left = [name for name, value in made.items() if _is_unset(value)]
        if left:
            raise RuntimeError(
                f"{path or 'the root module'} ({type(module).__name__}) was built on the meta device and "
                f"{', '.join(map(repr, left))} got no values: give the class a `reset_parameters()` that fills its "
                "parameters and buffers, or build it without `empty_init=True`."
            )


@torch.no_grad()
def _free(parameter: Parameter, device: torch.device) -> None:
    """Free the values of a parameter, which has to be on the device of those that it gets."""
    if parameter.is_meta:
        empty = Parameter(torch.empty(0, dtype=parameter.dtype, device=device), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, empty)
    elif not is_guarded(parameter):
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def _unset(dtype: torch.dtype) -> float:
    """The value by which elements that were not initialised are recognised; there is none for bool."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _is_unset(tensor: Tensor) -> bool:
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return False
    unset = _unset(tensor.dtype)
    return bool((tensor.isnan() if math.isnan(unset) else tensor == unset).all())
