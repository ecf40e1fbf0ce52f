"""Loading checkpoints in ``ZeroStrategy``.

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
import zipfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lt_zero.checkpoint.native.directory import is_url
from lt_zero.checkpoint.native.full_states import load_full_optimizer_state
from lt_zero.checkpoint.native.load import as_lightning, by_name, counted, fitting_state, load_module, rounded_weights
from lt_zero.checkpoint.native.resuming import require_training_state
from lt_zero.checkpoint.native.save import KEY
from lt_zero.checkpoint.open import is_directory, open_source
from lt_zero.common.errors import CheckpointError
from lt_zero.common.progress_bar import progress_bar
from lt_zero.engine.guard import owner_of
from lt_zero.engine.lazy_tensor import LazyTensor, read_now
from lt_zero.lightning.data_position.position import KEY as PROGRESS
from lt_zero.lightning.precision import sharded_of

if TYPE_CHECKING:
    from lt_zero.lightning.checkpoint_service import CheckpointingStrategy


class Restoring:
    """Restores for one strategy."""

    def __init__(self, strategy: CheckpointingStrategy) -> None:
        self._strategy = strategy
        self._late: tuple[Mapping[str, Any], bool, list[str]] | None = None  # See Note [Life of a restore]
        self._early: dict[
            str, tuple[Any, Tensor]
        ] = {}  # state dict and module of an immediate load: Note [Callbacks that restore]

    def load(self, path: str | os.PathLike[str], weights_only: bool | None) -> dict[str, Any] | None:
        """The checkpoint for Lightning to restore from; None if ``path`` is a file. Collective.

        Raises:
            CheckpointError: on all ranks.
        """
        self.forget()
        with self._agree("opening the checkpoint"):
            if not is_directory(path):
                return None
            with progress_bar(f"Opening {path}", rank=self._strategy.global_rank):
                return as_lightning(open_source(path, tell=self._strategy.is_global_zero), weights_only)

    def load_file(self, path: str | os.PathLike[str], weights_only: bool | None) -> dict[str, Any] | None:
        """Load a single file by mmap: ranks of a host share its pages, and unused parts are never read.

        None if that is not possible: a remote file, an old format, or a checkpoint plugin.
        """
        if type(self._strategy.checkpoint_io) is not TorchCheckpointIO or is_url(path) or not zipfile.is_zipfile(path):
            return None
        found: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only is not False)
        return found

    def pick(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Remove what the ``checkpoint`` block says not to restore."""
        module, how = self._strategy.lightning_module, self._strategy.config.checkpoint
        trainer = module._trainer if module is not None else None
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        if how.load_module_only:
            kept = {k: v for k, v in checkpoint.items() if k in ("state_dict", "pytorch-lightning_version", KEY)}
            return {**kept, "optimizer_states": [], "lr_schedulers": []}
        require_training_state(checkpoint, how.load_optimizer_states)
        if not how.load_optimizer_states:
            checkpoint["optimizer_states"] = []
        if not how.load_lr_scheduler_states or (KEY in checkpoint and "lr_schedulers" not in checkpoint):
            checkpoint["lr_schedulers"] = []
        return checkpoint

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load the module's weights, now or at sharding. See Note [Life of a restore]."""
        module = self._strategy.lightning_module
        assert module is not None
        with self._agree("reading what a hook has taken from the checkpoint"):
            read_now(module)
        state: Mapping[str, Any] = checkpoint["state_dict"]
        left_out = list(checkpoint.get(KEY, {}).get("frozen_left_out", []))
        owned = any(owner_of(p) is not None for p in module.parameters())
        lazy = any(isinstance(value, LazyTensor) for value in state.values())
        rounds = not self._strategy.config.zero_optimization.load_from_fp32_weights
        meta = any(p.is_meta for p in module.parameters())
        self._late = (state, strict, left_out)
        if owned or not (lazy or rounds or meta):
            self.load_late()
        elif not meta and self._callbacks_restore():
            with self._agree("loading weights"):
                load_module(module, state, strict=False)  # a callback may add missing entries
            held = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
            self._early = {name: (value, held[name]) for name, value in state.items() if name in held}

    def _callbacks_restore(self) -> bool:
        """See Note [Callbacks that restore]."""
        module = self._strategy.lightning_module
        trainer = module._trainer if module is not None else None
        callbacks = trainer.callbacks if trainer is not None else []  # type: ignore[attr-defined]
        return any(is_overridden("on_load_checkpoint", callback, parent=Callback) for callback in callbacks)

    def load_late(self) -> None:
        """Load deferred weights into the sharded module, if there are any."""
        if self._late is None:
            return
        (state, strict, left_out), self._late = self._late, None
        module, strategy = self._strategy.lightning_module, self._strategy
        assert module is not None
        early, self._early = self._early, {}
        state = dict(state)
        state |= {name: held for name, (loaded, held) in early.items() if state.get(name) is loaded}
        rank = strategy.global_rank
        with self._agree("loading weights"), progress_bar("Loading weights", len(state), rank=rank) as work:
            if strategy.built is not None and not strategy.config.zero_optimization.load_from_fp32_weights:
                state = rounded_weights(strategy.built, state)
            load_module(module, counted(state, work.reach), strict, left_out)
            read_now(module)  # the module may hold the tensors themselves (assign=True)

    def forget(self) -> None:
        """End a run: drop weights that it did not load."""
        self._late, self._early = None, {}

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states and the position in the data. Collective."""
        strategy, states = self._strategy, checkpoint["optimizer_states"]
        if PROGRESS in checkpoint:
            with self._agree("restoring random states and the position in the data"):
                strategy.progress.load(checkpoint[PROGRESS], strategy.global_rank, strategy.world_size)
        if not states and (
            strategy.config.checkpoint.load_module_only or not strategy.config.checkpoint.load_optimizer_states
        ):
            return
        total = sum(len(group["params"]) for state in states for group in state.get("param_groups", []))
        waits = progress_bar("Loading optimizer states", total, rank=strategy.global_rank)
        with self._agree("loading optimizer states"), waits as work:
            if len(states) != len(strategy.optimizers):
                raise CheckpointError(
                    f"The checkpoint has {len(states)} optimizer(s), configure_optimizers returns "
                    f"{len(strategy.optimizers)}. Return the same optimizers as before, or set "
                    "checkpoint.load_optimizer_states=false to start with fresh ones."
                )
            for number, (optimizer, state) in enumerate(zip(strategy.optimizers, states, strict=True)):
                if state and by_name(state):
                    state = fitting_state(state, optimizer, strategy.engine, number, strategy.is_global_zero)
                sharded = sharded_of(optimizer)
                if sharded is None:
                    optimizer.load_state_dict(state)
                else:
                    load_full_optimizer_state(sharded, state, work.advance)

    def _agree(self, what: str) -> AbstractContextManager[None]:
        comm = self._strategy.comm
        return comm.agree(what, CheckpointError) if comm is not None else nullcontext()
