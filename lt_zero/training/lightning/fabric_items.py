"""The items of a checkpoint of Fabric: modules, optimizers and others, by the keys of ``fabric.save``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lt_zero.checkpoint.native.full_states import full_optimizer_state
from lt_zero.checkpoint.native.load import as_lightning, engine_of, entries_of, loss_scale, with_names
from lt_zero.checkpoint.native.load import stepped as has_stepped
from lt_zero.checkpoint.native.pieces import optimizer_fragments, parameter_names
from lt_zero.checkpoint.native.rank_state import (
    FEATURES,
    RANK_BUFFERS,
    RESIDUALS,
)
from lt_zero.checkpoint.native.save import FABRIC, LT_ZERO, TRAINED_WEIGHTS
from lt_zero.checkpoint.native.values_of_ranks import OF_RANKS, own_values, values_of_ranks
from lt_zero.checkpoint.open import checked_file, is_directory, of_content, opened_source, reading
from lt_zero.checkpoint.same import OpenedCopy
from lt_zero.checkpoint.source import CheckpointSource
from lt_zero.common.compat import never_a_graph
from lt_zero.common.errors import CheckpointError
from lt_zero.config import ZeroConfig
from lt_zero.core.comm.world import World
from lt_zero.core.engine.engine import Engine
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.core.step.sharded_optimizer import ShardedOptimizer
from lt_zero.training.checkpoints import beside, frozen_names, weights_to_save, whole_weights
from lt_zero.training.lightning.checkpoint_plugin import local_file, write_file
from lt_zero.training.restore import Contents, ModuleContents, restore
from lt_zero.training.session import Session

log = logging.getLogger("lt_zero")

BESIDE = "lt_zero_fabric"  # key, in a single file, of what is in no item


class ShardedModule(nn.Module):
    """Module that Fabric calls in place of the user's. Methods marked as forward methods pass through it, too."""

    def __init__(
        self, module: nn.Module, engine: Engine, within: Callable[[nn.Module, bool], AbstractContextManager[None]]
    ) -> None:
        super().__init__()
        self.module = module
        self.engine = engine
        self._within = within

    # ``fabric.setup`` of a compiled module compiles this one: the graph is that of the forward inside.
    @never_a_graph
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        trains = self.module.training and torch.is_grad_enabled()
        with self.engine.ends_interrupted(), self._within(self.module, trains):
            return self.module(*args, **kwargs)


@dataclass
class Opened:
    """Content of a checkpoint by the keys of ``fabric.save``; tensors of a directory are read on demand.

    Attributes:
        saved: by these keys.
        own: what is in no item, as a single file has it. Each entry may be missing: "stepped" has the keys of
            optimizers whose weights are those of a step, without it they are those with states; "modules" the prefixes
            of parameters' names, by module.
        trained: weights that training goes on with, by module, where they are not those in ``saved``.
    """

    saved: dict[str, Any]
    own: Mapping[str, Any]
    trained: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def only(self, value: nn.Module | Optimizer, path: str) -> str:
        """The key of the only module, or optimizer.

        Raises:
            CheckpointError: there are several, or none.
        """
        kind = "module" if isinstance(value, nn.Module) else "optimizer"
        keys: list[str] = list(self.own[f"{kind}s"])
        if len(keys) != 1:
            raise CheckpointError(
                f"{path} has {len(keys)} {kind}s ({', '.join(keys) or 'none'}), and fabric.load_raw takes one. "
                f"Name it: fabric.load({path!r}, {{KEY: {kind}}}, strict=False)."
            )
        return keys[0]


