"""Tensor parallelism: the mesh of ranks, and parameters that are parts of tensors. Nothing below knows of it."""

from lt_zero.parallel.random import LocalRandom as LocalRandom
from lt_zero.parallel.styles import PartialGradient as PartialGradient
