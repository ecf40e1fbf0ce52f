"""The device's skip flag: whether a step that was launched has written anything."""

from __future__ import annotations

import torch
from torch import Tensor

from lt_zero.step.sharded_optimizer import ShardedOptimizer
from lt_zero.step.skipped_steps import SkipCounter


class Verdict:
    """The skip flag of one step. See loss_scale_controller.py, Note [Device skip flag].

    Args:
        found_inf: 0D fp32, not zero if the step was skipped; its asynchronous copy to the host starts here.
        sharded: the optimizer that stepped.
        counter: the counter that assumes success.
    """

    def __init__(self, found_inf: Tensor, sharded: ShardedOptimizer, counter: SkipCounter) -> None:
        self.sharded, self.counter = sharded, counter
        self._value, self._copied = found_inf, None
        if found_inf.is_cuda:
            self._value = torch.empty((), dtype=torch.float32, pin_memory=True).copy_(found_inf, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def take(self) -> bool:
        """Wait for the flag and correct the counters; returns whether the step was skipped."""
        if self._copied is not None:
            self._copied.synchronize()
        skipped = bool(self._value)
        if skipped:
            self.sharded.uncount_step()
        self.counter.decide(skipped)
        return skipped
