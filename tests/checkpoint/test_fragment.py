"""Flat ranges as boxes, and directories that several ranks' fragments end up in."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from lt_zero.checkpoint.native import archive, directory, manifest_reader, plan, save
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.directory import PendingDirectory
from lt_zero.checkpoint.native.save import Bundle, DirectoryWriter
from lt_zero.common import accelerator
from lt_zero.common.boxes import Box, cut_range, flat_index
from lt_zero.core.engine.lazy_tensor import Fragment
from lt_zero.core.stores import block_reader, checked_file
from lt_zero.core.stores.checked_file import StagingRing

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def numbers_in(shape: tuple[int, ...], box: Box) -> list[int]:
    """The row-major numbers of a box's elements, in its own row-major order."""
    ranges = [range(o, o + s) for o, s in zip(*box, strict=True)]
    return [flat_index(shape, index) for index in itertools.product(*ranges)]


@given(SHAPES, st.data())
@settings(max_examples=150, deadline=None)
def test_boxes_cut_a_range_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    lo = data.draw(st.integers(0, numel))
    hi = data.draw(st.integers(lo, numel))
    largest = data.draw(st.none() | st.integers(1, max(1, numel)))
    found = cut_range(shape, lo, hi, largest)
    for offsets, sizes in found:
        assert len(offsets) == len(sizes) == len(shape)
        assert all(o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True))
    if numel == 0:
        assert found == [((0,) * len(shape), shape)], "an empty tensor is one empty box, for every rank"
        return
    parts = [numbers_in(shape, box) for box in found]
    assert all(parts), "no box is empty"
    # Each is contiguous, they come in order, none overlaps, and together they are the range.
    assert list(itertools.chain(*parts)) == list(range(lo, hi))
    assert len(cut_range(shape, lo, hi)) <= max(1, 2 * len(shape) - 1)
    if largest is not None:
        for box in cut_range(shape, lo, hi):
            axis = next((i for i, size in enumerate(box[1]) if size > 1), None)
            inside = set(numbers_in(shape, box))
            for part, elements in zip(found, parts, strict=True):
                if inside.issuperset(elements) and axis is not None:
                    assert len(elements) <= largest or part[1][axis] == 1, "only one dimension is cut"


@pytest.mark.parametrize(
    ("shape", "lo", "hi", "expected"),
    [
        ((), 0, 1, [((), ())]),
        ((), 0, 0, []),
        ((7,), 2, 5, [((2,), (3,))]),
        ((4, 3), 3, 9, [((1, 0), (2, 3))]),
        ((4, 3), 4, 5, [((1, 1), (1, 1))]),
        ((2, 2, 2), 1, 5, [((0, 0, 1), (1, 1, 1)), ((0, 1, 0), (1, 1, 2)), ((1, 0, 0), (1, 1, 1))]),
        ((0, 3), 0, 0, [((0, 0), (0, 3))]),
    ],
)  # fmt: skip
def test_boxes_of_known_ranges(shape: tuple[int, ...], lo: int, hi: int, expected: list[Box]) -> None:
    assert cut_range(shape, lo, hi) == expected


# ---- several ranks in one process ------------------------------------------------------------------------------------


def cut(value: Tensor, cuts: list[int], asked: list[int] | None = None) -> list[Fragment]:
    """One fragment for each rank."""

    def local(lo: int, hi: int) -> Callable[[], Tensor]:
        def get() -> Tensor:
            if asked is not None:
                asked.append(hi - lo)
            return value.reshape(-1)[lo:hi]

        return get

    ends = [0, *cuts, value.numel()]
    return [Fragment(local(a, b), tuple(value.shape), a, b, value.dtype) for a, b in itertools.pairwise(ends)]


def save_as_ranks(folder: Path, states: list[dict[str, Any]], meta: dict[str, Any]) -> None:
    """What ``write`` does on each rank, one rank after the other."""
    place = PendingDirectory.make(str(folder))
    writers = [DirectoryWriter(place, Bundle(state, meta, {"order": ()}), rank) for rank, state in enumerate(states)]
    parts = writers[0].divided([writer.own_parts() for writer in writers])
    writers[0].publish([writer.write(own) for writer, own in zip(writers, parts, strict=True)])


TENSORS = {
    "model.a": torch.randn(7, 5),
    "model.b": torch.randn(3, 4, 5).bfloat16(),
    "model.none": torch.empty(0, 3),
    "model.one": torch.randn(1),
    "model.scalar": torch.tensor(4.5),
    "model.long": torch.arange(11),
    "optimizer_0.state.a.exp_avg": torch.randn(7, 5, dtype=torch.float64),
    "optimizer_0.state.a.mask": torch.rand(13) > 0.5,
}


