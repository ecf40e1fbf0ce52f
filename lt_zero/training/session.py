"""A run, whichever face drives it: its collectives, engines, optimizers, loss scale, saves, and trial."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_zero.common.compat import replace_reentrant_checkpoints
from lt_zero.common.console import RunConsole
from lt_zero.common.descriptors import count_run, explaining_full_table
from lt_zero.common.errors import ConfigError
from lt_zero.common.places import load
from lt_zero.common.transformers_models import attentions
from lt_zero.common.units import format_bytes
from lt_zero.config import ZeroConfig
from lt_zero.config.applicability import Face, check_same, tell_without_effect
from lt_zero.config.options import communication_options, group_options
from lt_zero.core.ask import configure_group, divide, rounds_of
from lt_zero.core.comm.ranks import NewLog
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.division import Division, follow_run
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.same_on_ranks import compare_models
from lt_zero.core.feature import Feature
from lt_zero.core.followers import follow
from lt_zero.core.rounds import Rounds
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.core.step.param_groups import compare_optimizers, compare_options
from lt_zero.core.step.sharded_optimizer import ShardedOptimizer
from lt_zero.core.step.supported_optimizers import states_per_element
from lt_zero.features import features_of
from lt_zero.planning.check import check_optimizers
from lt_zero.training.build import built_by, shard
from lt_zero.training.checkpoints import Saver, Saving

_TRIAL = "LT_ZERO_TRIAL"  # in the environment: the folder of a trial, which this process was started for


class TimedRun(Protocol):
    """Times the steps of a run, and ends the process: planning/trial.py."""

    def start(
        self,
        engine: Engine,
        config: ZeroConfig,
        *,
        data_ranks: int,
        accumulation: int,
        micro: int | None = None,
        saves: bool = False,
        loop: bool = False,
    ) -> None:
        """Begin: set-up is complete."""

    def see_batch(self, batch: Any) -> None:
        """Note a micro-batch of the script."""

    def leave_out(self) -> None:
        """Do not count the time until the end of this step."""

    def end_step(self) -> None:
        """Note the end of an optimizer step. Collective at the end of the trial."""


class Session:
    """One run. A face makes it, and translates its own interface to it.

    Args:
        face: who drives the run.

    Attributes:
        loss_scale: that of the run's precision; a face sets it before anything is built.
        division: how the run is divided over its ranks; plain before ``join``.
        saver: the checkpoints that are being written.
        trial: of ``lt-zero tune``, if the process was started for one.
    """

    loss_scale: LossScaleController

    def __init__(self, face: Face) -> None:
        self.face = face
        self.division = Division()
        self.saver = Saver()
        self.trial: TimedRun | None = None
        if folder := os.environ.get(_TRIAL):
            self.trial = load("lt_zero.planning.trial:Trial", _TRIAL, "lt-zero tune")(Path(folder))
        self._engines: list[weakref.ref[Engine]] = []
        self._optimizers: list[weakref.ref[ShardedOptimizer]] = []

    @property
    def known(self) -> ShardGroup | None:
        """All ranks; None before ``join``."""
        return self.division.known

    @property
    def group(self) -> ShardGroup:
        """All ranks, over which modules are sharded. Raises RuntimeError before ``join``."""
        return self.division.group

    @property
    def world(self) -> World:
        """All ranks of the run. Raises RuntimeError before ``join``."""
        return self.division.world

    @property
    def rounds(self) -> Rounds:
        """The micro-batches that the ranks run at the same time; plain before ``join``."""
        return self.division.rounds

    @property
    def data_parts(self) -> int:
        """The number of parts that data are divided into: of data ranks, or of the micro-batches of a round."""
        return self.rounds.parts(self.division.data_ranks)

    @property
    def engines(self) -> list[Engine]:
        """One for each module, in the order of their set-up."""
        return [engine for ref in self._engines if (engine := ref()) is not None and engine.attached]

    @property
    def optimizers(self) -> list[ShardedOptimizer]:
        """Optimizers in the order of their set-up."""
        return [sharded for ref in self._optimizers if (sharded := ref()) is not None]

    def number(self, sharded: ShardedOptimizer) -> int:
        """Index of an optimizer among those that are set up."""
        return next(number for number, other in enumerate(self.optimizers) if other is sharded)

    # ---- set-up ------------------------------------------------------------------------------------------------

    @explaining_full_table
    def join(
        self,
        config: ZeroConfig,
        device: torch.device,
        timeout: timedelta | None = None,
        node: int | None = None,
        new_log: NewLog | None = None,
        first: Callable[[World], object] = lambda world: None,
    ) -> bool:
        """Begin the run on this rank; returns whether its collectives were just made. Collective.

        Args:
            timeout, node, new_log: as for ``World.join``.
            first: is called with a new world before the ranks' configurations are compared.

        Raises:
            ConfigError: on all ranks, if their configurations differ.
        """
        count_run()
        new = self.known is None
        if new:
            world = World.join(device, communication_options(config), timeout, node, new_log)
            first(world)
            group = ShardGroup.of_all(world)
            check_same(config, world.host_gather)
            tell_without_effect(config, self.face, world.rank)
            features = features_of(config)
            configure_group(group, group_options(config), features)
            self.division = divide(features, group, config)
            self.division.rounds = rounds_of(features, group)
        self.division.begin(new)
        self.world.begin_run()
        return new

    def compare_model(self, module: nn.Module) -> None:
        """Compare what the ranks have built, before the first collective that depends on it. Collective.

        Raises:
            RuntimeError: on all ranks, if they differ; names the first difference, and the ranks.
        """
        self.division.compare(module)
        self.compare_peers(module)

    def compare_peers(self, module: nn.Module) -> None:
        """``compare_model`` for the ranks that have the same stage, which may be the only ones that call it."""
        compare_models(self.division.peers, module, more=attentions(module))

    @explaining_full_table
    def build(
        self,
        module: nn.Module,
        config: ZeroConfig,
        device: torch.device,
        policy: DtypePolicy,
        training: bool,
        load: Callable[[Engine], object] = lambda engine: None,
        weight: Callable[[], float] = lambda: 1.0,
    ) -> Engine:
        """Shard a module in place, with rank 0's buffers. Collective.

        ``load``: loads weights before buffers are compared. ``weight``: what losses are multiplied with before their
        backward. Errors are those of ``shard``.
        """
        self._refuse_another()
        if self.face is Face.FABRIC:
            # Before it is divided. The other faces have compared it, as what is "auto" depends on it.
            self.compare_model(module)
        follow_run(module, config)
        if replace_reentrant_checkpoints(module) and training and self.world.rank == 0:
            RunConsole().print("Activation checkpoints of transformers are run with use_reentrant=False.")
        move_buffers(module, device)
        self.division.adopt(module)
        how = self.division.arguments(module, config)
        engine = shard(module, config, device, policy, training=training, ready=False, **how)
        self.division.connect(engine, config, self._begin_passes, weight)
        load(engine)
        engine.buffers.sync()
        self.division.share_buffers(module)
        if training and self.world.rank == 0 and (line := advice_on_wire(engine, config)):
            RunConsole().print(line)
        if training and self.world.rank == 0:
            self.division.warn_of_caches(module)
        if training:
            self.follow(engine)
        self._engines.append(weakref.ref(engine))
        return engine

    def follow(self, engine: Engine) -> list[Feature]:
        """Let features follow an engine that is ready to train; returns those that did not already. Collective."""
        numbers = (number for number, known in enumerate(self._engines) if known() is engine)
        return follow(engine, self.division.place(next(numbers, len(self._engines))))

    def _refuse_another(self) -> None:
        """Raise ConfigError if a module is trained already and unsent gradients can be kept for one module only."""
        known = self.engines if self.face is not Face.TRAINER else []  # a Trainer trains one at a time
        if any(engine.exchange.remembers for engine in known):
            raise ConfigError(
                "gradient_compression, 1-bit optimizers and communication.slow_node_tolerance keep track of the "
                "gradients of one module, and this is another. Remove the key, or set up one module."
            )

    def add_optimizers(
        self,
        engine: Engine,
        optimizers: Iterable[Optimizer],
        accumulates: bool = False,
        saves: bool = True,
        leave_others: bool = False,
    ) -> None:
        """Shard the optimizers of an engine's parameters, and check that a step fits into memory. Collective.

        Prints the cost of a step with states on NVMe, if any.

        Args:
            accumulates, saves: as for ``check_optimizers``.
            leave_others: leave those alone that step none of its parameters, unless steps are checked.

        Raises:
            NotEnoughMemory: a host has no memory for the states.
            RuntimeError: on all ranks, if their optimizers differ, or have parameters that the engine does not own.
        """
        given = list(optimizers)
        self.division.follow_optimizers(given)
        compare_optimizers(engine, given)
        steps = _step_anywhere(given, engine)
        if not given:
            return
        self.follow(engine)  # one that was built for an evaluation trains from here on
        for optimizer, here in zip(given, steps, strict=True):
            if not leave_others or self.loss_scale.checks or here:
                self._shard_optimizer(engine, optimizer)
        taken = {id(p) for optimizer in given for group in optimizer.param_groups for p in group["params"]}
        beside = [s.optimizer for s in engine.optimizers if not any(id(p) in taken for p in s.parameters())]
        check_optimizers(engine, built_by(engine), [*beside, *given], accumulates, saves)  # not those of an earlier fit
        self.loss_scale.start_watching(engine)
        line = engine.offload_manager.announce(engine.buckets, max(map(states_per_element, given)))
        if line and engine.world.rank == 0:
            RunConsole().print(line)

    def _shard_optimizer(self, engine: Engine, optimizer: Optimizer) -> None:
        known = ShardedOptimizer.of(optimizer)
        if known is None or known.engine is not engine:
            known = ShardedOptimizer(engine, optimizer)
        if all(known is not other for other in self.optimizers):
            self._optimizers.append(weakref.ref(known))

    def start_trial(self, engine: Engine, config: ZeroConfig, **facts: Any) -> None:
        """Begin the trial of a model that is trained, if there is one; ``facts``: as for ``TimedRun.start``."""
        if self.trial is not None:
            self.trial.start(engine, config, data_ranks=self.division.data_ranks, **facts)

    def hold(self, schedule: Any, number: int, config: ZeroConfig) -> None:
        """Let a schedule wait while steps of optimizer ``number`` are skipped, unless ``on_skipped_step`` says not."""
        if self.loss_scale.checks and config.on_skipped_step != "advance":
            from lt_zero.core.step.skipped_steps import hold_schedule

            hold_schedule(schedule, self.loss_scale.counter(number))

    # ---- a step ------------------------------------------------------------------------------------------------

    def _begin_passes(self) -> float:
        """Prepare the forwards and backwards of a pipeline; returns the loss scale."""
        self.loss_scale.before_backward(self.optimizers)
        return self.loss_scale.scale

    def begin_backward(self, engine: Engine | None, loss: Tensor) -> Tensor:
        """The loss, scaled; ``engine``: of the loss, None: of several engines."""
        self.loss_scale.before_backward(self.optimizers)
        return self.loss_scale.scaled(engine or next(iter(self.engines), None), loss)

    def before_step(self) -> None:
        """Begin a step. Nothing of it is done or counted at an error, so a caller can begin it again. Collective.

        Raises:
            CheckpointError: on all ranks: the save in the background has failed.
        """
        if self.saver.pending is not None:
            self.saver.check(self.world)

    def step(self, sharded: ShardedOptimizer, limit: float, call: Callable[[], object]) -> tuple[bool, Tensor | None]:
        """``LossScaleController.step`` of an optimizer. Collective."""
        return self.loss_scale.step(sharded, self.number(sharded), limit, call)

    def end_step(self, sharded: ShardedOptimizer) -> None:
        """End the step of an optimizer, for the face, too."""
        if self.trial is not None and self.number(sharded) == 0:
            self.trial.end_step()

    def explaining(self) -> AbstractContextManager[None]:
        """Context that names the ended rank in errors of other collectives."""
        return self.known.world.explaining() if self.known is not None else nullcontext()

    # ---- checkpoints, and the end ------------------------------------------------------------------------------

    def save(self, saving: Saving, path: str) -> None:
        """``Saver.save``, in the background if ``checkpoint.async`` says so. Collective."""
        self.saver.save(saving, path, self.world, saving.config.checkpoint.async_save)

    def wait_for_save(self, call: str) -> None:
        """Wait for the save in the background; ``call``: name of the public function. Collective.

        Raises:
            CheckpointError: on all ranks: it has failed.
        """
        world = self.known.world if self.known is not None else None
        if world is not None:
            world.roll_call(call)
        self.saver.wait(world)

    def end(self, clean: bool = True, leaves: bool = False) -> None:
        """End the run on this rank, after the save in the background.

        Args:
            clean: other ranks end it, too; otherwise they may be gone.
            leaves: this process ends with the run.

        Raises:
            CheckpointError: that save has failed.
        """
        if self.known is None:
            return
        self.loss_scale.stop_watching()
        try:
            if clean:
                self.saver.wait(self.world)
        finally:
            self.saver.abandon(self.world)
            self.division.end()
            self.world.end_run(leaves)


def _step_anywhere(optimizers: Sequence[Optimizer], engine: Engine) -> list[bool]:
    """True for optimizers with parameters of the engine on any rank: all ranks step these. Collective if modules
    differ.

    Raises:
        RuntimeError: on all ranks, if stages have other optimizers, or other options.
    """
    own = [_steps(optimizer, engine) for optimizer in optimizers]
    if engine.everywhere:
        return own
    told = engine.world.host_gather(own, "which optimizers step")
    if len(set(map(len, told))) > 1:
        numbers = ", ".join(f"rank {rank} has {len(theirs)}" for rank, theirs in enumerate(told))
        raise RuntimeError(
            f"Stages of a pipeline need as many optimizers, in one order: {numbers}. Make all on each; one may have "
            "a group without parameters ({'params': []})."
        )
    compare_options(engine, optimizers)
    return [any(of_ranks) for of_ranks in zip(*told, strict=True)]


def _steps(optimizer: Optimizer, engine: Engine) -> bool:
    """True if an optimizer has parameters of an engine."""
    return any(id(p) in engine.owner for group in optimizer.param_groups for p in group["params"])


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move buffers only; parameters move bucket by bucket when sharded."""
    for child in module.modules():
        for name, buffer in child.named_buffers(recurse=False):
            if not buffer.is_meta and buffer.device != device:
                setattr(child, name, buffer.to(device))


