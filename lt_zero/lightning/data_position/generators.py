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


def is_known(generator: Any) -> bool:
    """True if its state can be taken and set; a subclass may have a state of its own, or bits from elsewhere."""
    if isinstance(generator, random.Random):
        kind = type(generator)
        return (kind.getstate, kind.setstate) == (random.Random.getstate, random.Random.setstate)
    if isinstance(generator, np.random.RandomState):
        return isinstance(generator._bit_generator, np.random.MT19937)
    return not isinstance(generator, np.random.Generator) or type(generator.bit_generator).__name__ in _NUMPY


def packed(generator: Any) -> dict[str, Any]:
    """A generator's state as plain containers and tensors."""
    if isinstance(generator, torch.Generator):
        return {"kind": "torch", "state": generator.get_state(), "device": generator.device.type}
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
        if generator.device.type == saved.get("device", "cpu"):
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
    elif kind == "torch":
        generator = torch.Generator(saved.get("device", "cpu"))
    else:
        generator = {"random": random.Random, "RandomState": np.random.RandomState}[kind]()
    unpack(generator, saved)
    return generator


def check(saved: dict[str, Any]) -> None:
    """Check a state that was packed; that of a device which this machine may not have is taken on trust.

    Raises:
        LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError: no generator has such a state.
    """
    if saved["kind"] != "torch" or saved.get("device", "cpu") == "cpu":
        unpacked(saved)


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
