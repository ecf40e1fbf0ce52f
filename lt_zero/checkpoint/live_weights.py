"""Exports the weights of a running engine, gathered bucket by bucket on demand.

Rank 0 writes and requests one bucket after the other; the other ranks take part in gathering it until rank 0 signals
the end, which it does in any case (a full disk, Ctrl-C).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.native.directory import is_in_memory
from lt_zero.checkpoint.native.pieces import on_all_ranks
from lt_zero.checkpoint.source import Format, SavedOptimizer, Spec
from lt_zero.common import plain_names
from lt_zero.common.errors import CheckpointError
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.full_values import refuse_parts
from lt_zero.core.engine.whole_model import WholeModel

_END = ""


class EngineSource:
    """A ``CheckpointSource`` of a model's weights in their master dtype, on rank 0. Other ranks run ``_serve``."""

    optimizers: Sequence[SavedOptimizer] = ()
    meta: Mapping[str, Any] = {}

    def __init__(self, engine: Engine, model: WholeModel) -> None:
        self._engine = engine
        self._model = model
        self.precision = engine.policy.mode
        known = {name: Spec(told.shape, told.dtype) for name, told in model.tensors.items()}
        known |= {alias: known[name] for alias, name in model.aliases.items()}
        self.weights = {name: known[name] for name in model.names if name in known}
        self.aliases: Mapping[str, str] = model.aliases

    def read(self, name: str) -> Tensor:
        name = self.aliases.get(name, name)
        if not self._model.is_here(name):
            self._engine.world.host_broadcast(name, "export")
        value = self._model.read(name)
        assert value is not None
        return value.cpu().contiguous()

    def read_state(self, optimizer: int, name: str, key: str) -> Tensor:
        raise CheckpointError("Optimizer states of a running engine are in its checkpoints: `trainer.save_checkpoint`.")


def _serve(engine: Engine, model: WholeModel) -> None:
    """Take part in reading tensors until rank 0 signals the end."""
    while (asked := engine.world.host_broadcast(None, "export")) != _END:
        model.read(asked)


def export_engine(
    engine: Engine,
    path: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    format: Format = "auto",
    shard_size: int | str | None = None,
    strip_prefix: str | None = "",
    overwrite: bool = False,
) -> None:
    """Write all weights, bucket by bucket, on rank 0. Collective.

    Args:
        engine: of the module.
        path, dtype, format, shard_size, strip_prefix, overwrite: as for ``export``. Parameters that
            ``fp16_override_modules`` keeps in fp32 are exported in fp32.

    Raises:
        CheckpointError, ValueError: on all ranks; an existing file at ``path`` is unchanged.
    """
    refuse_parts(engine, "The export of weights in memory")
    with engine.world.agree("the export", CheckpointError):
        if engine.world.size > 1 and is_in_memory(path):
            raise CheckpointError(
                f"{path} is in the memory of rank 0 alone, and is lost with its process. Export to a file system that "
                "outlives it."
            )
        kept = kept_names(engine)
        model = WholeModel(engine)
        if engine.world.rank == 0:
            try:
                export(
                    EngineSource(engine, model),
                    path,
                    dtype,
                    format,
                    shard_size,
                    False,
                    kept,
                    True,
                    strip_prefix,
                    overwrite,
                )
            finally:
                engine.world.host_broadcast(_END, "export")
        else:
            _serve(engine, model)


def kept_names(engine: Engine) -> list[str]:
    """The names of parameters that exports keep in fp32. Collective if ranks have other modules."""
    mine = {id(p) for p in engine.kept}
    own = [name for name, p in plain_names.named_parameters(engine.root, remove_duplicate=True) if id(p) in mine]
    return on_all_ranks(engine, own, "parameters in fp32")
