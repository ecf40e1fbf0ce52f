"""The names of the strategies in Lightning's Trainer and Fabric, and an error for names that are close to them.

Lightning makes whatever its registries have under a name. A name that users of DeepSpeed and other packages try would
end in Lightning's list of its own strategies, or in the advice to install DeepSpeed, so such names are registered as
well, with a constructor that raises the error that says what to write. The names of Lightning's DeepSpeedStrategy
stay Lightning's where DeepSpeed is installed; without it they can only raise an error, and they raise this one.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

from lt_zero.common.errors import ConfigError

_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_OFFLOAD = {
    name: tuple(f"zero_optimization.offload_{what}.device=cpu" for what in states)
    for name, states in {
        "zero_1_offload": ("optimizer",),
        "zero_2_offload": ("optimizer",),
        "zero_3_offload": ("optimizer", "param"),
    }.items()
}
_SPELLINGS = ("zero{}", "zero-{}", "zero_stage{}", "zero_stage_{}", "zero-stage-{}", "stage{}", "stage_{}")
_FILES = "{device: nvme, nvme_path: /local_nvme}"
_IN_FILES = ", ".join(f'"zero_optimization.offload_{what}={_FILES}"' for what in ("optimizer", "param"))
_DEEPSPEED = {
    "deepspeed": '"zero_2"',  # its default
    **{f"deepspeed_stage_{stage}": f'"zero_{stage}"' for stage in range(4)},
    **{f"deepspeed_stage_{stage}_offload": f'"zero_{stage}_offload"' for stage in (1, 2, 3)},
    "deepspeed_stage_3_offload_nvme": f"ZeroStrategy(stage=3, overrides=[{_IN_FILES}])",
}


def register_strategies() -> None:
    """Make ``strategy="zero_3"``, ``"zero_2_offload"``, ... known to Lightning's Trainer and Fabric."""
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    refused = [(name, text) for name, text in _refusals() if name not in _DEEPSPEED or not _has_deepspeed()]
    for registry, make in ((StrategyRegistry, _for_trainer), (STRATEGY_REGISTRY, _for_fabric)):
        for name, description, options in _strategies():
            registry.register(name, make, description, override=True, **options)
        for name, text in refused:
            registry.register(name, partial(_refuse, text), f"no strategy: {text}", override=True)
    _refuse_in("pytorch_lightning", "StrategyRegistry", StrategyRegistry)
    _refuse_in("lightning_fabric", "STRATEGY_REGISTRY", STRATEGY_REGISTRY)


def _refuse_in(package: str, attribute: str, known: Any) -> None:
    """Let the names raise an error in a package with Lightning's code that is not ``lightning``, if it is imported.

    ``known``: the registry of ``lightning``, which is also that of ``package`` after ``as_pytorch_lightning``.
    """
    registry = getattr(sys.modules.get(f"{package}.strategies"), attribute, None)
    if registry is None or registry is known:
        return
    for name, description, _ in _strategies():
        text = (
            f'strategy="{name}" is for the package lightning, and this is {package}. Call '
            f"lt_zero.as_pytorch_lightning() in the first lines of the script, before the import of {package}."
        )
        registry.register(name, partial(_refuse, text), description, override=True)


def _strategies() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The names, each with a description and the arguments of the strategy."""
    for stage, (suffix, start_method) in itertools.product(range(4), _START_METHODS.items()):
        description = f"ZeRO stage {stage}, processes started with {start_method}"
        yield f"zero_{stage}{suffix}", description, {"stage": stage, "start_method": start_method}
    for name, overrides in _OFFLOAD.items():
        stage = int(name.split("_")[1])
        yield name, f"ZeRO stage {stage}, states in host memory", {"stage": stage, "overrides": overrides}


def _refusals() -> Iterator[tuple[str, str]]:
    """Names that are close to one of a strategy, each with the text of its error."""
    for stage, spelling, suffix in itertools.product(range(4), _SPELLINGS, ("", "_offload")):
        name, meant = spelling.format(stage) + suffix, f"zero_{stage}{suffix}"
        if suffix == "" or meant in _OFFLOAD:
            yield name, f'strategy="{name}" is no name of a strategy. Write strategy="{meant}".'
    for name in ("zero", "lt_zero", "zerostrategy"):
        text = f'strategy="{name}" says no stage. Write strategy="zero_3", or "zero_0" to "zero_2".'
        yield name, text
    for name, meant in _DEEPSPEED.items():
        yield (
            name,
            f'strategy="{name}" needs DeepSpeed, which is not installed. Write strategy={meant}, which shards the same '
            "states without it.",
        )


def _has_deepspeed() -> bool:
    """True if DeepSpeed itself is installed; a folder of that name is none."""
    if "deepspeed" in sys.modules:
        return True
    spec = importlib.util.find_spec("deepspeed")
    return spec is not None and spec.origin is not None


def _for_trainer(**options: Any) -> Any:
    from lt_zero.training.lightning.strategy import ZeroStrategy

    return ZeroStrategy(**options)


def _for_fabric(**options: Any) -> Any:
    from lt_zero.training.lightning.fabric import FabricZeroStrategy

    return FabricZeroStrategy(**options)


def _refuse(text: str) -> NoReturn:
    raise ConfigError.about("strategy", text)
