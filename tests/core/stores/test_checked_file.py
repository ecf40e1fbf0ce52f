"""Files with checksums per block: files and streams hold the same, and no buffer is lost when a write fails."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from lt_zero.common.errors import CheckpointError
from lt_zero.core.stores import block_reader, checked_file
from lt_zero.core.stores.block_reader import BlockReader
from lt_zero.core.stores.checked_file import FileSink, Sink, StreamSink, WriterPool
from tests.support.offload_tools import noise


def _set_step(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Let files have blocks of so many bytes."""
    for module in (checked_file, block_reader):
        monkeypatch.setattr(module, "STEP", nbytes)


@pytest.mark.parametrize("copies", [False, True])
def test_a_stream_gets_the_bytes_and_checksums_of_a_file(
    tmp_path: Path, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_step(monkeypatch, 16384)
    blocks = WriterPool(2)
    sinks: list[Sink] = [FileSink(tmp_path / "file", blocks, 100_000, copies=copies)]
    sinks.append(StreamSink((tmp_path / "stream").open("wb")))
    records = []
    for sink in sinks:
        for seed, size in enumerate([5, 40_000, 16384, 0, 16384 - 5, 3 * 16384, 9]):
            sink.write(noise(size, seed)[:size] if seed % 2 else bytes(noise(size, seed)[:size].tolist()))
        records.append(sink.close())
    blocks.close()
    assert records[0] == records[1]
    assert len(records[0].sums) == -(-records[0].nbytes // 16384)
    assert (tmp_path / "file").read_bytes() == (tmp_path / "stream").read_bytes()
    reader = BlockReader(str(tmp_path))
    reader.files = {"file": records[0]}
    reader.verify("file")
    out = torch.empty(60_000, dtype=torch.uint8)
    reader.read("file", 7, out)
    reader.close()
    assert bytes(out.tolist()) == (tmp_path / "file").read_bytes()[7 : 7 + 60_000]


def test_a_wait_for_early_bytes_leaves_later_ones_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, gate = WriterPool(2), threading.Event()
    sink, values = FileSink(tmp_path / "file", blocks), [noise(checked_file.STEP), noise(checked_file.STEP)]
    work, found = sink._write_block, []

    def write(number: int, block: torch.Tensor) -> None:
        assert number == 0 or gate.wait(20)
        work(number, block)

    monkeypatch.setattr(sink, "_write_block", write)
    for part in values:
        found.append(sink.position)
        sink.write(part)
    sink.wait_written(found[1])
    written = set(sink._sums)
    gate.set()
    sink.close()
    blocks.close()
    assert written == {0}


def test_blocks_are_read_to_any_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to a part of a tensor that begins between two words, as ranks that divide a tensor differently ask for."""
    _set_step(monkeypatch, 4096)
    values, blocks = noise(10 * 4096 + 5), WriterPool()
    sink = FileSink(tmp_path / "x", blocks)
    sink.write(values)
    reader = BlockReader(str(tmp_path))
    reader.files = {"x": sink.close()}
    blocks.close()
    for place in (0, 3, 8):
        for start, stop in ((0, 10 * 4096), (1, 9 * 4096), (4091, 10 * 4096 + 5), (4096, 9 * 4096)):
            whole = torch.zeros(values.numel() + 16, dtype=torch.uint8)
            reader.read("x", start, whole[place : place + stop - start])
            assert torch.equal(whole[place : place + stop - start], values[start:stop]), (place, start, stop)
            assert not whole[:place].any(), "nothing beside it"
            assert not whole[place + stop - start :].any()
    reader.close()


def test_the_last_block_goes_back_if_it_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file of the same threads would wait for its buffer without end."""
    blocks = WriterPool(1)
    sink = FileSink(tmp_path / "file", blocks)
    sink.write(b"some")
    assert blocks.free.empty()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="was forked"):
            sink.close()
    assert blocks.free.qsize() == 1


def test_a_small_file_is_written_where_direct_requests_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems accept the flag all the same."""
    real = os.pwritev

    def write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct requests")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", write)
    blocks = WriterPool(1)
    sink = FileSink(tmp_path / "file", blocks)
    sink.write(b"some")
    assert sink.close().nbytes == 4
    blocks.close()
    assert (tmp_path / "file").read_bytes() == b"some"


def _file_of_blocks(folder: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[BlockReader, torch.Tensor]:
    """A reader of a file of small blocks, and what is in the file."""
    _set_step(monkeypatch, 16384)
    blocks, values = WriterPool(1), noise(count * 16384)
    sink = FileSink(folder / "file", blocks)
    sink.write(values)
    reader = BlockReader(str(folder))
    reader.files = {"file": sink.close()}
    blocks.close()
    return reader, values


def test_an_error_is_told_though_a_block_before_it_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = checked_file._move
    taken: list[object] = []

    def late(job: tuple[Future[None], Callable[[], object]]) -> None:
        taken.append(job)
        while job is taken[0] and not job[0].cancelled():
            time.sleep(0.001)
        move(job)

    written, values = _file_of_blocks(tmp_path, 4, monkeypatch)
    monkeypatch.setattr(checked_file, "_move", late)
    reader = BlockReader(str(tmp_path))
    reader.files = written.files
    with (tmp_path / "file").open("r+b") as file:
        file.seek(16384 + 5)
        file.write(bytes([int(values[16384 + 5]) ^ 1]))
    with pytest.raises(CheckpointError, match="is damaged"):
        reader.read("file", 0, torch.empty_like(values))
    reader.close()


def test_after_an_error_no_further_block_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that threads read already are waited for, as they write to the caller's memory."""
    written, values = _file_of_blocks(tmp_path, 50, monkeypatch)
    begun: list[int] = []
    ended: list[int] = []

    def load(self: BlockReader, file: str, number: int, buffer: torch.Tensor) -> torch.Tensor:
        begun.append(number)
        if number > 0:
            time.sleep(0.02)
        ended.append(number)
        if number == 0:
            raise CheckpointError("broken on purpose")
        return buffer

    monkeypatch.setattr(BlockReader, "_load", load)
    with pytest.raises(CheckpointError, match="broken on purpose"):
        written.read("file", 0, torch.empty_like(values))
    assert len(begun) == len(ended) < 25
    written.close()


def test_a_file_that_was_opened_before_a_fork_is_read_in_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, values = _file_of_blocks(tmp_path, 4, monkeypatch)
    wanted = bytes(values.tolist())  # a child does not have the memory of ``values``
    child = os.fork()
    if child == 0:
        code = 1
        try:
            out = torch.empty(len(wanted), dtype=torch.uint8)
            reader.read("file", 0, out)
            code = 0 if bytes(out.tolist()) == wanted else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    reader.close()
