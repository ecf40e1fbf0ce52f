"""The exchange of ``gradient_compression``: error_feedback.py, after a warm-up, and judged by what it costs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from typing_extensions import override

from lt_zero.common.units import format_bytes
from lt_zero.core.comm.costs import Costs
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.exchange.error_feedback import FeedbackExchange, FeedbackPlan

log = logging.getLogger("lt_zero")

JUDGED = 20  # the step after which coding is compared with what it saved


@dataclass(frozen=True)
class CompressedGradients(FeedbackPlan):
    """Plan of an exchange of compressed gradients.

    Attributes:
        warmup: optimizer steps whose gradients are sent as they are.
    """

    warmup: int

    @override
    def make(self, peers: ShardGroup, groups: Iterable[ShardGroup]) -> GradientCompression:
        return GradientCompression(peers, self)


class GradientCompression(FeedbackExchange):
    """Sends the gradients of buckets whose plan says so compressed, after the warm-up, with error feedback.

    Args:
        peers, plan: as for ``FeedbackExchange``.

    Raises:
        ConfigError: the ranks do not form nodes, or a GPU has one queue for all groups.

    Attributes:
        announce: called once, with a line of text, if coding takes longer than the transfer that it saves.
    """

    def __init__(self, peers: ShardGroup, plan: CompressedGradients) -> None:
        super().__init__(peers, plan)
        self._warmup = plan.warmup
        self.announce: Callable[[str], object] = log.warning
        self._judge_from = plan.warmup + JUDGED // 2  # earlier steps warm up caches and connections

    @property
    @override
    def compresses(self) -> bool:
        return self.steps >= self._warmup

    @override
    def end_step(self) -> None:
        super().end_step()
        compressor = self.sums.compressor
        # All ranks come here in the same step, as measuring the rate is collective.
        if self.steps == self._judge_from:
            compressor.restart_costs()
        elif self.steps == self._warmup + JUDGED:
            compressor.costs.settle(wait=True)
            line = verdict(compressor.costs, self.sums.measure_rate(), self.steps - self._judge_from, self.steps)
            if line and self._peers.world.rank == 0:
                self.announce(line)


def verdict(costs: Costs, rate: float, steps: int, step: int) -> str:
    """A line if coding takes longer than the transfer that it saves, else "".

    Args:
        costs: of ``steps`` optimizer steps.
        rate: bytes per second of this rank to others.
        steps: optimizer steps.
        step: the number of the last of them.
    """
    saved = (costs.dense - costs.sent) / rate
    if costs.coding < saved:
        return ""
    return (
        f"gradient_compression does not pay (step {step}): coding takes {costs.coding / steps * 1e3:.1f} ms a step, "
        f"and the transfer that it saves would take {saved / steps * 1e3:.1f} ms at {rate * 8e-6:.0f} Mbit/s from each "
        f"rank ({format_bytes(costs.dense / steps)} become {format_bytes(costs.sent / steps)}). Remove it, or on "
        "several nodes try hierarchical_compress."
    )
