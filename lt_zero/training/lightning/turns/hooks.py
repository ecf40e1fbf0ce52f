"""The module's hooks around batches in rounds: they are called for each micro-batch, with its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden


class TurnHook:
    """Stands in a module for one of its hooks, and hands Lightning's call to ``call``, with the hook itself.

    Copies of the module have the hook of its class in its place.
    """

    def __init__(self, module: pl.LightningModule, name: str, call: Callable[..., Any]) -> None:
        self._module = module
        self._name = name
        self._call = call
        self.__wrapped__ = getattr(module, name)  # Lightning looks there whether the user has written the hook

    def __call__(self, *args: Any) -> Any:
        return self._call(self.__wrapped__, *args)

    def __reduce__(self) -> Any:
        # The module is copied, or read from a pickle, before its attributes: then this finds the method of its class.
        return getattr, (self._module, self._name)


class TurnHooks:
    """Replaces hooks of a module that its user has written, until ``remove``.

    Args:
        module: of the user.
        calls: by the names of hooks, what to call in their place, with the hook as the first argument.
    """

    def __init__(self, module: pl.LightningModule, calls: Iterable[tuple[str, Callable[..., Any]]]) -> None:
        self._module = module
        self._before: dict[str, Any] = {}
        self.names: set[str] = set()
        for name, call in calls:
            if is_overridden(name, module):
                self.names.add(name)
                if name in vars(module):
                    self._before[name] = vars(module)[name]
                vars(module)[name] = TurnHook(module, name, call)

    def remove(self) -> None:
        """Give the module its own hooks back."""
        for name in self.names:
            if name in self._before:
                vars(self._module)[name] = self._before[name]
            else:
                vars(self._module).pop(name, None)
        self.names.clear()
