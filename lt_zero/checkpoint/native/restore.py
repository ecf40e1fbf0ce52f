"""Restores a sharded model and its optimizers: what a Trainer, Fabric and a loop of one's own have in common.

Note [Weights of a checkpoint]
    The state dict has the weights that are evaluated: averages, if ``EMA`` made some. The optimizers' states belong to
    the trained weights, which such a checkpoint has, too. So a run that goes on with the states goes on with these.

Note [Order of a restore]
    Weights, ``restore_training``, optimizers: what steps leave in the compute copies is made of the loaded weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lt_zero.checkpoint.native.load import NEW, counted, fitting_state, load_module, rounded_weights
from lt_zero.checkpoint.native.pieces import load_full_optimizer_state
from lt_zero.checkpoint.native.residuals import load_residuals
from lt_zero.checkpoint.native.save import HERE, LOOP, TRAINED
from lt_zero.common.errors import CheckpointError
from lt_zero.config import ZeroConfig
from lt_zero.engine.engine import Engine
from lt_zero.engine.guard import owner_of
from lt_zero.engine.lazy_tensor import read_now
from lt_zero.step.sharded_optimizer import ShardedOptimizer


def trained_weights(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights that training goes on with. See Note [Weights of a checkpoint]."""
    state: Mapping[str, Any] = checkpoint["state_dict"]  # callbacks may still change it
    return {**state, **checkpoint[TRAINED]["weights"]} if TRAINED in checkpoint else state


def stepped(checkpoint: Mapping[str, Any]) -> bool:
    """Whether the weights are those of a step, whichever of the three saved them."""
    return bool(checkpoint.get("global_step") or entries_of(checkpoint, HERE).get("stepped"))


def loss_scale(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the loss scale, whichever of the three saved it; {} if there is none."""
    own = entries_of(checkpoint, LOOP) or entries_of(checkpoint, HERE)
    return dict(own.get("loss_scale") or checkpoint.get("ZeroPrecision") or {})


def entries_of(checkpoint: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """What Fabric (``HERE``) or the engine of a loop (``LOOP``) wrote; {} if users of others have such a key."""
    found = checkpoint.get(key)
    mark = {HERE: "modules", LOOP: "client_state"}[key]
    return found if isinstance(found, Mapping) and mark in found else {}


def restore_weights(
    module: nn.Module,
    config: ZeroConfig,
    state: Mapping[str, Any],
    strict: bool,
    left_out: Sequence[str] = (),
    reach: Callable[[int], object] | None = None,
) -> None:
    """Load a module's weights, as ``load_from_fp32_weights`` says. Not collective.

    Args:
        module: sharded or not.
        config: of the run.
        state: full tensors, which may be read on demand.
        strict, left_out: as for ``load_module``.
        reach: is called with the number of each tensor that is read.

    Raises:
        RuntimeError: names or shapes do not match, as in torch.
    """
    engine = next((owner for owner in map(owner_of, module.parameters()) if isinstance(owner, Engine)), None)
    if engine is not None:
        engine.stepped = False
        if not config.zero_optimization.load_from_fp32_weights:
            state = rounded_weights(engine, state)
    load_module(module, state if reach is None else counted(state, reach), strict, left_out)
    read_now(module)  # it may hold the tensors themselves (assign=True)


def restore_training(engine: Engine, residuals: Any, stepped: bool) -> None:
    """Restore what is neither in the weights nor in the optimizers' states. Collective.

    Args:
        engine: with loaded weights. See Note [Order of a restore].
        residuals: what ``residual_state`` returned.
        stepped: whether the weights are those of a step.

    Raises:
        CheckpointError: on all ranks.
    """
    with engine.world.agree("restoring what ranks owe to the weights", CheckpointError):
        load_residuals(engine, residuals)
    engine.stepped = stepped
    for bucket in engine.buckets if stepped else ():
        bucket.round_as_steps_do()


def restore_optimizer(
    optimizer: Optimizer,
    engine: Engine,
    saved: Mapping[str, Any],
    number: int,
    remedy: str = NEW,
    tick: Callable[[], object] = lambda: None,
) -> None:
    """Load an optimizer's state, whether or not it is sharded; arguments as for ``fitting_state``. Not collective.

    ``tick`` is called for each parameter whose state was read.

    Raises:
        CheckpointError, ValueError: the optimizer's parameters differ from the saved ones.
    """
    state = fitting_state(saved, optimizer, engine, number, engine.world.rank == 0, remedy) if saved else saved
    sharded = ShardedOptimizer.of(optimizer)
    if sharded is None:
        optimizer.load_state_dict(dict(state))
    else:
        load_full_optimizer_state(sharded, state, tick)
