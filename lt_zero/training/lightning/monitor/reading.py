"""Metrics of a run, read from the files of its loggers, with what stands beside them in ``lt_zero.jsonl``."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from lt_zero.core.stores.regular_file import open_regular, read_text
from lt_zero.training.run_file import NAME as FACTS
from lt_zero.training.run_file import read_facts

NAME = "metrics.csv"
STEP_MS = "zero/step_ms"  # the times of steps in ``lt_zero.jsonl``, as a column
_STEP = "step"
_MOST = 1 << 30  # bytes of a table
_EVENTS, _BOARD = "Train_Samples_*.csv", "events.out.tfevents.*"
_PREFIX = "Train/Samples/"
# DeepSpeed's events that mean what a metric of the Trainer means.
_SAME = {
    "train_loss": "loss",
    **{name: name for name in ("lr", "grad_norm", "loss_scale", "skipped_steps", "gradient_noise_scale")},
}
_REMEDY = "Set csv_monitor.enabled=true, or use Lightning's CSVLogger, to write one."
Columns = dict[str, tuple[list[float], list[float]]]  # by name: the steps in which a value was logged, and the values


class LogsError(ValueError):
    """Logs are missing, damaged or without a value that is looked for. Names the file and the remedy."""


class LoggedRun(NamedTuple):
    """The metrics of one run.

    Attributes:
        name: as the user wrote the path.
        path: the file, or the folder of several.
        rows: how many were read.
        columns: by name.
        unit: of steps: ``step``, or ``samples``.
        facts: lines of ``lt_zero.jsonl``.
        earlier: paths of the versions that this one was resumed from, and that are part of this.
    """

    name: str
    path: Path
    rows: int
    columns: Columns
    unit: str = _STEP
    facts: Sequence[dict[str, Any]] = ()
    earlier: Sequence[Path] = ()


def find_metrics(path: str | os.PathLike[str]) -> Path:
    """Find what has the metrics at or below ``path``: a ``metrics.csv``, or a folder with files of events.

    Of several the newest version of the run that was written to last; files of TensorBoard if there are no others.

    Raises:
        LogsError: there are none.
    """
    path = Path(path)
    if not path.is_dir() and os.path.lexists(path):
        with _naming(path):
            os.close(open_regular(path))
        return path.parent if path.match(_EVENTS) or path.match(_BOARD) else path
    if not path.is_dir():
        raise LogsError(f"{path} does not exist. Name the folder of a run, or its {NAME}.")
    if (path / NAME).is_file():
        return path / NAME
    found = [file for name in (NAME, _EVENTS) for file in path.rglob(name) if file.is_file()]
    found = found or [file for file in path.rglob(_BOARD) if file.is_file()]
    if not found:
        raise LogsError(f"No {NAME} in {path} or below. {_REMEDY}")
    newest = max(found, key=lambda file: file.stat().st_mtime)
    siblings = [file for file in found if file.parent.parent == newest.parent.parent and file.name == newest.name]
    return max(siblings, key=_version) if newest.name == NAME else newest.parent


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Context that turns an OSError into a LogsError with ``path``."""
    try:
        yield
    except OSError as error:
        raise LogsError(f"{path} cannot be read: {error}.") from error


def _version(file: Path) -> tuple[int, float]:
    number = re.fullmatch(r"version_(\d+)", file.parent.name)
    return int(number[1]) if number else -1, file.stat().st_mtime


def read_run(run: str | os.PathLike[str], wanted: Callable[[str], object]) -> LoggedRun:
    """The metrics of a run, a folder or a file. An incomplete last line (of a running training) is left out.

    Args:
        wanted: which columns are read; others may have text.

    Raises:
        LogsError: there is no such file, it is empty, or a line is malformed; names the line.
    """
    path = find_metrics(run)
    try:
        if path.is_file():
            found = _resumed(str(run), path, wanted)
        elif any(path.glob(_EVENTS)):
            rows, columns = _read_events(path, wanted)
            found = LoggedRun(str(run), path, rows, columns, "samples", read_facts(path))
        else:
            rows, columns = _read_board(path, wanted)
            ours = any(name.startswith(_PREFIX) for name in columns)
            names = {name: f"zero/{_SAME[name.removeprefix(_PREFIX)]}" for name in columns if _is_event(name)}
            columns = {names.get(name, name): points for name, points in columns.items()}
            found = LoggedRun(str(run), path, rows, columns, "samples" if ours else _STEP, read_facts(path))
    except (OSError, UnicodeDecodeError) as error:
        raise LogsError(f"{path} cannot be read: {error}.") from error
    except ValueError as error:
        raise error if isinstance(error, LogsError) else LogsError(str(error)) from error
    except (TypeError, LookupError, OverflowError) as error:
        raise LogsError(f"{FACTS} beside {path} is damaged ({type(error).__name__}: {error}). Remove it.") from error
    times = [(at, ms) for fact in found.facts if fact["kind"] == "steps" for at, ms in _pairs(fact, found.path)]
    if times and wanted(STEP_MS):
        found.columns[STEP_MS] = _ordered([at for at, _ in times], [ms for _, ms in times])
    return found


def _pairs(fact: dict[str, Any], path: Path) -> list[tuple[float, float]]:
    try:
        return [(float(at), float(ms)) for at, ms in zip(fact["at"], fact["ms"], strict=True)]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise LogsError(f"{FACTS} beside {path}: times of steps are damaged ({error}). Remove the line.") from error


