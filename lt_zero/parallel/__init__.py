"""Parallelism beside data: the mesh of ranks, parts of tensors, and pipelines of layers. Nothing below knows of it."""

from lt_zero.parallel.pipeline.layers import Pipeline as Pipeline
from lt_zero.parallel.pipeline.module import PipelineModule as PipelineModule
from lt_zero.parallel.pipeline.specs import LayerSpec as LayerSpec
from lt_zero.parallel.pipeline.specs import TiedLayerSpec as TiedLayerSpec
from lt_zero.parallel.random import LocalRandom as LocalRandom
from lt_zero.parallel.styles import PartialGradient as PartialGradient
