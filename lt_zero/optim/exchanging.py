"""Optimizers whose ranks exchange something else than the gradients of each step."""

from __future__ import annotations

from torch.optim import Optimizer


class ExchangingOptimizer(Optimizer):
    """An optimizer that needs an exchange of its own on several ranks, which are prepared for it.

    Attributes:
        prepared_at: the stages at which they can be, for messages.
        most_states: states of a parameter's size, at most.
    """

    prepared_at: str
    most_states: int

    @property
    def pending(self) -> bool:
        """True if the ranks have stepped apart since the last exchange."""
        return False

    def end_interval(self) -> None:
        """Exchange now if the ranks have stepped apart, and drop the states for exchanges. Collective."""
