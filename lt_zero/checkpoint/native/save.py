"""Saves a sharded checkpoint: sorts Lightning's dictionary into parts, and writes each rank's tensors.

Rank 0 divides among the ranks what they have (plan.py), and collects results and errors (through_first.py). Each rank
writes two files, ``weights-<rank>.pt`` and ``moments-<rank>.pt``. Each is an ordinary file of ``torch.save``, and each
tensor in it is one, too, so that torch.distributed.checkpoint (DCP) can read such directories (torchfile.py). Rank 0
adds what is the same on all ranks, and DCP's metadata.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp

from lt_zero.checkpoint.native.directory import Chunk, Manifest, ManifestEntry, PendingDirectory
from lt_zero.checkpoint.native.pieces import check_form, parameter_numbers
from lt_zero.checkpoint.native.plain import Key, Path, dotted_path, to_plain
from lt_zero.checkpoint.native.plan import (
    Beside,
    BoxesByName,
    Names,
    TensorBoxes,
    agree_on_names,
    divide,
    part_of,
    unite,
)
from lt_zero.checkpoint.native.through_first import through_first
from lt_zero.checkpoint.native.torchfile import TensorRecord, TorchFile
from lt_zero.common import accelerator
from lt_zero.common.boxes import Box, flat_index
from lt_zero.common.compat import storage_info
from lt_zero.common.errors import CheckpointError
from lt_zero.common.garbage import without_gc
from lt_zero.common.units import exact_bytes
from lt_zero.common.users_code import warn
from lt_zero.core.comm.process_groups import exists
from lt_zero.core.comm.world import World
from lt_zero.core.engine.lazy_tensor import Fragment, LazyTensor
from lt_zero.core.stores.checked_file import FileRecord, Sink, StagingRing
from lt_zero.core.stores.pinned import host_buffer

LT_ZERO = "lt_zero"  # key of this package's entries in a Lightning checkpoint
TRAINED_WEIGHTS = "lt_zero_trained"  # key of trained weights beside averages
FABRIC = "fabric"  # key of what is neither weights nor states of optimizers in a checkpoint of Fabric
LOOP = "loop"  # key of what only the engine of a loop restores
REFERENCE = "lt_zero.tensor"  # key of a reference to a sharded tensor
_OVERHEAD = 4096  # maximum bytes per tensor beside its values: in its file, in ``.metadata`` and in the manifest
_ValuesAt = tuple[int, int, int]  # in a file: where a box's values begin; offset and length of what torch reads
_Written = tuple[str, TensorBoxes, list[_ValuesAt]]  # file, boxes, and the place of each
_T = TypeVar("_T")


class _WrittenFile(NamedTuple):
    """A file of tensors that a rank has written, and the places of their boxes in it."""

    name: str
    record: FileRecord
    places: dict[str, tuple[TensorBoxes, list[_ValuesAt]]]


@dataclass
class Bundle:
    """A checkpoint that is ready to be written.

    ``tensors``: of this rank, by full name. The rest is on rank 0: ``meta`` in plain containers, ``objects`` without a
    plain form (pickled), ``manifest``: arguments of it.
    """

    tensors: dict[str, Any]
    meta: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    objects: bytes | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's tensors."""
        return sum(map(_local_bytes, self.tensors.values()))


