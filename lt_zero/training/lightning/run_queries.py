"""A run under a strategy: its parts, and the questions of users while it runs, and after it."""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lt_zero.checkpoint.source import Format
from lt_zero.config import ZeroConfig
from lt_zero.config.applicability import Face
from lt_zero.core.comm.world import World
from lt_zero.training.checkpoints import export_weights, whole_weights
from lt_zero.training.lightning.checkpoint_service import CheckpointService
from lt_zero.training.lightning.data_position.position import DataPosition
from lt_zero.training.lightning.model_report import memory_report
from lt_zero.training.lightning.monitoring import CommRecord, RunMonitor, monitor_of
from lt_zero.training.lightning.precision import sharded_of
from lt_zero.training.lightning.reconcile import Reconciler
from lt_zero.training.lightning.setup import RunSnapshot
from lt_zero.training.lightning.sharded_strategy import ShardedStrategy


class RunQueries(ShardedStrategy, DDPStrategy):
    """The parts of a run under ``ZeroStrategy``, and its public methods that users call, and Lightning does not."""

    face = Face.TRAINER
    _reconciler: Reconciler

    @property
    def run(self) -> RunSnapshot:
        """A snapshot for the parts of the strategy, which do not see the strategy."""
        raise NotImplementedError

    @property
    def world(self) -> World | None:
        """All ranks of the run; None before it begins."""
        raise NotImplementedError

    @property
    @override
    def config(self) -> ZeroConfig:
        """The configuration, as far as it is resolved."""
        return self._reconciler.config

    # Parts of a run, made when they are used first.

    @cached_property
    def data(self) -> DataPosition:
        """The position in the data."""
        return DataPosition()

    @cached_property
    def checkpoints(self) -> CheckpointService:
        """The service behind Lightning's saves and loads."""
        return CheckpointService(self.data)

    @cached_property
    def monitor(self) -> RunMonitor:
        """Monitors and loggers of the run."""
        return monitor_of(self.config, self.session.trial)

    def memory_report(self) -> dict[str, tuple[int, int]]:
        """Bytes of model states per kind: (on this rank now, what a replicated run holds)."""
        return memory_report(self.run.engine, self.run.sharded)

    def grad_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> Tensor:
        """The global norm (0D) of the averaged gradients; after backward and before the step. Collective.

        Args:
            optimizer: whose parameters count; default: the first.
            norm_type: any order that torch takes. The result is the norm of the norms of all gradients, as that of
                ``torch.nn.utils.get_total_norm``: for order 0 the number of gradients that are not all zeros.

        Raises:
            ValueError: the optimizer has no parameters of this model.
        """
        sharded = sharded_of(optimizer if optimizer is not None else self.optimizers[0])
        if sharded is None:
            raise ValueError("The optimizer has no parameters of this model.")
        sharded.engine.world.roll_call("grad_norm")
        return sharded.grads.unscaled_norm(norm_type)

    def full_state_dict(self) -> dict[str, Any]:
        """The module's state dict with full tensors on rank 0, {} on the others. Collective: call it on every rank.

        With ``EMA`` it has the averages, as exports have.
        """
        return whole_weights(self.run.engine, "full_state_dict")

    def save_trained_weights(self, checkpoint: dict[str, Any]) -> None:
        """Add the trained weights to a checkpoint whose state dict has the averages of ``EMA``. Collective."""
        self.checkpoints.add_trained(self.run, checkpoint)

    def export(
        self,
        path: str | os.PathLike[str],
        dtype: torch.dtype | str | None = None,
        format: Format = "auto",
        shard_size: int | str | None = None,
        strip_prefix: str | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write all weights to files that are readable without lt_zero. Collective: call it on every rank.

        Rank 0 writes one bucket at a time. Arguments and errors are those of ``lt_zero.export``.
        """
        more = {"shard_size": shard_size, "strip_prefix": strip_prefix, "overwrite": overwrite}
        engine = self.run.engine
        engine.world.roll_call("export")  # before the first of Lightning's collectives
        export_weights(engine, self.broadcast(path), dtype=dtype, format=format, **more)
        self.barrier("export")

    def comms_summary(self) -> list[CommRecord]:
        """The cost of this rank's collectives since the last ``fit`` (or other entry point) began.

        Raises RuntimeError if nothing is recorded.
        """
        world = self.world  # ``run`` asks the launcher for the rank, whose variables may be gone after a run
        if world is None:
            self.run.refuse_parent("the record of collectives")
        records = self.monitor.collectives(world) if world is not None else None
        if records is None:
            raise RuntimeError(
                "Collectives are only recorded with comms_logger.enabled: true, once Trainer.fit, validate, test or "
                "predict has begun. Enable it and start a run first."
            )
        return records
