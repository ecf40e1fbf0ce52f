"""A trial of ``lt-zero tune``, inside the script: times optimizer steps, reports them, and ends the process.

The command starts the script with a folder in the environment. There a trial finds its order, and rank 0 leaves
``facts.json`` before the first step and ``report.json`` after the last.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from lt_zero.common import accelerator
from lt_zero.common.tensor_tree import rows_of
from lt_zero.config import ZeroConfig
from lt_zero.core.engine.engine import Engine
from lt_zero.planning.check import RESTING, measured
from lt_zero.planning.limits import peak_rss
from lt_zero.planning.search_space import Facts, choices_of, layers_of, plans_of, unrepeated, written

FOLDER = "LT_ZERO_TRIAL"  # in the environment: the folder of the trial
ORDER = "order.json"
FACTS = "facts.json"
REPORT = "report.json"


@dataclass(frozen=True)
class Order:
    """Task of a trial.

    Attributes:
        warmup: optimizer steps before those that are timed; one more comes first.
        steps: optimizer steps to time.
        limit: bytes of a GPU that a rank may take; None: all.
        nvme: folder in which offload to files may be planned.
        plans: whether to write facts.
    """

    warmup: int
    steps: int
    limit: int | None = None
    nvme: str | None = None
    plans: bool = False

    def write(self, folder: Path) -> None:
        (folder / ORDER).write_text(json.dumps(asdict(self)), encoding="utf-8")


class Trial:
    """One trial. ``start`` is called once engine and optimizers exist, ``end_step`` after each optimizer step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._order = Order(**json.loads((folder / ORDER).read_text(encoding="utf-8")))
        self._engine: Engine | None = None
        self._last: Any = None  # time of the last step's end
        self._spans: list[tuple[Any, Any]] = []
        self._left_out = False  # the time since the last step does not count
        self._batch: int | None = None
        self._built = 0  # peak bytes before the first step

    def start(
        self,
        engine: Engine,
        config: ZeroConfig,
        *,
        data_ranks: int,
        accumulation: int,
        micro: int | None = None,
        saves: bool = False,
        loop: bool = False,
    ) -> None:
        """Set-up is complete.

        Args:
            config: as far as it is resolved.
            data_ranks, accumulation, micro, loop: as in ``Facts``.
            saves: there will be checkpoints.
        """
        if self._engine is not None:
            return
        self._engine = engine
        device = engine.device
        order = self._order
        if order.limit is not None and accelerator.is_accelerator(device):
            accelerator.limit_memory(device, order.limit)
        if order.plans and (engine.world.rank == 0 or not engine.everywhere):
            held = sum(nbytes for kind, nbytes in measured(engine).items() if kind != RESTING)
            bare = max(0, _taken(device) - held)
            plans = tuple(plans_of(engine, config, saves, order.nvme))
            refused = unrepeated(engine, config)
            base = written(config)
            known = (device.type, data_ranks, base, micro, accumulation, loop, bare, refused, plans)
            if engine.world.rank == 0:
                rounding = tuple(choice.keys for choice in choices_of(engine, config) if not choice.exact)
                Facts(*known, layers_of(engine), rounding).write(self._folder / FACTS)
        self._built = _peak(device)
        _reset_peak(device)

    def see_batch(self, batch: Any) -> None:
        """Note a micro-batch of the script; its size is reported if it is clear."""
        self._batch = self._batch or rows_of(batch)

    def leave_out(self) -> None:
        """Something else than training happens until the end of this step."""
        self._left_out = True

    def end_step(self) -> None:
        """An optimizer step has ended. The process ends after the last step of the trial. Collective then."""
        if self._engine is None:
            return
        now = self._now()
        if self._last is not None and not self._left_out:
            self._spans.append((self._last, now))
        self._last, self._left_out = now, False
        if len(self._spans) == self._order.warmup + self._order.steps:
            self._finish(self._engine)

    def _now(self) -> Any:
        assert self._engine is not None
        if not accelerator.has_streams(self._engine.device):
            return time.perf_counter()
        event = accelerator.event(self._engine.device, timing=True)
        event.record()
        return event

    def _finish(self, engine: Engine) -> None:
        world, device = engine.world, engine.device
        if accelerator.has_streams(device):
            accelerator.synchronize(device)
            seconds = [begin.elapsed_time(end) / 1e3 for begin, end in self._spans]
        else:
            seconds = [end - begin for begin, end in self._spans]
        running = accelerator.peak_allocated(device) if accelerator.is_accelerator(device) else _peak(device)
        # Steps may still run in the background. The peak is read once they have ended.
        engine.prepare_reading()
        mine = seconds[self._order.warmup :], running, max(_peak(device), self._built)
        ranks = world.host_gather(mine, "the end of a trial")
        if world.rank == 0:
            report = {
                "seconds": [max(steps) for steps in zip(*(steps for steps, _, _ in ranks), strict=True)],
                "running": max(nbytes for _, nbytes, _ in ranks),
                "peak": max(nbytes for _, _, nbytes in ranks),
                "batch": self._batch,
            }
            (self._folder / REPORT).write_text(json.dumps(report), encoding="utf-8")
        # All ranks leave together: one that left early would be an error on the others.
        world.host_gather(None, "the report of a trial")
        engine.offload_manager.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not an exception: callbacks would save checkpoints, and the script might catch it and go on.
        os._exit(0)


def _taken(device: torch.device) -> int:
    if accelerator.is_accelerator(device):
        return accelerator.allocated(device)
    return int(psutil.Process().memory_info().rss)


def _peak(device: torch.device) -> int:
    return accelerator.peak_reserved(device) if accelerator.is_accelerator(device) else peak_rss()


def _reset_peak(device: torch.device) -> None:
    if accelerator.is_accelerator(device):
        accelerator.reset_peak(device)
        return
    with suppress(OSError):  # Linux; elsewhere the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
