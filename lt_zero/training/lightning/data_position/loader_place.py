"""The place of a training loader before a batch, and moments of all loaders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from lt_zero.common.random_states import RandomStates
from lt_zero.training.lightning.data_position.witness import Witness

if TYPE_CHECKING:
    from lt_zero.training.lightning.data_position.openings import Opening

POSITION = "lt_zero_progress"
VERSION = 2
COUNTED = ("ready", "started", "processed", "completed")  # of Lightning's counters of batches


@dataclass
class LoaderPlace:
    """The place of a loader before a batch."""

    unit: int  # samples of all ranks in a batch
    start: RandomStates | None = None  # at the start of the pass
    own: dict[str, Any] = field(default_factory=dict)  # private state at the start of the pass
    # Now. Where the pass goes on, ``OwnState.take`` may have left out what it sets.
    own_now: dict[str, Any] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)  # at the start of the pass
    epochs_now: dict[str, int] = field(default_factory=dict)
    fetched: int = 0  # batches in the pass
    served: int = 0  # batches in the epoch, over several passes
    openings: int = 0  # passes with the same workers
    cycled: bool = False  # whether the loader has ended in this epoch
    exhausted: bool = False  # whether the pass has ended
    state: Any = None  # of a loader that resumes by itself; None: it has none, or was not asked
    opening: Opening | None = None  # of the sampler of such a loader
    witness: Witness | None = None
    ranks: int | None = None  # that saw different data; None: not known
    workers: int | None = None  # that load; None: not known

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors, and what the loader's own state has."""
        packed = dict(vars(self))
        for name in ("start", "opening", "witness"):
            if packed[name] is not None:
                packed[name] = packed[name].state_dict()
        return packed


class Moment(NamedTuple):
    """A point before a combined batch of all loaders, to which a resumed run can go back."""

    states: RandomStates
    served: int  # batches of the epoch before it
    places: list[LoaderPlace]
    rounds: Any = None  # random states of the micro-batches of rounds


class Draws(NamedTuple):
    """The random states of the process, and those of the micro-batches of rounds."""

    states: RandomStates
    rounds: Any
