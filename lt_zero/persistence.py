"""How ``ZeroStrategy`` saves and restores: what Lightning hands over, and when.

Note [Life of a save]
    ``dump_checkpoint`` asks for the module's and the optimizers' states: fragments, nothing is copied. Then
    ``save`` writes them (checkpoint/save.py). With ``checkpoint.async`` it copies them to host memory instead, a thread
    writes, and training goes on; one save at most is under way, and what waits for its success (removing older
    checkpoints) waits with it. Ranks look at the outcome together at the beginning of each training step.

Note [Life of a restore]
    Lightning restores before the module is sharded. The state dict of a directory is lazy, and is kept until then:
    each rank reads its own part only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from omegaconf import Container
from torch import Tensor
from torch.optim import Optimizer

from lt_zero.checkpoint.collect import optimizer_fragments, parameter_names, weight_fragments
from lt_zero.checkpoint.errors import CheckpointError
from lt_zero.checkpoint.full import full_optimizer_state, load_full_optimizer_state
from lt_zero.checkpoint.load import as_lightning, by_name, load_module, number_states, rounded_weights
from lt_zero.checkpoint.open import is_directory, open_source
from lt_zero.checkpoint.place import Place, remove
from lt_zero.checkpoint.plain import plain, put_back
from lt_zero.checkpoint.save import KEY, Bundle, bundle, stage, write
from lt_zero.core.guard import owner_of
from lt_zero.core.lazy import LazyTensor
from lt_zero.core.values import full_state_dict
from lt_zero.precision import sharded_of
from lt_zero.progress import KEY as PROGRESS

if TYPE_CHECKING:
    from lt_zero.strategy import ZeroStrategy

_HPARAMS, _HPARAMS_TYPE = LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE


class Persistence:
    """Saves and restores for one strategy."""

    def __init__(self, strategy: ZeroStrategy) -> None:
        self._strategy = strategy
        self._late: tuple[Mapping[str, Any], bool, list[str]] | None = None  # See Note [Life of a restore]
        self._frozen: list[str] = []  # left out of the state dict that was asked for last
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._after: list[str] = []  # checkpoints to remove when the pending save is done
        self._buffer: Tensor | None = None

    @property
    def sharded(self) -> bool:
        """Whether checkpoints are directories."""
        strategy, how = self._strategy, self._strategy.config.checkpoint.format
        stock = type(strategy.checkpoint_io) is TorchCheckpointIO
        if how == "sharded" and not stock:
            raise ValueError(
                f'checkpoint.format="sharded" does not write through {type(strategy.checkpoint_io).__name__}. Remove '
                'that plugin, or set checkpoint.format="full".'
            )
        return strategy.config.sharded_checkpoints and stock

    # ---- what Lightning asks for ---------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        """The module's state dict: fragments on all ranks, or full tensors on rank 0. Collective."""
        engine = self._strategy.engine
        self._strategy.precision_plugin.gate.settle()  # schedules are saved next
        state = weight_fragments(engine) if self.sharded else full_state_dict(engine)
        self._frozen = []
        if not self._strategy.config.checkpoint.save_frozen:
            self._frozen = [name for name, p in engine.root.named_parameters() if not p.requires_grad]
            state = {name: value for name, value in state.items() if name not in set(self._frozen)}
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """An optimizer's state: fragments on all ranks, or full tensors on rank 0; None if nothing is sharded."""
        sharded = sharded_of(optimizer)
        if sharded is None:
            return None
        self._strategy.precision_plugin.gate.settle()
        return optimizer_fragments(sharded) if self.sharded else full_optimizer_state(sharded)

    def add_progress(self, checkpoint: dict[str, Any]) -> None:
        """Put random states and positions in the data of all ranks into a checkpoint to go on from. Collective."""
        comm = self._strategy.comm
        if comm is not None and "optimizer_states" in checkpoint:
            checkpoint[PROGRESS] = comm.host_gather(self._strategy.progress.state_dict(), "random states")

    # ---- saving --------------------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any], path: str) -> None:
        """Write what Lightning dumped, as a directory. Collective.

        Raises:
            CheckpointError: on all ranks; what was at ``path`` before is still there.
        """
        self.wait()
        strategy = self._strategy
        engine, config = strategy.engine, strategy.config
        names = [parameter_names(o, engine) for o in strategy.optimizers]
        how = config.zero_optimization
        run = {
            "stage": how.stage,
            "ranks": engine.comm.world,
            "precision": strategy.precision_plugin.precision,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "torch": str(torch.__version__),
        }
        made = bundle(_without_type(checkpoint), names, engine.comm, run, config.model_dump(), self._frozen)
        place = self._make(path)
        if not (config.checkpoint.async_save and self._training()):
            self._write(made, place, engine.comm.saving_group(background=False))
            return
        self._buffer = stage(made, self._buffer)
        group = engine.comm.saving_group(background=True)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="lt_zero-async-save")
        self._pending = self._thread.submit(self._write, made, place, group)

    def save_full(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint in plain containers, for one file. What has no plain form stays as it is."""
        content, rest = plain(_without_type(checkpoint))
        put_back(content, rest)
        if self._frozen:
            content.setdefault(KEY, {})["frozen_left_out"] = list(self._frozen)
        assert isinstance(content, dict)
        return content

    def _training(self) -> bool:
        module = self._strategy.lightning_module
        return module is not None and module._trainer is not None and module.trainer.training

    def _make(self, path: str) -> Place:
        """The directory to write to, which all ranks see. Collective."""
        comm = self._strategy.engine.comm
        place, problem, facts = None, None, None
        try:
            if comm.rank == 0:
                place = Place.make(path)
                facts = (place.name, place.folder, place.token())
        except CheckpointError as error:
            problem = str(error)
        facts = comm.host_broadcast(facts, "checkpoint directory")
        if facts is not None and place is None:
            place = Place(facts[0], facts[1])
            try:
                seen = place.token()
                problem = None if seen == facts[2] else f"{place.folder} is not the directory that rank 0 made."
            except CheckpointError as error:
                problem = str(error)
        if found := comm.problems(problem, "checkpoint directory"):
            if comm.rank == 0 and place is not None:
                place.discard()
            raise CheckpointError(" ".join(found))
        assert place is not None
        return place

    def _write(self, made: Bundle, place: Place, group: Any) -> None:
        comm = self._strategy.engine.comm
        try:
            write(made, place, comm, group)
        except BaseException:
            if comm.rank == 0:
                place.discard()
            raise

    # ---- saves in the background -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look whether the save that is under way has ended, if there is one. Collective.

        Raises:
            CheckpointError: on all ranks: it failed.
        """
        if self._pending is None:
            return
        running = torch.tensor([not self._pending.done()], dtype=torch.uint8)
        self._strategy.engine.comm.host_max(running, "save in the background").wait()
        if not running.item():
            self.wait()

    def wait(self) -> None:
        """Wait for the save that is under way, if there is one. Collective.

        Raises:
            CheckpointError: on all ranks: it failed.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        after, self._after = self._after, []
        pending.result()  # fails on all ranks if it does on one
        for path in after:
            self.remove(path)

    def abandon(self) -> None:
        """After an error, when other ranks may be gone: do not wait."""
        self._pending, self._after = None, []
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._thread = self._buffer = None

    def close(self) -> None:
        """Wait for what is under way; give back threads and memory. Collective."""
        with suppress(CheckpointError):  # `wait` was called where an error can be raised
            self.wait()
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = self._buffer = None

    def remove(self, path: str) -> None:
        """Remove a checkpoint; after the save that is under way, if there is one: it may be the last good one."""
        if self._pending is not None:
            self._after.append(path)
        elif self._strategy.is_global_zero and os.path.isdir(path):
            remove(path)
        elif self._strategy.is_global_zero:
            self._strategy.checkpoint_io.remove_checkpoint(path)

    # ---- restoring -----------------------------------------------------------------------------------------------

    def load(self, path: str | os.PathLike[str], weights_only: bool | None) -> dict[str, Any] | None:
        """What Lightning restores from; None if ``path`` is a file. Collective.

        Raises:
            CheckpointError: on all ranks.
        """
        with self._together("opening the checkpoint"):
            if not is_directory(path):
                return None
            return as_lightning(open_source(path), weights_only)

    def pick(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Leave out what is not to be restored. See the ``checkpoint`` block of the configuration."""
        module, how = self._strategy.lightning_module, self._strategy.config.checkpoint
        trainer = module._trainer if module is not None else None
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        if how.load_module_only:
            kept = {k: v for k, v in checkpoint.items() if k in ("state_dict", "pytorch-lightning_version", KEY)}
            return {**kept, "optimizer_states": [], "lr_schedulers": []}
        if not how.load_optimizer_states:
            checkpoint["optimizer_states"] = []
        if not how.load_lr_scheduler_states:
            checkpoint["lr_schedulers"] = []
        return checkpoint

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load the module's weights, now or when it is sharded. See Note [Life of a restore]."""
        module = self._strategy.lightning_module
        assert module is not None
        state: Mapping[str, Any] = checkpoint["state_dict"]
        left_out = list(checkpoint.get(KEY, {}).get("frozen_left_out", []))
        owned = any(owner_of(p) is not None for p in module.parameters())
        lazy = any(isinstance(value, LazyTensor) for value in state.values())
        rounds = not self._strategy.config.zero_optimization.load_from_fp32_weights
        self._late = (state, strict, left_out)
        if owned or not (lazy or rounds or any(p.is_meta for p in module.parameters())):
            self.load_late()

    def load_late(self) -> None:
        """Load the weights that were to be loaded when the module is sharded, if there are some."""
        if self._late is None:
            return
        (state, strict, left_out), self._late = self._late, None
        module, strategy = self._strategy.lightning_module, self._strategy
        assert module is not None
        with self._together("loading weights"):
            if strategy.built is not None and not strategy.config.zero_optimization.load_from_fp32_weights:
                state = rounded_weights(strategy.built, state)
            load_module(module, state, strict, left_out)

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states and the position in the data. Collective."""
        strategy, states = self._strategy, checkpoint["optimizer_states"]
        if PROGRESS in checkpoint:
            with self._together("restoring random states and the position in the data"):
                strategy.progress.load(checkpoint[PROGRESS], strategy.global_rank, strategy.world_size)
        if not states and (
            strategy.config.checkpoint.load_module_only or not strategy.config.checkpoint.load_optimizer_states
        ):
            return
        with self._together("loading optimizer states"):
            if len(states) != len(strategy.optimizers):
                raise CheckpointError(
                    f"The checkpoint has {len(states)} optimizer(s), configure_optimizers made "
                    f"{len(strategy.optimizers)}. Make them what they were, or set "
                    "checkpoint.load_optimizer_states=false to start with fresh ones."
                )
            for number, (optimizer, state) in enumerate(zip(strategy.optimizers, states, strict=True)):
                if by_name(state):
                    state = number_states(state, parameter_names(optimizer, strategy.engine), number)
                sharded = sharded_of(optimizer)
                if sharded is None:
                    optimizer.load_state_dict(state)
                else:
                    load_full_optimizer_state(sharded, state)

    def _together(self, name: str) -> Together:
        return Together(self._strategy, name)


class Together:
    """Around what every rank does for itself: an error of one is an error of all. Collective."""

    def __init__(self, strategy: ZeroStrategy, name: str) -> None:
        self._comm, self._name = strategy.comm, name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._comm is None or self._comm.world == 1 or (error is not None and not isinstance(error, Exception)):
            return
        text = f"{error}" if error is not None else None
        found = self._comm.problems(text, self._name)
        if found and error is None:
            raise CheckpointError(f"{self._name[0].upper()}{self._name[1:]} failed on another rank: {' '.join(found)}")


def _without_type(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """OmegaConf's class is not kept: the values become plain containers."""
    made = dict(checkpoint)
    made.pop(_HPARAMS_TYPE, None)
    if isinstance(made.get(_HPARAMS), Container):
        made[KEY] = {**made.get(KEY, {}), "hparams": "omegaconf"}
    return made
