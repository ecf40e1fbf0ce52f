"""Parallelism beside data: the mesh of ranks, parts of tensors and sequences, pipelines. Nothing below knows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lt_zero.common.places import public_names

if TYPE_CHECKING:
    from lt_zero.parallel.experts import Dispatched as Dispatched
    from lt_zero.parallel.experts import Experts as Experts
    from lt_zero.parallel.experts import combine as combine
    from lt_zero.parallel.experts import dispatch as dispatch
    from lt_zero.parallel.pipeline.layers import Pipeline as Pipeline
    from lt_zero.parallel.pipeline.module import PipelineModule as PipelineModule
    from lt_zero.parallel.pipeline.specs import LayerSpec as LayerSpec
    from lt_zero.parallel.pipeline.specs import TiedLayerSpec as TiedLayerSpec
    from lt_zero.parallel.random import LocalRandom as LocalRandom
    from lt_zero.parallel.reductions import part_group as part_group
    from lt_zero.parallel.reductions import row_group as row_group
    from lt_zero.parallel.sequence.attention import sequence_attention as sequence_attention
    from lt_zero.parallel.sequence.batches import cut_batch as cut_batch
    from lt_zero.parallel.sequence.batches import cut_sequence as cut_sequence
    from lt_zero.parallel.sequence.loss import token_mean as token_mean
    from lt_zero.parallel.sequence.ranks import SequenceRanks as SequenceRanks
    from lt_zero.parallel.sequence.ranks import from_zigzag as from_zigzag
    from lt_zero.parallel.sequence.ranks import to_zigzag as to_zigzag
    from lt_zero.parallel.styles import PartialGradient as PartialGradient

# Imported when first used, by their modules: each needs another part of this folder.
_MODULES = {
    "Dispatched": "experts",
    "Experts": "experts",
    "LayerSpec": "pipeline.specs",
    "LocalRandom": "random",
    "PartialGradient": "styles",
    "Pipeline": "pipeline.layers",
    "PipelineModule": "pipeline.module",
    "SequenceRanks": "sequence.ranks",
    "TiedLayerSpec": "pipeline.specs",
    "combine": "experts",
    "cut_batch": "sequence.batches",
    "cut_sequence": "sequence.batches",
    "dispatch": "experts",
    "from_zigzag": "sequence.ranks",
    "part_group": "reductions",
    "row_group": "reductions",
    "sequence_attention": "sequence.attention",
    "to_zigzag": "sequence.ranks",
    "token_mean": "sequence.loss",
}

__all__ = sorted(_MODULES)

__getattr__ = public_names(__name__, {name: f"{__name__}.{module}" for name, module in _MODULES.items()})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
