"""Reads the manifest of a checkpoint directory (directory.py), and checks all that it says."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from lt_zero.checkpoint.native.chunks import Chunks, Table
from lt_zero.checkpoint.native.directory import MANIFEST, VERSION, Chunk, Manifest, ManifestEntry
from lt_zero.common.boxes import Box, check_cover
from lt_zero.common.errors import CheckpointError
from lt_zero.core.stores.checked_file import STEP, FileRecord

MOST_MANIFEST = 1 << 30  # bytes; a model of 70B with Adam's moments on 4,096 ranks takes an eighth
_TENSORS = b'\n"tensors": {\n'  # what comes before the lines of tensors: names have no line breaks in JSON
_END = b"\n}}\n"  # behind them
_CHUNKS = b'"chunks": '  # in such a line, behind the rest; a quotation mark inside of a name has a backslash
_STATE = re.compile(r"optimizer_\d+\.state\..+\..+")  # the name of an optimizer's state
_MOST = 1 << 62  # elements or bytes: more do not exist


def parsed(data: bytes, path: str) -> Manifest:
    """Read a manifest.

    Raises:
        CheckpointError: the text is damaged, or from a newer version; names ``path``. What it says of a tensor's
            chunks raises the same when they are used; see chunks.py, Note [Chunks on demand].
    """
    head = re.match(rb'\{"sha256": "([0-9a-f]{64})",\n', data)
    if head is None or not data.endswith(b"}\n"):
        digest = None
    else:
        digest = hashlib.sha256(memoryview(data)[head.end() : -2]).hexdigest().encode()
    if head is None or digest != head[1]:
        raise CheckpointError(
            f"{path} is damaged: its content does not match its checksum. Restore it from a copy, or use another "
            "checkpoint."
        )
    with _explaining(path):
        first, lines = _lines_of_tensors(data)
        body = table(json.loads(first), "the content")
        if count(body["version"], "version") > VERSION:
            raise CheckpointError(
                f"{path} has version {body['version']}, but this lt_zero reads up to {VERSION}. Update lt_zero."
            )
        return replace(_manifest_of(body, lines, path), checksum=head[1].decode())


def _manifest_of(body: Mapping[str, Any], lines: Mapping[str, _Line], path: str) -> Manifest:
    """Check all that reads do not check: types; files lie in the directory, chunks in their file; chunks are all
    of their tensor; names lead to tensors.

    ``lines``: of tensors that are not in ``body``, by name.
    """
    if body["block"] != STEP:
        raise ValueError(f"blocks of {body['block']} bytes")
    files = _files_of(body["files"])
    names = list(files)
    if len(names) != len(body["files"]):
        raise ValueError("files has a name twice")
    tensors = {name: _entry_of(name, entry, names, files) for name, entry in table(body["tensors"], "tensors").items()}
    lengths = np.array([record.nbytes for record in files.values()], dtype=np.int64)
    tensors |= {name: _entry_on_demand(name, line, names, files, lengths, path) for name, line in lines.items()}
    order = texts(body["order"], "order")
    left_out = texts(body["left_out"], "left_out")
    aliases = table(body["aliases"], "aliases")
    for tied, name in aliases.items():
        if not isinstance(name, str) or f"model.{name}" not in tensors or f"model.{tied}" in tensors:
            raise ValueError(f"aliases: {tied} is tied to {name!r:.100}, which is not saved, or {tied} is, too")
    known = set(order)
    for name in tensors:
        kind, _, rest = name.partition(".")
        if known and kind == "model" and rest not in known:  # without names there are no weights
            raise ValueError(f"order lacks {rest}")
        if kind not in ("model", "extra") and not _STATE.match(name):
            raise ValueError(f"tensors has {name}, which is no weight or state")
    return Manifest(tensors, files, order, aliases, left_out, table(body["run"], "run"))


def _files_of(listed: Any) -> dict[str, FileRecord]:
    files = {}
    for number, file in enumerate(listed if isinstance(listed, list) else [None]):
        name = table(file, f"files[{number}]")["name"]
        sums = file["sums"]
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", "..", MANIFEST):
            raise ValueError(f"a file named {name!r}")
        nbytes = count(file["bytes"], f"bytes of {name}")
        if not isinstance(sums, list) or len(sums) != -(-nbytes // STEP) or not all(type(n) is int for n in sums):
            raise ValueError(f"sums of {name} are no checksums of {nbytes} bytes")
        files[name] = FileRecord(nbytes, tuple(sums))
    return files


class _Line(NamedTuple):
    """The line of a tensor: all but its chunks, and the text of these."""

    entry: Mapping[str, Any]
    chunks: memoryview


@contextlib.contextmanager
def _explaining(path: str) -> Iterator[None]:
    """Context that turns errors of content that this package did not write into ones that name ``path``."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is malformed ({type(error).__name__}: {error}), although its checksum is correct: lt_zero did "
            "not write it. Use another checkpoint."
        ) from None


