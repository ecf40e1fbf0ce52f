"""Rounds in a loop of one's own and in Fabric: one backward of a rank is one micro-batch of a round.

Note [Turns of a loop]
    A script runs one micro-batch after the other, and the loader gives them in the order of turns. A turn begins when
    the loader gives a batch, or else with the first forward of training after the last backward, and ends with the next
    backward. From the batch to the end of its backward all draws are from the random numbers of the micro-batch: how
    often a process draws there depends on how many of a round it runs. Later draws are from those that all ranks share.
    Each micro-batch begins with the buffers of the round. A step is due after a whole number of rounds.
    Checkpoints have the random numbers of all micro-batches and the shared ones, as they are between two turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from lt_zero.common.errors import ConfigError
from lt_zero.common.random_states import RandomStates
from lt_zero.common.saved_random_states import read_states
from lt_zero.core.engine.engine import Engine
from lt_zero.core.followers import StateBeside
from lt_zero.core.rounds import Rounds

_KEY = "reproducible.virtual_ranks"


class Reading:
    """The place of a script in the batches of its rounds, and the random numbers that it draws from meanwhile."""

    _of_rounds: WeakKeyDictionary[Rounds, Reading] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._passes = 0  # over loaders, that have begun and not ended
        self._unused = 0  # batches that were given in them, and had no backward
        self._inside = ExitStack()
        self._turn: int | None = None  # that the process draws from; None: it draws from shared random numbers
        self._reader: object = None  # the pass that has given the batch of the present turn

    @classmethod
    def of(cls, rounds: Rounds) -> Reading:
        """The one of the script whose run has these rounds."""
        return cls._of_rounds.setdefault(rounds, cls())

    @property
    def inside(self) -> bool:
        """True from a batch to the end of its backward."""
        return self._passes > 0 and self._unused > 0

    def begin(self) -> None:
        """A pass over a loader begins."""
        if self._passes == 0:
            self._unused = 0
        self._passes += 1

    def enter(self, rounds: Rounds, turn: int, reader: object) -> None:
        """A pass, ``reader``, gives the batch of a turn: draw from its random numbers from now on."""
        self._enter(rounds, turn)
        self._reader = reader
        self._unused += 1

    def _enter(self, rounds: Rounds, turn: int) -> None:
        self._inside.close()
        self._inside.enter_context(rounds.turn(turn))
        self._turn = turn

    def leave(self, reader: object = None) -> None:
        """Draw from shared random numbers again; ``reader``: only if this pass has given the last batch."""
        if reader is None or reader is self._reader:
            self._inside.close()
            self._turn = None

    @contextmanager
    def left(self, rounds: Rounds) -> Iterator[None]:
        """Context in which the process draws from shared random numbers, also between a batch and its backward."""
        turn = self._turn
        self.leave()
        try:
            yield
        finally:
            if turn is not None:
                self._enter(rounds, turn)

    def end(self) -> None:
        """A pass is over."""
        self._passes -= 1

    def count_backward(self, count: int | None) -> None:
        """Count a backward; ``count``: virtual ranks.

        Raises:
            ConfigError: there have been more of them than batches.
        """
        if self._passes == 0:
            return  # of batches that no loader of rounds has given, or not just now
        if self._unused == 0:
            raise ConfigError.about(
                _KEY,
                f"{_KEY}={count}: a second backward was called for a batch of the loader, and a backward is one "
                "micro-batch of a round. Add up the losses of the batch, and call backward once.",
            )
        self._unused -= 1


class DrawsOfLoop:
    """The random numbers of a script, in its checkpoints: those that ranks share, and those of all micro-batches."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._reading = Reading.of(rounds)

    def state_dict(self) -> dict[str, Any]:
        """Those that ranks share, and those of this rank's micro-batches, as plain containers and tensors."""
        with self._reading.left(self._rounds):
            return {"shared": RandomStates.now().state_dict(), "rounds": self._rounds.packed(self._rounds.now())}

    def load_of_ranks(self, states: Sequence[Any]) -> None:
        """Go on with those of a run of any number of ranks.

        Raises:
            CheckpointError: some are missing, or damaged.
        """
        where = "random states of micro-batches"
        shared = read_states(states[0]["shared"], where)
        self._rounds.set(self._rounds.unpacked([state["rounds"] for state in states], where))
        self._reading.leave()
        shared.apply()


class StepTurns:
    """Counts the turns of the model that a script trains. Collective.

    Args:
        rounds: of the run, which has some.
        engine: of the model.
        stages: of its pipeline.

    Raises:
        ConfigError: it has several stages: a pipeline runs several backwards for one batch.
    """

    def __init__(self, rounds: Rounds, engine: Engine, stages: int = 1) -> None:
        if stages > 1:
            raise ConfigError.about(
                _KEY,
                f"{_KEY}={rounds.count}: a loop of one's own counts backwards, of which a pipeline runs several for a "
                f"batch, and pipeline.stages={stages}. Train it in a Trainer, or remove one of the keys.",
            )
        self._rounds = rounds
        self._turn = 0
        self._begun = False  # whether a forward of this turn was run
        self._inside = ExitStack()  # of a backward
        self._root = engine.root
        self._reading = Reading.of(rounds)
        self._reading.leave()
        rounds.begin(anew=True)
        rounds.follow(engine.root, engine.peers)
        engine.handles.append(StateBeside("random_states_of_loop", DrawsOfLoop(rounds)))
        engine.buffers.leave_to_rounds()
        engine.before_backward.append(self._begin_backward)
        engine.after_backward.append(self._end_backward)

    @property
    def is_last(self) -> bool:
        """True in the last turn of a round."""
        return self._turn + 1 == self._rounds.turns

    @contextmanager
    def forward(self, trains: bool) -> Iterator[None]:
        """Context of a forward; one that does not train is none of a round, unless it changes the buffers of one."""
        if not trains and not (self._reading.inside and self._root.training):
            yield
            return
        if not self._begun:
            self._begun = True
            self._rounds.begin_turn(self._turn)
        with self._rounds.turn(self._turn):
            yield

    def _begin_backward(self) -> None:
        self._reading.count_backward(self._rounds.count)
        self._inside.enter_context(self._rounds.turn(self._turn))

    def _end_backward(self) -> None:
        self._inside.close()
        self._reading.leave()
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
        loader: gives ``Turns``. Other attributes are those of it.
        rounds: of the run.
    """

    def __init__(self, loader: Any, rounds: Rounds) -> None:
        self._loader = loader
        self._rounds = rounds

    def __iter__(self) -> Iterator[Any]:
        reading, reader = Reading.of(self._rounds), object()
        reading.begin()
        try:
            for of_round in self._loader:
                for turn, batch in enumerate(of_round.batches):
                    reading.enter(self._rounds, turn, reader)
                    yield batch
                    reading.leave(reader)
        finally:
            reading.leave(reader)
            reading.end()

    def __len__(self) -> int:
        return len(self._loader) * self._rounds.turns

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self._loader, name)
