"""Chunks of a manifest that are parsed when a tensor is read: the same as all of them, the same errors, and few."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_zero.checkpoint.native import chunks, manifest_reader
from lt_zero.checkpoint.native.chunks import meeting
from lt_zero.checkpoint.native.directory import Chunk, Manifest, ManifestEntry
from lt_zero.common.boxes import Box, ParamSpec, cut_range
from lt_zero.common.errors import CheckpointError
from lt_zero.core.engine.layout import plan_bucket
from lt_zero.core.stores.checked_file import STEP, FileRecord

F32 = torch.float32


def record(nbytes: int) -> FileRecord:
    return FileRecord(nbytes, (0,) * -(-nbytes // STEP))


def cut(shape: tuple[int, ...], cuts: list[int], box: Box | None = None, file: str = "weights") -> list[Chunk]:
    """The chunks of a box of a tensor, by default all, of which ranks have the elements between ``cuts``."""
    box = box or Box.whole(shape)
    found = []
    for rank, (lo, hi) in enumerate(zip([0, *cuts], [*cuts, box.numel], strict=True)):
        found += [Chunk(part.shifted(box.offsets), f"{file}-{rank:05d}.pt", 0) for part in cut_range(box.sizes, lo, hi)]
    start, made = dict[str, int](), list[Chunk]()
    for chunk in found:
        made.append(chunk._replace(start=start.get(chunk.file, 0)))
        start[chunk.file] = made[-1].start + 4 * chunk.box.numel + 64
    return made


def manifest(tensors: dict[str, tuple[tuple[int, ...], list[Chunk]]]) -> Manifest:
    ends: dict[str, int] = {}
    for _, listed in tensors.values():
        for chunk in listed:
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + 4 * chunk.box.numel)
    entries = {f"model.{name}": ManifestEntry(shape, F32, tuple(listed)) for name, (shape, listed) in tensors.items()}
    return Manifest(entries, {name: record(end) for name, end in sorted(ends.items())}, tuple(tensors))


def parsed(made: Manifest) -> Manifest:
    return manifest_reader.parsed(made.dump().encode(), "manifest.json")


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Chunk]]:
    """A tensor in flat ranges, or in columns that are cut flat."""
    shape = draw(st.sampled_from([(), (0, 3), (7,), (4, 5), (2, 3, 4)]))
    if not math.prod(shape) or not shape:
        return shape, cut(shape, [])
    width = draw(st.integers(1, shape[-1]))
    found: list[Chunk] = []
    for number, low in enumerate(range(0, shape[-1], width)):
        sizes = (*shape[:-1], min(width, shape[-1] - low))
        box = Box((*(0 for _ in shape[:-1]), low), sizes)
        cuts = sorted(draw(st.sets(st.integers(1, max(1, box.numel - 1)), max_size=3)) - {box.numel})
        found += cut(shape, cuts, box, f"part{number}")
    return shape, draw(st.permutations(found))


@given(st.lists(tensors(), max_size=4), st.data())
@settings(max_examples=60, deadline=None)
def test_chunks_on_demand_are_those_that_were_written(
    made: list[tuple[tuple[int, ...], list[Chunk]]], data: st.DataObject
) -> None:
    written = manifest({f'a"chunks": [{{\n}}{number}': tensor for number, tensor in enumerate(made)})
    read = parsed(written)
    assert read.dump() == written.dump()
    assert list(read.tensors) == list(written.tensors)
    for name, entry in written.tensors.items():
        found = read.tensors[name]
        assert (found.shape, found.dtype) == (entry.shape, entry.dtype)
        assert tuple(found.chunks) == entry.chunks
        assert found.chunks[-1] == entry.chunks[-1]
        lo = data.draw(st.integers(0, entry.numel))
        wanted = cut_range(entry.shape, lo, data.draw(st.integers(lo, entry.numel)))
        assert meeting(found.chunks, wanted) == meeting(entry.chunks, wanted)


def text_of(chunk: list[Any], more: str = "") -> bytes:
    """A manifest of a tensor [4, 5] with ``chunk`` and the rest, each tensor on a line."""
    made = manifest({"w": ((4, 5), cut((4, 5), [5]))})
    body = json.loads(made.dump())
    listed = body["tensors"]["model.w"]["chunks"]
    listed[0] = chunk
    whole = Manifest(made.tensors, made.files, made.order).dump()
    old = json.dumps([(*c.box, int(c.file[-4]), c.start) for c in made.tensors["model.w"].chunks])
    return _sealed(whole.replace(old, json.dumps(listed) + more))


def _sealed(text: str) -> bytes:
    content = text.partition("\n")[2][:-2]
    return f'{{"sha256": "{hashlib.sha256(content.encode()).hexdigest()}",\n{content}}}\n'.encode()


@pytest.mark.parametrize(
    ("chunk", "more", "problem"),
    [
        ([[0, 0], [1, 5], 0, 1 << 40], "", "beyond the end of weights-00000.pt"),
        ([[0, 0], [1, 5], 0, -4], "", "start of model.w is -4"),
        ([[0, 0], [1, 5], 9, 0], "", "IndexError"),
        ([[0, 0], [1, 5], -1, 0], "", "file of model.w is -1"),
        ([[0, 0], [1, 4], 0, 0], "", "lacks elements"),
        ([[0, 0], [2, 5], 0, 0], "", "beyond the end|has twice"),
        ([[0, 0], [1, 6], 0, 0], "", "beyond the end|has a part"),
        ([[0, 0], [1, 5, 1], 0, 0], "", "has a part"),
        ([[0, 0.5], [1, 5], 0, 0], "", "offsets of model.w is 0.5"),
        ([[0, 1 << 70], [1, 5], 0, 0], "", "offsets of model.w"),
        ([[0, 0], [1, 5], 0], "", "has a chunk"),
        ([[0, 0], [1, 5], 0, 0], ", 1", "has a chunk None"),
        ([[0, 0], [1, 5], 0, 0], ",", "has a chunk None"),
    ],
)
def test_what_the_text_of_chunks_says_is_not_believed(chunk: list[Any], more: str, problem: str) -> None:
    assert len(manifest_reader.parsed(text_of([[0, 0], [1, 5], 0, 0]), "x").tensors["model.w"].chunks) == 2
    entry = manifest_reader.parsed(text_of(chunk, more), "manifest.json").tensors["model.w"]
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"manifest.json is malformed .*({problem})"):
            meeting(entry.chunks, [Box((0, 0), (1, 1))])


def looked_at(world: int) -> tuple[int, int]:
    """Texts of chunks that rank 1 of ``world`` parses to load its shards, and the chunks that are made of them."""
    specs = [ParamSpec.whole(f"w{number}", (2 * world, 8)) for number in range(12)]
    layouts = [plan_bucket(specs[first : first + 3], world) for first in range(0, len(specs), 3)]
    listed: dict[str, tuple[tuple[int, ...], list[Chunk]]] = {}
    for layout in layouts:
        for span in layout.spans:
            ends = {min(max(0, layout.shard(rank)[1] - span.lo), span.numel) for rank in range(world)}
            listed[span.name] = span.shape, cut(span.shape, sorted(ends - {0, span.numel}))
    read, numbers = parsed(manifest(listed)), mock.Mock(wraps=chunks._numbers)
    made = mock.Mock(wraps=Chunk)
    with mock.patch.object(chunks, "_numbers", numbers), mock.patch.object(chunks, "Chunk", made):
        for layout in layouts:
            for piece in layout.pieces(*layout.shard(1)):
                span = layout.spans[piece.index]
                found = meeting(read.tensors[f"model.{span.name}"].chunks, cut_range(span.shape, piece.lo, piece.hi))
                assert sum(chunk.box.numel for chunk in found) == piece.numel
    return numbers.call_count, made.call_count


def test_a_rank_parses_its_own_tensors_and_makes_its_own_chunks() -> None:
    assert looked_at(8) == looked_at(512) == (4, 4)