def bundle(
    checkpoint: Mapping[str, Any],
    names: Sequence[Sequence[Sequence[str]]],
    world: World,
    run: Mapping[str, Any],
    config: Mapping[str, Any],
    left_out: Collection[str] = (),
    peers: Sequence[int] = (),
) -> Bundle:
    """Divide a checkpoint's content into the parts of a ``Bundle``. Collective.

    Args:
        checkpoint: Lightning's dictionary, with a ``Fragment`` for each sharded tensor.
        names: of each optimizer's parameters, by group.
        run: facts about the run, for the manifest.
        config: of the run.
        left_out: names of frozen parameters that are deliberately not saved.
        peers: as for ``agree_on_names``.

    Raises:
        CheckpointError: ranks disagree on an entry of the state dict, or on an option of an optimizer's group.
    """
    rest, made = dict(checkpoint), Bundle({})
    weights: dict[str, Any] = dict(rest.pop("state_dict", {}))
    optimizers: list[Any] = list(rest.pop("optimizer_states", []))
    agreed = agree_on_names(weights, world, peers)
    keeps = world.rank == 0 or agreed.tells
    shares: set[Any] = set()  # keys of entries with tensors that several ranks have

    def swap(path: Path, value: Tensor) -> Any:
        if not isinstance(value, Fragment):
            return value.detach()
        name = f"extra.{dotted_path(path)}"
        while name in made.tensors:  # of the keys 1 and "1"
            name += "'"
        made.tensors[name] = value
        shares.add(path[0])
        return {REFERENCE: name}

    mine = Beside([], {}, {}, [])
    with world.agree("reading the checkpoint's content", CheckpointError):  # values of hooks may fail
        made.tensors = {f"model.{name}": weights[name] for name in agreed.written(weights, world.rank)}
        packed = [_take_optimizer(made, i, state, names[i], keeps) for i, state in enumerate(optimizers)]
        if keeps:
            own = {"optimizers": packed, "extra_state": agreed.others(weights, world.rank)}
            rest[LT_ZERO] = {**rest.get(LT_ZERO, {}), **own}
        made.meta, left = to_plain(rest, swap)
        if keeps:
            own = made.meta[LT_ZERO]
            shared = {key: made.meta[key] for key in made.meta.keys() & shares}
            mine = Beside(own["optimizers"], own["extra_state"], shared, list(left_out))
    theirs = world.host_gather(mine if agreed.tells else None, "what ranks save beside tensors")
    with world.agree("uniting the checkpoint's content", CheckpointError):
        if world.rank == 0:
            unite(mine, theirs)
            _complete(made, mine, agreed, left, run, config, "optimizer_states" in checkpoint)
        elif agreed.tells and left:
            places = ", ".join(repr(dotted_path(path)) for path in list(left)[:5])
            warn(f"Rank {world.rank} has entries without a plain form, which only rank 0 can save: {places}.")
    return made


def _complete(
    made: Bundle,
    mine: Beside,
    agreed: Names,
    left: dict[Path, Any],
    run: Mapping[str, Any],
    config: Mapping[str, Any],
    has_optimizers: bool,
) -> None:
    """Add the content beside tensors to rank 0's bundle. ``left``: values without a plain form."""
    keys: list[list[Any]] = []
    if left:
        keys, left, made.objects = _without_plain_form(left)
    made.meta |= mine.meta
    made.meta[LT_ZERO] |= {
        "keys": keys,
        "left_out": [[dotted_path((part,)) for part in path] for path in left],
        "frozen_left_out": mine.left_out,
        "config": to_plain(config)[0],
        **({"has_optimizers": True} if has_optimizers else {}),
    }
    order, left_out = tuple(agreed.writers), tuple(mine.left_out)
    made.manifest = {"order": order, "aliases": agreed.aliases, "left_out": left_out, "run": dict(run)}


def _take_optimizer(
    made: Bundle, number: int, state: Any, groups: Sequence[Sequence[str]], keeps: bool
) -> dict[str, Any]:
    """Move the fragments of an optimizer's state dict to the tensors; returns the rest, keyed by name, if ``keeps``."""
    own = list(chain.from_iterable(groups))
    check_form(state, f"What is saved of optimizer {number}", len(own))
    state = {"state": {}, "param_groups": [], **state}  # Lightning's mock optimizer has an empty state
    by_number = dict(zip(parameter_numbers(state), own, strict=True))
    kept: dict[str, dict[str, Any]] = {}
    for parameter, entries in state["state"].items():
        name = by_number[parameter]
        for key, value in entries.items():
            if not isinstance(key, str):
                raise CheckpointError(
                    f"Optimizer {number} has a state of {name!r} under the key {key!r} ({type(key).__name__}), and a "
                    'sharded checkpoint names states by text. Use a str, or set checkpoint.format="full".'
                )
            if isinstance(value, Fragment):
                made.tensors[f"optimizer_{number}.state.{name}.{key}"] = value
            elif keeps:
                # Copy counters: torch.save would write a shared storage with each of them.
                copied = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
                kept.setdefault(name, {})[key] = copied
    named = [{**group, "params": [by_number[n] for n in group["params"]]} for group in state["param_groups"]]
    return {"param_groups": named, "state": kept}


