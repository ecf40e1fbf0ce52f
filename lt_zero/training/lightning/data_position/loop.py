"""The place of a loader in a loop of the user's, which saves the loader's state where it likes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lt_zero.common.errors import CheckpointError
from lt_zero.common.random_states import RandomStates
from lt_zero.training.lightning.data_position.loader_place import LoaderPlace
from lt_zero.training.lightning.data_position.position import Feed, LoaderPosition, Make, tracked
from lt_zero.training.lightning.data_position.resume import faults_of, other_shares, place_of

PLACE = "lt_zero_place"


class LoopLoader:
    """A loader that resumes by itself, as Fabric sets it up: its state has all that its order follows from.

    The state of the user's loader does not have the epoch of its sampler, which Fabric counts from 0 in each process,
    nor what a sampler without ``state_dict`` has drawn its order from. Both are saved beside it. A resumed pass draws
    no random number of the process: the loop may restore their states before it reads a batch.

    Args:
        loader: the user's.
        ranks: that see different data.
        tells: whether this process warns of what is not repeated.
        through: what batches go through, given a function that opens the user's loader.

    Attributes:
        loader: what the loop reads; None if the class of the user's loader is not Python's.
    """

    def __init__(self, loader: Any, ranks: int, tells: bool, through: Callable[[Make], Iterator[Any]]) -> None:
        self._feed = Feed(self._before_batch, lambda: None)
        self._position = LoaderPosition(self._feed, loader, ranks)
        self._feed.positions.append(self._position)
        self._tells = tells
        self._through = through
        self._passes = 0  # that were opened, which Fabric tells samplers as their epoch
        self._is_loaded = False
        self._given: Any = None  # the state that was loaded last
        self._pending: LoaderPlace | None = None  # its place, until a batch is read
        self.loader = tracked(loader, self._open, self.state_dict, self.load_state_dict)
        if tells:
            self._position.tell_inexact()

    def state_dict(self) -> Any:
        """The state of the user's loader, with the place beside it."""
        if self._pending is not None:
            return self._given
        place = self._position.saved(self._position.place())
        state = place.state if place.state is not None else self._position.ask()
        if not isinstance(state, dict):
            return state
        # The end of a loader has no other meaning here than that its next pass follows.
        packed = replace(place, state=None, cycled=False).state_dict()
        return {**state, PLACE: {"place": packed, "passes": self._passes}}

    def load_state_dict(self, saved: Any) -> None:
        """Go on at the place, when the next batch is read.

        Raises:
            CheckpointError: the place cannot be read.
        """
        if not isinstance(saved, dict) or PLACE not in saved:  # of another strategy
            self._position.load(saved)
            return
        packed = saved[PLACE] if isinstance(saved[PLACE], dict) else {}
        wrong = faults_of(packed.get("place")) + ([] if isinstance(packed.get("passes"), int) else ["passes"])
        if wrong:
            raise CheckpointError(
                f"{PLACE}: {', '.join(wrong)} of a loader cannot be read. The checkpoint is damaged. Remove the key "
                f"{PLACE!r} from the state of the loader to resume without it."
            )
        place = place_of(packed["place"], PLACE)
        # A loader that was not read yet has told the state of a pass that it has begun to be able to tell one.
        state = {key: value for key, value in saved.items() if key != PLACE} if place.openings > 0 else None
        self._pending = replace(place, state=state)
        self._given = saved
        self._passes = packed["passes"] - _is_inside(place)
        self._is_loaded = True

    def _open(self, make: Make) -> Iterator[Any]:
        self._passes += 1
        if self._is_loaded:
            self._tell_epoch()
        return self._position.open(lambda: self._through(make))

    def _tell_epoch(self) -> None:
        """Tell samplers the epoch, as Fabric would have in the run that was not interrupted."""
        self._position.tell_epochs(dict.fromkeys(("sampler", "batch_sampler.sampler"), self._passes - 1))

    def _before_batch(self) -> None:
        if self._pending is not None:
            place = self._pending
            self._pending = None
            before = RandomStates.now()
            if self._tells and _is_inside(place):
                text = other_shares(self._position.loader, self._position.at, place)
                if text is not None:
                    self._position.tell(text)
            self._position.resume(place, new_epoch=False)
            if not _is_inside(place):
                self._tell_epoch()
            before.apply()
        self._feed.remember(first_of_window=False)


def _is_inside(place: LoaderPlace) -> bool:
    """True if a pass goes on at a place."""
    return place.fetched > 0 and not place.exhausted
