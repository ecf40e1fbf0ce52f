"""Activation checkpointing of an engine's model: put on when it is to train, taken off when it is done."""

from __future__ import annotations

import warnings

from lt_zero.activation.apply import Checkpointing, apply
from lt_zero.core.engine import Engine


def install(engine: Engine) -> Checkpointing | None:
    """Checkpoint what the engine's configuration says, until the engine is detached; once is enough.

    Raises:
        ConfigError: there is nothing to checkpoint.
    """
    block, there = engine.config.activation_checkpointing, installed(engine)
    if there is not None or block.kind == "none":
        return there
    if block.partition_activations and engine.comm.rank == 0:
        warnings.warn(
            "activation_checkpointing.partition_activations=true: there is no tensor- or sequence-parallel group to "
            "split saved inputs over, so each rank keeps its own (as DeepSpeed does in data parallel).",
            stacklevel=2,
        )
    made = apply(engine.root, block)
    engine.handles.append(made)
    return made


def installed(engine: Engine) -> Checkpointing | None:
    """What was installed and not removed."""
    return next((handle for handle in engine.handles if isinstance(handle, Checkpointing)), None)


def uninstall(engine: Engine) -> None:
    """Give the modules their own forward back; the engine stays as it is."""
    if (there := installed(engine)) is not None:
        there.remove()
        engine.handles.remove(there)
