"""The average of an engine's weights, as checkpoints and the end of a run ask for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.stores.store import Store


class AveragedWeights(ABC):
    """A handle of an engine (``Engine.handles``) that has averages of its weights, which the model may show.

    Attributes:
        updates: so many weights were averaged; 0: there is no average yet.
        finished: training is over, and the model has the averages for good.
    """

    updates: int
    finished: bool

    @abstractmethod
    def averages(self, bucket: Bucket) -> Store | None:
        """The averages of this rank's weights of ``bucket``; None if it was never trained while there were averages."""

    @abstractmethod
    def rows(self, bucket: Bucket, averaged: bool) -> Callable[[], Tensor] | None:
        """The function that reads this rank's averages (1D, as ``shard``), or its weights; None: the model has them."""

    @abstractmethod
    def buffers(self, averaged: bool) -> dict[str, Tensor]:
        """Buffers of the other kind than the model has now; {} for those that it has."""

    @abstractmethod
    def load(self, state: Mapping[str, Any], averaged: Collection[str], updates: int) -> None:
        """Take averages from a state dict of full tensors, which may be read on demand. Not collective.

        Args:
            state: averages, and weights that have none.
            averaged: names of those that have.
            updates: so many weights were averaged.
        """

    @abstractmethod
    def showing(self, averaged: bool) -> AbstractContextManager[None]:
        """Context in which the model has the averages, or else the weights. Collective."""

    @abstractmethod
    def drop_if_outdated(self) -> None:
        """Drop the trained weights if the model got others after training. Collective."""

    @abstractmethod
    def end(self) -> None:
        """Drop the averages with the weights in the model, or, after training, with the averages. Collective."""


def average_of(engine: Engine) -> AveragedWeights | None:
    """The average of the engine's weights, if there is one."""
    return next((handle for handle in engine.handles if isinstance(handle, AveragedWeights)), None)
