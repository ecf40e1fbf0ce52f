"""Rounds: which micro-batches ranks run at the same time, and with which random numbers and buffers each begins.

A ``Rounds`` is plain: each rank runs one micro-batch after the other, with whatever its process has. A feature by which
ranks run several micro-batches as one round brings another one (``Feature.rounds``). The faces ask it in all runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from lt_zero.core.comm.ranks import Ranks


class Rounds:
    """A run in which each micro-batch is one of a rank.

    Attributes:
        count: the number of micro-batches of a round; None: there are no rounds.
        turns: micro-batches of a round that this rank runs, one after the other.
    """

    count: int | None = None
    turns = 1

    # ---- numbers -----------------------------------------------------------------------------------------------

    def parts(self, data_ranks: int) -> int:
        """The number of parts that data are divided into; ``data_ranks``: of the run."""
        return data_ranks

    def number(self, turn: int) -> int:
        """The number of the micro-batch that this rank runs in a turn, among those of a round."""
        raise NotImplementedError

    def place(self, turn: int) -> int:
        """The place that this rank's value of a turn has in what ``in_order`` returns."""
        raise NotImplementedError

    # ---- random numbers ----------------------------------------------------------------------------------------

    def begin(self, anew: bool) -> None:
        """Give all ranks the random states of rank 0, which they share outside of turns. Collective.

        ``anew``: a run begins, and those of each micro-batch are derived from them.
        """

    def turn(self, turn: int) -> AbstractContextManager[None]:
        """Context of what is run of the micro-batch of a turn: with random numbers of its own."""
        return nullcontext()

    def now(self) -> Any:
        """The present random states of this rank's micro-batches, which later draws do not change."""
        return None

    def set(self, states: Any) -> None:
        """Let micro-batches go on with random states of ``now``, or of ``unpacked``."""

    # ---- data --------------------------------------------------------------------------------------------------

    def loader(self, loader: Any) -> Any:
        """The loader of rounds, whose items are ``Turns``, over a loader of the first turn's batches.

        Raises:
            ConfigError: it is not known how its data are divided.
        """
        return loader

    # ---- buffers -----------------------------------------------------------------------------------------------

    def follow(self, root: nn.Module, peers: Ranks) -> None:
        """Look after the buffers of a model, which ``peers`` have, from now on."""

    def begin_turn(self, turn: int) -> None:
        """Let the buffers be what they were when the round began. Called for each turn, in order."""

    def end_round(self) -> None:
        """Let the buffers be what the first micro-batch of the round has made of them. Collective."""

    # ---- values ------------------------------------------------------------------------------------------------

    def in_order(self, mine: Sequence[Any], name: str) -> list[Any]:
        """The values of all micro-batches, in the order of their numbers; tensors are on the host. Collective.

        Of a micro-batch whose rows are cut over ranks there is a value of each part, in the order of parts.

        Args:
            mine: of this rank, one for each turn: picklable, with tensors of any shapes.
            name: of what they are, for errors.
        """
        raise NotImplementedError

    def of_first(self, value: Any, name: str) -> Any:
        """The value that the first rank has, with tensors on the host. Collective.

        Args:
            value: picklable; of other ranks it is not looked at.
            name: of what it is, for errors.
        """
        raise NotImplementedError

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def packed(self, states: Any) -> dict[str, Any] | None:
        """Random states of ``now`` as plain containers and tensors, by the numbers of micro-batches."""
        return None

    def unpacked(self, saved: Sequence[Any], where: str) -> Any:
        """Random states for this rank, of those that all ranks of the saved run have ``packed``.

        That run may have had other ranks.

        Raises:
            CheckpointError: some are missing, or damaged; begins with ``where``.
        """
        return None

    def merged(self, saved: Sequence[Any], own: Any) -> Any:
        """The state of a loader for this rank, of those that all ranks of the saved run had; ``own``: this rank's."""
        return own
