"""Generators of random numbers that samplers and data have of their own: torch's, numpy's and Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_NUMPY = {"MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"}  # generators of bits


def is_global(generator: Any) -> bool:
    """True if it is one of the generators of the process, or has no state."""
    known = [torch.default_generator, random._inst, np.random.mtrand._rand]
    return isinstance(generator, random.SystemRandom) or any(generator is one for one in known)


def packed(generator: Any) -> dict[str, Any]:
    """A generator's state as plain containers and tensors."""
    if isinstance(generator, torch.Generator):
        return {"kind": "torch", "state": generator.get_state()}
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"kind": "random", "state": torch.tensor(words, dtype=torch.int64), "more": [version, gauss]}
    if isinstance(generator, np.random.RandomState):
        return {"kind": "RandomState", "state": _plain(generator.get_state(legacy=False))}
    return {"kind": "numpy", "state": _plain(generator.bit_generator.state)}


def unpack(generator: Any, saved: dict[str, Any]) -> None:
    """Set a generator's state; one of another class is left as it is."""
    kind = saved["kind"]
    state = saved["state"]
    if kind == "torch" and isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif kind == "random" and isinstance(generator, random.Random):
        version, gauss = saved["more"]
        generator.setstate((version, tuple(state.tolist()), gauss))
    elif kind == "RandomState" and isinstance(generator, np.random.RandomState):
        generator.set_state(_arrays(state))
    elif kind == "numpy" and isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _arrays(state)


def unpacked(saved: dict[str, Any]) -> Any:
    """A new generator with a state.

    Raises:
        LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError: no generator has such a state.
    """
    kind = saved["kind"]
    if kind == "numpy":
        bits = saved["state"]["bit_generator"]
        if bits not in _NUMPY:
            raise ValueError(bits)
        generator: Any = np.random.Generator(getattr(np.random, bits)())
    else:
        generator = {"torch": torch.Generator, "random": random.Random, "RandomState": np.random.RandomState}[kind]()
    unpack(generator, saved)
    return generator


def _plain(state: Any) -> Any:
    """numpy's arrays and numbers in a state as tensors and Python's; numbers of more than 64 bits as text."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return torch.tensor(state.tolist(), dtype=torch.int64) if state.dtype != np.uint64 else [str(x) for x in state]
    if isinstance(state, (int, np.integer)) and not isinstance(state, bool):
        return int(state) if abs(int(state)) < 1 << 62 else str(int(state))
    return state


def _arrays(state: Any) -> Any:
    """The inverse of ``_plain``."""
    if isinstance(state, dict):
        return {key: _arrays(value) if key != "bit_generator" else value for key, value in state.items()}
    if isinstance(state, Tensor):
        return np.array(state.tolist(), dtype=np.uint32)
    if isinstance(state, list):
        return np.array([int(x) for x in state], dtype=np.uint64)
    return int(state) if isinstance(state, str) else state
