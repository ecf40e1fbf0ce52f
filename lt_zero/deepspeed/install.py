"""``lt_zero.as_deepspeed``: ``import deepspeed``, and imports from it, are answered by lt_zero."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from types import ModuleType
from typing import Any

from lt_zero.deepspeed.names import ROOT, answers_of, table, unknown


class DeepSpeedModule(ModuleType):
    """A module of DeepSpeed, whose names are those of the table (names.py)."""

    def __getattr__(self, name: str) -> Any:
        module = self.__name__
        if name == "__all__":
            return self._public()
        answers = answers_of(module) or {}
        answer = answers.get(name)
        if answer is None and f"{module}.{name}" in table():
            return importlib.import_module(f"{module}.{name}")
        if answer is None and not name.startswith("__"):
            answer = answers.get("*")
        if answer is None:
            raise AttributeError(unknown(f"{module}.{name}"))
        try:
            value = answer.value(module, name)
        except AttributeError:
            raise AttributeError(unknown(f"{module}.{name}")) from None
        setattr(self, name, value)
        return value

    def _public(self) -> list[str]:
        """The names that ``import *`` means: those of the table, of the module that answers for all others, modules."""
        module, answers = self.__name__, answers_of(self.__name__) or {}
        found = {name for name in answers if name != "*"}
        found |= {name.removeprefix(f"{module}.") for name in table() if name.rpartition(".")[0] == module}
        if (every := answers.get("*")) is not None and every.target:
            other = importlib.import_module(every.target.partition(":")[0])
            found |= set(getattr(other, "__all__", None) or dir(other))
        return sorted(name for name in found if not name.startswith("_"))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in answers_of(self.__name__) or {} if name != "*")})


class _Finder(MetaPathFinder, Loader):
    """Finds and makes the modules of DeepSpeed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname.split(".")[0] != ROOT:
            return None
        if answers_of(fullname) is None:
            # Also for names: an import tries a module where a package has no such name. With the full name Python would
            # drop this error then, and its text.
            raise ModuleNotFoundError(unknown(fullname), name=ROOT)
        return ModuleSpec(fullname, self, origin="lt_zero", is_package=True)

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        """The package's metadata, as ``importlib.metadata`` asks finders for it."""
        if str(getattr(context, "name", None)).lower() == ROOT:
            from lt_zero.deepspeed.huggingface import DeepSpeedDistribution  # loads the engine

            yield DeepSpeedDistribution(importlib.import_module(ROOT).__version__)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return DeepSpeedModule(spec.name, f"Stands for {spec.name}; see lt_zero.as_deepspeed.")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names are looked up when a script asks for them."""


def as_deepspeed() -> ModuleType:
    """Let lt_zero answer ``import deepspeed`` and all imports from it, from now on; returns that module.

    Call it before the first import of DeepSpeed: ``import lt_zero; lt_zero.as_deepspeed()``. Names with a counterpart
    are lt_zero's; others can be imported, and their use is an error that says what to do instead.

    Raises:
        RuntimeError: DeepSpeed itself is imported already.
    """
    loaded = sys.modules.get(ROOT)
    if loaded is not None and not isinstance(loaded, DeepSpeedModule):
        raise RuntimeError(
            f"DeepSpeed itself is imported already, from {getattr(loaded, '__file__', None)}. Call "
            "lt_zero.as_deepspeed() in the first lines of the script, before the import of deepspeed and of packages "
            "that import it."
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        _forget_without_deepspeed()
    return importlib.import_module(ROOT)


def _forget_without_deepspeed() -> None:
    """Let transformers and Accelerate be imported again if torchmetrics has imported them, and they found no DeepSpeed.

    Lightning imports torchmetrics, and that transformers, which in some versions imports Accelerate; on import this
    decides for good whether there is a DeepSpeed. What the program itself has imported before stays.
    """
    utils = sys.modules.get("accelerate.utils")
    if utils is None or hasattr(utils, "DeepSpeedEngineWrapper"):
        return
    # A module takes its place in sys.modules when its import ends: a package after all that it imports. So what
    # torchmetrics has imported stands between the first of its own modules and itself.
    places = {name: place for place, name in enumerate(sys.modules)}
    found = [name for name in places if name.partition(".")[0] in ("accelerate", "transformers")]
    began = min((place for name, place in places.items() if name.startswith("torchmetrics.")), default=len(places))
    if began < places[found[0]] < places.get("torchmetrics", 0):
        for name in found:
            del sys.modules[name]
