"""Parallelism beside data: the mesh of ranks, parts of tensors and sequences, pipelines. Nothing below knows of it."""

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
