"""Readers of files that strangers may have written, and all kinds of files for them."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from lt_zero.checkpoint.lora import LoraScaling
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.directory import find
from lt_zero.checkpoint.open import open_source, read_latest
from lt_zero.checkpoint.universal import earlier_of
from lt_zero.common.errors import CheckpointError, ConfigError
from lt_zero.config.blocks.monitoring import CsvMonitor
from lt_zero.config.load import examine
from lt_zero.core.stores.block_reader import BlockReader
from lt_zero.core.stores.checked_file import FileRecord
from lt_zero.planning.tune_cli import _check_output
from lt_zero.training.lightning.monitor.plot import read_drawn
from lt_zero.training.lightning.monitor.reading import LogsError
from lt_zero.training.loop import monitors
from lt_zero.training.run_file import RunFile
from tests.support.features import there

# ---- kinds of files -------------------------------------------------------------------------------------------------

SPARSE = 1 << 40  # bytes: more than the memory, and nothing on the disk


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def socket_of(path: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # addresses of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def terabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE)


def deep(path: Path) -> None:
    path.write_text("[" * 100_000 + "]" * 100_000 + "\n")


def deep_mapping(path: Path) -> None:
    path.write_text('{"a":' * 50_000 + "1" + "}" * 50_000 + "\n")


def garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 64 + b"\n")


def empty(path: Path) -> None:
    path.touch()


def gone(path: Path) -> None:
    path.symlink_to("nowhere")


KINDS = [fifo, device, folder, socket_of, terabyte, deep, deep_mapping, garbage, empty, gone]
NOTHING = [empty, gone, folder]  # an empty file may be one without facts, and nothing in its place is none


def _read_universal(file: Path) -> None:
    earlier_of(file.parent, overwrite=False)


def _read_blocks(file: Path) -> None:
    reader = BlockReader(str(file.parent))
    reader.files = {file.name: FileRecord(5, (1,))}
    reader.verify(file.name)


def _read_archive(file: Path) -> None:
    Archive(str(file.parent))


def _find(file: Path) -> None:
    """A manifest that is none of ours leaves the path what it is."""
    if find(file.parent / "meta.pt") == str(file.parent / "meta.pt"):
        raise CheckpointError(f"nothing was found at {file}")


def _write_facts(file: Path) -> None:
    """A run goes on, with a warning; what is a file gets a line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        RunFile(file.parent, 0).flush()
    if not caught:
        os.truncate(file, 0)
        raise CheckpointError(f"{file} was written to")
    raise CheckpointError(str(caught[0].message))


def _write_digests(file: Path) -> None:
    """What is a file gets a line: a run goes on in it."""
    _writer.DigestFile(file).append(kind="start")
    raise CheckpointError(f"{file} was written to")


def _write_events(file: Path) -> None:
    files = monitors.CsvFiles(CsvMonitor(output_path=str(file.parent.parent), job_name=file.parent.name))
    files.write([("Train/Samples/lr", 1.0, 1)])
    raise CheckpointError(f"{file} was written to")


