"""The base that the strategies of a Trainer and of Fabric share.

Lightning has a base class for each of them, and none for both. This one has what both do alike.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from lightning.fabric.plugins import ClusterEnvironment

from lt_zero.common import accelerator
from lt_zero.common.compat import DeviceMesh
from lt_zero.config import ZeroConfig
from lt_zero.config.applicability import Face
from lt_zero.config.blocks import ActivationCheckpointing
from lt_zero.config.load import Loaded, examine
from lt_zero.config.options import communication_options
from lt_zero.core.comm.process_groups import begin_restarted, check_device, init_alone, joining
from lt_zero.core.health.before_joining import met, watch_start
from lt_zero.training.lightning.arguments import check_launch, with_sizes_of_mesh
from lt_zero.training.lightning.launchers import choose_start
from lt_zero.training.lightning.place import launched_place, place_of
from lt_zero.training.session import Session

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class ShardedStrategy:
    """The configuration, precision, start and place of a rank. It comes before Lightning's class among the bases."""

    face: ClassVar[Face]

    # Of Lightning's classes.
    cluster_environment: ClusterEnvironment | None
    num_nodes: int
    num_processes: int
    world_size: int
    global_rank: int
    _timeout: timedelta | None
    _start_method: StartMethod
    _get_process_group_backend: Callable[[], str]

    if TYPE_CHECKING:  # a property of one strategy, an attribute of the other

        @property
        def config(self) -> ZeroConfig:
            """The configuration, as far as it is resolved."""

    @property
    def stage(self) -> int:
        return self.config.zero_optimization.stage

    @cached_property
    def session(self) -> Session:
        """Set-up, steps and saves, as of every face. Made when it is used first."""
        return Session(self.face)

    def _read_arguments(
        self,
        *,
        stage: int | None,
        config: Mapping[str, Any] | ZeroConfig | str | os.PathLike[str] | None,
        overrides: Sequence[str],
        activation_checkpointing: Mapping[str, Any] | ActivationCheckpointing | str | bool | None,
        broadcast_buffers: bool | None,
        start_method: str,
        timeout: timedelta | None,
        process_group_backend: str | None,
        **sizes: int | None,
    ) -> Loaded:
        """Read the configuration with the arguments of a strategy that are keys of it, and watch the start of ranks.

        ``sizes``: numbers of ranks, by the names of the strategies' arguments.

        Raises:
            ConfigError: names every problem.
            TypeError, ValueError: of ``start_method``, ``timeout``, ``process_group_backend``.
        """
        watch_start(launched_place)
        overrides = with_sizes_of_mesh(overrides, **sizes)
        check_launch(type(self).__name__, start_method, timeout, process_group_backend)
        default = 3 if config is None else None
        return examine(config, stage, overrides, default, activation_checkpointing, True, broadcast_buffers)

    # ---- start, and connections --------------------------------------------------------------------------------

    def _starts_ranks(self) -> bool:
        """Choose how the ranks are started; False: all are there.

        Raises:
            ConfigError, RuntimeError: as ``choose_start``.
        """
        start_method = choose_start(self, self.stage, self._start_method)
        if start_method is not None:
            self._start_method = start_method
        return start_method is not None

    @contextmanager
    def _connecting(self, set_ranks: Callable[[], object]) -> Iterator[None]:
        """Context in which Lightning's own set-up takes the process group that is made here, if one is.

        ``set_ranks``: Lightning's method that asks the cluster environment for the ranks of this process.
        """
        backend = self._get_process_group_backend()
        tasks = self.num_nodes * self.num_processes
        check_device(self.root_device, tasks, backend)
        device = self.root_device if self.root_device.type != "cpu" else None
        # A process of multiprocessing has the ranks of its parent until now, and would meet the others as rank 0.
        set_ranks()
        # Lightning, too, asks the cluster environment, which may count tasks that `devices` and `num_nodes` do not.
        if self.world_size == 1:
            init_alone(backend, self._timeout, device)
        place = place_of(self.cluster_environment, self.global_rank, tasks)
        # Lightning waits for the other ranks in here, too.
        with joining(communication_options(self.config)), met(place, self._timeout):
            begin_restarted(backend, self._timeout, device)
            yield

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        # Lightning's, or that of another strategy which a subclass has among its bases, as Ray's.
        device: torch.device = super().root_device  # type: ignore[misc]
        # Accelerators of vendors may leave out the index, which torch needs to bind the process group.
        return accelerator.with_index(device)

    # ---- places of ranks ---------------------------------------------------------------------------------------

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The ranks along the axes of parallelism, with Lightning's names; None: all are data ranks."""
        return self.session.division.device_mesh

    @property
    def _predicts(self) -> bool:
        """True in a prediction, which has no rounds."""
        return False

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of ranks that see different data, and the index of this one; or of micro-batches of a round."""
        if self.session.rounds.count is not None and not self._predicts:
            return {"num_replicas": self.session.rounds.count, "rank": self.session.rounds.number(0)}
        if self.device_mesh is None:
            known: dict[str, Any] = super().distributed_sampler_kwargs  # type: ignore[misc]
            return known
        return {"num_replicas": self.session.division.data_ranks, "rank": self.session.division.data_rank}

    def _decide(self, decision: bool, all: bool, add: Callable[..., Any]) -> bool:
        """Decide over all ranks, also those that see the same data; ``add`` sums over them. Collective."""
        agreeing = add(torch.tensor(int(decision), device=self.root_device), reduce_op="sum")
        return bool(agreeing == self.world_size) if all else bool(agreeing)

    # ---- the module --------------------------------------------------------------------------------------------

    def _sharded_construction(self) -> AbstractContextManager[object]:
        """Context in which parameters are sharded while they are constructed, at stage 3.

        Raises:
            RuntimeError: the run has not begun.
        """
        peers = self.session.division.peers
        if self.stage != 3 or peers.size == 1:
            return nullcontext()
        from lt_zero.core.engine.construction import ConstructionSharder

        return ConstructionSharder(peers, self.config.zero_optimization.stage3_param_persistence_threshold)

    # ---- saves -------------------------------------------------------------------------------------------------

    def wait_for_save(self) -> None:
        """Wait until the save in the background (``checkpoint.async``) is done. Collective.

        Raises:
            CheckpointError: on all ranks: it has failed.
        """
        self.session.wait_for_save(f"{type(self).__name__}.wait_for_save")
