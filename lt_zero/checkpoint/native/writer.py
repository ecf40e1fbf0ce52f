"""The storage of sharded checkpoints for torch.distributed.checkpoint, which plans what each rank writes.

Each rank writes two files, ``weights-<rank>.pt`` and ``moments-<rank>.pt``. Each is an ordinary file of ``torch.save``,
and each tensor in it is one, too, so that torch's own reader of such directories finds what it expects (torchfile.py).
Rank 0 adds what is the same on all ranks.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from lt_zero.checkpoint.native.directory import Place
from lt_zero.checkpoint.native.manifest import Chunk, Entry, Manifest
from lt_zero.checkpoint.native.pieces import Fragment
from lt_zero.checkpoint.native.torchfile import Stored, TorchFile
from lt_zero.common.compat import storage_info
from lt_zero.common.errors import CheckpointError
from lt_zero.io.checked_file import FileRecord, Sink
from lt_zero.io.direct_file import in_words

_OVERHEAD = 4096  # maximum bytes per tensor beside its values: in its file, in ``.metadata`` and in the manifest


@dataclass
class Bundle:
    """A checkpoint that is ready to be written.

    ``tensors``: of this rank, by full name. The rest is on rank 0: ``meta`` in plain containers, ``objects`` without a
    plain form, ``others`` for other readers, ``manifest`` for ours.
    """

    tensors: dict[str, Any]
    meta: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    others: dict[tuple[str, ...], Any] = field(default_factory=dict)
    objects: bytes | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's tensors."""
        return sum(map(local_bytes, self.tensors.values()))


def local_bytes(value: Any) -> int:
    if isinstance(value, Fragment):
        return (value.hi - value.lo) * value.dtype.itemsize
    return int(value.nbytes)


@dataclass(frozen=True)
class _Placed:
    """The location of a chunk: file, first byte of its values, and (offset, length) of the embedded torch.save file."""

    file: str
    start: int
    blob: tuple[int, int]


class _Output:
    """One file of tensors that is being written."""

    def __init__(self, name: str, sink: Sink) -> None:
        self.name, self.sink = name, sink
        self.file = TorchFile(sink.write, blobs=True)
        self.content: dict[str, Stored] = {}


