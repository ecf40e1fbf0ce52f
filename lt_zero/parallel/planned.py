"""The division of a run over a mesh that is planned: what its ranks will have, without processes."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn
from typing_extensions import override

from lt_zero.config import ZeroConfig
from lt_zero.config.parallel_sizes import ParallelSizes
from lt_zero.core.division import PlannedDivision, PlannedParts
from lt_zero.parallel import experts, plan
from lt_zero.parallel.stages import pipeline_of


class PlannedMesh(PlannedDivision):
    """A run over the axes of a mesh.

    Args:
        config: of the run.
        sizes: of the mesh.
    """

    def __init__(self, config: ZeroConfig, sizes: ParallelSizes) -> None:
        self._config = config
        self._sizes = sizes

    @override
    def building(self, number: int) -> AbstractContextManager[None]:
        from lt_zero.parallel.pipeline import position

        return position.at(position.Position(number, self._sizes.pipeline, self._config.pipeline, plans=True))

    @override
    def parts(self, module: nn.Module) -> PlannedParts:
        sizes = self._sizes
        stacks = experts.planned_parts(module, sizes.expert, of_stage=sizes.pipeline > 1)
        tensors = plan.planned_parts(module, sizes.tensor, self._config)
        pipeline = pipeline_of(module, sizes.pipeline)
        if pipeline is None:
            return PlannedParts(tensors, stacks)
        holding = pipeline.stages_of_parameters()
        everywhere = range(sizes.pipeline)  # beside the pipeline
        counts = {parameter: len(holding.get(parameter, everywhere)) for parameter in module.parameters()}
        shared = {parameter: count for parameter, count in counts.items() if count > 1}
        layers = sum(len(pipeline.parts[stage]) for stage in pipeline.position.own)
        return PlannedParts(tensors, stacks, shared, layers)
