"""A run whose ranks have parts of the model, or of the sequences that it is trained on."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lt_zero.common.compat.of_distributed_tensors import before_distribution
from lt_zero.common.transformers_models import warn_of_caches
from lt_zero.config import ZeroConfig
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.division import BatchCut, Division, Inputs
from lt_zero.core.engine.engine import Engine
from lt_zero.core.feature import PlaceInRun
from lt_zero.parallel.batches import check_same_batch
from lt_zero.parallel.mesh import ParallelMesh
from lt_zero.parallel.plan import keeping_ties
from lt_zero.parallel.reductions import group_of_reduction
from lt_zero.parallel.sequence.batches import HOOK, SIZE, leave_to_user
from lt_zero.parallel.sequence.huggingface import mixes_parts_of_rows
from lt_zero.parallel.sequence.ranks import SequenceRanks, in_use
from lt_zero.parallel.sequence.run import SequenceRun

T = TypeVar("T")


class DividedRun(Division):
    """A run over the axes of a mesh.

    Args:
        group, config: as for ``Division``.
        mesh: the ranks along the axes of parallelism.

    Attributes:
        sequences: batches and models of a run whose sequences are cut over ranks; None: they are not.
    """

    def __init__(self, group: ShardGroup, config: ZeroConfig, mesh: ParallelMesh) -> None:
        super().__init__(group, config)
        self.mesh = mesh
        self.sequences: SequenceRun | None = None
        if mesh.sequence is not None:
            self.sequences = SequenceRun(mesh.sequence, mesh.sizes.tensor, mesh.sizes.pipeline)
            self.batch_cut = BatchCut(SIZE, mesh.sizes.sequence, HOOK)
        self._asked_for: list[Any] = [mesh]  # by parts of models
        if mesh.sizes.pipeline > 1:
            from lt_zero.parallel.pipeline.position import Position

            self._asked_for.append(Position(mesh.pipeline_rank, mesh.sizes.pipeline, config.pipeline))
        self._compared = set[str]()  # kinds of batches of which the first was compared

    # ---- ranks -------------------------------------------------------------------------------------------------

    @property
    @override
    def peers(self) -> ShardGroup:
        return self.mesh.peers or self.group

    @property
    @override
    def firsts(self) -> range:
        return self.mesh.sizes.firsts()

    @property
    @override
    def data_rank(self) -> int:
        return self.mesh.data_rank

    @property
    @override
    def part_rank(self) -> int:
        return self.mesh.tensor_rank

    @property
    @override
    def device_mesh(self) -> DeviceMesh:
        return self.mesh.device_mesh

    @property
    @override
    def data_group(self) -> Any:
        return self.mesh.data_group

    @property
    @override
    def token_group(self) -> Any:
        return self.mesh.token_group

    @override
    def group_of_reduction(self, reduce_op: Any) -> Any:
        return group_of_reduction(self.mesh, reduce_op)

    @override
    def place(self, number: int) -> PlaceInRun:
        return PlaceInRun(number, self.mesh.sizes.of_data_rank, in_parts=True)

    # ---- the run of this process -------------------------------------------------------------------------------

    @override
    def begin(self, new: bool) -> None:
        super().begin(new)
        if new:
            self.mesh.share_generators()
        self._compared.clear()

    @override
    def find(self, kind: type[T]) -> T | None:
        return next((part for part in self._asked_for if isinstance(part, kind)), None)

    @property
    @override
    def row_ranks(self) -> SequenceRanks | None:
        return in_use(self.mesh.sequence)

    # ---- building modules --------------------------------------------------------------------------------------

    @override
    @contextmanager
    def building(self, module: nn.Module, compare: Callable[[], object]) -> Generator[None, None, None]:
        # A module of other layers, or sizes, would send others than its peers wait for.
        with keeping_ties(module), before_distribution(compare):
            yield

    @override
    def compare(self, module: nn.Module) -> None:
        self.mesh.compare_stages(module)

    @override
    def adopt(self, module: nn.Module) -> None:
        if self.sequences is not None:
            self.sequences.switch(module)

    @override
    def arguments(self, module: nn.Module, config: ZeroConfig) -> dict[str, Any]:
        saved = self.mesh.cut(module, config)
        return {"group": self.group, "saved": saved, **self.mesh.arguments(module, self.group, config)}

    @override
    def connect(
        self, engine: Engine, config: ZeroConfig, begin: Callable[[], float], weight: Callable[[], float]
    ) -> None:
        self.mesh.watch(engine)
        checks = self.sequences.watch(engine) if self.sequences is not None else None
        self.mesh.connect(engine, config, begin, weight, checks, self.rounds.count is not None)

    @override
    def share_buffers(self, module: nn.Module) -> None:
        self.mesh.share_buffers(module)

    @override
    def follow_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        self.mesh.replaced.follow(optimizers)

    @override
    def warn_of_caches(self, module: nn.Module) -> None:
        warn_of_caches(module, mixes_parts_of_rows)

    # ---- batches and passes ------------------------------------------------------------------------------------

    @property
    @override
    def cuts_inputs(self) -> bool:
        return self.sequences is not None and self.sequences.cuts_inputs

    @override
    def compare_batch(self, batch: Any) -> None:
        if self.sequences is None:  # else it is compared before it is cut
            self._compare_first(batch, "train")

    def _compare_first(self, batch: Any, kind: str) -> None:
        if kind not in self._compared:
            self._compared.add(kind)
            check_same_batch(self.mesh, self.world, batch)

    @override
    def cut_batch(self, batch: Any, module: nn.Module | None, kind: str = "train") -> Any:
        if self.sequences is None:
            return batch
        self._compare_first(batch, kind)
        return self.sequences.cut(batch, module)

    @override
    def cut_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], trains: bool) -> Inputs:
        if self.sequences is None or not self.sequences.cuts_inputs:
            return args, kwargs
        self._compare_first([args, kwargs], "train" if trains else "other")
        return (), self.sequences.cut_inputs(module, args, kwargs)

    @override
    @contextmanager
    def forward(self, module: nn.Module, trains: bool) -> Generator[None, None, None]:
        with ExitStack() as stack:
            if self.sequences is not None:
                if trains:
                    stack.enter_context(self.sequences.own_numbers(self.world.device.type))
                stack.enter_context(self.sequences.as_trained(module))
            yield

    @override
    def leave_to_user(self, whole_in_eval: bool) -> None:
        if self.sequences is not None:
            leave_to_user(self.sequences.ranks)
            self.sequences.whole_in_eval = whole_in_eval

    @override
    def compare_loss(self, loss: Tensor) -> None:
        if self.sequences is not None:
            self.sequences.compare_loss(loss, self.world)
