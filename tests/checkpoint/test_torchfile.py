"""Streams that torch.load reads: the values that come back, and what is refused."""

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

from lt_zero.checkpoint.native.torchfile import ALIGNMENT, TensorRecord, TorchFile
from tests.support.torchfile_tools import DTYPES, SHAPES, Sink, raw, same, some


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
    again = TensorRecord(first.start, first.blob, (2, 2), first.dtype, first.key)  # another view of the same values
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
    file = TorchFile(sink)
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


def test_a_class_that_only_adds_methods_is_saved_as_a_tensor() -> None:
    """Buffers of such classes (tv_tensors, MetaTensor) are in memory like others."""
    named = torch.arange(3.0).as_subclass(type("Named", (Tensor,), {}))
    sink = Sink()
    file = TorchFile(sink)
    file.finish([file.add(named), named])
    for loaded in sink.load():
        assert type(loaded) is Tensor
        assert torch.equal(loaded, torch.arange(3.0))


def test_a_tensor_in_parts() -> None:
    whole, parted = Sink(), Sink()
    values = torch.arange(24.0).view(2, 3, 4)
    file = TorchFile(whole)
    file.finish([file.add(values), file.add(torch.empty(0))])
    file = TorchFile(parted)
    flat = values.view(-1)
    parts = [flat[:5], flat[5:5], flat[5:21].view(4, 4), flat[21:]]
    file.finish([file.add_parts((2, 3, 4), torch.float32, iter(parts)), file.add_parts([0], torch.float32, [])])
    assert parted.data == whole.data
    with pytest.raises(ValueError, match="8 bytes.*not 12"):
        TorchFile(Sink()).add_parts((3,), torch.float32, [torch.ones(2)])
    with pytest.raises(ValueError, match="float64"):
        TorchFile(Sink()).add_parts((2,), torch.float32, [torch.ones(2, dtype=torch.float64)])


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
    own = {"__torch_dispatch__": classmethod(lambda cls, func, types, args=(), kwargs=None: args[0])}
    kept = torch.ones(2).as_subclass(type("Part", (Tensor,), own))  # as DTensor, whose memory has less than its shape
    for act in (file.add, lambda value: file.add_parts((2,), torch.float32, [value]), file.finish):
        with pytest.raises(ValueError, match="A .*Part cannot be saved: make it a plain tensor"):
            act(kept)
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