def _without_plain_form(values: Mapping[Path, Any]) -> tuple[list[list[Any]], dict[Path, Any], bytes | None]:
    """The descriptions of keys that have one; the other keys and values; and these pickled, as far as they can be.

    Warns of the others.

    Raises:
        CheckpointError: a key cannot be pickled; names it.
    """
    keys = list[list[Any]]()
    left = dict[Path, Any]()
    if values:
        from lt_zero.checkpoint.native.described_keys import described

        for path, value in values.items():
            if isinstance(path[-1], Key) and (described_key := described(path, value)) is not None:
                keys.append(described_key)
            else:
                left[path] = value
    if not left:
        return keys, left, None
    kept, failed = {}, []
    for path, value in left.items():
        try:
            pickle.dumps((path, value))
            kept[path] = value
        except Exception as error:  # any class may fail in any way here
            if isinstance(path[-1], Key):
                raise CheckpointError(
                    f"{dotted_path(path)!r} in the checkpoint is a key of {type(value).__qualname__} that cannot be "
                    f"saved ({error}). Use a str, a number or a tuple of them, or a class or enumeration of a module."
                ) from error
            failed.append(f"{dotted_path(path)!r} ({error})")
    places = ", ".join(repr(dotted_path(path)) for path in list(left)[:5])
    text = f"The checkpoint has entries without a plain form: {places}. They are in objects.pkl, which is only read "
    warn(text + "with weights_only=False.")
    if failed:
        warn(f"Entries that cannot be pickled are not saved: {', '.join(failed)}.")
    return keys, left, pickle.dumps(kept) if kept else None


