"""``PipelineModule``: a pipeline in the spelling of DeepSpeed 0.19, for ``lt_zero.initialize``.

It is made before the run's configuration is known. Its rank is that of the process group: ranks with the same layers
are neighbours, as in the mesh of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from lt_zero.common.errors import ConfigError
from lt_zero.config import ZeroConfig
from lt_zero.config.blocks import PipelineParallel
from lt_zero.config.load import examine
from lt_zero.core.comm.process_groups import rank_and_size
from lt_zero.parallel.pipeline.layers import Loss, Manner, Pipeline
from lt_zero.parallel.pipeline.position import Position
from lt_zero.parallel.pipeline.specs import Layer

_STAGES = "pipeline.stages"


class PipelineModule(Pipeline):
    """Layers that run one after the other, each on one rank of a pipeline, trained by ``engine.train_batch``.

    Make it after ``lt_zero.init_distributed()``, and pass it to ``lt_zero.initialize(model=...)``. A layer is called
    with what the one before returns, a tensor or a tuple of tensors, as its only argument.

    Args:
        layers: ``LayerSpec``, ``TiedLayerSpec``, modules, and functions without parameters.
        num_stages: ranks one after the other; they divide all ranks.
        topology: None: ``num_stages`` and ``tensor_parallel`` of the configuration decide it.
        loss_fn: called with the output of the last layer and the labels; None: the last layer returns the loss.
        seed_layers: seed each layer by ``base_seed`` plus its number, so that ranks make their own layers only.
        seed_fn: called with that seed in place of ``torch.manual_seed``.
        partition_method: ``parameters``, ``uniform`` or ``type:REGEX``.
        activation_checkpoint_interval: layers that are recomputed together; that of the configuration, if there is one,
            counts in its place.
        activation_checkpoint_func: None, or torch's ``checkpoint``, which recomputes in any case.
        checkpointable_layers: classes of layers that are recomputed; None: all that have parameters.
        dynamic_shape: without effect: shapes may differ from batch to batch.
        stages_per_rank: as ``pipeline.stages_per_rank``, for the schedules Interleaved1F1B and LoopedBFS.

    Raises:
        ConfigError: ``num_stages`` does not divide the ranks, or is more than the layers; a value is no valid one.
        ValueError: an argument has no meaning here.
    """

    loop_engine = "lt_zero.training.loop.pipeline_engine:PipelineEngine"

    def __init__(
        self,
        layers: Iterable[Layer],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Loss | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        stages_per_rank: int = 1,
    ) -> None:
        if topology is not None or num_stages is None:
            raise ValueError(
                "PipelineModule needs num_stages=..., and no topology: ranks with the same layers are neighbours, and "
                "tensor_parallel.autotp_size of the configuration are the ranks that share each layer."
            )
        if activation_checkpoint_func not in (None, checkpoint):
            raise ValueError(
                "PipelineModule(activation_checkpoint_func=...): torch's checkpoint recomputes layers. Remove it."
            )
        if partition_method.lower() == "time":
            key = "pipeline.partition_method"
            raise ConfigError.about(
                key,
                f"{key}='time': the ranks of a PipelineModule divide layers before there is a run in which they could "
                "compare times. Write parameters or type:REGEX, or make a lt_zero.parallel.Pipeline(..., "
                "example=inputs) in configure_model.",
            )
        keys = {
            "stages": num_stages,
            "partition_method": partition_method,
            "schedule": "Interleaved1F1B" if stages_per_rank > 1 else "1F1B",
            "stages_per_rank": stages_per_rank,
            "activation_checkpoint_interval": activation_checkpoint_interval,
            "seed_layers": seed_layers,
        }
        block = examine({"pipeline": keys}).usable().pipeline
        manner = Manner(
            lambda number: (seed_fn or torch.manual_seed)(base_seed + number),
            None if checkpointable_layers is None else frozenset(checkpointable_layers),
            activation_checkpoint_interval,
            packs=True,
        )
        given = loss_fn if loss_fn is not None else _own_loss
        super().__init__(list(layers), given, position=_position(num_stages, block), manner=manner)

    def adapted(self, config: ZeroConfig) -> ZeroConfig:
        """The configuration for so many stages as it is made for.

        Raises:
            ConfigError: it says another number.
        """
        stages = self.position.ranks
        if config.pipeline.stages not in ("auto", stages):
            told = f"{_STAGES}={config.pipeline.stages}"
            text = f"{told}, but the model is PipelineModule(num_stages={stages}). Remove the key."
            raise ConfigError.about(_STAGES, text)
        overrides = [f"{_STAGES}={stages}"]
        count = config.pipeline.num_microbatches
        if count is not None and config.gradient_accumulation_steps is None:
            overrides.append(f"gradient_accumulation_steps={count}")
        return examine(config, overrides=overrides).usable()


def _own_loss(output: Any, labels: Any) -> Any:
    return output


def _position(stages: int, block: PipelineParallel) -> Position:
    """Position of this rank in its pipeline, from its rank in the process group.

    Raises:
        ConfigError: the stages do not divide the ranks.
    """
    rank, ranks = rank_and_size()
    if ranks % stages:
        remedy = "Use a divisor, or start another number of processes."
        if ranks == 1:
            remedy = "Call lt_zero.init_distributed() before, in processes of a launcher."
        raise ConfigError.about(_STAGES, f"PipelineModule(num_stages={stages}) does not divide {ranks} ranks. {remedy}")
    return Position(rank // (ranks // stages), stages, block)
