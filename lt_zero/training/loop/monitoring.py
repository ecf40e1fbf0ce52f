"""``engine.monitor`` of a loop, and the keys that ask for one that writes (monitors.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from lt_zero.common.places import load
from lt_zero.config import ZeroConfig
from lt_zero.core.comm.world import World
from lt_zero.core.engine.engine import Engine
from lt_zero.core.step.loss_scale import LossScaleController

Event = tuple[str, float, int]  # name, value, samples
_BLOCKS = ("csv_monitor", "tensorboard", "wandb", "comet")


class LoopMonitor:
    """DeepSpeed's ``engine.monitor``: this one writes nothing.

    Attributes:
        enabled: rank 0 has a monitor.
    """

    enabled = False

    def write_events(self, events: Iterable[Event]) -> None:
        """Write events (name, value, samples) of one's own.

        Raises:
            RuntimeError: no monitor is enabled.
        """
        raise RuntimeError(
            "engine.monitor.write_events: no monitor is enabled, so nothing would be written. Write "
            '"csv_monitor": {"enabled": true} (or tensorboard, wandb, comet) into the configuration, or ask '
            "engine.monitor.enabled before."
        )

    def add_loss(self, loss: Tensor, share: float) -> None:
        """Note the loss of a micro-batch, of which the step's has this ``share``."""

    def measure(self, engine: Engine, micro_batches: int, micro: int, weight: Callable[[], float]) -> None:
        """Also write the figures that features measure of an engine.

        ``micro``: the samples of a micro-batch. Other arguments, and errors, are those of ``Figure.begin``.
        """

    def begin_step(self, samples: int, controller: LossScaleController) -> None:
        """Write the events of the step before. ``samples``: before this step."""

    def end_step(self, samples: int, rates: list[float], norm: Tensor | None, controller: LossScaleController) -> None:
        """Note the events of a step: ``samples`` so far, rates of the groups, norm (0D). Collective."""

    def end(self, controller: LossScaleController) -> None:
        """Write what is not written yet."""


def monitor_of(config: ZeroConfig, world: World, mode: str) -> LoopMonitor:
    """The monitor of a loop in precision ``mode``, as rank 0's blocks say: others may have none. Collective.

    Raises:
        ConfigError: on all ranks: monitoring, or a package, is missing, or a folder cannot be written; names the key.
    """
    key = next((f"{key}.enabled" for key in _BLOCKS if getattr(config, key).enabled), None)
    if (key := world.host_broadcast(key, "monitors")) is None:
        return LoopMonitor()
    made: LoopMonitor = load("lt_zero.training.loop.monitors:LoopMonitors", key, "monitoring")(config, world, mode)
    return made
