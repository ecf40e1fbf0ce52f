"""Checkpoints of a Trainer, as Lightning's hooks collect, save and remove them; checkpoint_loads.py loads them.

``dump_checkpoint`` collects the module's and the optimizers' states; ``save`` adds what else training needs to go on.
See training/checkpoints.py, Note [Life of a save].
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from omegaconf import Container
from torch import Tensor
from torch.optim import Optimizer

from lt_zero.checkpoint.native.directory import is_url, plain_path, remove
from lt_zero.checkpoint.native.pieces import optimizer_fragments, parameter_names
from lt_zero.checkpoint.native.plain import restore as put_back
from lt_zero.checkpoint.native.plain import to_plain
from lt_zero.checkpoint.native.save import LT_ZERO
from lt_zero.checkpoint.same import Identity, OpenedCopy, load_same
from lt_zero.common.errors import CheckpointError
from lt_zero.common.garbage import gc_disabled
from lt_zero.common.places import load
from lt_zero.common.progress_bar import progress_bar
from lt_zero.core.engine.averaged_weights import average_of
from lt_zero.training.checkpoints import (
    Saving,
    beside,
    frozen_names,
    trained_beside,
    weights_to_save,
)
from lt_zero.training.lightning.checkpoint_plugin import write_file, writes_directories
from lt_zero.training.lightning.data_position.loader_place import POSITION
from lt_zero.training.lightning.data_position.logged import of_data_ranks
from lt_zero.training.lightning.data_position.position import DataPosition
from lt_zero.training.lightning.precision import sharded_of
from lt_zero.training.lightning.setup import RunSnapshot

if TYPE_CHECKING:
    from lt_zero.training.lightning.checkpoint_loads import CheckpointLoads

_HPARAMS = pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY
_HPARAMS_TYPE = pl.LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE


_GATHERS = "stage3_gather_16bit_weights_on_model_save"


class WeightsFile(Protocol):
    """Files beside checkpoints, which ``_GATHERS`` asks for: weights_beside.py."""

    def check(self, path: str) -> None:
        """Check the path of a checkpoint before anything is written. Raises CheckpointError."""

    def writer(self) -> Callable[[str], None]:
        """A function that writes the file of a saved directory, in any thread. Collective."""

    def write(self, path: str) -> None:
        """Write the file of a checkpoint that is no directory. Collective."""

    def remove(self, path: str) -> None:
        """Remove the file of a checkpoint."""


class CheckpointService:
    """Saves and loads the checkpoints of one strategy, with the position in the ``data``."""

    def __init__(self, data: DataPosition) -> None:
        self._data = data
        self._frozen: list[str] = []  # names left out of the last state dict
        self._synchronous = False  # see ``foreground``
        self._loads: CheckpointLoads | None = None  # of the present run; None: it has loaded nothing
        self._compared = False  # whether the ranks know of each other what they open in this run
        self._directories = False  # whether checkpoints are directories

    def set_up(self, run: RunSnapshot) -> None:
        """Decide what the saves of this run write, and let loggers upload it.

        Raises:
            ValueError: as ``writes_directories``.
            ConfigError: exports, which the configuration asks for, are not installed.
        """
        _beside(run)
        self._directories = writes_directories(run.config, run.checkpoint_io)
        if self._directories and run.trainer is not None and run.trainer.loggers:
            from lt_zero.training.lightning.uploads import upload_directories

            upload_directories(run)

    # ---- collecting ----------------------------------------------------------------------------------------------

    def model_state(self, run: RunSnapshot) -> dict[str, Any]:
        """The module's state dict: fragments on all ranks, or full tensors on rank 0 only. Collective.

        Other ranks have tensors without values (on the meta device) in their place, for hooks that look at names,
        shapes and dtypes, or change the names.
        """
        engine = run.engine
        run.loss_scale.read_skip_flag()  # schedules are saved next
        if (average := average_of(engine)) is not None:
            average.drop_if_outdated()
        self._frozen = frozen_names(engine, leave_out=not run.config.checkpoint.save_frozen)
        state = weights_to_save(engine, self._frozen, sharded=self._directories)
        return state if self._directories else _without_values(run, state)

    def add_trained(self, run: RunSnapshot, checkpoint: dict[str, Any]) -> None:
        """Add the trained weights to a checkpoint with averages in its state dict. Collective."""
        checkpoint |= trained_beside(run.engine, self._frozen, sharded=self._directories)

    def optimizer_state(self, run: RunSnapshot, optimizer: Optimizer) -> dict[str, Any] | None:
        """An optimizer's state: fragments on all ranks, or full tensors on rank 0; None if nothing is sharded."""
        sharded = sharded_of(optimizer)
        if sharded is None:
            return None
        run.loss_scale.read_skip_flag()
        if self._directories:
            return optimizer_fragments(sharded)
        from lt_zero.checkpoint.native.full_states import full_optimizer_state

        return full_optimizer_state(sharded)

    # ---- saving --------------------------------------------------------------------------------------------------

    def save(self, run: RunSnapshot, checkpoint: Mapping[str, Any], path: str, storage_options: Any = None) -> None:
        """Write the checkpoint that Lightning has dumped to a directory or a file. Collective.

        Raises:
            CheckpointError: on all ranks; an earlier checkpoint at ``path`` is kept.
        """
        path = plain_path(path)
        if run.built is None or not run.built.attached or not self._directories:
            self._save_file(run, checkpoint, path, storage_options)
            return
        if storage_options is not None:
            raise TypeError("Sharded checkpoints do not support storage_options: set checkpoint.format='full'.")
        content = self._collect(run, checkpoint, path)
        engine = run.engine
        names = [parameter_names(optimizer, engine) for optimizer in run.optimizers]
        files = _beside(run)
        trainer = run.trainer
        then: Callable[[str], object] = files.writer() if files is not None else lambda path: None
        ends = trainer is None or not trainer.training or trainer.state.status == TrainerStatus.INTERRUPTED
        background = run.config.checkpoint.async_save and not (ends or self._synchronous)
        about = run.config, run.shown, engine.policy.mode, self._frozen
        saving = Saving(content, names, *about, then, run.session.division.peers.ranks)
        run.session.saver.save(saving, path, engine.world, background)

    def _collect(self, run: RunSnapshot, checkpoint: Mapping[str, Any], path: str) -> dict[str, Any]:
        """A copy (callbacks may have kept theirs) with random states and data positions of all ranks. Collective."""
        content = dict(checkpoint)
        content.pop(_HPARAMS_TYPE, None)
        if isinstance(content.get(_HPARAMS), Container):  # it is written as plain containers
            content[LT_ZERO] = {**content.get(LT_ZERO, {}), "hparams": "omegaconf"}
        if run.world is not None and "optimizer_states" in checkpoint:
            states = run.world.host_gather(self._data.state_dict(), "random states")
            content[POSITION] = of_data_ranks(states, run.session.division.firsts)
            if run.built is not None:
                content |= beside({"": run.built}, sharded=self._directories)
        self.wait(run)
        if (files := _beside(run)) is not None:
            files.check(path)
        return content

    def _save_file(self, run: RunSnapshot, checkpoint: Mapping[str, Any], path: str, storage_options: Any) -> None:
        """Rank 0 writes one file, in plain containers where possible. Collective."""
        content = self._collect(run, checkpoint, path)
        is_folder = run.rank == 0 and os.path.isdir(path)
        if run.world.host_broadcast(is_folder, "checkpoint path") if run.world is not None else is_folder:
            raise IsADirectoryError(f"The checkpoint path {path!r} is a directory. Name a file, or remove it.")
        agreed = run.agree(f"saving {path}", CheckpointError)
        with gc_disabled(), agreed, progress_bar(f"Saving {path}", rank=run.rank):
            found, rest = to_plain(content)
            put_back(found, rest)
            assert isinstance(found, dict)
            found.setdefault(LT_ZERO, {})["config"] = run.shown
            if self._frozen:
                found[LT_ZERO]["frozen_left_out"] = list(self._frozen)
            if run.rank == 0:
                write_file(run.checkpoint_io, found, path, storage_options)
        if run.built is not None and (files := _beside(run)) is not None:
            files.write(path)

    # ---- saves in the background ---------------------------------------------------------------------------------

    @contextmanager
    def foreground(self) -> Iterator[None]:
        """Context that makes saves synchronous."""
        self._synchronous = True
        try:
            yield
        finally:
            self._synchronous = False

    def wait(self, run: RunSnapshot) -> None:
        """``Saver.wait``."""
        run.session.saver.wait(run.world)

    def close(self, run: RunSnapshot, clean: bool) -> None:
        """End a run: release threads and memory, and drop weights that it did not load.

        After an error (not ``clean``) other ranks may be gone.
        """
        if clean or run.world is None:
            with suppress(CheckpointError):  # ``wait`` was called earlier, where it can raise
                self.wait(run)
            run.session.saver.close()
        else:
            run.session.saver.abandon(run.world)
        self._loads = None

    def remove(self, run: RunSnapshot, path: str) -> None:
        """Remove a checkpoint, after the pending save if any: it may be the last good one."""
        path = plain_path(path)
        run.session.saver.after_pending(partial(_remove, run, path if is_url(path) else os.path.abspath(path)))

    # ---- loading -------------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """A checkpoint may be opened, or none, from here on."""
        self._compared = False

    def begin_open(self, run: RunSnapshot) -> None:
        """Called before a checkpoint is opened: it may be the one that is being written in the background. Collective.

        Raises:
            CheckpointError: on all ranks: the pending save failed.
        """
        self.wait(run)
        self._compared = True

    def open_none(self, run: RunSnapshot) -> None:
        """Take part in ``open`` on a rank that has found no checkpoint, if one is to be opened here. Collective.

        Raises:
            CheckpointError: on all ranks: others have found one.
        """
        if not self._compared:
            self.wait(run)
            load_same(run.world, None, lambda: (None, OpenedCopy(lambda: Identity(None, ""))))

    def loads(self) -> CheckpointLoads:
        """The loads of this run, with the readers of checkpoints, which a run that loads none does without."""
        if self._loads is None:
            from lt_zero.training.lightning.checkpoint_loads import CheckpointLoads

            self._loads = CheckpointLoads(self._data, self.begin_open)
        return self._loads

    def load_deferred(self, run: RunSnapshot) -> None:
        """Load weights that a load has left for the sharded module, if there are any. Collective."""
        if self._loads is not None:
            self._loads.load_deferred(run)


