"""The random states of virtual ranks, and those that all ranks share outside of their turns.

Note [Streams]
    Outside of turns (hooks of callbacks, the step, schedules) all ranks draw the same random numbers: those of rank 0,
    whose states they get when training begins. Each virtual rank has streams of its own, derived from these states and
    its number: one from which its data are drawn (the order of its samples, what samples draw, the seeds of its
    workers), and one for all else (dropout, what hooks and losses draw). They are apart because a loader may read
    ahead. A third one begins alike for all virtual ranks: samplers draw from it that share out one order (data.py).
    A stream goes on from round to round, whichever rank runs it, so it is a function of the number alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lt_zero.common.errors import CheckpointError
from lt_zero.common.random_states import RandomStates
from lt_zero.common.saved_random_states import derived, read_states

COMPUTE = "compute"
DATA = "data"
ORDER = "order"
_KINDS = (COMPUTE, DATA, ORDER)
States = dict[tuple[str, int], RandomStates]  # by kind, and number of the virtual rank


class Streams:
    """The streams of some virtual ranks.

    Args:
        count: the number of virtual ranks of the run.
        numbers: of the virtual ranks of this process.
    """

    def __init__(self, count: int, numbers: Sequence[int]) -> None:
        self.count = count
        self.numbers = tuple(numbers)
        self._states: States = {}
        self._inside: tuple[str, int] | None = None  # the stream that the process draws from; None: the shared one

    def begin(self, shared: RandomStates) -> None:
        """Derive the streams from the states that all ranks share."""
        self._inside = None  # an error may have ended the last run inside of a turn
        for number in self.numbers:
            self._states[COMPUTE, number] = derived(shared, number + 1)
            self._states[DATA, number] = derived(shared, self.count + number + 1)
            self._states[ORDER, number] = derived(shared, 2 * self.count + 1)

    @contextmanager
    def of(self, number: int, kind: str = COMPUTE) -> Iterator[None]:
        """Context in which the process draws from a stream of virtual rank ``number``. Contexts of one stream nest."""
        if self._inside == (kind, number):
            yield
            return
        outside, before = self._inside, RandomStates.now()
        self._inside = kind, number
        self._states[kind, number].apply()
        try:
            yield
        finally:
            self._states[kind, number] = RandomStates.now()
            self._inside = outside
            before.apply()

    def get(self, number: int, kind: str) -> RandomStates:
        """The states of a stream that the process does not draw from now."""
        return self._states[kind, number]

    def now(self) -> States:
        """The present states, which later draws do not change."""
        return dict(self._states)

    def set(self, states: States) -> None:
        """Let the streams go on from ``states``: those of ``now``, or some of them."""
        self._states.update(states)

    def packed(self, states: States) -> dict[str, Any]:
        """States as plain containers and tensors, by kind and number."""
        found: dict[str, Any] = {}
        for (kind, number), state in states.items():
            found.setdefault(kind, {})[number] = state.state_dict()
        return found

    def unpacked(self, saved: Sequence[Mapping[str, Any]], where: str) -> States:
        """States of these virtual ranks, of what all ranks of the saved run have ``packed``.

        Raises:
            CheckpointError: one is missing, or malformed.
        """
        found: States = {}
        for kind in _KINDS:
            of_all = {number: state for of_rank in saved for number, state in of_rank.get(kind, {}).items()}
            if len(of_all) != self.count:
                raise CheckpointError(
                    f"{where}: the checkpoint has random states of {len(of_all)} virtual ranks, and this run has "
                    f"reproducible.virtual_ranks={self.count}. Resume with as many virtual ranks as the run that has "
                    "saved."
                )
            for number in self.numbers:
                found[kind, number] = read_states(of_all[number], where)
        return found
