"""Files with checksums per block: files and streams hold the same, and no buffer is lost when a write fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lt_zero.io import checked_file
from lt_zero.io.checked_file import BlockReader, Blocks, FileSink, Sink, StreamSink
from lt_zero.io.thread_pool import SwapError
from tests.support.offload_tools import noise


@pytest.mark.parametrize("copies", [False, True])
def test_a_stream_gets_the_bytes_and_checksums_of_a_file(
    tmp_path: Path, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_file, "STEP", 16384)
    blocks = Blocks(2)
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


def test_the_last_block_goes_back_if_it_cannot_be_written(tmp_path: Path) -> None:
    """Another file of the same threads would wait for its buffer without end."""
    blocks = Blocks(1)
    sink = FileSink(tmp_path / "file", blocks)
    sink.write(b"some")
    assert blocks.free.empty()
    blocks.pool.close()
    with pytest.raises(SwapError, match="closed"):
        sink.close()
    assert blocks.free.qsize() == 1