def _without_values(run: RunSnapshot, state: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's state dict; on other ranks tensors without values stand for its own. Collective."""
    specs = {
        name: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value for name, value in state.items()
    }
    found: dict[str, Any] = run.engine.world.host_broadcast(specs, "names of the state dict")
    if run.rank == 0:
        return state
    return {
        name: torch.empty(spec[0], dtype=spec[1], device="meta") if _is_spec(spec) else spec
        for name, spec in found.items()
    }


def _is_spec(value: Any) -> bool:
    """True for what ``_without_values`` sends in place of a tensor."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype)


def _remove(run: RunSnapshot, path: str) -> None:
    if run.rank == 0:
        remove(path) if os.path.isdir(path) else run.checkpoint_io.remove_checkpoint(path)
        if (files := _beside(run)) is not None:
            files.remove(path)


def _beside(run: RunSnapshot) -> WeightsFile | None:
    """The files beside checkpoints; None: the configuration asks for none.

    Raises:
        ConfigError: exports are not installed.
    """
    if not getattr(run.config.zero_optimization, _GATHERS):
        return None
    place = "lt_zero.training.lightning.weights_beside:WeightsBeside"
    made: WeightsFile = load(place, f"zero_optimization.{_GATHERS}", "the export of weights")(run)
    return made
