"""The door: what a feature can do in a run.

The core and the faces name no feature. They ask the features of a run at a few points, in the order of their table
(``lt_zero.features``), which is the same on all ranks: process groups are made in one order everywhere. A feature that
is off is not imported.

A package of one's own adds a feature on all ranks, before the configuration is read:

    class Noise(Feature):
        def watch(self, engine, run): ...

    register(Entry("noise", "my_package.noise:Noise", "my_noise", lambda config: config.of("my_noise").scale > 0))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.engine import Engine


class Handle(Protocol):
    """Takes back what a feature has changed."""

    def remove(self) -> None: ...


@dataclass(frozen=True)
class Run:
    """Facts of the run that trains an engine.

    Attributes:
        number: of the engine, in the order of set-up; None: there is no run, a caller of ``lt_zero.shard`` trains it.
        ranks_of_model: so many neighbouring ranks see the same data, and have parts of them or of the model.
        in_parts: some ranks have parts of the model, or of sequences; then ``ranks_of_model`` may be 1 all the same.
    """

    number: int | None = None
    ranks_of_model: int = 1
    in_parts: bool = False


class Figure(ABC):
    """A number that a feature measures, and that monitors show beside their own. ``Feature.watch`` returns it.

    Monitors call ``begin`` and ``end`` for each training; without monitors nothing is called.

    Attributes:
        name: in logs, ``zero/NAME`` or ``Train/Samples/NAME``.
        label: in lines that are printed.
    """

    name: str
    label: str

    @abstractmethod
    def begin(self, micro_batches: int, weight: Callable[[], float]) -> None:
        """Measure from here on: the engine has its optimizers.

        Args:
            micro_batches: of a step.
            weight: what the loss of a micro-batch is multiplied with before its backward.

        Raises:
            ConfigError: there is no such number in this training.
        """

    @abstractmethod
    def see_batch(self, rows: int) -> None:
        """Note the samples of a micro-batch of this rank."""

    @abstractmethod
    def read(self) -> float | None:
        """The number; None while it is unknown. Collective."""

    @abstractmethod
    def end(self) -> None:
        """Measure no longer. No-op if it does not."""

    def remove(self) -> None:
        """End it with the engine."""
        self.end()


def figures_of(engine: Engine) -> list[Figure]:
    """The numbers that features measure of an engine, in the order of the features."""
    return [handle for handle in engine.handles if isinstance(handle, Figure)]


class Feature:
    """One feature of a run. All hooks are no-ops by default; a hook is collective if all ranks call it.

    Args:
        config: the configuration of the run, the same on all ranks.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

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

    def watch(self, engine: Engine, run: Run) -> Handle | None:
        """Follow an engine that is ready to train: its weights are loaded, and are the same on all ranks. Collective.

        It is called once for each engine; optimizers may come later.

        Returns:
            What ends it, when the engine is detached. A ``Figure`` is shown by monitors.
        """
        return None


@dataclass(frozen=True)
class Entry:
    """A row of the table of features.

    Attributes:
        name: of the feature, in texts.
        place: where its class is, ``module:class``; imported if the feature is asked for.
        key: of the configuration, or variable of the environment, by which it is asked for.
        asked: returns whether a configuration, or the environment, asks for it.
    """

    name: str
    place: str
    key: str
    asked: Callable[[Any], bool]


_registered: list[Entry] = []


def register(entry: Entry) -> None:
    """Add a feature after all others. The same on all ranks, in one order.

    Raises:
        ValueError: its name is taken.
    """
    if any(known.name == entry.name for known in _registered):
        raise ValueError(f"register({entry.name!r}): a feature of this name exists: rename one.")
    _registered.append(entry)


def unregister(name: str) -> None:
    """Forget the feature of that name; runs that have it keep it."""
    _registered[:] = [known for known in _registered if known.name != name]


def registered() -> tuple[Entry, ...]:
    """The features that packages have added, in their order."""
    return tuple(_registered)
