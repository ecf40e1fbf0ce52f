"""The pipeline of a module that has some of a model's layers. Without stages nothing of pipeline/ is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lt_zero.common.errors import ConfigError

if TYPE_CHECKING:
    from lt_zero.parallel.pipeline.layers import Pipeline


def pipeline_of(module: nn.Module, ranks: int) -> Pipeline | None:
    """The pipeline in ``module``; None if there are no stages.

    Raises:
        ConfigError: there is none, or several, or it was made for other ranks.
    """
    if ranks == 1:
        return None
    from lt_zero.parallel.pipeline.layers import pipelines_in

    key = "pipeline.stages"
    found = list(pipelines_in(module))
    if len(found) != 1:
        number = "no" if not found else f"{len(found)}"
        raise ConfigError.about(
            key,
            f"{key}={ranks}, and {type(module).__name__} has {number} lt_zero.parallel.Pipeline. Make one of its "
            "layers in configure_model.",
        )
    name, pipeline = found[0]
    if pipeline.position.ranks != ranks:
        raise ConfigError.about(
            key,
            f"{key}={ranks}, and the pipeline {name!r} was made for {pipeline.position.ranks}. Make it in "
            "configure_model, where the run's ranks are known.",
        )
    return pipeline
