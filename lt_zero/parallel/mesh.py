"""The ranks of a run as a mesh: which hold the parts of one model, and which see the same data.

Note [Families]
    A family is the ranks over which a parameter is the same, and ZeRO shards it over them. A parameter that is cut over
    tensor ranks is the same on the data and sequence ranks that have its part; one that is replicated is the same on
    all ranks; parameters of experts are the same on each n-th of n expert ranks, and on all of its tensor ranks. So
    each element of the model has one owner in the world: norms are one sum over the world, replicas cannot drift apart,
    and checkpoints need no deduplication. A replicated parameter's gradient is the mean over all ranks. Tensor ranks
    have equal gradients of it, or partial sums (local.py).
    With pipelines these are the ranks of one stage, which run the same module. A layer that several stages share is the
    same on the ranks of all of them, and its gradient is the sum over stages; a parameter outside of the pipeline is on
    all ranks, each of which computes its whole gradient.

Note [Groups of the user]
    The groups of the axes are the user's, too: metrics are summed over the data ranks, a script may call any collective
    there. The engine's gathers have groups of their own, even over the same ranks. A backend matches the collectives
    of a group by their order only. If a script calls one on some of the ranks, it waits in a group of the user, and
    hang detection names the line; in a group of gathers it would take its values from a gather of weights, and each
    later gather from the one before it.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as DeviceMesh

from lt_zero.common import accelerator
from lt_zero.common.compat.of_distributed_tensors import forget_meshes
from lt_zero.common.console import RunConsole
from lt_zero.common.errors import ConfigError
from lt_zero.common.units import format_bytes
from lt_zero.common.users_code import warn
from lt_zero.config import ZeroConfig
from lt_zero.config.blocks import SequenceParallel
from lt_zero.config.options import group_options
from lt_zero.config.parallel_sizes import ParallelSizes
from lt_zero.core.ask import configure_group
from lt_zero.core.comm.layer_ranks import TokenRanks
from lt_zero.core.comm.part_ranks import PartRanks
from lt_zero.core.comm.process_groups import one_queue
from lt_zero.core.comm.sequence import SequenceGroup
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.same_on_ranks import Snapshot, compare, described, model_facts
from lt_zero.features import features_of
from lt_zero.parallel.buffers import make_plain
from lt_zero.parallel.built_sharded import cut_sharded
from lt_zero.parallel.experts import AXIS, SIZE, cut_experts, is_of_experts
from lt_zero.parallel.first_gradients import FirstGradients
from lt_zero.parallel.local import LocalParts, is_cut, localize
from lt_zero.parallel.plan import check_shared, parallelize, placements, table
from lt_zero.parallel.replaced import Replaced
from lt_zero.parallel.sequence.ranks import SequenceRanks
from lt_zero.parallel.stacked_experts import take_over
from lt_zero.parallel.stages import pipeline_of

if TYPE_CHECKING:
    from lt_zero.core.comm.stage_ranks import StageRanks
    from lt_zero.parallel.pipeline.layers import Pipeline

PIPELINE = "pipeline_parallel"
DATA = "data_parallel"
SEQUENCE = "sequence_parallel"
TENSOR = "tensor_parallel"
AXES = (PIPELINE, DATA, SEQUENCE, TENSOR)  # outermost first: tensor ranks are neighbours, on one node
_UNEVEN = (
    "experts on several ranks get tokens of all of these in each forward. Run as many forwards on all ranks, some of "
    f"them with inputs that are not used, or remove {SIZE}."
)


class _ExpertRanks:
    """The ranks that together have all experts of a model, and those with the same experts. Collective.

    Tensor ranks have the same tokens, and each of them sends them to ranks with its own part of other layers.
    """

    def __init__(self, world: World, sizes: ParallelSizes, holders: ShardGroup | None) -> None:
        rows = sizes.expert_rows().tolist()
        group = world.new_group(None, rows, closes=True, exchanges=True)
        self.members = next(row for row in rows if world.rank in row)
        self.ranks = TokenRanks.joined(world, rows, group)
        self.mesh = DeviceMesh.from_group(group, world.device.type, self.members, mesh_dim_names=(AXIS,))
        self.same = ShardGroup(world, sizes.expert_parts().tolist(), divisor=sizes.of_stage, holders=holders)


class ParallelMesh:
    """The ranks of a run along the axes of parallelism.

    Args:
        sizes: along each axis.
        world: all ranks. Collective.
        method: how sequence ranks compute attention.

    Attributes:
        device_mesh: with an axis for each of ``AXES``, also for those of size 1.
        data_rank: which data this rank sees, of ``sizes.data``. Its sequence and tensor ranks, and other stages, see
            the same.
        sequence_rank: which part of sequences this rank sees, of ``sizes.sequence``.
        tensor_rank: which part of tensors this rank has, of ``sizes.tensor``.
        pipeline_rank: which stage of pipelines this rank has, of ``sizes.pipeline``.
        peers: the ranks that have the same stage; None: all ranks do.
        replaced: parameters that were replaced by parts of them.
        token_group: the ranks that see other tokens, of other data or of another part of sequences.
        sequence: the ranks with parts of the same sequences; None: sequences are not cut.
    """

    def __init__(self, sizes: ParallelSizes, world: World, method: SequenceParallel | None = None) -> None:
        self.sizes = sizes
        self._world = world
        self.replaced = Replaced()
        self.data_rank, self.tensor_rank = sizes.data_rank(world.rank), world.rank % sizes.tensor
        self.pipeline_rank, self.sequence_rank = world.rank // sizes.of_stage, sizes.sequence_rank(world.rank)
        mesh = torch.arange(world.size).view(sizes.pipeline, sizes.data, sizes.sequence, sizes.tensor)
        rows = [mesh.movedim(axis, -1).reshape(-1, mesh.shape[axis]).tolist() for axis in range(mesh.dim())]
        # Of this world, whose hang detection closes them: a rank that is gone would be waited for in a layer.
        groups = [
            world.new_group(None, parts, closes=True, exchanges=axis in (PIPELINE, SEQUENCE))
            for axis, parts in zip(AXES, rows, strict=True)
        ]
        forget_meshes()
        self.device_mesh = DeviceMesh.from_group(groups, world.device.type, mesh, mesh_dim_names=AXES)
        self._stages = mesh.view(sizes.pipeline, -1).tolist()
        self.peers = ShardGroup(world, self._stages, divisor=sizes.of_stage) if sizes.pipeline > 1 else None
        tensor = AXES.index(TENSOR)
        self._part_ranks = PartRanks(world, rows[tensor], groups[tensor]) if sizes.tensor > 1 else None
        self._experts = _ExpertRanks(world, sizes, self.peers) if sizes.expert > 1 else None
        first = world.rank // sizes.of_data_rank * sizes.of_data_rank
        waits_for = {*range(first, first + sizes.of_data_rank), *(self._experts.members if self._experts else ())}
        world.expect_in_layers(sorted(waits_for))
        with_part = sizes.parts().tolist()
        self._cut: ShardGroup | None = None  # that have the same part of what tensor ranks cut
        if sizes.tensor > 1:
            self._cut = ShardGroup(world, with_part, divisor=sizes.with_part, holders=self.peers)
        self.token_group = groups[AXES.index(DATA)]
        self.sequence: SequenceRanks | None = None
        if sizes.sequence > 1:
            along, method = AXES.index(SEQUENCE), method or SequenceParallel()
            self.token_group = world.new_group(None, with_part, closes=True)
            made, how = SequenceGroup.joined(world, rows[along], groups[along]), (method.method, method.gather)
            # Without tensor ranks those that see other tokens are all ranks of a stage.
            self.sequence = SequenceRanks(made, self._cut or self.peers or world, *how, method.zigzag)
        self._row: StageRanks | None = None
        if sizes.pipeline > 1:
            from lt_zero.core.comm.stage_ranks import StageRanks

            self._row = StageRanks(world, rows[AXES.index(PIPELINE)])
        self._shared: dict[tuple[frozenset[int], bool], ShardGroup] = {}  # by the stages, and whether it is cut

    @property
    def data_group(self) -> Any:
        """The ranks that see different data, and have the same parts of the model and of sequences."""
        return self.device_mesh[DATA].get_group()

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that have the other parts of this rank's tensors."""
        return self.device_mesh[TENSOR]

    def share_generators(self) -> None:
        """Let ranks that see the same data draw the numbers of the first of them. Collective.

        Without a seed of the user each process has one of its own.
        """
        generators = accelerator.default_generators(self._world.device.type)
        mine = [generator.get_state() for generator in generators]
        told = self._world.host_gather(hashlib.sha256(b"".join(s.numpy().tobytes() for s in mine)).digest(), "seeds")
        firsts = [self.sizes.firsts()[self.sizes.data_rank(rank)] for rank in range(self._world.size)]
        if all(told[rank] == told[first] for rank, first in enumerate(firsts)):
            return
        states = self._world.host_gather(mine, "generators")[firsts[self._world.rank]]
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    def compare_stages(self, module: nn.Module) -> None:
        """Compare what the ranks say of all layers of pipelines, and what each of them has beside these. Collective.

        Each rank makes its own layers only, so nothing else would tell that its code divides other ones.

        Raises:
            RuntimeError: on all ranks, if they differ; names the first layer, parameter or division, and the ranks.
        """
        if self.sizes.pipeline == 1:
            return
        from lt_zero.parallel.pipeline.layers import pipelines_in

        facts, inside = dict[str, Any](), set[str]()
        for name, pipeline in pipelines_in(module):
            whole = f"of the pipeline {name!r}" if name else "of the pipeline"
            facts |= {f"{what} {whole}": value for what, value in pipeline.facts.items()}
            inside.add(name)
        # A module that is a pipeline has nothing beside it.
        beside = model_facts(module, leaves_out=inside) if "" not in inside else {}
        compare(self._world, Snapshot.of(facts | beside), "layers of a pipeline")

    def cut(self, module: nn.Module, config: ZeroConfig) -> dict[nn.Parameter, Callable[[], Tensor]]:
        """Parallelize a module as its user, the configuration or its own plan says. Errors: ``parallelize``.

        Returns what reads the values of parameters that were sharded when they were built.
        """

        def cut() -> None:
            if self.sizes.tensor > 1:
                self._cut_layers(module, config)
            if self._experts is not None:
                self._cut_experts(module, self._experts)

        if not self._meshes:
            return {}
        # Outside of ``cut_sharded``: optimizers have the parameters that there were before it.
        with self.replaced.noting(module):
            if self._experts is not None:
                take_over(module, self._of_stages)
            return cut_sharded(module, cut)

    def _cut_layers(self, module: nn.Module, config: ZeroConfig) -> None:
        rows = parallelize(module, self.tensor, config, self._of_stages)
        pipeline = pipeline_of(module, self.sizes.pipeline)
        if pipeline is not None:
            check_shared(self._of_stages(placements(pipeline, _shared(pipeline))))
        if self._world.rank == 0:
            RunConsole().print(table(rows))

    def _cut_experts(self, module: nn.Module, experts: _ExpertRanks) -> None:
        cut_experts(module, experts.mesh, experts.ranks, self._of_stages)
        pipeline = pipeline_of(module, self.sizes.pipeline)
        shared = _shared(pipeline) if pipeline is not None else set()
        if any(self._of_stages(any(is_of_experts(parameter) for parameter in shared))):
            raise ConfigError.about(
                SIZE,
                f"{SIZE}={self.sizes.expert}: a layer that several stages of the pipeline share has experts. Give each "
                "stage experts of its own (LayerSpec instead of TiedLayerSpec).",
            )

    @property
    def _meshes(self) -> list[DeviceMesh]:
        """Those over which parameters may be distributed."""
        tensor = [self.tensor] if self.sizes.tensor > 1 else []
        return [*tensor, self._experts.mesh] if self._experts is not None else tensor

    def _of_stages(self, value: Any) -> list[Any]:
        """Values of the first ranks of all stages, in order of the stages. Collective."""
        if self.sizes.pipeline == 1:
            return [value]
        return self._world.host_gather(value, "a plan")[:: self.sizes.of_stage]

    def arguments(self, module: nn.Module, group: ShardGroup, config: ZeroConfig) -> dict[str, Any]:
        """Arguments of ``lt_zero.shard`` for a module that is one stage, or has parameters that are DTensors.

        ``group``: all ranks. Collective. Errors are those of ``localize``, ``make_plain`` and ``pipeline_of``.
        """
        pipeline, given = pipeline_of(module, self.sizes.pipeline), dict[str, Any]()
        if self.peers is not None:
            given["group"] = self.peers
            self._share(set(pipeline.shared.values()) if pipeline is not None else set())
        # ``configure`` is collective, so all ranks call it for every group, whatever parameters they have in it.
        of_experts = self._experts.same if self._experts is not None else None
        options, features = group_options(config), features_of(config)
        for each in (group, self.peers, self._cut, of_experts, *self._shared.values()):
            if each is not None:
                configure_group(each, options, features)
        if self._meshes:
            first = None
            given["specs"] = localize(module, self._meshes)
            if self.sizes.tensor > 1:
                names = {id(p): name for name, p in module.named_parameters()}
                make_plain(module)
                first = FirstGradients(self.peers or self._world, self.sizes.tensor, names)
            uneven = _UNEVEN if self._experts is not None else ""
            given["parts"] = LocalParts(first, self._part_ranks, is_of_experts, uneven)
        stages = pipeline.stages_of_parameters() if pipeline is not None else {}
        return {**given, "group_of": partial(self._group_of, group, stages)}

    def _share(self, sets: set[frozenset[int]]) -> None:
        """Make groups of the ranks of several stages, which share layers. Collective."""
        known = {key for key, _ in self._shared}
        for stages in sorted((each for each in sets - known if len(each) > 1), key=sorted):
            whole = [sorted(rank for stage in stages for rank in self._stages[stage])]
            whole += [self._stages[stage] for stage in range(self.sizes.pipeline) if stage not in stages]
            made = self._shared[stages, False] = ShardGroup(self._world, whole, divisor=self.sizes.of_stage)
            if self.sizes.tensor > 1:
                parts = [[r for r in ranks if r % self.sizes.tensor == n] for ranks in whole for n in self._tensors]
                self._shared[stages, True] = ShardGroup(self._world, parts, divisor=self.sizes.with_part, holders=made)

    @property
    def _tensors(self) -> range:
        return range(self.sizes.tensor)

    def connect(
        self,
        engine: Engine,
        config: ZeroConfig,
        begin: Callable[[], float],
        weight: Callable[[], float],
        first: Callable[[], None] | None = None,
        in_rounds: bool = False,
    ) -> None:
        """Let the pipeline of an engine's module run in stages. Arguments after ``config``: as for ``Runner``."""
        pipeline = pipeline_of(engine.root, self.sizes.pipeline)
        if pipeline is None:
            return
        from lt_zero.parallel.pipeline.runner import Runner

        assert self._row is not None
        group = self.device_mesh[PIPELINE].get_group()
        counts = self.data_rank, self.sizes.data, config.micro_batches
        alike = self._experts is not None
        pipeline.runner = Runner(pipeline, engine, self._row, group, *counts, begin, weight, alike, first, in_rounds)
        if self.sizes.of_stage > 1 and self._world.rank == 0:
            _warn_of_traffic(engine, config)

    def share_buffers(self, module: nn.Module) -> None:
        """Give all stages the first one's buffers beside the pipeline, which each of them has. Collective.

        Raises:
            RuntimeError: on all ranks of a pipeline, if they have others.
        """
        pipeline = pipeline_of(module, self.sizes.pipeline)
        if pipeline is None or self._row is None:
            return
        inside = {id(buffer) for buffer in pipeline.buffers()}
        beside = {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in inside}
        compare(self._row, Snapshot.of({f"buffer {n!r}": described(b) for n, b in beside.items()}), "buffers of stages")
        for name, buffer in beside.items():
            sent = buffer.contiguous()
            self._row.broadcast(sent, f"buffer {name}")
            buffer.copy_(sent)

    def watch(self, engine: Engine) -> None:
        """Compare the gradients of the first backward. See first_gradients.py."""
        parts, known = engine.parts, weakref.ref(engine)
        if isinstance(parts, LocalParts) and parts.first is not None:
            engine.after_backward.append(partial(_compare, known, parts.first))

    def _group_of(
        self, group: ShardGroup, stages: Mapping[nn.Parameter, frozenset[int]], name: str, parameter: nn.Parameter
    ) -> ShardGroup:
        cut, holding = is_cut(parameter), stages.get(parameter, frozenset())
        if self._experts is not None and is_of_experts(parameter):
            return self._experts.same
        if len(holding) > 1:
            return self._shared[holding, cut]
        if cut:
            assert self._cut is not None
            return self._cut
        return self.peers if self.peers is not None and holding else group