def open_directory(source: CheckpointSource, weights_only: bool | None) -> Opened:
    """Content of a directory; if Fabric did not write it, the module is ``model``."""
    found = as_lightning(source, weights_only)
    states = found.get("optimizer_states", [])
    frozen = found.get(LT_ZERO, {}).get("frozen_left_out", [])
    names = ["optimizer"] if len(states) == 1 else [f"optimizer_{number}" for number in range(len(states))]
    here = dict(entries_of(found, FABRIC))
    foreign = not here
    if foreign:
        here = {"modules": {"model": ""}, "optimizers": dict.fromkeys(names, ""), "rest": {}}
        here["stepped"] = names if has_stepped(found) else []
    saved = dict(here["rest"])
    left_out = {}
    for key, prefix in here["modules"].items():
        whole = found["state_dict"].items()
        saved[key] = {name.removeprefix(prefix): value for name, value in whole if name.startswith(prefix)}
        left_out[key] = [name.removeprefix(prefix) for name in frozen if name.startswith(prefix)]
    for (key, prefix), state in zip(here["optimizers"].items(), states, strict=True):
        saved[key] = with_names(state, partial(_without_prefix, prefix))
    own = {**here, **{key: found[key] for key in (RESIDUALS, RANK_BUFFERS, FEATURES) if key in found}}
    own |= {"frozen_left_out": left_out, "loss_scale": loss_scale(found)}
    has_averages = foreign and TRAINED_WEIGHTS in found
    return Opened(saved, own, {"model": found[TRAINED_WEIGHTS]["weights"]} if has_averages else {})


def prefixes_of(keys: Sequence[str]) -> dict[str, str]:
    """Prefixes of parameter names, by the key of their module: the key, if there are several modules."""
    if len(keys) < 2:
        return dict.fromkeys(keys, "")
    made = {key: f"{key}." for key in keys}
    nested = any(one != other and one.startswith(other) for one in made.values() for other in made.values())
    return {key: f"{number}." for number, key in enumerate(keys)} if nested else made


