"""Parameters that no rank ever holds all of: meta-device modules filled unit by unit, and cutting at construction.

Note [Cutting at construction]
    Inside ``ConstructionSharder`` a module's parameters are cut as soon as the module is registered in its parent:
    each rank keeps 1/world of each and a sentinel stands in (guard.py). Initialisation code that comes later
    (``self.apply(init)``, ``module.weight.data.normal_()``) meets the guard, which puts the parameter together again,
    lets the code run on the real values, and cuts it when the next one is asked for. Every random number is drawn on
    full shapes in the original order, so the result equals construction in one process bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
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
from lt_zero.engine.find_units import clean_name
from lt_zero.engine.guard import guard, is_guarded, owner_of, sentinel, unguard
from lt_zero.engine.layout import plan_bucket


@contextmanager
def parameters_in(dtype: torch.dtype) -> Generator[None, None, None]:
    """Context in which fp32 parameters become ``dtype`` as soon as a module has them; ties stay ties."""

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


class ConstructionSharder:
    """Context in which modules are built with their parameters cut over the ranks of ``comm``.

    Args:
        comm: the collectives; every rank must build the same modules.
        threshold: parameters with fewer elements stay whole.
    """

    def __init__(self, comm: Comm, threshold: int = 0) -> None:
        self._comm, self._threshold = comm, threshold
        self._slices: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> this rank's 1D slice
        self._open: list[Parameter] = []  # whole again for initialisation code, cut at the next opportunity
        self._handle: Any = None
        # Strong: the cut parameters keep this object, which has their values, until the engine takes them over.
        self._owner: Callable[[], ConstructionSharder | None] = lambda: self

    def __enter__(self) -> ConstructionSharder:
        self._handle = register_module_module_registration_hook(self._registered)
        return self

    def __exit__(self, *exc: object) -> None:
        self._handle.remove()
        if exc[0] is None:
            self._close()

    def _registered(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        self._close()
        for parameter in module.parameters() if module is not None else ():
            if parameter.device.type != "meta" and not is_guarded(parameter) and parameter.numel() >= self._threshold:
                self._cut(parameter)

    def _close(self) -> None:
        while self._open:
            self._cut(self._open.pop())

    @torch.no_grad()
    def _cut(self, parameter: Parameter) -> None:
        shape = tuple(parameter.shape)
        layout = plan_bucket([("", shape)], self._comm.world)
        flat = torch.zeros(layout.numel, dtype=parameter.dtype, device=self._comm.device)
        flat[: parameter.numel()].copy_(parameter.reshape(-1))
        self._comm.broadcast(flat, "a parameter at construction")  # ranks may have drawn different numbers
        lo, hi = layout.shard(self._comm.rank)
        self._slices[parameter] = flat[lo:hi].to(parameter.device, copy=True)
        parameter.data = sentinel(parameter, shape)
        guard(parameter, self._owner)

    @torch.no_grad()
    def whole(self, parameter: Parameter) -> Tensor:
        """The full value of a cut parameter. Collective, unless the last one that was used is still whole."""
        if not is_guarded(parameter):
            return parameter.detach()
        piece: Tensor = self._slices[parameter]
        layout = plan_bucket([("", tuple(parameter.shape))], self._comm.world)
        flat = torch.empty(layout.numel, dtype=piece.dtype, device=self._comm.device)
        lo, hi = layout.shard(self._comm.rank)
        flat[lo:hi].copy_(piece)
        self._comm.all_gather(flat, "a parameter at construction").wait()
        return flat[: parameter.numel()].view(parameter.shape).to(piece.device, copy=True)

    def hand_over(self, parameter: Parameter) -> Tensor:
        """As ``whole``, for the last time: this rank's slice is given up."""
        value = self.whole(parameter)
        self._slices.pop(parameter, None)
        return value

    def on_guarded_use(self, parameters: list[Tensor], func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Initialisation code wants values. See Note [Cutting at construction]."""
        wanted = [p for p in parameters if isinstance(p, Parameter)]
        self._close()
        for parameter in dict.fromkeys(wanted):
            value = self.whole(parameter)
            unguard(parameter)
            parameter.data = value
            self._open.append(parameter)
        return func(*args, **kwargs)


class Materializer:
    """Gives the engine the values of parameters, wherever they are."""

    def __init__(self, root: nn.Module, comm: Comm) -> None:
        self._root, self._comm = root, comm
        self._names = {p: clean_name(n) for n, p in root.named_parameters()}
        self._paths = {m: n for n, m in root.named_modules()}

    def fetch(self, parameter: Parameter) -> Tensor:
        """The full value of ``parameter``. Collective if it was cut at construction."""
        owner = owner_of(parameter)
        if isinstance(owner, ConstructionSharder):
            return owner.hand_over(parameter)
        return parameter.detach()

    def fill(self, parameters: Iterable[Parameter]) -> None:
        """Make the values of those of the ``parameters`` that are on the meta device, and of their modules' buffers.

        A module fills its own parameters in ``reset_parameters``; afterwards ``_init_weights(module)`` of the nearest
        parent that has such a method is called, as in nanoGPT and transformers.

        Raises:
            RuntimeError: a module's parameters or buffers were not filled.
        """
        wanted = {p for p in parameters if p.is_meta}
        if not wanted:
            return
        for module, path in self._paths.items():
            if any(p in wanted for p in module.parameters(recurse=False)):
                self._fill_module(module, path)

    def fill_buffers(self) -> None:
        """Make the values of meta buffers of modules that have no parameters."""
        for module, path in self._paths.items():
            if any(b.is_meta for b in module.buffers(recurse=False)):
                self._fill_module(module, path)

    @torch.no_grad()
    def _fill_module(self, module: nn.Module, path: str) -> None:
        made: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                value = _unset(parameter, self._comm.device)
                torch.utils.swap_tensors(parameter, Parameter(value, requires_grad=parameter.requires_grad))
                made[name] = parameter
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                made[name] = _unset(buffer, self._comm.device)
                setattr(module, name, made[name])
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
        initializer = self._initializer(path)
        if initializer is not None:
            initializer(module)
        left = [name for name, value in made.items() if _is_unset(value)]
        if left:
            raise RuntimeError(
                f"{path or 'the root module'} ({type(module).__name__}) was built on the meta device and "
                f"{', '.join(map(repr, left))} got no values: give the class a `reset_parameters()` that fills its "
                "parameters and buffers, or build it without `empty_init=True`."
            )

    def _initializer(self, path: str) -> Callable[[nn.Module], None] | None:
        parts = path.split(".") if path else []
        for depth in range(len(parts), -1, -1):
            module = self._root.get_submodule(".".join(parts[:depth]))
            initializer = getattr(module, "_init_weights", None)
            if callable(initializer):
                return initializer  # type: ignore[no-any-return]
        return None


def _unset(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape and dtype that can be told from one that somebody filled."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return torch.full(tensor.shape, float("nan"), dtype=tensor.dtype, device=device)
    fill = False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min
    return torch.full(tensor.shape, fill, dtype=tensor.dtype, device=device)


def _is_unset(tensor: Tensor) -> bool:
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().all())
    return bool((tensor == torch.iinfo(tensor.dtype).min).all())
