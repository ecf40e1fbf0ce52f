"""The exchange of gradients that are added in one order (fold.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from typing_extensions import override

from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.exchange import PlainExchange
from lt_zero.core.engine.exchange_plan import ExchangePlan


class FoldPlan(ExchangePlan):
    """Plan of an exchange that adds the contributions of each backward to the accumulators."""

    @property
    @override
    def reduces_each_backward(self) -> bool:
        return True

    @override
    def make(self, peers: ShardGroup, groups: Iterable[ShardGroup]) -> FoldExchange:
        return FoldExchange(peers)


class FoldExchange(PlainExchange):
    """Reduces each backward by itself, once. The transport of the group adds in order."""

    @property
    @override
    def reduces_each_backward(self) -> bool:
        return True

    @override
    def refuse_second_reduction(self, names: str) -> NoReturn:
        raise RuntimeError(
            f"Gradients of {names} came after they were reduced, or were set after backward. "
            "reproducible.virtual_ranks adds the gradients of each micro-batch once, in one order. Use a weight inside "
            "of the forward of its own module, set p.grad in a hook of the parameter instead of after backward, or "
            "remove the key."
        )
