"""The loss scale of fp16: its rules and its history.

Mixed precision training, arXiv:1710.03740, section 3.2: the loss is multiplied by a scale before backward, so that
small gradients do not vanish in fp16, and the gradients are divided by it before the step. A step whose gradients
overflowed is skipped, and the scale goes down; after a while without overflow it goes up again. The configuration's
keys mean what they mean in DeepSpeed 0.19.8.
"""

from __future__ import annotations

import math
from typing import Any

from lt_zero.common.errors import CheckpointError
from lt_zero.core.engine.dtypes import ScalerRules


def usable_scale(saved: Any) -> float:
    """``saved`` as a loss scale.

    Raises:
        CheckpointError: it is not positive and finite: every gradient would be NaN, or every step skipped.
    """
    scale = float(saved)
    if not (math.isfinite(scale) and scale > 0.0):
        raise CheckpointError(
            f"The checkpoint has the loss scale {scale:g}, which has to be a positive finite number. Set "
            "checkpoint.load_module_only=true to begin a new run with its weights, or use another checkpoint."
        )
    return scale


class LossScaler:
    """The current loss scale and its history."""

    def __init__(self, rules: ScalerRules) -> None:
        self.rules = rules
        self.scale = rules.initial
        self._steps = 0
        self._last_overflow = -1
        self._patience = rules.hysteresis

    # The read-only interface of ``torch.amp.GradScaler``; scaling, unscaling and stepping are the engine's.

    def is_enabled(self) -> bool:
        return True

    def get_scale(self) -> float:
        return self.scale

    def get_growth_factor(self) -> float:
        return self.rules.growth if self.rules.dynamic else 1.0

    def get_backoff_factor(self) -> float:
        return self.rules.backoff if self.rules.dynamic else 1.0

    def get_growth_interval(self) -> int:
        return self.rules.window

    @property
    def at_minimum(self) -> bool:
        """True if an overflow can no longer lower the scale."""
        return self.rules.dynamic and self.scale <= self.rules.minimum

    def go_on_at(self, scale: Any) -> None:
        """Go on at the saved scale of another implementation, or at the minimum if that is larger.

        Raises:
            CheckpointError: it is not positive and finite.
        """
        self.scale = max(usable_scale(scale), self.rules.minimum)

    def update(self, overflow: bool) -> bool:
        """Account for one step; returns False if the scale should have dropped but is at its minimum."""
        rules = self.rules
        possible = True
        if not rules.dynamic:
            return True
        stable = self._steps - self._last_overflow - 1
        if overflow:
            self._last_overflow = self._steps
            if rules.hysteresis != 1 and self._patience != 1:
                self._patience -= 1
            else:
                possible = self.scale > rules.minimum
                self.scale = max(self.scale * rules.backoff, rules.minimum)
        else:
            grows = stable > 0 and stable % rules.window == 0
            if grows or rules.consecutive_hysteresis:
                self._patience = rules.hysteresis
            if grows:
                self.scale *= rules.growth
        self._steps += 1
        return possible

    def state_dict(self) -> dict[str, Any]:
        """Scale and counters, numbers only; the rules are the running configuration's."""
        counts = {"steps": self._steps, "last_overflow": self._last_overflow, "patience": self._patience}
        return {"scale": self.scale, **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``; a static scale stays as configured.

        Raises:
            CheckpointError: the saved scale is not positive and finite.
        """
        if not self.rules.dynamic:
            return
        self.scale = usable_scale(state["scale"])
        self._steps = int(state["steps"])
        self._last_overflow = int(state["last_overflow"])
        self._patience = min(int(state["patience"]), max(1, self.rules.hysteresis))