def stage(made: Bundle, buffer: Tensor | None) -> Tensor:
    """Copy all tensors of a bundle to host memory, so that training can continue. Not collective.

    The next step changes all of them, so the copy is of the whole state; planning/ refuses a run that lacks its memory.

    Args:
        made: all its tensors are replaced by copies, also step counters, which change in place.
        buffer: of an earlier call, to be reused.

    Returns:
        The buffer (1D uint8), pinned if there is a GPU.
    """
    end = sum(-(-_local_bytes(value) // 64) * 64 for value in made.tensors.values())
    on_gpu = accelerator.in_use()
    if buffer is None or buffer.numel() < end:
        buffer = host_buffer(end, pin=on_gpu)
    start = 0
    for name, value in _releasing(list(made.tensors.items())):
        copy = buffer[start : start + _local_bytes(value)].view(value.dtype)
        start += -(-_local_bytes(value) // 64) * 64
        if not isinstance(value, Fragment):
            made.tensors[name] = copy.view(value.shape).copy_(value, non_blocking=True)
            continue
        if copy.numel():
            copy.copy_(value.local(), non_blocking=True)
        where = value.lo, value.hi, value.dtype, None, value.box, value.ranks
        made.tensors[name] = Fragment(partial(copy.view, -1), tuple(value.shape), *where)

    def copied(_: Path, value: Tensor) -> Tensor:
        return value if isinstance(value, LazyTensor) else value.detach().to("cpu", copy=True)

    made.meta = to_plain(made.meta, copied)[0]
    if on_gpu:
        accelerator.synchronize()  # training changes the tensors next
    return buffer


def _ignore(*_: Any) -> None:
    """No reaction to progress."""


def _releasing(items: Iterable[tuple[_T, Any]], before: Callable[[], object] = _ignore) -> Iterator[tuple[_T, Any]]:
    """Yield items with their tensors, and release the stored tensors of a bucket after its last item.

    The next bucket needs their buffers. ``before`` is called before each release.
    """
    done: Callable[[], object] | None = None
    for item, value in items:
        needs = value.done if isinstance(value, Fragment) else None
        if done is not None and needs != done:
            before()
            done()
        done = needs
        yield item, value
    if done is not None:
        before()
        done()


def make_directory(world: World, path: str) -> PendingDirectory:
    """The directory to write to, visible to all ranks. Collective."""
    place = None
    problem = None
    facts = None
    try:
        if world.rank == 0:
            place = PendingDirectory.make(path)
            facts = (place.name, place.folder)
    except Exception as error:  # any error of the path or file system: the other ranks are waiting
        problem = str(error) if isinstance(error, CheckpointError) else f"Cannot save to {path!r}: {error!r}."
    facts = world.host_broadcast(facts, "checkpoint directory")
    if facts is not None and place is None:
        place = PendingDirectory(*facts)
        try:
            place.check_visible()
        except CheckpointError as error:
            problem = str(error)
    if found := world.problems(problem, "checkpoint directory"):
        if world.rank == 0 and place is not None:
            place.discard()
        raise CheckpointError(" ".join(found))
    assert place is not None
    return place


def write(
    made: Bundle,
    place: PendingDirectory,
    world: World,
    group: Any,
    then: Callable[[], object] = _ignore,
    tick: Callable[[int], object] = _ignore,
) -> None:
    """Write and publish a bundle, then call ``then`` on rank 0. Collective over ``group`` (None: one process).

    After an error ``place`` is discarded. ``tick`` is called with the bytes of each tensor that this rank has written.

    Raises:
        CheckpointError: on all ranks; names the failed ranks. Or ``group`` was destroyed before.
        RuntimeError: a rank has ended meanwhile; names it.
    """
    writer = DirectoryWriter(place, made, world.rank, then, tick)
    try:
        if group is not None and not exists(group):
            raise CheckpointError(
                f"{place.name} is not saved: the process group was destroyed before it was written. Call "
                "wait_for_save() before dist.destroy_process_group()."
            )
        with world.explaining():
            parts = through_first(group, writer.own_parts, writer.divided)
            through_first(group, lambda: writer.write(parts), writer.publish)
    except BaseException:
        if world.rank == 0:
            place.discard()
        raise


@dataclass(eq=False)
class DirectoryWriter:
    """Writes the tensors of one rank into the (temporary) directory, and on rank 0 the rest and the manifest.

    Other content is read when all tensors are written. ``then``, ``tick``: as for ``write``.
    """

    place: PendingDirectory
    made: Bundle
    rank: int
    then: Callable[[], object] = _ignore
    tick: Callable[[int], object] = _ignore
    files: dict[str, FileRecord] = field(default_factory=dict)  # that are complete

    def own_parts(self) -> BoxesByName:
        """The tensors of which this rank has elements, and the boxes of these."""
        own: dict[str, TensorBoxes] = {}
        for name, value in self.made.tensors.items():
            first = value.ranks[0] if isinstance(value, Fragment) and value.ranks else None
            part = part_of(tuple(value.shape), value.dtype, *_range_of(value), first)
            if part.boxes:
                own[name] = part
        return own

    @without_gc  # there may be millions of boxes
    def divided(self, of_ranks: list[BoxesByName]) -> Sequence[BoxesByName]:
        """Divide what ranks have: the boxes that each writes. On rank 0."""
        parts = divide(of_ranks)
        need = sum(map(_size_of, parts))
        free = self.place.free_bytes()
        if free is not None and free < need:
            remedy = "Free space, lower ModelCheckpoint's save_top_k, or save to another disk."
            if (kind := self.place.kind_of_memory()) is not None:
                remedy = (
                    f"This is {kind}, which is memory: start the container with a larger --shm-size and memory limit, "
                    "lower ModelCheckpoint's save_top_k, or save to a disk."
                )
            raise CheckpointError(
                f"{self.place.name} needs {exact_bytes(need)}, but {exact_bytes(free)} are free. Nothing was written. "
                + remedy
            )
        return parts

    def write(self, parts: BoxesByName) -> list[_WrittenFile]:
        """Write this rank's files."""
        files: dict[str, dict[str, TensorBoxes]] = {}
        ring = StagingRing()
        for name, part in parts.items():
            kind = "moments" if name.startswith("optimizer_") else "weights"
            files.setdefault(f"{kind}-{self.rank:05d}.pt", {})[name] = part
        try:
            return [self._write(file, its, ring) for file, its in files.items()]
        finally:
            self.place.close()

    def _write(self, name: str, parts: BoxesByName, ring: StagingRing) -> _WrittenFile:
        """Write one file of tensors."""
        content: dict[str, TensorRecord] = {}
        places: dict[str, tuple[TensorBoxes, list[_ValuesAt]]] = {}
        with self._file(name, _size_of(parts)) as sink:
            file = TorchFile(sink.write, blobs=True)
            for key, value in _releasing(((key, self.made.tensors[key]) for key in parts), sink.wait_written):
                part, found = parts[key], list[_ValuesAt]()
                places[key] = part, found
                flat = value.local() if isinstance(value, Fragment) else value.detach().reshape(-1)
                for box in part.boxes:
                    values, count = flat, box.numel
                    if flat.numel() != count:
                        local, lo, _ = _range_of(value)
                        start = flat_index(local.sizes, box.inside(local).offsets) - lo
                        values = flat[start : start + count]
                    stored = file.add_parts(box.sizes, part.dtype, ring.parts(values, sink))
                    content[key if part.is_whole else f"{key}{box}"] = stored  # ``name[2:3, 0:8]``
                    found.append((stored.start, *stored.blob))
                    self.tick(values.nbytes)
            file.finish(content)
        return _WrittenFile(name, self.files[name], places)

    @contextmanager
    def _file(self, name: str, expected: int = 0) -> Iterator[Sink]:
        """A file to write, which is in ``files`` when it is complete."""
        sink = self.place.sink(name, expected)
        try:
            yield sink
            self.files[name] = sink.close()
        except BaseException:
            sink.abandon()
            raise

    @without_gc
    def publish(self, of_ranks: list[list[_WrittenFile]]) -> list[None]:
        """Add the content of rank 0 and the manifest to the files of all ranks, then publish the directory.

        On rank 0. There is nothing to tell the ranks.
        """
        metadata = dcp.Metadata({})
        made = self.made
        written = dict[str, list[_Written]]()
        for of_rank in chain.from_iterable(of_ranks):
            self.files[of_rank.name] = of_rank.record
            for name, (part, found) in of_rank.places.items():
                written.setdefault(name, []).append((of_rank.name, part, found))
        try:
            tensors = _describe(metadata, written, made.manifest.get("aliases", {}))
            own = made.meta.get(LT_ZERO, {})
            if own.get("extra_state") or own.get("optimizers"):
                with self._file("extras.pt") as sink:
                    _add_others(sink, metadata, own["extra_state"], own["optimizers"])
            with self._file("meta.pt") as sink:
                file = TorchFile(sink.write)
                packed = {**own, "optimizers": [_packed(saved, file) for saved in own.get("optimizers", [])]}
                file.finish({**made.meta, LT_ZERO: packed} if own else made.meta)
            if made.objects is not None:
                with self._file("objects.pkl") as sink:
                    sink.write(made.objects)
            with self._file(".metadata") as sink:
                sink.write(pickle.dumps(metadata))
            self.place.seal(Manifest(tensors, self.files, **made.manifest))
            self.place.commit()
            self.then()
        finally:
            self.place.close()
        return [None] * len(of_ranks)


def _size_of(parts: BoxesByName) -> int:
    """Maximum bytes of tensors on the disk."""
    return sum(part.nbytes + _OVERHEAD for part in parts.values())


def _range_of(value: Tensor) -> tuple[Box, int, int]:
    """The box of a tensor that has this rank's elements, and the range of these in it."""
    if isinstance(value, Fragment):
        return value.box, value.lo, value.hi
    return Box.whole(tuple(value.shape)), 0, value.numel()


def _local_bytes(value: Any) -> int:
    return (value.hi - value.lo) * value.dtype.itemsize if isinstance(value, Fragment) else int(value.nbytes)


def _describe(
    metadata: dcp.Metadata, written: Mapping[str, Sequence[_Written]], aliases: Mapping[str, str]
) -> dict[str, ManifestEntry]:
    """The tensors for the manifest. Adds to ``metadata`` what torch's FileSystemReader needs: shapes and chunks, their
    locations, nesting of names, and tied names."""
    tied: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        tied.setdefault(f"model.{name}", []).append(f"model.{alias}")
    tensors = dict[str, ManifestEntry]()
    metadata.storage_data = {}
    for name, parts in written.items():
        shape, dtype, *_ = parts[0][1]
        names = [name, *tied.get(name, ())]
        chunks: list[Chunk] = []
        for file, part, places in parts:
            for box, (start, *blob) in zip(part.boxes, places, strict=True):
                chunks.append(Chunk(box, file, start))
                location = storage_info(file, *blob)
                metadata.storage_data |= {dcp.MetadataIndex(each, box.offsets): location for each in names}
        tensors[name] = ManifestEntry(shape, dtype, tuple(chunks))
        part = parts[0][1] if len(parts) == 1 else TensorBoxes(shape, dtype, tuple(chunk.box for chunk in chunks))
        metadata.state_dict_metadata |= dict.fromkeys(names, _form_of(part))
    metadata.planner_data = {name: path_of(name) for name in metadata.state_dict_metadata}
    return tensors


@functools.lru_cache(4096)
def _form_of(part: TensorBoxes) -> dcp.TensorStorageMetadata:
    """The boxes of a tensor for torch; one object for equal tensors, which a pickle holds once."""
    chunks = [dcp.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in part.boxes]
    return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=part.dtype), torch.Size(part.shape), chunks)


def _packed(optimizer: Mapping[str, Any], file: TorchFile) -> dict[str, Any]:
    """An optimizer's state with its counters side by side in the file: each of thousands would be a record in it."""
    state = {name: dict(entries) for name, entries in optimizer["state"].items()}
    counters: dict[torch.dtype, list[tuple[dict[str, Any], str]]] = {}
    for entries in state.values():
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.dim() == 0:
                counters.setdefault(value.dtype, []).append((entries, key))
    for found in counters.values():
        stored = file.add(torch.stack([entries[key] for entries, key in found]))
        for number, (entries, key) in enumerate(found):
            entries[key] = stored._replace(shape=(), first=number)
    return {**optimizer, "state": state}


def _add_others(sink: Sink, metadata: dcp.Metadata, extra: Mapping[str, Any], optimizers: Sequence[Any]) -> None:
    """Write extra states, groups and counters of optimizers for readers of ``.metadata`` (torch, Lightning), each as a
    torch.save file within ``extras.pt``."""
    others: dict[tuple[str, ...], Any] = {("model", name): value for name, value in extra.items()}
    for head, optimizer in ((f"optimizer_{number}", optimizer) for number, optimizer in enumerate(optimizers)):
        others[head, "param_groups"] = optimizer["param_groups"]
        for name, entries in optimizer["state"].items():
            others |= {(head, "state", name, key): value for key, value in entries.items()}
    file = TorchFile(sink.write)
    content: dict[str, TensorRecord] = {}
    known: dict[Any, Any] = {}  # the place of each value; equal ones are stored once: thousands of equal step counters
    for path, value in others.items():
        name = ".".join(path)
        number = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
        is_simple = isinstance(number, bool | int | float | str | None)
        key = (type(value), getattr(value, "dtype", None), repr(number)) if is_simple else name
        if key not in known:
            data = io.BytesIO()
            torch.save(value, data)
            stored = content[name] = file.add(torch.frombuffer(data.getbuffer(), dtype=torch.uint8))
            known[key] = storage_info("extras.pt", stored.start, stored.nbytes)
        index, metadata.planner_data[name] = dcp.MetadataIndex(name), path
        metadata.state_dict_metadata[name] = dcp.BytesStorageMetadata()
        if isinstance(value, Tensor):
            whole = Box.whole(tuple(value.shape))  # of any size: it is one record
            index = dcp.MetadataIndex(name, whole.offsets)
            metadata.state_dict_metadata[name] = _form_of(TensorBoxes(whole.sizes, value.dtype, (whole,)))
        metadata.storage_data[index] = known[key]
    file.finish(content)


def path_of(name: str) -> tuple[str, ...]:
    """The path of a full name; parameter names in it contain dots.

    >>> path_of("model.a.weight"), path_of("optimizer_0.state.a.weight.exp_avg")
    (('model', 'a.weight'), ('optimizer_0', 'state', 'a.weight', 'exp_avg'))
    """
    if name.startswith("optimizer_"):
        head, kind, rest = name.split(".", 2)
        return head, kind, *rest.rsplit(".", 1)
    return tuple(name.split(".", 1))
