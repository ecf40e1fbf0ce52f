"""The dtypes, and the rules of the loss scale, of an engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ScalerRules:
    """Rules for changes of the loss scale."""

    initial: float = 2.0**16
    dynamic: bool = True  # False: the scale is constant; overflows still skip steps
    window: int = 1000  # the scale grows after this many steps without overflow
    hysteresis: int = 2  # the number of overflows before the scale drops
    consecutive_hysteresis: bool = False  # count overflows anew at each finite step, not only when the scale grows
    minimum: float = 1.0
    growth: float = 2.0  # factor of an increase
    backoff: float = 0.5  # factor of a decrease


@dataclass(frozen=True)
class DtypePolicy:
    """Dtypes of weights, gradients, buffers and messages."""

    mode: str = "32-true"  # as ``Trainer(precision=...)`` names it
    compute: torch.dtype | None = None  # of gathered weights and activations; None: that of the parameters
    autocast: bool = False  # forward runs under torch.autocast(dtype=compute)
    cast_inputs: bool = False  # floating-point inputs of a step are cast to compute
    accumulate: torch.dtype | None = None  # of the gradient accumulators; None: that of the master weights
    wire: torch.dtype | None = None  # of gradients in collectives; None: their own, or one in which the sum is exact
    buffers: torch.dtype | None = None  # of floating-point buffers; None: unchanged
    low_master: bool = False  # master weights are in compute instead of fp32
    low_step: bool = False  # the optimizer steps master weights in their own dtype even if that is bf16
    stochastic: bool = False  # steps round master weights up or down at random
    moments: torch.dtype | None = None  # of the optimizer between steps; None: that in which it steps
    keep_fp32: tuple[str, ...] = ()  # class names and patterns of modules and parameters that stay fp32
    check_overflow: bool = False  # steps with non-finite gradients are skipped
    raise_nonfinite: bool = False  # non-finite gradients are an error
    scaling: ScalerRules | None = None  # of the loss; None: it is not scaled

    def dtype_of(self, parameter: torch.Tensor, kept: bool = False) -> torch.dtype:
        """The dtype of a parameter's gathered weights; ``kept``: whether it belongs to an fp32 module."""
        if self.compute is None or parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return parameter.dtype
        return torch.promote_types(self.compute, torch.float32) if kept else self.compute

    @property
    def low(self) -> bool:
        """True if weights are gathered in 16 bits."""
        return self.compute in (torch.float16, torch.bfloat16)

    def accumulate_of(self, dtype: torch.dtype) -> torch.dtype:
        """The accumulators' dtype; weights of fp32 modules and fp64 weights keep theirs."""
        plain = dtype == (self.compute or torch.float32)
        return self.accumulate if plain and self.accumulate is not None else self.master_of(dtype)

    def step_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the optimizer sees such weights."""
        master = self.master_of(dtype)
        return master if self.low_step else torch.promote_types(master, torch.float32)

    def wire_of(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype in which gradients of such weights must be reduced; None: any."""
        return None if dtype == torch.float64 else self.wire

    def master_of(self, dtype: torch.dtype) -> torch.dtype:
        """The master weights' dtype for gathered weights of ``dtype``: fp32 for 16 bits unless configured otherwise."""
        low = dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if low and not (self.low_master and dtype == self.compute) else dtype
