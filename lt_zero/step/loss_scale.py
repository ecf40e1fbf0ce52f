"""The loss scale as a state machine: no tensors, no process group. Meaning of the keys as in DeepSpeed 0.19.8.

Mixed precision training, arXiv:1710.03740, section 3.2: the loss is multiplied by a scale before backward, so that
small gradients do not vanish in fp16, and the gradients are divided by it before the step. A step whose gradients
overflowed is skipped, and the scale goes down; after a while without overflow it goes up again.
"""

from __future__ import annotations

from typing import Any

from lt_zero.config.precision import ScalerRules


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
        """Whether an overflow can no longer lower the scale."""
        return self.rules.dynamic and self.scale <= self.rules.minimum

    def update(self, overflow: bool) -> bool:
        """Account for one step; returns False if the scale should have dropped but is at its minimum."""
        if not self.rules.dynamic:
            return True
        dropped = self._drop() if overflow else self._rise()
        self._steps += 1
        return dropped

    def _drop(self) -> bool:
        rules = self.rules
        self._last_overflow = self._steps
        if rules.hysteresis != 1 and self._patience != 1:
            self._patience -= 1
            return True
        possible = self.scale > rules.minimum
        self.scale = max(self.scale * rules.backoff, rules.minimum)
        return possible

    def _rise(self) -> bool:
        rules = self.rules
        if rules.consecutive_hysteresis:
            self._patience = rules.hysteresis
        stable = self._steps - self._last_overflow - 1
        if stable > 0 and stable % rules.window == 0:
            self._patience = rules.hysteresis
            self.scale *= rules.growth
        return True

    def state_dict(self) -> dict[str, Any]:
        """Scale and counters, numbers only; the rules are the running configuration's."""
        memory = {"steps": self._steps, "last_overflow": self._last_overflow, "patience": self._patience}
        return {"scale": self.scale, **memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``; a static scale stays as configured."""
        if not self.rules.dynamic:
            return
        self.scale = float(state["scale"])
        self._steps, self._last_overflow = int(state["steps"]), int(state["last_overflow"])
        self._patience = min(int(state["patience"]), max(1, self.rules.hysteresis))
