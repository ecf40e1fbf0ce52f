"""The values that an engine gets: of ordinary, sharded and saved parameters, and of modules on the meta device.

Those are filled unit by unit, so that no rank ever holds all of a model; see initialize.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from lt_zero.common.compat import replace_tensor
from lt_zero.core.engine.guard import is_guarded, owner_of
from lt_zero.core.engine.parts import Parts, Unjoined

if TYPE_CHECKING:
    from lt_zero.core.engine.initialize import ModuleInitializer


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


@runtime_checkable
class Builder(Protocol):
    """Owner of parameters that were sharded while their module was built (construction.py), with their values."""

    def whole(self, parameters: Sequence[Parameter]) -> Iterator[Tensor]: ...

    def gathered(self, parameters: Sequence[Parameter], write: bool) -> AbstractContextManager[None]: ...


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
        self._device = device
        self._modules = dict(root.named_modules())
        self._saved = saved or {}
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

    @cached_property
    def _initializer(self) -> ModuleInitializer:
        """The filler of modules on the meta device, of which most models have none."""
        from lt_zero.core.engine.initialize import ModuleInitializer

        return ModuleInitializer(self._modules, self._device, self._saved, self._parts)

    def fetch(self, parameters: Iterable[Parameter]) -> Iterator[Tensor]:
        """Yield this rank's values of ``parameters``, one by one. Collective if they were sharded at construction."""
        sharded: dict[Builder, list[Parameter]] = {}
        for parameter in parameters:
            owner = owner_of(parameter)
            if isinstance(owner, Builder) and parameter not in self._saved:
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
            self._initializer.fill(path, module, fresh)
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
                self._initializer.fill(path, module, set())
