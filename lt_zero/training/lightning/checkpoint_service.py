"""Checkpoints of a Trainer, as Lightning's hooks collect, save, load and remove them.

``dump_checkpoint`` collects the module's and the optimizers' states; ``save`` adds what else training needs to go on.
See training/checkpoints.py, Note [Life of a save].

Note [Life of a restore]
    Lightning restores before the module is sharded. The state dict of a directory is lazy and is kept until then, so
    each rank reads only its own shard.

Note [Callbacks that restore]
    After the weights Lightning calls the callbacks' ``on_load_checkpoint``, which may read the module or load into it:
    ``WeightAveraging`` puts the trained weights back, as the state dict has the averaged ones. If a callback has
    that hook, weights are loaded at once; sharding then takes the module's values, except for entries of the state
    dict that a callback has replaced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import Container
from torch import Tensor
from torch.optim import Optimizer

from lt_zero.checkpoint.last import tell_of_newer
from lt_zero.checkpoint.native.directory import is_url, plain_path, remove
from lt_zero.checkpoint.native.load import (
    as_lightning,
    engine_of,
    load_module,
    renamed,
    require_training_state,
    trained_weights,
    with_names,
)
from lt_zero.checkpoint.native.pieces import optimizer_fragments, parameter_names
from lt_zero.checkpoint.native.plain import restore as put_back
from lt_zero.checkpoint.native.plain import to_plain
from lt_zero.checkpoint.native.save import LT_ZERO
from lt_zero.checkpoint.native.saved_file import explained
from lt_zero.checkpoint.open import (
    Identity,
    OpenedCopy,
    checked_file,
    is_directory,
    load_same,
    of_content,
    opened_source,
    reading,
)
from lt_zero.common.compat import is_distributed
from lt_zero.common.errors import CheckpointError
from lt_zero.common.garbage import gc_disabled
from lt_zero.common.places import load
from lt_zero.common.plain_names import names_of
from lt_zero.common.progress_bar import progress_bar
from lt_zero.core.engine.averaged_weights import average_of
from lt_zero.core.engine.guard import owner_of
from lt_zero.core.engine.lazy_tensor import LazyTensor, read_now
from lt_zero.training.checkpoints import (
    Saving,
    beside,
    frozen_names,
    trained_beside,
    weights_to_save,
)
from lt_zero.training.lightning.checkpoint_plugin import local_file, write_file, writes_directories
from lt_zero.training.lightning.data_position.position import POSITION, DataPosition
from lt_zero.training.lightning.precision import sharded_of
from lt_zero.training.lightning.setup import RunSnapshot
from lt_zero.training.lightning.uploads import upload_directories
from lt_zero.training.restore import Contents, ModuleContents, restore

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
        self._deferred: ModuleContents | None = None  # see Note [Life of a restore]
        self._early: dict[str, tuple[Any, Tensor]] = {}  # loaded value and module's: Note [Callbacks that restore]
        self._opened: dict[str, Any] = {}  # the state dict of a directory, until hooks have had it
        self._renamed: dict[str, str | None] = {}  # names that a hook has changed in it
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
        if self._directories:
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
        content, engine = self._collect(run, checkpoint, path), run.engine
        names = [parameter_names(optimizer, engine) for optimizer in run.optimizers]
        files, trainer = _beside(run), run.trainer
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
            content[POSITION] = [states[rank] for rank in run.session.division.firsts]
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
        self._deferred, self._early = None, {}

    def remove(self, run: RunSnapshot, path: str) -> None:
        """Remove a checkpoint, after the pending save if any: it may be the last good one."""
        path = plain_path(path)
        run.session.saver.after_pending(partial(_remove, run, path if is_url(path) else os.path.abspath(path)))

    # ---- loading -------------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """A checkpoint may be opened, or none, from here on."""
        self._compared = False

    def open(
        self,
        run: RunSnapshot,
        path: str | os.PathLike[str],
        weights_only: bool | None,
        plugin: Callable[[], Mapping[str, Any]],
    ) -> dict[str, Any]:
        """The checkpoint for Lightning to restore from; ``plugin`` reads paths that we cannot. Collective.

        A single file is mapped into memory: ranks of a host share its pages, and unused parts are never read.

        Raises:
            CheckpointError: on all ranks.
        """
        path = plain_path(path)
        # The checkpoint may be the one that is being written in the background.
        self.wait(run)
        self._deferred, self._early = None, {}
        self._opened, self._renamed = {}, {}
        self._compared = True

        def read() -> tuple[dict[str, Any], OpenedCopy]:
            if is_directory(path):
                with progress_bar(f"Opening {path}", rank=run.rank):
                    return opened_source(path, partial(as_lightning, weights_only=weights_only), run.rank == 0)
            file = local_file(run.checkpoint_io, path)
            zipped = checked_file(file, run.world)
            with reading(file):
                if zipped:
                    assert file is not None
                    safe = weights_only is not False
                    found: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=safe)
                else:
                    found = _of_plugin(plugin, file)
            if file is not None and not isinstance(found, dict):
                raise CheckpointError(f"{file} is no checkpoint: it holds a {type(found).__name__}. Take another one.")
            return found, OpenedCopy(partial(of_content, found, file))

        opened = load_same(run.world, path, read)
        if is_directory(path):  # the states of its optimizers have names
            self._opened = dict(opened["state_dict"])
        fits = run.trainer is not None and run.trainer.state.fn == TrainerFn.FITTING
        if fits and run.rank == 0 and "last" in Path(path).stem and not is_url(path):
            tell_of_newer(path, opened.get("global_step"))
        return opened

    def open_none(self, run: RunSnapshot) -> None:
        """Take part in ``open`` on a rank that has found no checkpoint, if one is to be opened here. Collective.

        Raises:
            CheckpointError: on all ranks: others have found one.
        """
        if not self._compared:
            self.wait(run)
            load_same(run.world, None, lambda: (None, OpenedCopy(lambda: Identity(None, ""))))

    def select(self, run: RunSnapshot, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Remove the parts that the ``checkpoint`` block says not to restore."""
        how, trainer = run.config.checkpoint, run.trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        if how.load_module_only:
            kept = {k: v for k, v in checkpoint.items() if k in ("state_dict", "pytorch-lightning_version", LT_ZERO)}
            return {**kept, "optimizer_states": [], "lr_schedulers": []}
        require_training_state(checkpoint, how.load_optimizer_states)
        if not how.load_optimizer_states:
            checkpoint["optimizer_states"] = []
        if not how.load_lr_scheduler_states or (LT_ZERO in checkpoint and "lr_schedulers" not in checkpoint):
            checkpoint["lr_schedulers"] = []
        return checkpoint

    def load_model(self, run: RunSnapshot, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load the module's weights, now or at sharding. See Note [Life of a restore]."""
        module = run.module
        assert module is not None
        with run.agree("reading what a hook has taken from the checkpoint", CheckpointError):
            read_now(module)
        fits = run.trainer is not None and run.trainer.state.fn == TrainerFn.FITTING
        self._renamed, self._opened = renamed(self._opened, checkpoint["state_dict"]), {}
        state: Mapping[str, Any] = trained_weights(checkpoint, self._renamed) if fits else checkpoint["state_dict"]
        left_out = list(checkpoint.get(LT_ZERO, {}).get("frozen_left_out", []))
        sharded = any(owner_of(parameter) is not None for parameter in module.parameters())
        lazy = any(isinstance(value, LazyTensor) for value in state.values())
        rounded = not run.config.zero_optimization.load_from_fp32_weights
        # Those that are parallelized already take whole tensors only once they are sharded.
        later = any(p.is_meta or is_distributed(p) for p in module.parameters())
        self._deferred = ModuleContents(module, None, state, strict, left_out, rounded)
        if sharded or not (lazy or rounded or later):
            self.load_deferred(run)
            return
        callbacks = run.trainer.callbacks if run.trainer is not None else []  # type: ignore[attr-defined]
        reads = any(is_overridden("on_load_checkpoint", callback, parent=pl.Callback) for callback in callbacks)
        if reads and not later:  # see Note [Callbacks that restore]
            with run.agree("loading weights", CheckpointError):
                load_module(module, state, strict=False)  # a callback may add missing entries
            names = names_of(module)
            held = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
            self._early = {name: (value, held[names[name]]) for name, value in state.items() if names[name] in held}

    def load_deferred(self, run: RunSnapshot) -> None:
        """Load deferred weights into the sharded module, if there are any. Collective."""
        if self._deferred is None:
            return
        part, early = self._deferred, self._early
        self._deferred, self._early = None, {}
        weights = dict(part.weights or {})
        weights |= {name: held for name, (loaded, held) in early.items() if weights.get(name) is loaded}
        part = replace(part, engine=engine_of(part.module), weights=weights)
        restore(Contents((part,)), run.world, run.loss_scale)

    def load_optimizers(self, run: RunSnapshot, checkpoint: dict[str, Any]) -> None:
        """Restore what Lightning does when training starts, and what it does not know. Collective.

        The loss scale is not among it: Lightning gives it to the precision plugin.
        """
        states = checkpoint["optimizer_states"]
        if self._renamed:
            states = [with_names(state, lambda name: self._renamed.get(name) or name) for state in states]
        engine, how = run.engine, run.config.checkpoint
        part = ModuleContents(engine.root, engine)
        if states or (how.load_optimizer_states and not how.load_module_only):
            if len(states) != len(run.optimizers):  # on all ranks: their checkpoints and optimizers are compared
                raise CheckpointError(
                    f"The checkpoint has {len(states)} optimizer(s), configure_optimizers returns "
                    f"{len(run.optimizers)}. Return the same optimizers as before, or set "
                    "checkpoint.load_optimizer_states=false to start with fresh ones."
                )
            part = part.going_on(checkpoint, dict(enumerate(zip(run.optimizers, states, strict=True))))
        running = run.trainer.lr_scheduler_configs if run.trainer is not None else []
        saved = checkpoint.get("lr_schedulers", ())
        contents = Contents(
            (part,),
            schedules=[(config.scheduler, state) for config, state in zip(running, saved, strict=False)],
            beside=[(partial(self._load_position, run), checkpoint[POSITION])] if POSITION in checkpoint else [],
            path=checkpoint.get(LT_ZERO, {}).get("path") or "The checkpoint",
        )
        restore(contents, engine.world, run.loss_scale)
        if "lr_schedulers" in checkpoint:  # without the key Lightning refuses the checkpoint
            checkpoint["lr_schedulers"] = []  # else Lightning would restore them again

    def _load_position(self, run: RunSnapshot, states: Any) -> None:
        """Load random states and the position in the data. Collective."""
        division = run.session.division
        with run.agree("restoring random states and the position in the data", CheckpointError):
            self._data.load(states, division.data_rank, division.data_ranks)


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


def _of_plugin(plugin: Callable[[], Mapping[str, Any]], file: str | os.PathLike[str] | None) -> Any:
    """Read a checkpoint of another kind than torch's archives.

    ``file``: the local file, which torch reads; None: only the plugin knows what it reads.

    Raises:
        CheckpointError: the file is empty, or of another kind; names it.
    """
    if file is None:
        return dict(plugin())
    if Path(file).is_file() and Path(file).stat().st_size == 0:
        raise CheckpointError(f"{file} is empty. Take another checkpoint.")
    try:
        return plugin()
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # a file of another kind may be anything to torch
        raise explained(error, Path(file)) from error
