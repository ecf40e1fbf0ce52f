"""Set-up of a run under ``ZeroStrategy``: module, callbacks, optimizers, schedules and signal handlers."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import callbacks
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim import Optimizer

from lt_zero.common.compat import SignalOverride
from lt_zero.common.console import RunConsole
from lt_zero.common.errors import ConfigError
from lt_zero.config import ZeroConfig
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.division import BatchCut
from lt_zero.core.engine.averaged_weights import average_of
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.guard import owner_of
from lt_zero.core.feature import Feature
from lt_zero.core.followers import followers
from lt_zero.core.health.agreement import Agreement
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.core.step.sharded_optimizer import ShardedOptimizer
from lt_zero.training.build import built_by
from lt_zero.training.lightning.model_report import dtype_table, has_one_dtype, unit_table
from lt_zero.training.lightning.precision import sharded_of
from lt_zero.training.session import Session

log = logging.getLogger("lt_zero")
_STOP, _REQUEUE = "stop", "requeue"
_COPIES = "keeps a full copy of the parameters (lt_zero.EMA keeps a sharded one)"
_NEEDS_WHOLE: dict[type[callbacks.Callback], str] = {
    callbacks.StochasticWeightAveraging: _COPIES,
    callbacks.WeightAveraging: _COPIES,
    callbacks.ModelPruning: "computes masks from full parameters and replaces these",
}


@dataclass(frozen=True)
class RunSnapshot:
    """A snapshot of the state that the parts of a strategy share."""

    config: ZeroConfig  # as far as it is resolved
    shown: Mapping[str, Any]  # what checkpoints tell of it
    checkpoint_io: CheckpointIO  # for checkpoints of one file
    session: Session
    loss_scale: LossScaleController
    optimizers: tuple[Optimizer, ...]
    built: Engine | None  # None before ``setup``
    module: pl.LightningModule | None  # None before ``connect``
    rank: int
    start_method: str

    @property
    def world(self) -> World | None:
        """All ranks; None before ``setup_environment``."""
        return self.session.known.world if self.session.known is not None else None

    @property
    def engine(self) -> Engine:
        """The engine of the current module. Raises RuntimeError before set-up."""
        if self.built is None:
            self.refuse_parent("the engine")
            raise RuntimeError("The ZeRO engine does not exist before `Trainer.fit/validate/test/predict`.")
        return self.built

    def refuse_parent(self, what: str) -> None:
        """Raise RuntimeError in a process that is no rank but starts the ranks, as in a notebook."""
        if self.start_method != "popen" and self.world is None:
            raise RuntimeError(
                f"This process is no rank: with start_method={self.start_method!r} the ranks are processes that "
                f"Trainer.fit starts, and {what} ended with them. After a fit the module here has the trained weights "
                "(`module.state_dict()`, or `trainer.save_checkpoint(path, weights_only=True)`). Export, and save "
                "checkpoints to resume from, on the ranks: with ModelCheckpoint, or in a callback's `on_train_end` "
                "(`trainer.strategy.export(path)`, `trainer.save_checkpoint(path)`)."
            )

    @property
    def trainer(self) -> pl.Trainer | None:
        return self.module._trainer if self.module is not None else None

    @property
    def sharded(self) -> list[ShardedOptimizer]:
        return [found for found in map(sharded_of, self.optimizers) if found is not None]

    def agree(self, what: str, error: type[Exception]) -> AbstractContextManager[None]:
        """``World.agree``; outside of a run each process is on its own."""
        return self.world.agree(what, error) if self.world is not None else nullcontext()


def check_callbacks(trainer: pl.Trainer, stage: int, in_parts: bool) -> None:
    """Refuse callbacks that do not work with sharded parameters, before they run.

    ``in_parts``: tensor ranks have parts of them.

    Raises:
        TypeError: a callback needs full parameters, which are sharded, or in parts.
    """
    if in_parts:
        why = "of which tensor-parallel ranks have parts. Remove"
    elif stage == 3:
        why = "which stage 3 does not have in memory. Use stage=2, or remove"
    else:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, what in _NEEDS_WHOLE.items():
            if isinstance(callback, kind):
                own, parent = type(callback).__name__, kind.__name__
                raise TypeError(f"{own}{f' (a {parent})' if own != parent else ''} {what}, {why} the callback.")


def refuse_own_reads(module: pl.LightningModule, cut: BatchCut | None) -> None:
    """Raise ConfigError if a module reads the loader in its training step, where batches are not cut.

    ``cut``: how they are to be; None: not.
    """
    if cut is not None and "dataloader_iter" in inspect.signature(module.training_step).parameters:
        text = f"{cut}: {type(module).__name__}.training_step takes dataloader_iter, whose batches are not cut"
        raise ConfigError.about(cut.key, f"{text}. Take batch and batch_idx.")


def find_engine(
    module: nn.Module, config: ZeroConfig, policy: DtypePolicy, last: Engine | None, fits: bool, world: World
) -> Engine | None:
    """The engine of an earlier run if it can be reused; else its module is unsharded. Collective.

    If an error has ended that run while averages were in use, its weights are put back. After training, averages are
    the model's weights (features/ema/average.py), and the trained weights are kept until the next training.

    Args:
        last: the strategy's engine, reusable while the module is the same.
        fits: training follows.
        world: all ranks of the run that begins.

    Raises:
        RuntimeError: on all ranks: a parameter was cast, moved or reshaped since that run, and others are sharded; or
            an error has ended that run at different points.
    """
    owners = {id(e): e for e in map(owner_of, module.parameters()) if isinstance(e, Engine) and e.attached}
    if last is not None and last.attached and last.root is module:
        # If all of its parameters were replaced, no parameter leads to it.
        owners[id(last)] = last
    if not owners:
        return None
    from lt_zero.core.engine.full_params import owns_all, restore_whole, take_over_assigned, was_converted

    for engine in owners.values():
        if engine.world is not world:
            _check_end(engine.world, world)
        same = built_by(engine) == config and engine.policy == policy
        mine = engine.root is module and (engine is last or same)
        reused = mine and len(owners) == 1 and owns_all(engine) and engine.world.reaches_all_of(world)
        average = average_of(engine)
        if average is not None and not (reused and average.finished and not fits):
            average.end()
        if not engine.shards_parameters and was_converted(engine):
            engine.detach()  # the module, cast or moved, is what there is
            continue
        take_over_assigned(engine)
        if reused:
            engine.resume()
            return engine
        restore_whole(engine)  # another module or configuration, or changed layers
    return None


def _check_end(last: World, world: World) -> None:
    """Raise RuntimeError if the ranks are at different collectives of the ``last`` run, or its connections are closed.

    Collective over ``world``.
    """
    counts: dict[str, set[int]] = defaultdict(set)
    told = world.host_gather((last.progress, last.watch.verdict is not None), "collectives of the last run")
    for launched, _ in told:
        for name, count in launched.items():
            counts[name].add(count)
    if any(closed for _, closed in told) or any(len(different) > 1 for different in counts.values()):
        raise RuntimeError(
            "An error has ended the last run of this model at different points on the ranks, so that its weights "
            "cannot be put together any more. Make a new model, and go on from the last checkpoint (`ckpt_path`)."
        )


def show_model(engine: Engine) -> None:
    """Print the units and dtypes of a new engine, and what features do to its model."""
    if engine.world.rank != 0:
        return
    unit_table(engine)
    if not has_one_dtype(engine):
        dtype_table(engine)
    show_features(engine, [follower.feature for follower in followers(engine)])


def show_features(engine: Engine, features: Iterable[Feature]) -> None:
    """Print what ``features`` do to the model of an engine, if anything is to be known of it."""
    if engine.world.rank != 0:
        return
    for feature in features:
        if feature.summary:
            RunConsole().print(feature.summary)


def skip_graphs(trainer: pl.Trainer, engine: Engine) -> None:
    """Let no logger trace a module whose weights are sharded: Lightning does so on rank 0 alone."""
    if not trainer.loggers:
        return
    from lt_zero.common.compat.of_loggers import log_graph_by

    size = engine.world.size

    def explain() -> None:
        if trainer.is_global_zero:
            warnings.warn(
                f"log_graph=True: the graph of {type(engine.root).__name__} is not logged. Lightning traces the module "
                f"on rank 0 alone, and its weights are sharded over {size} ranks. Log the graph in a run at stage 2 or "
                "on one device, or remove log_graph=True.",
                stacklevel=2,
            )

    for logger in trainer.loggers:
        log_graph_by(logger, explain if engine.shards_parameters and size > 1 else None)


@contextmanager
def naming_idle_stage(module: pl.LightningModule, peers: ShardGroup) -> Iterator[None]:
    """Context in which a module makes its optimizers: torch's refuse a list without parameters, which a stage may have.

    Raises:
        ConfigError: in place of a ValueError, if the stage of this rank trains nothing; has the remedy.
    """
    try:
        yield
    except ValueError as error:
        if peers.size == peers.world.size or any(p.requires_grad for p in module.parameters()):
            raise
        key, name = "pipeline.stages", type(module).__name__
        raise ConfigError.about(
            key,
            f"{key}: the stage of rank {peers.world.rank} trains no parameter, and {name}.configure_optimizers raised "
            f"{error!r}. Give the optimizer a group, which may be empty: AdamW([{{'params': parameters}}]).",
        ) from error


def shard_optimizers(run: RunSnapshot, trainer: pl.Trainer, schedules: Iterable[LRSchedulerConfig]) -> None:
    """``Session.add_optimizers`` with those of a Trainer, and hold their schedules. Collective."""
    accumulates, saves = trainer.accumulate_grad_batches > 1, bool(trainer.checkpoint_callbacks)
    run.session.add_optimizers(run.engine, run.optimizers, accumulates, saves, leave_others=True)
    numbers = {id(optimizer): number for number, optimizer in enumerate(run.optimizers)}
    for schedule in schedules:
        number = numbers.get(id(getattr(schedule.scheduler, "optimizer", None)), 0)
        run.session.hold(schedule.scheduler, number, run.config)


# ---- signals -------------------------------------------------------------------------------------------------------


class Signals:
    """Defers SIGTERM and SLURM's requeue signal to the end of the same batch on all ranks.

    Lightning's handlers broadcast, save and log when the signal arrives, possibly inside a collective. Here they only
    record it, until ``give_back``. All ranks agree on a point (core/health/agreement.py) and do there what Lightning
    does: stop after the batch with SIGTERMException, on which callbacks may save, or save a checkpoint and requeue the
    job.

    Attributes:
        step_boundary: counts a point, as ``Agreement.step_boundary`` does; ``serve`` gets what it returns.
        agreed: the signals that wait for the next batch to begin.
    """

    def __init__(self, trainer: pl.Trainer, agreement: Agreement) -> None:
        self._trainer, self.step_boundary = trainer, agreement.step_boundary
        self.agreed: list[str] = []
        self._override = SignalOverride(trainer, lambda: agreement.request(_STOP), lambda: agreement.request(_REQUEUE))

    def give_back(self) -> None:
        """Restore Lightning's handlers."""
        self._override.give_back()

    def serve(self, agreed: list[str], saving: Callable[[], AbstractContextManager[object]] | None = None) -> None:
        """Act on ``agreed`` signals, on all ranks. Collective.

        ``saving``: a context in which saves are synchronous, as the job ends; None within a batch, where nothing is
        saved.

        Raises:
            SIGTERMException: where Lightning does not check whether to stop.
        """
        self.agreed += agreed
        if _STOP in agreed:
            if self._trainer.is_global_zero:
                log.warning("SIGTERM: all ranks stop after this batch.")
            self._override.stop()  # Lightning checks this at the end of a batch
        if saving is None:
            return
        if _REQUEUE in self.agreed:
            with saving():
                self._override.requeue()
        self.agreed.clear()
        if self._trainer.received_sigterm and self._trainer.state.fn == TrainerFn.PREDICTING:
            raise SIGTERMException