def _lines_of_tensors(data: bytes) -> tuple[bytes, dict[str, _Line]]:
    """A manifest's text without its tensors, and the lines of these by name; none if they do not have a line each."""
    begin = data.find(_TENSORS)
    end = len(data) - len(_END)
    if begin < 0 or not data.endswith(_END):
        return data, {}
    found: dict[str, _Line] = {}
    view = memoryview(data)
    start = begin + len(_TENSORS)
    while start < end:
        stop = data.find(b"\n", start, end)
        stop = end if stop < 0 else stop
        last = stop - data.endswith(b",", start, stop)  # of the tensor's text, which ends with its list of chunks and }
        chunks = data.find(_CHUNKS, start, last) + len(_CHUNKS)
        if chunks < len(_CHUNKS):
            raise ValueError("a tensor has no chunks")
        [(name, entry)] = json.loads(b"{" + data[start:chunks] + b"[]}}").items()
        if name in found:
            raise ValueError(f"tensors has {name} twice")
        found[name] = _Line(entry, view[chunks : last - 1])
        start = stop + 1
    return data[:begin] + b'\n"tensors": {}}', found


def _entry_of(name: str, entry: Any, names: Sequence[str], files: Mapping[str, FileRecord]) -> ManifestEntry:
    """A tensor with its chunks."""
    shape, dtype = _form_of(name, entry)
    return ManifestEntry(shape, dtype, _chunks_of(name, shape, dtype, names, files, entry["chunks"]))


def _entry_on_demand(
    name: str, line: _Line, names: Sequence[str], files: Mapping[str, FileRecord], lengths: Table, path: str
) -> ManifestEntry:
    """A tensor with the text of its chunks. ``lengths``: of the files; ``path``: of the manifest, for errors."""
    shape, dtype = _form_of(name, line.entry)

    def check(listed: Any) -> None:
        with _explaining(path):
            _chunks_of(name, shape, dtype, names, files, listed)

    return ManifestEntry(shape, dtype, Chunks(line.chunks, shape, dtype.itemsize, names, lengths, check))


def _form_of(name: str, entry: Any) -> tuple[tuple[int, ...], torch.dtype]:
    shape = counts(table(entry, name)["shape"], f"shape of {name}")
    return shape, dtype_of(entry["dtype"], f"dtype of {name}")


def _chunks_of(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    names: Sequence[str],
    files: Mapping[str, FileRecord],
    listed: Any,
) -> tuple[Chunk, ...]:
    """The chunks of a tensor, which are inside of their files and all of it."""
    chunks = []
    for chunk in listed if isinstance(listed, list) else [None]:
        if not isinstance(chunk, list) or len(chunk) != 4:
            raise ValueError(f"{name} has a chunk {chunk!r:.100}")
        box = Box(counts(chunk[0], f"offsets of {name}"), counts(chunk[1], f"sizes of {name}"))
        file = names[count(chunk[2], f"file of {name}")]
        start = count(chunk[3], f"start of {name}")
        if start + box.numel * dtype.itemsize > files[file].nbytes:
            raise ValueError(f"{name} of {shape} has a chunk {chunk}, beyond the end of {file}")
        chunks.append(Chunk(box, file, start))
    check_cover(name, shape, [chunk.box for chunk in chunks])
    return tuple(chunks)


def count(value: Any, what: str) -> int:
    """``value``, which must be a number of elements or bytes."""
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{what} is {value!r:.100}, no number of elements or bytes")
    return value


def counts(value: Any, what: str) -> tuple[int, ...]:
    """``value``, which must be a list of numbers of elements."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{what} is {value!r:.100}, no list of numbers")
    return tuple(count(item, what) for item in value)


def texts(value: Any, what: str) -> tuple[str, ...]:
    """``value``, which must be a list of names."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{what} is {value!r:.100}, no list of names")
    return tuple(value)


def table(value: Any, what: str) -> dict[str, Any]:
    """``value``, which must be a dictionary with names as keys."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{what} is {value!r:.100}, no table by names")
    return value


def dtype_of(value: Any, what: str) -> torch.dtype:
    """The dtype with a name."""
    found = getattr(torch, value, None) if isinstance(value, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{what} is {value!r:.100}, which is none")
    return found
