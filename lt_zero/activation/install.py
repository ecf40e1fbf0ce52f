"""Installs activation checkpointing on an engine's model for training, and removes it afterwards."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch

from lt_zero.activation.apply import Around, apply
from lt_zero.activation.find import Found, find_modules
from lt_zero.activation.profile import open_boundary
from lt_zero.activation.stores import Store, open_store
from lt_zero.config.blocks import ActivationCheckpointing
from lt_zero.engine.engine import Engine
from lt_zero.io.thread_pool import SwapError
from lt_zero.offload.host_store import is_apart


class Installed:
    """The activation checkpointing of one engine.

    Args:
        engine: the engine, whose hooks report the end of a backward and of a step.
        found: the modules.
        store: stores their inputs; None: they stay on the device.
    """

    def __init__(self, engine: Engine, found: Found, store: Store | None) -> None:
        block = engine.config.activation_checkpointing
        self._engine, self.found, self.store = engine, found, store
        self._device = engine.buckets[0].flat.device
        self.boundary = open_boundary(block, self._device, engine.comm.rank, engine.config.steps_per_print)
        around: Around | None = None
        recompute: Around | None = None
        if self.boundary is not None:
            around, recompute = self.boundary.around, partial(self.boundary.around, recompute=True)
        self.checkpointing = apply(engine.root, block, store, around, recompute, engine.comm.rank == 0)
        if self.boundary is not None:
            engine.after_step.append(self.boundary.end_step)
        if store is not None:
            engine.after_backward.append(store.end_backward)
            engine.offload_manager.others.append(self._problem)

    def _problem(self) -> SwapError | None:
        return self.store.problem if self.store is not None else None

    def __str__(self) -> str:
        return f"{self.checkpointing}{_where(self._engine.config.activation_checkpointing, self._device)}"

    def remove(self) -> None:
        """Give the modules their own forward back, and free what is stored."""
        self.checkpointing.remove()
        engine = self._engine
        if self.boundary is not None and self.boundary.end_step in engine.after_step:
            engine.after_step.remove(self.boundary.end_step)
        if self.store is not None and self.store.end_backward in engine.after_backward:
            engine.after_backward.remove(self.store.end_backward)
            engine.offload_manager.others.remove(self._problem)
            self.store.close()


def install(engine: Engine) -> Installed | None:
    """Checkpoint the modules that the engine's configuration selects, until the engine is detached. Collective.

    Idempotent. Returns None if nothing is configured.

    Raises:
        ConfigError: there is nothing to checkpoint.
        SwapError: a rank cannot create files in ``nvme_path``.
    """
    config, comm, there = engine.config, engine.comm, installed(engine)
    block = config.activation_checkpointing
    if there is not None or block.mode == "none" or not engine.buckets:  # without parameters nothing trains
        return there
    found, device = find_modules(engine.root, block), engine.buckets[0].flat.device
    store: Store | None = None
    try:
        with (
            comm.agree("opening the folder for saved inputs", SwapError)
            if block.nvme_path is not None
            else nullcontext()
        ):
            store = open_store(block, device, len(found.chosen), config.aio, comm.rank)
        made = Installed(engine, found, store)
    except BaseException:
        if store is not None:
            store.close()  # another rank may have failed: this rank's folder would stay until the process ends
        raise
    engine.handles.append(made)
    return made


def installed(engine: Engine) -> Installed | None:
    """The installed activation checkpointing, or None."""
    return next((handle for handle in engine.handles if isinstance(handle, Installed)), None)


def uninstall(engine: Engine) -> None:
    """Restore the modules' original forward; the engine stays attached."""
    if (there := installed(engine)) is not None:
        there.remove()
        engine.handles.remove(there)


def _where(block: ActivationCheckpointing, device: torch.device) -> str:
    """Where saved inputs are stored, for the line that is logged at the start."""
    one = " in one block" if block.contiguous_memory_optimization else ""
    if block.nvme_path is not None:
        return f", inputs in files in {block.nvme_path}"
    if block.cpu_checkpointing:
        return f", inputs in host memory{one}" + ("" if is_apart(device) else " (the model's device)")
    return f", inputs{one}" if one else ""
