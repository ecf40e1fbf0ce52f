"""Reads a checkpoint directory of this package: any part of any tensor, with every byte checked.

The bytes come from the places in the manifest; torch.distributed.checkpoint, whose import takes half a second, is not
needed. Only ``meta.pt`` is unpickled, by torch with ``weights_only=True``.
"""

from __future__ import annotations

import errno
import io
import math
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lt_zero.checkpoint.native.chunks import meeting
from lt_zero.checkpoint.native.described_keys import described_keys
from lt_zero.checkpoint.native.directory import MANIFEST, Chunk, file_system, is_url
from lt_zero.checkpoint.native.manifest_reader import MOST_MANIFEST, parsed, table, texts
from lt_zero.checkpoint.native.plain import restore
from lt_zero.checkpoint.native.saved_file import empty_bytes, explained
from lt_zero.checkpoint.source import SavedOptimizer, Spec
from lt_zero.common.boxes import Box, cut_range, flat_index
from lt_zero.common.errors import CheckpointError
from lt_zero.common.tensor_tree import dense_tensors
from lt_zero.core.engine.lazy_tensor import LazyTensor
from lt_zero.core.stores.block_reader import BlockReader
from lt_zero.core.stores.direct_file import unreadable
from lt_zero.core.stores.regular_file import read_bytes

ROWS = 64 << 20  # bytes of whole rows that are read at a time to copy columns of them


