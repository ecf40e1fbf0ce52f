"""Hooks of ``ZeroStrategy`` for saving, loading and reading data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import Optimizer
from typing_extensions import override

from lt_zero.checkpoint.export import Format
from lt_zero.checkpoint.live_weights import export_engine
from lt_zero.comm.communicator import Comm
from lt_zero.common.progress_bar import progress_bar
from lt_zero.config import ZeroConfig
from lt_zero.engine.engine import Engine
from lt_zero.engine.full_params import full_state_dict
from lt_zero.lightning.data_position.position import Progress
from lt_zero.lightning.loading import Restoring
from lt_zero.lightning.precision import ZeroPrecision
from lt_zero.lightning.saving import Persistence


class CheckpointingStrategy(DDPStrategy):
    """The part of ``ZeroStrategy`` that deals with checkpoints and with the position in the data."""

    config: ZeroConfig
    _of_a_run: ClassVar[frozenset[str]] = frozenset({"_engine", "_comm", "persistence", "restoring", "progress"})
    _engine: Engine | None = None
    _comm: Comm | None = None

    def __init__(self, **kwargs: Any) -> None:
        self._begin()
        super().__init__(**kwargs)

    def _begin(self) -> None:
        """Have nothing of a run yet."""
        self._engine = self._comm = None
        self.persistence = Persistence(self)
        self.restoring = Restoring(self)
        self.progress = Progress()

    @override
    def __getstate__(self) -> dict[str, Any]:
        """A copy (of a pickled or deep-copied Trainer) starts unused: without threads, files and process groups."""
        return {name: value for name, value in super().__getstate__().items() if name not in self._of_a_run}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    @property
    def engine(self) -> Engine:
        """The engine of the current module.

        Raises:
            RuntimeError: before set-up.
        """
        if self._engine is None:
            raise RuntimeError("The ZeRO engine does not exist before `Trainer.fit/validate/test/predict`.")
        return self._engine

    @property
    def zero_precision(self) -> ZeroPrecision:
        """The precision plugin."""
        plugin = self.precision_plugin
        assert isinstance(plugin, ZeroPrecision)
        return plugin

    @property
    def built(self) -> Engine | None:
        """``engine``, if there is one."""
        return self._engine

    @property
    def comm(self) -> Comm | None:
        """The engine's collectives; set in ``setup_environment``."""
        return self._comm

    def export(
        self,
        path: str | os.PathLike[str],
        dtype: torch.dtype | str = torch.float16,
        format: Format = "auto",
        shard_size: int | str | None = None,
        strip_prefix: str | None = None,
    ) -> None:
        """Write all weights to files that are readable without lt_zero. Collective: call it on every rank.

        Rank 0 writes one bucket at a time. Arguments and errors are those of ``lt_zero.export``.
        """
        self.engine.comm.roll_call("export")
        export_engine(self.engine, self.broadcast(path), dtype, format, shard_size, strip_prefix)
        self.barrier("export")

    def full_state_dict(self) -> dict[str, Any]:
        """The module's state dict with full tensors on rank 0, {} on the others. Collective: call it on every rank."""
        self.engine.comm.roll_call("full_state_dict")
        return full_state_dict(self.engine)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with (
            self._comm.explaining() if self._comm is not None else nullcontext()
        ):  # saves outside of a run are synchronous
            super().barrier(*args, **kwargs)

    # ---- data --------------------------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        return self.progress.process(super().process_dataloader(dataloader), self.lightning_module.trainer)

    @override
    def on_train_start(self) -> None:
        self.progress.start()

    # ---- checkpoints -------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Fragments on all ranks, or (full checkpoints) the full state dict on rank 0 and {} elsewhere. Collective."""
        if self._engine is None or not self._engine.attached or self._engine.root is not self.lightning_module:
            return super().lightning_module_state_dict()
        self._engine.comm.roll_call("Trainer.save_checkpoint")  # Lightning calls this first
        return self.persistence.model_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Fragments on all ranks, or (full checkpoints) the full state on rank 0 and {} elsewhere. Collective."""
        state = self.persistence.optimizer_state(optimizer)
        return state if state is not None else super().optimizer_state(optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self._comm is not None:
            self._comm.roll_call("Strategy.save_checkpoint")
        path = str(self.broadcast(filepath))  # ranks may have computed different paths
        checkpoint = self.persistence.with_progress(checkpoint)
        if self._engine is not None and self._engine.attached and self.persistence.sharded:
            if storage_options is not None:
                raise TypeError("Sharded checkpoints do not support storage_options: set checkpoint.format='full'.")
            self.persistence.save(checkpoint, path)
            return
        if self.broadcast(self.is_global_zero and os.path.isdir(path)):  # raise on all ranks, or the others hang
            raise IsADirectoryError(f"The checkpoint path {path!r} is a directory. Name a file, or remove it.")
        with progress_bar(f"Saving {path}", rank=self.global_rank):
            super().save_checkpoint(self.persistence.save_full(checkpoint, path), path, storage_options)
        self.persistence.export_beside(path)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self.persistence.wait()  # it may be the one being written
        found = self.restoring.load(checkpoint_path, weights_only)
        found = found or self.restoring.load_file(checkpoint_path, weights_only)
        return self.restoring.pick(found or super().load_checkpoint(checkpoint_path, weights_only))

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.restoring.load_model(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.restoring.load_optimizers(checkpoint)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        self.persistence.remove(str(filepath))

    @override
    def on_train_end(self) -> None:
        self.persistence.wait()
        if self._engine is not None:
            self._engine.finish_steps()  # the process groups may be destroyed after fit
