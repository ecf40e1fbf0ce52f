"""Streams that torch.load reads: whole files, and each tensor on its own."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lt_zero.checkpoint.torchfile import ALIGNMENT, Stored, TorchFile

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]
SHAPES = [(), (0,), (1,), (7,), (2, 3), (0, 3), (3, 0, 2), (1, 1, 5), (2, 1, 3, 1)]


class Sink:
    """Collects a file; tells borrowed tensors from copies."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.addresses: list[int] = []

    def __call__(self, part: bytes | Tensor) -> None:
        if isinstance(part, Tensor):
            assert part.dtype == torch.uint8
            assert part.dim() == 1
            assert part.is_contiguous()
            self.addresses.append(part.data_ptr())
            part = part.numpy().tobytes()
        self.data += part

    def load(self, lo: int = 0, hi: int | None = None, **options: Any) -> Any:
        return torch.load(io.BytesIO(self.data[lo:hi]), weights_only=True, **options)


class Slice(io.RawIOBase):
    """A part of a file as a file, as torch.distributed.checkpoint makes them."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self.file, self.offset, self.length, self.at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.length)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        self.file.seek(self.offset + self.at)
        count = max(min(len(buffer), self.length - self.at), 0)
        got: int = self.file.readinto(memoryview(buffer)[:count])
        self.at += got
        return got


def raw(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(left: Tensor, right: Tensor) -> None:
    assert type(left) is Tensor
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert left.stride() == right.stride()
    assert not left.requires_grad
    assert raw(left) == raw(right)


def some(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(0, 2, (nbytes,)).to(torch.uint8)  # bytes that are a bool
    return values.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("blobs", [False, True])
@pytest.mark.parametrize("mmap", [False, True])
def test_every_dtype_and_shape_comes_back(tmp_path: Path, blobs: bool, mmap: bool) -> None:
    sink = Sink()
    file = TorchFile(sink, blobs)
    tensors = {f"{dtype}{shape}": some(dtype, shape) for dtype in DTYPES for shape in SHAPES}
    stored = {name: file.add(tensor) for name, tensor in tensors.items()}
    file.finish(stored)
    assert file.position == len(sink.data)
    path = tmp_path / "file.pt"
    path.write_bytes(sink.data)
    loaded = torch.load(path, weights_only=True, mmap=mmap)
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        same(loaded[name], tensor)
        found = stored[name]
        assert found.nbytes == tensor.nbytes
        assert found.start % ALIGNMENT == 0
        assert sink.data[found.start : found.start + found.nbytes] == raw(tensor)


@pytest.mark.parametrize("checksums", [False, True])
def test_each_blob_is_a_file_of_its_own(tmp_path: Path, checksums: bool) -> None:
    sink = Sink()
    file = TorchFile(sink, blobs=True, checksums=checksums)
    tensors = [some(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    stored = [file.add(tensor) for tensor in tensors]
    overhead = file.position - sum(tensor.nbytes for tensor in tensors)
    assert overhead < 1100 * len(tensors)
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
            inner = zipfile.ZipFile(Slice(whole, offset, length))
            names = {"archive/data.pkl", "archive/byteorder", "archive/version", "archive/data/0"}
            assert set(inner.namelist()) == names
            if checksums:
                assert inner.testzip() is None
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


def test_writes_borrow_memory() -> None:
    sink, tensor, parameter = Sink(), torch.ones(5), nn.Parameter(torch.ones(3, 3))
    file = TorchFile(sink, blobs=True)
    file.finish([file.add(tensor), file.add(parameter)])
    assert sink.addresses == [tensor.data_ptr(), parameter.data_ptr()]
    assert sink.data[:4] == b"PK\3\4"
    assert [type(value) for value in sink.load()] == [Tensor, Tensor]


def test_one_tensor_in_two_places_is_shared() -> None:
    sink = Sink()
    file = TorchFile(sink)
    first, other = file.add(torch.arange(4.0)), file.add(torch.arange(4.0))
    again = Stored(first.start, first.blob, (2, 2), first.dtype, first.key)  # another view of the same values
    file.finish({"a": first, "nest": [first, (again,)], "b": other})
    loaded = sink.load()
    loaded["a"].fill_(7)
    assert loaded["nest"][0].tolist() == [7] * 4
    assert loaded["nest"][1][0].tolist() == [[7, 7], [7, 7]]
    assert loaded["b"].tolist() == [0, 1, 2, 3]
    assert sink.data.count(raw(torch.arange(4.0))) == 2


def test_hooks_of_loaded_tensors_are_their_own() -> None:
    sink = Sink()
    file = TorchFile(sink)
    file.finish([file.add(torch.ones(2)), file.add(torch.ones(2))])
    left, right = (tensor.requires_grad_() for tensor in sink.load())
    left.register_hook(lambda grad: grad * 100)
    right.sum().backward()
    assert right.grad.tolist() == [1, 1]


def test_tensors_among_the_values() -> None:
    sink = Sink()
    file = TorchFile(sink, checksums=True)
    stored = file.add(torch.zeros(2))
    step = torch.tensor(3.0)
    values = {
        "weight": stored,
        "steps": [step, step],
        "view": torch.arange(6.0).reshape(2, 3).t(),
        "conj": torch.tensor([1 + 2j]).conj(),
        "parameter": nn.Parameter(torch.ones(2)),
        "buffer": nn.Buffer(torch.ones(2)),
    }
    file.finish(values)
    loaded = sink.load()
    assert loaded["steps"][0] is loaded["steps"][1]
    assert loaded["view"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert loaded["conj"].tolist() == [1 - 2j]
    same(loaded["parameter"], torch.ones(2))
    same(loaded["buffer"], torch.ones(2))
    assert zipfile.ZipFile(io.BytesIO(sink.data)).testzip() is None


@pytest.mark.parametrize("checksums", [False, True])
def test_a_tensor_in_parts(checksums: bool) -> None:
    whole, parted = Sink(), Sink()
    values = torch.arange(24.0).view(2, 3, 4)
    file = TorchFile(whole, blobs=True, checksums=checksums)
    file.finish([file.add(values), file.add(torch.empty(0))])
    file = TorchFile(parted, blobs=True, checksums=checksums)
    flat = values.view(-1)
    parts = [flat[:5], flat[5:5], flat[5:21].view(4, 4), flat[21:]]
    file.finish([file.add_parts((2, 3, 4), torch.float32, iter(parts)), file.add_parts([0], torch.float32, [])])
    assert parted.data == whole.data
    with pytest.raises(ValueError, match="8 bytes.*not 12"):
        TorchFile(Sink()).add_parts((3,), torch.float32, [torch.ones(2)])
    with pytest.raises(ValueError, match="float64"):
        TorchFile(Sink()).add_parts((2,), torch.float32, [torch.ones(2, dtype=torch.float64)])


def test_python_reads_the_directory() -> None:
    sink = Sink()
    file = TorchFile(sink, blobs=True)
    stored = [file.add(torch.full((3,), float(number))) for number in range(3)]
    file.finish(stored)
    archive = zipfile.ZipFile(io.BytesIO(sink.data))
    data = [f"archive/data/{number}" for number in range(3)]
    assert archive.namelist() == [*data, "archive/data.pkl", "archive/byteorder", "archive/version"]
    assert archive.testzip() == "archive/data/0", "values have no checksum unless asked for"
    for info in archive.infolist():
        header = sink.data[info.header_offset :]
        lengths = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
        extra = bytes(header[30 + lengths[0] : 30 + sum(lengths)])
        while extra:  # a chain of tag, length, content
            assert len(extra) >= 4
            extra = extra[4 + int.from_bytes(extra[2:4], "little") :]


def test_other_archive_tools_agree(tmp_path: Path) -> None:
    sink = Sink()
    file = TorchFile(sink, blobs=True, checksums=True)
    file.finish([file.add(torch.rand(1000)), file.add(torch.rand(3, 3))])
    (tmp_path / "file.zip").write_bytes(sink.data)
    with zipfile.ZipFile(tmp_path / "file.zip") as archive:
        assert archive.testzip() is None
        archive.extractall(tmp_path)
    assert (tmp_path / "archive/version").read_bytes() == b"3\n"


def test_empty_file() -> None:
    sink = Sink()
    TorchFile(sink).finish({})
    assert sink.load() == {}


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(min_size=1)  # torch.load does not take b""
    | st.sampled_from(DTYPES[:13]).map(lambda dtype: ("tensor", dtype)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=25,
)


@settings(max_examples=40, deadline=None)
@given(plain, st.booleans())
def test_nested_values(value: Any, blobs: bool) -> None:
    sink = Sink()
    file = TorchFile(sink, blobs)
    expected: list[Tensor] = []

    def put(node: Any) -> Any:
        if isinstance(node, tuple) and len(node) == 2 and node[0] == "tensor":
            expected.append(some(node[1], SHAPES[len(expected) % len(SHAPES)]))
            return file.add(expected[-1])
        if isinstance(node, dict):
            return type(node)((key, put(inner)) for key, inner in node.items())
        return type(node)(put(inner) for inner in node) if isinstance(node, list | tuple) else node

    found: list[Tensor] = []

    def compare(old: Any, new: Any) -> None:
        if isinstance(new, Tensor):
            found.append(new)
            return
        assert type(old) is type(new)
        if isinstance(old, list | tuple):
            assert len(old) == len(new)
            for one, other in zip(old, new, strict=True):
                compare(one, other)
        elif isinstance(old, dict):
            assert list(old) == list(new)
            for key in old:
                compare(old[key], new[key])
        else:
            assert old == new

    file.finish(put(value))
    compare(value, sink.load())
    for one, other in zip(found, expected, strict=True):
        same(one, other)


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


@pytest.mark.parametrize(
    ("blobs", "checksums"), [(False, False), (True, False), pytest.param(True, True, marks=pytest.mark.slow)]
)
def test_more_than_4_gib(tmp_path: Path, blobs: bool, checksums: bool) -> None:
    """A record, the offset of a record and the directory beyond 32 bits: in a file with holes."""
    sink = Sparse(tmp_path / "large.pt")
    file = TorchFile(sink, blobs, checksums)
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


def test_refuses() -> None:
    file = TorchFile(Sink(), blobs=True)
    with pytest.raises(ValueError, match=r"contiguous.*\(3, 2\).*\(1, 3\)"):
        file.add(torch.ones(2, 3).t())
    with pytest.raises(ValueError, match="meta"):
        file.add(torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match="sparse_coo"):
        file.add(torch.ones(2).to_sparse())
    with pytest.raises(ValueError, match="conjugated"):
        file.add(torch.ones(2, dtype=torch.complex64).conj())
    with pytest.raises(ValueError, match="20000 dimensions"):
        file.add(torch.ones([1] * 20000))
    other = TorchFile(Sink())
    other.add(torch.ones(100))
    stranger = other.add(torch.ones(1))
    with pytest.raises(ValueError, match="another file"):
        file.finish(stranger)
    with pytest.raises(ValueError, match="sparse_coo"):
        file.finish(torch.ones(2).to_sparse())
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        file.finish({"loss": lambda: 0})
    file.finish(file.add(torch.ones(1)))
    with pytest.raises(ValueError, match="finished"):
        file.add(torch.ones(1))
    with pytest.raises(ValueError, match="finished"):
        file.finish(None)
