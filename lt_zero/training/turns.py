"""Rounds in a loop of one's own and in Fabric: one backward of a rank is one micro-batch of a round.

Note [Turns of a loop]
    A script runs one micro-batch after the other, and the loader gives them in the order of turns. A turn begins with
    the first forward of training after the last backward, and ends with the next backward. Forwards and backwards draw
    from the random numbers of the micro-batch, and what is between them from those that all ranks share. Each
    micro-batch begins with the buffers of the round. A step is due after a whole number of rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lt_zero.common.errors import ConfigError
from lt_zero.core.engine.engine import Engine
from lt_zero.core.rounds import Rounds

_KEY = "reproducible.virtual_ranks"


class StepTurns:
    """Counts the turns of the model that a script trains. Collective.

    Args:
        rounds: of the run, which has some.
        engine: of the model.
    """

    def __init__(self, rounds: Rounds, engine: Engine) -> None:
        self._rounds = rounds
        self._turn = 0
        self._begun = False  # whether a forward of this turn was run
        self._inside = ExitStack()  # of a backward
        rounds.begin(anew=True)
        rounds.follow(engine.root, engine.peers)
        engine.buffers.leave_to_rounds()
        engine.before_backward.append(self._begin_backward)
        engine.after_backward.append(self._end_backward)

    @property
    def is_last(self) -> bool:
        """True in the last turn of a round."""
        return self._turn + 1 == self._rounds.turns

    @contextmanager
    def forward(self, trains: bool) -> Iterator[None]:
        """Context of a forward; one that does not train is none of a round."""
        if not trains:
            yield
            return
        if not self._begun:
            self._begun = True
            self._rounds.begin_turn(self._turn)
        with self._rounds.turn(self._turn):
            yield

    def _begin_backward(self) -> None:
        self._inside.enter_context(self._rounds.turn(self._turn))

    def _end_backward(self) -> None:
        self._inside.close()
        self._begun = False
        self._turn = (self._turn + 1) % self._rounds.turns
        if self._turn == 0:
            self._rounds.end_round()

    def check_step(self, call: str) -> None:
        """Check that a step follows a whole number of rounds; ``call``: name of the function that steps.

        Raises:
            ConfigError: it does not.
        """
        if self._turn:
            raise ConfigError.about(
                _KEY,
                f"{_KEY}={self._rounds.count}: {call} was called after {self._turn} of the {self._rounds.turns} "
                "backwards that this rank runs in a round. Call backward once for each batch of the loader, and step "
                "after a whole number of rounds.",
            )


class InTurns:
    """Gives the batches of a loader of rounds one after the other.

    Args:
        loader: gives ``Turns``.
        turns: of a round. Other attributes are those of ``loader``.
    """

    def __init__(self, loader: Any, turns: int) -> None:
        self._loader = loader
        self._turns = turns

    def __iter__(self) -> Iterator[Any]:
        for of_round in self._loader:
            yield from of_round.batches

    def __len__(self) -> int:
        return len(self._loader) * self._turns

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self._loader, name)