@dataclass(frozen=True)
class FabricItems:
    """Saves items, and restores them.

    Attributes:
        world: the ranks that do so together.
        loss_scale: of the run.
        checkpoint_io: for checkpoints of one file.
    """

    config: ZeroConfig
    world: World
    session: Session
    loss_scale: LossScaleController
    checkpoint_io: CheckpointIO

    def write(
        self, path: str, state: Mapping[str, Any], options: Any, kept: Mapping[str, Callable[[str, Any], bool]]
    ) -> None:
        """Rank 0 writes one file. Collective."""
        modules = {key: value for key, value in state.items() if isinstance(value, ShardedModule)}
        frozen = {key: self.frozen(module) for key, module in modules.items()}
        own = {key: whole_weights(module.engine, "Fabric.save", frozen[key]) for key, module in modules.items()}
        own |= {key: optimizer_state(o) for key, o in state.items() if isinstance(o, Optimizer)}
        parts = self._parts(state, kept, own)
        plugin = self.checkpoint_io
        found = beside(self._prefixes(state), sharded=False)
        if found.pop(RANK_BUFFERS, None) is not None and self.world.rank == 0:
            log.warning("checkpoint.format: full keeps rank 0's buffers only, and other ranks have others.")
        differing = self._of_ranks(parts, own)
        prefixes = {"modules": prefixes_of(list(modules))} if FEATURES in found else {}
        parts[BESIDE] = {**self._progress(state), **found, **differing, **prefixes, "frozen_left_out": frozen}
        with self.world.agree(f"saving {path}", CheckpointError):
            if self.world.rank > 0:
                return
            if os.path.isdir(path):
                raise IsADirectoryError(f"The checkpoint path {path!r} is a directory. Name a file, or remove it.")
            write_file(plugin, parts, path, options)

    def _parts(
        self, state: Mapping[str, Any], kept: Mapping[str, Callable[[str, Any], bool]], own: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Saved form of each item; ``own``: the forms of sharded items. Collective."""
        parts = dict[str, Any]()
        with self.world.agree("reading what is to be saved", CheckpointError):
            for key, value in state.items():
                part = own[key] if key in own else value.state_dict() if hasattr(value, "state_dict") else value
                if key in kept and isinstance(part, Mapping):
                    part = {name: item for name, item in part.items() if kept[key](name, item)}
                parts[key] = part
        return parts

    def collect(
        self, state: Mapping[str, Any], kept: Mapping[str, Callable[[str, Any], bool]]
    ) -> tuple[dict[str, Any], list[list[list[str]]]]:
        """The content of a checkpoint, and the names of each optimizer's parameters.

        Names of parameters begin with the prefix of their module.
        """
        modules = {key: value for key, value in state.items() if isinstance(value, ShardedModule)}
        optimizers = {key: ShardedOptimizer.of(o) for key, o in state.items() if isinstance(o, Optimizer)}
        sharded = {key: found for key, found in optimizers.items() if found is not None}
        prefixes = prefixes_of(list(modules))
        of_engine = {id(modules[key].engine): prefix for key, prefix in prefixes.items()}
        own: dict[str, Any] = {
            key: weights_to_save(module.engine, self.frozen(module)) for key, module in modules.items()
        }
        own |= {key: optimizer_fragments(found) for key, found in sharded.items()}
        parts = self._parts(state, kept, own)
        differing = self._of_ranks(parts, own)
        weights = dict[str, Any]()
        names = []
        for key in modules:
            weights |= {prefixes[key] + name: value for name, value in parts.pop(key).items()}
        for found in sharded.values():
            prefix = of_engine.get(id(found.engine), "")
            names.append(
                [[prefix + name for name in group] for group in parameter_names(found.optimizer, found.engine)]
            )
        states = [parts.pop(key) for key in sharded]
        here: dict[str, Any] = {"modules": prefixes, "rest": parts}
        here["optimizers"] = {key: of_engine.get(id(found.engine), "") for key, found in sharded.items()}
        here |= self._progress(state) | differing
        content = {"state_dict": weights, "optimizer_states": states, "global_step": 0, "epoch": 0, FABRIC: here}
        return {**content, **beside(self._prefixes(state))}, names

    def _of_ranks(self, parts: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
        """The items that differ between ranks, but for sharded ones; {} if there are none. Collective."""
        found = values_of_ranks(self.world, {key: part for key, part in parts.items() if key not in own})
        return {OF_RANKS: found} if found else {}

    def _prefixes(self, state: Mapping[str, Any]) -> dict[str, Engine]:
        """Engines by the prefix of their parameters' names in a checkpoint."""
        modules = {key: value for key, value in state.items() if isinstance(value, ShardedModule)}
        return {prefix: modules[key].engine for key, prefix in prefixes_of(list(modules)).items()}

    def _progress(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Progress of training: keys of optimizers that have stepped, and the loss scale."""
        found = {key: ShardedOptimizer.of(value) for key, value in state.items() if isinstance(value, Optimizer)}
        return {
            "stepped": [key for key, known in found.items() if known is not None and known.engine.stepped],
            "loss_scale": self.loss_scale.state_dict(),
        }

    def frozen(self, module: ShardedModule) -> list[str]:
        """Names of weights that are left out (``checkpoint.save_frozen: false``)."""
        return frozen_names(module.engine, leave_out=not self.config.checkpoint.save_frozen)

    def opened(self, path: str, weights_only: bool | None) -> tuple[tuple[Opened, bool], OpenedCopy]:
        """The opened checkpoint, True if its contents are by keys of items, and this rank's copy of it."""
        if is_directory(path):
            use = partial(open_directory, weights_only=weights_only)
            opened, copy = opened_source(path, use, self.world.rank == 0)
            return (self._of_this_rank(opened), True), copy
        file = local_file(self.checkpoint_io, path)
        checked_file(file, self.world)
        with reading(file):
            found = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        opened = Opened(found, found.pop(BESIDE, {}))
        return (self._of_this_rank(opened), False), OpenedCopy(partial(of_content, found, file))

    def _of_this_rank(self, opened: Opened) -> Opened:
        return replace(opened, saved=own_values(self.world, opened.saved, opened.own.get(OF_RANKS, {})))

    def restore(self, opened: Opened, objects: Mapping[Any, Any], saved: Mapping[Any, Any], strict: bool) -> None:
        """Load parts of a checkpoint into objects. Collective.

        Raises:
            CheckpointError: on all ranks: something does not fit on one.
        """
        with self.world.agree("putting together what is loaded", CheckpointError):
            contents = self._contents(opened, objects, saved, strict)
        restore(contents, self.world, self.loss_scale)

    def _contents(self, opened: Opened, objects: Mapping[Any, Any], saved: Mapping[Any, Any], strict: bool) -> Contents:
        """The content of a checkpoint for objects. Not collective."""
        own = opened.own
        found = {key: ShardedOptimizer.of(value) for key, value in objects.items() if isinstance(value, Optimizer)}
        optimizers = {key: sharded for key, sharded in found.items() if sharded is not None}
        parts: dict[Any, ModuleContents] = {
            key: replace(
                self.part(value, saved[key], strict),
                left_out=own.get("frozen_left_out", {}).get(key, ()),
                prefix=own.get("modules", {}).get(key, ""),
                rank_buffers=own.get(RANK_BUFFERS),
            )
            for key, value in objects.items()
            if isinstance(value, nn.Module)
        }
        rest = [(value, saved[key]) for key, value in objects.items() if key not in parts and key not in optimizers]
        loaded = {part.engine: key for key, part in parts.items()}
        engines = dict.fromkeys(sharded.engine for sharded in optimizers.values())
        for engine in engines:
            running = {key: sharded for key, sharded in optimizers.items() if sharded.engine is engine}
            key = loaded.get(engine, engine)
            parts[key] = self._going_on(
                parts.get(key, ModuleContents(engine.root, engine)), key, opened, running, saved
            )
        return Contents(
            list(parts.values()),
            loss_scale=own.get("loss_scale", {}) if engines else None,
            scaled=list(engines),
            schedules=[pair for pair in rest if isinstance(pair[0], LRScheduler)],
            beside=[(value.load_state_dict, state) for value, state in rest if not isinstance(value, LRScheduler)],
            new_optimizer="leave the optimizer out of what fabric.load gets, to start with a new one.",
            new_schedule="leave the schedule out of what fabric.load gets",
        )

    def part(self, module: nn.Module, weights: Mapping[str, Any], strict: bool) -> ModuleContents:
        """A module that gets weights."""
        engine = module.engine if isinstance(module, ShardedModule) else engine_of(module)
        rounded = not self.config.zero_optimization.load_from_fp32_weights
        return ModuleContents(whole(module), engine, weights, strict, rounded=rounded)

    def _going_on(
        self,
        part: ModuleContents,
        key: Any,
        opened: Opened,
        running: Mapping[Any, ShardedOptimizer],
        saved: Mapping[Any, Any],
    ) -> ModuleContents:
        """A part with what its optimizers need to go on.

        Args:
            key: of its module, if that is loaded.
            running: its optimizers.
        """
        own = opened.own
        # A filter may have left out the states.
        states = {k: {"state": {}, **saved[k]} if isinstance(saved[k], Mapping) else saved[k] for k in running}
        stepped = own.get("stepped")
        if stepped is None:  # of an earlier version
            stepped = [k for k, state in states.items() if isinstance(state, Mapping) and state["state"]]
        # Without its module it may be unknown which of the states of features are those of an engine.
        modules = own.get("modules", {})
        is_known = key in modules or len(modules) < 2
        return replace(
            part,
            weights={**part.weights, **opened.trained.get(key, {})} if part.weights is not None else None,
            stepped=any(k in stepped for k in running),
            residuals=own.get(RESIDUALS),
            features=own.get(FEATURES) if is_known else None,
            optimizers={self.session.number(sharded): (sharded.optimizer, states[k]) for k, sharded in running.items()},
        )


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state with full tensors on rank 0, {} elsewhere. Collective."""
    sharded = ShardedOptimizer.of(optimizer)
    return full_optimizer_state(sharded) if sharded is not None else optimizer.state_dict()


def whole(module: nn.Module) -> nn.Module:
    """The user's module."""
    return module.module if isinstance(module, ShardedModule) else module


def _without_prefix(prefix: str, name: str) -> str:
    return name.removeprefix(prefix)
