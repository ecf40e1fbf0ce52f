"""The door: what a feature can do in a run.

The core and the faces name no feature. They ask the features of a run at a few points, in the order of their table
(``lt_zero.features``), which is the same on all ranks: process groups are made in one order everywhere. A feature that
is off is not imported.

A package of one's own adds a feature on all ranks, before the configuration is read:

    class NoiseBlock(Block):
        scale: Real = key(0.0, "its standard deviation", ge=0)

    class Noise(Feature):
        def watch(self, engine): ...  # self.config.noise is a NoiseBlock

    register(Entry("noise", "my_package.noise:Noise", "noise", lambda config: config.noise.scale > 0, NoiseBlock))

docs/internals/features.md describes each hook, with examples that run (tests/outside).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lt_zero.common.errors import Problem as Problem
from lt_zero.common.fields import Block as Block
from lt_zero.common.fields import Positive as Positive
from lt_zero.common.fields import Real as Real
from lt_zero.common.fields import Whole as Whole
from lt_zero.common.fields import key as key

if TYPE_CHECKING:  # who reads a configuration needs no engine
    from torch import nn

    from lt_zero.core.comm.shard_group import ShardGroup
    from lt_zero.core.engine.engine import Engine


class Handle(Protocol):
    """Takes back what a feature has changed."""

    def remove(self) -> None: ...


class Saved(Protocol):
    """A state that checkpoints have; with the methods of torch, which modules, schedulers and metrics have, too."""

    def state_dict(self) -> Any:
        """The value to save: plain values and tensors, in containers. Not collective.

        Ranks may have different values. The same number of ranks gets its own back, any other one those of rank 0. A
        tensor of which each rank has a part is a ``Fragment`` (lazy_tensor.py) on each; with one in it, the other
        values are those of rank 0.
        """

    def load_state_dict(self, state: Any, /) -> object:
        """Go on with a saved value. Its tensors are on the CPU, those of fragments whole. Not collective."""


class Feature:
    """One feature of a run. All hooks are no-ops by default; a hook is collective if all ranks call it.

    Args:
        config: the configuration of the run, the same on all ranks.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    def rules(self) -> Iterator[Problem]:
        """Find what is wrong with the configuration, which asks for the feature, when it is read.

        Features of other packages are asked; rules of lt_zero's own keys are in config/rules.py.
        """
        return iter(())

    def prepare(self, module: nn.Module, group: ShardGroup, training: bool) -> Handle | None:
        """Change a module before its buckets are planned. Collective.

        Args:
            module: not sharded yet.
            group: the ranks that have it.
            training: as for ``lt_zero.shard``.

        Returns:
            What takes the change back, at an error or when the engine is detached.

        Raises:
            ConfigError: the feature does not fit the module, which is unchanged.
        """
        return None

    def watch(self, engine: Engine) -> Handle | None:
        """Follow a new engine that trains. Collective; returns what ends it, when the engine is detached."""
        return None

    def states(self) -> Mapping[str, Saved]:
        """The states that checkpoints of the watched engine have, by names that no other feature uses.

        Asked at each save, and at each load that resumes: after weights, before optimizers. The same names on all
        ranks.
        """
        return {}


class Features:
    """The features of an engine that trains; one of its handles, by which those who save it find them."""

    def __init__(self, features: Iterable[Feature]) -> None:
        self.features = tuple(features)

    def remove(self) -> None:
        """Nothing: each feature has handles of its own."""


def states_of(engine: Engine) -> dict[str, Saved]:
    """The states of an engine's features, by their names.

    Raises:
        ValueError: two features have a state of one name.
    """
    found: dict[str, Saved] = {}
    for feature in (each for handle in engine.handles if isinstance(handle, Features) for each in handle.features):
        mine = feature.states()
        if twice := found.keys() & mine.keys():
            raise ValueError(
                f"{type(feature).__name__}.states: another feature has a state {min(twice)!r}, too: rename one."
            )
        found |= mine
    return found


@dataclass(frozen=True)
class Entry:
    """A row of the table of features.

    Attributes:
        name: of the feature, in texts.
        place: where its class is, ``module:class``; imported if the feature is asked for.
        key: of the configuration, by which it is asked for.
        asked: returns whether a configuration asks for it.
        block: of a key at the top level that the feature brings; each of its keys has a default. The configuration has
            it as an attribute of the key's name. None: the key is one of lt_zero's.
    """

    name: str
    place: str
    key: str
    asked: Callable[[Any], bool]
    block: type[Block] | None = None


_registered: list[Entry] = []


def register(entry: Entry) -> None:
    """Add a feature after all others. The same on all ranks, in one order.

    Raises:
        ValueError: its name, or the key of its block, is taken.
    """
    if any(known.name == entry.name for known in _registered):
        raise ValueError(f"register({entry.name!r}): a feature of this name exists: rename one.")
    if entry.block is not None and entry.key in blocks():
        raise ValueError(f"register({entry.name!r}): another feature brings the key {entry.key!r}: rename one.")
    _registered.append(entry)


def unregister(name: str) -> None:
    """Forget the feature of that name; runs that have it keep it."""
    _registered[:] = [known for known in _registered if known.name != name]


def registered() -> tuple[Entry, ...]:
    """The features that packages have added, in their order."""
    return tuple(_registered)


def blocks() -> dict[str, type[Block]]:
    """The blocks that registered features bring, by their keys."""
    return {entry.key: entry.block for entry in _registered if entry.block is not None}
