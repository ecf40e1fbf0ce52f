"""Fused kernels: the public names of ``lt_zero.kernels``."""

from lt_zero.kernels import *  # noqa: F403
from lt_zero.kernels import __all__ as __all__
