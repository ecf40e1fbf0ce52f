"""``activation_checkpointing.profile`` and ``synchronize_checkpoint_boundary``.

On a GPU, times are measured with events that are read once they have completed, so the host never waits. Calls that
have not completed are counted in the next table. The time of a recomputation covers forward up to the last tensor that
backward needs, without the gradients.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table

from lt_zero.common import accelerator
from lt_zero.common.console import Console, RunConsole
from lt_zero.common.tables import show
from lt_zero.config.blocks import ActivationCheckpointing

_EVERY = 10  # optimizer steps


@dataclass
class ModuleTimes:
    """Times of one module since the last table: [forward, recomputation]."""

    milliseconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    calls: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, other: ModuleTimes) -> None:
        self.milliseconds = [a + b for a, b in zip(self.milliseconds, other.milliseconds, strict=True)]
        self.calls = [a + b for a, b in zip(self.calls, other.calls, strict=True)]


class Boundary:
    """Measures, and synchronizes around, calls of checkpointed modules.

    Args:
        device: of the model.
        profile: measure times.
        synchronize: wait for the device before and after each call.
        every: optimizer steps between tables.
        console: prints the tables; None: this rank prints nothing.
    """

    def __init__(
        self,
        device: torch.device,
        profile: bool,
        synchronize: bool,
        every: int = _EVERY,
        console: Console | None = None,
    ) -> None:
        self.times: defaultdict[str, ModuleTimes] = defaultdict(ModuleTimes)
        self._device, self._gpu = device, accelerator.has_streams(device)
        self._profile, self._synchronize = profile, synchronize
        self._every, self._console, self._steps = every, console, 0
        self._pending: deque[tuple[str, bool, Any, Any]] = deque()
        self._spare: list[Any] = []  # events to reuse

    @contextmanager
    def around(self, name: str, recompute: bool = False) -> Iterator[None]:
        """Context for one call of module ``name``, in forward or in recomputation, which may end by an exception."""
        # Before the start is taken: work that was queued earlier is not this call's.
        self._wait()
        start = self._now() if self._profile else None
        try:
            yield
        finally:
            self._wait()
            if self._profile:
                self._pending.append((name, recompute, start, self._now()))
            if not self._gpu:
                self._collect()

    def end_step(self) -> None:
        """Count an optimizer step, and print a table if one is due."""
        self._collect()
        self._steps += 1
        if not self._profile or self._steps % self._every:
            return
        if self._console is not None:
            show(self.table(self._every), self._console)
        self.times.clear()

    def table(self, steps: int) -> Table:
        """The times of each module since the last table, ``steps`` optimizer steps ago."""
        self._collect()
        table = Table(title=f"Checkpointed modules, ms per optimizer step, mean of {steps}")
        for column in ("module", "forwards", "ms", "recomputations", "ms"):
            table.add_column(
                column,
                justify="left" if column == "module" else "right",
                overflow="fold" if column == "module" else "ellipsis",
            )
        total = ModuleTimes()
        for name, found in [*self.times.items(), ("all", total)]:
            pairs = zip(found.calls, found.milliseconds, strict=True)
            cells = [cell for calls, spent in pairs for cell in (f"{calls / steps:g}", f"{spent / steps:.3f}")]
            table.add_row(name, *cells, style="bold" if found is total else None)
            total.add(found)
        return table

    def _wait(self) -> None:
        if self._synchronize and self._gpu:
            accelerator.synchronize(self._device)

    def _now(self) -> Any:
        if not self._gpu:
            return 1000 * time.perf_counter()
        event = self._spare.pop() if self._spare else accelerator.event(self._device, timing=True)
        event.record()
        return event

    def _collect(self) -> None:
        """Count the calls whose events have completed."""
        # The device ends calls in their order, so the first one that has not ended is asked alone.
        while self._pending and (not self._gpu or self._pending[0][3].query()):
            name, recompute, start, end = self._pending.popleft()
            self.times[name].milliseconds[recompute] += start.elapsed_time(end) if self._gpu else end - start
            self.times[name].calls[recompute] += 1
            if self._gpu:
                self._spare += (start, end)


def open_boundary(
    block: ActivationCheckpointing, device: torch.device, rank: int = 0, steps_per_print: int | None = None
) -> Boundary | None:
    """The ``Boundary`` that the configuration asks for, or None. Rank 0 prints, every 10 steps by default."""
    if not block.profile and not block.synchronize_checkpoint_boundary:
        return None
    console = RunConsole() if rank == 0 else None
    return Boundary(device, block.profile, block.synchronize_checkpoint_boundary, steps_per_print or _EVERY, console)