class Archive:
    """An open checkpoint directory; a ``CheckpointSource``.

    Args:
        path: the directory, or its URL.
        checks_files: see ``check_files``, which the caller calls otherwise. What is read is checked in any case.

    Raises:
        CheckpointError: there is no checkpoint, or a file is missing, cut short or damaged; names it.
    """

    def __init__(self, path: str, checks_files: bool = True) -> None:
        self.path = path
        fs: Any = file_system(path) if is_url(path) else None
        self._fs = fs
        self._blocks = BlockReader(path, fs)
        place = f"{path}/{MANIFEST}"
        try:
            data: bytes = read_bytes(place, MOST_MANIFEST) if fs is None else _fetched(fs, place)
        except OSError as error:
            if fs is None and error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise unreadable(place, error) from None
            raise CheckpointError(
                f"{path} is not a complete checkpoint: {MANIFEST} cannot be read ({error}). It is written last; "
                "a kill while saving leaves none. Resume from another checkpoint."
            ) from None
        self.manifest = parsed(data, place)
        self._blocks.files = self.manifest.files
        if checks_files:
            self.check_files()
        self.aliases: Mapping[str, str] = self.manifest.aliases
        self.weights: Mapping[str, Spec] = {
            name: Spec(entry.shape, entry.dtype)
            for name in self.manifest.order
            if (entry := self.manifest.tensors.get(f"model.{self.aliases.get(name, name)}")) is not None
        }

    def check_files(self, share: int = 0, shares: int = 1) -> None:
        """Check that files are there, and as long as they were written: the ``share``-th of so many ``shares``.

        Raises:
            CheckpointError: one is not; names it.
        """
        for name in list(self.manifest.files)[share::shares]:
            self._blocks.check_length(name)

    def copy_id(self) -> tuple[Any, ...]:
        """Identity of a copy of a checkpoint: equal on ranks, of any node, that see the same files."""
        place = f"{self.path}/{MANIFEST}"
        if self._fs is not None:
            return (place, self._fs.ukey(place))
        try:
            found = os.stat(place)
        except OSError as error:
            raise unreadable(place, error) from error
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    @property
    def precision(self) -> str:
        """The precision of the run; "" if it is not known."""
        return str(self.manifest.run.get("precision", ""))

    @staticmethod
    def is_at(path: str) -> bool:
        """True if there is a complete checkpoint at a path or URL."""
        if not is_url(path):
            return os.path.isfile(os.path.join(path, MANIFEST))
        return bool(file_system(path).exists(f"{path}/{MANIFEST}"))

    @cached_property
    def meta(self) -> Mapping[str, Any]:
        """The Lightning checkpoint without weights and optimizer states; plain containers. See Note [Keys]."""
        data = io.BytesIO(self.bytes_of("meta.pt"))
        try:
            _refuse_compressed(data)
            with empty_bytes():
                found: dict[str, Any] = torch.load(data, map_location="cpu", weights_only=True)
            dense_tensors(found)
        except Exception as error:  # torch.load raises errors of many types
            raise explained(error, Path(self.path, "meta.pt")) from None
        try:
            own = table(table(found, "its content").get("lt_zero", {}), "lt_zero")
            self._check_own(own)
            if keys := own.get("keys"):
                restore(found, described_keys(keys))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path}/meta.pt is malformed ({error}), although its checksum is correct: lt_zero did not write "
                "it. Use another checkpoint."
            ) from None
        return found

    def _check_own(self, own: Mapping[str, Any]) -> None:
        """Check the types of this package's entries, and that every name in them and in the manifest is saved."""
        extra = table(own.get("extra_state", {}), "lt_zero.extra_state")
        texts(own.get("frozen_left_out", []), "lt_zero.frozen_left_out")
        table(own.get("config", {}), "lt_zero.config")
        for key in ("keys", "left_out"):
            listed = own.get(key, [])
            if not isinstance(listed, list) or not all(isinstance(item, (list, tuple)) for item in listed):
                raise ValueError(f"lt_zero.{key} is {listed!r:.100}, no list of lists")
        tensors = self.manifest.tensors
        aliases = self.aliases
        lost = [n for n in self.manifest.order if f"model.{aliases.get(n, n)}" not in tensors and n not in extra]
        if own and lost:
            raise ValueError(f"{', '.join(lost[:5])} of the manifest's `order` is not saved")
        packed = own.get("optimizers", [])
        for number, saved in enumerate(packed if isinstance(packed, list) else [packed]):
            where = f"lt_zero.optimizers[{number}]"
            for group in table(saved, where)["param_groups"]:
                texts(table(group, f"{where}.param_groups")["params"], f"{where}.param_groups.params")
            for name, entries in table(saved["state"], f"{where}.state").items():
                table(entries, f"{where}.state.{name}")
        for name in tensors if own else ():
            head = name.partition(".")[0]
            if head.startswith("optimizer_") and int(head.removeprefix("optimizer_")) >= len(packed):
                raise ValueError(f"the manifest has {name}, and lt_zero.optimizers has {len(packed)}")

    @cached_property
    def optimizers(self) -> Sequence[SavedOptimizer]:
        """Their states and settings, by name of the parameter."""
        packed = self.meta.get("lt_zero", {}).get("optimizers", [])
        names = [[name for group in saved["param_groups"] for name in group["params"]] for saved in packed]
        states: list[dict[str, dict[str, Any]]] = [{name: {} for name in of_one} for of_one in names]
        for full, entry in self.manifest.tensors.items():
            if full.startswith("optimizer_"):
                head, _, rest = full.split(".", 2)
                if (number := int(head.removeprefix("optimizer_"))) >= len(states):
                    raise CheckpointError(f"{self.path}/meta.pt has no optimizer {number}, of which there are states.")
                known = states[number]
                cuts = [i for i, letter in enumerate(rest) if letter == "."]  # parameter and key may have dots, too
                cut = next((i for i in reversed(cuts) if rest[:i] in known), cuts[-1])
                known.setdefault(rest[:cut], {})[rest[cut + 1 :]] = Spec(entry.shape, entry.dtype)
        merged = []
        for saved, of_one, known in zip(packed, names, states, strict=True):
            every = {name: {**known[name], **saved["state"].get(name, {})} for name in of_one}
            merged.append(SavedOptimizer(saved["param_groups"], {n: state for n, state in every.items() if state}))
        return merged

    def objects(self) -> dict[Any, Any]:
        """The values without a plain form, by their path in ``meta``. Unpickles: only for a trusted checkpoint."""
        if "objects.pkl" not in self.manifest.files:
            return {}
        found: dict[Any, Any] = pickle.loads(self.bytes_of("objects.pkl"))
        return found

    def lazy(self, full: str) -> LazyTensor:
        """A tensor by its full name, to be read when its values are needed."""
        entry = self.manifest.tensors.get(full) if isinstance(full, str) else None
        if entry is None:
            raise CheckpointError(f"{self.path}/{MANIFEST} has no tensor {full!r:.100}, to which meta.pt refers.")
        return LazyTensor(entry.shape, entry.dtype, partial(self.elements, full))

    def read(self, name: str) -> Tensor:
        """A weight, whole, in its saved dtype."""
        return self.lazy(f"model.{self.aliases.get(name, name)}").whole()

    def read_state(self, optimizer: int, name: str, key: str) -> Tensor:
        """An element-wise state of a parameter, whole."""
        return self.lazy(f"optimizer_{optimizer}.state.{name}.{key}").whole()

    def elements(self, full: str, lo: int, hi: int, box: Box | None = None) -> Tensor:
        """Elements [lo, hi) (1D, row-major) of a box, by default all, of a tensor by its full name.

        Raises:
            CheckpointError: a file is damaged.
        """
        entry = self.manifest.tensors[full]
        out = torch.empty(max(0, hi - lo), dtype=entry.dtype)
        if hi <= lo:
            return out
        box = box or Box.whole(entry.shape)
        # The short way of most tensors, of which thousands may be small.
        if entry.chunks and entry.chunks[0].box == box:
            self._blocks.read(entry.chunks[0].file, entry.chunks[0].start + lo * out.itemsize, out.view(torch.uint8))
            return out
        covered = 0
        wanted = [(part.shifted(box.offsets), part) for part in cut_range(box.sizes, lo, hi)]
        for chunk in sorted(meeting(entry.chunks, [place for place, _ in wanted]), key=lambda chunk: chunk.start):
            for place, part in wanted:
                if (shared := place.common(chunk.box)) is not None:
                    first = flat_index(box.sizes, part.offsets) - lo
                    target = out[first : first + part.numel].view(part.sizes)
                    self._read(chunk, shared.inside(chunk.box), shared.inside(place).of(target))
                    covered += shared.numel
        if covered != hi - lo:
            raise CheckpointError(f"{self.path}: {full} lacks {hi - lo - covered} of elements {lo} to {hi} of {box}.")
        return out

    def _read(self, chunk: Chunk, wanted: Box, out: Tensor) -> None:
        """Fill ``out`` with a box of a chunk.

        Where that is columns of its rows, whole rows are read, some at a time, as there may be thousands of them.
        """
        sizes = chunk.box.sizes
        if out.is_contiguous() and wanted.is_contiguous_in(sizes):
            start = chunk.start + flat_index(sizes, wanted.offsets) * out.itemsize
            self._blocks.read(chunk.file, start, out.view(-1).view(torch.uint8))
            return
        for rows in Box.whole(sizes).split(max(1, ROWS // out.itemsize)):
            if (shared := wanted.common(rows)) is None:
                continue
            offsets, lengths = shared.inside(rows)
            low = flat_index(rows.sizes, offsets)
            last = flat_index(rows.sizes, tuple(o + n - 1 for o, n in zip(offsets, lengths, strict=True)))
            values = torch.empty(last + 1 - low, dtype=out.dtype)
            start = chunk.start + (flat_index(sizes, rows.offsets) + low) * out.itemsize
            self._blocks.read(chunk.file, start, values.view(torch.uint8))
            strides = [math.prod(rows.sizes[axis + 1 :]) for axis in range(len(sizes))]
            shared.inside(wanted).of(out).copy_(values.as_strided(lengths, strides))

    def bytes_of(self, name: str) -> bytes:
        """A whole file, checked."""
        record = self.manifest.files.get(name)
        if record is None:
            raise CheckpointError(f"{self.path} has no {name}.")
        out = torch.empty(record.nbytes, dtype=torch.uint8)
        self._blocks.read(name, 0, out)
        return out.numpy().tobytes()

    def verify(self, tick: Callable[[int], object] = lambda _: None) -> int:
        """Read every byte; returns their number. ``tick`` is called with the bytes of each block.

        Raises:
            CheckpointError: one is damaged; names its file.
        """
        for entry in self.manifest.tensors.values():
            len(entry.chunks)  # parses and checks them
        for name in self.manifest.files:
            self._blocks.verify(name, tick)
        return sum(record.nbytes for record in self.manifest.files.values())

    def close(self) -> None:
        self._blocks.close()


def _refuse_compressed(file: io.BytesIO) -> None:
    """Raise ValueError if the records of a zip are larger than their bytes: they could fill the memory."""
    size = file.seek(0, io.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
    file.seek(0)
    stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
    if not stored or sum(record.file_size for record in records) > size:
        raise ValueError("its records are compressed, or overlap")


def _fetched(fs: Any, url: str) -> bytes:
    """The manifest at a URL. Raises OSError if it has too many bytes, or none can be read."""
    size = fs.size(url)
    if size is not None and size > MOST_MANIFEST:
        raise OSError(f"it has {size:,} bytes, and a manifest has {MOST_MANIFEST:,} at most")
    data: bytes = fs.cat_file(url)
    return data
