"""``lt_zero.as_pytorch_lightning``: ``import pytorch_lightning`` is answered by the package ``lightning``.

``lightning`` and ``pytorch_lightning`` are one code base, published twice: each class exists once per package, and
neither Trainer takes a strategy of the other one. Scripts that import ``pytorch_lightning`` get ``lightning.pytorch``
under that name, so their modules, callbacks and Trainers are of the package that lt_zero extends.

A name of a module is replaced while it is imported: Python lets a module put another object into ``sys.modules`` under
its name, so there is no second copy of anything.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_SAME = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


class _AliasFinder(MetaPathFinder, Loader):
    """Finds the modules of ``pytorch_lightning`` and ``lightning_fabric`` in the package ``lightning``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        other = _other(fullname)
        if other is None or importlib.util.find_spec(other) is None:
            return None
        return ModuleSpec(fullname, self, origin=other, is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        """Python makes an empty module, which ``exec_module`` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        other = _other(module.__name__)
        assert other is not None
        sys.modules[module.__name__] = importlib.import_module(other)


def _other(name: str) -> str | None:
    """The name of a module in the package ``lightning``; None: it is of no package that has the same code."""
    package, dot, rest = name.partition(".")
    return f"{_SAME[package]}{dot}{rest}" if package in _SAME else None


def as_pytorch_lightning() -> ModuleType:
    """Let ``lightning`` answer ``import pytorch_lightning`` and all imports from it, from now on; returns that module.

    Call it before the first import of ``pytorch_lightning``, and of packages that import it: ``import lt_zero;
    lt_zero.as_pytorch_lightning()``. Its Trainer, modules and callbacks are then those of ``lightning``, which take the
    strategies of lt_zero. ``lightning_fabric`` is answered likewise. The version is that of ``lightning``.

    Raises:
        RuntimeError: ``pytorch_lightning`` or ``lightning_fabric`` itself is imported already.
    """
    for package, other in _SAME.items():
        loaded = sys.modules.get(package)
        if loaded is not None and loaded is not sys.modules.get(other):
            raise RuntimeError(
                f"The package {package} is imported already, from {getattr(loaded, '__file__', None)}. Call "
                "lt_zero.as_pytorch_lightning() in the first lines of the script, before the import of "
                f"{package} and of packages that import it; or import {other} in its place."
            )
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AliasFinder())
    return importlib.import_module("pytorch_lightning")