def advice_on_wire(engine: Engine, config: ZeroConfig) -> str:
    """The bytes that ``communication_data_type`` would save between nodes; "" if it is set, or would save none.

    Gradients of 16 bits are sent in fp32 where the backend would round each partial sum to 16 bits.
    """
    if config.communication_data_type is not None:
        return ""
    sent = saved = 0
    dtypes, per = set[str](), "step"
    for bucket in engine.buckets:
        plan, crosses = bucket.weights.plan, len(bucket.group.nodes) > 1
        wire = bucket.grads.send_dtype(bucket.dtype) if bucket.wants_grad else bucket.dtype
        if not crosses or plan.codecs.reductions is not None or wire.itemsize <= bucket.dtype.itemsize:
            continue
        sent += bucket.layout.numel * wire.itemsize
        saved += bucket.layout.numel * (wire.itemsize - bucket.dtype.itemsize)
        dtypes.add(str(bucket.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp"))
        per = "micro-batch" if bucket.sharding.grads else per
    if not saved:
        return ""
    return (
        f"Gradients are reduced over {len(engine.world.nodes)} nodes in fp32, {format_bytes(sent)} per {per}: "
        f"communication_data_type={'/'.join(sorted(dtypes))} would save {format_bytes(saved)} of them, and round sums."
    )
