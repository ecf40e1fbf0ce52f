"""Costs of collectives that send codes: bytes, and the time of coding."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lt_zero.common import accelerator


@dataclass
class Costs:
    """Sums over collectives on this rank.

    Attributes:
        dense: bytes to other ranks as they would be sent uncompressed.
        sent: bytes to other ranks.
        coding: seconds of the host; on a GPU, whose kernels the host only launches, of its stream, up to ``settle``.
    """

    dense: int = 0
    sent: int = 0
    coding: float = 0.0
    _spans: deque[tuple[Any, Any]] = field(default_factory=deque)  # events around coding that ``coding`` lacks

    @contextmanager
    def coded(self, device: torch.device) -> Iterator[None]:
        """Context whose time counts as coding."""
        begin = _now(device)
        yield
        end = _now(device)
        if accelerator.has_streams(device):
            self._spans.append((begin, end))
        else:
            self.coding += end - begin

    def count(self, dense: int = 0, sent: int = 0) -> None:
        """Count bytes to other ranks."""
        self.dense += dense
        self.sent += sent

    def add(self, other: Costs) -> None:
        self.dense, self.sent = self.dense + other.dense, self.sent + other.sent
        self.coding += other.coding
        self._spans.extend(other._spans)
        self.settle(wait=False)

    def settle(self, wait: bool) -> bool:
        """Add what the GPU has done to ``coding``; True if that is all. ``wait``: for the GPU."""
        while self._spans and (wait or self._spans[0][1].query()):
            begin, end = self._spans.popleft()
            end.synchronize()
            self.coding += begin.elapsed_time(end) / 1e3
        return not self._spans


def _now(device: torch.device) -> Any:
    """The host's time (seconds), or an event on the current stream."""
    if not accelerator.has_streams(device):
        return time.perf_counter()
    event = accelerator.event(device, timing=True)
    event.record(accelerator.current_stream(device))
    return event