# File of the package, name of what it reads, and a function that reads it: all raise an error that names the file.
READERS: list[tuple[str, str, Callable[[Path], object]]] = [
    ("config/files.py", "config.json", lambda file: examine(file).usable()),
    ("config/files.py", "config.yaml", lambda file: examine(file).usable()),
    ("checkpoint/lora.py", "adapter_config.json", LoraScaling.of),
    ("checkpoint/lora.py", "adapter_config.json", lambda file: LoraScaling.of(file.parent)),
    ("checkpoint/native/archive.py", "manifest.json", _read_archive),
    ("checkpoint/native/archive.py", "manifest.json", lambda file: open_source(file.parent)),
    ("checkpoint/native/directory.py", "manifest.json", _find),
    ("checkpoint/open.py", "latest", lambda file: open_source(file.parent, tag=read_latest(file.parent))),
    ("checkpoint/universal.py", "latest_universal", _read_universal),
    ("checkpoint/formats/torch_file.py", "model.safetensors.index.json", lambda file: open_source(file.parent)),
    ("checkpoint/formats/torch_file.py", "a.safetensors", open_source),
    ("checkpoint/native/records.py", "a.pt", open_source),
    ("checkpoint/native/saved_file.py", "a.pt", open_source),
    ("checkpoint/formats/reading.py", ".metadata", lambda file: open_source(file.parent)),
    ("core/stores/block_reader.py", "weights-00000.pt", _read_blocks),
    ("training/run_file.py", "lt_zero.jsonl", lambda file: read_drawn(file.parent)),
    ("training/run_file.py", "lt_zero.jsonl", _write_facts),
    ("training/lightning/monitor/reading.py", "metrics.csv", read_drawn),
    ("training/lightning/monitor/reading.py", "metrics.csv", lambda file: read_drawn(file.parent)),
    ("training/lightning/monitor/reading.py", "Train_Samples_lr.csv", lambda file: read_drawn(file.parent)),
    ("training/lightning/monitor/reading.py", "events.out.tfevents.1", lambda file: read_drawn(file.parent)),
    ("training/loop/monitors.py", "Train_Samples_lr.csv", _write_events),
    ("planning/tune_cli.py", "tuned.yaml", _check_output),
]
ERRORS: tuple[type[Exception], ...] = (CheckpointError, ConfigError, LogsError, OSError)
if there("compare"):
    _compare: Any = import_module("lt_zero.tools.compare.compare")
    READERS.append(("tools/compare/compare.py", "engine0.jsonl", lambda file: _compare.read_record(file.parent)))
    ERRORS += (_compare.RecordError,)
    _digests: Any = import_module("lt_zero.tools.compare.digests")
    _writer: Any = import_module("lt_zero.tools.compare.digest_writer")
    READERS.append(("tools/compare/digests.py", "digests0.jsonl", lambda file: _digests.read_digests(file.parent)))
    READERS.append(("tools/compare/digest_writer.py", "digests0.jsonl", _write_digests))
    ERRORS += (_digests.DigestsError,)
BESIDE = {"lt_zero.jsonl": ("metrics.csv", "step,zero/loss\n0,1.0\n")}


# ---- fields of other types -------------------------------------------------------------------------------------------

WRONG: list[Any] = [None, True, "x", [], {}, [[]], -1, 10**400, float("nan"), float("inf"), {"a": []}, ["x", None]]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in containers of JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def damaged_lines(lines: list[Any], every: int = 1) -> Iterator[str]:
    """Texts of JSON lines, each with one value that is of another type, or missing; of all these some."""
    pairs = [(path, wrong) for path in places(lines) if path for wrong in [*WRONG, "missing"]]
    for path, wrong in pairs[::every]:
        changed = json.loads(json.dumps(lines))
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        if wrong == "missing":
            del holder[path[-1]]
        else:
            holder[path[-1]] = wrong
        yield "".join(json.dumps(line) + "\n" for line in changed)


def _tensor(kind: str, name: str) -> dict[str, Any]:
    sizes = {"rows": 2, "numel": 4, "squares": 1.5, "largest": 1.0, "products": [0.5, 1.0]}
    return {"kind": kind, "name": name, "dtype": "float32", **sizes}


def record_of_two_steps() -> list[Any]:
    first = {"step": 0, "tensors": [_tensor("weight", "a.weight")]}
    kinds = [("input", "(model)"), ("output", "a"), ("gradient", "a.weight"), ("weight", "a.weight")]
    steps = [{"step": n, "tensors": [_tensor(*each) for each in kinds]} for n in (1, 2)]
    return [{"version": 2, "stage": 3, "ranks": 2}, first, *steps]


FACTS: list[Any] = [
    {"kind": "start", "at": 0, "ranks": 2, "stage": 3, "mode": "sharded", "unix": 1.0},
    {"kind": "steps", "at": [1, 2], "ms": [3.0, 4.0]},
    {"kind": "memory", "at": 1, "rank": 0, "moments": {"end": {"weights": 100, "states": 200}}},
    {
        "kind": "collectives",
        "steps": 2,
        "rank": 0,
        "records": [
            {"operation": "gather", "name": "a", "nbytes": 1, "calls": 1, "seconds": 0.1, "waited": 0.1, "sent": 1}
        ],
    },
]
