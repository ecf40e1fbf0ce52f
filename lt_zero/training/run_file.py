"""``lt_zero.jsonl``: what a run measured beside its metrics, one JSON object a line, in the folder of its metrics.

kind         fields
start        at (first step to come), ranks, stage, mode, unix (time)
steps        at (the steps), ms (of each of them)
memory       at (the step), rank, moments: for each moment of a step the bytes of each place
collectives  steps (in which they ran), rank, records: operation, name, nbytes, calls, seconds, waited, sent (bytes)

Steps are counted as in the metrics beside the file. A run that is resumed in the same folder goes on in the same file.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lt_zero.common.users_code import warn
from lt_zero.core.stores.regular_file import open_for_update, parse_json, read_text

NAME = "lt_zero.jsonl"
_BLOCK = 1 << 16  # bytes that are read at a time
_MOST = 1 << 30  # bytes; a million steps take a hundredth
_LONGEST = 1 << 26  # bytes of a line
_SECONDS = 5.0  # between two lines of times of steps


class RunFile:
    """Writes the file of one run, on one rank. An error of the file system ends the file, with a warning, not the run.

    Args:
        folder: of the metrics.
        at: first step to come.
        about: other facts of the run.
    """

    def __init__(self, folder: Path, at: int, **about: Any) -> None:
        self._path, self._works = folder / NAME, True
        self._at, self._times = list[int](), list[float]()
        self._since: float | None = None
        self._written = time.perf_counter()
        self._steps = 0
        with contextlib.suppress(OSError):  # the first line says why
            cut_incomplete_line(self._path)
        self._write("start", at=at, **about, unix=time.time())

    def end_step(self, at: int) -> None:
        """Note the end of a step. Its time began with the end of the one before; the first has none."""
        now = time.perf_counter()
        self._steps += 1
        if self._since is not None:
            self._at.append(at)
            self._times.append(round((now - self._since) * 1e3, 3))
        self._since = now
        if now - self._written > _SECONDS:
            self.flush()

    def leave_out(self, seconds: float) -> None:
        """Leave out the last ``seconds``, in which the run did something else than train."""
        if self._since is not None:
            self._since += seconds

    def flush(self) -> None:
        """Write the times of the steps that are not written yet."""
        self._written = time.perf_counter()
        if self._times:
            steps, times, self._at, self._times = self._at, self._times, [], []
            self._write("steps", at=steps, ms=times)

    def write_memory(self, at: int, rank: int, moments: Mapping[str, Mapping[str, int]]) -> None:
        """Write the bytes of each place at the moments of a step."""
        self._write("memory", at=at, rank=rank, moments=moments)

    def write_collectives(self, records: Sequence[Mapping[str, Any]], rank: int) -> None:
        """Write sums of the steps since the start; fields of records are in the table above."""
        self._write("collectives", steps=self._steps, rank=rank, records=records)

    def _write(self, kind: str, **fields: Any) -> None:
        if not self._works:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            opened = open_for_update(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            with open(opened, "a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, **fields}) + "\n")
        except OSError as error:
            self._works = False
            warn(f"{self._path} cannot be written ({error.strerror or error}): lt-zero logs will lack its facts.")


def cut_incomplete_line(path: Path) -> None:
    """Remove what follows the last line break of a file: its writer was killed, or the disk was full.

    Otherwise the next line would be one with it, and perhaps still a valid one.

    Raises:
        OSError: the file cannot be read or written, or its last line has no end for ``_LONGEST`` bytes.
    """
    if not os.path.lexists(path):
        return
    with open(open_for_update(path, os.O_RDWR), "rb+") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end > 0:
            if size - end > _LONGEST:
                raise OSError(
                    f"{path} has no line break in its last {_LONGEST:,} bytes, so lt_zero did not write it. Choose "
                    "another path."
                )
            start = max(0, end - _BLOCK)
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def read_facts(folder: Path) -> list[dict[str, Any]]:
    """The lines of the file in ``folder``, none if it is absent. An incomplete last line is left out.

    Raises:
        ValueError: a line is damaged; names it. OSError: the file cannot be read, or has more than ``_MOST`` bytes.
    """
    path, found = folder / NAME, list[dict[str, Any]]()
    if not os.path.lexists(path):
        return []
    lines = read_text(path, _MOST, errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break  # it is being written
        try:
            facts = parse_json(line)
            if not isinstance(facts, dict) or not isinstance(facts.get("kind"), str):
                raise ValueError("no object with a kind")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}. Remove the line.") from None
        found.append(facts)
    return found
