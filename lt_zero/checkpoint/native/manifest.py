"""``manifest.json``: the contents and checksums of a checkpoint directory.

It is written last: a directory without it is not a checkpoint. It has the length and checksums of every other file; its
own checksum is that of its text without the checksum's line.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lt_zero.checkpoint.source import Spec
from lt_zero.common.errors import CheckpointError
from lt_zero.io.checked_file import STEP, FileRecord

NAME = "manifest.json"
VERSION = 1


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor: its elements, row-major and contiguous, begin at byte ``start`` of ``file``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int


@dataclass(frozen=True)
class Entry(Spec):
    """A tensor that is saved in chunks."""

    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint directory.

    ``tensors``: by full name, ``model.<name>`` and ``optimizer_<i>.state.<name>.<key>``. ``order``: all names of the
    module's state dict. ``aliases``: tied name -> the name in ``tensors``. ``left_out``: frozen parameters that were
    deliberately not saved. ``run``: stage, ranks and precision, for information.
    """

    tensors: Mapping[str, Entry]
    files: Mapping[str, FileRecord]
    order: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    run: Mapping[str, Any] = field(default_factory=dict)

    def dump(self) -> str:
        names = sorted(self.files)
        number = {name: i for i, name in enumerate(names)}
        body = {
            "format": "lt_zero",
            "version": VERSION,
            "block": STEP,
            "run": self.run,
            "order": self.order,
            "aliases": self.aliases,
            "left_out": self.left_out,
            "files": [{"name": n, "bytes": self.files[n].nbytes, "sums": self.files[n].sums} for n in names],
            "tensors": {
                name: {
                    "dtype": str(entry.dtype).removeprefix("torch."),
                    "shape": entry.shape,
                    "chunks": [(c.offsets, c.sizes, number[c.file], c.start) for c in entry.chunks],
                }
                for name, entry in self.tensors.items()
            },
        }
        # One line per top-level key keeps the beginning readable.
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items())
        return f'{{"sha256": "{_digest(lines)}",\n{lines}}}\n'

    @classmethod
    def parse(cls, text: str, path: str) -> Manifest:
        """Read a manifest.

        Raises:
            CheckpointError: the text is damaged, or from a newer version; names ``path``.
        """
        match = re.fullmatch(r'\{"sha256": "([0-9a-f]{64})",\n(.*)\}\n', text, re.DOTALL)
        if match is None or _digest(match[2]) != match[1]:
            raise CheckpointError(
                f"{path} is damaged: its content does not match its checksum. Restore it from a copy, or use another "
                "checkpoint."
            )
        try:
            body = json.loads(text)
            if body["version"] > VERSION:
                raise CheckpointError(
                    f"{path} has version {body['version']}, but this lt_zero reads up to {VERSION}. Update lt_zero."
                )
            return cls._of(body)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is malformed ({type(error).__name__}: {error}), although its checksum is correct: lt_zero did "
                "not write it. Use another checkpoint."
            ) from None

    @classmethod
    def _of(cls, body: Mapping[str, Any]) -> Manifest:
        """Check all that reads do not check: files lie in the directory, chunks in their tensor and their file."""
        if body["block"] != STEP:
            raise ValueError(f"blocks of {body['block']} bytes")
        files = {file["name"]: FileRecord(file["bytes"], tuple(file["sums"])) for file in body["files"]}
        for name, record in files.items():
            if name != os.path.basename(name) or name in ("", ".", "..", NAME):
                raise ValueError(f"a file named {name!r}")
            if len(record.sums) != -(-record.nbytes // STEP):
                raise ValueError(f"{len(record.sums)} checksums for {record.nbytes} bytes of {name}")
        names = [file["name"] for file in body["files"]]
        tensors = {}
        for name, entry in body["tensors"].items():
            shape, dtype = tuple(entry["shape"]), getattr(torch, entry["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"a dtype {entry['dtype']!r}")
            chunks = tuple(Chunk(tuple(o), tuple(s), names[file], start) for o, s, file, start in entry["chunks"])
            for chunk in chunks:
                axes = zip(shape, chunk.offsets, chunk.sizes, strict=True)
                inside = all(offset >= 0 and size >= 0 and offset + size <= whole for whole, offset, size in axes)
                end = chunk.start + math.prod(chunk.sizes) * dtype.itemsize
                if not inside or not 0 <= chunk.start <= end <= files[chunk.file].nbytes:
                    raise ValueError(f"{name} of {shape} has a chunk {chunk}")
            tensors[name] = Entry(shape, dtype, chunks)
        order, left_out = tuple(body["order"]), tuple(body["left_out"])
        return cls(tensors, files, order, body["aliases"], left_out, body["run"])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def is_ours(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins like a manifest of lt_zero."""
    try:
        with open(path, "rb") as file:
            return b'"format": "lt_zero"' in file.read(200)
    except OSError:
        return False
