"""Whether a step is taken: the loss scale, overflow known to all ranks before anything is updated, skipped steps.

Note [The scale that gradients carry]
    Backward multiplies by the loss scale of that moment, and the scale may change while gradients of another optimizer
    wait for their step. So each optimizer's accumulators remember the scale they carry: before a backward adds to
    them they are brought to the current one, after unscaling they carry 1. A power of two changes no digit.

Note [One pass]
    The global norm is the overflow test: it is finite exactly if all gradients of all ranks are. The same norm clips,
    and unscaling is multiplied into the clipping factor.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import Tensor

from lt_zero.config.precision import DtypePolicy
from lt_zero.core.engine import Engine
from lt_zero.core.norm import clip_grad_norm, clip_grad_value, grad_norm, unscale
from lt_zero.core.optimizer import ShardedOptimizer
from lt_zero.core.overflow import FiniteWatch, nonfinite_parameters, overflow_report
from lt_zero.core.scaler import LossScaler
from lt_zero.core.skips import SkipCounter

log = logging.getLogger("lt_zero")


class LossScaleError(RuntimeError):
    """Gradients overflow although the loss scale is at its minimum."""


class StepGate:
    """The state of loss scaling and overflow checks of one run.

    Args:
        policy: whether steps are checked, and how the loss is scaled.
        on_min_scale: what happens on an overflow at the minimum scale: ``raise``, ``warn``, or ``hold`` (skip quietly).
    """

    def __init__(self, policy: DtypePolicy, on_min_scale: str = "raise") -> None:
        self.scaler = LossScaler(policy.scaling) if policy.scaling is not None else None
        self.checks = policy.check_overflow
        self.skip = False  # the step at hand will not be taken
        self.norm: Tensor | None = None  # 0D, of the unscaled gradients of the step at hand, if it is known
        self._on_min_scale = on_min_scale
        self._counters: list[SkipCounter] = []
        self._watch: FiniteWatch | None = None
        self._examined: ShardedOptimizer | None = None  # whose gradients the verdict is about
        self._some = False  # whether it had any

    @property
    def scale(self) -> float:
        """By what the loss is multiplied."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @property
    def skipped(self) -> int:
        """Steps of all optimizers that were skipped."""
        return sum(counter.skipped for counter in self._counters)

    def counter(self, number: int) -> SkipCounter:
        """The skipped steps of optimizer ``number``."""
        self._counters += [SkipCounter() for _ in range(number + 1 - len(self._counters))]
        return self._counters[number]

    # ---- backward ----------------------------------------------------------------------------------------------

    def before_backward(self, optimizers: list[ShardedOptimizer]) -> None:
        """Gradients of the current scale are about to be added. See Note [The scale that gradients carry]."""
        self._examined = None
        for sharded in optimizers:
            if sharded.loss_scale != self.scale:
                sharded.rescale(self.scale / sharded.loss_scale)
                sharded.loss_scale = self.scale

    # ---- step --------------------------------------------------------------------------------------------------

    def examine(self, sharded: ShardedOptimizer) -> None:
        """Decide whether this optimizer's step is taken. Collective, and waits for the GPU, if steps are checked.

        The verdict holds until the step or the next backward: clipping by value would make overflow look finite.
        """
        if self._examined is sharded:
            return
        self.norm, self.skip, self._examined = None, False, sharded
        if self.checks:
            self._some = sharded.has_grads()
            self.norm = grad_norm(sharded) / sharded.loss_scale
            self.skip = not bool(torch.isfinite(self.norm))

    def unscale(self, sharded: ShardedOptimizer) -> None:
        """Divide the gradients by the scale that they carry. Collective."""
        self.examine(sharded)
        if not self.skip:
            unscale(sharded)

    def clip_norm(self, sharded: ShardedOptimizer, limit: float) -> Tensor | None:
        """Unscale and clip in one pass; returns the norm before clipping, None if the step is skipped. Collective."""
        self.examine(sharded)
        if self.skip:
            return None
        norm, self.norm = clip_grad_norm(sharded, limit, self.norm), None
        return norm

    def clip_value(self, sharded: ShardedOptimizer, limit: float) -> None:
        """Clamp the unscaled gradients. Collective."""
        self.examine(sharded)
        if not self.skip:
            unscale(sharded)
            clip_grad_value(sharded, limit)

    def conclude(self, sharded: ShardedOptimizer, number: int) -> None:
        """Account for the step of optimizer ``number`` that was taken or skipped. Collective if it was skipped.

        Raises:
            LossScaleError: overflow at the minimum scale, if ``on_min_scale`` says so.
        """
        skip, some = self.skip, self._some
        self.skip, self.norm, self._examined, self._some = False, None, None, False
        if not self.checks or not some:
            return
        counter, before = self.counter(number), self.scale
        counter.skip() if skip else counter.succeed()
        possible = self.scaler.update(skip) if self.scaler is not None else True
        if skip:
            self._tell(sharded.engine, counter, before, possible)
        self._keep_watch(sharded.engine, counter)

    def _tell(self, engine: Engine, counter: SkipCounter, before: float, possible: bool) -> None:
        log.info("Gradients overflowed: step skipped, loss scale %g -> %g", before, self.scale)
        fatal = not possible and self._on_min_scale == "raise"
        # Where no lower scale helps, repeated skips need attention: told at the 2nd, 4th, 8th, ... in a row.
        stuck = self.scaler is None or not self.scaler.rules.dynamic or not possible
        again = stuck and counter.consecutive > 1 and counter.consecutive & (counter.consecutive - 1) == 0
        if not fatal and (not again or self._on_min_scale == "hold"):
            return
        culprit = self._watch.first() if self._watch is not None else None
        culprits = engine.comm.host_gather(culprit, "overflow") if self._watch is not None else []
        report = overflow_report(nonfinite_parameters(engine), culprits, self.skipped, before)
        if fatal:
            raise LossScaleError(f"{report} The scale is at its minimum; on_min_scale=hold or warn goes on.")
        if engine.comm.rank == 0:
            warnings.warn(report, stacklevel=2)

    def _keep_watch(self, engine: Engine, counter: SkipCounter) -> None:
        """Look at module outputs while the next overflow would have to be explained; it costs a pass over them."""
        stuck = self.scaler is None or not self.scaler.rules.dynamic
        wanted = counter.consecutive > 0 if stuck else self.scaler is not None and self.scaler.at_minimum
        if wanted:
            self._watch = self._watch or FiniteWatch(engine.root, training_only=True)
            self._watch.open()
            self._watch.reset()
        elif self._watch is not None:
            self.stop_watching()

    def stop_watching(self) -> None:
        """Remove the hooks that look at module outputs."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def start_watching(self, engine: Engine) -> None:
        """If the scale starts at its minimum, the first overflow has to be explained already."""
        self.stop_watching()
        if self.scaler is not None and self.scaler.at_minimum:
            self._watch = FiniteWatch(engine.root, training_only=True)
            self._watch.open()

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Numbers only; {} if nothing is checked."""
        if not self.checks:
            return {}
        scaler = self.scaler.state_dict() if self.scaler is not None else None
        return {"scaler": scaler, "skips": [counter.state_dict() for counter in self._counters]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken; what the running precision has no use for is left out."""
        if self.scaler is not None and state.get("scaler") is not None:
            self.scaler.load_state_dict(state["scaler"])
        for number, counter in enumerate(state.get("skips", [])):
            self.counter(number).load_state_dict(counter)
