"""Parameters that are replaced when a module is cut: torch's ``parallelize_module`` makes new ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary


class Replaced:
    """Map from parameters that optimizers may hold since before the module was cut to those that replaced them."""

    def __init__(self) -> None:
        # Weak references to those of now would keep torch from swapping them, when the engine fills them.
        self._now: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @contextmanager
    def noting(self, module: nn.Module) -> Iterator[None]:
        """Context in which parameters of ``module`` are replaced by others of their names."""
        before = dict(module.named_parameters(remove_duplicate=False))
        yield
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter is not before[name]:
                self._now[before[name]] = parameter

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Let optimizers that have taken no step have the parameters of now."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [p if p in optimizer.state else self._of(p) for p in group["params"]]

    def _of(self, parameter: nn.Parameter) -> nn.Parameter:
        found: nn.Parameter = self._now.get(parameter, parameter)
        return found
