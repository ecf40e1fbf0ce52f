"""Sums that go on without late ranks (comm/tolerance.py): ``communication.slow_node_tolerance``."""

from __future__ import annotations

from lt_zero.engine.exchange import PlainExchange


class TolerantExchange(PlainExchange):
    """Sums the gradients that are there in time; late ones are in the sums of a later step."""

    @property
    def sums_late(self) -> bool:
        return True

    @property
    def remembers(self) -> bool:
        return True
