"""The items of a checkpoint of Fabric: modules, optimizers and others, by the keys of ``fabric.save``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lt_zero.checkpoint.native.load import as_lightning, entries_of, loss_scale
from lt_zero.checkpoint.native.load import stepped as has_stepped
from lt_zero.checkpoint.native.rank_state import RANK_BUFFERS, RESIDUALS
from lt_zero.checkpoint.native.save import FABRIC, LT_ZERO, TRAINED_WEIGHTS
from lt_zero.checkpoint.source import CheckpointSource
from lt_zero.common.errors import CheckpointError
from lt_zero.session.checkpoints import Progress

BESIDE = "lt_zero_fabric"  # key, in a single file, of what is in no item


@dataclass
class Opened:
    """Content of a checkpoint by the keys of ``fabric.save``; tensors of a directory are read on demand.

    ``modules``, ``optimizers``: keys; ``left_out``: names of frozen weights that were not saved, by module;
    ``trained``: weights that training goes on with, by module, where they are not those in ``saved``; ``stepped``: keys
    of optimizers whose weights are those of a step, None: of those with states.
    """

    saved: dict[str, Any]
    modules: Sequence[str] = ()
    optimizers: Sequence[str] = ()
    left_out: Mapping[str | None, Sequence[str]] = field(default_factory=dict)
    trained: Mapping[str | None, Mapping[str, Any]] = field(default_factory=dict)
    stepped: Collection[str] | None = None
    loss_scale: dict[str, Any] = field(default_factory=dict)
    residuals: Any = None
    rank_buffers: Any = None
    prefixes: Mapping[str, str] = field(default_factory=dict)  # of names of parameters, by module

    def progress(self, stepped: bool) -> Progress:
        """Progress of an optimizer's engine, without buffers, which are restored with its module."""
        return Progress(stepped, self.residuals, loss_scale=self.loss_scale)

    def only(self, value: nn.Module | Optimizer, path: str) -> str:
        """The key of the only module, or optimizer.

        Raises:
            CheckpointError: there are several, or none.
        """
        kind, keys = ("module", self.modules) if isinstance(value, nn.Module) else ("optimizer", self.optimizers)
        if len(keys) != 1:
            raise CheckpointError(
                f"{path} has {len(keys)} {kind}s ({', '.join(keys) or 'none'}), and fabric.load_raw takes one. "
                f"Name it: fabric.load({path!r}, {{KEY: {kind}}}, strict=False)."
            )
        return keys[0]


def open_directory(source: CheckpointSource, weights_only: bool | None) -> Opened:
    """Content of a directory; if Fabric did not write it, the module is ``model``."""
    found = as_lightning(source, weights_only)
    states, frozen = found.get("optimizer_states", []), found.get(LT_ZERO, {}).get("frozen_left_out", [])
    names = ["optimizer"] if len(states) == 1 else [f"optimizer_{number}" for number in range(len(states))]
    here = dict(entries_of(found, FABRIC))
    foreign = not here
    if foreign:
        here = {"modules": {"model": ""}, "optimizers": dict.fromkeys(names, ""), "rest": {}}
        here["stepped"] = names if has_stepped(found) else []
    saved, left_out = dict(here["rest"]), {}
    for key, prefix in here["modules"].items():
        whole = found["state_dict"].items()
        saved[key] = {name.removeprefix(prefix): value for name, value in whole if name.startswith(prefix)}
        left_out[key] = [name.removeprefix(prefix) for name in frozen if name.startswith(prefix)]
    for (key, prefix), state in zip(here["optimizers"].items(), states, strict=True):
        saved[key] = _without_prefix(state, prefix)
    modules, optimizers = list(here["modules"]), list(here["optimizers"])
    trained: dict[str | None, Mapping[str, Any]] = {}
    if TRAINED_WEIGHTS in found and foreign:
        trained["model"] = found[TRAINED_WEIGHTS]["weights"]
    return Opened(
        saved,
        modules,
        optimizers,
        left_out,
        trained,
        stepped=here.get("stepped"),  # earlier versions did not save it
        loss_scale=loss_scale(found),
        residuals=found.get(RESIDUALS),
        rank_buffers=found.get(RANK_BUFFERS),
        prefixes=here["modules"],
    )


def opened_file(saved: dict[str, Any]) -> Opened:
    """Content of a single file of this strategy or of another one of Fabric's."""
    own = saved.pop(BESIDE, {})
    return Opened(
        saved,
        left_out=own.get("frozen_left_out", {}),  # earlier versions did not leave them out
        stepped=own.get("stepped"),
        loss_scale=own.get("loss_scale", {}),
        residuals=own.get(RESIDUALS),
    )


def prefixes_of(keys: Sequence[str]) -> dict[str, str]:
    """Prefixes of parameter names, by the key of their module: the key, if there are several modules."""
    if len(keys) < 2:
        return dict.fromkeys(keys, "")
    made = {key: f"{key}." for key in keys}
    nested = any(one != other and one.startswith(other) for one in made.values() for other in made.values())
    return {key: f"{number}." for number, key in enumerate(keys)} if nested else made


def _without_prefix(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """An optimizer's state, with parameters named as in their module."""
    groups = [{**g, "params": [name.removeprefix(prefix) for name in g["params"]]} for g in state["param_groups"]]
    return {**state, "param_groups": groups, "state": {n.removeprefix(prefix): v for n, v in state["state"].items()}}
