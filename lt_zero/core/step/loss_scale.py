"""The decision to take a step: the loss scale, overflow agreed on by all ranks before any update, skipped steps.

The global norm is the overflow test: it is finite exactly if all gradients of all ranks are. The same norm clips, and
unscaling is multiplied into the clipping factor, so a step reads the gradients once.

The scale itself: loss_scaler.py.

Note [The scale that gradients carry]
    Backward multiplies by the current loss scale, which may change while gradients of another optimizer wait for their
    step. So ``ReducedGrads.loss_scale`` is the scale of its accumulators: before a backward adds to them they are
    rescaled to the current one, after unscaling it is 1. Rescaling by a power of two is exact.

Note [Device skip flag]
    On a GPU the host need not wait for the norm: the kernel gets the skip flag as a tensor and writes nothing if it is
    set. The host goes on as if the step had been taken, and reads the flag (``read_skip_flag``) before the next
    backward, whose loss is scaled, and before anything is saved. By then the next forward is queued. If the step was
    skipped, step counters and schedules are restored. This needs all of a step to go through the kernel, and is off
    while an overflow would have to be explained, which needs the gradients at once.

Note [Unchecked steps]
    In fp32 steps are not checked unless ``on_nonfinite`` asks for it, and NaN would be trained silently. So the loss is
    checked, on a GPU only every ``_EVERY`` steps: once a weight is NaN, all losses are. The ranks exchange the result
    with the flags of used parameters (step_flags.py), and warn once, naming the gradients. A norm that is computed
    for clipping is checked, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lt_zero.common import accelerator
from lt_zero.common.users_code import warn
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.engine import Engine
from lt_zero.core.step.sharded_optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from lt_zero.core.step.loss_scaler import LossScaler
    from lt_zero.core.step.overflow import OverflowReport
    from lt_zero.core.step.skipped_steps import SkipCounter

log = logging.getLogger("lt_zero")

_EVERY = 50  # on a GPU one loss of so many is checked


class LossScaleError(RuntimeError):
    """Gradients overflow although the loss scale is at its minimum."""


class NonFiniteError(RuntimeError):
    """Gradients are not finite, and ``on_nonfinite`` is ``raise``."""


class _SkipFlag:
    """The device's skip flag of one step. See Note [Device skip flag].

    Args:
        found_inf: 0D fp32, not zero if the step was skipped; its asynchronous copy to the host starts here.
        sharded: the optimizer that stepped.
        counter: the counter that assumes success.
    """

    def __init__(self, found_inf: Tensor, sharded: ShardedOptimizer, counter: SkipCounter) -> None:
        self.sharded = sharded
        self.counter = counter
        self._value = found_inf
        self._copied = None
        if accelerator.has_streams(found_inf.device):
            self._value, self._copied = accelerator.fetch(found_inf)

    def wait(self) -> bool:
        """Wait for the flag; returns True if the step was skipped."""
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._value)


def plain_report() -> OverflowReport:
    """A report that names no module and no parameter."""
    from lt_zero.core.step.overflow import OverflowReport

    return OverflowReport()


class LossScaleController:
    """Loss scaling and overflow checks of one run.

    Args:
        policy: whether steps are checked, and how the loss is scaled.
        on_min_scale: on an overflow at the minimum scale: ``raise``, ``warn``, or ``hold`` (skip silently).
        report: makes what tells of gradients that are not finite, once there are some, or modules are to be watched.
    """

    def __init__(
        self,
        policy: DtypePolicy,
        on_min_scale: str = "raise",
        report: Callable[[], OverflowReport] = plain_report,
    ) -> None:
        self.scaler: LossScaler | None = None
        if policy.scaling is not None:
            from lt_zero.core.step.loss_scaler import LossScaler  # for fp16 only

            self.scaler = LossScaler(policy.scaling)
        self.checks = policy.check_overflow
        self.skip = False  # the current step is skipped
        self.norm: Tensor | None = None  # 0D, of the unscaled gradients of the current step; None: not computed
        self._on_min_scale = on_min_scale
        self._raises = policy.raise_nonfinite
        self._plain = policy.compute is None  # fp32: no loss scale
        # See Note [Unchecked steps].
        self._losses = 0
        self._told = self.checks
        self._counters: list[SkipCounter] = []
        self._make_report = report
        self._made: OverflowReport | None = None  # its report
        self._watches = False  # modules are watched
        self._examined: ShardedOptimizer | None = None  # the optimizer that ``skip`` and ``norm`` are of
        self._some = False  # whether it had gradients
        self.on_device: bool | None = None  # see Note [Device skip flag]; None: on a GPU
        self._open: _SkipFlag | None = None  # flag of the last step, not read yet
        self._watching_late = False  # the watch was opened after the running step's first forward

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the loss scale, but not the state of the current step."""
        return {**vars(self), "_counters": [], "_made": None, "_watches": False, "_examined": None, "_open": None}

    @property
    def scale(self) -> float:
        """The current loss scale."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @property
    def skipped(self) -> int:
        """Number of skipped steps of all optimizers. Waits for the GPU."""
        self.read_skip_flag()
        return sum(counter.skipped for counter in self._counters)

    def counter(self, number: int) -> SkipCounter:
        """The skipped steps of optimizer ``number``."""
        from lt_zero.core.step.skipped_steps import SkipCounter  # only runs that check their steps skip any

        self._counters += [SkipCounter() for _ in range(number + 1 - len(self._counters))]
        return self._counters[number]

    # ---- backward ----------------------------------------------------------------------------------------------

    def see_loss(self, engine: Engine, loss: Tensor) -> None:
        """Check that the loss is finite if its gradients are not checked. See Note [Unchecked steps]."""
        self._losses += 1
        if not self._told and (not accelerator.holds(loss) or self._losses % _EVERY == 1):
            # An ordinary loss is checked on the host, with four operations less.
            plain = type(loss) is Tensor and loss.numel() == 1 and loss.is_floating_point()
            finite = math.isfinite(loss.item()) if plain else bool(torch.isfinite(loss.detach()).all())
            engine.note_loss(finite)

    def scaled(self, engine: Engine | None, loss: Tensor) -> Tensor:
        """The loss times the loss scale, in fp32, as it may overflow fp16; checked as by ``see_loss``."""
        if engine is not None:
            self.see_loss(engine, loss)
        return loss.float() * self.scale if self.scaler is not None else loss

    def before_backward(self, optimizers: list[ShardedOptimizer], factor: float = 1.0) -> None:
        """Rescale accumulated gradients to the current loss scale. See Note [The scale that gradients carry].

        ``factor``: the losses are too large by this factor as well, as if the loss scale were.
        """
        self.read_skip_flag()
        self._forget()
        for sharded in optimizers:
            sharded.grads.carry(self.scale * factor)

    # ---- step --------------------------------------------------------------------------------------------------

    def examine(self, sharded: ShardedOptimizer) -> None:
        """Decide whether this optimizer's step is taken, if steps are checked. Collective.

        The decision holds until the step or the next backward: clipping by value would make overflow look finite.
        Waits for the GPU, except with a device skip flag, see Note [Device skip flag].
        """
        if self._examined is sharded:
            return
        self.read_skip_flag()
        self._forget()
        for listener in sharded.engine.before_step:
            listener()
        self._examined = sharded
        if not self._told:
            sharded.engine.finish_reductions()
            self._notice(sharded.engine, sharded.engine.unused_parameters.nonfinite)
        if self.checks:
            self._some = sharded.grads.exist()
            self.norm = sharded.grads.unscaled_norm()
            if self._some and self._skips_on_device(sharded):
                sharded.found_inf = torch.isfinite(self.norm).logical_not().float()
            else:
                self.skip = not bool(torch.isfinite(self.norm))

    def forget_norm(self) -> None:
        """Forget the norm of the gradients, which user code may change now."""
        self.norm = None

    def _notice(self, engine: Engine, bad: bool) -> None:
        """Warn once that gradients are not finite. Collective if ``bad``, which is the same on all ranks."""
        if self._told or not bad:
            return
        self._told = True
        text = self._report.unchecked(engine)
        if engine.world.rank == 0:
            warn(text)

    def _forget(self) -> None:
        if self._examined is not None:
            self._examined.found_inf = None
        self.norm = None
        self.skip = False
        self._examined = None
        self._some = False

    def _skips_on_device(self, sharded: ShardedOptimizer) -> bool:
        wanted = self.on_device if self.on_device is not None else accelerator.is_accelerator(sharded.engine.device)
        if not wanted or self._watches or not sharded.skips_on_device():
            return False
        if self.scaler is not None and self.scaler.rules.dynamic:
            return self.scaler.scale * self.scaler.rules.backoff > self.scaler.rules.minimum
        return all(counter.consecutive == 0 for counter in self._counters)

    def proceeds(self, sharded: ShardedOptimizer) -> bool:
        """True if ``step`` is to be called; checks again, as user code may have run since ``examine``."""
        if sharded.found_inf is not None and not sharded.skips_on_device():
            self.skip = bool(sharded.found_inf)
            sharded.found_inf = None
        return not self.skip

    def unscale(self, sharded: ShardedOptimizer) -> None:
        """Divide the gradients by the scale that they carry. Collective."""
        self.examine(sharded)
        if not self.skip:
            sharded.grads.unscale()

    def clip_norm(self, sharded: ShardedOptimizer, limit: float, norm_type: float = 2.0) -> Tensor | None:
        """Unscale and clip in one pass; returns the norm before clipping, None if the step is skipped. Collective."""
        if norm_type == 2.0:
            sharded.grads.expect_clipping(limit)
        self.examine(sharded)
        if self.skip:
            return None
        if not self._told:
            self.norm = sharded.grads.unscaled_norm() if self.norm is None else self.norm
            self._notice(sharded.engine, not accelerator.holds(self.norm) and not bool(torch.isfinite(self.norm)))
        norm = sharded.grads.clip_norm(limit, self.norm if norm_type == 2.0 else None, norm_type)
        self.norm = None
        return norm

    def clip_value(self, sharded: ShardedOptimizer, limit: float) -> None:
        """Clamp the unscaled gradients. Collective."""
        self.examine(sharded)
        if not self.skip:
            sharded.grads.unscale()
            sharded.grads.clip_value(limit)
            self.norm = None

    def step(
        self, sharded: ShardedOptimizer, number: int, limit: float, call: Callable[[], object]
    ) -> tuple[bool, Tensor | None]:
        """A whole step of optimizer ``number``, which ``call`` makes, clipped to the norm ``limit`` (0: not).

        Collective. Returns whether it was taken (with a device skip flag: presumably), and the norm (0D) before
        clipping, None if it was not computed. Raises as ``conclude``.
        """
        sharded.grads.expect_clipping(limit)
        self.examine(sharded)
        norm = self.norm
        if limit > 0 and (clipped := self.clip_norm(sharded, limit)) is not None:
            norm = clipped
        if taken := self.proceeds(sharded):
            # A no-op if clipping has unscaled already.
            self.unscale(sharded)
            try:
                call()
            finally:
                sharded.widen()
        self.conclude(sharded, number)
        return taken, norm

    def conclude(self, sharded: ShardedOptimizer, number: int) -> None:
        """Count the step of optimizer ``number`` as taken or skipped. Collective if it was skipped.

        With a device skip flag it counts as taken until ``read_skip_flag``.

        Raises:
            LossScaleError: overflow at the minimum scale, and ``on_min_scale`` is ``raise``.
            NonFiniteError: the step was skipped, and ``on_nonfinite`` is ``raise``.
        """
        skip = self.skip
        some = self._some
        found_inf = sharded.found_inf
        self._forget()
        # The gradients are spent even if the step was skipped.
        sharded.engine.grad_views.spend()
        if not self.checks or not some:
            return
        counter = self.counter(number)
        if found_inf is not None:
            counter.assume_success(self.read_skip_flag)
            self._open = _SkipFlag(found_inf, sharded, counter)
            sharded.before_state_dict = self.read_skip_flag
            return
        counter.skip() if skip else counter.succeed()
        if skip:
            sharded.engine.exchange.undo_step(counted=False)
            for listener in sharded.engine.after_skip:
                listener()
        self._account(sharded.engine, counter, skip)
        self._watching_late = False

    def read_skip_flag(self) -> bool:
        """Read the device skip flag of the last step, if it has one; returns whether it was skipped. Waits for the GPU.

        See Note [Device skip flag].
        """
        flag, self._open = self._open, None
        if flag is None:
            return False
        skip = flag.wait()
        watched = self._watches
        if skip:
            flag.sharded.uncount_step()
            flag.sharded.engine.exchange.undo_step(counted=True)
        flag.counter.decide(skip)
        self._account(flag.sharded.engine, flag.counter, skip)
        self._watching_late = not watched
        return skip

    def _account(self, engine: Engine, counter: SkipCounter, skip: bool) -> None:
        """Adapt the loss scale to a counted step, and watch modules if the next overflow has to be explained."""
        scaler = self.scaler
        before = self.scale
        possible = scaler.update(skip) if scaler is not None else True
        if skip:
            self._tell(engine, counter, before, possible)
        if scaler is not None and scaler.rules.dynamic:
            wanted = scaler.at_minimum
        else:
            wanted = self._raises or counter.consecutive > 0
        # Watch only when it is wanted: it costs a pass over the outputs of modules.
        if wanted:
            self._watch(engine)
        elif self._watches:
            self.stop_watching()

    @property
    def _report(self) -> OverflowReport:
        if self._made is None:
            self._made = self._make_report()
        return self._made

    def _watch(self, engine: Engine) -> None:
        """Watch the modules of an engine in its next step."""
        self._report.watch(engine.root)
        self._watches = True

    def _tell(self, engine: Engine, counter: SkipCounter, before: float, possible: bool) -> None:
        """Log, warn or raise after a skipped step.

        Args:
            engine: of the optimizer.
            counter: its skipped steps.
            before: the loss scale of the step.
            possible: whether the scale could be lowered.
        """
        log.info("Gradients overflowed: step skipped, loss scale %g -> %g", before, self.scale)
        fatal = self._raises or (not possible and self._on_min_scale == "raise")
        # Where no lower scale helps, warn at the 2nd, 4th, 8th, ... skip in a row. In fp32 the first is unusual.
        stuck = self.scaler is None or not self.scaler.rules.dynamic or not possible
        again = stuck and counter.consecutive > 1 and counter.consecutive & (counter.consecutive - 1) == 0
        again |= self._plain and self.skipped == 1
        if not fatal and (not again or self._on_min_scale == "hold"):
            return
        scale = None if self._plain else before
        report = self._report.skipped(engine, self.skipped, scale, self._watches and not self._watching_late)
        if self._raises:
            raise NonFiniteError(f"{report} on_nonfinite=skip goes on without this step.")
        if fatal:
            raise LossScaleError(f"{report} The scale is at its minimum; on_min_scale=hold or warn goes on.")
        if engine.world.rank == 0:
            warn(report)

    def stop_watching(self) -> None:
        """Remove the hooks that watch module outputs."""
        self.read_skip_flag()
        if self._watches:
            self._report.end()
            self._watches = False

    def start_watching(self, engine: Engine) -> None:
        """Watch from the start if the first overflow has to be explained: the scale is at its minimum, or it raises."""
        self.stop_watching()
        if self._raises or (self.scaler is not None and self.scaler.at_minimum):
            self._watch(engine)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Loss scale and skip counters, numbers only; {} if steps are not checked."""
        self.read_skip_flag()
        if not self.checks:
            return {}
        scaler = self.scaler.state_dict() if self.scaler is not None else None
        return {"scaler": scaler, "skips": [counter.state_dict() for counter in self._counters]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``; a loss scale is ignored if the running precision has none."""
        self.read_skip_flag()
        if self.scaler is not None and state.get("scaler") is not None:
            self.scaler.load_state_dict(state["scaler"])
        for number, counter in enumerate(state.get("skips", [])):
            self.counter(number).load_state_dict(counter)
