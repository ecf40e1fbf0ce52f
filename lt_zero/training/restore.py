"""The restoration of a run from a checkpoint: one function for a Trainer, Fabric and a loop of one's own.

Each of them translates what it has opened to ``Contents``. What is not in there is left as it is. A Trainer restores in
steps, as Lightning's hooks do: weights before there are optimizers, the rest when training starts.

Note [Order of a restore]
    Weights, what training has left beside them, optimizers, schedules: what steps leave in the compute copies is made
    of the loaded weights. Whether states of optimizers and schedules fit is found out before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lt_zero.checkpoint.native.load import (
    NEW,
    NEW_SCHEDULE,
    OnAllRanks,
    check_schedule,
    counted,
    fitting_state,
    load_module,
    rounded_weights,
    stepped,
)
from lt_zero.checkpoint.native.load_rank_state import load_feature_states, load_rank_buffers
from lt_zero.checkpoint.native.load_states import load_full_optimizer_state
from lt_zero.checkpoint.native.pieces import on_all_ranks
from lt_zero.checkpoint.native.rank_state import (
    FEATURES,
    RANK_BUFFERS,
    RESIDUALS,
)
from lt_zero.checkpoint.native.residuals import load_residuals
from lt_zero.checkpoint.native.save import TRAINED_WEIGHTS
from lt_zero.common import plain_names
from lt_zero.common.compat import clean_name
from lt_zero.common.errors import CheckpointError
from lt_zero.common.progress_bar import progress_bar
from lt_zero.core.comm.world import World
from lt_zero.core.engine.averaged_weights import average_of
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.lazy_tensor import read_now
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.core.step.sharded_optimizer import ShardedOptimizer


@dataclass(frozen=True)
class ModuleContents:
    """Content of a checkpoint for one module and the optimizers that step it.

    Attributes:
        module: sharded or not.
        engine: of the module; None: it is not sharded.
        weights: full tensors, which may be read on demand.
        strict: names have to agree.
        left_out: exactly these may be missing if ``strict``: the checkpoint has left them out.
        rounded: weights are rounded to the dtype that the module computes in.
        prefix: of the module's parameters in what follows.
        rank_buffers: buffers of each rank, where they differ.
        stepped: whether the weights are those of a step; None: training does not go on with what follows.
        residuals: gradients that ranks owe to the weights; None: they owe none.
        averages: the arguments of ``AveragedWeights.load``.
        features: states of features.
        optimizers: with their saved states, by their numbers in the run.
    """

    module: nn.Module
    engine: Engine | None
    weights: Mapping[str, Any] | None = None
    strict: bool = True
    left_out: Sequence[str] = ()
    rounded: bool = False
    prefix: str = ""
    rank_buffers: Mapping[str, Any] | None = None
    stepped: bool | None = None
    residuals: Mapping[str, Any] | None = None
    averages: tuple[Mapping[str, Any], Collection[str], int] | None = None
    features: Mapping[str, Any] | None = None
    optimizers: Mapping[int, tuple[Optimizer, Any]] = field(default_factory=dict)

    def going_on(
        self, checkpoint: Mapping[str, Any], optimizers: Mapping[int, tuple[Optimizer, Any]]
    ) -> ModuleContents:
        """The part with all that training needs to go on from the checkpoint dictionary of a whole model."""
        trained = checkpoint.get(TRAINED_WEIGHTS)
        return replace(
            self,
            rank_buffers=checkpoint.get(RANK_BUFFERS),
            stepped=stepped(checkpoint),
            residuals=checkpoint.get(RESIDUALS),
            averages=(checkpoint["state_dict"], trained["weights"].keys(), trained["updates"]) if trained else None,
            features=checkpoint.get(FEATURES),
            optimizers=optimizers,
        )


@dataclass(frozen=True)
class Contents:
    """Content of a checkpoint that is restored, with what gets it.

    Attributes:
        parts: one for each module.
        loss_scale: its state, which may be {}.
        scaled: engines whose losses it scales.
        schedules: with their saved states.
        beside: functions that take what else was saved, with it.
        path: of the checkpoint, for messages.
        new_optimizer, new_schedule: how to go on without a saved state, for messages.
    """

    parts: Sequence[ModuleContents] = ()
    loss_scale: Mapping[str, Any] | None = None
    scaled: Sequence[Engine] = ()
    schedules: Sequence[tuple[Any, Any]] = ()
    beside: Sequence[tuple[Callable[[Any], object], Any]] = ()
    path: str = "The checkpoint"
    new_optimizer: str = NEW
    new_schedule: str = NEW_SCHEDULE


def restore(contents: Contents, world: World | None, controller: LossScaleController) -> None:
    """Restore all of ``contents``. See Note [Order of a restore]. Collective.

    Args:
        world: the ranks that do so together; None: this process is on its own.
        controller: of the run.

    Raises:
        CheckpointError: on all ranks: something does not fit.
        RuntimeError: on all ranks: names or shapes of weights do not match, as in torch.
    """
    world = world or World(None, torch.device("cpu"))
    controller.read_skip_flag()  # of a step before
    fitting = _fitting_states(contents, world)
    if contents.schedules:
        with world.agree("checking schedules", CheckpointError):  # in Fabric each rank may have saved its own
            for schedule, saved in contents.schedules:
                check_schedule(saved, schedule, contents.path, contents.new_schedule)
    for part in contents.parts:
        _restore_weights(part, world)
        _restore_progress(part)
    if contents.loss_scale is not None:
        controller.load_state_dict(dict(contents.loss_scale))
        for engine in contents.scaled:
            controller.start_watching(engine)
    _load_states(fitting, world)
    for schedule, saved in contents.schedules:
        schedule.load_state_dict(saved)
    for take, saved in contents.beside:
        take(saved)


def _restore_weights(part: ModuleContents, world: World) -> None:
    """Load the weights of a module, and the buffers of this rank."""
    engine = part.engine
    if part.weights is not None:
        if engine is not None and (average := average_of(engine)) is not None:
            # The average is of the weights that are replaced now.
            average.end()
        left_out = _left_out_here(engine, part.left_out)
        with (
            world.agree("loading weights", CheckpointError),
            progress_bar("Loading weights", len(part.weights), rank=world.rank) as work,
        ):
            load_weights(part, left_out, work.reach)
    if engine is not None and part.rank_buffers is not None:
        with world.agree("restoring buffers of each rank", CheckpointError):
            load_rank_buffers(engine, part.rank_buffers, part.prefix)


def _left_out_here(engine: Engine | None, left_out: Sequence[str]) -> Sequence[str]:
    """The names that a checkpoint leaves out without those of other ranks' modules.

    Collective if ranks have other modules.
    """
    if engine is None or engine.everywhere or not left_out:
        return left_out
    own = {name for name, _ in plain_names.named_parameters(engine.root)}
    every = set(on_all_ranks(engine, sorted(own), "names of parameters"))
    return [name for name in left_out if clean_name(name) in own or clean_name(name) not in every]


def load_weights(
    part: ModuleContents, left_out: Sequence[str] = (), reach: Callable[[int], object] = lambda number: None
) -> None:
    """Load a module's weights. Not collective.

    Args:
        part: with weights.
        left_out: those of this rank's module.
        reach: is called with the number of each tensor that is read.

    Raises:
        RuntimeError: names or shapes do not match, as in torch.
    """
    engine = part.engine
    state = part.weights
    assert state is not None
    if engine is not None:
        engine.note_loaded(after_step=False)
        if part.rounded:
            state = rounded_weights(engine, state)
    with engine.replaced.restoring() if engine is not None else nullcontext():
        load_module(part.module, counted(state, reach), part.strict, left_out)
    # Read now what the module took over: it may have the lazy tensors themselves (assign=True).
    read_now(part.module)


def _restore_progress(part: ModuleContents) -> None:
    """Restore what training has left beside the loaded weights of an engine."""
    engine = part.engine
    if engine is None or part.stepped is None:
        return
    # The same on all ranks: they have the same checkpoint, and the same configuration.
    if part.residuals is not None or engine.exchange.remembers:
        with engine.world.agree("restoring what ranks owe to the weights", CheckpointError):
            load_residuals(engine, part.residuals)
    engine.note_loaded(after_step=part.stepped)
    if part.averages is not None and (average := average_of(engine)) is not None:
        with engine.world.agree("restoring averages", CheckpointError):
            average.load(*part.averages)
    if part.features is not None:
        with engine.world.agree("restoring states of features", CheckpointError):
            load_feature_states(engine, part.features, part.prefix)


def _fitting_states(contents: Contents, world: World) -> list[tuple[Optimizer, Mapping[str, Any]]]:
    """The optimizers with their states, which fit them, in torch's form."""
    running = [
        (part.engine, OnAllRanks.of(optimizer, part.engine), number, optimizer, saved)
        for part in contents.parts
        if part.engine is not None
        for number, (optimizer, saved) in part.optimizers.items()
    ]
    if not running:
        return []
    with world.agree("checking optimizer states", CheckpointError):
        return [
            (optimizer, fitting_state(saved, optimizer, engine, names, number, contents.new_optimizer))
            for engine, names, number, optimizer, saved in running
        ]


def _load_states(fitting: Sequence[tuple[Optimizer, Mapping[str, Any]]], world: World) -> None:
    """Load the states of optimizers, each rank its pieces."""
    if not fitting:
        return
    total = sum(len(group["params"]) for _, state in fitting for group in state.get("param_groups", []))
    with (
        world.agree("loading optimizer states", CheckpointError),
        progress_bar("Loading optimizer states", total, rank=world.rank) as work,
    ):
        for optimizer, state in fitting:
            sharded = ShardedOptimizer.of(optimizer)
            if sharded is None:
                optimizer.load_state_dict(dict(state))
            else:
                load_full_optimizer_state(sharded, state, work.advance)