def _stage_as_from_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make saves copy tensors through two small host buffers."""
    for name in ("holds", "has_streams"):
        monkeypatch.setattr(accelerator, name, lambda of: True)
    for name in ("event", "current_stream"):
        monkeypatch.setattr(accelerator, name, mock.MagicMock())
    monkeypatch.setattr(accelerator, "register", lambda buffer: 0)
    monkeypatch.setattr(save, "StagingRing", partial(StagingRing, 64))


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("step", [None, 64])
def test_fragments_of_ranks_are_one_tensor(
    tmp_path: Path, ranks: int, step: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if step is not None:
        monkeypatch.setattr(plan, "LARGEST", step)  # bytes: large tensors are many boxes
    else:
        _stage_as_from_a_gpu(monkeypatch)
    random.seed(ranks)
    states: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for name, value in TENSORS.items():
        cuts = sorted(random.choices(range(value.numel() + 1), k=ranks - 1))
        for state, part in zip(states, cut(value, cuts), strict=True):
            state[name] = part
    states[0]["model.plain"] = torch.randn(4, 2).t()
    want = {**TENSORS, "model.plain": states[0]["model.plain"]}
    folder = tmp_path / "ckpt"
    save_as_ranks(folder, states, {"epoch": 3})

    opened = Archive(str(folder))
    assert opened.meta == {"epoch": 3}
    assert opened.verify() > 0
    for name, value in want.items():
        flat = value.reshape(-1)
        assert torch.equal(opened.elements(name, 0, value.numel()), flat), name
        for _ in range(20):
            lo, hi = sorted(random.choices(range(value.numel() + 1), k=2))
            assert torch.equal(opened.elements(name, lo, hi), flat[lo:hi]), (name, lo, hi)
    opened.close()

    empty = {name: torch.zeros_like(value) for name, value in want.items()}
    dcp.load(empty, storage_reader=FileSystemReader(folder), no_dist=True)
    for name, value in want.items():
        assert torch.equal(empty[name], value), name


@pytest.mark.parametrize("rows", [archive.ROWS, 40])
def test_boxes_of_ranks_are_one_tensor(tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns, uneven rows (one rank has none) and blocks of a tensor, each cut flat; read in boxes of all kinds."""
    random.seed(rows)
    monkeypatch.setattr(archive, "ROWS", rows)  # bytes: columns are copied of a few rows at a time
    wide, high, cube = torch.randn(6, 9), torch.randn(7, 3), torch.randn(3, 4, 5)
    cuts = {
        "model.wide": (wide, [Box((0, 0), (6, 4)), Box((0, 4), (6, 5))]),
        "model.high": (high, [Box((0, 0), (2, 3)), Box((2, 0), (0, 3)), Box((2, 0), (5, 3))]),
        "optimizer_0.state.cube.exp_avg": (cube, [Box((0, 0, 0), (3, 1, 5)), Box((0, 1, 0), (3, 3, 5))]),
    }
    states: list[dict[str, Any]] = [{} for _ in range(6)]
    for name, (value, boxes) in cuts.items():
        for number, box in enumerate(boxes):
            middle = box.numel // 3 + 1 if box.numel else 0
            for half, (lo, hi) in enumerate(((0, middle), (middle, box.numel))):
                part = box.of(value).reshape(-1)[lo:hi]
                fragment = Fragment(partial(part.view, -1), tuple(value.shape), lo, hi, value.dtype, box=box)
                states[2 * number + half][name] = fragment
    save_as_ranks(tmp_path / "ckpt", states, {})
    opened = Archive(str(tmp_path / "ckpt"))
    for name, (value, boxes) in cuts.items():
        assert torch.equal(opened.lazy(name).whole(), value), name
        every = [*boxes, Box.whole(tuple(value.shape))]
        for _ in range(30):
            ends = [sorted(random.choices(range(size + 1), k=2)) for size in value.shape]
            box = random.choice([Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends)), *every])
            lo, hi = sorted(random.choices(range(box.numel + 1), k=2))
            want = box.of(value).reshape(-1)[lo:hi]
            assert torch.equal(opened.elements(name, lo, hi, box), want), (name, lo, hi, box)
            assert torch.equal(opened.lazy(name).part(box).clone(), box.of(value)), (name, box)
    opened.close()
    found = {name: torch.zeros_like(value) for name, (value, _) in cuts.items()}
    dcp.load(found, storage_reader=FileSystemReader(tmp_path / "ckpt"), no_dist=True)
    for name, (value, _) in cuts.items():
        assert torch.equal(found[name], value), name


def test_files_longer_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums per block, blocks that tensors share, and reads that begin and end anywhere."""
    for module in (checked_file, block_reader, directory, manifest_reader):
        monkeypatch.setattr(module, "STEP", 16384)
    want = {f"model.{i}": torch.randn(n) for i, n in enumerate([5, 9000, 1, 4096, 30000, 0, 7])}
    states = [dict[str, Any](), dict[str, Any]()]
    for name, value in want.items():
        for state, part in zip(states, cut(value, [value.numel() // 3]), strict=True):
            state[name] = part
    save_as_ranks(tmp_path / "ckpt", states, {})
    opened = Archive(str(tmp_path / "ckpt"))
    assert max(len(record.sums) for record in opened.manifest.files.values()) > 4
    opened.verify()
    for name, value in want.items():
        for lo, hi in [(0, len(value)), (len(value) // 5, len(value)), (len(value) // 2, len(value) // 2 + 1)]:
            hi = min(hi, len(value))
            assert torch.equal(opened.elements(name, lo, hi), value[lo:hi]), (name, lo, hi)
    opened.close()


def test_a_fragment_has_no_values() -> None:
    (part,) = cut(torch.randn(3, 2), [])
    assert (tuple(part.shape), part.dtype, part.lo, part.hi) == ((3, 2), torch.float32, 0, 6)
    assert copy.deepcopy(part) is part
    assert "Fragment" in repr(part)
    for use in (lambda: part + 1, part.clone, lambda: part[0], part.sum, lambda: part.copy_(torch.zeros(3, 2))):
        with pytest.raises(RuntimeError, match="gathered"):
            use()
    for refuse in (lambda: torch.save({"a": part}, io.BytesIO()), lambda: pickle.dumps(part)):
        with pytest.raises(RuntimeError, match="gathered"):
            refuse()
