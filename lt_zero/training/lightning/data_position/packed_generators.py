"""States of generators of random numbers (generators.py) as plain containers and tensors, and back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lt_zero.training.lightning.data_position.generators import BIT_GENERATORS


def packed(generator: Any) -> dict[str, Any]:
    """A generator's state as plain containers and tensors."""
    if isinstance(generator, torch.Generator):
        return {"kind": "torch", "state": generator.get_state(), "device": generator.device.type}
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"kind": "random", "state": torch.tensor(words, dtype=torch.int64), "more": [version, gauss]}
    if isinstance(generator, np.random.RandomState):
        return {"kind": "RandomState", "state": _plain(generator.get_state(legacy=False))}
    if isinstance(generator, np.random.SeedSequence):
        return {"kind": "SeedSequence", "state": _of_seeds(generator)}
    state = {"kind": "numpy", "state": _plain(generator.bit_generator.state)}
    seeds = _seeds_of(generator)
    return {**state, "seeds": _of_seeds(seeds)} if seeds is not None else state


def unpack(generator: Any, saved: dict[str, Any]) -> Any:
    """Set a generator's state, and return it, or another one that has to take its place.

    One of another class is left as it is. A generator that was saved with seeds, and has none here, is replaced.
    """
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
    elif kind == "SeedSequence" and isinstance(generator, np.random.SeedSequence):
        _set_seeds(generator, state)
    elif kind == "numpy" and isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _arrays(state)
        seeds = _seeds_of(generator)
        if "seeds" in saved and seeds is None:
            return unpacked(saved)
        if "seeds" in saved:
            _set_seeds(seeds, saved["seeds"])
    return generator


def unpacked(saved: dict[str, Any]) -> Any:
    """A new generator with a state.

    Raises:
        LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError: no generator has such a state.
    """
    kind = saved["kind"]
    state = saved["state"]
    if kind == "numpy":
        bits = state["bit_generator"]
        if bits not in BIT_GENERATORS:
            raise ValueError(bits)
        seeds = _seed_sequence(saved["seeds"]) if "seeds" in saved else None
        generator: Any = np.random.Generator(getattr(np.random, bits)(seeds))
    elif kind == "SeedSequence":
        return _seed_sequence(state)
    elif kind == "torch":
        generator = torch.Generator(saved.get("device", "cpu"))
    else:
        generator = {"random": random.Random, "RandomState": np.random.RandomState}[kind]()
    return unpack(generator, saved)


def check(saved: dict[str, Any]) -> None:
    """Check a state that was packed; that of a device which this machine may not have is taken on trust.

    Raises:
        LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError: no generator has such a state.
    """
    if saved["kind"] != "torch" or saved.get("device", "cpu") == "cpu":
        unpacked(saved)


def _seeds_of(generator: np.random.Generator) -> np.random.SeedSequence | None:
    """The sequence by which a generator spawns others; None if it has none, or one of another class."""
    bits = generator.bit_generator
    seeds = getattr(bits, "seed_seq", getattr(bits, "_seed_seq", None))  # the private name: before numpy 1.25
    return seeds if type(seeds) is np.random.SeedSequence else None


def _of_seeds(seeds: np.random.SeedSequence) -> dict[str, Any]:
    """A sequence of seeds as plain containers; integers, which may have any number of bits, as text."""
    entropy: Any = seeds.entropy
    return {
        "entropy": str(entropy) if isinstance(entropy, (int, np.integer)) else [str(word) for word in entropy],
        "spawn_key": [str(word) for word in seeds.spawn_key],
        "pool_size": seeds.pool_size,
        "spawned": seeds.n_children_spawned,
    }


def _set_seeds(seeds: Any, saved: dict[str, Any]) -> None:
    """Set what ``_of_seeds`` has returned.

    numpy has no method for it. The sequence stays the same object, since others may hold it too.
    """
    entropy = saved["entropy"]
    np.random.SeedSequence.__init__(
        seeds,
        int(entropy) if isinstance(entropy, str) else [int(word) for word in entropy],
        spawn_key=tuple(int(word) for word in saved["spawn_key"]),
        pool_size=saved["pool_size"],
        n_children_spawned=saved["spawned"],
    )


def _seed_sequence(saved: dict[str, Any]) -> np.random.SeedSequence:
    """The inverse of ``_of_seeds``."""
    seeds = np.random.SeedSequence(0)
    _set_seeds(seeds, saved)
    return seeds


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
