"""The features and states beside an engine, and the numbers that features measure of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from lt_zero.core.engine.engine import Engine
from lt_zero.core.feature import Feature, Handle, PlaceInRun, Restorable


class Follower:
    """A feature beside an engine, which has this in its ``handles``.

    Attributes:
        handle: what ``feature.watch`` has returned; None: nothing, or it does not follow the engine.
        has_state: the feature has followed the engine, so that checkpoints have its states, also between two fits.
    """

    def __init__(self, feature: Feature) -> None:
        self.feature = feature
        self.handle: Handle | None = None
        self.has_state = False
        self._follows = False

    def begin(self, engine: Engine, run: PlaceInRun) -> bool:
        """Let the feature follow the engine; returns whether it did not already. Collective."""
        if self._follows:
            return False
        self.handle = self.feature.watch(engine, run)
        self.has_state = True
        self._follows = True
        return True

    def remove(self) -> None:
        """End it. Idempotent."""
        if self.handle is not None:
            self.handle.remove()
        self.handle = None
        self._follows = False


def followers(engine: Engine) -> list[Follower]:
    """The features beside an engine, in the order of their table."""
    return [handle for handle in engine.handles if isinstance(handle, Follower)]


def follow(engine: Engine, run: PlaceInRun) -> list[Feature]:
    """Let the features beside an engine follow it; returns those that did not already. Collective."""
    return [follower.feature for follower in followers(engine) if follower.begin(engine, run)]


def end_fit(engine: Engine) -> None:
    """End what features do for one fit only; the engine stays attached."""
    for follower in followers(engine):
        if follower.feature.ends_with_fit:
            follower.remove()


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
        """The number; None while it is unknown. It may wait for the device. Collective."""

    @abstractmethod
    def end(self) -> None:
        """Measure no longer. No-op if it does not."""

    def remove(self) -> None:
        """End it with the engine."""
        self.end()


def figures_of(engine: Engine) -> list[Figure]:
    """The numbers that features measure of an engine, in the order of the features."""
    return [follower.handle for follower in followers(engine) if isinstance(follower.handle, Figure)]


@runtime_checkable
class OfAllRanks(Protocol):
    """A state of checkpoints of which each rank needs what all ranks had. Others are ``Restorable``."""

    def state_dict(self) -> Any:
        """The value of this rank, as for ``Restorable``, without fragments."""

    def load_of_ranks(self, states: Sequence[Any], /) -> object:
        """Go on with the values of all ranks that saved: these may have been more or fewer. Not collective."""


class StateBeside:
    """A state of checkpoints that a face has beside an engine, which has this in its ``handles``.

    Args:
        name: that no feature's state has.
        state: is saved, and loaded by runs that have one of this name.
    """

    def __init__(self, name: str, state: Restorable | OfAllRanks) -> None:
        self.name = name
        self.state = state

    def remove(self) -> None:
        """End it with the engine."""


def states_of(engine: Engine) -> dict[str, Restorable | OfAllRanks]:
    """The states beside an engine, by their names; without those of features that have not begun: nothing was trained.

    Raises:
        ValueError: two features have a state of one name.
    """
    found: dict[str, Restorable | OfAllRanks] = {}
    for follower in followers(engine):
        if not follower.has_state:
            continue
        mine = follower.feature.states()
        if twice := found.keys() & mine.keys():
            raise ValueError(
                f"{type(follower.feature).__name__}.states: another feature has a state {min(twice)!r}, too: rename "
                "one."
            )
        found |= mine
    return found | {beside.name: beside.state for beside in engine.handles if isinstance(beside, StateBeside)}
