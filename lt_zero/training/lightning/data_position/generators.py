"""Generators of random numbers that samplers and data have of their own: torch's, numpy's and Python's.

numpy's sequences of seeds are among them: which seeds they spawn next depends on how many they have spawned. A
generator that spawns others does it by its sequence.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random, np.random.SeedSequence)
BIT_GENERATORS = {"MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"}  # generators of bits


def is_global(generator: Any) -> bool:
    """True if it is one of the generators of the process, or has no state."""
    known = [torch.default_generator, random._inst, np.random.mtrand._rand]
    return isinstance(generator, random.SystemRandom) or any(generator is one for one in known)


def is_known(generator: Any) -> bool:
    """True if its state can be taken and set; a subclass may have a state of its own, or bits from elsewhere."""
    if isinstance(generator, random.Random):
        kind = type(generator)
        return (kind.getstate, kind.setstate) == (random.Random.getstate, random.Random.setstate)
    if isinstance(generator, np.random.RandomState):
        return isinstance(generator._bit_generator, np.random.MT19937)
    if isinstance(generator, np.random.SeedSequence):
        return type(generator) is np.random.SeedSequence
    return not isinstance(generator, np.random.Generator) or type(generator.bit_generator).__name__ in BIT_GENERATORS
