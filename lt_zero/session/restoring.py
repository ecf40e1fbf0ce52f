"""Restores what a run needs beside its weights to go on from a checkpoint, in the one order in which that works."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from lt_zero.checkpoint.native.load import NEW
from lt_zero.checkpoint.native.rank_buffers import KEY as RANK_BUFFERS
from lt_zero.checkpoint.native.rank_buffers import load_rank_buffers
from lt_zero.checkpoint.native.residuals import KEY as RESIDUALS
from lt_zero.checkpoint.native.restore import loss_scale, restore_optimizer, restore_training, stepped
from lt_zero.checkpoint.native.save import TRAINED
from lt_zero.common.errors import CheckpointError
from lt_zero.engine.engine import Engine
from lt_zero.step.loss_scale import LossScaleController


@dataclass(frozen=True)
class Progress:
    """Content of a checkpoint beside weights and optimizers' states.

    Attributes:
        stepped: whether its weights are those of a step.
        residuals: what ranks owe to the weights.
        rank_buffers: buffers of each rank, where they differ.
        loss_scale: its state; {} if there is none.
        averages: those of ``EMA``, and the number of their updates.
    """

    stepped: bool
    residuals: Any = None
    rank_buffers: Any = None
    loss_scale: Mapping[str, Any] | None = None
    averages: tuple[Mapping[str, Any], int] | None = None

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any]) -> Progress:
        """Read it from a checkpoint dictionary, whichever face saved it."""
        averages = None
        if TRAINED in checkpoint:
            averages = checkpoint["state_dict"], checkpoint[TRAINED]["updates"]
        kept = checkpoint.get(RESIDUALS), checkpoint.get(RANK_BUFFERS)
        return cls(stepped(checkpoint), *kept, loss_scale(checkpoint), averages)

    def restore(self, engine: Engine, controller: LossScaleController | None, prefix: str = "") -> None:
        """Restore all of it into an engine with loaded weights, before its optimizers. Collective.

        Args:
            controller: gets the loss scale; None: its owner restores it.
            prefix: of the engine's parameters in the checkpoint.

        Raises:
            CheckpointError: on all ranks.
        """
        restore_training(engine, self.residuals, self.stepped)
        with engine.world.agree("restoring buffers of each rank", CheckpointError):
            load_rank_buffers(engine, self.rank_buffers, prefix)
        if engine.average is not None and self.averages is not None:
            with engine.world.agree("restoring averages", CheckpointError):
                engine.average.load(*self.averages)
        if controller is not None:
            controller.load_state_dict(dict(self.loss_scale or {}))
            controller.start_watching(engine)


def restore_optimizers(
    engine: Engine,
    optimizers: Mapping[int, tuple[Optimizer, Any]],
    remedy: str = NEW,
    tick: Callable[[], object] = lambda: None,
) -> None:
    """Load the states of optimizers, after ``Progress.restore``. Collective.

    Args:
        optimizers: with their saved states, by their numbers in the run.
        remedy, tick: as for ``restore_optimizer``.

    Raises:
        CheckpointError: on all ranks: a state does not fit.
    """
    with engine.world.agree("loading optimizer states", CheckpointError):
        for number, (optimizer, saved) in optimizers.items():
            if not isinstance(saved, Mapping) or (saved and "param_groups" not in saved):  # {}: Lightning's mock
                raise CheckpointError("What the checkpoint has for the optimizer is no state of one: check the keys.")
            restore_optimizer(optimizer, engine, saved, number, remedy, tick)
