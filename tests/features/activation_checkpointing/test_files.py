"""Inputs of checkpointed modules that rest in files: used again, read ahead, damaged, on a disk that is full."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lt_zero.common import accelerator
from lt_zero.core.stores import direct_file
from lt_zero.core.stores.io_options import SwapError
from lt_zero.core.stores.store import CopyEvent
from lt_zero.core.stores.thread_pool import Transfer
from lt_zero.features.activation_checkpointing.stores import ActivationStore
from lt_zero.offload.copy_streams import CopyStream
from lt_zero.offload.swap_file import SwapFile
from tests.features.activation_checkpointing.store_tools import (
    CPU,
    NBYTES,
    WIDTH,
    blocks,
    forward,
    gradients,
    opened,
    rows,
    same,
)
from tests.support.offload_tools import change


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "_apart", True)


def test_files_are_used_again_and_removed(tmp_path: Path) -> None:
    store = opened("files", tmp_path)
    net = blocks(12)
    before = set[int]()
    for step in range(3):
        forward(net, rows(step), store).backward()
        store.end_backward()
        names = sorted(path.name for path in tmp_path.glob("lt_zero-*/activations-*"))
        inodes = {path.stat().st_ino for path in tmp_path.glob("lt_zero-*/activations-*")}
        assert len(names) == 5, "records double: 1, 1, 2, 4, 8"
        assert step == 0 or inodes == before
        before = inodes
    assert store.stats()["disk"] == 16 * NBYTES
    assert store.stats()["memory"] <= 5 * NBYTES, "buffers for what leaves and comes, not for all"
    for step in range(10):  # sizes that do not occur any more
        forward(net, rows(step, 200), store).backward()
        store.end_backward()
    assert store.stats()["disk"] == 16 * 200 * WIDTH * 4 // 4096 * 4096 + 16 * (-200 * WIDTH * 4 % 4096)
    store.close()
    assert not list(tmp_path.iterdir())


def _away(store: ActivationStore) -> list[object]:
    """Enough tensors that the first have left, each of its number."""
    packed = [store.pack(torch.full((2048,), float(number))) for number in range(10)]
    store.storage.end_pass()
    return packed


@pytest.mark.parametrize("apart", [True, False])
def test_bytes_that_changed_on_the_disk_are_nan_and_a_problem(
    apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "_apart", apart)
    store = opened("files", tmp_path)
    packed = _away(store)
    for path in tmp_path.glob("lt_zero-*/activations-1"):
        change(path, 100, b"\1\2\3")
    assert store.unpack(packed[9]).eq(9).all()
    assert store.problem is None
    assert store.unpack(packed[0]).isnan().all()
    assert isinstance(store.problem, SwapError)
    assert "activations-1" in str(store.problem)
    assert "checksum" in str(store.problem)
    assert store.unpack(packed[1]).eq(1).all()
    store.close()


@pytest.mark.parametrize("apart", [True, False])
def test_a_disk_that_is_full_or_fails_is_a_problem_and_no_loss(
    apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "_apart", apart)
    monkeypatch.setattr(direct_file, "free_bytes", lambda path: 3 * NBYTES)
    store, net = opened("files", tmp_path), blocks()
    forward(net, rows(1), store).backward()
    found = gradients(net)
    forward(net, rows(1)).backward()
    assert same(found, gradients(net)), "what found no file stays in memory"
    assert "Cannot create" in str(store.problem)
    assert f"with {4 * NBYTES} bytes" in str(store.problem) or f"with {2 * NBYTES}" in str(store.problem)
    assert "activations-" in str(store.problem)
    store.close()
    monkeypatch.undo()
    monkeypatch.setattr(accelerator, "_apart", apart)
    store = opened("files", tmp_path)

    def broken(*args: object) -> None:
        raise OSError(5, "broken")

    monkeypatch.setattr("lt_zero.core.stores.direct_file.write_some", broken)
    packed = _away(store)
    assert "Cannot write" in str(store.problem)
    for _ in range(2):
        assert all(store.unpack(one).eq(number).all() for number, one in enumerate(packed))
    store.close()
    assert not list(tmp_path.iterdir())


class _DeviceBehind(CopyStream):
    """Copies to a device that is behind the host: they run when the host waits for one, or at the end."""

    def __init__(self) -> None:
        super().__init__(CPU, late=True)

    def _begin(self, target: Tensor, source: Tensor, after: object) -> CopyEvent:
        copy = super()._begin(target, source, after)
        copy.wait = lambda: None  # type: ignore[method-assign]  # the device waits, the host does not
        copy.synchronize = partial(self.flush, copy)  # type: ignore[method-assign, arg-type]
        return copy


def test_a_buffer_is_not_read_into_before_its_copy_to_the_device_has_run(tmp_path: Path) -> None:
    store = opened("files", tmp_path)
    packed = _away(store)
    device = store.storage.to_device = _DeviceBehind()
    found = [store.unpack(one) for one in reversed(packed)]
    device.flush()
    assert [float(tensor.mean()) for tensor in found] == list(range(9, -1, -1))
    assert all(tensor.eq(tensor[0]).all() for tensor in found)
    store.close()


def test_a_path_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SwapError, match="is not a folder"):
        opened("files", tmp_path / "file")


def test_writes_go_on_beside_forward_and_reads_come_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "_apart", False)
    store = opened("files", tmp_path)
    go = threading.Event()
    events = list[object]()
    write, read = SwapFile._write_block, SwapFile.read

    def late(file: SwapFile, *args: object) -> None:
        assert go.wait(20)
        write(file, *args)  # type: ignore[arg-type]

    def noted(file: SwapFile, record: int, target: Tensor) -> object:
        events.append((file, record))
        return read(file, record, target)

    monkeypatch.setattr(SwapFile, "_write_block", late)
    monkeypatch.setattr(SwapFile, "read", noted)
    packed = [store.pack(torch.full((2048,), float(number))) for number in range(4)]
    assert store.unpack(packed[2]).eq(2).all(), "nobody waits for the disk: the buffer has it"
    go.set()
    packed += [store.pack(torch.full((2048,), float(number))) for number in range(4, 12)]
    records = [one.args[0].stored._record for one in packed]  # type: ignore[attr-defined]
    for number in reversed(range(12)):
        events.append(number)
        assert store.unpack(packed.pop()).eq(number).all()
    asked = [events.index(number) for number in range(12)]
    came = [[i for i, e in enumerate(events) if e == (r.group.file, r.index)] for r in records]
    assert [len(times) for times in came] == [1] * 8 + [0] * 4, "the last are still in their buffers"
    assert all(came[number][0] < asked[number] for number in range(8)), "before they are asked for"
    assert all(came[number][0] > asked[number + 3] for number in range(8)), "and not long before"
    store.close()


def test_a_wait_for_a_write_that_was_interrupted_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened("files", tmp_path)
    go = threading.Event()
    interrupted = list[object]()
    write, wait = SwapFile._write_block, Transfer.wait

    def late(file: SwapFile, *args: object) -> None:
        assert go.wait(20)
        write(file, *args)  # type: ignore[arg-type]

    def once(transfer: Transfer) -> None:
        if not interrupted:
            interrupted.append(transfer)
            raise KeyboardInterrupt
        wait(transfer)

    monkeypatch.setattr(SwapFile, "_write_block", late)
    monkeypatch.setattr(Transfer, "wait", once)
    packed = store.pack(torch.full((2048,), 1.0))
    with pytest.raises(KeyboardInterrupt):
        store.storage.end_pass()
    del packed
    threading.Timer(0.1, go.set).start()
    store.end_backward()
    assert go.is_set(), "the buffer is not given to others before it is written"
    assert store.problem is None
    store.close()
