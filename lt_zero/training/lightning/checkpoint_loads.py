"""Loads of a Trainer's checkpoints, as Lightning's hooks ask for them: a run that loads none does without this.

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
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lt_zero.checkpoint.last import tell_of_newer
from lt_zero.checkpoint.native.directory import is_url, plain_path
from lt_zero.checkpoint.native.load import (
    as_lightning,
    engine_of,
    load_module,
    renamed,
    require_training_state,
    trained_weights,
    with_names,
)
from lt_zero.checkpoint.native.save import LT_ZERO
from lt_zero.checkpoint.native.saved_file import explained
from lt_zero.checkpoint.open import checked_file, is_directory, of_content, opened_source, reading
from lt_zero.checkpoint.same import OpenedCopy, load_same
from lt_zero.common.compat.of_distributed_tensors import is_distributed
from lt_zero.common.errors import CheckpointError
from lt_zero.common.plain_names import names_of
from lt_zero.common.progress_bar import progress_bar
from lt_zero.core.engine.guard import owner_of
from lt_zero.core.engine.lazy_tensor import LazyTensor, read_now
from lt_zero.training.lightning.checkpoint_plugin import local_file
from lt_zero.training.lightning.data_position.loader_place import POSITION
from lt_zero.training.lightning.data_position.position import DataPosition
from lt_zero.training.lightning.setup import RunSnapshot
from lt_zero.training.restore import Contents, ModuleContents, restore


class CheckpointLoads:
    """Loads checkpoints in one run of a strategy.

    Args:
        data: gets the position in the data.
        begin: is called before a checkpoint is opened. Collective.
    """

    def __init__(self, data: DataPosition, begin: Callable[[RunSnapshot], None]) -> None:
        self._data = data
        self._begin = begin
        self._deferred: ModuleContents | None = None  # see Note [Life of a restore]
        self._early: dict[str, tuple[Any, Tensor]] = {}  # loaded value and module's: Note [Callbacks that restore]
        self._opened: dict[str, Any] = {}  # the state dict of a directory, until hooks have had it
        self._renamed: dict[str, str | None] = {}  # names that a hook has changed in it

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
        self._begin(run)
        self._deferred = None
        self._early = {}
        self._opened = {}
        self._renamed = {}

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

    def select(self, run: RunSnapshot, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Remove the parts that the ``checkpoint`` block says not to restore."""
        how = run.config.checkpoint
        trainer = run.trainer
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
        self._renamed = renamed(self._opened, checkpoint["state_dict"])
        self._opened = {}
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
        part = self._deferred
        early = self._early
        self._deferred = None
        self._early = {}
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
        engine = run.engine
        how = run.config.checkpoint
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
