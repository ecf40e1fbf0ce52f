"""Metrics of one optimizer step, as a printed line and for loggers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

PREFIX = "zero/"


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of a step, None if unknown; ``StepPrinter`` documents them.

    Attributes:
        optimizer: its index, if there are several.
        rates: learning rate of each group.
        memory_gb, tflops: GB are 10^9 bytes, a TFLOP/s is 10^12 operations per second.
    """

    step: int
    optimizer: int | None
    rates: tuple[float, ...]
    loss: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped_steps: int | None = None
    samples_per_s: float | None = None
    tflops: float | None = None
    memory_gb: float | None = None

    def line(self) -> str:
        """The printed line, ``step 10: loss=2.31, lr=0.001, ...``."""
        same = len(set(self.rates)) == 1
        rates = [_digits(rate) for rate in self.rates]
        parts = {
            "optimizer": None if self.optimizer is None else str(self.optimizer),
            "loss": _digits(self.loss),
            "lr": rates[0] if same else f"[{', '.join(map(str, rates))}]" if rates else None,
            "grad_norm": _digits(self.grad_norm),
            "loss_scale": _digits(self.loss_scale, 10),
            "skipped_steps": None if self.skipped_steps is None else str(self.skipped_steps),
            "samples/s": _digits(self.samples_per_s, 4),
            "TFLOP/s": _digits(self.tflops, 4),
            "memory_gb": _digits(self.memory_gb, 4),
        }
        return f"step {self.step}: " + ", ".join(f"{name}={text}" for name, text in parts.items() if text is not None)

    def metrics(self, split_rates: bool = False) -> dict[str, float]:
        """The logged metrics, under ``zero/``.

        Args:
            split_rates: log a rate per group even if all are equal.

        >>> StepMetrics(3, 1, (0.1, 0.2), loss=2.0).metrics()
        {'zero/loss': 2.0, 'zero/optimizer_1/lr_0': 0.1, 'zero/optimizer_1/lr_1': 0.2}
        """
        own = PREFIX if self.optimizer is None else f"{PREFIX}optimizer_{self.optimizer}/"
        found = {
            f"{PREFIX}loss": self.loss,
            **_named(f"{own}lr", self.rates, split_rates or len(set(self.rates)) > 1),
            f"{own}grad_norm": self.grad_norm,
            f"{PREFIX}loss_scale": self.loss_scale,
            f"{PREFIX}skipped_steps": self.skipped_steps,
            f"{PREFIX}samples_per_s": self.samples_per_s,
            f"{PREFIX}tflops": self.tflops,
            f"{PREFIX}memory_gb": self.memory_gb,
        }
        return {name: value for name, value in found.items() if value is not None}


def _digits(value: float | None, digits: int = 6) -> str | None:
    return None if value is None else f"{value:.{digits}g}"


def _named(name: str, rates: Sequence[float], split: bool) -> dict[str, float]:
    if not split:
        return {name: rates[0]} if rates else {}
    return {f"{name}_{number}": rate for number, rate in enumerate(rates)}


def memory_gb(device: torch.device) -> float:
    """The memory of this process in 10^9 bytes: on a GPU the peak that torch allocated there, else resident memory.

    The peak of ``torch.cuda.max_memory_allocated`` is not reset, as others may read it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return float(psutil.Process().memory_info().rss) / 1e9
