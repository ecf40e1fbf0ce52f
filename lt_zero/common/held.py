"""Objects that a user's object keeps in its attributes, also in containers and objects there."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DEPTH = 3
_ENTRIES = 64  # of a container, which may have all samples of a data set
_NOT_OF_THE_USER = frozenset({"_trainer", "_fabric", "_parameters", "_buffers", "_modules", "_hparams"})


def held(owner: object, kinds: tuple[type, ...], path: str, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield what ``owner`` keeps of these ``kinds``, with where it is; not what other modules in it keep.

    Args:
        owner: an object of the user.
        kinds: classes to look for.
        path: how messages call ``owner``.
        depth: of attributes and containers that are looked into.
    """
    for name, value in _entries(owner, path):
        if isinstance(value, kinds):
            yield name, value
        elif depth > 1 and not isinstance(value, (Tensor, nn.Module, np.ndarray, type, str, bytes)):
            yield from held(value, kinds, name, depth - 1)


def _entries(owner: object, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(owner, Mapping):
        for _, (key, value) in zip(range(_ENTRIES), owner.items(), strict=False):
            yield f"{path}[{key!r}]", value
    elif isinstance(owner, (list, tuple)):
        for index, value in enumerate(owner[:_ENTRIES]):
            yield f"{path}[{index}]", value
    else:
        attributes = getattr(owner, "__dict__", None)
        for name, value in list(attributes.items()) if isinstance(attributes, dict) else []:
            if name not in _NOT_OF_THE_USER:
                yield f"{path}.{name}", value


class OwnGenerators:
    """Random number generators that objects of the user keep, and whether they were drawn from.

    Args:
        owners: by how messages call them.
    """

    def __init__(self, owners: Iterable[tuple[str, object]]) -> None:
        known: dict[int, tuple[str, Any]] = {}
        for path, owner in owners:
            for name, generator in held(owner, GENERATORS, path):
                known.setdefault(id(generator), (name, generator))
        self._known = list(known.values())

    def states(self) -> list[Any]:
        """Their present states, which later draws do not change."""
        return [_state(generator) for _, generator in self._known]

    def drawn(self, before: list[Any]) -> str | None:
        """The name of one whose state is not that of ``before``, which ``states`` has returned; None: of none."""
        for (name, generator), state in zip(self._known, before, strict=True):
            if _state(generator) != state:
                return name
        return None


def _state(generator: Any) -> Any:
    """The state of a generator, to be compared."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return repr(_plain(generator.get_state(legacy=False)))
    return repr(_plain(generator.bit_generator.state))


def _plain(state: Any) -> Any:
    """A state with bytes in place of arrays, which would be shown in part."""
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state