def _resumed(name: str, path: Path, wanted: Callable[[str], object]) -> LoggedRun:
    """The metrics of a ``metrics.csv``, after those of the versions that it was resumed from."""
    rows, columns = _read_table(path, wanted)
    facts, earlier = read_facts(path.parent), list[Path]()
    first = _first(facts)
    number, _ = _version(path)
    while first > 0 and number > 0:
        number -= 1
        before = path.parent.parent / f"version_{number}"
        older = read_facts(before) if (before / NAME).is_file() else []
        if not older or _first(older) >= first:
            continue
        more, points = _read_table(before / NAME, wanted)
        columns = _joined(points, columns, first)
        rows, facts, earlier = rows + more, [*older, *facts], [before, *earlier]
        first = _first(older)
    return LoggedRun(name, path, rows, columns, _STEP, facts, earlier)


def _first(facts: Sequence[dict[str, Any]]) -> float:
    return min((float(fact["at"]) for fact in facts if fact["kind"] == "start"), default=0.0)


def _joined(before: Columns, after: Columns, first: float) -> Columns:
    """The columns of two runs, of the first one up to the step ``first``."""
    found: Columns = {}
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, ([], [])), after.get(name, ([], []))
        kept = [(step, value) for step, value in zip(*old, strict=True) if step < first]
        found[name] = [step for step, _ in kept] + new[0], [value for _, value in kept] + new[1]
    return {name: points for name, points in found.items() if points[0]}


def _ordered(steps: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """Values in the order of their steps. If the run went back to an earlier step, the later values count."""
    forward = all(one <= two for one, two in zip(steps, steps[1:], strict=False))
    return (steps, values) if forward else _latest(steps, values)


def _latest(steps: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    last = dict(zip(steps, values, strict=True))
    return sorted(last), [last[step] for step in sorted(last)]


# ---- files of one kind -----------------------------------------------------------------------------------------------


def _read_table(path: Path, wanted: Callable[[str], object]) -> tuple[int, Columns]:
    lines = read_text(path, _MOST, encoding="utf-8-sig").splitlines(keepends=True)
    if len(lines) > 1 and not lines[-1].endswith("\n"):
        del lines[-1]
    reader = csv.reader(lines, strict=True)
    columns: Columns = {}
    rows = 0
    try:
        header = next(reader, None)
        if not header:
            raise LogsError(f"{path} is empty: nothing was logged yet.")
        if _STEP not in header:
            raise LogsError(f"{path}, line 1: there is no column {_STEP!r}. Name a file of Lightning's CSVLogger.")
        for row in reader:
            if row == header:
                continue  # a run that was resumed
            _add(columns, header, row, f"{path}, line {reader.line_num}", wanted)
            rows += 1
    except csv.Error as error:
        raise LogsError(f"{path}, line {reader.line_num}: {error}.") from error
    return rows, {name: _ordered(*points) for name, points in columns.items()}


def _add(columns: Columns, header: list[str], row: list[str], where: str, wanted: Callable[[str], object]) -> None:
    if row and len(row) != len(header):
        raise LogsError(f"{where}: {len(row)} values for {len(header)} columns. Repair the line or remove it.")
    numbers = {}
    for name, cell in zip(header, row, strict=False):
        if name == _STEP or (cell and wanted(name)):
            try:
                numbers[name] = float(cell)
            except ValueError:
                problem = f"{where}, column {name!r}: {cell!r} is not a number. Repair the line or remove it."
                raise LogsError(problem) from None
    for name in numbers.keys() - {_STEP}:
        steps, values = columns.setdefault(name, ([], []))
        steps.append(numbers[_STEP])
        values.append(numbers[name])


def _is_event(name: str) -> bool:
    return name.startswith(_PREFIX) and name.removeprefix(_PREFIX) in _SAME


def _read_events(folder: Path, wanted: Callable[[str], object]) -> tuple[int, Columns]:
    """The events of a loop's ``csv_monitor``, or of DeepSpeed's."""
    rows, columns = 0, dict[str, tuple[list[float], list[float]]]()
    for path in sorted(folder.glob(_EVENTS)):
        event = path.stem.removeprefix(_PREFIX.replace("/", "_"))
        name = f"zero/{_SAME[event]}" if event in _SAME else event
        if wanted(name):
            more, found = _read_table(path, lambda column: True)
            rows += more
            for points in found.values():
                columns[name] = _latest(*points)  # a step has one value
    return rows, columns


def _read_board(folder: Path, wanted: Callable[[str], object]) -> tuple[int, Columns]:
    """The scalars of TensorBoard's files.

    Raises:
        LogsError: the package is missing.
    """
    try:
        module = import_module("tensorboard.backend.event_processing.event_accumulator")
    except ImportError as error:
        text = f"{folder} has files of TensorBoard only, which need its package to read ({error})"
        raise LogsError(f"{text}. Run: pip install tensorboard") from error
    for file in folder.glob(_BOARD):  # all of them are read, by name
        os.close(open_regular(file))
    events: Any = module.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    try:
        events.Reload()
        tags = list(events.Tags()["scalars"])
    except Exception as error:  # a damaged file may be anything to the package
        raise LogsError(f"{folder} has a damaged file of TensorBoard ({type(error).__name__}: {error}).") from error
    columns: Columns = {}
    for tag in tags:
        if _is_event(tag) or wanted(tag):
            points = events.Scalars(tag)
            columns[tag] = _ordered([float(p.step) for p in points], [float(p.value) for p in points])
    return sum(len(steps) for steps, _ in columns.values()), columns