def _shared(pipeline: Pipeline) -> set[nn.Parameter]:
    """Parameters of layers that several stages have."""
    return {parameter for parameter, stages in pipeline.stages_of_parameters().items() if len(stages) > 1}


def mesh_of(config: ZeroConfig, world: World) -> ParallelMesh | None:
    """The mesh that the configuration asks for; None if all ranks are data ranks. Collective.

    Raises:
        ConfigError: the sizes are not those of so many ranks; or a GPU has one queue for all groups.
    """
    sizes = ParallelSizes.of(config, world.size)
    if sizes.is_plain:
        return None
    if accelerator.has_streams(world.device) and one_queue(world.device):
        named = {"tensor_parallel.autotp_size": sizes.tensor, "pipeline.stages": sizes.pipeline}
        named |= {"sequence_parallel_size": sizes.sequence, SIZE: sizes.expert}
        key, size = next((key, size) for key, size in named.items() if size > 1)
        raise ConfigError.about(
            key,
            f"{key}={size} needs process groups beside the others, which "
            "CUDA_DEVICE_MAX_CONNECTIONS=1 does not allow: unset it.",
        )
    return ParallelMesh(sizes, world, config.sequence_parallel)


def _warn_of_traffic(engine: Engine, config: ZeroConfig) -> None:
    """Warn of gradients that are reduced for each micro-batch, because they are sharded."""
    stage, count = config.zero_optimization.stage, config.micro_batches
    sharded = [bucket for bucket in engine.buckets if bucket.sharding.grads and bucket.wants_grad]
    nbytes = sum(bucket.layout.numel * bucket.grads.send_dtype(bucket.dtype).itemsize for bucket in sharded)
    if nbytes and count > 1:
        warn(
            f"zero_optimization.stage={stage} shards gradients, so a pipeline reduces them for each of its {count} "
            f"micro-batches: {format_bytes(count * nbytes)} per step on a rank of the first stage. Stage 1 reduces "
            f"them once, {format_bytes(nbytes)}."
        )


def _compare(engine: weakref.ref[Engine], first: FirstGradients) -> None:
    known = engine()
    # A backward that failed on this rank is not counted.
    if known is not None and known.backwards > 0:
        first.compare()
