"""``lt_zero.jsonl``: what a run measured beside its metrics, one JSON object a line, in the folder of its metrics.

kind         fields
start        step (already done), ranks, stage, mode, unix (time)
steps        last (number of the last one), ms (of each step up to it, in order)
memory       step, rank, moments: for each moment of a step the bytes of each place
collectives  steps (in which they ran), rank, records: operation, name, nbytes, calls, seconds, waited, sent (bytes)

A run that is resumed in the same folder goes on in the same file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lt_zero.comm.comm_log import CommRecord, bus_factor
from lt_zero.common.users_code import warn
from lt_zero.config import ZeroConfig

NAME = "lt_zero.jsonl"
_KEPT = 512  # steps whose times are written in one line


class RunFile:
    """Writes the file of one run, on one rank. An error of the file system ends the file, with a warning, not the run.

    Args:
        folder: of the metrics.
        config: of the run.
        ranks: number of all.
        mode: of precision, as Lightning writes it.
        step: steps that were done when the run began.
    """

    def __init__(self, folder: Path, config: ZeroConfig, ranks: int, mode: str, step: int) -> None:
        self._path, self._ranks, self._works = folder / NAME, ranks, True
        self._last, self._times = step, list[float]()
        self._since: float | None = None
        self._steps = 0
        stage = config.zero_optimization.stage
        self._write("start", step=step, ranks=ranks, stage=stage, mode=mode, unix=time.time())

    def end_step(self, number: int) -> None:
        """Note the end of step ``number``. Its time began with the end of the one before; the first has none."""
        now = time.perf_counter()
        self._steps += 1
        if self._since is not None:
            self._last = number
            self._times.append(round((now - self._since) * 1e3, 3))
        self._since = now
        if len(self._times) >= _KEPT:
            self.flush()

    def leave_out(self, seconds: float) -> None:
        """Leave out the last ``seconds``, in which the run did something else than train."""
        if self._since is not None:
            self._since += seconds

    def flush(self) -> None:
        """Write the times of the steps that are not written yet."""
        if self._times:
            times, self._times = self._times, []
            self._write("steps", last=self._last, ms=times)

    def write_memory(self, step: int, rank: int, moments: Mapping[str, Mapping[str, int]]) -> None:
        """Write the bytes of each place at the moments of a step."""
        self._write("memory", step=step, rank=rank, moments=moments)

    def write_collectives(self, records: Sequence[CommRecord], rank: int) -> None:
        """Write what the communication log has of the steps since the start."""
        rows = []
        for each in records:
            sent = each.sent or round(each.nbytes * each.calls * bus_factor(each.operation, self._ranks))
            facts = {"operation": each.operation, "name": each.name, "nbytes": each.nbytes, "calls": each.calls}
            rows.append({**facts, "seconds": each.seconds, "waited": each.waited, "sent": sent})
        self._write("collectives", steps=self._steps, rank=rank, records=rows)

    def _write(self, kind: str, **fields: Any) -> None:
        if not self._works:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, **fields}) + "\n")
        except OSError as error:
            self._works = False
            warn(f"{self._path} cannot be written ({error.strerror or error}): lt-zero logs will lack its facts.")