class DirectoryWriter(StorageWriter):
    """Writes the tensors of one rank, and on rank 0 the rest and the manifest.

    Args:
        place: the (temporary) directory.
        made: the content. On rank 0, what is not tensors is read when all tensors are written.
        rank: of this process.
        then: called on rank 0 when the checkpoint is complete.
        tick: called with the bytes of each written tensor.

    Raises:
        CheckpointError: there is too little space, or a file cannot be written.
    """

    def __init__(
        self,
        place: Place,
        made: Bundle,
        rank: int,
        then: Callable[[], object] = lambda: None,
        tick: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._place, self._made, self._rank, self._then, self._tick = place, made, rank, then, tick
        self._outputs: dict[str, _Output] = {}

    # ---- planning ------------------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: Any = None) -> None:
        self._outputs = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the directory exists already."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # torch must not select this class by itself

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        need = sum(_nbytes(item) + _OVERHEAD for plan in plans for item in plan.items)
        free = self._place.free_bytes()
        if free is not None and free < need:
            raise CheckpointError(
                f"{self._place.name} needs {in_words(need)}, but {in_words(free)} are free. Nothing was written. "
                "Free space, lower ModelCheckpoint's save_top_k, or save to another disk."
            )
        return plans

    # ---- this rank's tensors ---------------------------------------------------------------------------------------

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        sizes: dict[str, int] = {}
        for item in plan.items:
            kind = _kind(item.index.fqn)
            sizes[kind] = sizes.get(kind, 0) + _nbytes(item) + _OVERHEAD // 2
        results: list[WriteResult] = []
        try:
            for kind, expected in sorted(sizes.items()):
                name = f"{kind}-{self._rank:05d}.pt"
                self._outputs[kind] = _Output(name, self._place.sink(name, expected))
            self._write_items(plan, planner, results)
            for output in self._outputs.values():
                output.file.finish(output.content)
                record = output.sink.close()
                results.append(WriteResult(MetadataIndex(f"file:{output.name}"), record.nbytes, record))
        except BaseException:
            for output in self._outputs.values():
                output.sink.abandon()
            raise
        finally:
            self._place.close()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_items(self, plan: SavePlan, planner: SavePlanner, results: list[WriteResult]) -> None:
        holder: Callable[[], object] | None = None
        for item in plan.items:
            value = self._made.tensors[item.index.fqn]
            needs = value.done if isinstance(value, Fragment) else None
            if holder is not None and needs != holder:
                self._leave(holder)
            holder = needs
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            output = self._outputs[_kind(item.index.fqn)]
            stored = output.content[_key_of(item)] = output.file.add(tensor.detach().cpu().contiguous())
            placed = _Placed(output.name, stored.start, stored.blob)
            results.append(WriteResult(item.index, tensor.nbytes, placed))
            self._tick(tensor.nbytes)
        if holder is not None:
            self._leave(holder)

    def _leave(self, holder: Callable[[], object]) -> None:
        """Release stored tensors, whose buffers the next bucket needs, once the sinks have written them."""
        for output in self._outputs.values():
            output.sink.wait_written()
        holder()

    # ---- rank 0 ----------------------------------------------------------------------------------------------------

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Add the content of rank 0 and the manifest, then publish the directory."""
        files: dict[str, FileRecord] = {}
        placed: dict[MetadataIndex, _Placed] = {}
        for result in (result for rank in results for result in rank):
            if isinstance(result.storage_data, FileRecord):
                files[result.index.fqn.removeprefix("file:")] = result.storage_data
            else:
                placed[result.index] = result.storage_data
        made = self._made
        try:
            tensors = _entries(metadata, placed)
            describe(metadata, placed, made.manifest.get("aliases", {}))
            if made.others:
                with self._file("extras.pt", files) as sink:
                    _add_others(sink, metadata, made.others)
            with self._file("meta.pt", files) as sink:
                TorchFile(sink.write).finish(made.meta)
            if made.objects is not None:
                with self._file("objects.pkl", files) as sink:
                    sink.write(made.objects)
            with self._file(".metadata", files) as sink:
                sink.write(pickle.dumps(metadata))
            self._place.seal(Manifest(tensors, files, **made.manifest))
            self._place.commit()
            self._then()
        finally:
            self._place.close()

    @contextmanager
    def _file(self, name: str, files: dict[str, FileRecord]) -> Iterator[Sink]:
        """A file to write, which is in ``files`` when it is complete."""
        sink = self._place.sink(name)
        try:
            yield sink
            files[name] = sink.close()
        except BaseException:
            sink.abandon()
            raise


def _add_others(sink: Sink, metadata: Metadata, others: Mapping[tuple[str, ...], Any]) -> None:
    """Write values for readers of ``.metadata``, each as a torch.save file within ``extras.pt``."""
    file = TorchFile(sink.write)
    content: dict[str, Stored] = {}
    known: dict[Any, Stored] = {}  # equal values are stored once: thousands of equal step counters
    for path, value in others.items():
        name, key = ".".join(path), _equal_by(value)
        stored = known.get(key) if key is not None else None
        if stored is None:
            data = io.BytesIO()
            torch.save(value, data)
            stored = content[name] = file.add(torch.frombuffer(data.getbuffer(), dtype=torch.uint8))
            known[key or name] = stored
        metadata.planner_data[name] = path
        _describe_other(metadata, name, value, stored)
    file.finish(content)


def _equal_by(value: Any) -> Any:
    """A key that is equal for values with equal bytes; None if unknown."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in (torch.float32, torch.float64, torch.int64):
        return value.dtype, repr(value.item())
    return (type(value), repr(value)) if isinstance(value, bool | int | float | str | None) else None


def _nbytes(item: WriteItem) -> int:
    return item.tensor_storage_size() or 0


def _kind(name: str) -> str:
    return "moments" if name.startswith("optimizer_") else "weights"


def _key_of(item: WriteItem) -> str:
    """The name of a chunk in its file: ``name``, or ``name[2:3, 0:8]`` of a part."""
    assert item.tensor_data is not None
    chunk, size = item.tensor_data.chunk, item.tensor_data.size
    if chunk.sizes == size:
        return item.index.fqn
    ranges = ", ".join(f"{o}:{o + s}" for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
    return f"{item.index.fqn}[{ranges}]"


def _entries(metadata: Metadata, placed: Mapping[MetadataIndex, _Placed]) -> dict[str, Entry]:
    found = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), name
        chunks = []
        for chunk in entry.chunks:
            place = placed[MetadataIndex(name, chunk.offsets)]
            chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), place.file, place.start))
        found[name] = Entry(tuple(entry.size), entry.properties.dtype, tuple(chunks))
    return found


def describe(metadata: Metadata, placed: Mapping[MetadataIndex, _Placed], aliases: Mapping[str, str]) -> None:
    """Add what torch's FileSystemReader needs: locations of chunks, nesting of names, and tied names."""
    found = metadata.state_dict_metadata
    metadata.storage_data = {i: storage_info(p.file, *p.blob) for i, p in placed.items()}
    metadata.planner_data = {name: path_of(name) for name in found}
    for alias, name in aliases.items():
        entry = found.get(f"model.{name}")
        if not isinstance(entry, TensorStorageMetadata):
            continue
        found[f"model.{alias}"] = entry
        metadata.planner_data[f"model.{alias}"] = ("model", alias)
        for chunk in entry.chunks:
            place = placed[MetadataIndex(f"model.{name}", chunk.offsets)]
            metadata.storage_data[MetadataIndex(f"model.{alias}", chunk.offsets)] = storage_info(
                place.file, *place.blob
            )


def _describe_other(metadata: Metadata, name: str, value: Any, stored: Stored) -> None:
    if isinstance(value, Tensor):
        whole = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())
        metadata.state_dict_metadata[name] = TensorStorageMetadata(
            TensorProperties(dtype=value.dtype), value.size(), [whole]
        )
        index = MetadataIndex(name, whole.offsets)
    else:
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        index = MetadataIndex(name)
    metadata.storage_data[index] = storage_info("extras.pt", stored.start, stored.nbytes)


def path_of(name: str) -> tuple[str, ...]:
    """The path of a full name, in which parameter names contain dots.

    >>> path_of("model.a.weight"), path_of("optimizer_0.state.a.weight.exp_avg")
    (('model', 'a.weight'), ('optimizer_0', 'state', 'a.weight', 'exp_avg'))
    """
    head, rest = name.split(".", 1)
    if not head.startswith("optimizer_"):
        return head, rest
    kind, rest = rest.split(".", 1)
    parameter, key = rest.rsplit(".", 1)
    return head, kind, parameter, key
