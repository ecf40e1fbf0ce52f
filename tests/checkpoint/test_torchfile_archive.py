"""Streams that torch.load reads, as archives: records, blobs as files of their own, more than 4 GiB."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lt_zero.checkpoint.native.torchfile import TorchFile
from tests.support.torchfile_tools import DTYPES, SHAPES, Sink, Slice, same, some


def test_each_blob_is_a_file_of_its_own(tmp_path: Path) -> None:
    sink = Sink()
    file = TorchFile(sink, blobs=True)
    tensors = [some(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    stored = [file.add(tensor) for tensor in tensors]
    overhead = file.position - sum(tensor.nbytes for tensor in tensors)
    assert overhead < 1800 * len(tensors)
    file.finish(None)
    path = tmp_path / "file.distcp"
    path.write_bytes(sink.data)
    end = 0
    with open(path, "rb") as whole:
        for tensor, found in zip(tensors, stored, strict=True):
            offset, length = found.blob
            assert end <= offset, "blobs do not overlap"
            end = offset + length
            part = Slice(whole, offset, length)
            same(torch.load(part, weights_only=True), tensor)
            expected = io.BytesIO()
            torch.save(tensor, expected)
            names = zipfile.ZipFile(expected).namelist()
            assert zipfile.ZipFile(Slice(whole, offset, length)).namelist() == names
    assert end < len(sink.data)


def test_pickle_is_that_of_torch_save() -> None:
    for dtype in DTYPES:
        tensor, sink, expected = some(dtype, (2, 3)), Sink(), io.BytesIO()
        file = TorchFile(sink)
        file.finish(file.add(tensor))
        torch.save(tensor, expected)
        ours, theirs = zipfile.ZipFile(io.BytesIO(sink.data)), zipfile.ZipFile(expected)
        for record in ("data.pkl", "byteorder", "version", "data/0"):
            content = theirs.read(f"archive/{record}")
            if record != "data/0":
                assert ours.read(f"archive/{record}") == content
            else:
                assert content in sink.data


@pytest.mark.parametrize("blobs", [False, True])
def test_python_reads_the_directory(blobs: bool) -> None:
    sink = Sink()
    file = TorchFile(sink, blobs)
    stored = [file.add(torch.full((3,), float(number))) for number in range(3)]
    file.finish(stored)
    archive = zipfile.ZipFile(io.BytesIO(sink.data))
    data = [f"archive/data/{number}" for number in range(3)]
    assert archive.namelist() == [*data, "archive/data.pkl", "archive/byteorder", "archive/version"]
    for found, info in zip(stored, archive.infolist(), strict=False):
        header = sink.data[info.header_offset :]
        lengths = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
        extra = bytes(header[30 + lengths[0] : 30 + sum(lengths)])
        while extra:  # a chain of tag, length, content
            assert len(extra) >= 4
            extra = extra[4 + int.from_bytes(extra[2:4], "little") :]
        assert info.header_offset + 30 + sum(lengths) == found.start
    if not blobs:
        assert archive.testzip() is None


def test_checksums_of_torch_save_stay_on(tmp_path: Path) -> None:
    file = TorchFile(Sink(), blobs=True)
    file.finish(file.add(torch.rand(7, 11)))
    torch.save(torch.ones(3), tmp_path / "a.pt")
    assert zipfile.ZipFile(tmp_path / "a.pt").testzip() is None


def test_other_archive_tools_agree(tmp_path: Path) -> None:
    sink = Sink()
    file = TorchFile(sink)
    file.finish([file.add(torch.rand(1000)), file.add(torch.rand(3, 3))])
    (tmp_path / "file.zip").write_bytes(sink.data)
    with zipfile.ZipFile(tmp_path / "file.zip") as archive:
        assert archive.testzip() is None
        archive.extractall(tmp_path)
    assert (tmp_path / "archive/version").read_bytes() == b"3\n"


class Sparse:
    """Writes values of tensors as holes."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "wb")  # noqa: SIM115

    def __call__(self, part: bytes | Tensor) -> None:
        if isinstance(part, bytes):
            self.file.write(part)
        elif part.numel() > 1000:
            self.file.seek(part.numel(), 1)
        else:
            self.file.write(part.numpy().tobytes())


GIB = 1 << 30


@pytest.mark.parametrize("blobs", [pytest.param(False, marks=pytest.mark.slow), True])  # 8 GiB have a checksum
def test_more_than_4_gib(tmp_path: Path, blobs: bool) -> None:
    """A record, the offset of a record and the directory beyond 32 bits: in a file with holes."""
    sink = Sparse(tmp_path / "large.pt")
    file = TorchFile(sink, blobs)
    before = file.add(torch.arange(3.0))
    large = [file.add(torch.empty(size, dtype=torch.uint8)) for size in (2**32 - 1, 4 * GIB + 5)]  # not touched
    after = file.add(torch.arange(5, dtype=torch.int16))
    file.finish({"before": before, "large": large, "after": after})
    sink.file.close()
    assert (tmp_path / "large.pt").stat().st_size == file.position > 8 * GIB
    loaded = torch.load(tmp_path / "large.pt", weights_only=True, mmap=True)
    assert loaded["before"].tolist() == [0, 1, 2]
    assert loaded["after"].tolist() == [0, 1, 2, 3, 4]
    assert [tensor.numel() for tensor in loaded["large"]] == [2**32 - 1, 4 * GIB + 5]
    reader = torch._C.PyTorchFileReader(str(tmp_path / "large.pt"))
    for stored in (before, *large, after):
        assert reader.get_record_offset(f"data/{stored.key}") == stored.start
    with zipfile.ZipFile(tmp_path / "large.pt") as archive:
        assert archive.getinfo("archive/data/2").file_size == 4 * GIB + 5
        assert archive.getinfo("archive/data/3").header_offset > 8 * GIB
        assert archive.read("archive/version") == b"3\n"
    if blobs:
        with open(tmp_path / "large.pt", "rb") as whole:
            assert torch.load(Slice(whole, *after.blob), weights_only=True).tolist() == [0, 1, 2, 3, 4]
            for stored in large:
                part = Slice(whole, *stored.blob)
                assert torch.load(part, weights_only=True, map_location="meta").shape == stored.shape
                reader = torch._C.PyTorchFileReader(Slice(whole, *stored.blob))
                assert reader.get_record_offset("data/0") == stored.start - stored.blob[0]


@pytest.mark.slow
def test_more_than_65535_records() -> None:
    sink = Sink()
    file = TorchFile(sink)
    tensor = torch.ones(1)
    stored = [file.add(tensor) for _ in range(0x10001)]
    file.finish([stored[0], stored[-1]])
    assert [value.item() for value in sink.load()] == [1, 1]
    assert len(zipfile.ZipFile(io.BytesIO(sink.data)).namelist()) == 0x10001 + 3
