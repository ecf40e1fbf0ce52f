"""The block ``reproducible`` of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from lt_zero.common.errors import Problem
from lt_zero.common.fields import Block, IdleKeys, Positive, key

_KEY = "reproducible"
_VIRTUAL = f"{_KEY}.virtual_ranks"
_ZERO = "zero_optimization"


class Reproducible(Block):
    """The ``reproducible`` block: the same weights, to the bit, at any number of ranks."""

    virtual_ranks: Positive | None = key(
        None,
        "micro-batches of a round, which any number of data ranks that divides it runs with the same results, to the "
        "bit; null: off",
    )
    threads: Positive = key(
        1, "threads of each rank for operations on a CPU, which are a part of the result: launchers choose others"
    )

    @classmethod
    @override
    def at_top(cls) -> tuple[Any, Any]:
        return cls, key(cls(), "the same weights, to the bit, at any number of ranks")

    @override
    def problems_in(self, config: Any) -> Iterator[Problem]:
        if self.virtual_ranks is None:
            return
        for name, value, why in self._other_sums(config):
            text = f"{_VIRTUAL}={self.virtual_ranks} adds the gradients of all micro-batches in one order, and {name}"
            yield Problem(_VIRTUAL, f"{text}={value} {why}. Remove one of them.")

    def _other_sums(self, config: Any) -> Iterator[tuple[str, object, str]]:
        """Yield keys that say otherwise how gradients are summed, their values, and what they do."""
        zero = config.zero_optimization
        if zero.replicas_by:
            yield f"{_ZERO}.{zero.replicas_by}", getattr(zero, zero.replicas_by), "sums them in groups of ranks first"
        if zero.zero_quantized_gradients:
            yield f"{_ZERO}.zero_quantized_gradients", "true", "rounds sums of nodes"
        algorithm = getattr(getattr(config, "gradient_compression", None), "algorithm", "none")
        if algorithm != "none":
            yield "gradient_compression.algorithm", repr(algorithm), "sends a part of them later"
        if zero.zero_quantized_weights:
            yield f"{_ZERO}.zero_quantized_weights", "true", "rounds weights in blocks of each rank"
        if config.one_bit:
            yield "optimizer.type", repr(config.optimizer.type), "sends a part of them later"
        if config.communication.slow_node_tolerance > 0:
            name = "communication.slow_node_tolerance"
            yield name, config.communication.slow_node_tolerance, "leaves out those of late nodes"
        if config.gradient_noise_scale:
            yield "gradient_noise_scale", "true", "compares them between ranks, of which there may be any number"
        if config.gradient_predivide_factor != 1.0:
            yield "gradient_predivide_factor", config.gradient_predivide_factor, "divides them before they are added"
        if config.prescale_gradients:
            yield "prescale_gradients", "true", "divides them by the number of ranks"

    @override
    def idle_in(self, config: Any) -> Iterator[IdleKeys]:
        yield IdleKeys(self.virtual_ranks is None, _KEY, "threads", f"{_VIRTUAL} is null")
